"""Choosing rates: the winner's trial continued is training anew, bit for bit; the guards do what they say."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import metabayfl as mb
from metabayfl.engine.local import TooFewUpdates
from metabayfl.likelihood import Categorical, Gaussian
from metabayfl.methods.base import Method, make_task, model_of
from metabayfl.methods.guard import Guard
from metabayfl.methods.meta_bayfl import THE_PAPER
from metabayfl.methods.rate_selection import RateSelection
from metabayfl.methods.scoring import shifted_losses
from metabayfl.methods.trials import Trial, is_worse, standard_error, stop_losers
from metabayfl.randomness import keyed_globals
from metabayfl.types import Context, Fit, Params, TrainData, Update


class PlainMetaFL(mb.MetaFL):
    """Choosing rates and nothing else: what FedAvg does with the rate that is chosen."""

    class_frequencies: bool = False


PAIRS = [(mb.MetaBayFL, mb.BayFL), (PlainMetaFL, mb.FedAvg)]
pairs = pytest.mark.parametrize(("selecting", "fixed"), PAIRS, ids=["bayesian", "plain"])
optimisers = pytest.mark.parametrize(
    "options",
    [{"optimiser": "adam"}, {"optimiser": "sgd", "momentum": 0.9, "weight_decay": 1e-3}],
    ids=["adam", "sgd"],
)


def network() -> nn.Module:
    with keyed_globals("net"):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def client_data(samples: int = 50, select: int = 20) -> TrainData:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(samples + select, 4, generator=rng)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    return TrainData(x[:samples], y[:samples], x[samples:], y[samples:], batch_size=8)


def take_part(method: Method, data: TrainData, **server: Tensor) -> tuple[Fit, Params]:
    ctx = Context(
        make_task(method, network(), Categorical(3)), seed=3, round=1, rounds=4, client=2, clients={2: len(data)}
    )
    down = method.init_server(ctx) | server
    with keyed_globals("fit"):
        return method.fit(down, {}, data, ctx), down


def same(one: Params, two: Params) -> bool:
    """Whether two payloads hold the same model, to the bit."""
    one, two = model_of(one), model_of(two)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pairs
@optimisers
class TestContinuing:
    def test_one_candidate_is_the_method_with_a_fixed_rate(
        self, selecting: type[RateSelection], fixed: type[Method], options: dict[str, Any]
    ) -> None:
        data = client_data()
        chosen, _ = take_part(selecting(rates=(0.01,), epochs=2, keep_better=False, **options), data)
        trained, _ = take_part(fixed(rate=0.01, epochs=2, **options), data)
        assert same(chosen.update.payload, trained.update.payload)
        for name in ("nll", "rate", "steps"):
            assert chosen.update.metrics[name] == trained.update.metrics[name]

    def test_the_winner_of_several_is_too(
        self, selecting: type[RateSelection], fixed: type[Method], options: dict[str, Any]
    ) -> None:
        """Dropout, BatchNorm and weight noise: what other trials did in between leaves no trace."""
        data = client_data()
        rates = (1e-4, "0.02/sqrt(k)", 3e-3)
        chosen, _ = take_part(selecting(rates=rates, epochs=2, guard=False, keep_better=False, **options), data)
        trained, _ = take_part(fixed(rate=chosen.update.metrics["rate"], epochs=2, **options), data)
        assert same(chosen.update.payload, trained.update.payload)
        assert sum(name.startswith("trial_nll.") for name in chosen.update.metrics) == 3


class TestChoice:
    def test_worse_means_beyond_noise(self) -> None:
        before = torch.zeros(100)
        noise = torch.randn(100, generator=torch.Generator().manual_seed(0))
        assert not is_worse(before + 0.1 * (noise - noise.mean()) / noise.std() + 0.019, before)
        assert is_worse(before + 0.1 * (noise - noise.mean()) / noise.std() + 0.021, before)


class TestGuards:
    @pairs
    def test_if_all_rates_diverge_the_received_model_stays(
        self, selecting: type[RateSelection], fixed: type[Method]
    ) -> None:
        fit, down = take_part(selecting(rates=(1e30, 1e31), optimiser="sgd", epochs=1), client_data())
        assert fit.update.metrics["diverged"] == 1
        assert same(fit.update.payload, down)

    def test_a_model_that_got_worse_on_d_n_is_not_sent(self) -> None:
        """Training labels that contradict d_n."""
        data = client_data(200, 100)
        wrong = TrainData(data.x, 2 - data.y, data.select_x, data.select_y, data.batch_size)
        fit, down = take_part(mb.MetaFL(rates=(0.01,), epochs=5), wrong)
        found = fit.update.metrics
        assert found["rejected"] == 1
        assert found["trained_nll"] > found["incoming_nll"]
        assert torch.equal(fit.update.payload["mu"], down["mu"])
        stubborn, _ = take_part(mb.MetaFL(rates=(0.01,), epochs=5, keep_better=False), wrong)
        assert not torch.equal(stubborn.update.payload["mu"], down["mu"])

    def test_rates_above_the_cap_are_not_tried(self) -> None:
        guard = torch.tensor([2e-3], dtype=torch.float64)
        fit, _ = take_part(mb.MetaFL(rates=(1e-3, 1e-2)), client_data(), guard=guard)
        assert {n for n in fit.update.metrics if n.startswith("trial_nll")} == {"trial_nll.0.001"}
        guard = torch.tensor([1e-9], dtype=torch.float64)
        fit, _ = take_part(mb.MetaFL(rates=(1e-3, 1e-2)), client_data(), guard=guard)
        assert fit.update.metrics["rate"] == 1e-3

    @staticmethod
    def after_round(method: RateSelection, guard: list[float], change: float, error: float = 0.1) -> Params:
        """The server's state after a round in which the clients reported a change of their losses."""
        ctx = Context(make_task(method, network(), Categorical(3)), round=1)
        server = method.init_server(ctx)
        server |= {"before.mu": server["mu"] - 1, "guard": torch.tensor(Guard(*guard, 1e-2), dtype=torch.float64)}
        payload = {"mu": server["mu"] + 1, "buffers": server["buffers"], "evidence": server["evidence"]}
        known = {"incoming_score": 2.0, "change": change, "change_error": error}
        reports = [known, known, {"incoming_nll": 2.0}]
        return method.aggregate(server, [Update(payload, 1.0, report) for report in reports], ctx)

    def test_an_average_that_got_much_worse_is_taken_back_and_the_largest_rate_halved(self) -> None:
        method = mb.MetaFL(rates=(1e-3, 1e-2))
        start = make_task(method, network(), Categorical(3)).initial()["mu"]
        bad = self.after_round(method, [1e-2, 1e-2], change=0.2)
        assert torch.equal(bad["mu"], start - 1)
        assert torch.equal(bad["before.mu"], start)
        assert bad["guard"][:2].tolist() == [5e-3, 5e-3]
        for change, error in ((0.12, 0.1), (0.05, 0.001)):  # within noise; beyond it, but less than 3 %
            kept = self.after_round(method, [1e-2, 1e-2], change, error)
            assert torch.equal(kept["mu"], start + 1)
            assert kept["guard"][:2].tolist() == [1e-2, 1e-2]
        off = self.after_round(mb.MetaFL(rates=(1e-3, 1e-2), guard=False), [1e-2, 1e-2], change=0.2)
        assert torch.equal(off["mu"], start + 1)

    def test_the_largest_rate_grows_while_models_get_better_up_to_a_ceiling_that_rises_slowly(self) -> None:
        method = mb.MetaFL(rates=(1e-3, 1e-2))
        assert self.after_round(method, [1e-3, 1e-2], -0.2)["guard"][:2].tolist() == pytest.approx([2e-3, 1e-2])
        assert self.after_round(method, [1e-3, 1e-2], -0.1)["guard"][:2].tolist() == pytest.approx([1e-3, 1e-2])
        assert self.after_round(method, [5e-3, 5e-3], -0.2)["guard"][:2].tolist() == pytest.approx([5e-3, 5.25e-3])

    def test_it_starts_a_third_of_the_way_up(self) -> None:
        ctx = Context(make_task(mb.MetaFL(), network(), Categorical(3)))
        assert mb.MetaFL().init_server(ctx)["guard"][:2].tolist() == [1e-2, 3e-1]
        assert mb.MetaFL(guard=False).init_server(ctx)["guard"][:2].tolist() == [3e-1, 3e-1]

    def test_clients_report_how_their_loss_changed_sample_by_sample(self) -> None:
        data = client_data()
        first, down = take_part(mb.MetaFL(), data)
        assert "change" not in first.update.metrics
        method = mb.MetaFL()
        ctx = Context(make_task(method, network(), Categorical(3)), seed=3, round=2, client=2, clients={2: len(data)})
        moved = down | {"mu": down["mu"] + 0.1}
        with keyed_globals("fit"):
            second = method.fit(moved, first.state, data, ctx)
        score = second.state["seen.losses"] - first.state["seen.losses"]
        assert second.update.metrics["change"] == pytest.approx(score.mean().item())
        assert second.update.metrics["change_error"] == pytest.approx(standard_error(score))


