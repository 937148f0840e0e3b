"""What each part of Meta-BayFL is worth: the runs of configs/ablations.toml as a table and a picture.

Each row of the picture is Meta-BayFL with one part changed: its difference to the method as it is, on the same seeds
and data, a small dot for each seed and a large one for the mean, orange where all seeds are worse. Rows stand under the
comments of the config. To the right is more accurate; to the left is a lower NLL and a lower ECE.

Usage: python benchmarks/verdict.py keep COMPARE.csv results/ablations.csv
       python benchmarks/ablations.py results/ablations.csv [PICTURE.svg]
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from verdict import OURS, Table, cell, column, read, tabulate

from metabayfl.pictures import BLUE, GREY

CONFIG = Path(__file__).parents[1] / "configs" / "ablations.toml"
PANELS = {"A/G accuracy": "accuracy", "A/G nll": "NLL", "A/G ece": "ECE", "P/L accuracy": "personal accuracy"}
LIMITS = {"A/G accuracy": 0.1, "A/G nll": 0.3, "A/G ece": 0.15, "P/L accuracy": 0.1}
"""Differences beyond these are drawn at the edge, so that one collapse does not hide the others."""
ORANGE = "#e08a2e"


def differences(table: Table, name: str) -> dict[str, list[float]]:
    """Return what each variant has more than the method as it is, by seeds that both have."""
    ours = column(table, OURS, name)
    found = {}
    for method in table:
        values = column(table, method, name)
        found[method] = [values[seed] - ours[seed] for seed in sorted(values.keys() & ours.keys())]
    return found


def rows_of(table: Table) -> list[str]:
    """Return the variants in the order of the config, under its comments: what begins with # is a heading."""
    sections = CONFIG.read_text(encoding="utf-8").partition("extends")[2]
    found: list[str] = []
    for heading, method in re.findall(r"^(# .+)$|^\[methods\.(.+)\]", sections, re.MULTILINE):
        if heading or (method in table and method != OURS):
            found.append(heading or method)
    return [row for row, after in zip(found, [*found[1:], "#"], strict=True) if not (row[0] == after[0] == "#")]


def as_markdown(table: Table) -> str:
    """Mean ± standard deviation over seeds, the method as it is first."""
    lines = [f"| | seeds | {' | '.join(PANELS.values())} |", "|---" * (2 + len(PANELS)) + "|"]
    for row in (OURS, *rows_of(table)):
        if row.startswith("#"):
            lines.append(f"| **{row.removeprefix('# ')}** |" + " |" * (1 + len(PANELS)))
        else:
            cells = [cell(name, list(column(table, row, name).values())) for name in PANELS]
            lines.append(f"| {row} | {len(table[row])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(table: Table) -> Figure:
    """Draw one panel for each number, one row for each variant."""
    rows = rows_of(table)
    figure = Figure(figsize=(11, 1.0 + 0.24 * len(rows)), layout="constrained")
    panels = figure.subplots(1, len(PANELS), sharey=True)
    for axes, (name, title) in zip(panels, PANELS.items(), strict=True):
        found, limit = differences(table, name), LIMITS[name]
        axes.axvline(0.0, color=GREY, linewidth=1)
        for place, method in enumerate(rows):
            values = np.array(found.get(method, ()))
            if len(values):
                worse = values < 0 if "accuracy" in name else values > 0
                axes.scatter(np.clip(values, -limit, limit), [place] * len(values), 10, color=GREY, zorder=2)
                mean = np.clip(values.mean(), -limit, limit)
                axes.scatter([mean], [place], 36, color=ORANGE if worse.all() else BLUE, zorder=3)
        axes.set(title=title, xlim=(-1.08 * limit, 1.08 * limit), ylim=(len(rows) - 0.5, -0.5))
        axes.set_yticks(range(len(rows)), [row.removeprefix("# ") for row in rows])
        axes.grid(axis="y", color="#eeeeee")
        axes.tick_params(axis="y", length=0)
        axes.set_axisbelow(True)
    for label, row in zip(panels[0].get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.startswith("#") else "normal")
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
