from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metabayfl.data.partition import PARTITIONS, by_column, dirichlet, dirichlet_hsu, iid, shards, split, step
from metabayfl.types import InputError

ALPHAS = st.sampled_from([1e-300, 1e-3, 0.1, 0.5, 1.0, 100.0, 1e12])
LABELS = st.lists(st.integers(-2, 6), min_size=1, max_size=120).map(np.array)
SEEDS = st.integers(0, 2**32)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def balanced(classes: int, each: int) -> np.ndarray:
    return np.repeat(np.arange(classes), each)


def class_counts(parts: list[np.ndarray], labels: np.ndarray) -> np.ndarray:
    return np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


def assert_disjoint(parts: list[np.ndarray], clients: int) -> np.ndarray:
    assert len(parts) == clients
    assert all((np.diff(part) > 0).all() and part.dtype.kind == "i" for part in parts)
    joined = np.concatenate(parts)
    assert len(np.unique(joined)) == len(joined)
    return joined


def assert_cover(parts: list[np.ndarray], clients: int, samples: int) -> None:
    assert np.array_equal(np.sort(assert_disjoint(parts, clients)), np.arange(samples))


def same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@settings(deadline=None)
@given(labels=LABELS, data=st.data(), seed=SEEDS)
def test_iid_and_hsu_are_even_disjoint_covers(labels: np.ndarray, data: st.DataObject, seed: int) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    alpha = data.draw(ALPHAS)
    for name, options in [("iid", {}), ("dirichlet-hsu", {"alpha": alpha, "min_size": 1})]:
        parts = split(name, labels, clients, rng(seed), **options)
        assert_cover(parts, clients, len(labels))
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert same(parts, split(name, labels, clients, rng(seed), **options))