class TestLosses:
    def test_classes(self) -> None:
        outputs = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
        y = torch.tensor([0, 1, 2, 3, 0])
        likelihood = Categorical(4)
        assert likelihood.losses(outputs, y).mean().item() == pytest.approx(likelihood.measure(outputs, y)["nll"])

    @pytest.mark.parametrize("shape", [(3, 5, 2), (3, 5)])
    def test_regression(self, shape: tuple[int, ...]) -> None:
        outputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        y = torch.randn(shape[1:], generator=torch.Generator().manual_seed(1))
        likelihood = Gaussian(0.7)
        assert likelihood.losses(outputs, y).mean().item() == pytest.approx(likelihood.measure(outputs, y)["nll"])


@pairs
def test_a_federation_learns_with_the_same_bits_for_any_number_of_workers(
    selecting: type[RateSelection], fixed: type[Method], tmp_path: Path
) -> None:
    x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] + x[:, 1] > 0).long()
    fed = mb.Federation.from_arrays([(x[:200], y[:200]), (x[200:], y[200:])])
    with keyed_globals("net"):
        model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    found = [mb.federate(model, fed, selecting(epochs=3), rounds=9, workers=w, out=tmp_path / str(w)) for w in (1, 2)]
    assert (tmp_path / "1/model.safetensors").read_bytes() == (tmp_path / "2/model.safetensors").read_bytes()
    assert found[0].metrics["G/G"]["accuracy"]["value"] > 0.9
    clients = [event for event in found[0].events if event["event"] == "client"]
    assert {event["rate"] for event in clients} <= {1e-3, 3e-3, 1e-2, 2e-2, 3e-2, 1e-1, 3e-1}
    assert all(0 < event["selection_seconds"] < event["seconds"] for event in clients if event["round"] % 3 == 1)


