"""Each client's samples are split once, by seed and client; what does not fit is one line."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, Subset, TensorDataset

from metabayfl import Federation, InputError
from metabayfl.data.federation import share
from metabayfl.environment import data_hash
from metabayfl.likelihood import Categorical, Gaussian

CLASSES = 3
make = Federation.from_arrays


def numbered(*sizes: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Clients whose inputs are running numbers, so that every sample can be recognised; labels follow from them."""
    ends = np.cumsum(sizes)
    numbers = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return [(n[:, None].astype(np.float32), n % CLASSES) for n in numbers]


def names(x: torch.Tensor) -> list[int]:
    return x.flatten().int().tolist()


def assert_same(one: Federation, other: Federation) -> None:
    assert data_hash(one) == data_hash(other)
    for number in range(len(one)):
        for a, b in zip(vars(one.client(number)).values(), vars(other.client(number)).values(), strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


fractions = st.floats(0, 0.99)


class TestSplit:
    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.integers(2, 40), min_size=1, max_size=4), fractions, fractions, st.integers(0, 9), st.booleans())
    def test_parts_are_disjoint_and_complete(
        self, sizes: list[int], test_fraction: float, select_fraction: float, seed: int, held_out: bool
    ) -> None:
        given_ = numbered(*sizes)
        options: dict[str, Any] = {"seed": seed, "test_fraction": test_fraction, "select_fraction": select_fraction}
        federation = make(given_, given_[0], **options)
        assert len(federation) == len(sizes)
        for number, (x, _) in enumerate(given_):
            client = federation.client(number)
            data = client.train_data(held_out)
            train, select, test = names(client.x), names(data.select_x), names(client.test_x)
            assert sorted(train + test) == x.flatten().astype(int).tolist()
            assert set(select) <= set(train)
            assert sorted(names(data.x) + (select if held_out else [])) == sorted(train)
            assert len(test) == share(len(x), test_fraction)
            assert len(select) == share(len(train), select_fraction) == client.select_size
            assert len(data) == federation.train_sizes(held_out)[number] >= 1
            for inputs, labels in ((data.x, data.y), (data.select_x, data.select_y), (client.test_x, client.test_y)):
                assert [n % CLASSES for n in names(inputs)] == labels.tolist()

    @pytest.mark.parametrize(
        ("samples", "fraction", "expected"),
        [
            (10, 0.2, 2),
            (10, 0.0, 0),
            (2, 0.2, 1),
            (2, 0.99, 1),
            (1, 0.5, 0),
            (3, 0.01, 1),
            (7, 0.5, 4),
            (100, 0.99, 99),
        ],
    )
    def test_share(self, samples: int, fraction: float, expected: int) -> None:
        assert share(samples, fraction) == expected

    def test_default_sizes(self) -> None:
        client = make(numbered(100)).client(0)
        assert (len(client.x), client.select_size, len(client.test_x)) == (80, 16, 20)

    def test_two_samples_are_one_to_train_and_one_to_test(self) -> None:
        client = make(numbered(2, 9)).client(0)
        assert (len(client.x), client.select_size, len(client.test_x)) == (1, 0, 1)

    def test_keyed_by_seed(self) -> None:
        assert_same(make(numbered(30, 20), seed=4), make(numbered(30, 20), seed=4))
        assert_same(make(numbered(30, 20), seed=4), make(numbered(30, 20), seed=np.int64(4)))
        here, there = make(numbered(30), seed=4).client(0), make(numbered(30), seed=5).client(0)
        assert set(names(here.test_x)) != set(names(there.test_x))

    def test_keyed_by_client_and_by_nothing_else(self) -> None:
        alone, among = make(numbered(30)).client(0), make(numbered(30, 8, 40)).client(0)
        assert torch.equal(alone.x, among.x)
        twins = make([numbered(30)[0]] * 2)
        assert set(names(twins.client(0).test_x)) != set(names(twins.client(1).test_x))

    def test_the_select_part_is_the_same_whether_held_out_or_not(self) -> None:
        client = make(numbered(30)).client(0)
        inside, outside = client.train_data(held_out=False), client.train_data(held_out=True)
        assert torch.equal(inside.select_x, outside.select_x)
        assert (len(inside), len(outside)) == (24, 19)

    def test_what_the_user_does_to_the_arrays_later_has_no_effect(self) -> None:
        clients = numbered(20, 20)
        federation, twin = make(clients), make(numbered(20, 20))
        clients[0][0][:] = -1
        assert_same(federation, twin)


