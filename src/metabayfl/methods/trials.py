"""Short trainings that try a rate: they can be left, compared and continued. docs/methods.md 3.1."""

import math
import time
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from metabayfl.methods.base import Method
from metabayfl.methods.evidence import BEYOND_NOISE
from metabayfl.optim import Objective, descend
from metabayfl.types import Context, Diverged, Params, TrainData

FEWEST_STEPS = 5
FEWEST_STEPS_TO_STOP = 4
"""Losers are not told from winners by fewer."""
HALF_AS_MUCH_AGAIN = 0.5
"""Share of a smaller rate's training loss by which that of a loser is above it: an optimiser that starts anew may
raise the loss at first and still be the best."""


class Trial:
    """Training with one rate, which can be left and taken up again."""

    def __init__(self, method: Method, start: Params, rate: float, data: TrainData, epochs: int, ctx: Context) -> None:
        self.rate = rate
        self.objective: Objective = method.objective(start, data, ctx)
        self.optimiser = method.make_optimiser(self.objective)
        self.batches: Iterator[tuple[Tensor, Tensor]] = data.batches(epochs, ctx.rng("batches"))
        self.model, self.random = start, torch.get_rng_state()
        self.nll: list[float] = []
        self.seconds = 0.0
        self.failed = False
        """Whether it diverged or was stopped as a loser."""

    def run(self, steps: int | None = None) -> None:
        """Take some steps, or all that are left."""
        if self.failed:
            return
        started = time.perf_counter()
        self.objective.task.load_buffers(self.model)
        torch.set_rng_state(self.random)
        try:
            self.nll += descend(self.objective, self.optimiser, islice(self.batches, steps), self.rate).nll
        except Diverged:
            self.failed = True
        self.pause()
        self.seconds += time.perf_counter() - started

    def last_nll(self, steps: int) -> float:
        """Mean training loss of the last steps."""
        recent = self.nll[-steps:]
        return sum(recent) / len(recent)

    def pause(self) -> None:
        """Keep what the next trial on the same task would change: the buffers and the state of the global generator."""
        self.model, self.random = self.objective.model(), torch.get_rng_state()


def run_trials(trials: Sequence[Trial], steps: int) -> None:
    """Train all for so many steps from the same start with the same batches and noise; losers only half as long."""
    take_first_step(trials)
    half = max(steps // 2, FEWEST_STEPS_TO_STOP)
    for trial in trials:
        trial.run(min(half, steps) - 1)
    if half < steps:
        stop_losers(trials)
        for trial in trials:
            trial.run(steps - half)


def take_first_step(trials: Sequence[Trial]) -> None:
    """All trials start at the same weights with the same batch and noise: one gradient serves them all."""
    first = trials[0]
    first.objective.task.load_buffers(first.model)
    torch.set_rng_state(first.random)
    batches = [next(trial.batches) for trial in trials]
    nll = first.objective(*batches[0])
    for trial in trials:
        trial.objective.skip_draw_of(first.objective)
        trial.nll.append(nll)
        trial.failed = not math.isfinite(nll)
        trial.optimiser.step(trial.rate)
        trial.pause()


def stop_losers(trials: Sequence[Trial]) -> None:
    """Stop rates whose training loss is far above that of a smaller one, step by step and beyond noise: they are too
    large. A rate that is too small is not seen in training; d_n tells.
    """
    traces = {trial.rate: torch.tensor(trial.nll[1:], dtype=torch.float64) for trial in trials if not trial.failed}
    for trial in trials:
        smaller = [trace for rate, trace in traces.items() if rate < trial.rate]
        if not trial.failed and any(is_worse(traces[trial.rate], trace, HALF_AS_MUCH_AGAIN) for trace in smaller):
            trial.failed = True


def describe_scores(rates: Sequence[float], scores: Sequence[Tensor | None]) -> dict[str, float]:
    """Return the loss of each trial, and the standard error of its difference to the best one."""
    alive = {rate: losses for rate, losses in zip(rates, scores, strict=True) if losses is not None}
    best = min(alive.values(), key=lambda losses: losses.mean().item(), default=torch.empty(0))
    means = {f"trial_nll.{rate:g}": losses.mean().item() for rate, losses in alive.items()}
    return means | {f"trial_error.{rate:g}": standard_error(losses - best) for rate, losses in alive.items()}


def is_worse(losses: Tensor, before: Tensor, harmless: float = 0.0) -> bool:
    """Whether losses are higher than before, one by one, beyond noise and by more than a share of what they were."""
    excess, level = (losses - before).mean().item(), before.mean().abs().item()
    return excess > max(BEYOND_NOISE * standard_error(losses - before), harmless * level)


def standard_error(values: Tensor) -> float:
    """Standard error of a mean; a single value has none to speak of."""
    return values.std().item() / math.sqrt(len(values)) if len(values) > 1 else 0.0
