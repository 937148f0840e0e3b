"""What the clients hold, as bubbles of clients and classes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from metabayfl.pictures import draw_bubbles
from metabayfl.report.drawing import SERIES, draw
from metabayfl.report.figures import PANEL, Picture
from metabayfl.report.runs import Run
from metabayfl.report.series import spread_out

MOST_CLIENTS, MOST_CLASSES = 24, 24


def labels(run: Run) -> Picture | None:
    """How many samples of each class a client holds; None if there are no classes or no counts."""
    if run.data is None or "labels" not in run.data:
        return None
    counts = dict(zip(run.data["listed"], run.data["labels"], strict=True))
    clients = spread_out(counts, MOST_CLIENTS)
    everything = len(counts[clients[0]])
    classes = spread_out(range(everything), MOST_CLASSES)
    held = np.array([[counts[client][number] for number in classes] for client in clients])
    caption = f"Seed {run.seed}; the largest bubble is {held.max()} samples, the area is the number. "
    caption += _scope(run.data, clients)
    if len(classes) < everything:
        caption += f" {len(classes)} of {everything} classes are shown."
    sums = "; ".join(f"client {n}: {sum(counts[n])} samples of {sum(map(bool, counts[n]))} classes" for n in clients)
    words, size = f"Samples of each class at the clients, seed {run.seed}. {sums}.", (PANEL[0], rows_height(clients))
    return Picture(draw("labels", "by class", words, size, lambda axes: _paint(axes, held, clients, classes)), caption)


def _paint(axes: Axes, held: np.ndarray, clients: Sequence[int], classes: Sequence[int]) -> None:
    name_rows(axes, clients)
    axes.set_xticks(*few(classes))
    axes.set(xlabel="class", ylabel="client", xlim=(-0.7, len(classes) - 0.3))
    draw_bubbles(axes, held.T, SERIES[0])


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
