"""The side tables of docs/meta-bayfl.md: each method against FedAvg, paired by seed.

The files are those that `verdict.py keep` makes of `metabayfl compare configs/side_*.toml`.

Usage: python benchmarks/side.py results/side_labels.csv [...]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from learning import difference, points
from verdict import THEIRS, Table, cell, column, mean, read, tabulate

COLUMNS = {
    "A/G accuracy": "A/G",
    "A/G nll": "A NLL",
    "A/G ece": "A ECE",
    "A/G accuracy stopped": "A/G stopped",
    "A/G scaled_nll stopped": "A NLL stopped, scaled",
    "A/G scaled_ece stopped": "A ECE stopped, scaled",
    "P/L accuracy": "P/L",
    "P/L accuracy stopped": "P/L stopped",
}
AGAINST = {
    "A/G over FedAvg stopped": ("A/G accuracy", "A/G accuracy stopped"),
    "P/L over FedAvg": ("P/L accuracy", "P/L accuracy"),
    "P/L over FedAvg stopped": ("P/L accuracy", "P/L accuracy stopped"),
}
"""Ours after the last round, and what of FedAvg's it is compared with."""


def as_markdown(table: Table) -> str:
    """Mean ± standard deviation over seeds and differences to FedAvg in points, best averaged accuracy first."""
    heads = ("method", *COLUMNS.values(), *AGAINST)
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method in sorted(table, key=lambda method: -(mean(table, method, "A/G accuracy") or 0.0)):
        cells = [cell(name, list(column(table, method, name).values())) for name in COLUMNS]
        gains = [points(difference(table, method, ours, THEIRS, theirs)) for ours, theirs in AGAINST.values()]
        lines.append(f"| {' | '.join((method, *cells, *gains))} |")
    return "\n".join(lines)


def main(paths: Sequence[str]) -> int:
    """Print a table for each file."""
    if not paths:
        print(__doc__)
        return 2
    for path in paths:
        table = tabulate(read(Path(path)))
        print(f"{path}, seeds {', '.join(map(str, sorted(column(table, THEIRS, 'A/G accuracy'))))}\n")
        print(as_markdown(table) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
