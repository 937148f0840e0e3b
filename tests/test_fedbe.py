"""FedBE: FedAvg without distillation, a student that stays at its own teacher, samples with the right moments."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import metabayfl as mb
from federations import federation, network
from metabayfl.likelihood import Categorical, Gaussian
from metabayfl.methods import FedAvg, FedBE
from metabayfl.methods.fedbe import sample_update
from metabayfl.task import Task
from metabayfl.types import Context, Update
from test_local import same

POOL = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))


def smooth() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def context(module: nn.Module | None = None) -> Context:
    return Context(Task(module or smooth(), Categorical(3)), unlabelled=POOL)


def updates(ctx: Context, count: int = 4, scale: float = 0.5) -> list[Update]:
    rng, model = torch.Generator().manual_seed(1), ctx.task.initial()
    return [
        Update(model | {"mu": model["mu"] + scale * torch.randn(ctx.task.size, generator=rng)}, 1.0 + n, {})
        for n in range(count)
    ]


def test_without_draws_and_distillation_it_is_fedavg_bit_for_bit() -> None:
    runs = [
        mb.federate(network(), federation(), method, rounds=3)
        for method in (FedBE(draws=0, distil_epochs=0, epochs=1), FedAvg(epochs=1))
    ]
    assert same(runs[0].model(), runs[1].model())


def test_without_a_pool_it_is_refused_before_training() -> None:
    with pytest.raises(mb.InputError, match=r"^fedbe needs an unlabelled pool: set data\.unlabelled"):
        mb.federate(network(), federation(), FedBE(epochs=1), rounds=1)


def test_regression_is_refused() -> None:
    with pytest.raises(mb.InputError, match="fedbe learns from predicted classes"):
        FedBE().init_server(Context(Task(nn.Linear(2, 1), Gaussian())))


class TestDistillation:
    def test_a_student_that_is_its_only_teacher_stays(self) -> None:
        """One client, no draws, temperature 1: the gradient is zero where the student starts, but for weight decay."""
        ctx = context()
        sent = updates(ctx, 1)
        found = FedBE(draws=0, temperature=1.0).aggregate(ctx.task.initial(), sent, ctx)
        torch.testing.assert_close(found["mu"], sent[0].payload["mu"], rtol=1e-4, atol=1e-6)

    def test_the_student_comes_closer_to_the_ensemble(self) -> None:
        ctx = context()
        method, sent, server = FedBE(distil_rate=0.05), updates(ctx), ctx.task.initial()
        mean = FedAvg().aggregate(server, sent, ctx)
        answer = method.answer(method.teachers(server, mean, sent, ctx), POOL, ctx.task)
        divergences = []
        for model in (mean, method.aggregate(server, sent, ctx)):
            ctx.task.load(model)
            logs = ctx.task.outputs(POOL).log_softmax(1)
            divergences.append(nn.functional.kl_div(logs, answer, reduction="batchmean").item())
        assert divergences[1] < 0.5 * divergences[0]

    def test_the_answer_by_hand(self) -> None:
        """The mean of the teachers' probabilities, squared and normalised (temperature 0.5)."""
        ctx = context()
        models = [update.payload for update in updates(ctx, 2)]
        probabilities = []
        for model in models:
            ctx.task.load(model)
            probabilities.append(ctx.task.outputs(POOL).softmax(1))
        squares = ((probabilities[0] + probabilities[1]) / 2) ** 2
        found = FedBE().answer(iter(models), POOL, ctx.task)
        torch.testing.assert_close(found, squares / squares.sum(1, keepdim=True))

    def test_weights_are_averaged_over_the_last_steps(self) -> None:
        """One batch per epoch, two epochs: the average of both students, or the last alone."""
        ctx = context()
        options = {"distil_epochs": 2, "distil_rate": 0.5, "draws": 0}
        sent, server = updates(ctx), ctx.task.initial()
        last, both = (
            FedBE(averaged=share, **options).aggregate(server, sent, ctx)["mu"] for share in (0.5, 1.0)
        )  # fmt: skip
        first = FedBE(**(options | {"distil_epochs": 1})).aggregate(server, sent, ctx)["mu"]
        torch.testing.assert_close(both, (first + last) / 2)
        assert not torch.allclose(first, last)

    def test_batchnorm_statistics_come_from_the_pool(self) -> None:
        ctx = replace(context(network()), unlabelled=POOL + 10)
        sent, server = updates(ctx), ctx.task.initial()
        found = FedBE().aggregate(server, sent, ctx)
        assert (found["buffers"] - sent[0].payload["buffers"]).abs().max() > 0.5


class TestSamples:
    """Moments over many draws."""

    @pytest.mark.parametrize("sampling", ["weights", "dirichlet", "updates"])
    def test_moments(self, sampling: str) -> None:
        ctx = context()
        before = ctx.task.initial()["mu"]
        weights = torch.stack([update.payload["mu"] for update in updates(ctx)])
        method = FedBE(sampling=sampling, spread=1.0)
        draws = torch.stack([method.sample(before, weights, number, ctx) for number in range(500)])
        mean, std = weights.mean(0), weights.std(0, correction=0)
        if sampling == "updates":
            mean, std = self.expected_of_updates(ctx.task, before, weights)
        if sampling == "dirichlet":  # Dir(1, ..., 1) over n: variance of the mixture is that of the n values / (n + 1)
            std = std / 5**0.5
        assert ((draws.mean(0) - mean) / std).abs().max() < 0.25
        assert (draws.std(0) / std - 1).abs().max() < 0.25

    @staticmethod
    def expected_of_updates(
        task: Task, before: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mean, std = before.clone(), torch.zeros_like(before)
        for slot in task.layout.slots:
            place = slice(slot.start, slot.stop)
            moves = [row[place] - before[place] for row in weights]
            norms = torch.stack([move.norm() for move in moves])
            unit = torch.stack([move / norm for move, norm in zip(moves, norms, strict=True)])
            mean[place] += unit.mean(0) * norms.mean()
            std[place] = unit.std(0, correction=0) * norms.mean()
        return mean, std

    def test_a_tensor_that_nobody_moved_is_copied(self) -> None:
        ctx = context()
        before = ctx.task.initial()["mu"]
        weights = before.repeat(3, 1)
        weights[:, : ctx.task.layout.slots[0].stop] += torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
        drawn = sample_update(before, weights, torch.ones_like(before), ctx.task)
        place = ctx.task.layout.slots[0].stop
        assert torch.equal(drawn[place:], before[place:])
        assert not torch.equal(drawn[:place], before[:place])
        assert drawn.isfinite().all()
