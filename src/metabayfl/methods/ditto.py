"""Ditto (Li et al., ICML 2021): FedAvg, and a personal model pulled to the received one. docs/methods.md 5.2."""

from typing import ClassVar

import torch

from metabayfl.methods.base import NotNegative, get, put
from metabayfl.methods.fedavg import FedAvg
from metabayfl.methods.needs import Need
from metabayfl.optim import PointLoss
from metabayfl.proximal import Proximal
from metabayfl.types import Context, Fit, Params, TrainData


class Ditto(FedAvg):
    """FedAvg whose clients also train a model of their own that stays near the global one."""

    name: ClassVar[str] = "ditto"
    paper: ClassVar[str] = "Li et al., ICML 2021"
    is_personal: ClassVar[bool] = True
    passes: ClassVar[float] = 2.0

    prox: NotNegative = 0.1
    """Strength of the pull of the personal model to the received one; 0 is local training."""

    @property
    def needs(self) -> frozenset[Need]:
        """Clients keep their personal models."""
        return frozenset({Need.STATE})

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        """Train the global model as FedAvg does, then the personal one on the same batches and dropout masks."""
        random = torch.get_rng_state()
        fit = super().fit(down, state, data, ctx)
        torch.set_rng_state(random)
        start = get(state, "own") or self.init_model(ctx)
        own = Proximal(PointLoss(ctx.task, start), down["mu"], self.prox)
        metrics = self.descend(own, data, ctx)
        metrics = fit.update.metrics | {"personal_nll": metrics["nll"]} | own.metrics()
        return Fit(fit.update._replace(metrics=metrics), fit.state | put(own.model(), "own"), {})

    def personalise(
        self, down: Params, state: Params, personal: Params | None, data: TrainData, ctx: Context
    ) -> Params:
        """Return the personal model; a client that never took part has only what it receives."""
        return get(state, "own") or ctx.task.join(down, state)
