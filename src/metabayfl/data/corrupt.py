"""Data of lower quality and quantity: input noise, label flips, missing features, nested fractions; all keyed."""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from metabayfl.config import CorruptOptions
from metabayfl.options import InputError
from metabayfl.randomness import numpy_generator

Inputs = npt.NDArray[Any]
"""Bytes, which stand for numbers from 0 to 1, or floats."""
Floats = npt.NDArray[np.floating[Any]]
Labels = npt.NDArray[np.integer[Any]]

LARGEST_VARIANCE = 1e30


@dataclass(frozen=True)
class Corruption:
    """What happens to the data of each client."""

    variances: tuple[float, ...]
    flips: tuple[float, ...]
    missing: tuple[float, ...]
    on_test: bool
    clip: tuple[float, float] | None
    classes: int | None

    @classmethod
    def of(cls, options: CorruptOptions, clients: int, in_unit_range: bool, classes: int | None) -> "Corruption":
        """Read the options: a number for all clients or one for each."""
        variances = per_client("corrupt.noise_variance", options.noise_variance, clients)
        deviations = per_client("corrupt.noise_std", options.noise_std, clients)
        if any(variances) and any(deviations):
            both = f"corrupt.noise_variance = {options.noise_variance} and corrupt.noise_std = {options.noise_std}"
            raise InputError(f"{both}: one of the two is accepted")
        flips = per_client("corrupt.label_flips", options.label_flips, clients)
        if any(flips) and classes is None:
            raise InputError(f"corrupt.label_flips = {options.label_flips}: labels are real numbers here, not classes")
        return cls(
            variances if any(variances) else tuple(deviation**2 for deviation in deviations),
            flips,
            per_client("corrupt.missing_features", options.missing_features, clients),
            options.test,
            (0.0, 1.0) if in_unit_range else None,
            classes,
        )

    def train(self, x: Inputs, y: np.ndarray, client: int, seed: int) -> tuple[Inputs, np.ndarray]:
        """Return a client's training data as it has them."""
        noisy = gaussian_noise(x, self.variances[client], numpy_generator(seed, "noise", client), self.clip)
        if self.flips[client] and self.classes is not None:
            y = label_flips(y, self.flips[client], self.classes, numpy_generator(seed, "flips", client))
        return self._without_missing(noisy, client, seed), y

    def test(self, x: Inputs, client: int, seed: int) -> Inputs:
        """Return a client's test inputs as it has them; labels stay right."""
        rng = numpy_generator(seed, "test noise", client)
        noisy = gaussian_noise(x, self.variances[client], rng, self.clip) if self.on_test else np.array(x)
        return self._without_missing(noisy, client, seed)

    def _without_missing(self, x: Inputs, client: int, seed: int) -> Inputs:
        rng = numpy_generator(seed, "missing", client)
        return without_features(x, self.missing[client], rng) if self.missing[client] else x


def per_client(name: str, value: float | tuple[float, ...], clients: int) -> tuple[float, ...]:
    """Return one number for each client."""
    values = value if isinstance(value, tuple) else (value,) * clients
    if len(values) != clients:
        raise InputError(f"{name} = {value}: a number is accepted, or one for each of the {clients} clients")
    return values


def gaussian_noise(
    x: Inputs, variance: float, rng: np.random.Generator, clip: tuple[float, float] | None = (0.0, 1.0)
) -> Inputs:
    """Add N(0, variance) to every entry, once and for all, and clip; the standard deviation is sqrt(variance).

    Bytes stand for numbers from 0 to 1 and stay bytes: the noise is added to those numbers, clipped, and rounded.
    """
    if isinstance(x, np.ndarray) and x.dtype == np.uint8:
        noisy = gaussian_noise(x.astype(np.float32) / 255, variance, rng)
        return np.rint(noisy * 255).astype(np.uint8) if variance else np.array(x)
    if not isinstance(x, np.ndarray) or x.dtype.kind != "f":
        found = x.dtype if isinstance(x, np.ndarray) else type(x).__name__
        raise InputError(f"x is {found}; give an array of floats or of bytes")
    _check_number("variance", variance, f"a number from 0 to {LARGEST_VARIANCE:g}", most=LARGEST_VARIANCE)
    if clip is not None:
        _check_clip(x, clip)
    if variance == 0:
        return np.array(x, dtype=np.float32)
    noisy = rng.standard_normal(x.shape, dtype=np.float32)
    noisy *= math.sqrt(variance)
    noisy += x.astype(np.float32, copy=False)
    return noisy if clip is None else np.clip(noisy, *clip, out=noisy)


def without_features(x: Inputs, share: float, rng: np.random.Generator) -> Inputs:
    """Set a share of the entries of an input to 0, the same ones in every sample."""
    _check_number("share", share, "a number from 0 to 1")
    entries = int(np.prod(x.shape[1:]))
    measured = np.ones(entries, dtype=x.dtype)
    measured[rng.permutation(entries)[: round(share * entries)]] = 0
    return np.multiply(x, measured.reshape(x.shape[1:]))


def label_flips(y: Labels, probability: float, classes: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Replace each label, with this probability, by one drawn uniformly from the other classes."""
    _check_labels("y", y)
    _check_number("probability", probability, "a number from 0 to 1")
    if isinstance(classes, bool) or not isinstance(classes, Integral) or classes < 2:
        raise InputError(f"classes = {classes!r}: give a whole number of at least 2")
    if len(y) and (y.min() < 0 or y.max() >= classes):
        raise InputError(
            f"y holds labels from {y.min()} to {y.max()}; accepted for {classes} classes: 0 to {classes - 1}"
        )
    chosen = rng.random(len(y)) < probability
    shift = rng.integers(1, classes, size=len(y))
    labels = y.astype(np.int64)
    return np.where(chosen, (labels + shift) % classes, labels)


def fraction(labels: Labels, share: float, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return the sorted indices of a stratified share: ceil(share * n_c) samples of each class c that is present.

    From the same generator state, a smaller share is a subset of a larger one.
    """
    _check_labels("labels", labels)
    _check_number("share", share, "a number above 0 and at most 1", positive=True)
    order = rng.permutation(len(labels))
    kept = [np.empty(0, dtype=np.int64)]
    for label in np.unique(labels):
        ranked = order[labels[order] == label]
        # 0.07 * 100 is a little above 7: the ceiling must not see rounding errors.
        size = math.ceil(share * len(ranked) - 1e-9)
        kept.append(ranked[: max(1, size)])
    return np.sort(np.concatenate(kept))


def _check_number(what: str, value: object, accepted: str, most: float = 1.0, positive: bool = False) -> None:
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not 0 <= number <= most or (positive and number == 0):
        raise InputError(f"{what} = {value!r}: give {accepted}")


def _check_clip(x: Floats, clip: tuple[float, float]) -> None:
    if len(clip) != 2 or not clip[0] < clip[1]:
        raise InputError(f"clip = {clip}: give (low, high) with low < high, or None")
    if x.size and not (clip[0] <= x.min() and x.max() <= clip[1]):
        raise InputError(
            f"x runs from {x.min():g} to {x.max():g}; scale it into {clip} before the noise, or set clip to None"
        )


def _check_labels(what: str, labels: Labels) -> None:
    if not isinstance(labels, np.ndarray) or labels.ndim != 1 or labels.dtype.kind not in "iu":
        found = f"{labels.dtype} of shape {labels.shape}" if isinstance(labels, np.ndarray) else type(labels).__name__
        raise InputError(f"{what} is {found}; give a one-dimensional array of whole numbers")
