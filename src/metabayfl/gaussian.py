"""The mean-field Gaussian posterior: spread, KL, closed-form ELBO gradients, averaging rules (docs/methods.md 1)."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import softplus

from metabayfl.aggregate import weighted_sums
from metabayfl.optim import Group
from metabayfl.task import Task
from metabayfl.types import Params, Weighted

Rule = Literal["rho", "sigma", "var", "mixture", "sum", "product"]
SMALLEST_SIGMA = 1e-6


def sigma_of(rho: Tensor) -> Tensor:
    """sigma = log(1 + exp(rho))."""
    return softplus(rho)


def rho_of(sigma: Tensor) -> Tensor:
    """Undo `sigma_of`: log(exp(sigma) - 1), written so that small and large sigma keep their digits."""
    return sigma + torch.log(-torch.expm1(-sigma))


def initial(task: Task, sigma: float) -> Params:
    """Return a posterior around the user's weights with the same spread everywhere."""
    rho = rho_of(torch.full((task.bayesian_size,), sigma, dtype=torch.float64))
    return task.initial() | {"rho": rho.to(task.weights.dtype)}


@dataclass(frozen=True)
class Prior:
    """N(mean, sigma²) over the Bayesian weights, by numbers or by vectors; and N(0, 1 / rest) over those without a
    spread, which go to the posterior's mode."""

    mean: Tensor | float
    sigma: Tensor | float
    rest: Tensor | None = None

    def pull_rest(self, mu: Tensor, gradient: Tensor, kl_scale: float) -> None:
        """Add the gradient of the prior's -log density by the weights without a spread."""
        if self.rest is not None and len(self.rest):
            own = slice(len(mu) - len(self.rest), None)
            gradient[own].addcmul_(mu[own], self.rest, value=kl_scale)


def as_prior(posterior: Params) -> Prior:
    """Return a posterior as the prior of another."""
    rho = posterior["rho"]
    return Prior(posterior["mu"][: len(rho)].clone(), sigma_of(rho))


def kl(posterior: Params, prior: Prior) -> float:
    """KL(q || p), summed over the weights: log(s/sigma) + (sigma² + (mu - m)²) / (2 s²) - 1/2."""
    rho = posterior["rho"].double()
    mu = posterior["mu"][: len(rho)].double()
    sigma = sigma_of(rho)
    prior_sigma = torch.as_tensor(prior.sigma, dtype=torch.float64)
    terms = torch.log(prior_sigma / sigma) + (sigma**2 + (mu - prior.mean) ** 2) / (2 * prior_sigma**2) - 0.5
    return terms.sum().item()


def describe(posterior: Params, prior: Prior, kl_scale: float) -> dict[str, float]:
    """Return the KL, its factor in the loss, the number of weights that it sums over, their mean spread and prior's."""
    return {
        "kl": kl(posterior, prior),
        "kl_scale": kl_scale,
        "noisy_weights": len(posterior["rho"]),
        "sigma": sigma_of(posterior["rho"].double()).mean().item(),
        "prior_sigma": torch.as_tensor(prior.sigma).double().mean().item(),
    }


class Elbo:
    """Mean NLL of a weight sample plus `kl_scale` times the KL, with gradients in closed form.

    With g the gradient of the NLL at theta = mu + sigma * eps, the gradients are g + c (mu - m) / s² for mu and
    (g * eps + c (sigma / s² - 1 / sigma)) * sigmoid(rho) for rho, where c = kl_scale (docs/methods.md 1.2).
    """

    def __init__(
        self,
        task: Task,
        posterior: Params,
        prior: Prior,
        kl_scale: float,
        noise: torch.Generator,
        rho_rate: float = 1.0,
        largest_sigma: Tensor | float = math.inf,
        offset: Tensor | None = None,
    ) -> None:
        self.task, self.kl_scale, self.noise, self.offset = task, kl_scale, noise, offset
        self.mu, self.rho = posterior["mu"].clone(), posterior["rho"].clone()
        self.groups: Sequence[Group] = [
            Group(self.mu, task.gradient[: task.size]),
            Group(self.rho, task.gradient[task.size :], rho_rate, decays=False),
        ]
        task.load_buffers(posterior)
        self._largest_rho = rho_of(torch.as_tensor(largest_sigma, dtype=self.rho.dtype))
        self._eps, self._exp, self._sigma, self._scratch = (torch.empty_like(self.rho) for _ in range(4))
        self.set_prior(prior)

    def set_prior(self, prior: Prior) -> None:
        """Go on with another prior."""
        self.prior = prior
        self._weight = 1.0 / torch.as_tensor(prior.sigma, dtype=self.rho.dtype) ** 2

    def __call__(self, x: Tensor, y: Tensor) -> float:
        """Draw one weight sample, pass the mini-batch through it and leave the gradients of mu and rho."""
        self._draw()
        nll = self._data_gradients(x, y)
        self._rho_gradient()
        if self.kl_scale:
            distance = torch.sub(self._noisy(self.mu), self.prior.mean, out=self._scratch)
            self._noisy(self.groups[0].gradient).addcmul_(distance, self._weight, value=self.kl_scale)
            self.prior.pull_rest(self.mu, self.groups[0].gradient, self.kl_scale)
        return nll

    def model(self) -> Params:
        """Copy out the posterior as it is now."""
        return self.task.with_buffers({"mu": self.mu.clone(), "rho": self.rho.clamp(max=self._largest_rho)})

    def metrics(self) -> dict[str, float]:
        """Return the KL and its factor in the loss, and how far the weights are spread."""
        return describe({"mu": self.mu, "rho": self.rho}, self.prior, self.kl_scale)

    def skip_draw_of(self, other: Self) -> None:
        """Go on in the noise where another has arrived."""
        self.noise.set_state(other.noise.get_state())

    def _noisy(self, flat: Tensor) -> Tensor:
        return flat[: len(self.rho)]

    def _draw(self) -> None:
        """theta = mu + sigma * eps in the task's weights; one flat draw per step."""
        self._eps.normal_(generator=self.noise)
        self.rho.clamp_(max=self._largest_rho)
        torch.exp(self.rho, out=self._exp)
        torch.log1p(self._exp, out=self._sigma)
        weights = self.task.weights
        torch.addcmul(self._noisy(self.mu), self._sigma, self._eps, out=self._noisy(weights))
        weights[len(self.rho) :].copy_(self.mu[len(self.rho) :])

    def _data_gradients(self, x: Tensor, y: Tensor) -> float:
        """Leave the gradients of the NLL by mu and by sigma; returns the NLL."""
        nll = self.task.backward(x, y, self.offset).item()
        mean, spread = (group.gradient for group in self.groups)
        torch.mul(self._noisy(mean), self._eps, out=spread)
        return nll

    def _rho_gradient(self) -> None:
        """Add the gradient of the KL by sigma, and go on from sigma to rho."""
        gradient = self.groups[1].gradient
        if self.kl_scale:
            gradient.addcmul_(self._sigma, self._weight, value=self.kl_scale)
            gradient.sub_(torch.reciprocal(self._sigma, out=self._scratch), alpha=self.kl_scale)
        sigmoid = self._exp.div_(torch.add(self._exp, 1.0, out=self._scratch))
        gradient.mul_(sigmoid)


