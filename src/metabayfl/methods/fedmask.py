"""FedMask (Li et al., SenSys 2021): weights are frozen, clients learn and send binary masks. docs/methods.md 4.5."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from metabayfl import aggregate
from metabayfl.methods.base import put
from metabayfl.methods.own_models import OwnModels
from metabayfl.optim import Group, PointLoss, Rate
from metabayfl.task import Task
from metabayfl.types import Context, Fit, Params, Received, TrainData, Update

LEVELS = 255
"""Steps in which the mean of the masks is sent back, one byte for each weight."""
SUREST = 0.7
"""A mean mask is kept between 1 - SUREST and SUREST before it becomes scores, so that these can change again."""


class FedMask(OwnModels):
    """Each client chooses which of the common, frozen weights its network uses; one bit for each weight is sent."""

    name: ClassVar[str] = "fedmask"
    paper: ClassVar[str] = "Li et al., SenSys 2021 (details are our reading)"
    floats_up: ClassVar[float] = 1 / 32
    floats_down: ClassVar[float] = 1 / 4

    rate: Rate = 0.1
    """Learning rate of scores, and of biases and normalisation, which stay with the client."""
    frozen: Literal["signed", "given"] = "signed"
    """Frozen weights: the signs of the given ones times sqrt(2 / inputs of a unit), or as given."""
    keep: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the units of each layer but the last that a client keeps, chosen once after its first epochs."""
    batchnorm: Literal["local"] = "local"
    """BatchNorm stays with the client."""

    def init_server(self, ctx: Context) -> Params:
        """Return the common start and a random mean of the masks: scores all at the edge would flip all at once."""
        count = len(Masking(ctx.task, self.frozen).places)
        mean = torch.randint(LEVELS + 1, (count,), generator=ctx.rng("mask"), dtype=torch.uint8)
        return super().init_server(ctx) | {"mean": mean}

    def broadcast(self, server: Params, ctx: Context) -> Params:
        """Return the mean of the masks; the frozen weights are everywhere already."""
        return {"mean": server["mean"]}

    def payload_like(self, server: Params, ctx: Context) -> Params:
        """Return a bit for each weight and for each unit."""
        masking = Masking(ctx.task, self.frozen)
        return {"mask": pack(masking.places > 0), "units": pack(masking.first_units >= 0)}

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        """Train scores from the mean mask; at first choose the units that are worth it and begin again with them."""
        masking = Masking(ctx.task, self.frozen)
        model, units = self.own_model(state, ctx), state.get("units")
        if units is None:
            trial = MaskLoss(masking, model, down["mean"], torch.ones(len(masking.first_units), dtype=torch.bool))
            self.descend(trial, data, ctx)
            units = masking.best_units(trial.scores, self.keep)
        loss = MaskLoss(masking, model, down["mean"], units.bool())
        metrics = self.descend(loss, data, ctx) | {"kept": loss.mask().double().mean().item()}
        weight = self.weight_of(data)
        payload = {"mask": pack(loss.mask()), "units": pack(units.bool())}
        state = put(loss.model(), "own") | {"units": units.bool().to(torch.uint8)}
        return Fit(Update(payload, weight, metrics), state, {})

    def aggregate(self, server: Params, updates: Sequence[Received], ctx: Context) -> Params:
        """Average each bit over the clients that have its unit; what nobody has stays as it was."""
        masking = Masking(ctx.task, self.frozen)

        def terms(payload: Params, share: float) -> Params:
            owned = masking.spread(unpack(payload["units"], len(masking.first_units)))
            return {"on": (unpack(payload["mask"], len(owned)) & owned).double(), "owned": owned.double()}

        sums = aggregate.weighted_sums(updates, terms)
        mean = (LEVELS * sums["on"] / sums["owned"]).nan_to_num().round().to(torch.uint8)
        return server | {"mean": torch.where(sums["owned"] > 0, mean, server["mean"])}


