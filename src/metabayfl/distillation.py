"""Learning from predictions of other models instead of labels: FedPHP, FedBE, federated distillation."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from metabayfl.likelihood import Categorical
from metabayfl.optim import Objective, PointLoss, Sgd, steps
from metabayfl.options import InputError
from metabayfl.task import Task
from metabayfl.types import Params, TrainData


class Distillation(PointLoss):
    """(1 - share) NLL + share T² KL(teacher || student), with both predictions softened by the temperature T."""

    def __init__(self, task: Task, model: Params, teacher: Params, share: float, temperature: float) -> None:
        super().__init__(task, model)
        self.teacher = {name: tensor.clone() for name, tensor in teacher.items()}
        self.share, self.temperature = share, temperature

    def __call__(self, x: Tensor, y: Tensor) -> float:
        """Evaluate on a mini-batch; the teacher sees the same inputs in evaluation mode."""
        target = (self.task.consult(self.teacher, x) / self.temperature).softmax(1)
        self.task.weights.copy_(self.weights)
        outputs = self.task.forward(x)
        nll = self.task.likelihood.nll(outputs, y)
        transfer = kl_div((outputs / self.temperature).log_softmax(1), target, reduction="batchmean")
        loss = (1 - self.share) * nll + self.share * self.temperature**2 * transfer
        self.task.differentiate(loss, len(x))
        return nll.item()


def count_classes(name: str, task: Task) -> int:
    """Return the number of classes; a task without is refused to method `name`."""
    if not isinstance(task.likelihood, Categorical):
        raise InputError(f"{name} learns from predicted classes: whole-number labels are accepted")
    return task.likelihood.classes


def mean_probabilities(predictions: Iterable[Tensor]) -> Tensor:
    """Mean over models of the class probabilities, given their outputs."""
    total = torch.zeros(())
    for outputs in predictions:
        total = total + outputs.softmax(1)
    return total / total.sum(1, keepdim=True)


def sharpen(probabilities: Tensor, temperature: float) -> Tensor:
    """p^(1/T) / Z: below 1 the temperature makes the likely classes likelier."""
    sharp = probabilities ** (1 / temperature)
    return sharp / sharp.sum(1, keepdim=True)


def distil(
    student: Objective, pool: TrainData, epochs: int, rate: float, averaged: float, rng: torch.Generator
) -> Params:
    """Train a student on predictions by SGD; its values are averaged over the last share of the steps."""
    optimiser = Sgd(student.groups, weight_decay=1e-5, momentum=0.9)
    total_steps = epochs * pool.steps_per_epoch()
    first = total_steps - max(1, round(averaged * total_steps))
    totals = [torch.zeros_like(group.values, dtype=torch.float64) for group in student.groups]
    for step, _ in enumerate(steps(student, optimiser, pool.batches(epochs, rng), rate)):
        if step >= first:
            for total, group in zip(totals, student.groups, strict=True):
                total.add_(group.values)
    for total, group in zip(totals, student.groups, strict=True):
        group.values.copy_(total / (total_steps - first))
    return student.model()
