"""FedBE (Chen & Chao, ICLR 2021): FedAvg whose server distils an ensemble over clients on U. docs/methods.md 4.3."""

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from metabayfl.distillation import mean_probabilities, sharpen
from metabayfl.methods.base import NotNegative, Positive
from metabayfl.methods.fedavg import FedAvg
from metabayfl.methods.pool_distillation import PoolDistillation, unlabelled
from metabayfl.optim import PointLoss
from metabayfl.randomness import numpy_generator
from metabayfl.task import Task
from metabayfl.types import Context, Params, Received

SMALLEST_VARIANCE = 1e-6
"""Of the normalised updates, which have squared norm 1."""


class FedBE(PoolDistillation, FedAvg):
    """FedAvg whose server samples models around the clients' and distils their mean prediction into one."""

    name: ClassVar[str] = "fedbe"
    paper: ClassVar[str] = "Chen & Chao, ICLR 2021"

    batchnorm: Literal["average"] = "average"
    """BatchNorm is averaged: the server predicts, and for that it needs whole models."""
    sampling: Literal["updates", "weights", "dirichlet"] = "updates"
    """Sample from a Gaussian over the clients' normalised updates or over their weights, or mix weights at random."""
    draws: Annotated[int, Field(ge=0)] = 10
    """Sampled teachers, beside the clients' models and their mean."""
    spread: NotNegative = 0.1
    """Factor on the standard deviation over the updates."""
    concentration: Positive = 1.0
    """Of the Dirichlet distribution over the clients."""
    distil_epochs: Annotated[int, Field(ge=0)] = 20
    """Epochs over U; 0 sends the mean, which is FedAvg."""

    def aggregate(self, server: Params, updates: Sequence[Received], ctx: Context) -> Params:
        """Average, ask the ensemble about U, and distil its answer into the average."""
        mean = super().aggregate(server, updates, ctx)
        if not self.distil_epochs:
            return mean
        x = unlabelled(self.name, ctx)
        answer = self.answer(self.teachers(server, mean, updates, ctx), x, ctx.task)
        return self.distil(PointLoss(ctx.task, mean), x, answer, ctx)

    def teachers(self, server: Params, mean: Params, updates: Sequence[Received], ctx: Context) -> Iterator[Params]:
        """Return the mean, the clients' models, and samples around them with the mean's buffers."""
        yield mean
        for update in updates:
            yield update.payload
        if self.draws:
            weights = torch.stack([update.payload["mu"] for update in updates])
            for draw in range(self.draws):
                yield mean | {"mu": self.sample(server["mu"], weights, draw, ctx)}

    def sample(self, before: Tensor, weights: Tensor, draw: int, ctx: Context) -> Tensor:
        """Draw a teacher's weights, given the clients' [clients, weights] and those they received."""
        rng = ctx.rng(f"teacher {draw}")
        if self.sampling == "dirichlet":
            shares = numpy_generator(rng.initial_seed()).dirichlet([self.concentration] * len(weights))
            return torch.from_numpy(shares).to(weights.dtype) @ weights
        noise = torch.randn(len(before), generator=rng, dtype=before.dtype)
        if self.sampling == "weights":
            return weights.mean(0) + weights.std(0, correction=0) * noise
        return sample_update(before, weights, self.spread * noise, ctx.task)

    def answer(self, teachers: Iterator[Params], x: Tensor, task: Task) -> Tensor:
        """Mean of the teachers' probabilities, sharpened."""
        return sharpen(mean_probabilities(task.consult(teacher, x) for teacher in teachers), self.temperature)


def sample_update(before: Tensor, weights: Tensor, noise: Tensor, task: Task) -> Tensor:
    """Draw before + (m + sqrt(v) noise) · r for each tensor: m, v of the normalised updates, r their mean norm."""
    drawn = before.clone()
    for slot in task.layout.slots:
        place = slice(slot.start, slot.stop)
        moves = weights[:, place] - before[place]
        norms = moves.norm(dim=1, keepdim=True)
        unit = torch.where(norms > 0, moves / norms, 0.0)
        deviation = unit.var(0, correction=0).clamp_min(SMALLEST_VARIANCE).sqrt()
        drawn[place] += (unit.mean(0) + deviation * noise[place]) * norms.mean()
    return drawn
