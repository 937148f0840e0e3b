"""What short trainings say of the candidate rates, and how to pool what several clients saw. docs/methods.md 3.1."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

HOPELESS = 1.0
"""Share of the received model's loss from which on it no longer matters how much worse a candidate is."""
SMALLEST_UNIT = 1e-6
BEYOND_NOISE = 2.0
"""A difference counts from so many standard errors on."""
Choice = Literal["best", "one-se", "harmless"]
HARMLESS = 0.05
"""Share of the received model's loss by which a trial may be above it."""


class Evidence(NamedTuple):
    """Of each candidate: mean loss above that of the received model, as a share of it, and whether it was tried; of
    each pair of them: the variance of the difference of their means."""

    mean: Tensor
    known: Tensor
    variance: Tensor

    def pack(self) -> Tensor:
        """Return one tensor that can be sent."""
        return torch.cat([self.mean[None], self.known[None].double(), self.variance])


def unpack(packed: Tensor) -> Evidence:
    """Undo `Evidence.pack`."""
    return Evidence(packed[0], packed[1] > 0, packed[2:])


def nothing(candidates: int) -> Evidence:
    """Return no evidence at all."""
    return Evidence(
        torch.zeros(candidates, dtype=torch.float64),
        torch.zeros(candidates, dtype=torch.bool),
        torch.zeros(candidates, candidates, dtype=torch.float64),
    )


def weigh(scores: Sequence[Tensor | None], tried: Sequence[bool], before: Tensor) -> Evidence:
    """Compare losses per sample after trials with those before, pair by pair; a trial without any is hopeless."""
    found = nothing(len(scores))
    found.known[:] = torch.tensor(list(tried))
    unit = before.double().mean().abs().clamp_min(SMALLEST_UNIT)
    excess = [None if losses is None else ((losses - before) / unit).clamp(max=10 * HOPELESS) for losses in scores]
    for index, losses in enumerate(excess):
        found.mean[index] = HOPELESS if losses is None else losses.mean().clamp(max=HOPELESS)
        for other, others in enumerate(excess[:index]):
            if losses is not None and others is not None and len(losses) > 1:
                variance = (losses - others).var() / len(losses)
                found.variance[index, other] = found.variance[other, index] = variance
    return found


def combine(parts: Sequence[tuple[float, Evidence]]) -> Evidence:
    """Average evidence with weights, candidate by candidate over those who tried it."""
    weights = torch.stack([weight * one.known.double() for weight, one in parts])
    total = weights.sum(0)
    shares = weights / total.where(total > 0, torch.ones_like(total))
    mean = (shares * torch.stack([one.mean for _, one in parts])).sum(0)
    variance = (shares[:, :, None] * shares[:, None, :] * torch.stack([one.variance for _, one in parts])).sum(0)
    return Evidence(mean, total > 0, variance)


def choose(evidence: Evidence, rates: Sequence[float], accepted: Sequence[bool], choice: Choice) -> int | None:
    """Return the accepted candidate with the lowest loss, the largest within one standard error of it, or the largest
    that does no harm to speak of."""
    able = [index for index, fine in enumerate(accepted) if fine and evidence.known[index]]
    if not able:
        return None
    best = min(able, key=lambda index: (evidence.mean[index].item(), rates[index]))
    if choice == "best":
        return best
    error = evidence.variance[best].sqrt()
    limit = evidence.mean[best] + error
    if choice == "harmless":
        limit = evidence.mean[best].clamp_min(HARMLESS) + BEYOND_NOISE * error
    return max((index for index in able if evidence.mean[index] <= limit[index]), key=lambda index: rates[index])
