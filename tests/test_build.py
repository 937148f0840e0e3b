"""From a config to a federation of handwritten digits."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metabayfl import Federation, InputError
from metabayfl.config import DataOptions, RunConfig
from metabayfl.data import build
from metabayfl.data.federation import share
from metabayfl.data.pools import like, set_aside
from metabayfl.data.sources import Source, load
from metabayfl.environment import data_hash


def built(seed: int = 0, **sections: Any) -> Federation:
    return build(RunConfig(seed=seed, **sections))[0]


def pixels(x: torch.Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for row in x}


def test_every_digit_has_one_place() -> None:
    config = RunConfig(seed=1, data={"clients": 4, "unlabelled": 100, "dev": 50, "partition": "iid"})
    federation, shape = build(config)
    pool = federation.unlabelled
    assert pool is not None
    assert shape == (1, 8, 8)
    parts = [pixels(x) for x in (federation.train.x, federation.local_test.x, pool, federation.test_x)]
    everything = load(DataOptions())
    everybody = pixels(torch.from_numpy(np.concatenate([everything.x, everything.test_x])))
    assert sum(map(len, parts)) == len(set().union(*parts)) == 1797 - 50  # no image occurs twice in this dataset
    assert set().union(*parts) < everybody


def test_noise_and_scarcity_hit_the_training_data_only() -> None:
    data = {"clients": 3, "partition": "iid"}
    clean = built(seed=2, data=data)
    poor = built(seed=2, data=data | {"fraction": 0.25}, corrupt={"noise_variance": 0.01})
    assert torch.equal(clean.local_test.x, poor.local_test.x)
    assert torch.equal(clean.test_x, poor.test_x)
    assert abs(len(poor.train.x) / len(clean.train.x) - 0.25) < 0.02
    assert not pixels(clean.train.x) & pixels(poor.train.x)
    assert [int(n) for n in poor.select_sizes] == [share(int(n), 0.2) for n in poor.train.sizes()]


def test_smaller_fractions_are_subsets_with_the_same_noise() -> None:
    parts = [built(data={"fraction": f}, corrupt={"noise_variance": 0.1}) for f in (0.1, 0.25, 0.5, 1.0)]
    for small, large in pairwise(parts):
        assert pixels(small.train.x) < pixels(large.train.x)


def test_a_level_for_each_client() -> None:
    data = {"clients": 3, "partition": "iid"}
    clean = built(data=data)
    mixed = built(
        data=data,
        corrupt={"noise_std": [0, 0.1, 0.5], "label_flips": [0.5, 0, 0], "missing_features": [0, 0, 0.25]},
    )
    noise = [(mixed.client(n).x - clean.client(n).x).std() for n in range(3)]
    assert noise[0] == 0
    assert noise[1] < noise[2]
    wrong = [(mixed.client(n).y != clean.client(n).y).float().mean() for n in range(3)]
    assert 0.4 < wrong[0] < 0.6
    assert wrong[1:] == [0, 0]
    always_zero = [int((mixed.client(n).test_x == 0).all(0).sum()) for n in range(3)]
    assert always_zero[:2] == [int((clean.client(n).test_x == 0).all(0).sum()) for n in range(2)]
    assert always_zero[2] >= 16
    assert all(torch.equal(mixed.client(n).test_y, clean.client(n).test_y) for n in range(3))


def test_the_noise_of_a_variance_is_that_of_its_root() -> None:
    one, other = (built(corrupt={name: value}) for name, value in (("noise_variance", 0.25), ("noise_std", 0.5)))
    assert torch.equal(one.train.x, other.train.x)


def test_test_parts_are_noisy_on_request() -> None:
    clean = built()
    noisy = built(corrupt={"noise_variance": 0.1, "test": True})
    assert not pixels(clean.local_test.x) & pixels(noisy.local_test.x)
    assert torch.equal(clean.test_x, noisy.test_x)


def test_keyed_by_seed_and_nothing_else() -> None:
    sections: dict[str, Any] = {
        "data": {"clients": 3, "unlabelled": 10, "dev": 20},
        "corrupt": {"noise_variance": 0.1, "label_flips": 0.2, "missing_features": 0.1},
    }
    one, other = built(**sections), built(seed=1, **sections)
    assert data_hash(one) == data_hash(built(method={"name": "fedavg"}, **sections))
    assert data_hash(one) != data_hash(other)


class TestDev:
    def test_no_test_sample_is_touched(self) -> None:
        data = {"clients": 4, "dev": 300}
        judged, decided = built(data=data), built(data=data, eval={"on": "dev"})
        assert torch.equal(judged.train.x, decided.train.x)
        touched = pixels(judged.test_x) | pixels(judged.local_test.x) | pixels(judged.train.x)
        assert not touched & (pixels(decided.test_x) | pixels(decided.local_test.x))
        assert len(decided.test_x) == 300

    def test_local_parts_have_the_mix_of_classes_of_the_client(self) -> None:
        data = {"clients": 4, "dev": 300, "alpha": 0.3}
        judged, decided = built(data=data), built(data=data, eval={"on": "dev"})
        for number in range(4):
            wanted, found = (torch.bincount(f.client(number).test_y, minlength=10).float() for f in (judged, decided))
            assert (wanted / wanted.sum() - found / found.sum()).abs().max() < 0.1


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    part=st.floats(0, 0.99),
    seed=st.integers(0, 99),
)
def test_pools_are_stratified_and_disjoint(sizes: list[int], part: float, seed: int) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    count = int(part * len(labels))
    if not len(labels):
        return
    source = Source(labels[:, None], labels, labels[:0, None], labels[:0], classes=len(sizes))
    pool, rest = set_aside(source, np.arange(len(labels)), count, "unlabelled", seed)
    assert len(pool) == count
    assert sorted([*pool, *rest]) == list(range(len(labels)))
    for label, size in enumerate(sizes):
        assert abs((labels[pool] == label).sum() - size * count / len(labels)) < 1


@given(seed=st.integers(0, 99), rows=st.integers(1, 50))
def test_like_never_takes_a_row_twice(seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, 200)
    chosen = like(labels, np.arange(rows), np.arange(100, 200), rng)
    assert len(set(chosen)) == len(chosen) <= rows + 4
    assert set(chosen) <= set(range(100, 200))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"name": "nothing"}}, "unknown data.name = 'nothing'; accepted: .*digits"),
        ({"data": {"unlabelled": 5000}}, "data.unlabelled = 5000: 1397 samples are there"),
        ({"data": {"dev": 5000}}, "data.dev = 5000: 1397 samples are there"),
        ({"data": {"clients": 3, "batch_size": (4, 4)}}, r"batch_size = \(4, 4\): .* each of the 3 clients"),
        ({"data": {"clients": 5000}}, "clients = 5000"),
        ({"data": {"augment": True}}, r"data.augment = true: inputs are of shape \(1, 8, 8\)"),
        ({"data": {"noise_std": 0.5}}, "data.noise_std = 0.5: it is for regression, and the labels are classes"),
        ({"eval": {"on": "dev"}}, "eval.on = 'dev' needs samples .* data.dev"),
        ({"corrupt": {"noise_std": 0.1, "noise_variance": 0.1}}, "one of the two is accepted"),
        ({"corrupt": {"noise_std": [0.1]}}, r"corrupt.noise_std = \(0.1,\): .* each of the 5 clients"),
        ({"drift": {"kind": "samples", "amount": 2}}, "drift.amount = 2.0: at most 1"),
    ],
)
def test_bad_options(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        built(**sections)
