"""Meta-BayFL (Rahman & Nguyen): BayFL whose clients try several rates and keep the best. docs/methods.md 3.1."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from metabayfl import aggregate
from metabayfl.methods.base import Count, Method, Positive, model_of
from metabayfl.methods.bayfl import BayFL
from metabayfl.methods.trials import (
    BEYOND_NOISE,
    FEWEST_STEPS,
    Trial,
    choose,
    describe_scores,
    is_worse,
    run_trials,
    standard_error,
)
from metabayfl.optim import Rate, rate_at
from metabayfl.types import Context, Fit, InputError, Params, Received, TrainData

LARGEST_LOSS = 1e30
"""What is not a number is worse than everything."""
SHRINK, GROW = 0.5, 1.1
"""What the guard does to the largest allowed rate when the averaged model got worse, and when it did not."""


class RateSelection(Method):
    """A method whose clients choose their rate, each round anew, by the loss on d_n."""

    selects: ClassVar[bool] = True

    rates: Annotated[tuple[Rate, ...], Field(min_length=1)] = (1e-4, 1e-3, 1e-2)
    """Candidates, written like `rate`, which is not used."""
    select_every: Literal["round", "epoch"] = "round"
    """Choose once per round, or anew in every local epoch from where the last one ended."""
    select_on: Literal["dn", "test"] = "dn"
    """Samples that decide: d_n. The local test part, as the paper's algorithm says, is a leak: for study only."""
    trial_data: Literal["rest", "dn"] = "rest"
    """Samples that trials train on: the training part, so that the best trial is continued, or d_n itself."""
    trial_epochs: Positive = 0.1
    """Length of a trial in epochs; it has at least 5 steps."""
    train_on_dn: bool = False
    """Use d_n for training too; what decided is then no longer unseen."""
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

    @property
    def holds_out(self) -> bool:
        """Whether d_n is left out of training unless the plan says otherwise."""
        return not self.train_on_dn

    @property
    def leaks(self) -> bool:
        """Whether fitting sees test data."""
        return self.select_on == "test"

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        """Try the rates from the received model, and go on with the best one where its trial ended."""
        model = received = ctx.task.join(down, state)
        before = self.losses(received, data, ctx)
        largest = float(down["guard"][0])
        metrics = {"incoming_nll": before.mean().item(), "incoming_error": standard_error(before)}
        metrics |= {"allowed_rate": largest, "scored_samples": len(before)}
        ctx.seconds["selection"], steps = 0.0, 0
        for part in range(self.epochs if self.select_every == "epoch" else 1):
            winner, scores = self.select_rate(model, largest, data, replace(ctx, part=part))
            metrics |= scores
            if winner is None:
                return self.leave(received, metrics | {"diverged": 1}, data, ctx)
            winner.run()
            metrics["rate"], steps, model = winner.rate, steps + len(winner.nll), winner.model
            after = None if winner.failed else self.losses(model, data, ctx)
            if after is None or (self.keep_better and is_worse(after, before)):
                return self.leave(received, metrics | {"rejected": 1}, data, ctx)
            last = winner.nll[-data.steps_per_epoch() :]
            metrics |= {"trained_nll": after.mean().item(), "nll": sum(last) / len(last), "steps": steps}
            metrics |= winner.objective.metrics()
        return self.leave(model, metrics, data, ctx)

    def select_rate(
        self, model: Params, largest: float, data: TrainData, ctx: Context
    ) -> tuple[Trial | None, dict[str, float]]:
        """Train each allowed rate for a short while; returns the chosen one's training, begun, and all losses."""
        started, random = time.perf_counter(), torch.get_rng_state()
        epochs = self.epochs if self.select_every == "round" else 1
        on_dn = replace(data, x=data.select_x, y=data.select_y) if self.trial_data == "dn" else None
        seen = on_dn or data
        steps = max(FEWEST_STEPS, math.ceil(self.trial_epochs * seen.steps_per_epoch()))
        length = epochs if on_dn is None else math.ceil(steps / seen.steps_per_epoch())
        trials = [Trial(self, model, rate, seen, length, ctx) for rate in self.allowed_rates(largest, ctx)]
        run_trials(trials, min(steps, length * seen.steps_per_epoch()))
        scores = [None if trial.failed else self.losses(trial.model, data, ctx) for trial in trials]
        chosen = choose(scores, self.choice)
        winner = None if chosen is None else trials[chosen]
        if winner is not None and on_dn is not None:
            torch.set_rng_state(random)
            winner = Trial(self, model, winner.rate, data, epochs, ctx)
        used = 0.0 if winner is None else winner.seconds
        ctx.seconds["selection"] += time.perf_counter() - started - used
        return winner, describe_scores([trial.rate for trial in trials], scores)

    def allowed_rates(self, largest: float, ctx: Context) -> list[float]:
        """Return the candidates that the guard allows, rising; the smallest always."""
        rates = sorted({rate_at(rate, ctx.round, ctx.rounds) for rate in self.rates})
        return [rate for rate in rates if rate <= largest * (1 + 1e-9)] or rates[:1]

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


THE_PAPER: dict[str, Any] = {
    "optimiser": "sgd",
    "momentum": 0.0,
    "kl_weight": 1.0,
    "kl": "client",
    "prior": "fixed",
    "prior_sigma": 0.1,
    "rule": "var",
    "weighting": "uniform",
    "select_every": "epoch",
    "trial_data": "dn",
    "trial_epochs": 1.0,
    "train_on_dn": True,
    "choice": "best",
    "guard": False,
    "keep_better": False,
}
"""The letter of the paper, as docs/methods.md 3.5 reads it; no guards, and nothing tuned."""


class MetaBayFL(RateSelection, BayFL):
    """BayFL whose clients choose their rate, each round anew, by the loss on d_n."""

    name: ClassVar[str] = "meta-bayfl"
    paper: ClassVar[str] = "Rahman & Nguyen, IEEE TETCI"

    preset: Literal["default", "paper"] = "default"
    """Where values come from that are not given: our defaults, or the letter of the paper (for comparison)."""

    @model_validator(mode="before")
    @classmethod
    def fill_in(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Take what is not given from the preset."""
        return THE_PAPER | values if values.get("preset") == "paper" else values
