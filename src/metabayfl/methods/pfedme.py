"""pFedMe (Dinh et al., NeurIPS 2020): FedAvg on Moreau envelopes; minimisers are personal. docs/methods.md 5.1."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from metabayfl import aggregate
from metabayfl.methods.base import Count, Method
from metabayfl.optim import OptimiserName, PointLoss, Rate, Trace, rate_at, steps
from metabayfl.proximal import Proximal
from metabayfl.types import Context, Fit, Params, Received, TrainData


class PFedMe(Method):
    """Clients descend F_n(w) = min over theta of NLL(theta) + prox/2 |theta - w|²; theta is their own model."""

    name: ClassVar[str] = "pfedme"
    paper: ClassVar[str] = "Dinh et al., NeurIPS 2020"
    is_personal: ClassVar[bool] = True
    passes: ClassVar[float] = 5.0

    prox: Annotated[float, Field(gt=0, validate_default=True)] = 15.0
    """Strength of the pull between theta and w."""
    inner_steps: Count = 5
    """Steps of theta on each mini-batch, before one step of w."""
    inner_rate: Annotated[float, Field(gt=0, validate_default=True)] = 0.05
    """Learning rate of theta."""
    rate: Rate = 0.03
    """Learning rate of w, written like that of other methods; times prox it must stay below 1."""
    server_mix: Annotated[float, Field(gt=0, le=2)] = 1.0
    """How far the server goes from the old model towards the mean of the new ones."""
    optimiser: OptimiserName = "sgd"
    """Optimiser of theta, fresh in every round."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of sgd."""

    @field_validator("prox")
    @classmethod
    def _keeps_w_stable(cls, prox: float, others: ValidationInfo) -> float:
        """Refuse steps of w that overshoot on a flat loss."""
        product = prox * rate_at(others.data.get("rate", 0.0), 0, 1)
        if product >= 1:
            raise ValueError(f"rate * prox = {product:g}: below 1 is accepted")
        return prox

    @field_validator("inner_rate")
    @classmethod
    def _keeps_theta_stable(cls, inner_rate: float, others: ValidationInfo) -> float:
        """Refuse steps of theta that grow on a flat loss."""
        product = inner_rate * others.data.get("prox", 0.0)
        if product >= 2 and others.data.get("optimiser") == "sgd":
            raise ValueError(f"inner_rate * prox = {product:g}: below 2 is accepted")
        return inner_rate

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        """For each mini-batch: solve for theta approximately, then w <- w - rate prox (w - theta)."""
        start = ctx.task.join(down, state)
        rate = rate_at(self.rate, ctx.round, ctx.rounds)
        theta = Proximal(PointLoss(ctx.task, start), start["mu"], self.prox)
        optimiser = self.make_optimiser(theta)
        losses = []
        for nll in steps(theta, optimiser, self.batches(data, ctx), self.inner_rate, self.inner_steps):
            losses.append(nll)
            theta.centre.add_(theta.offset(), alpha=rate * self.prox)
        own = theta.model()
        weights = own["mu"].clone()
        weights[: len(theta.centre)] = theta.centre
        metrics = {"nll": Trace(losses).last(data.steps_per_epoch()), "rate": rate, "steps": len(losses)}
        return self.leave(own | {"mu": weights}, metrics | theta.metrics(), data, ctx)._replace(personal=own)

    def aggregate(self, server: Params, updates: Sequence[Received], ctx: Context) -> Params:
        """w_g <- (1 - server_mix) w_g + server_mix times the mean."""
        return aggregate.mix(server, aggregate.mean(updates), self.server_mix)
