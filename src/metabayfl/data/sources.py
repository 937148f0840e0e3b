"""Where samples come from: name -> inputs in [0, 1], labels, and a common test set."""

from dataclasses import dataclass

import numpy as np

from metabayfl.options import InputError
from metabayfl.randomness import numpy_generator

DIGITS_TEST = 400


@dataclass(frozen=True)
class Source:
    """A dataset with its common test set; inputs are bytes, which stand for numbers from 0 to 1, or float32."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    classes: int | None
    """None: regression."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    """Of each channel, for the model; empty: inputs are used as they are."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return self.x.shape[1:]

    @property
    def in_unit_range(self) -> bool:
        """Whether inputs lie between 0 and 1, so that noisy ones are clipped to that range."""
        return self.x.dtype == np.uint8 or bool(self.x.min() >= 0 and self.x.max() <= 1)


def digits() -> Source:
    """scikit-learn's handwritten digits, 1797 images of 8x8; 400 of them, always the same, are the test set."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = (bunch.images[:, None] / 16).astype(np.float32)
    y = bunch.target.astype(np.int64)
    order = numpy_generator("digits").permutation(len(x))
    test, train = order[:DIGITS_TEST], order[DIGITS_TEST:]
    return Source(x[train], y[train], x[test], y[test], classes=10)


SOURCES = {"digits": digits}


def load(name: str) -> Source:
    """Load a dataset by name."""
    if name not in SOURCES:
        raise InputError(f"unknown data.name = {name!r}; accepted: {', '.join(sorted(SOURCES))}")
    return SOURCES[name]()
