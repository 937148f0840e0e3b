"""What each part of Meta-BayFL is worth: the runs of configs/ablations.toml as a table and a picture.

Each row of the picture is Meta-BayFL with one part changed: its difference to the method as it is, on the same seeds
and data, a small dot for each seed and a large one for the mean. To the right is more accurate; to the left is a lower
NLL and a lower ECE.

Usage: python benchmarks/verdict.py keep COMPARE.csv results/ablations.csv
       python benchmarks/ablations.py results/ablations.csv [PICTURE.svg]
"""

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from verdict import OURS, Table, as_markdown, column, read, tabulate

from metabayfl.pictures import BLUE, GREY

CONFIG = Path(__file__).parents[1] / "configs" / "ablations.toml"
PANELS = {"A/G accuracy": "accuracy", "A/G nll": "NLL", "A/G ece": "ECE", "P/L accuracy": "personal accuracy"}
LIMITS = {"A/G accuracy": 0.1, "A/G nll": 0.3, "A/G ece": 0.15, "P/L accuracy": 0.1}
"""Differences beyond these are drawn at the edge, so that one collapse does not hide the others."""


def differences(table: Table, name: str) -> dict[str, list[float]]:
    """Return what each variant has more than the method as it is, by seeds that both have."""
    ours = column(table, OURS, name)
    found = {}
    for method in table:
        values = column(table, method, name)
        found[method] = [values[seed] - ours[seed] for seed in sorted(values.keys() & ours.keys())]
    return found


def draw(table: Table) -> Figure:
    """Draw one panel for each number, one row for each variant, in the order of the config."""
    order = list(tomllib.loads(CONFIG.read_text(encoding="utf-8"))["methods"])
    methods = [method for method in order if method != OURS and method in table]
    figure = Figure(figsize=(11, 1.2 + 0.26 * len(methods)), layout="constrained")
    panels = figure.subplots(1, len(PANELS), sharey=True)
    for axes, (name, title) in zip(panels, PANELS.items(), strict=True):
        found, limit = differences(table, name), LIMITS[name]
        axes.axvline(0.0, color=GREY, linewidth=1)
        for row, method in enumerate(methods):
            values = found[method]
            axes.scatter(np.clip(values, -limit, limit), [row] * len(values), 10, color=GREY, zorder=2)
            if values:
                axes.scatter([np.clip(np.mean(values), -limit, limit)], [row], 36, color=BLUE, zorder=3)
        axes.set(title=title, xlim=(-1.08 * limit, 1.08 * limit), yticks=range(len(methods)), yticklabels=methods)
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
    panels[0].invert_yaxis()
    figure.suptitle(f"difference to {OURS}, by seed and in the mean", fontsize=10)
    return figure


def main(arguments: Sequence[str]) -> int:
    """Print the table, and draw if a file is named."""
    if len(arguments) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    table = tabulate(read(Path(arguments[0])))
    print(as_markdown(table))
    if len(arguments) == 2:
        draw(table).savefig(arguments[1], metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