class Masking:
    """Where the masked weights lie in the flat vector, and to which unit (row of a layer) each belongs."""

    def __init__(self, task: Task, frozen: Literal["signed", "given"]) -> None:
        self.task, initial = task, task.initial()["mu"]
        slots = [slot for slot in task.layout.slots if len(slot.shape) > 1]
        self.rows = [slot.shape[0] for slot in slots]
        self.sizes = [slot.shape.numel() for slot in slots]
        self.places = torch.cat([torch.arange(slot.start, slot.stop) for slot in slots])
        self.first_units = torch.arange(sum(self.rows))
        values = [initial[slot.start : slot.stop] for slot in slots]
        signed = [
            value.sign() * (2 * slot.shape[0] / len(value)) ** 0.5 for slot, value in zip(slots, values, strict=True)
        ]
        self.weights = torch.cat(signed if frozen == "signed" else values)

    def spread(self, units: Tensor) -> Tensor:
        """Repeat a value of each unit for each of its weights; a unit is a run of them in either memory format."""
        counts = [size // rows for rows, size in zip(self.rows, self.sizes, strict=True) for _ in range(rows)]
        return units.repeat_interleave(torch.tensor(counts))

    def best_units(self, scores: Tensor, keep: float) -> Tensor:
        """Choose the share of units with the highest mean score in each layer; all of the last, the outputs."""
        chosen = []
        for rows, values in zip(self.rows, torch.split(scores, self.sizes), strict=True):
            means = values.view(rows, -1).mean(1)
            best = means.topk(max(1, round(keep * rows))).indices
            chosen.append(torch.zeros(rows, dtype=torch.bool).index_fill_(0, best, value=True))
        chosen[-1].fill_(value=True)
        return torch.cat(chosen)


class MaskLoss(PointLoss):
    """The NLL of the frozen weights under a mask, 1 where sigmoid(score) is at least 1/2.

    What is trained are the scores, in the places of their weights, and the parameters that have no mask.
    """

    def __init__(self, masking: Masking, model: Params, mean: Tensor, units: Tensor) -> None:
        super().__init__(masking.task, model)
        self.places, self.owned = masking.places, masking.spread(units)
        self.trained = self.weights.clone()
        self.trained[self.places] = (mean.to(self.weights.dtype) / LEVELS).clamp(1 - SUREST, SUREST).logit()
        self.groups = [Group(self.trained, masking.task.gradient[: masking.task.size])]
        self._is_masked = torch.zeros_like(self.weights, dtype=torch.bool).index_fill_(0, self.places, value=True)
        self._switched = torch.zeros_like(self.weights).index_put_((self.places,), masking.weights * self.owned)

    def __call__(self, x: Tensor, y: Tensor) -> float:
        """Evaluate; the gradient of a bit passes straight through to its score: dL/db · sigmoid'(score)."""
        self._apply()
        nll = super().__call__(x, y)
        sigmoid = torch.sigmoid(self.trained)
        slope = torch.addcmul(sigmoid, sigmoid, sigmoid, value=-1).mul_(self._switched)
        self.groups[0].gradient.mul_(torch.where(self._is_masked, slope, 1.0))
        return nll

    @property
    def scores(self) -> Tensor:
        """Return the scores of the masked weights."""
        return self.trained[self.places]

    def mask(self) -> Tensor:
        """Return the bits; units that the client has not got are off."""
        return (self.scores >= 0) & self.owned

    def model(self) -> Params:
        """Return the network as it is used."""
        self._apply()
        return super().model()

    def _apply(self) -> None:
        torch.where(self._is_masked, self._switched * (self.trained >= 0), self.trained, out=self.weights)


def pack(bits: Tensor) -> Tensor:
    """Eight bits to a byte."""
    return torch.from_numpy(np.packbits(bits.numpy()))


def unpack(packed: Tensor, count: int) -> Tensor:
    """Undo `pack`."""
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count)).bool()
