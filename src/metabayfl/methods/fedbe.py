"""FedBE (Chen & Chao, ICLR 2021): FedAvg whose server distils an ensemble over clients on U. docs/methods.md 4.3."""

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from metabayfl.likelihood import Categorical
from metabayfl.methods.base import Count, NotNegative, Positive
from metabayfl.methods.fedavg import FedAvg
from metabayfl.methods.needs import Need
from metabayfl.optim import PointLoss, Sgd, descend
from metabayfl.options import InputError
from metabayfl.randomness import numpy_generator
from metabayfl.task import Task
from metabayfl.types import Context, Params, Received, TrainData

SMALLEST_VARIANCE = 1e-6
"""Of the normalised updates, which have squared norm 1."""


class FedBE(FedAvg):
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
    temperature: Positive = 0.5
    """Below 1 sharpens the ensemble's prediction."""
    distil_epochs: Annotated[int, Field(ge=0)] = 20
    """Epochs over U; 0 sends the mean, which is FedAvg."""
    distil_rate: Positive = 1e-3
    """Learning rate of the distillation, SGD with momentum 0.9 and weight decay 1e-5."""
    distil_batch: Count = 128
    """Mini-batch size of the distillation."""
    averaged: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the distillation's steps, the last ones, over which the student's weights are averaged."""

    @property
    def needs(self) -> frozenset[Need]:
        """Nothing beyond FedAvg without distillation."""
        return frozenset({Need.UNLABELLED, Need.INDIVIDUAL}) if self.distil_epochs else frozenset()

    def init_server(self, ctx: Context) -> Params:
        """Return the model; only predictions of classes can be averaged."""
        if not isinstance(ctx.task.likelihood, Categorical):
            raise InputError(f"{self.name} averages predicted classes: whole-number labels are accepted")
        return super().init_server(ctx)

    def aggregate(self, server: Params, updates: Sequence[Received], ctx: Context) -> Params:
        """Average, ask the ensemble about U, and distil its answer into the average."""
        mean = super().aggregate(server, updates, ctx)
        if not self.distil_epochs:
            return mean
        if (x := ctx.unlabelled) is None:
            raise InputError(f"{self.name} needs {Need.UNLABELLED}, and there is none")
        answer = self.answer(self.teachers(server, mean, updates, ctx), x, ctx.task)
        return self.distil(mean, TrainData(x, answer, x[:0], answer[:0], self.distil_batch), ctx)

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
        total = torch.zeros(())
        for teacher in teachers:
            task.load(teacher)
            total = total + task.outputs(x).softmax(1)
        sharp = (total / total.sum(1, keepdim=True)) ** (1 / self.temperature)
        return sharp / sharp.sum(1, keepdim=True)

    def distil(self, start: Params, pool: TrainData, ctx: Context) -> Params:
        """Train a student on the answer and average its weights along the way; BatchNorm adapts to U."""
        student = PointLoss(ctx.task, start)
        optimiser = Sgd(student.groups, weight_decay=1e-5, momentum=0.9)
        steps = self.distil_epochs * pool.steps_per_epoch()
        first = steps - max(1, round(self.averaged * steps))
        total = torch.zeros_like(student.weights, dtype=torch.float64)
        for step, batch in enumerate(pool.batches(self.distil_epochs, ctx.rng("distil"))):
            descend(student, optimiser, [batch], self.distil_rate)
            if step >= first:
                total += student.weights
        return student.model() | {"mu": (total / (steps - first)).to(student.weights.dtype)}


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
