"""Clients' class frequencies beside the shared network: what is trained, who has them, and what the others see."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import metabayfl as mb
from metabayfl.gaussian import Elbo, PairedElbo, Prior, rho_of
from metabayfl.likelihood import Categorical, Gaussian
from metabayfl.methods.base import Method, make_task
from metabayfl.methods.class_frequencies import FREQUENCIES
from metabayfl.optim import PointLoss
from metabayfl.randomness import keyed_globals
from metabayfl.task import Task
from metabayfl.types import Context, TrainData

FAMILY = [mb.BayFL, mb.MetaBayFL, mb.MetaFL, mb.MetaBayFLDropout]


def network() -> nn.Module:
    with keyed_globals("net"):
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 3))


def client(counts: tuple[int, ...], seed: int = 0) -> TrainData:
    """Samples of classes at three places, so many of each; d_n has the same mix."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    x = torch.randn(len(y), 4, generator=rng)
    x[torch.arange(len(y)), y] += 1.0
    return TrainData(x, y, x.clone(), y.clone(), batch_size=8)


def context(method: Method, data: TrainData) -> Context:
    return Context(make_task(method, network(), Categorical(3)), client=0, clients={0: len(data)})


@pytest.mark.parametrize("kind", FAMILY)
class TestFit:
    def test_only_the_clients_own_model_has_them(self, kind: type[Method]) -> None:
        method, data = kind(epochs=1), client((7, 3, 0))
        ctx = context(method, data)
        fit = method.fit(method.init_server(ctx), {}, data, ctx)
        assert FREQUENCIES not in fit.update.payload
        own = method.personalise(method.init_server(ctx), fit.state, fit.personal, data, ctx)
        expected = torch.tensor([7.5, 3.5, 0.5]) / 11.5
        torch.testing.assert_close(own[FREQUENCIES].exp(), expected)
        plain = {name: tensor for name, tensor in own.items() if name != FREQUENCIES}
        outputs, shifted = (method.predict(model, data.x, 4, ctx) for model in (plain, own))
        torch.testing.assert_close(shifted - outputs, expected.log().expand_as(outputs), rtol=0.0, atol=1e-5)

    def test_switched_off_nobody_has(self, kind: type[Method]) -> None:
        method, data = kind(epochs=1, class_frequencies=False), client((7, 3, 0))
        ctx = context(method, data)
        assert method.offset(data, ctx) is None
        fit = method.fit(method.init_server(ctx), {}, data, ctx)
        assert FREQUENCIES not in {*fit.personal, *(name.removeprefix("own.") for name in fit.state)}

    def test_a_newcomer_has_its_own(self, kind: type[Method]) -> None:
        method, data = kind(), client((1, 1, 8))
        ctx = context(method, data)
        model = method.personalise(method.init_server(ctx), {}, None, data, ctx)
        assert model[FREQUENCIES].argmax() == 2


def test_equal_frequencies_train_as_none_do() -> None:
    """A constant added to all outputs changes no probability."""
    data, models = client((5, 5, 5)), []
    for frequencies in (True, False):
        method = mb.BayFL(epochs=2, class_frequencies=frequencies)
        ctx = context(method, data)
        models.append(method.fit(method.init_server(ctx), {}, data, ctx).update.payload["mu"])
    torch.testing.assert_close(models[0], models[1], rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("kind", [PointLoss, Elbo, PairedElbo])
def test_objectives_train_the_shifted_likelihood(kind: type) -> None:
    """By autograd; with hardly any noise all of them have the gradient of the plain network."""
    module, data = network().double(), client((9, 4, 2))
    task, offset = Task(module, Categorical(3), bayesian="all"), torch.tensor([1.0, -2.0, 0.5]).double()
    model = task.initial() | {"rho": rho_of(torch.full((task.size,), 1e-9).double())}
    noise = torch.Generator().manual_seed(0)
    if kind is PointLoss:
        objective: PointLoss | Elbo = PointLoss(task, model, offset)
    else:
        objective = kind(task, model, Prior(0.0, 1.0), 0.0, noise, offset=offset)
    nll = objective(data.x.double(), data.y)
    expected = cross_entropy(module(data.x.double()) + offset, data.y)
    expected.backward()
    assert nll == pytest.approx(expected.item(), rel=1e-6)
    found = task.layout.unflatten(task.gradient[: task.size])
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-8)


def test_who_shares_no_network_has_none() -> None:
    assert not mb.LocalBNN(class_frequencies=False).class_frequencies
    with pytest.raises(mb.InputError, match=r"class_frequencies = True: input should be False"):
        mb.LocalBNN(class_frequencies=True)


def test_a_file_with_other_names_is_refused() -> None:
    task = make_task(mb.BayFL(), network(), Categorical(3))
    named = task.named(task.initial() | {FREQUENCIES: torch.zeros(3)})
    assert list(task.from_named(named)) == ["mu", FREQUENCIES]
    with pytest.raises(mb.InputError, match="missing or unknown"):
        task.from_named(named | {"surprise": torch.zeros(3)})


def test_regression_has_no_classes() -> None:
    method, data = mb.BayFL(), client((4, 4, 4))
    task = make_task(method, nn.Linear(4, 1), Gaussian(1.0))
    assert method.offset(replace(data, y=torch.zeros(12, 1)), Context(task)) is None


def skewed() -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Three clients, each with nearly one class only, and a common test of all classes alike."""
    clients = [client(tuple(60 if c == n else 4 for c in range(3)), seed=n) for n in range(3)]
    test = client((50, 50, 50), seed=9)
    return [(data.x, data.y) for data in clients], (test.x, test.y)


def test_they_are_kept_with_a_clients_own_model(tmp_path: Path) -> None:
    """Of a run, and of what is loaded again; the global model has none."""
    pairs, test = skewed()
    fed = mb.Federation.from_arrays(pairs, test=test, seed=0)
    result = mb.federate(network(), fed, method=mb.BayFL(rate=0.05, epochs=5), rounds=3, seed=0)
    assert result.metrics["P/L"]["accuracy"]["mean"] > 0.8
    result.save(tmp_path / "run")
    again = mb.load(tmp_path / "run", model=network())
    for client_ in (None, 0, 1, 2):
        found, expected = (one.predict(test[0], client=client_).probs for one in (again, result))
        assert torch.equal(found, expected)
        if client_ is not None:
            assert found.argmax(1).bincount(minlength=3).argmax() == client_
    assert FREQUENCIES not in again.model()
