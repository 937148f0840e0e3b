"""Meta-BayFL's step on U: off it is nothing, a posterior that is its only teacher stays, an ensemble is followed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import metabayfl as mb
from federations import bits, federation, network
from metabayfl import gaussian
from metabayfl.distillation import mean_probabilities, sharpen
from metabayfl.likelihood import Categorical, Gaussian
from metabayfl.methods import BayFL, MetaBayFL
from metabayfl.methods.evidence import nothing
from metabayfl.methods.needs import Need
from metabayfl.task import Task
from metabayfl.types import Context, Params, Update
from test_contract import POOL, make, run, uneven
from test_fedbe import smooth
from test_local import same
from test_meta_bayfl import THE_PAPER


def context() -> Context:
    return Context(Task(smooth(), Categorical(3), bayesian="all"), unlabelled=POOL)


def updates(ctx: Context, count: int, sigma: float = 0.02) -> list[Update]:
    rng, model = torch.Generator().manual_seed(1), gaussian.initial(ctx.task, sigma)
    moves = [torch.randn(ctx.task.size, generator=rng) for _ in range(count)]
    seen = {"evidence": nothing(3).pack()}
    return [
        Update(model | seen | {"mu": model["mu"] + move}, 1.0 + n, {"incoming_nll": 1.0})
        for n, move in enumerate(moves)
    ]


def model_of(server: Params) -> Params:
    return {name: server[name] for name in ("mu", "rho")}


def test_off_it_needs_no_pool_and_averages() -> None:
    method, ctx = MetaBayFL(), replace(context(), unlabelled=None)
    sent, server = updates(ctx, 3), MetaBayFL().init_server(ctx)
    assert not method.server_distill
    assert method.needs == {Need.STATE}
    assert same(model_of(method.aggregate(server, sent, ctx)), model_of(BayFL().aggregate(server, sent, ctx)))
    assert not MetaBayFL(**THE_PAPER).server_distill


def test_a_pool_makes_no_difference_when_it_is_off() -> None:
    federations = federation(), replace(federation(), unlabelled=POOL)
    runs = [mb.federate(network(), data, MetaBayFL(epochs=1), rounds=2) for data in federations]
    assert same(runs[0].model(), runs[1].model())


def test_a_posterior_that_is_its_only_teacher_stays() -> None:
    """One client, hardly any noise, temperature 1: the gradient is zero where the student starts."""
    ctx = context()
    sent = updates(ctx, 1, sigma=1e-5)
    method = MetaBayFL(server_distill=True, temperature=1.0, kl_weight=0.0)
    found = method.aggregate(method.init_server(ctx), sent, ctx)
    torch.testing.assert_close(found["mu"], sent[0].payload["mu"], rtol=1e-3, atol=1e-4)


def test_it_comes_closer_to_the_ensemble() -> None:
    ctx, method = context(), MetaBayFL(server_distill=True, distil_rate=0.05, rho_rate=1.0, kl_weight=0.01)
    sent, server = updates(ctx, 4), method.init_server(ctx)
    mean = model_of(BayFL().aggregate(server, sent, ctx))
    answer = sharpen(mean_probabilities(method.predictions(mean, sent, POOL, ctx)), method.temperature)
    divergences = []
    for model in (mean, method.aggregate(server, sent, ctx)):
        outputs = method.predict(model_of(model), POOL, 10, ctx)
        logs = mean_probabilities(outputs).log()
        divergences.append(nn.functional.kl_div(logs, answer, reduction="batchmean").item())
    assert divergences[1] < 0.7 * divergences[0]


def test_a_heavy_kl_keeps_it_at_the_average() -> None:
    ctx = context()
    sent, server = updates(ctx, 4), MetaBayFL().init_server(ctx)
    mean = model_of(BayFL().aggregate(server, sent, ctx))
    free, held = (
        MetaBayFL(server_distill=True, kl_weight=weight).aggregate(server, sent, ctx) for weight in (0.0, 1.0)
    )
    assert (held["mu"] - mean["mu"]).norm() < 0.7 * (free["mu"] - mean["mu"]).norm()


def test_each_posterior_answers_with_its_own_noise() -> None:
    ctx, method = context(), MetaBayFL(server_distill=True, teacher_draws=3)
    sent = updates(ctx, 2)
    mean = model_of(BayFL().aggregate({}, [sent[0]], ctx))
    outputs = list(method.predictions(mean, [sent[0], sent[0]], POOL, ctx))
    assert len(outputs) == 9
    assert len({tuple(o.flatten().tolist()) for o in outputs}) == 9


def test_the_same_bits_for_any_number_of_workers_with_both_extensions(tmp_path: Path) -> None:
    method = make("meta-bayfl", server_distill=True, personal="prox", distil_epochs=2)
    for workers in (1, 2):
        run(tmp_path / str(workers), method, uneven(), workers=workers)
    assert bits(tmp_path / "1") == bits(tmp_path / "2")


class TestRefusals:
    def test_without_a_pool(self) -> None:
        method = MetaBayFL(server_distill=True, epochs=1)
        assert method.needs == {Need.UNLABELLED, Need.INDIVIDUAL, Need.STATE}
        with pytest.raises(mb.InputError, match=r"^meta-bayfl needs an unlabelled pool"):
            mb.federate(network(), federation(), method, rounds=1)

    def test_with_batchnorm_that_stays_with_the_clients(self) -> None:
        with pytest.raises(mb.InputError, match=r"^server_distill = True: the server needs whole models: "):
            MetaBayFL(server_distill=True, batchnorm="local")

    def test_for_regression(self) -> None:
        ctx = Context(Task(nn.Linear(2, 1), Gaussian(), bayesian="all"))
        with pytest.raises(mb.InputError, match="meta-bayfl learns from predicted classes"):
            MetaBayFL(server_distill=True).init_server(ctx)
        assert MetaBayFL().init_server(ctx)
