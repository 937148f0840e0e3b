"""Local training: no federation; each client goes on with its own model, nothing is sent. docs/methods.md 2.5."""

from collections.abc import Sequence
from typing import ClassVar

from metabayfl.methods.base import Method, get, put
from metabayfl.methods.needs import Need
from metabayfl.types import Context, Fit, Params, Received, TrainData, Update


class Local(Method):
    """Every client alone with a plain network: what a federation must beat."""

    name: ClassVar[str] = "local"
    paper: ClassVar[str] = "no federation"
    personal: ClassVar[bool] = True
    exchanges: ClassVar[bool] = False
    floats_up: ClassVar[float] = 0.0
    floats_down: ClassVar[float] = 0.0

    @property
    def needs(self) -> frozenset[Need]:
        """Clients keep their models."""
        return frozenset({Need.STATE})

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

    def own_model(self, state: Params, ctx: Context) -> Params:
        """Return the client's model: what its last round left, or the common start."""
        return get(state, "own") or self.init_model(ctx)

    def aggregate(self, server: Params, updates: Sequence[Received], ctx: Context) -> Params:
        """The server keeps the start that all have in common."""
        return server

    def global_model(self, server: Params, ctx: Context) -> Params | None:
        """There is none."""
        return None

    def received_model(self, down: Params, state: Params, ctx: Context) -> Params | None:
        """There is none."""
        return None

    def personalise(
        self, down: Params, state: Params, personal: Params | None, data: TrainData, ctx: Context
    ) -> Params:
        """Return the client's own model."""
        return self.own_model(state, ctx)
