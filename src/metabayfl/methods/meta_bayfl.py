"""Meta-BayFL (Rahman & Nguyen): BayFL whose clients try several rates and keep the best. docs/methods.md 3.1."""

import math
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from metabayfl import aggregate
from metabayfl.methods.base import Count, Method, Positive, model_of
from metabayfl.methods.bayfl import BayFL
from metabayfl.optim import Objective, Rate, descend, make_optimiser, rate_at
from metabayfl.types import Context, Diverged, Fit, InputError, Params, Received, TrainData

BEYOND_NOISE = 2.0
"""A difference counts from so many standard errors on."""
FEWEST_TRIAL_STEPS = 5
LARGEST_LOSS = 1e30
"""What is not a number is worse than everything."""
SHRINK, GROW = 0.5, 1.1
"""What the guard does to the largest allowed rate when the averaged model got worse, and when it did not."""


class RateSelection(Method):
    """A method whose clients choose their rate, each round anew, by the loss on d_n."""

    selects: ClassVar[bool] = True

    rates: Annotated[tuple[Rate, ...], Field(min_length=1)] = (1e-4, 1e-3, 1e-2)
    """Candidates, written like `rate`, which is not used."""
    trial_epochs: Positive = 0.1
    """Length of a trial in epochs; it has at least 5 steps."""
    choice: Literal["best", "one-se"] = "one-se"
    """Take the rate with the lowest loss on d_n, or the largest within one standard error of it (trials are short)."""
    guard: bool = True
    """Lower the largest allowed rate when the averaged model got worse on the clients' d_n beyond noise."""
    keep_better: bool = True
    """Send the received model instead of a trained one that is worse on d_n beyond noise."""
    score_samples: Count = 256
    """Samples of d_n that a score uses at most."""
    score_draws: Count = 2
    """Weight samples of a score, the same for all rates."""

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        """Try the rates from the received model, and go on with the best one where its trial ended."""
        started = time.perf_counter()
        received = ctx.task.join(down, state)
        before = self.losses(received, data, ctx)
        trials = self.try_rates(received, float(down["guard"][0]), data, ctx)
        scores = [None if trial.diverged else self.losses(trial.model, data, ctx) for trial in trials]
        scored = [(trial, losses) for trial, losses in zip(trials, scores, strict=True) if losses is not None]
        metrics = {"incoming_nll": before.mean().item(), "incoming_error": standard_error(before)}
        metrics |= {f"trial_nll.{trial.rate:g}": losses.mean().item() for trial, losses in scored}
        chosen = choose(scores, self.choice)
        if chosen is None:
            return self.leave(received, metrics | {"diverged": 1}, data, ctx)
        winner = trials[chosen]
        ctx.seconds["selection"] = time.perf_counter() - started - winner.seconds
        winner.run()
        if winner.diverged or (self.keep_better and is_worse(self.losses(winner.model, data, ctx), before)):
            return self.leave(received, metrics | {"rate": winner.rate, "rejected": 1}, data, ctx)
        steps = data.steps_per_epoch()
        metrics |= {"nll": sum(winner.nll[-steps:]) / steps, "rate": winner.rate, "steps": len(winner.nll)}
        return self.leave(winner.model, metrics | winner.objective.metrics(), data, ctx)

    def try_rates(self, received: Params, largest: float, data: TrainData, ctx: Context) -> "list[Trial]":
        """Train each allowed rate for a short while: same start, same batches, same noise; the first step is shared."""
        rates = sorted({rate_at(rate, ctx.round, ctx.rounds) for rate in self.rates})
        allowed = [rate for rate in rates if rate <= largest * (1 + 1e-9)] or rates[:1]
        trials = [Trial(self, received, rate, data, ctx) for rate in allowed]
        steps = max(FEWEST_TRIAL_STEPS, math.ceil(self.trial_epochs * data.steps_per_epoch()))
        take_first_step(trials)
        for trial in trials:
            trial.run(steps - 1)
        return trials

    def losses(self, model: Params, data: TrainData, ctx: Context) -> Tensor:
        """Losses of a model on samples of d_n, without the KL."""
        x, y = data.select_x[: self.score_samples], data.select_y[: self.score_samples]
        if not len(x):
            raise InputError(f"{self.name} chooses by d_n, and client {ctx.client} has none: raise select.fraction")
        outputs = self.predict(model, x, self.score_draws, ctx)
        return ctx.task.likelihood.losses(outputs, y).nan_to_num(nan=LARGEST_LOSS).clamp(max=LARGEST_LOSS)

    def init_server(self, ctx: Context) -> Params:
        """Return the model and the guard: the largest allowed rate, the last loss on the d_n and its standard error."""
        largest = max(rate_at(rate, 0, ctx.rounds) for rate in self.rates)
        return super().init_server(ctx) | {"guard": torch.tensor([largest, math.nan, math.nan], dtype=torch.float64)}

    def payload_like(self, server: Params, ctx: Context) -> Params:
        """Return what a payload must look like: a model."""
        return model_of(server)

    def aggregate(self, server: Params, updates: Sequence[Received], ctx: Context) -> Params:
        """Average the models, and look whether the one sent out was better than the one before."""
        return super().aggregate(server, updates, ctx) | {"guard": self.watch(server["guard"], updates, ctx)}

    def watch(self, guard: Tensor, updates: Sequence[Received], ctx: Context) -> Tensor:
        """Shrink the largest allowed rate if the clients' loss on d_n rose beyond noise; let it grow back slowly."""
        largest, last, last_error = guard.tolist()
        shares = aggregate.shares(updates)
        loss = sum(a * update.metrics["incoming_nll"] for a, update in zip(shares, updates, strict=True))
        error = math.hypot(*(a * update.metrics["incoming_error"] for a, update in zip(shares, updates, strict=True)))
        if self.guard and loss - last > BEYOND_NOISE * math.hypot(error, last_error):
            largest *= SHRINK
        else:
            largest = min(largest * GROW, max(rate_at(rate, 0, ctx.rounds) for rate in self.rates))
        return torch.tensor([largest, loss, error], dtype=torch.float64)


