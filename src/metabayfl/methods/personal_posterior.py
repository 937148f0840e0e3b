"""Meta-BayFL's personal posterior (the paper's x_n and lambda): near the received one. docs/methods.md 3.6."""

from typing import Annotated, Literal

import torch
from pydantic import Field

from metabayfl.methods.base import NotNegative, get, put
from metabayfl.methods.bayfl import BayFL
from metabayfl.methods.needs import Need
from metabayfl.optim import descend
from metabayfl.proximal import Proximal
from metabayfl.types import Context, Diverged, Fit, Params, TrainData


class PersonalPosterior(BayFL):
    """A Bayesian method whose clients may train a posterior of their own beside the one that is shared."""

    personal: Literal["last", "average", "prox"] = "average"
    """The client's own model: what its last training left, an average of that over rounds mixed with what it receives,
    or a posterior of its own that is pulled to the received one."""
    personal_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the last training in the average over rounds."""
    personal_mix: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of that average in the client's own model; the rest is what the client receives."""
    prox: NotNegative = 0.1
    """Strength of the pull of a personal posterior's means to the received ones (lambda); 0 is local training."""

    @property
    def needs(self) -> frozenset[Need]:
        """Clients keep their personal posteriors."""
        return super().needs | (set() if self.personal == "last" else {Need.STATE})

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        """Take part, then train the personal posterior: the same rate, batches, noise and dropout masks."""
        random = torch.get_rng_state()
        fit = super().fit(down, state, data, ctx)
        if self.personal == "last":
            return fit
        if self.personal == "average":
            return self.average_own(fit, get(state, "own"))
        torch.set_rng_state(random)
        received = ctx.task.join(down, state)
        own, metrics = get(state, "own") or received, fit.update.metrics
        if "rate" in metrics:
            own, gained = self.train_own(own, received, metrics["rate"], data, ctx)
            metrics = metrics | gained
        own = self.with_frequencies(own, data, ctx)
        return Fit(fit.update._replace(metrics=metrics), fit.state | put(own, "own"), {})

    def average_own(self, fit: Fit, own: Params) -> Fit:
        """Go a share of the way from the personal posterior to what this round has left."""
        share = self.personal_share
        mean = {name: own.get(name, tensor).lerp(tensor, share) for name, tensor in fit.personal.items()}
        return Fit(fit.update, fit.state | put(mean, "own"), {})

    def train_own(
        self, own: Params, received: Params, rate: float, data: TrainData, ctx: Context
    ) -> tuple[Params, dict[str, float]]:
        """Minimise the negative ELBO + prox/2 |mu - mu_g|²; a posterior that diverges stays as it was."""
        elbo = self.elbo(own, self.prior_of(received, ctx), data, ctx)
        pulled = Proximal(elbo, received["mu"], self.prox)
        try:
            trace = descend(pulled, self.make_optimiser(elbo), self.batches(data, ctx), rate)
        except Diverged:
            return own, {"personal_diverged": 1}
        gained = {"personal_nll": trace.last(data.steps_per_epoch()), "distance": pulled.metrics()["distance"]}
        return pulled.model(), gained

    def personalise(
        self, down: Params, state: Params, personal: Params | None, data: TrainData, ctx: Context
    ) -> Params:
        """Return the personal posterior, if there is one; an average over rounds is mixed with what is received."""
        own = get(state, "own") or super().personalise(down, state, personal, data, ctx)
        if self.personal != "average":
            return own
        received = ctx.task.join(down, state)
        return own | {name: tensor.lerp(own[name], self.personal_mix) for name, tensor in received.items()}
