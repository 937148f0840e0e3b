"""Randomness as a function of its key: nothing else matters, and nothing else is touched."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from federations import bits, network, train
from metabayfl.likelihood import Categorical
from metabayfl.methods import FedAvg
from metabayfl.methods.base import make_task
from metabayfl.randomness import keyed_globals, numpy_generator, seed_of, torch_generator
from metabayfl.types import Context

KNOWN_SEED = 1781240116591949284
KEYS = st.lists(st.none() | st.integers() | st.text(max_size=5), max_size=4).map(tuple)


def globals_now() -> tuple[Any, ...]:
    """The next numbers of the three global generators, without drawing them."""
    state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    return tuple(state[0].tolist()), state[1][1].tobytes(), state[1][2:], state[2]  # type: ignore[index]


def draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()  # noqa: S311


class TestKeys:
    @given(KEYS)
    def test_a_seed_has_63_bits_and_depends_on_its_key_alone(self, key: tuple[Any, ...]) -> None:
        assert 0 <= seed_of(*key) < 2**63
        assert seed_of(*key) == seed_of(*key)

    @given(KEYS, KEYS)
    def test_different_keys_have_different_seeds(self, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
        assert (seed_of(*one) == seed_of(*other)) == (repr(one) == repr(other))

    @pytest.mark.parametrize(
        ("one", "other"),
        [((1, 23), (12, 3)), ((1,), ("1",)), ((None,), ("None",)), ((1, ""), (1,)), (("a, b",), ("a", "b"))],
    )
    def test_keys_that_look_alike(self, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
        assert seed_of(*one) != seed_of(*other)

    def test_a_known_value(self) -> None:
        """The promise of the same numbers tomorrow: this changes only with the format of a run."""
        assert seed_of(0, 1, None, "batches") == KNOWN_SEED

    def test_generators_are_new_each_time(self) -> None:
        assert torch.equal(torch.rand(3, generator=torch_generator(7)), torch.rand(3, generator=torch_generator(7)))
        assert np.array_equal(numpy_generator(7).random(3), numpy_generator(7).random(3))
        assert not np.array_equal(numpy_generator(7).random(3), numpy_generator(8).random(3))

    def test_streams_of_neighbours_are_independent(self) -> None:
        """Correlations over 40 x 40 pairs of keys with 4096 numbers each stay within 5.5 standard deviations."""
        rows = torch.stack([torch.randn(4096, generator=torch_generator(0, 0, n, "noise")) for n in range(40)])
        correlation = torch.corrcoef(rows) - torch.eye(40)
        assert correlation.abs().max() * 4096**0.5 < 5.5
        assert abs(rows.mean().item()) * rows.numel() ** 0.5 < 4


class TestContext:
    def context(self, **where: int | None) -> Context:
        return Context(make_task(FedAvg(), network(), Categorical(3)), **where)  # type: ignore[arg-type]

    def test_rng_depends_on_seed_round_client_and_purpose(self) -> None:
        base: dict[str, int | None] = {"seed": 1, "round": 2, "client": 3}
        first = torch.rand(1, generator=self.context(**base).rng("noise")).item()
        assert torch.rand(1, generator=self.context(**base).rng("noise")).item() == first
        others = [base | change for change in ({"seed": 2}, {"round": 3}, {"client": 4}, {"client": None})]
        numbers = [torch.rand(1, generator=self.context(**other).rng("noise")).item() for other in others]
        numbers.append(torch.rand(1, generator=self.context(**base).rng("batches")).item())
        assert len({first, *numbers}) == 6

    def test_rng_does_not_depend_on_how_long_the_run_is(self) -> None:
        short, long = self.context(rounds=3).rng("noise"), self.context(rounds=300).rng("noise")
        assert torch.equal(torch.rand(3, generator=short), torch.rand(3, generator=long))


class TestKeyedGlobals:
    def test_inside_the_numbers_depend_on_the_key(self) -> None:
        with keyed_globals(1, "a"):
            first = draws()
        torch.rand(5)
        with keyed_globals(1, "a"):
            assert draws() == first
        with keyed_globals(1, "b"):
            assert all(x != y for x, y in zip(draws(), first, strict=True))

    @settings(max_examples=20)
    @given(KEYS)
    def test_outside_nothing_changes(self, key: tuple[Any, ...]) -> None:
        before = globals_now()
        with keyed_globals(*key):
            draws()
            torch.manual_seed(5)
            assert globals_now() != before
        assert globals_now() == before

    def test_an_exception_changes_nothing_either(self) -> None:
        before = globals_now()

        def draw_and_raise(error: type[BaseException]) -> None:
            with keyed_globals("key"):
                draws()
                raise error

        for error in (ValueError, KeyboardInterrupt):
            with pytest.raises(error):
                draw_and_raise(error)
            assert globals_now() == before

    def test_they_nest(self) -> None:
        with keyed_globals("outer"):
            torch.rand(1)
            expected = draws()
        with keyed_globals("outer"):
            torch.rand(1)
            with keyed_globals("inner"):
                draws()
            assert draws() == expected


class TestRuns:
    """Dropout draws from torch's global generator: the engine keys it."""

    def test_two_runs_have_the_same_bits_whatever_the_global_state(self, tmp_path: Path) -> None:
        found = []
        for name in ("one", "other"):
            torch.rand(7)
            train(tmp_path / name, rounds=2)
            found.append(bits(tmp_path / name))
        assert found[0] == found[1]

    def test_dropout_and_seed_matter(self, tmp_path: Path) -> None:
        for name, dropout, seed in (("base", 0.2, 0), ("dry", 0.0, 0), ("seed", 0.2, 1)):
            train(tmp_path / name, FedAvg(epochs=1), network(dropout), rounds=1, seed=seed)
        base, dry, seed = (bits(tmp_path / name)["model.safetensors"] for name in ("base", "dry", "seed"))
        assert base != dry
        assert base != seed

    def test_a_run_leaves_the_global_generators_alone(self, tmp_path: Path) -> None:
        before = globals_now()
        train(tmp_path / "run", rounds=1)
        assert globals_now() == before
