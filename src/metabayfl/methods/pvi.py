"""PVI (Bui et al., arXiv:1811.11206, 2018): one posterior as a product of clients' factors. docs/methods.md 4.4."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from metabayfl import aggregate
from metabayfl.gaussian import SMALLEST_SIGMA, Elbo, Prior, rho_of, sigma_of
from metabayfl.methods.base import Positive, model_of
from metabayfl.methods.needs import Need
from metabayfl.methods.variational import Variational
from metabayfl.types import Context, Fit, Params, Received, TrainData, Update

SMALLEST_SHARE = 1e-3
"""A precision below this share of the prior's is refused, coordinate by coordinate."""


class PVI(Variational):
    """Partitioned variational inference: each client owns a Gaussian factor, every datum counts once."""

    name: ClassVar[str] = "pvi"
    paper: ClassVar[str] = "Bui et al., 2018"

    initial_sigma: Annotated[float, Field(ge=1e-6, le=10)] = 0.02
    """Standard deviation from which a client's first training starts."""
    prior: Literal["cavity"] = "cavity"  # type: ignore[assignment]
    """Prior of a client: the received posterior without the client's own factor; at first N(start, prior_sigma²)."""
    prior_sigma: Positive = 0.1
    """Standard deviation of the fixed prior."""
    kl: Literal["client"] = "client"
    """Divide the KL by the client's training samples."""
    kl_weight: Annotated[float, Field(gt=0)] = 0.01
    """Weight of the KL; 1 is the exact posterior, below it is that of data counted more often."""
    rule: Literal["product"] = "product"
    """The server multiplies the changes of the factors in."""
    backend: Literal["bbb"] = "bbb"
    """Gradients of the ELBO (Bayes by backprop)."""
    damping: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a factor's change that is made at once; by default 1 / number of clients."""

    @property
    def needs(self) -> frozenset[Need]:
        """Clients keep their factors."""
        return frozenset({Need.STATE})

    def init_model(self, ctx: Context) -> Params:
        """Return the prior N(start, prior_sigma²)."""
        sigma = torch.full((ctx.task.bayesian_size,), self.prior_sigma, dtype=ctx.task.weights.dtype)
        return ctx.task.initial() | {"rho": rho_of(sigma)}

    def init_server(self, ctx: Context) -> Params:
        """Return the prior, as a model and in natural parameters."""
        return super().init_server(ctx) | {name: t.double() for name, t in natural(self.init_model(ctx)).items()}

    def init_client(self, ctx: Context) -> Params:
        """Return a factor that says nothing."""
        zeros = torch.zeros(ctx.task.bayesian_size, dtype=torch.float64)
        return {"precision": zeros, "shift": zeros.clone()}

    def broadcast(self, server: Params, ctx: Context) -> Params:
        """Return the posterior as a model."""
        return model_of(server)

    def payload_like(self, server: Params, ctx: Context) -> Params:
        """Return changes of the natural parameters, and of a model what has no spread."""
        size, dtype = ctx.task.bayesian_size, ctx.task.weights.dtype
        changes = {name: server[name].to(dtype) for name in ("precision", "shift")}
        return changes | {"rest": server["mu"][size:]} | {k: server[k] for k in ("buffers",) if k in server}

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        """Maximise the ELBO with the cavity as prior; the factor is what the result has beyond the cavity."""
        received = ctx.task.join(down, state)
        cavity, rejected = self.cavity(received, state, ctx)
        start = received if state["precision"].any() else self.narrow(received)
        own, metrics = self.solve(start, cavity, data, ctx)
        found = natural(own)
        damping = self.damping or 1 / len(ctx.clients)
        change = {name: damping * (found[name] - cavity[name] - state[name]) for name in ("precision", "shift")}
        change = {name: tensor.to(received["mu"].dtype) for name, tensor in change.items()}
        shared, private = ctx.task.split(own)
        rest = {"rest": shared["mu"][ctx.task.bayesian_size :].clone()}
        rest |= {name: shared[name] for name in ("buffers",) if name in shared}
        factor = {name: state[name] + tensor for name, tensor in change.items()}
        weight = self.weight_of(data)
        return Fit(Update(change | rest, weight, metrics | {"rejected": rejected}), private | factor, own)

    def cavity(self, received: Params, state: Params, ctx: Context) -> tuple[Params, float]:
        """Divide the client's factor out of the posterior; where that leaves no Gaussian, take the prior; count it."""
        whole, prior = natural(received), natural(self.init_model(ctx))
        rest = {name: whole[name] - state[name] for name in whole}
        good = rest["precision"] > SMALLEST_SHARE * prior["precision"]
        return {name: torch.where(good, rest[name], prior[name]) for name in rest}, float((~good).sum())

    def narrow(self, received: Params) -> Params:
        """Return where a client's first training starts: the received mean with little noise."""
        return received | {"rho": rho_of(torch.full_like(received["rho"], self.initial_sigma))}

    def solve(
        self, start: Params, cavity: Params, data: TrainData, ctx: Context
    ) -> tuple[Params, dict[str, float]]:  # fmt: skip
        """Train a posterior from `start` with a prior in natural parameters."""
        dtype = start["mu"].dtype
        mean, sigma = cavity["shift"] / cavity["precision"], cavity["precision"].rsqrt()
        prior = Prior(mean.to(dtype), sigma.to(dtype))
        scale = self.kl_weight / len(data)
        elbo = Elbo(ctx.task, start, prior, scale, ctx.rng("noise"), self.rho_factor(scale))
        metrics = self.descend(elbo, data, ctx)
        return elbo.model(), metrics | elbo.metrics()

    def aggregate(self, server: Params, updates: Sequence[Received], ctx: Context) -> Params:
        """Add the changes to the natural parameters; coordinates that would lose their precision stay as they are."""
        totals = {name: server[name].clone() for name in ("precision", "shift")}
        for payload in (update.payload for update in updates):
            totals = {name: total + payload[name] for name, total in totals.items()}
        good = totals["precision"] > SMALLEST_SHARE / self.prior_sigma**2
        posterior = {name: torch.where(good, totals[name], server[name]) for name in totals}
        mean = aggregate.mean(updates)
        dtype = server["mu"].dtype
        mu = (posterior["shift"] / posterior["precision"]).to(dtype)
        rho = rho_of(posterior["precision"].rsqrt().clamp_min(SMALLEST_SIGMA)).to(dtype)
        model = {"mu": torch.cat([mu, mean["rest"]]), "rho": rho}
        return posterior | model | {name: mean[name] for name in ("buffers",) if name in mean}


def natural(posterior: Params) -> dict[str, Tensor]:
    """Return a Gaussian by its precisions 1/sigma² and its shifts mu/sigma², in float64."""
    precision = sigma_of(posterior["rho"].double()) ** -2
    return {"precision": precision, "shift": posterior["mu"][: len(precision)].double() * precision}
