import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metabayfl.data.corrupt import fraction, gaussian_noise, label_flips, without_features
from metabayfl.types import InputError

SEEDS = st.integers(0, 2**32)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("variance", [1e-4, 1e-3, 1e-2, 1e-1])
def test_noise_has_the_variance(variance: float) -> None:
    x = np.full((500, 20, 20), 0.5, dtype=np.float32)
    added = gaussian_noise(x, variance, rng(), clip=None).astype(np.float64) - 0.5
    assert added.var() == pytest.approx(variance, rel=0.02)
    assert added.mean() == pytest.approx(0, abs=4 * math.sqrt(variance / x.size))


def test_noise_is_clipped_and_independent_between_samples() -> None:
    x = rng(1).random((50, 3, 8, 8), dtype=np.float32)
    noisy = gaussian_noise(x, 0.1, rng())
    assert noisy.dtype == np.float32
    assert noisy.min() == 0
    assert noisy.max() == 1
    free = gaussian_noise(x, 0.1, rng(), clip=None)
    assert free.min() < 0
    np.testing.assert_array_equal(np.clip(free, 0, 1), noisy)
    assert len(np.unique((free - x).reshape(50, -1)[:, 0])) == 50


def test_bytes_stay_bytes_and_get_the_same_noise() -> None:
    x = rng(1).integers(0, 256, (20, 3, 4, 4), dtype=np.uint8)
    noisy = gaussian_noise(x, 0.01, rng())
    assert noisy.dtype == np.uint8
    exact = gaussian_noise(x.astype(np.float32) / 255, 0.01, rng()) * 255
    assert np.abs(noisy - exact).max() <= 0.5 + 1e-4
    np.testing.assert_array_equal(gaussian_noise(x, 0, rng()), x)


@given(seed=SEEDS, share=st.floats(0, 1))
def test_the_same_features_are_missing_in_every_sample(seed: int, share: float) -> None:
    x = np.ones((5, 2, 10), dtype=np.float32)
    poor = without_features(x, share, rng(seed))
    assert (poor == poor[0]).all()
    assert (poor[0] == 0).sum() == round(share * 20)
    np.testing.assert_array_equal(poor, without_features(x, share, rng(seed)))


@pytest.mark.parametrize("clip", [None, (0.0, 1.0)])
def test_no_noise_is_an_equal_copy(clip: tuple[float, float] | None) -> None:
    x = rng().random((4, 3), dtype=np.float32)
    same = gaussian_noise(x, 0, rng(), clip)
    np.testing.assert_array_equal(same, x)
    assert not np.shares_memory(same, x)


@settings(deadline=None)
@given(seed=SEEDS, variance=st.floats(0, 10))
def test_noise_is_reproducible_and_leaves_its_input(seed: int, variance: float) -> None:
    x = np.linspace(0, 1, 12).reshape(3, 4)
    before = x.copy()
    first, second = gaussian_noise(x, variance, rng(seed)), gaussian_noise(x, variance, rng(seed))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(x, before)


@settings(deadline=None)
@given(seed=SEEDS, classes=st.integers(2, 20), size=st.integers(0, 50))
def test_flips_never_keep_the_label(seed: int, classes: int, size: int) -> None:
    y = rng(seed).integers(0, classes, size)
    flipped = label_flips(y, 1.0, classes, rng(seed))
    assert (flipped != y).all()
    assert ((flipped >= 0) & (flipped < classes)).all()
    np.testing.assert_array_equal(flipped, label_flips(y, 1.0, classes, rng(seed)))
    np.testing.assert_array_equal(label_flips(y, 0, classes, rng(seed)), y)


def test_flips_are_as_many_as_asked_and_uniform() -> None:
    y = np.full(40_000, 2, dtype=np.uint8)
    flipped = label_flips(y, 0.3, 5, rng())
    counts = np.bincount(flipped, minlength=5) / len(y)
    np.testing.assert_allclose(counts, [0.075, 0.075, 0.7, 0.075, 0.075], atol=0.01)
    assert flipped.dtype == np.int64
    assert (y == 2).all()


@settings(deadline=None)
@given(labels=st.lists(st.integers(0, 5), max_size=80), low=st.floats(0.001, 1), high=st.floats(0.001, 1), seed=SEEDS)
def test_fractions_are_nested_and_stratified(labels: list[int], low: float, high: float, seed: int) -> None:
    y = np.array(labels, dtype=np.int64)
    low, high = sorted((low, high))
    small, large = fraction(y, low, rng(seed)), fraction(y, high, rng(seed))
    assert set(small) <= set(large)
    assert (np.diff(large) > 0).all()
    np.testing.assert_array_equal(small, fraction(y, low, rng(seed)))
    for label, size in zip(*np.unique(y, return_counts=True), strict=True):
        kept = (y[small] == label).sum()
        assert max(1, low * size - 1e-6) <= kept < low * size + 1


@pytest.mark.parametrize(("share", "each"), [(1.0, 100), (0.5, 50), (0.25, 25), (0.1, 10), (0.07, 7), (0.001, 1)])
def test_fraction_sizes(share: float, each: int) -> None:
    y = rng(1).permutation(np.repeat(np.arange(10), 100))
    kept = fraction(y, share, rng())
    np.testing.assert_array_equal(np.bincount(y[kept]), [each] * 10)


def test_a_whole_fraction_is_everything() -> None:
    np.testing.assert_array_equal(fraction(np.array([4, 4, 1]), 1, rng()), [0, 1, 2])


@pytest.mark.parametrize("variance", [-1e-3, float("nan"), float("inf"), "0.1", True])
def test_bad_variances(variance: float) -> None:
    with pytest.raises(InputError, match=r"variance = .*give a number from 0 to 1e\+30"):
        gaussian_noise(np.zeros(3), variance, rng())


@pytest.mark.parametrize(
    ("x", "clip", "message"),
    [
        (np.zeros(3, dtype=np.int64), (0.0, 1.0), "x is int64; give an array of floats or of bytes"),
        ([0.0], (0.0, 1.0), "x is list"),
        (np.array([0.0, 255.0]), (0.0, 1.0), "from 0 to 255; scale it into"),
        (np.array([0.0, np.nan]), (0.0, 1.0), "scale it into"),
        (np.zeros(3), (1.0, 0.0), r"clip = \(1.0, 0.0\)"),
        (np.zeros(3), (1.0,), r"clip = \(1.0,\)"),
    ],
)
def test_bad_inputs(x: np.ndarray, clip: tuple[float, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        gaussian_noise(x, 0.1, rng(), clip)


@pytest.mark.parametrize(
    ("y", "probability", "classes", "message"),
    [
        (np.array([0, 1]), 1.1, 2, "probability = 1.1.*from 0 to 1"),
        (np.array([0, 1]), -0.1, 2, "probability = -0.1"),
        (np.array([0, 1]), 0.1, 1, "classes = 1.*at least 2"),
        (np.array([0, 3]), 0.1, 3, "from 0 to 3; accepted for 3 classes: 0 to 2"),
        (np.array([0.0, 1.0]), 0.1, 2, "y is float64"),
    ],
)
def test_bad_flips(y: np.ndarray, probability: float, classes: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        label_flips(y, probability, classes, rng())


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan"), "half"])
def test_bad_shares(share: float) -> None:
    with pytest.raises(InputError, match=r"share = .*above 0 and at most 1"):
        fraction(np.array([0, 1]), share, rng())


def test_bad_labels() -> None:
    with pytest.raises(InputError, match=r"labels is int64 of shape \(2, 2\)"):
        fraction(np.zeros((2, 2), dtype=np.int64), 0.5, rng())
