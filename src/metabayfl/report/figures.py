"""The figures of a report. Each has words of its own, and says nothing by colour alone."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from metabayfl.report.drawing import INK, MARKERS, PAPER, SERIES, draw, swatch
from metabayfl.report.runs import Run
from metabayfl.report.series import RECEIVED, Bins, Curve, cost_curve, metric_curve

PANEL, SQUARE = (340, 230), (220, 225)
FEWEST_MARKERS = 30
"""With more points than this only every so many get a marker."""
LOGARITHMIC = 20.0
"""Values that differ by more than this factor get a logarithmic axis."""
LARGEST_BUBBLE = 130.0
IN_BALANCE = 0.01
"""Confidence and accuracy that differ by less on average are called equal."""


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
    confidence, accuracy = (
        sum(n * value for n, value in zip(bins.counts, values, strict=True)) / total
        for values in (bins.confidence, bins.accuracy)
    )
    surplus = confidence - accuracy
    verdict = "in balance" if abs(surplus) < IN_BALANCE else "too confident" if surplus > 0 else "too modest"
    caption = f"mean confidence {confidence:.3f}, accuracy {accuracy:.3f}: {verdict}; ECE of all seeds {gap:.3f}"
    words = f"Reliability diagram of {label}: {caption}."
    colour = SERIES[number % len(SERIES)]
    svg = draw(f"reliability-{number}", label, words, SQUARE, lambda axes: _paint_reliability(axes, bins, colour))
    return Picture(svg, caption)


def _paint_reliability(axes: Axes, bins: Bins, colour: str) -> None:
    width, total = 1 / len(bins.counts), sum(bins.counts)
    middles = [(number + 0.5) * width for number in range(len(bins.counts))]
    axes.bar(middles, bins.accuracy, width * 0.9, color=colour, alpha=0.3)
    axes.plot([0, 1], [0, 1], color=INK, linestyle="--", linewidth=1)
    counts, confidence, accuracy = zip(*(entry for entry in zip(*bins, strict=True) if entry[0]), strict=True)
    sizes = [8 + LARGEST_BUBBLE * count / total for count in counts]
    axes.scatter(confidence, accuracy, sizes, color=colour, edgecolors=INK, linewidths=0.5)
    ticks = [0, 0.25, 0.5, 0.75, 1]
    names = [f"{tick:g}" for tick in ticks]
    axes.set_xticks(ticks, names)
    axes.set_yticks(ticks, names)
    axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="confidence", ylabel="accuracy")
