"""IVON against its equations and against a posterior that is known."""

import math

import pytest
import torch
from torch import nn

import metabayfl as mb
from metabayfl.gaussian import Prior, rho_of, sigma_of
from metabayfl.ivon import GRADIENT_MOMENTUM, Ivon, IvonLoss
from metabayfl.likelihood import Gaussian
from metabayfl.randomness import keyed_globals
from metabayfl.task import Task

SAMPLES = 40


def regression() -> tuple[Task, torch.Tensor, torch.Tensor]:
    """Orthogonal inputs, so that the exact posterior is a product over the weights."""
    rng = torch.Generator().manual_seed(0)
    x, _ = torch.linalg.qr(torch.randn(SAMPLES, 2, generator=rng, dtype=torch.float64))
    x *= torch.tensor([8.0, 4.0])
    y = x @ torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    with keyed_globals("ivon"):
        module = nn.Linear(2, 1, bias=False).double()
    return Task(module, Gaussian(1.0), bayesian="all"), x, y


def start(task: Task, sigma: float) -> dict[str, torch.Tensor]:
    return task.initial() | {"rho": rho_of(torch.full((2,), sigma, dtype=torch.float64))}


def test_one_step_by_the_equations_of_the_paper() -> None:
    task, x, y = regression()
    scale, sigma, prior, memory = 1 / SAMPLES, 0.1, 0.5, 0.9
    posterior = start(task, sigma)
    loss = IvonLoss(task, posterior, Prior(0.0, prior), scale, torch.Generator().manual_seed(1))
    optimiser = Ivon(loss, memory)
    eps = torch.empty(2, dtype=torch.float64).normal_(generator=torch.Generator().manual_seed(1))
    weights = posterior["mu"] + sigma * eps
    gradient = ((x @ weights[:, None] - y) * x).mean(0)
    loss(x, y)
    optimiser.step(0.05)
    delta = scale / prior**2
    h = scale / sigma**2 - delta
    seen = gradient * eps / sigma
    h_new = memory * h + (1 - memory) * seen + 0.5 * (1 - memory) ** 2 * (h - seen) ** 2 / (h + delta)
    mean = (1 - GRADIENT_MOMENTUM) * gradient / (1 - GRADIENT_MOMENTUM)
    mu = posterior["mu"] - 0.05 * (mean + delta * posterior["mu"]) / (h_new + delta)
    model = loss.model()
    torch.testing.assert_close(model["mu"], mu)
    torch.testing.assert_close(sigma_of(model["rho"]), (scale / (h_new + delta)).sqrt())


def test_it_finds_the_exact_posterior_of_a_regression() -> None:
    task, x, y = regression()
    prior = 0.5
    loss = IvonLoss(task, start(task, 0.1), Prior(0.0, prior), 1 / SAMPLES, torch.Generator().manual_seed(2))
    optimiser = Ivon(loss, 0.995)
    means, spreads = [], []
    for step in range(6000):
        loss(x, y)
        optimiser.step(0.02)
        if step >= 2000:
            means.append(loss.mu.clone())
            spreads.append(loss.sigma())
    precision = torch.diag(x.T @ x) + 1 / prior**2
    exact = (x.T @ y).flatten() / precision
    torch.testing.assert_close(torch.stack(means).mean(0), exact, rtol=0.02, atol=0.01)
    torch.testing.assert_close(torch.stack(spreads).mean(0), precision.rsqrt(), rtol=0.1, atol=0.0)


def test_a_federation_learns_and_the_winner_is_trained_as_with_a_fixed_rate() -> None:
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] + x[:, 1] > 0).long()
    federation = mb.Federation.from_arrays([(x[:150], y[:150]), (x[150:], y[150:])])
    with keyed_globals("net"):
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    options = {"backend": "ivon", "kl_weight": 0.2, "epochs": 3}
    chosen = mb.federate(
        model,
        federation,
        mb.MetaBayFL(rates=(0.5,), keep_better=False, guard=False, **options),
        rounds=8,
        held_out=True,
    )
    fixed = mb.federate(model, federation, mb.BayFL(rate=0.5, **options), rounds=8, held_out=True)
    assert all(torch.equal(chosen.model()[name], fixed.model()[name]) for name in ("mu", "rho"))
    assert fixed.metrics["G/G"]["accuracy"]["value"] > 0.85
    assert math.isfinite(fixed.metrics["G/G"]["nll"]["value"])


def test_without_a_prior_there_is_nothing_to_step_by() -> None:
    with pytest.raises(mb.InputError, match=r"backend = 'ivon': ivon needs kl_weight above 0"):
        mb.BayFL(backend="ivon", kl_weight=0)