def test_without_d_n_there_is_one_clear_line() -> None:
    x, y = torch.randn(20, 4), torch.arange(20) % 2
    fed = mb.Federation.from_arrays([(x, y)], select_fraction=0)
    with pytest.raises(TooFewUpdates, match=r"chooses by d_n, and client 0 has none: raise select\.fraction"):
        mb.federate(nn.Linear(4, 2), fed, mb.MetaFL(), rounds=1)


class TestDropout:
    def task_and_context(self) -> Context:
        return Context(make_task(mb.MetaBayFLDropout(), network(), Categorical(3)), seed=5, client=0)

    def test_masks_are_the_same_in_every_call_and_differ_from_each_other(self) -> None:
        ctx, x = self.task_and_context(), client_data().x
        model, method = ctx.task.initial(), mb.MetaBayFLDropout()
        state = torch.get_rng_state()
        first = method.predict(model, x, 3, ctx)
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(1)
        assert torch.equal(method.predict(model, x, 3, ctx), first)
        assert not torch.equal(first[0], first[1])

    def test_only_dropout_is_in_training_mode(self) -> None:
        """BatchNorm uses its running statistics: one sample is predicted as in a batch with others."""
        ctx, x = self.task_and_context(), client_data().x
        model = ctx.task.initial()
        mb.MetaBayFLDropout().predict(model, x, 2, ctx)
        assert torch.equal(ctx.task.buffers(), model["buffers"])
        modes = {type(layer).__name__: layer.training for layer in ctx.task.module.modules()}
        assert modes["Dropout"]
        assert not modes["BatchNorm1d"]
        ctx.task.outputs(x)
        assert not any(layer.training for layer in ctx.task.module.modules())

    def test_a_plain_model_is_refused(self) -> None:
        fed = mb.Federation.from_arrays([(torch.randn(20, 4), torch.arange(20) % 2)])
        with pytest.raises(mb.InputError, match=r"needs nn\.Dropout layers"):
            mb.federate(nn.Linear(4, 2), fed, mb.MetaBayFLDropout(), rounds=1)

    def test_it_knows_what_it_does_not_know(self) -> None:
        x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
        fed = mb.Federation.from_arrays([(x, (x[:, 0] > 0).long())], classes=3)
        result = mb.federate(network(), fed, mb.MetaBayFLDropout(epochs=2), rounds=2)
        assert result.metrics["G/G"]["mutual_information"]["value"] > 1e-4


