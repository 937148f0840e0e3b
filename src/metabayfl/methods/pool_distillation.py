"""What methods share whose server distils predictions on the unlabelled pool U. docs/methods.md 4.3."""

from typing import Annotated

from pydantic import Field
from torch import Tensor

from metabayfl.distillation import count_classes, distil
from metabayfl.methods.base import Count, Method, Positive
from metabayfl.methods.needs import Need
from metabayfl.optim import Objective
from metabayfl.options import InputError
from metabayfl.types import Context, Params, TrainData


class PoolDistillation(Method):
    """A method whose server trains a student on predictions for U."""

    temperature: Positive = 0.5
    """Below 1 sharpens the mean prediction."""
    distil_epochs: Annotated[int, Field(ge=0)] = 20
    """Epochs over U."""
    distil_rate: Positive = 1e-3
    """Learning rate of the distillation, SGD with momentum 0.9 and weight decay 1e-5."""
    distil_batch: Count = 128
    """Mini-batch size of the distillation."""
    averaged: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the distillation's steps, the last ones, over which the student's weights are averaged."""

    @property
    def distils(self) -> bool:
        """Whether it does so at these options."""
        return self.distil_epochs > 0

    @property
    def needs(self) -> frozenset[Need]:
        """U, and predictions of one client after the other."""
        return super().needs | ({Need.UNLABELLED, Need.INDIVIDUAL} if self.distils else set())

    def init_server(self, ctx: Context) -> Params:
        """Return the model; only predictions of classes can be averaged."""
        if self.distils:
            count_classes(self.name, ctx.task)
        return super().init_server(ctx)

    def distil(self, student: Objective, x: Tensor, answer: Tensor, ctx: Context) -> Params:
        """Train a student on an answer and average its weights along the way; BatchNorm adapts to U."""
        pool = TrainData(x, answer, x[:0], answer[:0], self.distil_batch)
        return distil(student, pool, self.distil_epochs, self.distil_rate, self.averaged, ctx.rng("distil"))


def unlabelled(name: str, ctx: Context) -> Tensor:
    """Return U, for method `name`."""
    if ctx.unlabelled is None:
        raise InputError(f"{name} needs {Need.UNLABELLED}, and there is none")
    return ctx.unlabelled
