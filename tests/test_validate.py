"""Is an update what it should be? Good ones pass, and whatever a stranger sends gets a fault that names it."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from federations import one_line
from metabayfl.tensorfile import encoded_size
from metabayfl.types import Update
from metabayfl.validate import (
    LARGEST_METRICS,
    LOG_FIELDS,
    LONGEST_NAME,
    Limits,
    find_duplicates,
    find_fault,
    find_malformed,
    find_size_fault,
)

LIKE = {
    "mu": torch.zeros(5),
    "rho": torch.zeros(3),
    "wide": torch.zeros(2, 2, dtype=torch.float64),
    "half": torch.zeros(2, dtype=torch.float16),
    "scalar": torch.tensor(0.0),
    "empty": torch.zeros(0, 3),
    "count": torch.tensor([1, 2]),
}
LIMITS = Limits(LIKE)
FLOATING = ["mu", "rho", "wide", "half", "scalar"]
NAN, INF = float("nan"), float("inf")

FINITE = st.floats(-1e3, 1e3, width=16)
METRICS = st.dictionaries(st.text(max_size=9).filter(lambda n: n not in LOG_FIELDS), FINITE | st.integers(), max_size=4)
WEIGHTS = st.floats(1e-6, 1e9) | st.integers(1, 10**9)


def good(seed: int = 0) -> Update:
    rng = torch.Generator().manual_seed(seed)
    draw = {n: torch.randn(t.shape, generator=rng).to(t.dtype) for n, t in LIKE.items() if t.is_floating_point()}
    return Update(draw | {"count": torch.tensor([3, -4])}, 12.0, {"nll": 0.5})


GOOD = good()
with warnings.catch_warnings():  # that nested tensors are new
    warnings.simplefilter("ignore")
    NESTED = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


@dataclass
class Spoiled:
    """A bad update and the word that its fault must have."""

    update: Any
    named: str


NOT_NUMBERS = st.one_of(
    st.none(), st.booleans(), st.text(max_size=30), st.binary(max_size=5), st.lists(st.integers(), max_size=3),
    st.sampled_from([NAN, INF, -INF, 10**400, -(10**5000), 1j, np.float32(1), np.int64(3), np.ones(40), object()]),
    st.sampled_from([torch.tensor(1.0), torch.ones(30, 30), type, {}, set()]),
)  # fmt: skip
BAD_WEIGHTS = NOT_NUMBERS | st.floats(max_value=0) | st.integers(max_value=0) | st.floats(min_value=1.1e9)
NOT_MAPPINGS = st.one_of(
    st.none(), st.text(max_size=5), st.integers(), st.lists(st.tuples(st.text(max_size=3), st.integers()), max_size=3),
    st.just(torch.zeros(3)), st.just({"mu"}),
)  # fmt: skip
NOT_TENSORS = st.none() | st.integers() | st.text(max_size=4) | st.lists(FINITE, max_size=5) | st.just(np.zeros(5))
STRANGE_NAMES = st.one_of(
    st.text(max_size=LONGEST_NAME).filter(lambda name: name not in LIKE),
    st.integers(), st.none(), st.binary(max_size=4), st.tuples(st.integers(), st.text(max_size=3)),
)  # fmt: skip
OTHER_SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]


def with_tensor(name: str, value: Any) -> Spoiled:
    return Spoiled(GOOD._replace(payload=GOOD.payload | {name: value}), name)


@st.composite
def bad_weight(draw: st.DrawFn) -> Spoiled:
    return Spoiled(GOOD._replace(weight=draw(BAD_WEIGHTS)), "weight")


@st.composite
def bad_metrics(draw: st.DrawFn) -> Spoiled:
    return Spoiled(GOOD._replace(metrics=draw(NOT_MAPPINGS)), "metrics")


@st.composite
def bad_metric(draw: st.DrawFn) -> Spoiled:
    name = draw(st.text("abc'\"\n\\é", max_size=6))
    return Spoiled(GOOD._replace(metrics={**draw(METRICS), name: draw(NOT_NUMBERS)}), f"metric {name!r}")


@st.composite
def bad_metric_name(draw: st.DrawFn) -> Spoiled:
    long = st.text(min_size=LONGEST_NAME + 1, max_size=3 * LONGEST_NAME)
    name = draw(long | st.integers() | st.none() | st.sampled_from(sorted(LOG_FIELDS)))
    return Spoiled(GOOD._replace(metrics={name: 1.0}), "metric ")


@st.composite
def too_many_metrics(draw: st.DrawFn) -> Spoiled:
    count = draw(st.integers(LARGEST_METRICS + 1, 3 * LARGEST_METRICS))
    return Spoiled(GOOD._replace(metrics={f"m{n}": 1.0 for n in range(count)}), "metrics")


@st.composite
def bad_payload(draw: st.DrawFn) -> Spoiled:
    return Spoiled(GOOD._replace(payload=draw(NOT_MAPPINGS)), "payload")


@st.composite
def missing_tensor(draw: st.DrawFn) -> Spoiled:
    gone = draw(st.sampled_from(sorted(LIKE)))
    return Spoiled(GOOD._replace(payload={n: t for n, t in GOOD.payload.items() if n != gone}), gone)


@st.composite
def extra_tensor(draw: st.DrawFn) -> Spoiled:
    name = draw(STRANGE_NAMES)
    named = " ".join(repr(name).split())
    return Spoiled(GOOD._replace(payload={**GOOD.payload, name: torch.zeros(1)}), named[: LONGEST_NAME - 3])


@st.composite
def renamed_tensor(draw: st.DrawFn) -> Spoiled:
    old = draw(st.sampled_from(sorted(LIKE)))
    changed = draw(st.sampled_from([f"{old} ", old.upper(), f"payload.{old}", old[:-1]]))
    return Spoiled(GOOD._replace(payload={changed if n == old else n: t for n, t in GOOD.payload.items()}), old)


@st.composite
def not_a_tensor(draw: st.DrawFn) -> Spoiled:
    return with_tensor(draw(st.sampled_from(sorted(LIKE))), draw(NOT_TENSORS))


@st.composite
def wrong_shape(draw: st.DrawFn) -> Spoiled:
    name = draw(st.sampled_from(sorted(LIKE)))
    shape = draw(OTHER_SHAPES.filter(lambda other: other != tuple(LIKE[name].shape)))
    return with_tensor(name, torch.zeros(shape, dtype=LIKE[name].dtype))


@st.composite
def wrong_type(draw: st.DrawFn) -> Spoiled:
    name = draw(st.sampled_from(sorted(LIKE)))
    dtype = draw(st.sampled_from([d for d in DTYPES if d != LIKE[name].dtype]))
    return with_tensor(name, torch.zeros(LIKE[name].shape, dtype=dtype))


@st.composite
def bad_values(draw: st.DrawFn) -> Spoiled:
    name = draw(st.sampled_from(FLOATING))
    values = GOOD.payload[name].clone()
    huge = {"half": [], "wide": [1e9, -1e300]}.get(name, [1e9, -1e30])
    value = draw(st.sampled_from([NAN, INF, -INF, *huge]))
    values.view(-1)[draw(st.integers(0, values.numel() - 1))] = value
    return with_tensor(name, values)


@st.composite
def without_values(draw: st.DrawFn) -> Spoiled:
    name = draw(st.sampled_from(["mu", "rho", "count"]))
    strange = draw(st.sampled_from(["sparse", "meta", "nested"]))
    return with_tensor(name, {"sparse": LIKE[name].to_sparse(), "meta": LIKE[name].to("meta")}.get(strange, NESTED))


MALFORMED = st.one_of(
    bad_weight(), bad_metrics(), bad_metric(), bad_metric_name(), too_many_metrics(), bad_payload(), missing_tensor(),
    extra_tensor(), renamed_tensor(), not_a_tensor(), wrong_shape(), wrong_type(), bad_values(), without_values(),
)  # fmt: skip


def refused(spoiled: Spoiled) -> None:
    fault = one_line(find_fault(spoiled.update, LIMITS))
    assert spoiled.named in fault
    assert len(fault) < 400


@settings(max_examples=1_000, deadline=None)
@given(MALFORMED)
def test_a_thousand_malformed_updates_are_refused_by_name(spoiled: Spoiled) -> None:
    refused(spoiled)


@pytest.mark.slow
@settings(max_examples=9_000, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
@given(MALFORMED)
def test_nine_thousand_more_malformed_updates_are_refused_by_name(spoiled: Spoiled) -> None:
    refused(spoiled)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), WEIGHTS, METRICS)
def test_a_good_update_has_no_fault(seed: int, weight: float, metrics: dict[str, float]) -> None:
    update = good(seed)._replace(weight=weight, metrics=metrics)
    assert find_fault(update, LIMITS) == ""
    assert find_malformed(update) == ""
    shuffled = update._replace(payload=dict(reversed(update.payload.items())))
    assert find_fault(shuffled, LIMITS) == ""


class TestBounds:
    @pytest.mark.parametrize("weight", [1e-300, 1, 1e9])
    def test_weights_within(self, weight: float) -> None:
        assert find_fault(good()._replace(weight=weight), LIMITS) == ""

    @pytest.mark.parametrize("weight", [1e9 + 1, 0, -0.0, -1])
    def test_weights_outside(self, weight: float) -> None:
        assert find_fault(good()._replace(weight=weight), LIMITS) == f"weight {weight!r} is not in (0, 1e+09]"

    def test_root_mean_square(self) -> None:
        limits = Limits({"x": torch.zeros(4)}, largest_norm=2.0)
        assert find_fault(Update({"x": torch.full((4,), 2.0)}, 1, {}), limits) == ""
        assert find_fault(Update({"x": torch.tensor([4.0, 0, 0, 0])}, 1, {}), limits) == ""
        fault = find_fault(Update({"x": torch.full((4,), 2.01)}, 1, {}), limits)
        assert fault == "x has root mean square 2.01, above 2"

    def test_values_too_large_to_square_are_not_called_infinite(self) -> None:
        huge = Update({"x": torch.full((4,), 1e200, dtype=torch.float64)}, 1, {})
        assert "root mean square inf, above" in find_fault(huge, Limits({"x": torch.zeros(4, dtype=torch.float64)}))

    def test_the_first_fault_is_told_in_words(self) -> None:
        update = good()
        assert find_fault(update._replace(weight=NAN), LIMITS) == "weight nan is not a finite number"
        assert find_fault(update._replace(weight=10**400), LIMITS).startswith("weight 10000000")
        assert find_fault(update._replace(weight=10**5000), LIMITS) == "weight of type int is not a finite number"
        assert find_fault(update._replace(metrics={"nll": NAN}), LIMITS) == "metric 'nll' is nan, not a finite number"
        assert find_fault(update._replace(payload={**update.payload, "mu": torch.full((5,), NAN)}), LIMITS) == (
            "mu has values that are NaN or infinite"
        )
        assert find_fault(update._replace(payload={}), LIMITS) == (
            "tensors missing: 'count', 'empty', 'half' and 4 more; not expected: none"
        )

    def test_a_metric_cannot_overwrite_the_log(self) -> None:
        assert "'fault'" in find_fault(good()._replace(metrics={"fault": 0.0}), LIMITS)


class TestMalformed:
    """What a client checks before it sends: anything that could not be written or read back."""

    def test_values_are_left_to_the_server(self) -> None:
        update = good()
        spoiled = update._replace(weight=1e12, payload={"anything": torch.full((3,), NAN)})
        assert find_malformed(spoiled) == ""
        assert find_fault(spoiled, LIMITS) != ""

    @settings(max_examples=100, deadline=None)
    @given(bad_metrics() | bad_metric() | bad_payload() | not_a_tensor())
    def test_what_cannot_be_sent_is_named(self, spoiled: Spoiled) -> None:
        assert spoiled.named in find_malformed(spoiled.update)


class TestDuplicates:
    @pytest.mark.parametrize(
        ("clients", "expected"),
        [([], []), ([3, 1, 2], []), ([1, 1], [1]), ([2, 1, 2, 2, 1, 0], [2, 1]), (["a", 1, "a"], ["a"])],
    )
    def test_known_answers(self, clients: list[Any], expected: list[Any]) -> None:
        assert find_duplicates(clients) == expected
        assert find_duplicates(iter(clients)) == expected

    @given(st.lists(st.integers(0, 6)))
    def test_against_counting(self, clients: list[int]) -> None:
        assert sorted(find_duplicates(clients)) == sorted(c for c in set(clients) if clients.count(c) > 1)


class TestSize:
    def size(self, payload: dict[str, Tensor], metrics: dict[str, float]) -> int:
        return encoded_size(payload, {"weight": 1e-300, "metrics": metrics})

    def test_a_good_update_always_fits(self) -> None:
        """The largest update without a fault: all metrics allowed, names that take most bytes, longest numbers."""
        longest = int("9" * 308)
        names = [chr(0x1F600 + n) * LONGEST_NAME for n in range(LARGEST_METRICS)]
        update = good()._replace(metrics=dict.fromkeys(names, longest))
        assert find_fault(update, LIMITS) == ""
        assert find_size_fault(self.size(update.payload, update.metrics), LIMITS) == ""

    def test_one_byte_more_than_allowed_is_refused(self) -> None:
        assert find_size_fault(LIMITS.largest_bytes, LIMITS) == ""
        fault = one_line(find_size_fault(LIMITS.largest_bytes + 1, LIMITS))
        assert str(LIMITS.largest_bytes) in fault
        assert str(LIMITS.largest_bytes + 1) in fault

    def test_a_model_of_twice_the_size_is_refused(self) -> None:
        limits = Limits({"mu": torch.zeros(50_000)})
        assert find_size_fault(encoded_size({"mu": torch.zeros(50_000)}), limits) == ""
        assert find_size_fault(encoded_size({"mu": torch.zeros(100_000)}), limits)
