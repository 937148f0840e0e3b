"""FedPHP (Li et al., ECML PKDD 2021): FedAvg, and private models inherit and teach. docs/methods.md 5.4."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from metabayfl.distillation import Distillation, count_classes
from metabayfl.methods.base import Positive, get, put
from metabayfl.methods.fedavg import FedAvg
from metabayfl.methods.needs import Need
from metabayfl.types import Context, Fit, Params, TrainData

COUNT = "participations"


class FedPHP(FedAvg):
    """FedAvg whose clients keep a moving average of what they sent, and learn from it when they take part again."""

    name: ClassVar[str] = "fedphp"
    paper: ClassVar[str] = "Li et al., ECML PKDD 2021"
    is_personal: ClassVar[bool] = True

    transfer: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the private model's predictions in the loss, beside the labels; 0 trains as FedAvg does."""
    temperature: Positive = 4.0
    """Softens the predictions that are compared."""
    inherit: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Largest share of the old private model in the new one; a client that takes part for the first time keeps 0."""
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the rounds after which a client inherits most; with partial participation, the share of clients."""

    @property
    def needs(self) -> frozenset[Need]:
        """Clients keep their private models."""
        return frozenset({Need.STATE})

    def init_server(self, ctx: Context) -> Params:
        """Return the model; only predictions of classes can be transferred."""
        count_classes(self.name, ctx.task)
        return super().init_server(ctx)

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        """Train what was received, with the private model as a teacher, and let that inherit."""
        private, model = get(state, "own"), ctx.task.join(down, state)
        if private and self.transfer:
            taught = Distillation(ctx.task, model, private, self.transfer, self.temperature)
            model, metrics = self.minimise(taught, data, ctx)
        else:
            model, metrics = self.train(model, data, ctx)
        before = int(state.get(COUNT, torch.zeros(1))[0])
        share = self.momentum_after(before, ctx.rounds) if private else 0.0
        own = {name: private[name].lerp(new, 1 - share) if share else new.clone() for name, new in model.items()}
        fit = self.leave(model, metrics | {"inherited": share}, data, ctx)
        return fit._replace(state=fit.state | put(own, "own") | {COUNT: torch.tensor([before + 1])}, personal={})

    def momentum_after(self, participations: int, rounds: int) -> float:
        """m = inherit · min(1, c / (participation · K)) after c participations."""
        return self.inherit * min(1.0, participations / (self.participation * rounds))

    def personalise(
        self, down: Params, state: Params, personal: Params | None, data: TrainData, ctx: Context
    ) -> Params:
        """Return the private model; a client that never took part has only what it receives."""
        return get(state, "own") or ctx.task.join(down, state)
