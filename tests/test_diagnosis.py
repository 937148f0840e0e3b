"""A posterior that says nothing is named, where a user looks: in Python, on the command line and in a report."""

import warnings
from pathlib import Path
from typing import Any

import pytest

import metabayfl as mb
from federations import federation, network
from metabayfl.cli import main
from metabayfl.diagnosis import TO_POINT, TO_PRIOR, diagnose
from metabayfl.report.notes import notes
from metabayfl.report.runs import by_label, read_runs

METHOD = {"prior": "fixed", "initial_sigma": 0.02}
DEMO = str(Path(__file__).parents[1] / "configs" / "demo.toml")


def report(client: int, round_: int = 1, **changes: Any) -> dict[str, Any]:
    about = {"event": "client", "client": client, "round": round_, "noisy_weights": 100.0, "kl": 50.0}
    return about | {"sigma": 0.05, "prior_sigma": 0.1} | changes


class TestDiagnose:
    def test_nothing_to_say(self) -> None:
        assert diagnose([], METHOD) == []
        assert diagnose([report(0), report(1)], METHOD) == []
        assert diagnose([{"event": "round", "round": 1}, {"event": "client", "round": 1, "nll": 1.0}], METHOD) == []

    def test_half_of_the_clients_are_needed(self) -> None:
        one, others = report(0, kl=0.9), [report(client) for client in (1, 2)]
        assert diagnose([one, *others], METHOD) == []
        assert diagnose([one, others[0]], METHOD) == [f"in round 1 the posterior of 1 of 2 clients has {TO_PRIOR}"]

    def test_only_the_last_round_counts(self) -> None:
        assert diagnose([report(0, kl=0.9), report(0, round_=2)], METHOD) == []
        assert len(diagnose([report(0), report(0, round_=2, kl=0.9)], METHOD)) == 1

    def test_a_point_is_measured_by_the_prior_or_by_the_start(self) -> None:
        assert diagnose([report(0, sigma=9e-4)], METHOD) == [
            f"in round 1 the posterior of 1 of 1 clients has {TO_POINT}"
        ]
        received = METHOD | {"prior": "global"}
        assert diagnose([report(0, sigma=9e-4, kl=0.0)], received) == []
        assert len(diagnose([report(0, sigma=1.9e-4)], received)) == 1


def test_python_warns_and_a_sound_posterior_does_not() -> None:
    heavy = mb.BayFL(kl_weight=1e4, warm_up=0, kl="client", optimiser="adam", rate=0.05)
    with pytest.warns(UserWarning, match=r"in round 20 the posterior of \d of \d clients has collapsed to the prior"):
        mb.federate(network(), federation(), heavy, rounds=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mb.federate(network(), federation(), mb.BayFL(), rounds=1)


def test_the_command_line_and_the_report_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["optimiser=adam", "rate=0.05", "kl_weight=1e4", "warm_up=0", "kl=client"]
    changes = [part for option in options for part in ("--set", f"method.{option}")]
    assert main(["run", DEMO, "--set", "rounds=6", *changes, "--out", str(tmp_path / "run")]) == 0
    assert "metabayfl: warning: in round 6 the posterior of 5 of 5 clients has collapsed" in capsys.readouterr().err
    found = notes(by_label(read_runs([tmp_path / "run"])))
    assert any("bayfl seed 0: in round 6 the posterior of 5 of 5 clients has collapsed" in note for note in found)
