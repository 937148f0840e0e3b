"""The figures of a report. Each has words of its own, and says nothing by colour alone."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from metabayfl.report.drawing import INK, MARKERS, PAPER, SERIES, draw, swatch
from metabayfl.report.runs import Run
from metabayfl.report.series import RECEIVED, Bins, Curve, cost_curve, metric_curve, spread_out

PANEL, SQUARE = (340, 230), (220, 225)
FEWEST_MARKERS = 30
"""With more points than this only every so many get a marker."""
LOGARITHMIC = 20.0
"""Values that differ by more than this factor get a logarithmic axis."""
MOST_CLIENTS, MOST_CLASSES = 24, 24
LARGEST_BUBBLE = 130.0


class Picture(NamedTuple):
    """A figure with what stands under it."""

    svg: str
    caption: str


class Sign(NamedTuple):
    """An entry of a legend."""

    svg: str
    text: str


METRICS = {
    "accuracy": "accuracy",
    "rmse": "RMSE",
    "nll": "NLL",
    "ece": "ECE",
    "coverage_95": "coverage of 95 % intervals",
}
BETTER = {"accuracy": "higher is better", "coverage_95": "0.95 is right"}


def curves(groups: Mapping[str, Sequence[Run]]) -> list[Picture]:
    """Each metric of the global model on the common test set, and of the personal models on their own, over rounds."""
    pictures = []
    for name, words in METRICS.items():
        for view in ("G/G", "P/L"):
            lines = {label: metric_curve(runs, view, name) for label, runs in groups.items()}
            if any(curve.x for curve in lines.values()):
                what = f"{view} {words}"
                key = f"curve-{view.replace('/', '').lower()}-{name}"
                pictures.append(_lines(key, what, "round", lines, BETTER.get(name, "lower is better")))
    return pictures


def costs(groups: Mapping[str, Sequence[Run]]) -> list[Picture]:
    """The headline metric against what it took: bytes and seconds."""
    wanted = [(view, name) for name in ("accuracy", "rmse") for view in ("G/G", "P/L")]
    measured = [(view, name) for view, name in wanted if any(metric_curve(g, view, name).x for g in groups.values())]
    if not measured:
        return []
    view, name = measured[0]
    what, better = f"{view} {METRICS[name]}", BETTER.get(name, "lower is better")
    pictures = []
    for cost, axis in (("megabytes", "megabytes sent, up and down"), ("seconds", "seconds of training")):
        lines = {label: cost_curve(runs, view, name, cost) for label, runs in groups.items()}
        pictures.append(_lines(f"cost-{cost}", f"{what} by {cost}", axis, lines, better))
    return pictures


def candidates(label: str, number: int, found: Mapping[str, Curve], names: Sequence[str]) -> Picture:
    """Return the losses of the candidates of one method, with the signs that all methods share."""
    return _lines(f"candidates-{number}", label, "round", found, "NLL on d_n, mean over clients", list(names))


def series_legend(names: Sequence[str], key: str) -> list[Sign]:
    """Return a sign for each line."""
    return [_sign(f"{key}-{number}", number, name) for number, name in enumerate(names)]


def candidates_legend(names: Sequence[str]) -> list[Sign]:
    """Return a sign for each candidate and for the received model."""
    return [_sign("legend-received", -1, RECEIVED), *series_legend(names, "legend-candidates")]


def _sign(key: str, number: int, text: str) -> Sign:
    style = _style(number)
    return Sign(swatch(key, lambda axes: axes.plot([-0.9, 0, 0.9], [0, 0, 0], **style, markevery=[1])), text)


def _style(number: int) -> dict[str, Any]:
    """Colour and marker of a line, and dashes from the ninth on; below 0 is what the others are compared with."""
    if number < 0:
        return {"color": INK, "marker": "", "linestyle": "--", "linewidth": 1.2}
    dashes = ("-", "--", ":")[number // len(SERIES) % 3]
    return {"color": SERIES[number % len(SERIES)], "marker": MARKERS[number % len(MARKERS)], "linestyle": dashes}


def _lines(
    key: str, title: str, axis: str, lines: Mapping[str, Curve], note: str, order: list[str] | None = None
) -> Picture:
    """Draw lines with bands; in words: where each of them ends."""
    order = list(lines) if order is None else order
    drawn = {name: curve for name, curve in lines.items() if curve.x}
    ends = "; ".join(f"{name} {curve.y[-1].mean:.4g} at {axis} {curve.x[-1]:.4g}" for name, curve in drawn.items())

    def paint(axes: Axes) -> None:
        for name, curve in drawn.items():
            _line(axes, curve, order.index(name) if name in order else -1)
        means = [point.mean for curve in drawn.values() for point in curve.y]
        if means and min(means) > 0 and max(means) > LOGARITHMIC * min(means):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter("")
        axes.set_xlabel(axis)
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=axis == "round"))

    return Picture(draw(key, title, f"{title} over {axis}. At the end: {ends}.", PANEL, paint), note)


def _line(axes: Axes, curve: Curve, number: int) -> None:
    style = _style(number)
    every = max(1, -(-len(curve.x) // FEWEST_MARKERS))
    means = [point.mean for point in curve.y]
    axes.plot(curve.x, means, **style, markevery=every, markeredgecolor=PAPER, markeredgewidth=0.5)
    if any(point.std for point in curve.y):
        spreads = [point.std or 0.0 for point in curve.y]
        low, high = ([m + sign * s for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
        axes.fill_between(curve.x, low, high, color=style["color"], alpha=0.14, linewidth=0)


def reliability(label: str, number: int, bins: Bins) -> Picture:
    """Confidence against accuracy: bars in the bins, dots as large as the share of predictions in them."""
    total = sum(bins.counts)
    gap = sum(n * abs(a - c) for n, c, a in zip(*bins, strict=True)) / total
    filled = [(n, c, a) for n, c, a in zip(*bins, strict=True) if n]
    mean_confidence, mean_accuracy = (sum(n * v for n, v in zip(bins.counts, part, strict=True)) / total
                                      for part in (bins.confidence, bins.accuracy))  # fmt: skip
    verdict = "over-confident" if mean_confidence > mean_accuracy else "under-confident"
    summary = f"mean confidence {mean_confidence:.3f}, accuracy {mean_accuracy:.3f}: on the whole {verdict}"

    def paint(axes: Axes) -> None:
        width = 1 / len(bins.counts)
        axes.bar([(k + 0.5) * width for k in range(len(bins.counts))], bins.accuracy, width * 0.9,
                 color=SERIES[number % len(SERIES)], alpha=0.3)  # fmt: skip
        axes.plot([0, 1], [0, 1], color=INK, linestyle="--", linewidth=1)
        sizes = [8 + LARGEST_BUBBLE * n / total for n, _, _ in filled]
        axes.scatter([c for _, c, _ in filled], [a for _, _, a in filled], sizes,
                     color=SERIES[number % len(SERIES)], edgecolors=INK, linewidths=0.5)  # fmt: skip
        axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="confidence", ylabel="accuracy")
        ticks = [0, 0.25, 0.5, 0.75, 1]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])

    words = f"Reliability diagram of {label}: {summary}; calibration error over all seeds together {gap:.4f}."
    return Picture(draw(f"reliability-{number}", label, words, SQUARE, paint), f"{summary}; ECE of all seeds {gap:.3f}")


def labels(run: Run) -> Picture | None:
    """How many samples of each class a client holds, as bubbles; None if there are no classes or no counts."""
    if run.data is None or "labels" not in run.data:
        return None
    counts = dict(zip(run.data["listed"], run.data["labels"], strict=True))
    shown = spread_out(counts, MOST_CLIENTS)
    classes = spread_out(range(len(counts[shown[0]])), MOST_CLASSES)
    cells = [(x, y, counts[client][c]) for y, client in enumerate(shown) for x, c in enumerate(classes)]
    largest = max(1, *(count for _, _, count in cells))
    size = LARGEST_BUBBLE * min(1.0, (14 / max(len(classes), 0.7 * len(shown))) ** 2)

    def paint(axes: Axes) -> None:
        found = [cell for cell in cells if cell[2]]
        areas = [max(1.5, size * count / largest) for _, _, count in found]
        axes.scatter([x for x, _, _ in found], [y for _, y, _ in found], areas, color=SERIES[0], edgecolors="none")
        name_rows(axes, shown)
        axes.set_xticks(*_few(classes))
        axes.set(xlabel="class", ylabel="client", xlim=(-0.7, len(classes) - 0.3))

    height = max(170, 80 + 17 * len(shown))
    words = f"Samples of each class at the clients, seed {run.seed}. " + _label_words(run.data, shown)
    caption = (
        f"Seed {run.seed}; the largest bubble is {largest} samples, its area the number. {_scope(run.data, shown)}"
    )
    if len(classes) < len(counts[shown[0]]):
        caption += f" {len(classes)} of {len(counts[shown[0]])} classes are shown."
    return Picture(draw("labels", "training samples by class", words, (PANEL[0], height), paint), caption)


def _label_words(data: Mapping[str, Any], shown: Sequence[int]) -> str:
    held = dict(zip(data["listed"], data["labels"], strict=True))
    return "; ".join(f"client {n}: {sum(held[n])} samples of {sum(map(bool, held[n]))} classes" for n in shown)


def _scope(data: Mapping[str, Any], shown: Sequence[int]) -> str:
    everybody = int(data["clients"])
    of_all = "All clients are shown." if len(shown) == everybody else f"{len(shown)} of {everybody} clients are shown,"
    spread_note = "" if len(shown) == everybody else " evenly spread over their numbers."
    return f"{of_all}{spread_note} Together {data['all_samples']} training samples, d_n included."


def name_rows(axes: Axes, clients: Sequence[int]) -> None:
    """Write the numbers of clients at the rows of a picture, the first one on top."""
    axes.set_yticks(*_few(clients))
    axes.set_ylim(len(clients) - 0.4, -0.6)


def _few(names: Sequence[int], most: int = 13) -> tuple[list[int], list[str]]:
    """Return places and names of so many ticks that they do not touch."""
    every = math.ceil(len(names) / most)
    return list(range(0, len(names), every)), [str(name) for name in names[::every]]