class MetaBayFL(RateSelection, BayFL):
    """BayFL whose clients choose their rate, each round anew, by the loss on d_n."""

    name: ClassVar[str] = "meta-bayfl"
    paper: ClassVar[str] = "Rahman & Nguyen, IEEE TETCI"


class Trial:
    """Training with one rate, which can be left and taken up again."""

    def __init__(self, method: RateSelection, start: Params, rate: float, data: TrainData, ctx: Context) -> None:
        self.rate = rate
        self.objective: Objective = method.objective(start, data, ctx)
        self.optimiser = make_optimiser(method.optimiser, self.objective.groups, method.weight_decay, method.momentum)
        self.batches: Iterator[tuple[Tensor, Tensor]] = data.batches(method.epochs, ctx.rng("batches"))
        self.model, self.random = start, torch.get_rng_state()
        self.nll: list[float] = []
        self.seconds = 0.0
        self.diverged = False

    def run(self, steps: int | None = None) -> None:
        """Take some steps, or all that are left."""
        if self.diverged:
            return
        started = time.perf_counter()
        self.objective.task.load_buffers(self.model)
        torch.set_rng_state(self.random)
        try:
            self.nll += descend(self.objective, self.optimiser, islice(self.batches, steps), self.rate).nll
        except Diverged:
            self.diverged = True
        self.pause()
        self.seconds += time.perf_counter() - started

    def pause(self) -> None:
        """Keep what the next trial on the same task would change: the buffers and the state of the global generator."""
        self.model, self.random = self.objective.model(), torch.get_rng_state()


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
        trial.diverged = not math.isfinite(nll)
        trial.optimiser.step(trial.rate)
        trial.pause()


def choose(scores: Sequence[Tensor | None], choice: Literal["best", "one-se"]) -> int | None:
    """Return the index of the chosen rate, given losses per sample for rising rates; None if all diverged."""
    alive = {index: losses for index, losses in enumerate(scores) if losses is not None}
    if not alive:
        return None
    best = min(alive, key=lambda index: alive[index].mean().item())
    if choice == "best":
        return best
    return max(i for i, losses in alive.items() if _excess(losses, alive[best]) <= standard_error(losses - alive[best]))


def is_worse(losses: Tensor, before: Tensor) -> bool:
    """Whether losses are higher than before, sample by sample, beyond noise."""
    return _excess(losses, before) > BEYOND_NOISE * standard_error(losses - before)


def _excess(losses: Tensor, reference: Tensor) -> float:
    return (losses - reference).mean().item()


def standard_error(values: Tensor) -> float:
    """Standard error of a mean; a single value has none to speak of."""
    return values.std().item() / math.sqrt(len(values)) if len(values) > 1 else 0.0
