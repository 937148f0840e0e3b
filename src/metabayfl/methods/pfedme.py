"""pFedMe (Dinh et al., NeurIPS 2020): FedAvg on Moreau envelopes; minimisers are personal. docs/methods.md 5.1."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from metabayfl import aggregate
from metabayfl.methods.base import Count, Method, Positive
from metabayfl.optim import OptimiserName, Rate, descend, rate_at
from metabayfl.proximal import Proximal
from metabayfl.types import Context, Fit, Params, Received, TrainData


class PFedMe(Method):
    """Clients descend F_n(w) = min over theta of NLL(theta) + prox/2 |theta - w|²; theta is their own model."""

    name: ClassVar[str] = "pfedme"
    paper: ClassVar[str] = "Dinh et al., NeurIPS 2020"
    personal: ClassVar[bool] = True
    passes: ClassVar[float] = 5.0

    prox: Positive = 15.0
    """Strength of the pull between theta and w."""
    inner_steps: Count = 5
    """Steps of theta on each mini-batch, before one step of w."""
    inner_rate: Positive = 0.05
    """Learning rate of theta."""
    rate: Rate = 0.03
    """Learning rate of w, written like that of other methods; times prox it must stay below 1."""
    server_mix: Annotated[float, Field(gt=0, le=2)] = 1.0
    """How far the server goes from the old model towards the mean of the new ones."""
    optimiser: OptimiserName = "sgd"
    """Optimiser of theta, fresh in every round."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of sgd."""

    @model_validator(mode="after")
    def _is_stable(self) -> Self:
        """Refuse rates at which the steps of w or theta grow on a flat loss."""
        outer, inner = rate_at(self.rate, 0, 1) * self.prox, self.inner_rate * self.prox
        if outer >= 1:
            raise ValueError(f"rate * prox = {outer:g}: below 1 is accepted")
        if inner >= 2 and self.optimiser == "sgd":
            raise ValueError(f"inner_rate * prox = {inner:g}: below 2 is accepted")
        return self

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        """For each mini-batch: solve for theta approximately, then w <- w - rate prox (w - theta)."""
        start = ctx.task.join(down, state)
        rate = rate_at(self.rate, ctx.round, ctx.rounds)
        theta = Proximal(ctx.task, start, start["mu"], self.prox)
        optimiser = self.make_optimiser(theta)
        losses = []
        for batch in self.batches(data, ctx):
            losses.append(descend(theta, optimiser, [batch] * self.inner_steps, self.inner_rate).nll[-1])
            theta.centre.add_(theta.offset(), alpha=rate * self.prox)
        own = theta.model()
        weights = own["mu"].clone()
        weights[: len(theta.centre)] = theta.centre
        steps = data.steps_per_epoch()
        metrics = {"nll": sum(losses[-steps:]) / steps, "rate": rate, "steps": len(losses)} | theta.metrics()
        return self.leave(own | {"mu": weights}, metrics, data, ctx)._replace(personal=own)

    def aggregate(self, server: Params, updates: Sequence[Received], ctx: Context) -> Params:
        """w_g <- (1 - server_mix) w_g + server_mix times the mean."""
        return aggregate.mix(server, aggregate.mean(updates), self.server_mix)
