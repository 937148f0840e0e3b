"""Numbers over rounds, gathered from the events of runs."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple

from metabayfl.report.runs import Run
from metabayfl.statistics import Spread, spread
from metabayfl.store import Event

TRIAL = "trial_nll."
NOT_A_LOSS = 1e29
"""A loss from here on stands for what was not a number."""
MOST_CANDIDATES = 8
"""With more different rates than this, candidates are counted from the smallest instead of named: schedules."""
RECEIVED = "received model"


class Curve(NamedTuple):
    """Points in the order of rounds, with the spread over seeds; `x` is a round, or what was spent until then."""

    x: list[float]
    y: list[Spread]


class Bins(NamedTuple):
    """Predictions by their confidence."""

    counts: list[float]
    confidence: list[float]
    accuracy: list[float]


def headline(summary: dict[str, float]) -> float:
    """Return the value of a common test, or the mean over local tests weighted by their sizes."""
    return summary.get("value", summary.get("weighted", math.nan))


def metric_curve(runs: Sequence[Run], view: str, name: str) -> Curve:
    """Return a metric over the evaluated rounds; empty if it was not measured."""
    found: dict[int, list[float]] = defaultdict(list)
    for event in (event for run in runs for event in run.history):
        if name in event["metrics"].get(view, {}):
            found[event["round"]].append(headline(event["metrics"][view][name]))
    return Curve([float(round_) for round_ in sorted(found)], [spread(found[round_]) for round_ in sorted(found)])


def cost_curve(runs: Sequence[Run], view: str, name: str, cost: str) -> Curve:
    """Return a metric over what was spent until then on average: `megabytes` or `seconds`."""
    curve = metric_curve(runs, view, name)
    spent = [megabytes(run) if cost == "megabytes" else seconds(run) for run in runs]
    return Curve([fmean(of[round_] for of in spent if round_ in of) for round_ in map(int, curve.x)], curve.y)


def megabytes(run: Run) -> dict[int, float]:
    """Bytes sent up and down until the end of each round, in millions."""
    sent: dict[int, float] = defaultdict(float)
    for event in run.events:
        sent[event["round"]] += (event.get("bytes_up", 0) + event.get("bytes_down", 0)) / 1e6
    return dict(zip(sorted(sent), accumulate(sent[round_] for round_ in sorted(sent)), strict=True))


def seconds(run: Run) -> dict[int, float]:
    """Seconds of training until the end of each round."""
    spent = {event["round"]: event.get("train_seconds", 0.0) for event in run.rounds}
    return dict(zip(spent, accumulate(spent.values()), strict=True))


def reliability(runs: Sequence[Run]) -> Bins | None:
    """Return the bins of the last evaluated rounds, all seeds together; None if no run recorded them."""
    last = [run.history[-1]["reliability"] for run in runs if run.history and "reliability" in run.history[-1]]
    if not last:
        return None
    counts = [sum(counts) for counts in zip(*(bins["count"] for bins in last), strict=True)]
    return Bins(counts, *(_pooled(last, name, counts) for name in ("confidence", "accuracy")))


def _pooled(found: Sequence[dict[str, list[float]]], name: str, counts: Sequence[float]) -> list[float]:
    """Average the bins of several runs, by the number of predictions in them."""
    sums = [
        sum(bins[name][number] * bins["count"][number] for bins in found) for number in range(len(found[0]["count"]))
    ]
    return [total / max(1, count) for total, count in zip(sums, counts, strict=True)]


def trials(event: Event) -> dict[float, float]:
    """Return the loss on d_n of each rate that a client tried, by rate."""
    return {float(key.removeprefix(TRIAL)): value for key, value in event.items() if key.startswith(TRIAL)}


def candidate_curves(runs: Sequence[Run]) -> dict[str, Curve]:
    """Return the loss on d_n of the received model and after the trials, averaged over the clients of a round."""
    choices = [event for run in runs for event in run.choices]
    by_value = len({rate for event in choices for rate in trials(event)}) <= MOST_CANDIDATES
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in choices:
        losses = {RECEIVED: event["incoming_nll"]}
        for number, (rate, loss) in enumerate(sorted(trials(event).items()), start=1):
            losses[f"rate {rate:g}" if by_value else f"candidate {number}"] = loss
        for name, loss in losses.items():
            if loss < NOT_A_LOSS:
                found[name][event["round"]].append(loss)
    return {name: _averages(found[name]) for name in sorted(found, key=_order)}


def _order(name: str) -> tuple[bool, float]:
    return name != RECEIVED, 0.0 if name == RECEIVED else float(name.rpartition(" ")[2])


def _averages(by_round: dict[int, list[float]]) -> Curve:
    rounds = sorted(by_round)
    return Curve([float(r) for r in rounds], [Spread(fmean(by_round[r]), None, len(by_round[r])) for r in rounds])


def spread_out(values: Iterable[int], most: int) -> list[int]:
    """Return all values, or as many as are allowed, evenly spread from the first to the last."""
    ordered = sorted(values)
    if len(ordered) <= most:
        return ordered
    return [ordered[round(index * (len(ordered) - 1) / (most - 1))] for index in range(most)]
