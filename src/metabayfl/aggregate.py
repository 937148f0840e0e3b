"""Averages of client updates, accumulated in float64 in the order given; each update is read once per pass."""

from collections.abc import Callable, Sequence

from metabayfl.types import Params, Weighted


def shares(updates: Sequence[Weighted]) -> list[float]:
    """Weights of the updates, summing to one."""
    weights = [update.weight for update in updates]
    total = sum(weights)
    return [weight / total for weight in weights]


def weighted_sums(updates: Sequence[Weighted], terms: Callable[[Params, float], Params]) -> Params:
    """Sum over the updates of share times each named term, in float64; `terms` gets a payload and its share."""
    sums: Params = {}
    for update, share in zip(updates, shares(updates), strict=True):
        for name, term in terms(update.payload, share).items():
            value = term.double()
            sums[name] = sums[name].add_(value, alpha=share) if name in sums else value.mul(share)
    if not sums:
        raise ValueError("there are no updates to average")
    return sums


def mean(updates: Sequence[Weighted]) -> Params:
    """Weighted mean of every named tensor, in its own type."""
    sums = weighted_sums(updates, lambda payload, _: payload)
    types = {name: tensor.dtype for name, tensor in updates[0].payload.items()}
    return {name: total.to(types[name]) for name, total in sums.items()}


def mix(server: Params, mean: Params, share: float) -> Params:
    """Go a share of the way from the server's mu and rho to the mean; the rest, such as buffers, is the mean's."""
    if share == 1.0:
        return mean
    return mean | {name: server[name].lerp(mean[name], share) for name in ("mu", "rho") if name in mean}