class TestReadings:
    """Switches for what the paper leaves open, and its letter."""

    def test_the_paper_is_one_preset_away(self) -> None:
        letter = mb.MetaBayFL(preset="paper")
        assert {name: getattr(letter, name) for name in THE_PAPER} == THE_PAPER
        assert mb.MetaBayFL(preset="paper", kl_weight=0.1).kl_weight == 0.1
        assert mb.MetaBayFL(**letter.model_dump()) == letter
        fit, _ = take_part(letter, client_data())
        assert math.isfinite(fit.update.metrics["nll"])
        assert not letter.holds_out

    def test_every_epoch_is_selection_from_where_the_last_one_ended(self) -> None:
        """With one candidate, no momentum and nothing random but the order, it is an epoch of descent after another."""
        data = client_data()
        fit, _ = take_part(mb.MetaBayFL(select_every="epoch", epochs=3, keep_better=False), data)
        assert fit.update.metrics["steps"] == 3 * data.steps_per_epoch()
        once, _ = take_part(mb.MetaBayFL(select_every="epoch", epochs=1, keep_better=False), data)
        same_, _ = take_part(mb.MetaBayFL(epochs=1, keep_better=False), data)
        assert same(once.update.payload, same_.update.payload)

    @pairs
    def test_trials_on_d_n_only_choose_the_rate(self, selecting: type[RateSelection], fixed: type[Method]) -> None:
        data = client_data()
        chosen, _ = take_part(selecting(trial_data="dn", epochs=2, keep_better=False), data)
        trained, _ = take_part(fixed(rate=chosen.update.metrics["rate"], epochs=2, optimiser="sgd"), data)
        assert same(chosen.update.payload, trained.update.payload)


