"""Data of lower quality and quantity: input noise, label flips, nested fractions; pure functions of their generator."""

import math
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from metabayfl.types import InputError

Floats = npt.NDArray[np.floating[Any]]
Labels = npt.NDArray[np.integer[Any]]

LARGEST_VARIANCE = 1e30


def gaussian_noise(
    x: Floats, variance: float, rng: np.random.Generator, clip: tuple[float, float] | None = (0.0, 1.0)
) -> npt.NDArray[np.float32]:
    """Add N(0, variance) to every entry, once and for all, and clip; the standard deviation is sqrt(variance)."""
    if not isinstance(x, np.ndarray) or x.dtype.kind != "f":
        found = x.dtype if isinstance(x, np.ndarray) else type(x).__name__
        raise InputError(f"x is {found}; give an array of floats (an image of bytes: divide by 255)")
    _check_number("variance", variance, f"a number from 0 to {LARGEST_VARIANCE:g}", most=LARGEST_VARIANCE)
    if clip is not None:
        _check_clip(x, clip)
    if variance == 0:
        return np.array(x, dtype=np.float32)
    noisy = rng.standard_normal(x.shape, dtype=np.float32)
    noisy *= math.sqrt(variance)
    noisy += x.astype(np.float32, copy=False)
    return noisy if clip is None else np.clip(noisy, *clip, out=noisy)


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
