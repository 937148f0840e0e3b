"""FedProx (Li et al., MLSys 2020): FedAvg with a pull to the received model and unequal work. docs/methods.md 2.2."""

from collections.abc import Iterable
from itertools import islice
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from metabayfl.methods.base import NotNegative
from metabayfl.methods.fedavg import FedAvg
from metabayfl.optim import Objective, PointLoss
from metabayfl.proximal import Proximal
from metabayfl.types import Context, Params, TrainData


class FedProx(FedAvg):
    """FedAvg whose clients stay near the received model, and of whom some may do less work than others."""

    name: ClassVar[str] = "fedprox"
    paper: ClassVar[str] = "Li et al., MLSys 2020"

    prox: NotNegative = 0.01
    """Strength of the pull: half of it times the squared distance is added to the loss; 0 is FedAvg."""
    partial: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Probability that a client does only a part of a round's steps, of any length; it counts all the same."""

    def objective(self, model: Params, data: TrainData, ctx: Context) -> Objective:
        """Return NLL(w) + prox/2 |w - w_g|²."""
        return Proximal(PointLoss(ctx.task, model), model["mu"], self.prox)

    def batches(self, data: TrainData, ctx: Context) -> Iterable[tuple[Tensor, Tensor]]:
        """Return the mini-batches of a round: all of them, or the first few."""
        return islice(super().batches(data, ctx), self.steps(data, ctx))

    def steps(self, data: TrainData, ctx: Context) -> int:
        """Decide how many steps a client takes in a round."""
        whole, rng = self.epochs * data.steps_per_epoch(), ctx.rng("work")
        is_partial = torch.rand(1, generator=rng).item() < self.partial
        return int(torch.randint(1, whole + 1, (1,), generator=rng)) if is_partial else whole
