"""What methods with a Gaussian posterior share: the ELBO, averaging of posteriors, prediction. docs/methods.md 1."""

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from metabayfl import gaussian
from metabayfl.inspection import Bayesian
from metabayfl.ivon import Ivon, IvonLoss
from metabayfl.methods.base import Method, NotNegative, Positive
from metabayfl.optim import Objective, Optimiser
from metabayfl.types import Context, Params, Received, TrainData

PRIOR_SCALE = 2.0
"""Standard deviation of the prior of a unit with one input."""
NATURAL = 0.012
"""Share of the learning rate with which rho follows its natural gradient: the gradient over the curvature of the KL."""
LARGEST_FACTOR = 1000.0
"""With many samples the KL is small, and its natural gradient would be the noise of the mini-batches alone."""
WIDEST = 3.0
"""Times the prior's sigma that a posterior's may reach: beyond it mini-batch noise drives single sigmas off."""


class Variational(Method):
    """Clients maximise the ELBO of a Bayesian network, the server averages the posteriors."""

    floats_up: ClassVar[float] = 2.0
    floats_down: ClassVar[float] = 2.0

    bayesian: Literal["auto", "all", "dense", "last"] = "all"
    """Layers with a posterior: all that can have one, the dense ones, or the last; auto: the dense ones, or all where
    there are none."""
    deterministic: tuple[str, ...] = ()
    """Patterns of parameter names without a posterior, such as 'encoder.*'."""
    initial_sigma: Annotated[float, Field(ge=1e-6, le=10)] = 0.02
    """Standard deviation of the posterior at the start."""
    prior: Literal["fixed", "global"] = "fixed"
    """Prior: N(0, prior_sigma²), or the received posterior."""
    prior_sigma: Positive | Literal["fan-in"] = 0.1
    """Standard deviation of the fixed prior; fan-in: 2 / sqrt(inputs of a unit), layer by layer. Weights without a
    posterior have it too (they go to their most probable value); norm layers and `deterministic` ones have not."""
    kl: Literal["client", "federation"] = "client"
    """Divide the KL by the client's training samples (its own ELBO) or by everybody's (one posterior for all data)."""
    warm_up: Annotated[int, Field(ge=0)] = 0
    """Rounds in which the weight of the KL grows from little to all of it; not for ivon, whose steps depend on it."""
    kl_weight: NotNegative = 0.01
    """Weight of the KL; 1 is the exact ELBO, which prefers the prior when weights outnumber samples."""
    rule: gaussian.Rule = "var"
    """How the server averages spreads: rho, sigma, var, mixture, sum or product."""
    rho_rate: NotNegative | Literal["auto"] = 1.0
    """Factor on the learning rate of rho. auto: 1 for adam; sgd, whose steps are as small as the gradient, follows the
    natural gradient at about a hundredth of the rate, and sigma stays below three times that of a fixed prior."""
    antithetic: bool = False
    """Let half of each mini-batch see the weight noise with its sign turned, which cancels most of what it does to
    gradients; not where layers normalise over the mini-batch."""
    backend: Literal["bbb", "ivon"] = "bbb"
    """Gradients of the ELBO (Bayes by backprop) for `optimiser`, or natural ones (IVON; rates are near 0.1)."""
    curvature_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.99999
    """How slowly IVON's curvature, and with it the spread, changes."""

    @field_validator("backend")
    @classmethod
    def _natural_gradients_need_a_prior(cls, backend: str, others: ValidationInfo) -> str:
        if backend == "ivon" and others.data.get("kl_weight") == 0:
            raise ValueError("ivon needs kl_weight above 0, and it is 0")
        return backend

    @property
    def bayesian_layers(self) -> Bayesian:
        """Which layers have a posterior."""
        return self.bayesian

    @property
    def deterministic_names(self) -> Sequence[str]:
        """Patterns of parameters that stay deterministic."""
        return self.deterministic

    def init_model(self, ctx: Context) -> Params:
        """Return the posterior before the first round."""
        return gaussian.initial(ctx.task, self.initial_sigma / math.sqrt(self.sample_counts(ctx)))

    def sample_counts(self, ctx: Context) -> float:
        """Return how many samples each one counts as."""
        return 1.0

    def objective(self, model: Params, data: TrainData, ctx: Context) -> Objective:
        """Return the ELBO on the client's data."""
        return self.elbo(model, self.prior_of(model, ctx), data, ctx)

    def elbo(self, model: Params, prior: gaussian.Prior, data: TrainData, ctx: Context) -> Objective:
        """Return the ELBO with a given prior."""
        samples = len(data) if self.kl == "client" else sum(ctx.clients.values())
        scale = self.kl_weight / (samples * self.sample_counts(ctx))
        noise, offset = ctx.rng("noise"), self.offset(data, ctx)
        if self.backend == "ivon":
            return IvonLoss(ctx.task, model, prior, scale, noise, offset)
        scale *= min(1.0, (ctx.round + 1) / (self.warm_up + 1))
        kind = gaussian.PairedElbo if self.antithetic and "buffers" not in model else gaussian.Elbo
        bounded = self.rho_rate == "auto" and self.prior == "fixed"
        largest = (WIDEST * torch.as_tensor(prior.sigma)).clamp_min(self.initial_sigma) if bounded else math.inf
        return kind(ctx.task, model, prior, scale, noise, self.rho_factor(scale), largest, offset)

    def rho_factor(self, kl_scale: float) -> float:
        """Return the factor on the learning rate of rho."""
        if self.rho_rate != "auto":
            return self.rho_rate
        return min(NATURAL / kl_scale, LARGEST_FACTOR) if self.optimiser == "sgd" and kl_scale else 1.0

    def make_optimiser(self, objective: Objective) -> Optimiser:
        """Return a fresh optimiser of an objective; IVON brings its own."""
        if isinstance(objective, IvonLoss):
            return Ivon(objective, self.curvature_momentum)
        return super().make_optimiser(objective)

    def prior_of(self, received: Params, ctx: Context) -> gaussian.Prior:
        """Return the prior of this round."""
        if self.prior == "global":
            return gaussian.as_prior(received)
        inputs, noisy = ctx.task.fan_in, ctx.task.bayesian_size
        if self.prior_sigma == "fan-in":
            sigma = PRIOR_SCALE / inputs.sqrt()
        else:
            sigma = torch.full_like(inputs, self.prior_sigma).masked_fill(inputs == 0, math.inf)
        return gaussian.Prior(0.0, sigma[:noisy], sigma[noisy:] ** -2)

    def aggregate(self, server: Params, updates: Sequence[Received], ctx: Context) -> Params:
        """Average the posteriors by the chosen rule."""
        return gaussian.average(updates, self.rule)

    def predict(self, model: Params, x: Tensor, samples: int, ctx: Context) -> Tensor:
        """Outputs of weight samples, the same for every call."""
        return ctx.task.drawn_outputs(x, lambda: self.draws(model, samples, ctx))

    def draws(self, model: Params, samples: int, ctx: Context) -> Iterator[None]:
        """Put one weight sample after the other into the task."""
        for _ in gaussian.samples(model, samples, ctx.rng("predict"), ctx.task.weights):
            ctx.task.load_buffers(model)
            yield
