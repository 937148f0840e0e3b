"""What decides between models on d_n: their losses, sample by sample, with the same noise. docs/methods.md 3.1."""

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from metabayfl.methods.base import Count, Method
from metabayfl.metrics import mean_probabilities
from metabayfl.types import Context, InputError, Params, TrainData

SMALLEST_PROBABILITY, SCALINGS = 1e-12, 20
LARGEST_LOSS = 1e30
"""What is not a number is worse than everything."""


class ScoredOnDn(Method):
    """A method that compares models by their losses on d_n."""

    selects: ClassVar[bool] = True

    select_on: Literal["dn", "test"] = "dn"
    """Samples that decide: d_n. The local test part, as the paper's algorithm says, is a leak: for study only."""
    score_by: Literal["nll", "shifted"] = "shifted"
    """Loss on d_n that decides: the NLL, or the NLL after the best shift of the class scores; that neither rewards nor
    punishes a rate for learning how often the client has which class, which is lost in the average."""
    score_samples: Count = 256
    """Samples of d_n that a score uses at most."""
    score_draws: Count = 2
    """Weight samples of a score, the same for all rates."""

    @property
    def leaks(self) -> bool:
        """Whether fitting sees test data."""
        return self.select_on == "test"

    def losses(self, model: Params, data: TrainData, ctx: Context) -> tuple[Tensor, Tensor]:
        """NLL of a model on samples of d_n, and what decides."""
        return self.losses_of(self.outputs_on_dn(model, self.score_draws, data, ctx), data, ctx)

    def outputs_on_dn(self, model: Params, draws: int, data: TrainData, ctx: Context) -> Tensor:
        """Outputs for samples of d_n; the same noise for all models and rounds."""
        if not len(data.select_x):
            raise InputError(f"{self.name} chooses by d_n, and client {ctx.client} has none: raise select.fraction")
        return self.predict(model, data.select_x[: self.score_samples], draws, replace(ctx, round=0, part=0))

    def losses_of(self, outputs: Tensor, data: TrainData, ctx: Context) -> tuple[Tensor, Tensor]:
        """NLL of outputs for samples of d_n, and what decides."""
        y, offset = data.select_y[: self.score_samples], self.offset(data, ctx)
        outputs = outputs if offset is None else outputs + offset
        losses = _finite(ctx.task.likelihood.losses(outputs, y))
        if self.score_by == "nll" or y.is_floating_point():
            return losses, losses
        return losses, _finite(shifted_losses(outputs, y))


def shifted_losses(outputs: Tensor, y: Tensor) -> Tensor:
    """NLL of each label after the factors on the class probabilities that make the sum of all lowest.

    They are those with which each class is predicted as often as it occurs, found by iterative scaling.
    """
    probabilities = mean_probabilities(outputs).clamp_min(SMALLEST_PROBABILITY)
    counts = torch.bincount(y, minlength=outputs.shape[-1]).double()
    factors = torch.ones_like(counts)
    for _ in range(SCALINGS):
        factors *= counts / normalised(probabilities * factors).sum(0).clamp_min(SMALLEST_PROBABILITY)
    return -normalised(probabilities * factors).gather(1, y[:, None]).squeeze(1).log()


def normalised(values: Tensor) -> Tensor:
    """Divide rows by their sums."""
    return values / values.sum(1, keepdim=True)


def _finite(losses: Tensor) -> Tensor:
    return losses.nan_to_num(nan=LARGEST_LOSS).clamp(max=LARGEST_LOSS)
