"""Which rate each client chose in each round, as a map: larger rates are larger and darker squares."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from matplotlib.axes import Axes

from metabayfl.report.drawing import FAINT, INK, STEPS, draw, swatch
from metabayfl.report.figures import MOST_CLIENTS, PANEL, Picture, Sign, name_rows
from metabayfl.report.runs import Run
from metabayfl.report.series import spread_out, trials
from metabayfl.store import Event

MOST_ROUNDS = 40
SMALLEST_SQUARE, LARGEST_SQUARE = 14.0, 105.0


class Scale(NamedTuple):
    """Steps of rates from the smallest to the largest, the same for all maps of a page."""

    rates: list[float]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Scale":
        """Return the rates that were tried, or five steps between the smallest and the largest of many."""
        rates = sorted({rate for run in runs for event in run.choices for rate in trials(event)})
        if len(rates) <= len(STEPS):
            return cls(rates)
        low, high = math.log(rates[0]), math.log(rates[-1])
        return cls([math.exp(low + (high - low) * step / (len(STEPS) - 1)) for step in range(len(STEPS))])

    def step(self, rate: float) -> int:
        """Return the number of the nearest step."""
        return min(range(len(self.rates)), key=lambda step: abs(math.log(self.rates[step] / rate)))

    def colour(self, step: int) -> str:
        """Return the colour of a step; few steps are far apart."""
        return STEPS[self._spaced(step, len(STEPS) - 1)]

    def area(self, step: int) -> float:
        """Return the area of a square, in points."""
        sides = (math.sqrt(SMALLEST_SQUARE), math.sqrt(LARGEST_SQUARE))
        share = 1.0 if len(self.rates) == 1 else step / (len(self.rates) - 1)
        return (sides[0] + share * (sides[1] - sides[0])) ** 2

    def _spaced(self, step: int, last: int) -> int:
        return last if len(self.rates) == 1 else round(step * last / (len(self.rates) - 1))


def rate_map(label: str, number: int, run: Run, scale: Scale) -> Picture:
    """Draw the choices of one run."""
    took_part = Counter(event["client"] for event in run.choices)
    busiest = max(took_part.values())
    regulars = [client for client, times in took_part.items() if times == busiest]
    clients = spread_out(regulars if len(regulars) >= MOST_CLIENTS else took_part, MOST_CLIENTS)
    rounds = spread_out({event["round"] for event in run.choices}, MOST_ROUNDS)
    rows = {client: row for row, client in enumerate(clients)}
    shown = [event for event in run.choices if event["client"] in rows and event["round"] in set(rounds)]
    columns = {round_: column for column, round_ in enumerate(rounds)}
    pitch = min(1.0, 20 / max(len(rounds), 1)) ** 2

    def paint(axes: Axes) -> None:
        chosen = [event for event in shown if "rate" in event]
        steps = [scale.step(event["rate"]) for event in chosen]
        axes.scatter(
            [columns[event["round"]] for event in chosen], [rows[event["client"]] for event in chosen],
            [scale.area(step) * pitch for step in steps], [scale.colour(step) for step in steps],
            marker="s", edgecolors=FAINT, linewidths=0.4,
        )  # fmt: skip
        kept = [event for event in shown if event.get("rejected") or event.get("diverged")]
        places = [columns[event["round"]] for event in kept], [rows[event["client"]] for event in kept]
        axes.scatter(*places, 30 * pitch, color=INK, marker="x", linewidths=1.2)
        axes.grid(visible=False)
        every = math.ceil(len(rounds) / 8)
        axes.set_xticks(range(0, len(rounds), every), [str(round_) for round_ in rounds[::every]])
        name_rows(axes, clients)
        axes.set(xlabel="round", ylabel="client", xlim=(-0.7, len(rounds) - 0.3))

    words = f"Rates chosen by the clients of {label}, seed {run.seed}: {_shares(run)}."
    svg = draw(f"rates-{number}", label, words, (PANEL[0], max(150, 80 + 16 * len(clients))), paint)
    return Picture(svg, f"Seed {run.seed}: {_shares(run)}.{_scope(run, clients, rounds, len(took_part))}")


def _shares(run: Run) -> str:
    """Say in words how often each rate was chosen, and how often in vain."""
    total = len(run.choices)
    chosen = Counter(event["rate"] for event in run.choices if "rate" in event)
    often = [f"{rate:g} in {times / total:.0%}" for rate, times in sorted(chosen.items())]
    words = (
        often if len(often) <= len(STEPS) else [f"{len(often)} different rates from {min(chosen):g} to {max(chosen):g}"]
    )
    rejected = sum(bool(event.get("rejected")) for event in run.choices)
    diverged = sum(bool(event.get("diverged")) for event in run.choices)
    words += [f"{rejected / total:.0%} rejected"] if rejected else []
    return ", ".join([*words, *([f"{diverged / total:.0%} with no finite trial"] if diverged else [])])


def _scope(run: Run, clients: Sequence[int], rounds: Sequence[int], took_part: int) -> str:
    limits = []
    if len(clients) < took_part:
        limits.append(f"{len(clients)} of the {took_part} clients that took part")
    if len(rounds) < run.last_round:
        limits.append(f"{len(rounds)} of {run.last_round} rounds")
    return f" Shown: {' and '.join(limits)}, evenly spread." if limits else ""


def rate_legend(scale: Scale, choices: Sequence[Event]) -> list[Sign]:
    """Return a sign for each step, and for the marks that occur."""
    signs = [
        Sign(swatch(f"rate-{step}", partial(_square, scale, step)), f"{rate:.3g}")
        for step, rate in enumerate(scale.rates)
    ]
    if any(event.get("rejected") or event.get("diverged") for event in choices):
        signs.append(Sign(swatch("rate-kept", _cross), "received model kept: the trained one was worse or diverged"))
    return signs


def _square(scale: Scale, step: int, axes: Axes) -> None:
    axes.scatter([0], [0], scale.area(step), [scale.colour(step)], marker="s", edgecolors=FAINT, linewidths=0.4)


def _cross(axes: Axes) -> None:
    axes.scatter([0], [0], 30, color=INK, marker="x", linewidths=1.2)