class TestCommonTest:
    def test_without_one_the_local_parts_together_are_it(self) -> None:
        federation = make(numbered(10, 20))
        locals_ = [federation.client(number) for number in (0, 1)]
        assert torch.equal(federation.test_x, torch.cat([client.test_x for client in locals_]))
        assert torch.equal(federation.test_y, torch.cat([client.test_y for client in locals_]))

    def test_one_of_its_own_is_taken_whole_and_in_order(self) -> None:
        *clients, (x, y) = numbered(10, 20, 7)
        federation = make(clients, (x, y))
        assert names(federation.test_x) == list(range(30, 37))
        assert federation.test_y.tolist() == y.tolist()
        assert len(federation.client(0).test_x) == 2  # the local parts are cut all the same

    def test_with_one_clients_may_keep_everything_for_training(self) -> None:
        federation = make(numbered(1, 5), numbered(9)[0], test_fraction=0)
        assert federation.train_sizes(held_out=False) == {0: 1, 1: 5}
        assert len(federation.local_test.x) == 0


class TestKinds:
    def test_classes_are_counted_over_clients_and_test(self) -> None:
        assert make([([[0.0]] * 4, [0, 1, 0, 1])], ([[0.0]], [4])).likelihood == Categorical(5)
        assert make([([[0.0]] * 4, [True, False] * 2)]).likelihood == Categorical(2)
        assert make([([[0.0]] * 4, [0] * 4)], classes=7).likelihood == Categorical(7)

    def test_real_labels_mean_regression(self) -> None:
        x, y = np.ones((10, 2)), np.linspace(0, 1, 20).reshape(10, 2)
        federation = make([(x, y)], noise_std=0.3)
        assert federation.likelihood == Gaussian(0.3)
        assert (federation.train.y.dtype, federation.train.y.shape) == (torch.float32, (8, 2))

    def test_bytes_stay_bytes_unless_somebody_has_real_numbers(self) -> None:
        x, y = np.array([[0, 51], [102, 255]] * 2, dtype=np.uint8), [0, 1, 0, 1]
        assert make([(x, y), (x, y)]).train.x.dtype == torch.uint8
        mixed = make([(x, y), (x.astype(np.float32) / 255, y)]).train.x
        assert set(mixed.flatten().tolist()) == {np.float32(n / 255) for n in (0, 51, 102, 255)}

    @pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
    def test_other_whole_numbers_stay_indices(self, dtype: Any) -> None:
        federation = make([(np.arange(40, dtype=dtype).reshape(20, 2), np.arange(20) % 2)])
        assert federation.client(0).train_data(held_out=False).x.dtype == torch.int64

    def test_yes_and_no_become_one_and_zero(self) -> None:
        values = make([(np.array([[True, False]] * 4), [0, 1, 0, 1])]).train.x
        assert values.tolist() == [[1.0, 0.0]] * 3

    @pytest.mark.parametrize(
        "turn",
        [
            lambda a: a.tolist(),
            torch.from_numpy,
            lambda a: a.astype(a.dtype.newbyteorder(">")),
            lambda a: np.flip(np.flip(a).copy()),  # negative strides
            lambda a: np.lib.stride_tricks.as_strided(a, writeable=False),
            lambda a: list(torch.from_numpy(a)),
        ],
        ids=["list", "tensor", "big-endian", "strides", "read-only", "list of tensors"],
    )
    def test_arrays_of_any_origin(self, turn: Callable[[np.ndarray], Any]) -> None:
        (x, y), other = numbered(10, 10)
        assert_same(make([(turn(x), turn(y)), other]), make([(x, y), other]))

    def test_a_tensor_that_wants_a_gradient(self) -> None:
        x, y = numbered(10)[0]
        federation = make([(torch.tensor(x, requires_grad=True), torch.tensor(y))])
        assert not federation.train.x.requires_grad

    def test_clients_may_come_from_a_generator(self) -> None:
        assert_same(make(pair for pair in numbered(9, 9)), make(numbered(9, 9)))

    def test_unlabelled(self) -> None:
        pool = make(numbered(9), unlabelled=[[1.0], [2.0]]).unlabelled
        assert pool is not None
        assert pool.tolist() == [[1.0], [2.0]]


