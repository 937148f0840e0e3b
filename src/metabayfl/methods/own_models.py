"""Methods without a global model: each client keeps and uses one of its own."""

from typing import ClassVar

from metabayfl.methods.base import Method, get
from metabayfl.methods.needs import Need
from metabayfl.types import Context, Params, TrainData


class OwnModels(Method):
    """A method whose clients keep their models in their state, under `own`."""

    is_personal: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[Need]:
        """Clients keep their models."""
        return frozenset({Need.STATE})

    def own_model(self, state: Params, ctx: Context) -> Params:
        """Return a client's model: what its last round left, or the common start."""
        return get(state, "own") or self.init_model(ctx)

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
