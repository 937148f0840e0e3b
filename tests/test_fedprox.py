"""FedProx: its fixed point on quadratics, FedAvg as a limit, unequal work."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metabayfl.likelihood import Categorical
from metabayfl.methods import FedAvg, FedProx
from metabayfl.optim import PointLoss
from metabayfl.proximal import Proximal
from metabayfl.task import Task
from metabayfl.types import Context
from quadratics import EYE, fixed_point, line, play, regression
from strangers import Cnn, meet
from test_known_answers import three_clients

CLIENTS = [regression(0, 8, 8), regression(1, 24, 24)]


@pytest.mark.parametrize("steps", [1, 5])
def test_the_fixed_point_of_two_quadratics(steps: int) -> None:
    """With B = A + prox, a round takes w_g - w_n to itself less (1 - (1 - rate B)^E) B⁻¹ A (w_g - w_n)."""
    rate, prox = 0.2, 0.7
    method = FedProx(rate=rate, prox=prox, epochs=steps, optimiser="sgd", momentum=0.0)

    def pull(a: torch.Tensor) -> torch.Tensor:
        b = a + prox * EYE
        return (EYE - torch.linalg.matrix_power(EYE - rate * b, steps)) @ torch.linalg.solve(b, a)

    expected = fixed_point(CLIENTS, [0.25, 0.75], pull)
    found = play(method, line(1, 1.0), CLIENTS, rounds=3, mu=expected).server["mu"]
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)
    elsewhere = play(method, line(1, 1.0), CLIENTS, rounds=60 // steps).server["mu"]
    assert (elsewhere - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_without_a_pull_it_is_fedavg_bit_for_bit(optimiser: str) -> None:
    options = {"optimiser": optimiser, "rate": 0.01, "epochs": 2}
    task, clients = Task(meet(Cnn)[0], Categorical(3)), three_clients(Cnn)
    plain, proximal, pulled = (
        play(method, task, clients, 3).server
        for method in (FedAvg(**options), FedProx(prox=0.0, **options), FedProx(prox=1.0, **options))
    )
    assert all(torch.equal(plain[name], proximal[name]) for name in plain)
    assert not torch.equal(plain["mu"], pulled["mu"])


def test_the_pull_is_the_gradient_of_half_the_squared_distance() -> None:
    """All shared parameters, one norm, squared; BatchNorm that stays with a client is not pulled."""
    module, x, y = meet(Cnn)
    task = Task(module, Categorical(3), batchnorm="local")
    centre = torch.randn(task.size, generator=torch.Generator().manual_seed(0))
    plain, pulled = (Proximal(PointLoss(task, task.initial()), centre, prox) for prox in (0.0, 3.0))
    gradients = []
    for objective in (plain, pulled):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            objective(x, y)
        gradients.append(objective.groups[0].gradient.clone())
    expected = torch.zeros(task.size)
    expected[: task.shared_size] = 3.0 * (task.initial()["mu"] - centre)[: task.shared_size]
    torch.testing.assert_close(gradients[1] - gradients[0], expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_some_clients_do_a_part_of_the_work(seed: int) -> None:
    """A keyed share of them; between one step and all."""
    data, task = replace(CLIENTS[1], batch_size=4), line(1, 1.0)
    contexts = [Context(task, seed, client=client) for client in range(50)]
    for partial, wanted in ((0.0, 0), (1.0, 50)):
        method = FedProx(partial=partial, epochs=20)
        assert sum(method.steps(data, ctx) < 120 for ctx in contexts) >= wanted - 5
        assert partial or all(method.steps(data, ctx) == 120 for ctx in contexts)
    steps = [FedProx(partial=0.5, epochs=20).steps(data, ctx) for ctx in contexts]
    assert steps == [FedProx(partial=0.5, epochs=20).steps(data, ctx) for ctx in contexts]
    assert all(1 <= count <= 120 for count in steps)
    assert 10 <= sum(count < 120 for count in steps) <= 40


def test_partial_work_is_sent_with_the_full_weight() -> None:
    method, task = FedProx(partial=1.0, epochs=10), line(1, 1.0)
    ctx = Context(task, seed=1, client=0)
    fit = method.fit(method.init_server(ctx), {}, CLIENTS[0], ctx)
    assert fit.update.metrics["steps"] == method.steps(CLIENTS[0], ctx) < 10
    assert fit.update.weight == 8