class TestBatchSizes:
    def test_one_for_all_or_one_each(self) -> None:
        assert make(numbered(9, 9), batch_size=np.int64(4)).batch_sizes.tolist() == [4, 4]
        federation = make(numbered(60, 60), batch_size=[8, 48])
        steps = [federation.client(n).train_data(held_out=False).steps_per_epoch() for n in (0, 1)]
        assert steps == [6, 1]


class TestDatasets:
    def test_the_same_as_arrays(self) -> None:
        arrays = numbered(10, 12, 5)
        sets = [TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in arrays]
        options: dict[str, Any] = {"seed": 3, "batch_size": [4, 5]}
        found = Federation.from_datasets(sets[:2], sets[2], **options)
        assert_same(found, make(arrays[:2], arrays[2], **options))

    def test_labels_may_be_plain_numbers(self) -> None:
        samples = [[(np.full(2, n, np.float32), n % 2) for n in range(6)]]
        assert Federation.from_datasets(samples).likelihood == Categorical(2)
        real = [[(np.full(2, n, np.float32), n / 2) for n in range(6)]]
        assert Federation.from_datasets(real).likelihood == Gaussian(1.0)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.zeros(2), 0)])


X, Y = np.ones((6, 2), np.float32), np.arange(6) % 2
BAD = np.where(np.arange(12).reshape(6, 2) == 7, np.nan, 1.0)
GOOD = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
datasets = Federation.from_datasets

