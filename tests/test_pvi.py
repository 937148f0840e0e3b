"""PVI: on conjugate regression the product of the factors is the exact posterior; every datum counts once."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import metabayfl as mb
from federations import network
from metabayfl.gaussian import rho_of, sigma_of
from metabayfl.methods import PVI
from metabayfl.methods.pvi import natural
from metabayfl.types import Context, Params, TrainData, Update
from quadratics import EYE, NOISE, line, play

PRIOR = 0.6


def orthogonal(seed: int, samples: int) -> TrainData:
    """Inputs whose columns are orthogonal: the exact posterior is diagonal."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.linalg.qr(torch.randn(samples, 3, generator=rng, dtype=torch.float64))[0] * torch.tensor([3.0, 2.0, 4.0])
    y = x @ torch.tensor([[1.0 + seed], [-0.5], [0.3]], dtype=torch.float64)
    y += NOISE * torch.randn(samples, 1, generator=rng, dtype=torch.float64)
    return TrainData(x, y, x[:0], y[:0], samples)


CLIENTS = [orthogonal(0, 12), orthogonal(1, 20), orthogonal(2, 6)]


def exact_posterior(temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation given everybody's data."""
    x, y = torch.cat([data.x for data in CLIENTS]), torch.cat([data.y for data in CLIENTS])
    precision = x.T @ x / NOISE**2 / temperature + EYE / PRIOR**2
    mean = torch.linalg.solve(precision, x.T @ y / NOISE**2 / temperature).flatten()
    return mean, torch.linalg.inv(precision).diagonal().sqrt()


class Solved(PVI):
    """PVI whose clients solve their problem in closed form."""

    def solve(
        self, start: Params, cavity: Params, data: TrainData, ctx: Context
    ) -> tuple[Params, dict[str, float]]:  # fmt: skip
        times = 1 / (NOISE**2 * self.kl_weight)
        precision = cavity["precision"] + times * (data.x.T @ data.x).diagonal()
        mean = (cavity["shift"] + times * (data.x.T @ data.y).flatten()) / precision
        return {"mu": mean, "rho": rho_of(precision.rsqrt())}, {"nll": 0.0}


@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize(("damping", "rounds"), [(None, 30), (1.0, 1), (0.5, 18)])
def test_the_product_of_exact_factors_is_the_exact_posterior(
    damping: float | None, rounds: int, temperature: float
) -> None:
    """Conjugate factors do not depend on the cavity: undamped, one round is enough."""
    method = Solved(prior_sigma=PRIOR, kl_weight=temperature, damping=damping)
    found = play(method, line(1, NOISE, bayesian="all"), CLIENTS, rounds).server
    mean, sigma = exact_posterior(temperature)
    torch.testing.assert_close(found["mu"], mean, rtol=0.0, atol=2e-5)
    torch.testing.assert_close(sigma_of(found["rho"]), sigma, rtol=0.0, atol=2e-5)


def test_more_rounds_count_no_datum_again() -> None:
    method = Solved(prior_sigma=PRIOR, kl_weight=1.0, damping=1.0)
    one, ten = (play(method, line(1, NOISE, bayesian="all"), CLIENTS, rounds).server for rounds in (1, 10))
    for name, tensor in one.items():
        torch.testing.assert_close(ten[name], tensor, rtol=1e-10, atol=1e-10)


def test_trained_factors_come_to_the_exact_posterior() -> None:
    """The ELBO by gradients, many targets that are copies of one: their mean is precise."""
    copies, rounds = 60, 12
    clients = [replace(data, y=data.y.expand(-1, copies)) for data in CLIENTS]
    method = PVI(
        prior_sigma=PRIOR, kl_weight=1.0, damping=0.5, initial_sigma=0.2, optimiser="sgd", momentum=0.0,
        rate="0.1/sqrt(k)", epochs=60,
    )  # fmt: skip
    found = play(method, line(copies, NOISE, bayesian="all"), clients, rounds).server
    mean, sigma = exact_posterior()
    found_mean = found["mu"].view(copies, 3).mean(0)
    found_sigma = sigma_of(found["rho"]).view(copies, 3).mean(0)
    assert ((found_mean - mean) / sigma).abs().max() < 0.15
    assert (found_sigma / sigma - 1).abs().max() < 0.1


class TestFactors:
    def test_the_posterior_is_the_prior_times_the_factors(self) -> None:
        """After any number of rounds, also with clients that were away."""
        found = play(PVI(epochs=2, prior_sigma=PRIOR), line(1, NOISE, bayesian="all"), CLIENTS, 3)
        for name, prior in natural(PVI(prior_sigma=PRIOR).init_model(Context(line(1, 1.0, bayesian="all")))).items():
            total = prior + sum(state[name] for state in found.states.values())
            torch.testing.assert_close(found.server[name], total, rtol=1e-10, atol=1e-10)

    def test_a_division_that_leaves_no_gaussian_takes_the_prior_and_is_counted(self) -> None:
        task = line(1, NOISE, bayesian="all")
        method, ctx = PVI(prior_sigma=PRIOR), Context(task, client=0, clients={0: 12})
        received = method.init_model(ctx)
        state = method.init_client(ctx)
        state["precision"][1] = 1e6
        cavity, rejected = method.cavity(received, state, ctx)
        assert rejected == 1
        assert cavity["precision"].tolist() == pytest.approx([PRIOR**-2] * 3)

    def test_the_server_refuses_coordinates_without_precision(self) -> None:
        task = line(1, NOISE, bayesian="all")
        method, ctx = PVI(prior_sigma=PRIOR), Context(task)
        server = method.init_server(ctx)
        change = method.payload_like(server, ctx)
        change = change | {"precision": torch.tensor([1.0, -1e6, 0.0]).double(), "shift": torch.ones(3).double()}
        after = method.aggregate(server, [Update(change, 1.0, {})], ctx)
        assert after["precision"].tolist() == pytest.approx([PRIOR**-2 + 1, PRIOR**-2, PRIOR**-2])
        assert after["shift"].tolist() == [1.0, 0.0, 1.0]
        assert all(tensor.isfinite().all() for tensor in after.values())


def test_it_learns() -> None:
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] + x[:, 1] > 0).long()
    fed = mb.Federation.from_arrays([(x[:150], y[:150]), (x[150:], y[150:])], classes=3)
    result = mb.federate(network(dropout=0.0), fed, PVI(rate=0.01), rounds=4)
    assert result.metrics["G/G"]["accuracy"]["value"] > 0.85
