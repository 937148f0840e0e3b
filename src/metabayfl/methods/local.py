"""Local training: no federation; each client goes on with its own model, nothing is sent. docs/methods.md 2.5."""

from collections.abc import Sequence
from typing import ClassVar

from metabayfl.methods.base import put
from metabayfl.methods.own_models import OwnModels
from metabayfl.types import Context, Fit, Params, Received, TrainData, Update


class Local(OwnModels):
    """Every client alone with a plain network: what a federation must beat."""

    name: ClassVar[str] = "local"
    paper: ClassVar[str] = "no federation"
    exchanges: ClassVar[bool] = False
    floats_up: ClassVar[float] = 0.0
    floats_down: ClassVar[float] = 0.0

    def broadcast(self, server: Params, ctx: Context) -> Params:
        """Nothing is sent."""
        return {}

    def payload_like(self, server: Params, ctx: Context) -> Params:
        """Nothing is sent."""
        return {}

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        """Train the client's own model further."""
        model, metrics = self.train(self.own_model(state, ctx), data, ctx)
        return Fit(Update({}, 1.0, metrics), put(model, "own"), {})

    def aggregate(self, server: Params, updates: Sequence[Received], ctx: Context) -> Params:
        """The server keeps the start that all have in common."""
        return server