class PairedElbo(Elbo):
    """The ELBO with noise of both signs: half of a mini-batch sees mu + sigma * eps, the other half mu - sigma * eps.

    It has the same mean and the same number of passes. The part of the gradients that is odd in eps cancels: for mu the
    first-order effect of the noise, for sigma the product of eps with the gradient at mu, which is noise alone.
    """

    def _data_gradients(self, x: Tensor, y: Tensor) -> float:
        if len(x) == 1:
            return super()._data_gradients(x, y)
        torch.addcmul(self._noisy(self.mu), self._sigma, self._eps, value=-1, out=self.task.mirrored)
        nll = self.task.mirrored_backward(x, y, self.offset).item()
        mean, mirrored = self._noisy(self.groups[0].gradient), self.groups[1].gradient
        torch.mul(mean, 2.0, out=self._scratch)
        mean.add_(mirrored)
        torch.mul(self._scratch.sub_(mean), self._eps, out=mirrored)
        return nll


def samples(posterior: Params, count: int, noise: torch.Generator, into: Tensor) -> Iterator[None]:
    """Write one draw of the weights after the other into a flat vector, each second one the mirror image of the first.

    What is odd in the noise cancels in a mean over both.
    """
    sigma = sigma_of(posterior["rho"])
    spread = torch.empty_like(sigma)
    for number in range(count):
        if number % 2:
            spread.neg_()
        else:
            torch.mul(sigma, spread.normal_(generator=noise), out=spread)
        into.copy_(posterior["mu"])
        into[: len(spread)].add_(spread)
        yield


def average(updates: Sequence[Weighted], rule: Rule) -> Params:
    """Average Gaussian posteriors by one of the six rules of docs/methods.md 1.4, all other tensors by their mean."""
    sums = weighted_sums(updates, lambda payload, share: payload | _TERMS[rule](payload, share))
    types = {name: tensor.dtype for name, tensor in updates[0].payload.items()}
    noisy = sums["mu"][: len(sums["rho"])]
    if rule == "product":
        noisy.copy_(sums["scaled"] / sums["precision"])
        sums["spread"] = sums["precision"].reciprocal()
    if rule == "mixture":
        around = weighted_sums(updates, lambda payload, _: {"spread": (_mean(payload) - noisy) ** 2})
        sums["spread"] += around["spread"]
    if rule != "rho":
        sigma = sums["spread"] if rule == "sigma" else sums["spread"].sqrt()
        sums["rho"] = rho_of(sigma.clamp_min(SMALLEST_SIGMA))
    return {name: sums[name].to(dtype) for name, dtype in types.items()}


_TERMS: dict[Rule, Callable[[Params, float], Params]] = {
    "rho": lambda payload, share: {},
    "sigma": lambda payload, share: {"spread": _sigma(payload)},
    "var": lambda payload, share: {"spread": _variance(payload)},
    "mixture": lambda payload, share: {"spread": _variance(payload)},
    "sum": lambda payload, share: {"spread": _variance(payload).mul_(share)},
    "product": lambda payload, share: {
        "precision": 1.0 / _variance(payload),
        "scaled": _mean(payload) / _variance(payload),
    },
}


def _mean(payload: Params) -> Tensor:
    return payload["mu"][: len(payload["rho"])].double()


def _sigma(payload: Params) -> Tensor:
    return sigma_of(payload["rho"].double()).clamp_min(SMALLEST_SIGMA)


def _variance(payload: Params) -> Tensor:
    return _sigma(payload) ** 2
