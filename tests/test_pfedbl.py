"""pFedBL (our reconstruction): who is sure counts more, class features by hand, a prior that shifts one layer only."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import metabayfl as mb
from federations import federation, network
from metabayfl import gaussian
from metabayfl.likelihood import Categorical, Gaussian
from metabayfl.methods import BayFL, PFedBL
from metabayfl.methods.pfedbl import agree, describe_classes, last_rows
from metabayfl.task import Task
from metabayfl.types import Context, Params, TrainData, Update
from test_contract import POOL
from test_fedbe import smooth
from test_local import same


def context(**options: Any) -> Context:
    task = Task(smooth(), Categorical(3), bayesian="all", **options)
    return Context(task, unlabelled=POOL, clients={0: 30})


def client(label: int) -> TrainData:
    """Of one class."""
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(label))
    return TrainData(x, torch.full((30,), label), x[:0], torch.zeros(0, dtype=torch.int64), 8)


def described(ctx: Context, method: PFedBL) -> Params:
    """A server that has seen one round of two clients."""
    model, rng = gaussian.initial(ctx.task, 0.02), torch.Generator().manual_seed(1)
    moves = [torch.randn(ctx.task.size, generator=rng) for _ in range(2)]
    updates = [Update(model | {"mu": model["mu"] + move}, 1.0, {}) for move in moves]
    return method.aggregate(method.init_server(ctx), updates, ctx)


class TestStatistics:
    def test_who_is_sure_counts_more(self) -> None:
        """Certainty has weight 1, a fair coin 1/2: the label is (1 + 1/4) / 1.5, the confidence 3/4."""
        soft, confidence = agree(torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]]))
        assert soft[0].tolist() == pytest.approx([1.25 / 1.5, 0.25 / 1.5])
        assert confidence.tolist() == pytest.approx([0.75])

    def test_features_of_classes_by_hand(self) -> None:
        """Far from zero, where E z² - (E z)² would cancel in single precision."""
        features = 1e4 + torch.tensor([[0.0], [2.0], [6.0]])
        mean, variance = describe_classes(features, torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 3.0]]))
        assert (mean - 1e4).flatten().tolist() == pytest.approx([1.0, 5.0])
        assert variance.flatten().tolist() == pytest.approx([1.0, 3.0])

    def test_a_class_that_nobody_sees_does_no_harm(self) -> None:
        mean, variance = describe_classes(torch.randn(5, 2), torch.tensor([[1.0, 0.0]] * 5))
        assert mean.isfinite().all()
        assert variance.min() >= 0

    def test_the_server_sends_them(self) -> None:
        ctx, method = context(), PFedBL()
        first, later = method.init_server(ctx), described(ctx, method)
        assert first["feature_variance"].max() < 0
        assert later["feature_variance"].min() >= 0
        assert later["feature_mean"].shape == (3, 6)
        assert method.payload_like(later, ctx).keys() == {"mu", "rho"}


class TestPrior:
    def test_only_the_last_layer_is_shifted(self) -> None:
        ctx, method = context(), PFedBL(rate=0.05)
        server = described(ctx, method)
        received = ctx.task.join(server, {})
        prior = method.personal_prior(received, server, client(1), replace(ctx, client=0))
        rows = last_rows("pfedbl", ctx.task.module[2], ctx.task)  # type: ignore[index]
        assert len(rows) == 6 * 3 + 3
        moved = {name: set((prior[name] != received[name]).nonzero().flatten().tolist()) for name in ("mu", "rho")}
        assert moved["mu"] == moved["rho"] == set(rows.tolist())

    @pytest.mark.parametrize("label", [0, 2])
    def test_it_shifts_to_the_classes_that_the_client_has(self, label: int) -> None:
        ctx, method = context(), PFedBL(rate=0.05)
        server = described(ctx, method)
        received = ctx.task.join(server, {})
        prior = method.personal_prior(received, server, client(label), replace(ctx, client=0))
        before, after = (ctx.task.consult(model, POOL).softmax(1)[:, label].mean() for model in (received, prior))
        assert after > before + 0.1

    def test_at_first_it_is_the_received_posterior(self) -> None:
        """Then a round is that of BayFL with the global prior, bit for bit."""
        options = {"epochs": 2, "kl_weight": 0.1, "optimiser": "adam", "rate": 1e-3, "bayesian": "all", "rho_rate": 1.0}
        like_pfedbl = {"prior": "global", "rule": "mixture", "kl": "client", "warm_up": 0, "antithetic": False}
        like_pfedbl |= {"class_frequencies": False}
        runs = [
            mb.federate(network(), replace(federation(), unlabelled=POOL), method, rounds=1)
            for method in (PFedBL(**options), BayFL(**like_pfedbl, **options))
        ]
        assert all(same(runs[0].model(n), runs[1].model(n)) for n in range(3))
        assert same(runs[0].model(), runs[1].model())


class TestWeight:
    def test_the_kl_term_becomes_a_share_of_the_nll(self) -> None:
        method, nll, kl, samples = PFedBL(kl_share=0.2, largest_kl_weight=1.0), 1.5, 400.0, 80
        assert method.next_weight(nll, kl, samples) * kl / samples == pytest.approx(0.2 * nll)

    def test_within_bounds(self) -> None:
        method = PFedBL(smallest_kl_weight=0.01, largest_kl_weight=0.5)
        assert method.next_weight(1.0, 1e9, 80) == 0.01
        assert method.next_weight(1.0, 0.0, 80) == 0.5

    def test_it_is_used_in_the_next_round(self) -> None:
        data = replace(federation(), unlabelled=POOL)
        method = PFedBL(epochs=1, largest_kl_weight=100.0)
        result = mb.federate(network(), data, method, rounds=2)
        events = {(e["round"], e["client"]): e for e in result.events if e["event"] == "client"}
        for number in range(3):
            first, second = events[1, number], events[2, number]
            expected = method.next_weight(first["nll"], first["kl"], round(first["weight"]))
            assert first["kl_weight"] == 0.01
            assert math.isclose(second["kl_weight"], expected)


class TestRefusals:
    def test_without_a_pool(self) -> None:
        with pytest.raises(mb.InputError, match=r"^pfedbl needs an unlabelled pool: "):
            mb.federate(network(), federation(), PFedBL(epochs=1), rounds=1)

    def test_a_last_layer_without_a_posterior(self) -> None:
        ctx = context(deterministic=("2.*",))
        with pytest.raises(mb.InputError, match=r"leave it out of method\.deterministic"):
            PFedBL(deterministic=("2.*",)).init_server(ctx)

    @pytest.mark.parametrize(
        ("module", "likelihood", "text"),
        [
            (nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten()), Categorical(3), "last layer is Conv2d"),
            (nn.Linear(2, 1), Gaussian(), "whole-number labels are accepted"),
        ],
    )
    def test_models_and_labels(self, module: nn.Module, likelihood: Categorical | Gaussian, text: str) -> None:
        with pytest.raises(mb.InputError, match=text):
            PFedBL().init_server(Context(Task(module, likelihood, bayesian="all")))

    def test_it_says_what_it_is(self) -> None:
        assert "reconstruction" in PFedBL.paper
