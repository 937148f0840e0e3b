"""pFedBayes (Zhang et al., ICML 2022): the global posterior is the prior of personal ones. docs/methods.md 4.1."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from metabayfl import aggregate, gaussian
from metabayfl.gaussian import Elbo, Prior, sigma_of
from metabayfl.methods.base import Count, NotNegative, get, put
from metabayfl.methods.needs import Need
from metabayfl.methods.variational import Variational
from metabayfl.optim import Group, Trace, make_optimiser, rate_at, steps
from metabayfl.types import Context, Fit, Params, Received, TrainData


class PFedBayes(Variational):
    """Each client has a posterior of its own, near a global one that follows it."""

    name: ClassVar[str] = "pfedbayes"
    paper: ClassVar[str] = "Zhang et al., ICML 2022"
    is_personal: ClassVar[bool] = True

    initial_sigma: Annotated[float, Field(ge=1e-6, le=10)] = 0.05
    """Standard deviation of the posteriors at the start."""
    prior: Literal["global"] = "global"
    """Prior: the client's copy of the global posterior."""
    kl: Literal["client"] = "client"
    """Divide the KL by the client's training samples."""
    kl_weight: NotNegative = 0.1
    """Weight of the KL between personal and global posterior (zeta)."""
    rule: gaussian.Rule = "rho"
    """How the server averages spreads: rho, sigma, var, mixture, sum or product."""
    backend: Literal["bbb"] = "bbb"
    """Gradients of the ELBO (Bayes by backprop)."""
    personal_steps: Count = 1
    """Steps of the personal posterior on each mini-batch, before one step of the prior."""
    server_mix: Annotated[float, Field(gt=0, le=2)] = 1.0
    """How far the server goes from the old posterior towards the average of the new ones."""

    @property
    def needs(self) -> frozenset[Need]:
        """Clients keep their posteriors."""
        return frozenset({Need.STATE})

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        """For each mini-batch: steps of q on NLL + c KL(q || w), then a step of w on c KL(q || w)."""
        follower = Follower(ctx.task.join(down, state))
        scale, rate = self.kl_weight / len(data), rate_at(self.rate, ctx.round, ctx.rounds)
        own = get(state, "own") or self.init_model(ctx)
        elbo = Elbo(ctx.task, own, follower.prior(), scale, ctx.rng("noise"), self.rho_factor(scale))
        optimiser, mover = (
            make_optimiser(self.optimiser, groups, self.weight_decay, self.momentum)
            for groups in (elbo.groups, follower.groups)
        )
        losses = []
        for nll in steps(elbo, optimiser, self.batches(data, ctx), rate, self.personal_steps):
            losses.append(nll)
            follower.follow(elbo, scale)
            mover.step(rate)
            elbo.set_prior(follower.moved())
        metrics = {"nll": Trace(losses).last(data.steps_per_epoch()), "rate": rate, "steps": len(losses)}
        personal = elbo.model()
        fit = self.leave(follower.model(personal), metrics | elbo.metrics(), data, ctx)
        private = ctx.task.split(personal)[1]
        return Fit(fit.update, private | put(personal, "own"), {})

    def aggregate(self, server: Params, updates: Sequence[Received], ctx: Context) -> Params:
        """w_g <- (1 - server_mix) w_g + server_mix times the average."""
        return aggregate.mix(server, super().aggregate(server, updates, ctx), self.server_mix)

    def personalise(
        self, down: Params, state: Params, personal: Params | None, data: TrainData, ctx: Context
    ) -> Params:
        """Return the personal posterior; a client that never took part has only what it receives."""
        return get(state, "own") or ctx.task.join(down, state)


class Follower:
    """A client's copy of the global posterior, which goes after the personal one."""

    def __init__(self, received: Params) -> None:
        self.rho = received["rho"].clone()
        self.sigma = sigma_of(self.rho)
        self.mu = received["mu"][: len(self.rho)].clone()
        self.groups = [
            Group(values, torch.zeros_like(values), decays=False) for values in (self.mu, self.rho)
        ]  # fmt: skip

    def prior(self) -> Prior:
        """Return it as the prior of the personal posterior; nothing is copied."""
        return Prior(self.mu, self.sigma)

    def moved(self) -> Prior:
        """Say that mu and rho have taken a step; returns the prior that it is now."""
        self.sigma = sigma_of(self.rho)
        return self.prior()

    def follow(self, leader: Elbo, scale: float) -> None:
        """Leave the gradient of scale · KL(q || w) by w: there is no likelihood in it.

        By mu it is (mu - mu_q) / sigma², by sigma 1 / sigma - (sigma_q² + (mu - mu_q)²) / sigma³.
        """
        mean, spread = (group.gradient for group in self.groups)
        weight = scale / self.sigma.square()
        ahead = torch.sub(self.mu, leader.mu[: len(self.mu)], out=mean)
        second_moment = torch.addcmul(sigma_of(leader.rho).square_(), ahead, ahead, out=spread)
        second_moment.div_(self.sigma).neg_().add_(self.sigma).mul_(weight).mul_(torch.sigmoid(self.rho))
        ahead.mul_(weight)

    def model(self, personal: Params) -> Params:
        """Return what is sent: it; what has no spread, and the buffers, as the personal posterior has them."""
        return personal | {"mu": torch.cat([self.mu, personal["mu"][len(self.mu) :]]), "rho": self.rho.clone()}
