"""Local optimisation: learning rates, optimisers on flat vectors, and the loop over mini-batches."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Literal, NamedTuple, Protocol, Self

import torch
from pydantic import AfterValidator
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from metabayfl.task import Task
from metabayfl.types import Diverged, Params

OptimiserName = Literal["sgd", "adam"]
Batch = tuple[Tensor, Tensor]
_SCHEDULES: dict[str, Callable[[int, int], float]] = {
    "k": lambda round_, rounds: 1.0 / (round_ + 1),
    "sqrt(k)": lambda round_, rounds: 1.0 / math.sqrt(round_ + 1),
    "sqrt(K)": lambda round_, rounds: 1.0 / math.sqrt(rounds),
}


def rate_at(rate: float | str, round_: int, rounds: int) -> float:
    """Evaluate a learning rate at round k = round_ + 1 of K = rounds: a number, or a/k, a/sqrt(k), a/sqrt(K)."""
    if not isinstance(rate, str):
        return float(rate)
    start, _, schedule = rate.partition("/")
    return float(start) * _SCHEDULES[schedule.strip()](round_, rounds) if schedule else float(start)


def _check_rate(rate: float | str) -> float | str:
    accepted = "a positive number such as 0.001, or a schedule 'a/sqrt(K)', 'a/k', 'a/sqrt(k)' such as '0.1/sqrt(k)'"
    if isinstance(rate, str) and not re.fullmatch(r"[0-9.eE+-]+( */ *(k|sqrt\(k\)|sqrt\(K\)))?", rate):
        raise ValueError(f"accepted: {accepted}")
    try:
        value = rate_at(rate, 0, 1)
    except ValueError:
        value = -1.0
    if not (0 < value < math.inf):
        raise ValueError(f"accepted: {accepted}")
    return rate


Rate = Annotated[float | str, AfterValidator(_check_rate)]


class Group(NamedTuple):
    """A flat vector to optimise, its gradient, a factor on the learning rate, and whether weight decay applies."""

    values: Tensor
    gradient: Tensor
    rate_factor: float = 1.0
    decays: bool = True


class Objective(Protocol):
    """A loss with flat parameters of its own: several may take turns on one task.

    A call leaves the gradients in the groups and returns the mean NLL of the batch.
    """

    task: Task
    groups: Sequence[Group]

    def __call__(self, x: Tensor, y: Tensor) -> float:
        """Evaluate on a mini-batch."""
        ...

    def model(self) -> Params:
        """Copy out the model as it is now."""
        ...

    def metrics(self) -> dict[str, float]:
        """What is worth knowing of it besides the NLL."""
        ...

    def skip_draw_of(self, other: Self) -> None:
        """Be as random as another objective that has been evaluated once more."""
        ...


class PointLoss:
    """The negative log-likelihood of a plain network."""

    def __init__(self, task: Task, model: Params, offset: Tensor | None = None) -> None:
        self.task, self.weights, self.offset = task, model["mu"].clone(), offset
        self.groups: Sequence[Group] = [Group(self.weights, task.gradient[: task.size])]
        task.load_buffers(model)

    def __call__(self, x: Tensor, y: Tensor) -> float:
        """Evaluate on a mini-batch."""
        self.task.weights.copy_(self.weights)
        return self.task.backward(x, y, self.offset).item()

    def model(self) -> Params:
        """Copy out the model as it is now."""
        return self.task.with_buffers({"mu": self.weights.clone()})

    def metrics(self) -> dict[str, float]:
        """Nothing besides the NLL."""
        return {}

    def skip_draw_of(self, other: Self) -> None:
        """Nothing is drawn."""


class Optimiser(Protocol):
    """Moves the groups of an objective along the gradients that its last call has left."""

    def step(self, rate: float) -> None:
        """Move all groups once."""
        ...


class Adam:
    """Adam (Kingma & Ba 2015) on flat vectors, fused by PyTorch."""

    def __init__(self, groups: Sequence[Group], weight_decay: float = 0.0) -> None:
        self.groups = groups
        self.weight_decay = weight_decay
        self.first = [torch.zeros_like(group.values) for group in groups]
        self.second = [torch.zeros_like(group.values) for group in groups]
        self.steps = [torch.zeros((), dtype=torch.float32) for _ in groups]

    def step(self, rate: float) -> None:
        """Move all groups once."""
        for group, first, second, count in zip(self.groups, self.first, self.second, self.steps, strict=True):
            adam(
                [group.values], [group.gradient], [first], [second], [], [count],
                fused=True, amsgrad=False, beta1=0.9, beta2=0.999, lr=rate * group.rate_factor,
                weight_decay=self.weight_decay * group.decays, eps=1e-8, maximize=False,
            )  # fmt: skip


class Sgd:
    """Gradient descent with heavy-ball momentum on flat vectors, fused by PyTorch."""

    def __init__(self, groups: Sequence[Group], weight_decay: float = 0.0, momentum: float = 0.9) -> None:
        self.groups = groups
        self.weight_decay = weight_decay
        self.momentum = momentum
        self.velocity: list[Tensor | None] = [torch.zeros_like(group.values) for group in groups]

    def step(self, rate: float) -> None:
        """Move all groups once."""
        for group, velocity in zip(self.groups, self.velocity, strict=True):
            sgd(
                [group.values], [group.gradient], [velocity],
                fused=True, weight_decay=self.weight_decay * group.decays, momentum=self.momentum,
                lr=rate * group.rate_factor, dampening=0.0, nesterov=False, maximize=False,
            )  # fmt: skip


def make_optimiser(
    name: OptimiserName, groups: Sequence[Group], weight_decay: float = 0.0, momentum: float = 0.9
) -> Optimiser:
    """Return a fresh optimiser."""
    return Adam(groups, weight_decay) if name == "adam" else Sgd(groups, weight_decay, momentum)


@dataclass
class Trace:
    """The mean NLL of each mini-batch of a run, in order."""

    nll: list[float] = field(default_factory=list)

    def last(self, steps: int) -> float:
        """Mean over the last steps."""
        recent = self.nll[-steps:]
        return sum(recent) / len(recent)


def steps(
    objective: Objective, optimiser: Optimiser, batches: Iterable[Batch], rate: float, repeats: int = 1
) -> Iterator[float]:
    """Take so many steps on each mini-batch, and yield the NLL that the last of them started from.

    A loss, or in the end a parameter, that is not finite ends it with `Diverged`.
    """
    repeated = (batch for batch in batches for _ in range(repeats))
    return islice(_steps(objective, optimiser, repeated, rate), repeats - 1, None, repeats)


def _steps(objective: Objective, optimiser: Optimiser, batches: Iterable[Batch], rate: float) -> Iterator[float]:
    number = 0
    for number, (x, y) in enumerate(batches, 1):
        nll = objective(x, y)
        if not math.isfinite(nll):
            raise Diverged(f"the loss became {nll} at step {number} with rate {rate:g}: try a smaller one")
        optimiser.step(rate)
        yield nll
    if not all(bool(group.values.isfinite().all()) for group in objective.groups):
        raise Diverged(f"a parameter became infinite or NaN after {number} steps with rate {rate:g}")


def descend(objective: Objective, optimiser: Optimiser, batches: Iterable[Batch], rate: float) -> Trace:
    """Take one step for each mini-batch."""
    return Trace(list(steps(objective, optimiser, batches, rate)))
