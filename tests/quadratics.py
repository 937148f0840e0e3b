"""Problems whose answer is known: linear regression in float64, and rounds without an engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from metabayfl.likelihood import Gaussian
from metabayfl.methods.base import Method
from metabayfl.task import Task
from metabayfl.types import Context, Delivered, Params, TrainData

NOISE = 0.8
EYE = torch.eye(3, dtype=torch.float64)


def line(targets: int, noise_std: float, **options: str) -> Task:
    """Linear regression without a bias, in float64, from zero."""
    module = nn.Linear(3, targets, bias=False).double()
    nn.init.zeros_(module.weight)
    return Task(module, Gaussian(noise_std), **options)  # type: ignore[arg-type]


def regression(seed: int, samples: int, batch_size: int) -> TrainData:
    """Correlated inputs, so that the mean-field sigmas are not the exact marginals; each seed has its own weights."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, generator=rng, dtype=torch.float64)
    x[:, 1] += 0.7 * x[:, 0]
    weights = torch.tensor([[1.0 + seed], [-0.5], [0.3 - seed]], dtype=torch.float64)
    y = x @ weights + NOISE * torch.randn(samples, 1, generator=rng, dtype=torch.float64)
    return TrainData(x, y, x[:0], y[:0], batch_size)


@dataclass
class Outcome:
    """What rounds have left: the server's state, and each client's state and own model."""

    server: Params
    states: dict[int, Params] = field(default_factory=dict)
    personal: dict[int, Params] = field(default_factory=dict)


def run(method: Method, task: Task, clients: Sequence[TrainData], rounds: int, **options: Any) -> Params:
    """Return the server after some rounds; options as `play`."""
    return play(method, task, clients, rounds, **options).server


def play(
    method: Method,
    task: Task,
    clients: Sequence[TrainData],
    rounds: int,
    *,
    seed: int = 0,
    visits: Callable[[int], Sequence[int]] = range,
    **start: Tensor,
) -> Outcome:
    """Do what an engine does, without it; `visits` orders the clients, `start` replaces parts of the server."""
    ctx = Context(task, seed, 0, rounds, clients={number: len(data) for number, data in enumerate(clients)})
    found = Outcome(method.init_server(ctx) | start)
    found.states = {number: method.init_client(replace(ctx, client=number)) for number in range(len(clients))}
    for round_ in range(rounds):
        ctx = replace(ctx, round=round_)
        fits = {}
        for number in visits(len(clients)):
            here = replace(ctx, client=number)
            down = method.broadcast(found.server, here)
            fits[number] = method.fit(down, found.states[number], clients[number], here)
        found.states |= {number: fit.state for number, fit in fits.items()}
        updates = [Delivered(number, *fits[number].update) for number in sorted(fits)]
        found.server = method.aggregate(found.server, updates, ctx)
    for number, fit in fits.items():
        here = replace(ctx, round=rounds, client=number)
        down = method.broadcast(found.server, here)
        own = method.personalise(down, fit.state, fit.personal or None, clients[number], here)
        found.personal[number] = own
    return found


def fixed_point(clients: Sequence[TrainData], shares: Sequence[float], pull: Callable[[Tensor], Tensor]) -> Tensor:
    """Solve sum_n a_n pull(A_n) (w - w_n) = 0, where A_n is the curvature of client n and w_n its least squares."""
    matrix, vector = torch.zeros_like(EYE), torch.zeros(3, dtype=torch.float64)
    for data, share in zip(clients, shares, strict=True):
        matrix += share * pull(curvature(data))
        vector += share * pull(curvature(data)) @ least_squares(data)
    return torch.linalg.solve(matrix, vector)


def curvature(data: TrainData) -> Tensor:
    """The second derivative of a client's loss."""
    return data.x.T @ data.x / len(data)


def least_squares(data: TrainData) -> Tensor:
    """Where a client's loss is lowest."""
    return torch.linalg.lstsq(data.x, data.y).solution.flatten()
