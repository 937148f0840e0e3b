"""Judging on d_n, at the best temperature, averaged over rounds; what a comparison makes of it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import metabayfl as mb
from federations import bits, federate, network, train
from metabayfl import comparison
from metabayfl.engine.scores import coolest
from metabayfl.likelihood import TEMPERATURES, Categorical, Gaussian
from metabayfl.options import InputError
from metabayfl.store import RunDirectory

ON_DN: dict[str, Any] = {"eval": {"every": 1, "samples": 2, "on_dn": True}, "select": {"held_out": True}}


def views(path: Path, round_: int) -> dict[str, Any]:
    events = RunDirectory(path).events()
    found: dict[str, Any] = next(e["metrics"] for e in events if e["event"] == "round" and e["round"] == round_)
    return found


class TestTemperature:
    def test_logits_that_are_twice_too_sure_want_two(self) -> None:
        """Labels are drawn from the softmax of half the logits."""
        rng = torch.Generator().manual_seed(0)
        logits = 4 * torch.randn(20_000, 3, generator=rng)
        y = (logits / 2).softmax(1).multinomial(1, generator=rng).squeeze(1)
        losses = Categorical(3).by_temperature(logits[None], y)
        assert coolest(losses) == pytest.approx(2.0, rel=0.1)
        assert len(losses) == len(TEMPERATURES)
        assert 1.0 in TEMPERATURES

    def test_values_have_none(self) -> None:
        assert coolest(Gaussian(1.0).by_temperature(torch.zeros(1, 5, 1), torch.zeros(5))) is None


class TestViews:
    def test_d_n_is_judged_if_it_is_asked_for_and_held_out(self, tmp_path: Path) -> None:
        train(tmp_path / "yes", **ON_DN)
        assert {"G/D", "P/D"} <= views(tmp_path / "yes", 2).keys()
        assert not any(view.endswith("/T") for view in views(tmp_path / "yes", 2))
        train(tmp_path / "no", select={"held_out": False}, eval=ON_DN["eval"])
        assert views(tmp_path / "no", 3).keys() == {"G/G", "G/L", "P/L"}

    def test_the_global_temperature_is_one_number_and_helps_on_d_n(self, tmp_path: Path) -> None:
        train(tmp_path / "run", **ON_DN)
        found = views(tmp_path / "run", 3)["G/G"]
        assert found["temperature"]["value"] in [pytest.approx(value, rel=1e-3) for value in TEMPERATURES]
        assert math.isfinite(found["scaled_nll"]["value"])

    def test_training_does_not_depend_on_what_is_judged(self, tmp_path: Path) -> None:
        train(tmp_path / "plain", select={"held_out": True})
        train(tmp_path / "judged", average=0.5, **ON_DN)
        assert bits(tmp_path / "judged") == bits(tmp_path / "plain")

    def test_a_client_without_d_n_does_not_count_there(self, tmp_path: Path) -> None:
        """Pooled data lie with client 0: the others have nothing but their tests."""
        train(tmp_path / "run", mb.Central(epochs=1), **ON_DN)
        scaled, plain = (views(tmp_path / "run", 3)["P/L"][name] for name in ("scaled_nll", "nll"))
        assert scaled["mean"] > 0.1 * plain["mean"]


class TestAverage:
    def test_it_is_the_mean_until_the_share_is_reached(self, tmp_path: Path) -> None:
        models = []
        for until in (1, 2, 3):
            train(tmp_path / "run", average=0.4, until=until)
            checkpoint = RunDirectory(tmp_path / "run").checkpoint()
            assert checkpoint is not None
            models.append(checkpoint.server["mu"])
        wanted = 0.6 * (models[0] + models[1]) / 2 + 0.4 * models[2]
        torch.testing.assert_close(checkpoint.averaged["mu"], wanted)
        assert "A/G" not in views(tmp_path / "run", 1)
        assert "A/L" in views(tmp_path / "run", 2)

    def test_it_predicts(self, tmp_path: Path) -> None:
        federate(tmp_path / "run", average=0.5)
        run = mb.load(tmp_path / "run", model=network())
        x = torch.randn(5, 4)
        assert run.predict(x, averaged=True).probs.shape == (5, 3)  # type: ignore[union-attr]
        assert not torch.equal(run.model(averaged=True)["mu"], run.model()["mu"])

    def test_a_run_without_one_says_so(self, tmp_path: Path) -> None:
        federate(tmp_path / "run")
        with pytest.raises(InputError, match=r"has no averaged model: it is made with average = 0.15"):
            mb.load(tmp_path / "run", model=network()).model(averaged=True)

    def test_there_is_none_where_there_is_no_global_model(self, tmp_path: Path) -> None:
        train(tmp_path / "run", mb.FedAvg(epochs=1, batchnorm="local"), average=0.5)
        assert not any(view.startswith("A") for view in views(tmp_path / "run", 2))


class TestStopping:
    @staticmethod
    def event(round_: int, loss: float, accuracy: float, whose: str = "G") -> dict[str, Any]:
        metrics = {f"{whose}/D": {"nll": {"weighted": loss}}, f"{whose}/G": {"accuracy": {"value": accuracy}}}
        return {"event": "round", "round": round_, "metrics": metrics}

    def test_the_round_is_chosen_by_d_n_not_by_the_test(self) -> None:
        events = [self.event(1, 2.0, 0.5), self.event(2, 1.0, 0.4), self.event(3, 1.5, 0.6)]
        row = comparison.row_of("fedavg", 0, "run", events)
        assert row is not None
        assert (row["G/G accuracy"], row["G/G accuracy stopped"], row["G stop round"]) == (0.6, 0.4, 2)

    def test_each_kind_of_model_is_stopped_by_its_own_losses(self) -> None:
        events = [self.event(1, 2.0, 0.5), self.event(2, 1.0, 0.4)]
        for event, loss in zip(events, (0.1, 0.2), strict=True):
            event["metrics"] |= self.event(0, loss, 0.9, whose="A")["metrics"]
        row = comparison.row_of("fedavg", 0, "run", events)
        assert row is not None
        assert (row["G stop round"], row["A stop round"]) == (2, 1)

    def test_tables_beside_the_main_one_come_with_the_numbers(self, tmp_path: Path) -> None:
        train(tmp_path / "run", average=0.5, **ON_DN)
        row = comparison.row_of("fedavg", 0, "run", list(RunDirectory(tmp_path / "run").events()))
        assert row is not None
        titles = list(comparison.besides(comparison.summarise([row])))
        assert len(titles) == 3
        assert "stopped at the lowest NLL on d_n" in titles
        bare = {name: value for name, value in row.items() if "stopped" not in name and not name.startswith("A/")}
        assert comparison.besides(comparison.summarise([bare])) == {}
        json.dumps(row)


def test_a_staged_round_keeps_its_average_through_an_interruption(tmp_path: Path) -> None:
    train(tmp_path / "whole", average=0.4)
    for until in (1, 2, 3):
        train(tmp_path / "pieces", average=0.4, until=until)
    averages = [RunDirectory(tmp_path / name).path / "averaged.safetensors" for name in ("whole", "pieces")]
    assert averages[0].read_bytes() == averages[1].read_bytes()
