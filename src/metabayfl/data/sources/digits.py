"""scikit-learn's handwritten digits, which lie inside its wheel."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from metabayfl.config import DataOptions
from metabayfl.data.sources.source import Source
from metabayfl.randomness import numpy_generator

TEST_SAMPLES = 400


def digits(options: DataOptions, folder: Path | None) -> Source:
    """Handwritten digits, 1797 images of 8x8; 400 of them, always the same, are the test set."""
    rows = _table()
    x = (rows[:, None, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    y = rows[:, -1].astype(np.int64)
    order = numpy_generator("digits").permutation(len(x))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return Source(x[train], y[train], x[test], y[test], 10, tuple(map(str, range(10))))


def _table() -> np.ndarray:
    """Pixels and label of each image, from scikit-learn's file: importing its datasets takes longer than short runs."""
    package = find_spec("sklearn")
    for place in (package.submodule_search_locations or []) if package else []:
        if (path := Path(place, "datasets", "data", "digits.csv.gz")).exists():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return np.column_stack([pixels, labels])
