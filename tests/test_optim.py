import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from metabayfl.likelihood import Categorical, Gaussian
from metabayfl.methods import FedAvg
from metabayfl.optim import Adam, Group, PointLoss, Sgd, descend, make_optimiser, rate_at
from metabayfl.options import InputError
from metabayfl.task import Task
from metabayfl.types import Context, Diverged, TrainData
from strangers import NormedMlp, meet


def rows(count: int, batch_size: int) -> TrainData:
    """Data whose inputs are their own row numbers."""
    numbers = torch.arange(count)
    return TrainData(numbers, numbers * 10, numbers[:0], numbers[:0], batch_size)


def line(slope: float) -> Task:
    """y = w x with w = slope; the loss is (w x - y)²/2 up to a constant."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, slope)
    return Task(module, Gaussian(1.0))


class TestOptimisers:
    @pytest.mark.parametrize("weight_decay", [0.0, 0.1])
    @pytest.mark.parametrize(("name", "momentum"), [("adam", 0.9), ("sgd", 0.0), ("sgd", 0.9)])
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-7)], ids=str)
    def test_equal_those_of_torch(
        self, name: str, momentum: float, weight_decay: float, dtype: torch.dtype, tolerance: float
    ) -> None:
        module, x, y = meet(NormedMlp, batch=40, dtype=dtype)
        plain = copy.deepcopy(module)
        task = Task(module, Categorical(3))
        batches = [(x[rows], y[rows]) for rows in (torch.arange(k, k + 20) for k in range(20))]
        loss = PointLoss(task, task.initial())
        trace = descend(loss, make_optimiser(name, loss.groups, weight_decay, momentum), batches, 0.02)

        if name == "adam":
            reference = torch.optim.Adam(plain.parameters(), lr=0.02, weight_decay=weight_decay)
        else:
            reference = torch.optim.SGD(plain.parameters(), lr=0.02, momentum=momentum, weight_decay=weight_decay)
        for (batch_x, batch_y), nll in zip(batches, trace.nll, strict=True):
            reference.zero_grad()
            expected = cross_entropy(plain(batch_x), batch_y)
            expected.backward()
            reference.step()
            assert nll == pytest.approx(expected.item(), abs=10 * tolerance)
        for parameter, slot in zip(plain.parameters(), task.layout.slots, strict=True):
            torch.testing.assert_close(slot.view(loss.weights), parameter.detach(), rtol=0.0, atol=tolerance)

    @pytest.mark.parametrize("kind", [Adam, Sgd])
    def test_groups_have_their_own_rate_and_decay(self, kind: type[Adam | Sgd]) -> None:
        values = [torch.ones(3) for _ in range(4)]
        gradient = torch.full((3,), 0.5)
        still = torch.zeros(3)
        groups = [
            Group(values[0], gradient),
            Group(values[1], gradient, 0.1),
            Group(values[2], gradient, 0.0),
        ]
        kind([*groups, Group(values[3], still, decays=False)], weight_decay=0.2).step(0.1)
        moved = [1.0 - value[0].item() for value in values]
        assert moved[0] == pytest.approx(0.1 if kind is Adam else 0.1 * (0.5 + 0.2), rel=1e-5)
        assert moved[1] == pytest.approx(0.1 * moved[0], rel=1e-4)
        assert moved[2:] == [0.0, 0.0]


class TestRate:
    @pytest.mark.parametrize(
        ("rate", "first", "fourth"),
        [
            (0.5, 0.5, 0.5),
            ("0.5", 0.5, 0.5),
            ("0.5/k", 0.5, 0.125),
            ("0.5 / k", 0.5, 0.125),
            ("0.5/sqrt(k)", 0.5, 0.25),
            ("5e-1/sqrt(K)", 0.125, 0.125),
        ],
    )
    def test_schedules_at_known_rounds(self, rate: float | str, first: float, fourth: float) -> None:
        """docs/methods.md 7, with K = 16 rounds counted from one."""
        assert FedAvg(rate=rate).rate == rate
        assert rate_at(rate, 0, 16) == first
        assert rate_at(rate, 3, 16) == fourth

    def test_a_round_uses_its_rate(self) -> None:
        task = line(0.0)
        x, y = torch.ones(4, 1), torch.ones(4, 1)
        method = FedAvg(rate="0.5/k", epochs=1, optimiser="sgd", momentum=0.0)
        model, metrics = method.train(
            task.initial(), TrainData(x, y, x, y, batch_size=4), Context(task, round=4, rounds=9, client=0)
        )
        assert model["mu"].item() == pytest.approx(0.1)
        assert metrics["rate"] == 0.1

    @pytest.mark.parametrize(
        "rate", [0, -0.1, math.inf, math.nan, "fast", "0.1/n", "0.1/sqrt( k)", "0/k", "1e999", "", "/k", "0.1/"]
    )
    def test_anything_else_is_refused(self, rate: float | str) -> None:
        with pytest.raises(InputError, match="rate"):
            FedAvg(rate=rate)


class TestDivergence:
    def test_a_loss_that_is_not_a_number_names_the_step(self) -> None:
        task = line(1.0)
        good = torch.ones(2, 1), torch.zeros(2, 1)
        bad = torch.ones(2, 1), torch.full((2, 1), math.nan)
        loss = PointLoss(task, task.initial())
        with pytest.raises(Diverged, match=r"loss became nan at step 3 with rate 0\.1: try a smaller"):
            descend(loss, Sgd(loss.groups), [good, good, bad, good], 0.1)

    def test_a_growing_loss_ends_at_infinity(self) -> None:
        task = line(1.0)
        loss = PointLoss(task, task.initial())
        batch = torch.full((2, 1), 1e3), torch.zeros(2, 1)
        with pytest.raises(Diverged, match=r"loss became inf at step \d+ with rate 1:"):
            descend(loss, Sgd(loss.groups), [batch] * 100, 1.0)

    def test_the_last_step_is_checked_too(self) -> None:
        task = line(1.0)
        loss = PointLoss(task, task.initial())
        with pytest.raises(Diverged, match=r"parameter became infinite or NaN after 1 steps with rate 1e\+38"):
            descend(loss, Sgd(loss.groups), [(torch.full((2, 1), 10.0), torch.zeros(2, 1))], 1e38)


class TestBatches:
    @given(st.integers(1, 40), st.integers(1, 12))
    @settings(deadline=None, max_examples=50)
    def test_every_epoch_is_a_permutation(self, count: int, batch_size: int) -> None:
        data = rows(count, batch_size)
        batches = list(data.batches(3, torch.Generator().manual_seed(0)))
        assert len(batches) == 3 * data.steps_per_epoch()
        for epoch in range(3):
            seen = [x for x, _ in batches[epoch * data.steps_per_epoch() : (epoch + 1) * data.steps_per_epoch()]]
            assert torch.cat(seen).sort().values.tolist() == list(range(count))
        assert all(torch.equal(y, 10 * x) for x, y in batches)

    @pytest.mark.parametrize(
        ("count", "batch_size", "sizes"),
        [
            (8, 4, [4, 4]),
            (9, 4, [4, 5]),
            (10, 4, [4, 4, 2]),
            (5, 4, [5]),
            (3, 4, [3]),
            (1, 4, [1]),
            (3, 1, [1, 1, 1]),
        ],
    )
    def test_a_last_sample_is_never_alone(self, count: int, batch_size: int, sizes: list[int]) -> None:
        batches = rows(count, batch_size).batches(1, torch.Generator())
        assert [len(x) for x, _ in batches] == sizes

    def test_order_is_a_function_of_the_key(self) -> None:
        task = line(1.0)

        def order(purpose: str = "batches", **key: int) -> Tensor:
            ctx = Context(task, **({"seed": 1, "round": 2, "client": 3} | key))
            return torch.cat([x for x, _ in rows(50, 8).batches(2, ctx.rng(purpose))])

        assert torch.equal(order(), order())
        assert not torch.equal(*order().view(2, 50))
        others = [order(seed=2), order(round=3), order(client=2), order(purpose="noise"), order(seed=3, client=1)]
        assert not any(torch.equal(order(), other) for other in others)
