"""IVON (Shen et al., ICML 2024): the posterior by natural gradients, at the cost of Adam. docs/methods.md 1.5."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from metabayfl.gaussian import Prior, describe, rho_of, sigma_of
from metabayfl.optim import Group
from metabayfl.task import Task
from metabayfl.types import Params

GRADIENT_MOMENTUM = 0.9


class IvonLoss:
    """Mean NLL of a weight sample, with its gradient g and the estimate g * eps / sigma of the curvature.

    The posterior is N(mu, 1 / (ess (h + delta))), where h is the curvature of the mean NLL, ess = 1 / kl_scale the
    number of samples that the likelihood counts for, and delta = kl_scale / prior_sigma² what the prior adds.
    """

    def __init__(
        self,
        task: Task,
        posterior: Params,
        prior: Prior,
        kl_scale: float,
        noise: torch.Generator,
        offset: Tensor | None = None,
    ) -> None:
        self.task, self.prior, self.kl_scale, self.noise, self.offset = task, prior, kl_scale, noise, offset
        self.mu = posterior["mu"].clone()
        sigma = sigma_of(posterior["rho"])
        self.delta = kl_scale / torch.as_tensor(prior.sigma, dtype=sigma.dtype) ** 2
        self.curvature = kl_scale / sigma**2 - self.delta
        self.groups: Sequence[Group] = [
            Group(self.mu, task.gradient[: task.size]),
            Group(self.curvature, task.gradient[task.size :]),
        ]
        task.load_buffers(posterior)

    def __call__(self, x: Tensor, y: Tensor) -> float:
        """Draw one weight sample, pass the mini-batch through it and leave gradient and curvature."""
        noisy = len(self.curvature)
        sigma = self.sigma()
        eps = torch.empty_like(sigma).normal_(generator=self.noise)
        self.task.weights.copy_(self.mu)
        self.task.weights[:noisy].addcmul_(sigma, eps)
        nll = self.task.backward(x, y, self.offset).item()
        torch.mul(self.groups[0].gradient[:noisy], eps.div_(sigma), out=self.groups[1].gradient)
        return nll

    def sigma(self) -> Tensor:
        """Return the spread of the posterior as it is now."""
        return (self.kl_scale / (self.curvature + self.delta)).sqrt()

    def model(self) -> Params:
        """Copy out the posterior as it is now."""
        return self.task.with_buffers({"mu": self.mu.clone(), "rho": rho_of(self.sigma())})

    def metrics(self) -> dict[str, float]:
        """Return the KL and its factor in the loss, and how far the weights are spread."""
        return describe({"mu": self.mu, "rho": rho_of(self.sigma())}, self.prior, self.kl_scale)

    def skip_draw_of(self, other: Self) -> None:
        """Go on in the noise where another has arrived."""
        self.noise.set_state(other.noise.get_state())


class Ivon:
    """The natural-gradient step of an IVON loss; values without a spread move as those of mean curvature do."""

    def __init__(self, loss: IvonLoss, curvature_momentum: float) -> None:
        self.loss, self.curvature_momentum = loss, curvature_momentum
        self.momentum = torch.zeros_like(loss.mu)
        self.steps = 0

    def step(self, rate: float) -> None:
        """Average the gradient, update the curvature (which stays above -delta), and step."""
        loss, memory = self.loss, self.curvature_momentum
        noisy = len(loss.curvature)
        self.steps += 1
        self.momentum.lerp_(loss.groups[0].gradient, 1 - GRADIENT_MOMENTUM)
        precision = loss.curvature + loss.delta
        excess = loss.curvature - loss.groups[1].gradient
        loss.curvature.sub_(excess, alpha=1 - memory).add_(excess**2 / precision, alpha=(1 - memory) ** 2 / 2)
        precision = loss.curvature + loss.delta
        step = self.momentum / (1 - GRADIENT_MOMENTUM**self.steps)
        step[:noisy].add_(loss.delta * (loss.mu[:noisy] - loss.prior.mean)).div_(precision)
        loss.prior.pull_rest(loss.mu, step, loss.kl_scale)
        step[noisy:].div_(precision.mean())
        loss.mu.sub_(step, alpha=rate)
