"""FedAvgM (Hsu et al., arXiv:1909.06335, 2019): FedAvg whose server has momentum. docs/methods.md 2.7."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from metabayfl.methods.base import Positive, model_of
from metabayfl.methods.fedavg import FedAvg
from metabayfl.types import Context, Params, Received


class FedAvgM(FedAvg):
    """FedAvg whose server goes on in the direction of earlier rounds."""

    name: ClassVar[str] = "fedavgm"
    paper: ClassVar[str] = "Hsu et al., 2019"

    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """How much of the last round's velocity is kept; 0 is FedAvg."""
    server_rate: Positive = 0.3
    """How far the server goes along the velocity."""

    def init_server(self, ctx: Context) -> Params:
        """Return the model and a velocity of zero."""
        model = super().init_server(ctx)
        return model | {"velocity": torch.zeros_like(model["mu"])}

    def broadcast(self, server: Params, ctx: Context) -> Params:
        """Return the model; the velocity stays with the server."""
        return model_of(server)

    def payload_like(self, server: Params, ctx: Context) -> Params:
        """Return what a payload must look like: a model."""
        return model_of(server)

    def aggregate(self, server: Params, updates: Sequence[Received], ctx: Context) -> Params:
        """v <- momentum v + (mean - w), w <- w + rate v; buffers are averaged."""
        mean = super().aggregate(server, updates, ctx)
        velocity = self.server_momentum * server["velocity"] + (mean["mu"] - server["mu"])
        return mean | {"mu": server["mu"] + self.server_rate * velocity, "velocity": velocity}
