"""What the clients hold, as bubbles of clients and classes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from metabayfl.report.drawing import SERIES, draw
from metabayfl.report.figures import LARGEST_BUBBLE, PANEL, Picture
from metabayfl.report.runs import Run
from metabayfl.report.series import spread_out

MOST_CLIENTS, MOST_CLASSES = 24, 24
ROOMY = 14
"""So many bubbles fit into a row at their full size."""


def labels(run: Run) -> Picture | None:
    """How many samples of each class a client holds; None if there are no classes or no counts."""
    if run.data is None or "labels" not in run.data:
        return None
    counts = dict(zip(run.data["listed"], run.data["labels"], strict=True))
    clients = spread_out(counts, MOST_CLIENTS)
    everything = len(counts[clients[0]])
    classes = spread_out(range(everything), MOST_CLASSES)
    held = [[int(counts[client][number]) for number in classes] for client in clients]
    largest = max(1, *map(max, held))
    caption = f"Seed {run.seed}; the largest bubble is {largest} samples, the area is the number. "
    caption += _scope(run.data, clients)
    if len(classes) < everything:
        caption += f" {len(classes)} of {everything} classes are shown."
    sums = "; ".join(f"client {n}: {sum(counts[n])} samples of {sum(map(bool, counts[n]))} classes" for n in clients)
    words, size = f"Samples of each class at the clients, seed {run.seed}. {sums}.", (PANEL[0], rows_height(clients))
    return Picture(draw("labels", "by class", words, size, lambda axes: _paint(axes, held, clients, classes)), caption)


def _paint(axes: Axes, held: Sequence[Sequence[int]], clients: Sequence[int], classes: Sequence[int]) -> None:
    largest = max(1, *map(max, held))
    full = LARGEST_BUBBLE * min(1.0, ROOMY / len(classes)) ** 2
    cells = [(x, y, count) for y, row in enumerate(held) for x, count in enumerate(row) if count]
    areas = [max(1.5, full * count / largest) for _, _, count in cells]
    axes.scatter([x for x, _, _ in cells], [y for _, y, _ in cells], areas, color=SERIES[0], edgecolors="none")
    name_rows(axes, clients)
    axes.set_xticks(*few(classes))
    axes.set(xlabel="class", ylabel="client", xlim=(-0.7, len(classes) - 0.3))


def _scope(data: Mapping[str, Any], shown: Sequence[int]) -> str:
    everybody = int(data["clients"])
    some = f"{len(shown)} of {everybody} clients are shown, evenly spread over their numbers."
    of_all = "All clients are shown." if len(shown) == everybody else some
    return f"{of_all} Together they hold {data['all_samples']} training samples, d_n included."


def rows_height(rows: Sequence[object]) -> int:
    """Return the height of a picture with a row for each of these."""
    return max(150, 80 + 16 * len(rows))


def name_rows(axes: Axes, names: Sequence[object]) -> None:
    """Write names at the rows of a picture, the first one on top."""
    axes.set_yticks(*few(names))
    axes.set_ylim(len(names) - 0.4, -0.6)


def few(names: Sequence[object], most: int = 13) -> tuple[list[int], list[str]]:
    """Return places and names of so many ticks that they do not touch."""
    every = math.ceil(len(names) / most)
    return list(range(0, len(names), every)), [str(name) for name in names[::every]]
