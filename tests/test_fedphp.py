"""FedPHP: h = w at first, inheritance by a client's own participations, and a transfer with a known gradient."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import metabayfl as mb
from federations import federation, network
from metabayfl.distillation import Distillation
from metabayfl.likelihood import Categorical, Gaussian
from metabayfl.methods import FedAvg, FedPHP
from metabayfl.optim import PointLoss
from metabayfl.task import Task
from metabayfl.types import Context, Params, TrainData
from test_local import same


def classes(samples: int = 12) -> TrainData:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x[:, :3].argmax(1)
    return TrainData(x, y, x[:0], y[:0], 6)


def linear() -> Task:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Task(nn.Linear(4, 3).double(), Categorical(3))


def moved(model: Params, seed: int = 1) -> Params:
    noise = torch.randn(len(model["mu"]), generator=torch.Generator().manual_seed(seed), dtype=model["mu"].dtype)
    return model | {"mu": model["mu"] + noise}


def gradient(objective: PointLoss, data: TrainData) -> Tensor:
    objective(data.x, data.y)
    return objective.groups[0].gradient.clone()


class TestTransfer:
    def test_from_a_teacher_that_is_the_student_only_the_labels_teach(self) -> None:
        task, data = linear(), classes()
        start = task.initial()
        plain = gradient(PointLoss(task, start), data)
        torch.testing.assert_close(gradient(Distillation(task, start, start, 0.3, 4.0), data), 0.7 * plain)

    def test_gradient_by_hand(self) -> None:
        """Of T² KL(p_h || p_w) with respect to the outputs of w: T (p_w - p_h), both at temperature T."""
        task, data, t = linear(), classes(), 4.0
        start = task.initial()
        teacher = moved(start)
        task.load(teacher)
        target = (task.outputs(data.x) / t).softmax(1)
        task.load(start)
        ours = (task.outputs(data.x) / t).softmax(1)
        error = t * (ours - target) / len(data)
        transfer = torch.cat([(error.T @ data.x).flatten(), error.sum(0)])
        expected = 0.7 * gradient(PointLoss(task, start), data) + 0.3 * transfer
        torch.testing.assert_close(gradient(Distillation(task, start, teacher, 0.3, t), data), expected)

    def test_consulting_a_teacher_leaves_the_students_batchnorm_alone(self) -> None:
        """And dropout too: the same masks, the same statistics, as if nobody had been asked."""
        task, data = Task(network(), Categorical(3)), classes()
        start = task.initial()
        models = []
        for teacher in (moved(start), moved(start, 2)):
            with torch.random.fork_rng():
                torch.manual_seed(0)
                student = Distillation(task, start, teacher, 0.0, 4.0)
                gradients = gradient(student, data)
                models.append(student.model() | {"gradient": gradients})
        with torch.random.fork_rng():
            torch.manual_seed(0)
            plain = PointLoss(task, start)
            gradients = gradient(plain, data)
            models.append(plain.model() | {"gradient": gradients})
        assert same(models[0], models[1])
        assert same(models[0], models[2])


@pytest.mark.parametrize("batchnorm", ["average", "local"])
class TestRounds:
    def test_at_first_it_is_fedavg_and_h_is_w(self, batchnorm: str) -> None:
        runs = [
            mb.federate(network(), federation(), method(epochs=1, batchnorm=batchnorm), rounds=1)
            for method in (FedPHP, FedAvg)
        ]
        assert all(same(runs[0].model(client), runs[1].model(client)) for client in range(3))

    def test_without_transfer_the_shared_model_is_that_of_fedavg(self, batchnorm: str) -> None:
        methods = FedPHP(epochs=1, transfer=0.0, batchnorm=batchnorm), FedAvg(epochs=1, batchnorm=batchnorm)
        runs = [mb.federate(network(), federation(), method, rounds=3) for method in methods]
        servers = [run.directory.checkpoint() for run in runs]
        assert servers[0] is not None
        assert servers[1] is not None
        assert same(servers[0].server, servers[1].server)
        assert not same(runs[0].model(0), runs[1].model(0))


class TestInheritance:
    def test_by_own_participations_not_by_rounds(self) -> None:
        """A client that is invited in rounds 0, 5 and 9 of 10 keeps 0, 0.9 · 1/10 and 0.9 · 2/10 of its h."""
        method, data = FedPHP(epochs=1), classes()
        ctx = Context(linear(), rounds=10, client=0, clients={0: 12})
        state, old = method.init_client(ctx), None
        for round_, share in ((0, 0.0), (5, 0.09), (9, 0.18)):
            down = moved(ctx.task.initial(), round_)
            fit = method.fit(down, state, data, replace(ctx, round=round_))
            assert fit.update.metrics["inherited"] == pytest.approx(share)
            own = method.personalise(down, fit.state, None, data, ctx)
            sent = fit.update.payload["mu"]
            torch.testing.assert_close(own["mu"], sent if old is None else share * old + (1 - share) * sent)
            state, old = fit.state, own["mu"]

    def test_it_is_largest_after_the_expected_number_of_rounds(self) -> None:
        method = FedPHP(participation=0.5)
        assert [method.momentum_after(count, 10) for count in (0, 4, 5, 9)] == pytest.approx([0.0, 0.72, 0.9, 0.9])

    def test_a_client_that_never_took_part_uses_what_it_receives(self) -> None:
        result = mb.federate(nn.Linear(4, 3), federation(), FedPHP(epochs=1), rounds=1, clients_per_round=1)
        assert result.metrics.keys() == {"G/G", "G/L", "P/L"}


def test_regression_is_refused() -> None:
    with pytest.raises(mb.InputError, match="fedphp learns from predicted classes: whole-number labels are accepted"):
        FedPHP().init_server(Context(Task(nn.Linear(2, 1), Gaussian())))
