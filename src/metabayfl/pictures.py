"""Pictures of data, drawn with matplotlib from plain numbers; nothing here touches a model or a screen."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BUBBLES = 40
MOST_LABELS = 25
SMALLEST_BUBBLE = 1.5
BLUE, ORANGE, GREY = "#3b6ea5", "#e08a2e", "#b8b8b8"


Sizes = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Of each client: training samples, those of them that are d_n, test samples."""


class Samples(NamedTuple):
    """Images [n, channels, height, width] of a client, as they were and as it has them, and their labels."""

    client: str
    change: str
    before: np.ndarray
    after: np.ndarray
    labels: Sequence[str]


def draw_holdings(axes: "Axes", counts: np.ndarray, clients: Sequence[str] = (), classes: Sequence[str] = ()) -> None:
    """Draw who holds what from counts [clients, classes]: bubbles whose area is the count.

    Where bubbles would be too many, colours show shares, and clients are sorted by their largest class.
    """
    order = np.arange(len(counts))
    many = len(counts) > MOST_BUBBLES
    if many:
        order = np.lexsort((-counts.max(axis=1), counts.argmax(axis=1)))
    countable = max(counts.shape) <= MOST_BUBBLES
    if not countable:
        _draw_shares(axes, counts[order])
    _name_ticks(axes.xaxis, [] if many else clients, len(counts))
    _name_ticks(axes.yaxis, classes, counts.shape[1])
    axes.set_xlabel(f"{len(counts):,} clients, sorted by their largest class" if many else "client")
    step = _step(counts.shape[1])
    axes.set_ylabel("class" if step == 1 else f"{counts.shape[1]} classes, 1 in {step} is named")
    if countable:
        axes.set(xlim=(-0.6, len(counts) - 0.4), ylim=(-0.6, counts.shape[1] - 0.4))
        axes.set_title(f"area: samples (largest: {max(1, counts.max()):,})", fontsize=9)
        axes.grid(color="#eeeeee")
        axes.set_axisbelow(True)
        draw_bubbles(axes, counts, BLUE)


def draw_bubbles(axes: "Axes", counts: np.ndarray, colour: str) -> None:
    """Draw counts [columns, rows] as bubbles whose area is the count; limits, ticks and names must be there already."""
    columns, rows = np.nonzero(counts)
    figure = axes.figure.canvas.figure
    figure.draw_without_rendering()  # lays the axes out, so that the largest bubble just fills its cell
    cell = np.abs(np.diff(axes.transData.transform([(0, 0), (1, 1)]), axis=0)).min() * 72 / figure.dpi
    areas = (0.95 * cell) ** 2 * counts[columns, rows] / max(1, counts.max())
    axes.scatter(columns, rows, np.maximum(SMALLEST_BUBBLE, areas), color=colour, linewidth=0)


def _draw_shares(axes: "Axes", counts: np.ndarray) -> None:
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    top = max(float(shares.max()), 1e-9)
    image = axes.imshow(
        shares.T, aspect="auto", origin="lower", cmap="Blues", vmin=0, vmax=top, interpolation="nearest"
    )
    axes.set_title("colour: share of the class among the client's samples", fontsize=9)
    axes.figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02)


def _name_ticks(axis: Any, names: Sequence[str], count: int) -> None:
    """Name every place, or evenly spaced ones where there are many."""
    places = list(range(0, count, _step(count)))
    texts = [_short(names[place]) if len(names) else str(place) for place in places]
    sloping = {"rotation": 90} if axis.axis_name == "x" and max(map(len, texts)) > 3 else {}
    axis.set_ticks(places, labels=texts, fontsize=8, **sloping)


def _step(count: int) -> int:
    return -(-count // MOST_LABELS)


def _short(text: str) -> str:
    return text if len(text) <= 18 else f"{text[:17]}…"


def draw_sizes(
    axes: "Axes", train: np.ndarray, select: np.ndarray, test: np.ndarray, clients: Sequence[str] = ()
) -> None:
    """Draw how many samples clients have to train, to choose by (d_n) and to test; of many clients a sorted curve."""
    total = train + test
    if len(total) > MOST_BUBBLES:
        axes.fill_between(np.arange(len(total)), np.sort(total)[::-1], step="mid", color=BLUE, linewidth=0)
        axes.set(xlim=(0, len(total) - 1), ylim=(0, None))
        axes.set_xlabel(f"{len(total):,} clients, sorted by size")
    else:
        places = np.arange(len(total))
        axes.bar(places, train - select, color=BLUE, label="train without d_n")
        axes.bar(places, select, bottom=train - select, color=ORANGE, label="d_n")
        axes.bar(places, test, bottom=train, color=GREY, label="local test")
        axes.legend(fontsize=8, frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        axes.set_xlim(-0.6, len(total) - 0.4)
        _name_ticks(axes.xaxis, clients, len(total))
        axes.set_xlabel("client")
    axes.set_ylabel("samples")
    axes.spines[["top", "right"]].set_visible(False)


def holdings_figure(
    title: str, counts: np.ndarray, sizes: Sizes, clients: Sequence[str], classes: Sequence[str]
) -> "Figure":
    """Draw clients x classes above the sizes of the clients."""
    from matplotlib.figure import Figure

    width = min(13.0, max(6.0, 2.5 + 0.42 * len(counts)))
    height = min(10.0, max(4.0, 1.5 + 0.32 * counts.shape[1]))
    figure = Figure(figsize=(width, height + 2.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[height, 2.2])
    figure.suptitle(title, fontsize=10)
    draw_sizes(lower, *sizes, clients)
    draw_holdings(upper, counts, clients, classes)  # last: bubbles are as large as the final layout allows
    return figure


def samples_figure(samples: Sequence[Samples]) -> "Figure":
    """Draw a few images of some clients: above as they were, below as the client has them."""
    from matplotlib.figure import Figure

    columns = max(len(shown.labels) for shown in samples)
    figure = Figure(figsize=(1.3 * columns, 3.2 * len(samples) + 0.3), layout="constrained")
    grid = figure.subplots(2 * len(samples), 1)
    for shown, before, after in zip(samples, grid[::2], grid[1::2], strict=True):
        _draw_strip(before, shown.before)
        places = _draw_strip(after, shown.after)
        after.set_xticks(places, labels=shown.labels, fontsize=7)
        title = f"{shown.client}: as published; below as the client has them{shown.change}"
        before.set_title(title, fontsize=8, loc="left")
    return figure


def _draw_strip(axes: "Axes", images: np.ndarray) -> list[float]:
    """Draw images side by side; returns where their middles are."""
    pixels = images / 255 if images.dtype == np.uint8 else np.clip(images, 0, 1)
    height, width = pixels.shape[2:]
    gap = max(1, width // 12)
    strip = np.ones((height, len(pixels) * (width + gap) - gap, 3))
    for number, image in enumerate(pixels):
        left = number * (width + gap)
        strip[:, left : left + width] = np.moveaxis(image, 0, 2)
    axes.imshow(strip, interpolation="nearest")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set(xticks=[], yticks=[])
    return [number * (width + gap) + (width - 1) / 2 for number in range(len(pixels))]


def save(figure: "Figure", stem: Path) -> list[Path]:
    """Write a figure as PNG and SVG; the same numbers give the same bytes."""
    import matplotlib as mpl

    paths = [stem.with_suffix(f".{kind}") for kind in ("png", "svg")]
    with mpl.rc_context({"svg.hashsalt": "metabayfl"}):
        figure.savefig(paths[0], dpi=150)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths
