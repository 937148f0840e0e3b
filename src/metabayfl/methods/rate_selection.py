"""Choosing rates: clients try several for a short while and go on with one of them. docs/methods.md 3.1."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from metabayfl import aggregate
from metabayfl.methods.base import Count, Positive, get, model_of, put
from metabayfl.methods.evidence import Choice, Evidence, choose, combine, nothing, unpack, weigh
from metabayfl.methods.guard import Change, Guard
from metabayfl.methods.scoring import ScoredOnDn
from metabayfl.methods.trials import (
    FEWEST_STEPS,
    Trial,
    describe_scores,
    is_worse,
    run_trials,
    standard_error,
)
from metabayfl.optim import OptimiserName, Rate, rate_at
from metabayfl.types import Context, Fit, Params, Received, TrainData

SGD_REACH, ADAM_REACH = 3.0, 0.04
"""Rate times steps of a cautious round; of SGD it is divided by 1 / (1 - momentum)."""
MUCH = 0.25
"""Share of the received model's loss by which a trained one may be above it."""
SEEN, EVIDENCE = "seen.losses", "seen.evidence"


class Seen(NamedTuple):
    """What a client knows before it chooses: its losses with the received model, the largest rate that the guard
    allows, and what its own and everybody's trials have shown."""

    losses: Tensor
    largest: float
    own: Evidence
    pooled: Evidence


