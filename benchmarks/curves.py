"""Does a method need stopping? Accuracy, NLL and ECE over rounds, for docs/meta-bayfl.md.

`keep` takes the curves out of the runs of a comparison, so that the picture can be drawn again without them; lines that
are there already are replaced. `draw` shows the mean over seeds, and each seed as a thin line.

Usage: python benchmarks/curves.py keep RUNS [RUNS ...] results/curves.csv
       python benchmarks/curves.py draw results/curves.csv PICTURE.svg METHOD [METHOD ...]
"""

import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from verdict import read, shortened

from metabayfl.report.runs import Run, read_runs
from metabayfl.report.series import headline

NUMBERS = {"A/G accuracy": "accuracy", "A/G nll": "NLL", "A/G ece": "ECE", "P/L accuracy": "personal accuracy"}
IDENTITY = ("method", "seed", "round")
COLOURS = ("#3b6ea5", "#e08a2e", "#5b9a5b", "#a05195", "#7a7a7a")
Curves = dict[str, dict[int, dict[int, float]]]
"""A number by method, seed and round."""


def points(run: Run) -> Iterator[dict[str, str]]:
    """Return what a run had after each evaluated round."""
    for event in run.history:
        found = {"method": run.label, "seed": str(run.seed), "round": str(event["round"])}
        for number in NUMBERS:
            view, name = number.split()
            summary = event["metrics"].get(view, {}).get(name)
            found[number] = "" if summary is None else shortened(str(headline(summary)))
        yield found


def keep(sources: Sequence[Path], target: Path) -> None:
    """Add the curves of finished runs to the file that is kept."""
    new = [point for run in read_runs(sources) if run.finished for point in points(run)]
    rows = {tuple(row[name] for name in IDENTITY): row for row in (*read(target), *new)}
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, (*IDENTITY, *NUMBERS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows.values(), key=lambda row: (row["method"], int(row["seed"]), int(row["round"]))))


def curves(rows: Sequence[dict[str, str]], number: str) -> Curves:
    """Return a number of all runs."""
    found: Curves = {}
    for row in rows:
        if row[number]:
            by_seed = found.setdefault(row["method"], {})
            by_seed.setdefault(int(row["seed"]), {})[int(row["round"])] = float(row[number])
    return found


def draw(rows: Sequence[dict[str, str]], methods: Sequence[str]) -> Figure:
    """Draw one panel for each number, one colour for each method."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    for axes, (number, title) in zip(figure.subplots(1, len(NUMBERS)), NUMBERS.items(), strict=True):
        found = curves(rows, number)
        for method, colour in zip(methods, COLOURS, strict=False):
            runs = found.get(method, {})
            for run in runs.values():
                axes.plot(list(run), list(run.values()), color=colour, linewidth=0.6, alpha=0.4)
            rounds = sorted(set.intersection(*(set(run) for run in runs.values()))) if runs else []
            means = [np.mean([run[round_] for run in runs.values()]) for round_ in rounds]
            axes.plot(rounds, means, color=colour, linewidth=2, label=method)
        axes.set(title=title, xlabel="round")
        axes.grid(color="#eeeeee")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(methods))
    return figure


def main(arguments: Sequence[str]) -> int:
    """Keep curves, or draw what is kept."""
    if len(arguments) > 2 and arguments[0] == "keep":
        keep([Path(run) for run in arguments[1:-1]], Path(arguments[-1]))
        return 0
    if 3 < len(arguments) <= 3 + len(COLOURS) and arguments[0] == "draw":
        draw(read(Path(arguments[1])), arguments[3:]).savefig(arguments[2], metadata={"Date": None})
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