@settings(deadline=None)
@given(labels=LABELS, data=st.data(), alpha=ALPHAS, balance=st.booleans(), seed=SEEDS)
def test_dirichlet_covers_with_min_size_or_says_why_not(
    labels: np.ndarray, data: st.DataObject, alpha: float, balance: bool, seed: int
) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    min_size = data.draw(st.integers(0, len(labels) // clients))
    options: dict[str, Any] = {"alpha": alpha, "min_size": min_size, "balance": balance, "retries": 20}
    try:
        parts = dirichlet(labels, clients, rng(seed), **options)
    except InputError as error:
        assert f"min_size is {min_size}" in str(error)  # noqa: PT017
        return
    assert_cover(parts, clients, len(labels))
    assert min(len(part) for part in parts) >= min_size
    assert same(parts, dirichlet(labels, clients, rng(seed), **options))


@settings(deadline=None)
@given(labels=LABELS, data=st.data(), seed=SEEDS)
def test_shards_cover(labels: np.ndarray, data: st.DataObject, seed: int) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    per_client = data.draw(st.integers(1, len(labels) // clients))
    parts = shards(labels, clients, rng(seed), per_client=per_client)
    assert_cover(parts, clients, len(labels))
    assert same(parts, shards(labels, clients, rng(seed), per_client=per_client))


@settings(deadline=None)
@given(
    classes=st.integers(1, 12), each=st.integers(60, 90), majors=st.integers(1, 12), times=st.integers(1, 2), seed=SEEDS
)
def test_step_is_disjoint_and_every_class_is_major_equally_often(
    classes: int, each: int, majors: int, times: int, seed: int
) -> None:
    majors, clients = min(majors, classes), classes * times
    labels = balanced(classes, each)
    parts = step(labels, clients, rng(seed), majors=majors)
    assert_disjoint(parts, clients)
    assert same(parts, step(labels, clients, rng(seed), majors=majors))
    holders = majors * times
    counts = class_counts(parts, labels)
    many = each // clients if holders == clients else (each - (clients - holders)) // holders
    assert ((counts == many).sum(axis=0) == holders).all()
    assert ((counts == many).sum(axis=1) == majors).all()
    assert ((counts == many) | (counts == 1)).all()
    assert (each - counts.sum(axis=0) < holders).all()


@pytest.mark.parametrize("seed", range(5))
def test_step_is_exact_on_cifar10(seed: int) -> None:
    labels = rng(seed).permutation(balanced(10, 4000))
    parts = step(labels, 10, rng(seed))
    assert_cover(parts, 10, 40_000)
    counts = class_counts(parts, labels)
    assert np.array_equal(np.sort(counts, axis=1), [[10] * 8 + [1960] * 2] * 10)
    assert ((counts == 1960).sum(axis=0) == 2).all()


def test_step_differs_between_seeds() -> None:
    labels = balanced(10, 100)
    assert not same(step(labels, 10, rng(0)), step(labels, 10, rng(1)))


@pytest.mark.parametrize(("classes", "majors"), [(2, 1), (3, 1), (7, 1), (10, 2), (100, 20), (200, 40)])
def test_step_majors_default_to_a_fifth(classes: int, majors: int) -> None:
    labels = balanced(classes, 500)
    counts = class_counts(step(labels, classes, rng()), labels)
    assert ((counts > 1).sum(axis=1) == majors).all()


@pytest.mark.parametrize(("clients", "nearest"), [(1, 5), (7, 5), (8, 10), (14, 15), (21, 20)])
def test_step_names_the_nearest_number_of_clients(clients: int, nearest: int) -> None:
    with pytest.raises(InputError, match=rf"step: {clients} clients .* nearest valid number of clients is {nearest} "):
        step(balanced(10, 100), clients, rng())


def test_step_refuses_counts_that_do_not_fit() -> None:
    with pytest.raises(InputError, match=r"class 3 has 11 samples, but 2 major .* 8 minor .* need 12"):
        step(np.concatenate([balanced(10, 50)[:150], np.full(11, 3), balanced(10, 50)[200:]]), 10, rng())
    assert len(step(balanced(10, 12), 10, rng())) == 10
    with pytest.raises(InputError, match="0 minor clients with 0 each need 4"):
        step(np.array([0, 0, 0, 0, 1]), 4, rng(), majors=2)


def test_step_leaves_only_the_remainder() -> None:
    labels = balanced(10, 101)
    assert sum(map(len, step(labels, 10, rng()))) == 10 * (46 * 2 + 8)


def test_dirichlet_mixes_follow_alpha() -> None:
    labels = balanced(10, 1000)
    even = class_counts(dirichlet(labels, 5, rng(), alpha=1e6), labels)
    assert np.abs(even - 200).max() <= 10
    skewed = class_counts(dirichlet(labels, 5, rng(), alpha=0.1), labels)
    assert skewed.max(axis=0).mean() > 600


def test_dirichlet_shares_have_the_variance_of_the_distribution() -> None:
    labels, alpha, clients = balanced(2000, 50), 0.5, 4
    shares = class_counts(dirichlet(labels, clients, rng(), alpha=alpha), labels) / 50
    mean = 1 / clients
    assert shares.mean() == pytest.approx(mean)
    assert shares.var() == pytest.approx(mean * (1 - mean) / (alpha * clients + 1), rel=0.05)


def test_balance_evens_out_the_sizes() -> None:
    labels = balanced(10, 500)

    def spread(balance: bool) -> float:
        draws = [dirichlet(labels, 10, rng(seed), alpha=0.1, min_size=0, balance=balance) for seed in range(20)]
        return float(np.mean([np.std([len(part) for part in parts]) for parts in draws]))

    assert spread(True) < 0.8 * spread(False)


def test_dirichlet_gives_up_with_what_was_reached() -> None:
    with pytest.raises(
        InputError, match=r"in 50 draws with alpha = 0\.001 over 20 .* at most \d+ .* min_size is 40; raise"
    ):
        dirichlet(balanced(10, 100), 20, rng(), alpha=0.001, min_size=40, retries=50)


def test_hsu_mixes_follow_alpha_and_the_marginal() -> None:
    labels = np.repeat(np.arange(3), [6000, 3000, 1000])
    even = class_counts(dirichlet_hsu(labels, 10, rng(), alpha=1e9), labels)
    assert np.abs(even - [600, 300, 100]).max() < 120
    pure = class_counts(dirichlet_hsu(balanced(10, 100), 10, rng(), alpha=1e-3), balanced(10, 100))
    assert pure[0].max() == 100


def test_shards_give_at_most_two_labels() -> None:
    labels = rng().permutation(balanced(10, 100))
    counts = class_counts(shards(labels, 10, rng()), labels)
    assert ((counts > 0).sum(axis=1) <= 2).all()
    assert (counts.sum(axis=1) == 100).all()


@settings(deadline=None)
@given(values=st.lists(st.sampled_from(["ward b", "ward a", "", "z"]), min_size=1))
def test_by_column_groups_in_sorted_order(values: list[str]) -> None:
    parts = by_column(np.array(values))
    assert_cover(parts, len(set(values)), len(values))
    assert [{values[index] for index in part} for part in parts] == [{value} for value in sorted(set(values))]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([1.0, np.nan]), "missing"),
        (np.array(["a", None], dtype=object), "missing"),
        (np.array(["a", 1], dtype=object), "mix int, str"),
        (np.zeros((2, 2)), r"shape \(2, 2\)"),
        (np.array([]), r"shape \(0,\)"),
    ],
)
def test_by_column_refuses(values: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        by_column(values)


def test_names() -> None:
    assert list(PARTITIONS) == ["iid", "dirichlet", "dirichlet-hsu", "shards", "step"]
    assert same(split("iid", balanced(2, 9), 4, rng(3)), iid(balanced(2, 9), 4, rng(3)))


@pytest.mark.parametrize(
    ("name", "clients", "options", "message"),
    [
        ("random", 2, {}, "'random' is unknown; accepted: iid, dirichlet, dirichlet-hsu, shards, step"),
        ("iid", 2, {"alpha": 1}, "unknown option alpha = 1; accepted: none"),
        ("dirichlet", 2, {"beta": 1}, "unknown option beta = 1; accepted: alpha, min_size, balance, retries"),
        ("dirichlet", 2, {}, "needs the option alpha"),
        ("dirichlet", 2, {"alpha": 0}, "alpha = 0: give a number above 0"),
        ("dirichlet-hsu", 2, {"alpha": -1.0}, "alpha = -1.0"),
        ("dirichlet", 2, {"alpha": float("nan")}, "alpha = nan"),
        ("dirichlet", 2, {"alpha": float("inf")}, "alpha = inf"),
        ("dirichlet", 2, {"alpha": "0.1"}, "alpha = '0.1'"),
        ("dirichlet", 2, {"alpha": 1, "min_size": 11}, "min_size = 11 for 2 clients needs 22 samples, got 20"),
        ("dirichlet-hsu", 2, {"alpha": 1, "min_size": 11}, "needs 22 samples, got 20"),
        ("dirichlet", 2, {"alpha": 1, "min_size": -1}, "min_size = -1"),
        ("dirichlet", 2, {"alpha": 1, "retries": 0}, "retries = 0"),
        ("dirichlet", 2, {"alpha": 1, "balance": "yes"}, "balance = 'yes'"),
        ("shards", 2, {"per_client": 0}, "per_client = 0"),
        ("shards", 7, {"per_client": 3}, "need 21 samples, got 20"),
        ("step", 2, {"majors": 3}, "majors = 3, but there are 2 classes"),
        ("step", 2, {"majors": 0}, "majors = 0"),
    ],
)
def test_bad_requests_get_one_line(name: str, clients: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        split(name, balanced(2, 10), clients, rng(), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", list(PARTITIONS))
def test_clients_and_labels_are_checked_everywhere(name: str) -> None:
    options = {"alpha": 1.0} if name.startswith("dirichlet") else {}
    for clients, message in [
        (0, "clients = 0"),
        (-1, "clients = -1"),
        (2.0, "clients = 2.0"),
        (21, "there are 20 samples"),
    ]:
        with pytest.raises(InputError, match=message):
            split(name, balanced(2, 10), clients, rng(), **options)  # type: ignore[arg-type]
    for labels in (np.array([0.0, 1.0]), np.zeros((2, 2), dtype=int), [0, 1]):
        with pytest.raises(InputError, match="one-dimensional array of whole numbers"):
            split(name, labels, 1, rng(), **options)  # type: ignore[arg-type]