class TestLosers:
    def trial(self, rate: float, nll: list[float]) -> Trial:
        ctx = Context(make_task(mb.MetaFL(), network(), Categorical(3)))
        trial = Trial(mb.MetaFL(), ctx.task.initial(), rate, client_data(), 1, ctx)
        trial.nll = [2.0, *nll]
        return trial

    def test_a_rate_that_is_worse_than_a_smaller_one_in_training_is_stopped(self) -> None:
        small, large = self.trial(1e-3, [1.9, 1.8, 1.7]), self.trial(1e-1, [2.9, 2.9, 2.8])
        stop_losers([small, large])
        assert [small.failed, large.failed] == [False, True]

    def test_a_small_rate_that_learns_slowly_is_left_to_d_n(self) -> None:
        small, large = self.trial(1e-4, [2.0, 2.0, 2.0]), self.trial(1e-2, [1.5, 1.2, 1.1])
        stop_losers([small, large])
        assert [small.failed, large.failed] == [False, False]

    @pytest.mark.parametrize("factor", [1.001, 1.3])
    def test_a_rate_that_is_a_little_worse_in_every_step_is_left_to_d_n(self, factor: float) -> None:
        """Paired steps differ without noise; a fresh Adam raises the loss by more than 5 % and may be right."""
        small, large = self.trial(1e-3, [1.9, 1.8, 1.7]), self.trial(1e-2, [factor * nll for nll in (1.9, 1.8, 1.7)])
        stop_losers([small, large])
        assert [small.failed, large.failed] == [False, False]

    def test_within_noise_nobody_is_stopped(self) -> None:
        small, large = self.trial(1e-3, [1.9, 1.8, 1.7]), self.trial(1e-2, [2.1, 1.7, 1.8])
        stop_losers([small, large])
        assert [small.failed, large.failed] == [False, False]


class Blind(nn.Module):
    """Reads NaN as 0, so that poisoned test data do not stop the evaluation."""

    def __init__(self) -> None:
        super().__init__()
        with keyed_globals("blind"):
            self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(torch.nan_to_num(x))
        return found


class TestTestData:
    def federation(self) -> mb.Federation:
        rng = torch.Generator().manual_seed(4)
        x = torch.randn(120, 4, generator=rng)
        return mb.Federation.from_arrays([(x[:60], x[:60].argmax(1) % 3), (x[60:], x[60:].argmax(1) % 3)])

    @pytest.mark.parametrize("method", [mb.MetaBayFL(epochs=2), mb.MetaFL(epochs=2)], ids=lambda method: method.name)
    def test_poison_changes_no_bit(self, method: Method, tmp_path: Path) -> None:
        clean = self.federation()
        rows = clean.local_test
        poisoned = replace(clean, local_test=replace(rows, x=torch.full_like(rows.x, math.nan), y=(rows.y + 1) % 3))
        for name, federation in (("clean", clean), ("poisoned", poisoned)):
            mb.federate(Blind(), federation, method, rounds=3, out=tmp_path / name)
        assert (tmp_path / "clean/model.safetensors").read_bytes() == (
            tmp_path / "poisoned/model.safetensors"
        ).read_bytes()

    def test_selecting_on_them_is_possible_warned_of_and_marked(self, tmp_path: Path) -> None:
        with pytest.warns(UserWarning, match="its numbers are no results"):
            result = mb.federate(
                Blind(), self.federation(), mb.MetaFL(select_on="test"), rounds=1, out=tmp_path / "run"
            )
        assert result.directory.description()["leaks"] is True
        clients = [event for event in result.events if event["event"] == "client"]
        assert [event["scored_samples"] for event in clients] == [12, 12]


class TestShiftedLosses:
    def test_a_shift_of_the_class_scores_makes_no_difference(self) -> None:
        """Neither knowing which classes a client has nor how often helps a model."""
        rng = torch.Generator().manual_seed(0)
        outputs, y = torch.randn(1, 60, 5, generator=rng), torch.tensor([0] * 45 + [3] * 15)
        knows = outputs + torch.tensor([2.0, -50.0, 1.0, -1.0, 0.0])
        torch.testing.assert_close(shifted_losses(knows, y), shifted_losses(outputs, y), rtol=1e-3, atol=1e-3)

    def test_it_is_the_lowest_nll_of_all_shifts(self) -> None:
        rng = torch.Generator().manual_seed(0)
        outputs, y = torch.randn(1, 200, 3, generator=rng), torch.randint(3, (200,), generator=rng)
        shift = torch.zeros(3, requires_grad=True)
        search = torch.optim.LBFGS([shift], max_iter=100)

        def loss() -> Tensor:
            search.zero_grad()
            value = torch.nn.functional.cross_entropy(outputs[0] + shift, y)
            value.backward()
            return value

        search.step(loss)
        assert shifted_losses(outputs, y).mean().item() == pytest.approx(loss().item(), abs=1e-5)
