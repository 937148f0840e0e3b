"""scikit-learn's handwritten digits, which lie inside its wheel."""

from pathlib import Path

import numpy as np

from metabayfl.config import DataOptions
from metabayfl.data.sources.source import Source
from metabayfl.randomness import numpy_generator

TEST_SAMPLES = 400


def digits(options: DataOptions, folder: Path | None) -> Source:
    """Handwritten digits, 1797 images of 8x8; 400 of them, always the same, are the test set."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = (bunch.images[:, None] / 16).astype(np.float32)
    y = bunch.target.astype(np.int64)
    order = numpy_generator("digits").permutation(len(x))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return Source(x[train], y[train], x[test], y[test], 10, tuple(map(str, range(10))))
