"""Numbers over seeds: mean, spread, and paired differences with bootstrap intervals. No torch here."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000


class Spread(NamedTuple):
    """Mean and standard deviation over seeds; the deviation of a single seed is not known."""

    mean: float
    std: float | None
    seeds: int


class Difference(NamedTuple):
    """Mean of paired differences and a 95 % interval."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def leaves_out_zero(self) -> bool:
        """Whether the interval leaves out zero; with few seeds it is too narrow, and with one it is a point."""
        return self.seeds > 1 and (self.low > 0 or self.high < 0)


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation."""
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Ours minus theirs, paired by seed, with a percentile bootstrap over the seeds; None without a common seed."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    differences = np.array([ours[seed] - theirs[seed] for seed in seeds])
    draws = np.random.default_rng(0).integers(len(seeds), size=(RESAMPLES, len(seeds)))
    low, high = np.quantile(differences[draws].mean(axis=1), [0.025, 0.975])
    return Difference(float(differences.mean()), float(low), float(high), len(seeds))
