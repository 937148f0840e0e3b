"""Per-FedAvg: its gradients against finite differences, FedAvg as a limit, adaptation on training data only."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat

import pytest
import torch
from torch import Tensor, nn

import metabayfl as mb
from federations import federation, network
from metabayfl.likelihood import Categorical
from metabayfl.methods import FedAvg, PerFedAvg
from metabayfl.methods.per_fedavg import AdaptedLoss, difference_product, hessian_product
from metabayfl.task import Task
from quadratics import EYE, curvature, fixed_point, least_squares, line, play, regression
from test_local import same

RATE = 0.3


@pytest.fixture
def problem() -> tuple[Task, tuple[Tensor, Tensor]]:
    """A smooth network with a convolution, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4), nn.Softplus(), nn.Linear(4, 3)
        ).double()
    rng = torch.Generator().manual_seed(1)
    return Task(module, Categorical(3)), (torch.randn(6, 2, 3, 3, generator=rng).double(), torch.arange(6) % 3)


def forever(batch: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return repeat(batch)


def gradient(task: Task, batch: tuple[Tensor, Tensor], at: Tensor, variant: str) -> Tensor:
    loss = AdaptedLoss(task, {"mu": at}, RATE, variant, forever(batch), forever(batch))  # type: ignore[arg-type]
    loss(*batch)
    return loss.groups[0].gradient.clone()


def value(task: Task, batch: tuple[Tensor, Tensor], at: Tensor) -> float:
    """f(w - a ∇f(w)), with the same batch throughout."""
    task.weights.copy_(at)
    task.backward(*batch)
    task.weights.sub_(task.gradient, alpha=RATE)
    return task.loss(*batch).item()


class TestGradient:
    @pytest.mark.parametrize(("variant", "tolerance"), [("exact", 1e-7), ("hessian-free", 1e-6)])
    def test_is_that_of_the_loss_after_a_step(
        self, problem: tuple[Task, tuple[Tensor, Tensor]], variant: str, tolerance: float
    ) -> None:
        task, batch = problem
        at, step = task.initial()["mu"], 1e-6
        sides = step * torch.eye(task.size, dtype=torch.float64)
        rises = [value(task, batch, at + side) - value(task, batch, at - side) for side in sides]
        differences = torch.tensor(rises, dtype=torch.float64) / (2 * step)
        torch.testing.assert_close(gradient(task, batch, at, variant), differences, rtol=0.0, atol=tolerance)
        crude = gradient(task, batch, at, "first-order")
        assert (crude - differences).abs().max() > 100 * tolerance

    def test_of_first_order_is_taken_after_the_step(self, problem: tuple[Task, tuple[Tensor, Tensor]]) -> None:
        task, batch = problem
        at = task.initial()["mu"]
        task.weights.copy_(at)
        task.backward(*batch)
        task.weights.sub_(task.gradient, alpha=RATE)
        task.backward(*batch)
        expected = task.gradient.clone()
        assert torch.equal(gradient(task, batch, at, "first-order"), expected)

    @pytest.mark.parametrize("product", [hessian_product, difference_product])
    def test_hessian_products_on_a_quadratic(self, product: object) -> None:
        data = regression(1, 24, 24)
        vector = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        found = product(line(1, 1.0), torch.ones_like(vector), vector, data.x, data.y)  # type: ignore[operator]
        torch.testing.assert_close(found, curvature(data) @ vector, rtol=1e-8, atol=0.0)

    def test_differences_use_the_same_dropout_masks_in_float32(self) -> None:
        """With others the quotient would be noise divided by a small number."""
        task = Task(network(dropout=0.5)[3:].append(nn.Linear(3, 3)), Categorical(3))
        x, y = torch.randn(64, 6, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3
        at, vector = task.initial()["mu"], torch.ones(task.size)
        found = []
        for product in (hessian_product, difference_product):
            with torch.random.fork_rng():
                torch.manual_seed(7)
                found.append(product(task, at, vector, x, y))
        torch.testing.assert_close(found[1], found[0], rtol=0.0, atol=2e-3)
        assert found[0].abs().max() > 0.05

    def test_a_zero_gradient_has_no_direction(self) -> None:
        task, data = line(1, 1.0), regression(0, 8, 8)
        nothing = torch.zeros(3, dtype=torch.float64)
        assert torch.equal(difference_product(task, nothing, nothing, data.x, data.y), nothing)


@pytest.mark.parametrize("variant", ["exact", "hessian-free", "first-order"])
def test_the_fixed_point_of_two_quadratics(variant: str) -> None:
    """f_n(w - a A_n (w - w_n)) has the curvature (1 - a A_n)² A_n; first order leaves one factor out."""
    clients, adapt = [regression(0, 8, 8), regression(1, 24, 24)], 0.1
    method = PerFedAvg(variant=variant, rate=0.2, adapt_rate=adapt, epochs=1, optimiser="sgd", momentum=0.0)
    power = 1 if variant == "first-order" else 2
    expected = fixed_point(clients, [0.25, 0.75], lambda a: torch.linalg.matrix_power(EYE - adapt * a, power) @ a)
    found = play(method, line(1, 1.0), clients, rounds=2, mu=expected)
    torch.testing.assert_close(found.server["mu"], expected, rtol=0.0, atol=1e-8)
    for data, own in zip(clients, found.personal.values(), strict=True):
        step = adapt * curvature(data) @ (expected - least_squares(data))
        torch.testing.assert_close(own["mu"], expected - step, rtol=0.0, atol=1e-8)


@pytest.mark.parametrize("variant", ["exact", "hessian-free", "first-order"])
def test_without_adaptation_it_is_fedavg_bit_for_bit(variant: str) -> None:
    method = PerFedAvg(variant=variant, adapt_rate=0.0, epochs=2)
    runs = [mb.federate(network(), federation(), chosen, rounds=2) for chosen in (method, FedAvg(epochs=2))]
    assert same(runs[0].model(), runs[1].model())


@pytest.mark.parametrize("variant", ["exact", "hessian-free"])
def test_second_order_runs_with_dropout_and_batchnorm(variant: str) -> None:
    result = mb.federate(network(), federation(), PerFedAvg(variant=variant, epochs=1), rounds=2)
    first = next(event for event in result.events if event["event"] == "client")
    samples = federation().train_sizes(held_out=False)[first["client"]]
    assert first["backward_passes"] == samples * (5 if variant == "exact" else 4)


def test_the_personal_model_is_adapted_to_training_data_alone() -> None:
    """Clients with the same training data and different tests have the same personal model, which is not the global."""
    data = federation()
    other = replace(data, local_test=replace(data.local_test, x=-data.local_test.x))
    runs = [mb.federate(network(), each, PerFedAvg(epochs=1, adapt_rate=0.1), rounds=1) for each in (data, other)]
    assert same(runs[0].model(0), runs[1].model(0))
    assert not same(runs[0].model(0), runs[0].model())
