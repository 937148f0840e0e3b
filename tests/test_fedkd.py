"""FedKD: predictions instead of weights, U sent once and counted, a student at the server."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import metabayfl as mb
from federations import federation, network
from metabayfl import tensorfile
from metabayfl.data.federation import Federation
from metabayfl.likelihood import Gaussian
from metabayfl.methods import FedKD, Local
from metabayfl.task import Task
from metabayfl.types import Context, Delivered, Params
from test_contract import POOL, uneven
from test_fedbe import context, smooth
from test_local import events, same

CLIENTS = dict.fromkeys(range(3), 12)


def with_pool(x: Tensor = POOL) -> Federation:
    return replace(federation(), unlabelled=x)


def server_context() -> Context:
    return replace(context(), unlabelled=POOL, clients=CLIENTS)


def told(answer: Tensor, client: int = 0, weight: float = 1.0) -> Delivered:
    return Delivered(client, {"answer": answer}, weight, {})


def some_answer(sharpness: float = 3.0) -> Tensor:
    return (sharpness * torch.randn(20, 3, generator=torch.Generator().manual_seed(4))).softmax(1)


def divergence(ctx: Context, model: Params, answer: Tensor) -> float:
    logs = ctx.task.consult(model, POOL).log_softmax(1)
    return nn.functional.kl_div(logs, answer, reduction="batchmean").item()


class TestBytes:
    def test_they_do_not_depend_on_the_network(self) -> None:
        small, large = (nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)) for width in (4, 400))
        runs = [mb.federate(module, with_pool(), FedKD(epochs=1), rounds=2) for module in (small, large)]
        sent: list[list[Any]] = [[(e["bytes_up"] // 100, e["bytes_down"]) for e in events(run)] for run in runs]
        assert sent[0] == sent[1]
        assert all(20 * 3 * 4 < event["bytes_up"] < 20 * 3 * 4 + 700 for event in events(runs[1]))

    def test_the_pool_is_sent_once_to_each_client_and_counted(self) -> None:
        result = mb.federate(smooth(), with_pool(), FedKD(epochs=1), rounds=6, clients_per_round=1)
        pool, seen = tensorfile.encoded_size({"pool": POOL}), set()
        answer = tensorfile.encoded_size({"answer": torch.zeros(20, 3)})
        for event in events(result):
            first = event["client"] not in seen
            at_least, below = (pool, pool + answer) if first else (answer, answer + 1)
            assert at_least <= event["bytes_down"] < below
            seen.add(event["client"])
        assert 1 < len(seen) < 6

    def test_a_part_of_the_pool_will_do(self) -> None:
        method, ctx = FedKD(pool_samples=7), server_context()
        server = method.init_server(ctx)
        assert len(server["pool"]) == 7
        assert {tuple(row) for row in server["pool"].tolist()} < {tuple(row) for row in POOL.tolist()}
        assert method.payload_like(server, ctx)["answer"].shape == (7, 3)


class TestServer:
    def test_the_answer_by_hand(self) -> None:
        """Weights 1 and 3; at temperature 0.5 the mean is squared and normalised."""
        ctx, answers = server_context(), (some_answer(1.0), some_answer(2.0))
        updates = [told(answers[0], 0, 1.0), told(answers[1], 2, 3.0)]
        mean = (answers[0] + 3 * answers[1]) / 4
        for temperature, expected in ((1.0, mean), (0.5, mean**2 / (mean**2).sum(1, keepdim=True))):
            method = FedKD(temperature=temperature)
            after = method.aggregate(method.init_server(ctx), updates, ctx)
            torch.testing.assert_close(after["answer"], expected)
            assert after["holders"].tolist() == [1, 0, 1]

    def test_the_student_learns_the_answer_and_is_the_global_model(self) -> None:
        ctx, method = server_context(), FedKD(distil_rate=0.1, temperature=1.0)
        server = method.init_server(ctx)
        after = method.aggregate(server, [told(some_answer())], ctx)
        student = method.global_model(after, ctx)
        assert student is not None
        assert divergence(ctx, student, some_answer()) < 0.7 * divergence(ctx, ctx.task.initial(), some_answer())

    def test_no_weights_leave_it(self) -> None:
        method, ctx = FedKD(), server_context()
        after = method.aggregate(method.init_server(ctx), [told(some_answer(), client=1)], ctx)
        assert method.broadcast(after, replace(ctx, client=1)).keys() == {"answer"}
        assert method.broadcast(after, replace(ctx, client=2)).keys() == {"answer", "pool"}


class TestClients:
    def test_the_first_round_is_local_training(self) -> None:
        runs = [mb.federate(network(), with_pool(), method, rounds=1) for method in (FedKD(epochs=1), Local(epochs=1))]
        assert all(same(runs[0].model(client), runs[1].model(client)) for client in range(3))
        assert runs[0].metrics.keys() == {"G/G", "P/L"}

    def test_they_learn_what_all_think(self) -> None:
        ctx, method = replace(server_context(), client=0), FedKD(rate=0.02, digest_epochs=20)
        start = method.init_model(ctx)
        after = method.digest(start, POOL, some_answer(), 8, ctx)
        assert divergence(ctx, after, some_answer()) < 0.7 * divergence(ctx, start, some_answer())

    def test_so_does_one_that_never_took_part(self) -> None:
        ctx, method = replace(server_context(), client=0), FedKD(rate=0.02, digest_epochs=20)
        data = uneven().train_data(0, False, 0, 1)
        own = method.personalise({"pool": POOL, "answer": some_answer()}, {}, None, data, ctx)
        assert divergence(ctx, own, some_answer()) < 0.7 * divergence(ctx, method.init_model(ctx), some_answer())

    def test_gradients_are_those_of_the_data_and_of_the_pool(self) -> None:
        """Local epochs from the first round on, the pool from the second: there is an answer then."""
        result = mb.federate(smooth(), with_pool(), FedKD(epochs=2, digest_epochs=3), rounds=2)
        passes = {(event["round"], event["client"]): event["backward_passes"] for event in events(result)}
        assert [passes[2, client] - passes[1, client] for client in range(3)] == [3 * 20] * 3


def test_without_a_pool_it_is_refused_before_training() -> None:
    with pytest.raises(mb.InputError, match=r"^fedkd needs an unlabelled pool: set data\.unlabelled"):
        mb.federate(network(), federation(), FedKD(epochs=1), rounds=1)


def test_regression_is_refused() -> None:
    with pytest.raises(mb.InputError, match="fedkd learns from predicted classes"):
        FedKD().init_server(Context(Task(nn.Linear(4, 1), Gaussian()), unlabelled=POOL))
