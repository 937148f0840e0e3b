"""Which rate each client chose in each round, as a map: larger rates are larger and darker squares."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from matplotlib.axes import Axes

from metabayfl.report.drawing import FAINT, INK, STEPS, draw, swatch
from metabayfl.report.figures import PANEL, Picture, Sign
from metabayfl.report.labels import MOST_CLIENTS, few, name_rows, rows_height
from metabayfl.report.runs import Run
from metabayfl.report.series import spread_out, trials
from metabayfl.store import Event

MOST_ROUNDS = 40
FULL = 0.5
"""A client that took part in this share of the rounds has a row worth looking at."""
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


class Place(NamedTuple):
    """A square of a map: its column and row, its step of rates, how large it is, and whether it is crossed out."""

    column: int
    row: int
    step: int | None
    area: float
    crossed: bool = False


def rate_map(label: str, number: int, run: Run, scale: Scale) -> Picture:
    """Draw the choices of one run: by client, or, where each took part in few of many rounds, by rate."""
    took_part = Counter(event["client"] for event in run.choices)
    busiest = max(took_part.values())
    regulars = [client for client, times in took_part.items() if times == busiest]
    clients = spread_out(regulars if len(regulars) >= MOST_CLIENTS else took_part, MOST_CLIENTS)
    rounds = spread_out({event["round"] for event in run.choices}, MOST_ROUNDS)
    words, limits = f"Seed {run.seed}: {_shares(run)}.", []
    rows: Sequence[object]
    if len(rounds) < run.last_round:
        limits.append(f"{len(rounds)} of {run.last_round} rounds")
    if len(took_part) > MOST_CLIENTS and busiest < FULL * run.last_round:
        rows, places = [f"{rate:.3g}" for rate in scale.rates[::-1]], _by_rate(run, rounds, scale)
        words += " The area of a square is the share of a round's clients that chose the rate."
    else:
        rows, places = clients, _by_client(run, clients, rounds, scale)
        limits += [f"{len(clients)} of the {len(took_part)} clients that took part"] * (len(clients) < len(took_part))
    words += f" Shown: {' and '.join(limits)}, evenly spread." if limits else ""
    alternative, size = f"Rates chosen by the clients of {label}. {words}", (PANEL[0], rows_height(rows))
    svg = draw(f"rates-{number}", label, alternative, size, lambda axes: _paint(axes, places, rows, rounds, scale))
    return Picture(svg, words)


def _by_client(run: Run, clients: Sequence[int], rounds: Sequence[int], scale: Scale) -> list[Place]:
    rows, columns = ({name: place for place, name in enumerate(names)} for names in (clients, rounds))
    places = []
    for event in run.choices:
        if event["client"] in rows and event["round"] in columns:
            step = scale.step(event["rate"]) if "rate" in event else None
            kept = bool(event.get("rejected") or event.get("diverged"))
            area = 0.0 if step is None else scale.area(step)
            places.append(Place(columns[event["round"]], rows[event["client"]], step, area, kept))
    return places


def _by_rate(run: Run, rounds: Sequence[int], scale: Scale) -> list[Place]:
    columns = {round_: column for column, round_ in enumerate(rounds)}
    chosen = [event for event in run.choices if "rate" in event and event["round"] in columns]
    times = Counter((event["round"], scale.step(event["rate"])) for event in chosen)
    totals = Counter(event["round"] for event in chosen)
    last = len(scale.rates) - 1
    return [
        Place(columns[round_], last - step, step, LARGEST_SQUARE * count / totals[round_])
        for (round_, step), count in times.items()
    ]


def _paint(axes: Axes, places: Sequence[Place], rows: Sequence[object], rounds: Sequence[int], scale: Scale) -> None:
    pitch = min(1.0, 20 / len(rounds)) ** 2
    squares = [(place, place.step) for place in places if place.step is not None]
    spots = [place.column for place, _ in squares], [place.row for place, _ in squares]
    areas, colours = [place.area * pitch for place, _ in squares], [scale.colour(step) for _, step in squares]
    axes.scatter(*spots, areas, colours, marker="s", edgecolors=FAINT, linewidths=0.4)
    crossed = [place for place in places if place.crossed]
    spots = [place.column for place in crossed], [place.row for place in crossed]
    axes.scatter(*spots, 30 * pitch, color=INK, marker="x", linewidths=1.2)
    axes.grid(visible=False)
    axes.set_xticks(*few(rounds, 8))
    name_rows(axes, rows)
    axes.set(xlabel="round", ylabel="client" if isinstance(rows[0], int) else "rate", xlim=(-0.7, len(rounds) - 0.3))


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