class RateSelection(ScoredOnDn):
    """A method whose clients choose their rate, each round anew, by the loss on d_n."""

    passes: ClassVar[float] = 1.01

    optimiser: OptimiserName = "sgd"
    """Local optimiser, fresh in every round."""
    rates: Annotated[tuple[Rate, ...], Field(min_length=1)] = (1e-3, 3e-3, 1e-2, 2e-2, 3e-2, 1e-1, 3e-1)
    """Candidates, written like `rate`, which is not used."""
    select_every: Literal["round", "epoch"] = "round"
    """Choose once per round, or anew in every local epoch from where the last one ended."""
    try_every: Count = 3
    """Rounds from one trial of the candidates to the next, unless a new one is allowed; what was seen then is used in
    between."""
    pooled: bool = True
    """Choose by what the trials of all clients have shown, once there were any, so that all choose the same: d_n of one
    small client is too noisy to tell rates apart, and clients with larger rates pull the average to their side."""
    trial_data: Literal["rest", "dn"] = "rest"
    """Samples that trials train on: the training part, so that the best trial is continued, or d_n itself."""
    trial_epochs: Positive = 0.1
    """Length of a trial in epochs; it has at least 5 steps."""
    train_on_dn: bool = False
    """Use d_n for training too; what decided is then no longer unseen."""
    choice: Choice = "harmless"
    """Take the rate with the lowest loss on d_n, the largest within one standard error of it, or the largest that does
    no harm to speak of: trials are short, and what pays in the long run does not show in them."""
    guard: bool = True
    """Take an averaged model back that is much worse on the clients' d_n than the one before, and lower the largest
    allowed rate; that starts a third of the way up the candidates, or higher where rounds have few steps, and may
    double while models get better."""
    guard_draws: Count = 10
    """Weight samples with which the received model is judged for the guard: with few of them wide posteriors look worse
    than they predict."""
    keep_better: bool = True
    """Send the received model instead of a trained one that is worse on d_n, beyond noise and by more than a quarter:
    training on few samples makes a client a little worse on its others, and the average better all the same."""

    @property
    def holds_out(self) -> bool:
        """Whether d_n is left out of training unless the plan says otherwise."""
        return not self.train_on_dn

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        """Try the rates from the received model, and go on with the best one where its trial ended."""
        received, largest = ctx.task.join(down, state), float(down["guard"][0])
        if self.guard and ctx.round == 0:
            largest = max(largest, self.reach / (data.steps_per_epoch() * self.epochs))
        draws = max(self.guard_draws, self.score_draws) if self.guard else self.score_draws
        outputs = self.outputs_on_dn(received, draws, data, ctx)
        nll, judged = self.losses_of(outputs, data, ctx)
        losses, before = self.losses_of(outputs[: self.score_draws], data, ctx)
        own = unpack(state[EVIDENCE]) if EVIDENCE in state else nothing(len(self.rates))
        seen = Seen(losses, largest, own, unpack(down["evidence"]))
        model, metrics, own = self.train_by_choice(received, before, seen, data, ctx)
        metrics |= {"incoming_nll": nll.mean().item(), "incoming_score": judged.mean().item()}
        metrics |= {"scored_samples": len(losses), "allowed_rate": largest}
        fit = self.leave(model, metrics | change_of(judged, state.get(SEEN)), data, ctx)
        update = fit.update._replace(payload=fit.update.payload | {"evidence": own.pack()})
        return fit._replace(update=update, state=fit.state | {SEEN: judged, EVIDENCE: own.pack()})

    def train_by_choice(
        self, received: Params, before: Tensor, seen: Seen, data: TrainData, ctx: Context
    ) -> tuple[Params, dict[str, float], Evidence]:
        """Train with the chosen rate, or with one for each epoch; returns the received model if that was better."""
        model, metrics, own = received, {"steps": 0.0}, seen.own
        ctx.seconds["selection"] = 0.0
        for part in range(self.epochs if self.select_every == "epoch" else 1):
            winner, own, scores = self.select_rate(model, before, seen._replace(own=own), data, replace(ctx, part=part))
            metrics |= scores
            if winner is None:
                return received, metrics | {"diverged": 1}, own
            winner.run()
            metrics |= {"rate": winner.rate, "steps": metrics["steps"] + len(winner.nll)}
            if winner.failed:
                return received, metrics | {"rejected": 1}, own
            model, (after, _) = winner.model, self.losses(winner.model, data, ctx)
            metrics |= {"trained_nll": after.mean().item(), "nll": winner.last_nll(data.steps_per_epoch())}
            metrics |= winner.objective.metrics()
            if self.keep_better and is_worse(after, seen.losses, MUCH):
                return received, metrics | {"rejected": 1}, own
        return model, metrics, own

    def select_rate(
        self, model: Params, before: Tensor, seen: Seen, data: TrainData, ctx: Context
    ) -> tuple[Trial | None, Evidence, dict[str, float]]:
        """Return the training with the chosen rate, begun if it was tried just now; what is known; losses of trials."""
        started, random = time.perf_counter(), torch.get_rng_state()
        rates = [rate_at(rate, ctx.round, ctx.rounds) for rate in self.rates]
        allowed = self.allowed(rates, seen.largest)
        trials: dict[int, Trial] = {}
        own, scores, alive = seen.own, {}, allowed
        if ctx.round % self.try_every == 0 or not own.known[torch.tensor(allowed)].all():
            trials, losses = self.try_rates(model, rates, allowed, data, ctx)
            found = weigh(losses, allowed, before)
            own = combine([(1.0, own), (1.0, found)]) if self.pooled else found
            scores = describe_scores(rates, losses)
            alive = [losses[index] is not None for index in range(len(rates))]
        chosen = choose(seen.pooled, rates, alive, self.choice) if self.pooled else None
        chosen = choose(own, rates, alive, self.choice) if chosen is None else chosen
        winner = trials.get(chosen) if chosen is not None else None
        if chosen is not None and (winner is None or self.trial_data == "dn"):
            torch.set_rng_state(random)
            winner = Trial(self, model, rates[chosen], data, self.trial_length, ctx)
        ctx.seconds["selection"] += time.perf_counter() - started - (winner.seconds if winner else 0.0)
        return winner, own, scores

    @property
    def reach(self) -> float:
        """Rate times steps of a cautious round; averages of clients that go much further are dead."""
        return SGD_REACH * (1 - self.momentum) if self.optimiser == "sgd" else ADAM_REACH

    @property
    def trial_length(self) -> int:
        """Epochs that a training has which is begun as a trial."""
        return self.epochs if self.select_every == "round" else 1

    def try_rates(
        self, model: Params, rates: Sequence[float], allowed: Sequence[bool], data: TrainData, ctx: Context
    ) -> tuple[dict[int, Trial], list[Tensor | None]]:
        """Train each allowed rate for a short while; returns the trials, and what decides, None where one failed."""
        on_dn = self.trial_data == "dn"
        seen = replace(data, x=data.select_x, y=data.select_y) if on_dn else data
        steps = max(FEWEST_STEPS, math.ceil(self.trial_epochs * seen.steps_per_epoch()))
        length = math.ceil(steps / seen.steps_per_epoch()) if on_dn else self.trial_length
        order = sorted((index for index, fine in enumerate(allowed) if fine), key=lambda index: rates[index])
        trials = {index: Trial(self, model, rates[index], seen, length, ctx) for index in order}
        run_trials(list(trials.values()), min(steps, length * seen.steps_per_epoch()))
        alive = {index: trial for index, trial in trials.items() if not trial.failed}
        scores = {index: self.losses(trial.model, data, ctx)[1] for index, trial in alive.items()}
        return trials, [scores.get(index) for index in range(len(rates))]

    def allowed(self, rates: Sequence[float], largest: float) -> list[bool]:
        """Say which candidates the guard allows: the smallest always."""
        limit = max(largest * (1 + 1e-9), min(rates))
        return [rate <= limit for rate in rates]

    def rates_at_first(self, ctx: Context) -> list[float]:
        """Return the candidates of the first round, rising."""
        return sorted(rate_at(rate, 0, ctx.rounds) for rate in self.rates)

    def init_server(self, ctx: Context) -> Params:
        """Return the model, the one before it, the guard, no evidence."""
        model, rates = super().init_server(ctx), self.rates_at_first(ctx)
        start = rates[len(rates) // 3] if self.guard else rates[-1]
        return self.server_state(model, model, Guard(start, rates[-1], rates[-1]), nothing(len(rates)))

    def server_state(self, model: Params, before: Params, guard: Guard, evidence: Evidence) -> Params:
        """Return what the server keeps; the model before is for the guard."""
        kept = put(before, "before") if self.guard else {}
        return model | kept | {"guard": torch.tensor(guard, dtype=torch.float64), "evidence": evidence.pack()}

    def broadcast(self, server: Params, ctx: Context) -> Params:
        """Send the model, the largest allowed rate, and what everybody's trials have shown."""
        return model_of(server) | {"guard": server["guard"][:1], "evidence": server["evidence"]}

    def payload_like(self, server: Params, ctx: Context) -> Params:
        """Return what a payload must look like: a model, and what the client's trials have shown."""
        return model_of(server) | {"evidence": server["evidence"]}

    def aggregate(self, server: Params, updates: Sequence[Received], ctx: Context) -> Params:
        """Average the models; but if the one sent out is much worse than the one before, go back to that."""
        change, guard, rates = pooled_change(updates), Guard(*server["guard"].tolist()), self.rates_at_first(ctx)
        used = max((update.metrics["rate"] for update in updates if "rate" in update.metrics), default=guard.largest)
        if self.guard and guard.is_setback(change):
            model, guard = get(server, "before"), guard.after_setback(change, used, rates[0])
        else:
            model = model_of(super().aggregate(server, updates, ctx))
            guard = guard.after_round(change)
        shares = aggregate.shares(updates)
        if self.guard and ctx.round == 0:
            steps = sum(share * update.metrics.get("steps", 0.0) for share, update in zip(shares, updates, strict=True))
            guard = guard.after_first_round(self.reach / steps) if steps else guard
        shown = [(share, unpack(update.payload["evidence"])) for share, update in zip(shares, updates, strict=True)]
        return self.server_state(model, model_of(server), guard, combine(shown))


def change_of(seen: Tensor, before: Tensor | None) -> dict[str, float]:
    """Return by how much the scores on d_n have changed since the last model that the client received."""
    if before is None or before.shape != seen.shape:
        return {}
    change = seen - before
    return {"change": change.mean().item(), "change_error": standard_error(change)}


def pooled_change(updates: Sequence[Received]) -> Change:
    """Return the mean of the clients' changes; newcomers do not count."""
    known = [(share, update.metrics) for share, update in zip(aggregate.shares(updates), updates, strict=True)]
    known = [(share, metrics) for share, metrics in known if "change" in metrics]
    total = sum(share for share, _ in known) or 1.0
    score, level = (
        sum(share * metrics[name] for share, metrics in known) / total for name in ("change", "incoming_score")
    )
    return Change(score, math.hypot(0.0, *(share * m["change_error"] for share, m in known)) / total, level)