BAD_INPUT: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "no clients": (lambda: make([]), ["at least one client", "none"]),
    "one pair instead of a list": (lambda: make((X, Y)), ["client 0 is a ndarray", "pair (inputs, labels)"]),
    "a triple": (lambda: make([(X, Y), (X, Y, Y)]), ["client 1 is a tuple of 3", "pair (inputs, labels)"]),
    "a dict": (lambda: make({"a": (X, Y)}), ["client 0 is a str", "pair"]),
    "empty client": (lambda: make([(X, Y), (X[:0], Y[:0])]), ["client 1 is empty", "leave it out"]),
    "empty test": (lambda: make([(X, Y)], (X[:0], Y[:0])), ["test is empty"]),
    "one sample": (lambda: make([(X, Y), (X[:1], Y[:1])]), ["client 1 has 1 sample", "at least 2", "test_fraction=0"]),
    "nothing to test on": (lambda: make([(X, Y)], test_fraction=0), ["nothing to test on", "test=(x, y)"]),
    "one class": (lambda: make([(X, Y * 0)]), ["all labels are 0", "at least 2 classes", "classes="]),
    "classes of one": (lambda: make([(X, Y)], classes=1), ["classes = 1", "from 2"]),
    "classes as text": (lambda: make([(X, Y)], classes="2"), ["classes = '2'", "whole number"]),
    "NaN inputs": (lambda: make([(X, Y), (BAD, Y)]), ["client 1", "1 of 12 numbers in the inputs", "NaN", "sample 3"]),
    "NaN test": (lambda: make([(X, Y)], (BAD, Y)), ["test", "inputs", "NaN", "finite"]),
    "NaN pool": (lambda: make([(X, Y)], unlabelled=BAD), ["unlabelled", "inputs", "NaN", "finite"]),
    "infinite labels": (lambda: make([(X, np.where(Y, np.inf, 0))]), ["client 0", "labels", "infinite", "sample 1"]),
    "too large for float32": (lambda: make([(X.astype(float) * 1e300, Y)]), ["client 0", "inputs", "finite"]),
    "label out of range": (lambda: make([(X, Y), (X, Y * 5)], classes=3), ["client 1 has the label 5", "0 to 2"]),
    "negative label": (lambda: make([(X, Y), (X, Y - 1)]), ["client 1 has the label -1", "from 0"]),
    "labels as a column": (lambda: make([(X, Y[:, None])]), ["client 0", "(6, 1)", "one class number"]),
    "labels as text": (lambda: make([(X, ["cat"] * 6)]), ["client 0", "labels", "numbers", "<U3"]),
    "complex labels": (lambda: make([(X, Y * 1j)]), ["client 0", "labels", "complex", "real or whole"]),
    "no labels": (lambda: make([(X, None)]), ["client 0", "labels", "not an array of numbers"]),
    "a single label": (lambda: make([(X, 1)]), ["client 0", "labels", "single number, 1"]),
    "shapes differ": (lambda: make([(X, Y), (X[:, :1], Y)]), ["client 1", "(1,)", "client 0", "(2,)", "same"]),
    "shape of test differs": (lambda: make([(X, Y)], (X[:, :1], Y)), ["test", "(1,)", "client 0", "(2,)"]),
    "shape of pool differs": (lambda: make([(X, Y)], unlabelled=X[:, :1]), ["unlabelled", "(1,)", "(2,)"]),
    "kinds of inputs": (lambda: make([(X, Y), (X.astype(int), Y)]), ["client 1", "whole-number inputs", "real"]),
    "kinds of labels": (lambda: make([(X, Y), (X, Y / 2)]), ["client 1", "classes", "regression", "same"]),
    "numbers of targets": (
        lambda: make([(X, X), (X, X[:, 0])]),
        ["client 1", "(6,)", "(6, 2)", "same number of targets"],
    ),
    "lengths": (lambda: make([(X, Y), (X, Y[:5])]), ["client 1 has 6 inputs", "(5,)", "one for each"]),
    "ragged inputs": (lambda: make([([[1, 2], [3]], [0, 1])]), ["client 0", "inputs", "different lengths"]),
    "ragged labels": (lambda: make([(X[:2], [[0], [0, 1]])]), ["client 0", "labels", "different lengths"]),
    "ragged dataset": (
        lambda: datasets([[(X[0], 0), (X[0, :1], 1)]]),
        ["client 0", "(2,) in sample 0", "(1,) in sample 1"],
    ),
    "empty dataset": (lambda: datasets([GOOD, Subset(GOOD, [])]), ["client 1", "empty dataset", "map-style"]),
    "endless dataset": (lambda: datasets([Endless()]), ["client 0", "no length", "map-style"]),
    "dataset of dicts": (lambda: datasets([[{"x": 1}]]), ["client 0, sample 0 is a dict", "pair (input, label)"]),
    "no datasets": (lambda: datasets([]), ["at least one client"]),
    "noise_std": (lambda: make([(X, Y / 2)], noise_std=-1.0), ["noise_std = -1.0", "positive"]),
    "noise_std NaN": (lambda: make([(X, Y / 2)], noise_std=float("nan")), ["noise_std = nan", "positive"]),
    "seed": (lambda: make([(X, Y)], seed=-1), ["seed = -1", "whole number from 0"]),
    "seed None": (lambda: make([(X, Y)], seed=None), ["seed = None", "whole number"]),
}
for value in (0, -1, 2.5, None, "32", True, [4], [4, 0], [4, 2.5], [4, 4, 4]):
    BAD_INPUT[f"batch_size {value}"] = (
        lambda value=value: make([(X, Y)] * 2, batch_size=value),
        [f"batch_size = {value!r}", "whole number from 1", "each of the 2 clients"],
    )
for name in ("test_fraction", "select_fraction"):
    for value in (-0.1, 1, 1.5, float("nan"), "0.2", None, True):
        BAD_INPUT[f"{name} {value}"] = (
            lambda name=name, value=value: make([(X, Y)], (X, Y), **{name: value}),
            [f"{name} = {value!r}", "0 to below 1"],
        )


@pytest.mark.parametrize(("call", "parts"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_one_line_with_the_value_and_what_is_accepted(call: Callable[[], Any], parts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


class TestDataHash:
    def test_sees_every_sample_and_who_holds_it(self) -> None:
        base = make(numbered(10, 10), unlabelled=[[1.0]])
        more = base.test_x.clone()
        more[0] += 1
        offsets = base.train.offsets.copy()
        offsets[1] += 1
        others = [
            base,
            make(numbered(10, 10)),
            make(numbered(10, 10), unlabelled=[[2.0]]),
            make(numbered(10, 10), unlabelled=[[1.0]], batch_size=4),
            make(numbered(10, 10), unlabelled=[[1.0]], select_fraction=0.5),
            replace(base, test_x=more),
            replace(base, train=replace(base.train, offsets=offsets)),
        ]
        assert len({data_hash(federation) for federation in others}) == len(others)
        assert data_hash(base) == data_hash(make(numbered(10, 10), unlabelled=[[1.0]]))
