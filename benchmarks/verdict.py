"""What the main table says: Meta-BayFL against FedAvg stopped in time, criterion by criterion. docs/meta-bayfl.md.

Runs of `metabayfl compare configs/bench_small.toml` are kept as a CSV file, one line per method and seed; `keep` adds
runs to it (a line that is there already is replaced), `show` prints the table and judges. Nothing is typed in by hand.

Usage: python benchmarks/verdict.py keep COMPARE.csv results/bench_small.csv
       python benchmarks/verdict.py show results/bench_small.csv
"""

import csv
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from metabayfl.statistics import Difference, paired_difference

OURS, THEIRS = "meta-bayfl", "fedavg"
SWEEP = ("bayfl-1e-3", "bayfl-3e-3", "bayfl-1e-2", "bayfl-2e-2", "bayfl-3e-2", "bayfl-1e-1")
"""Our candidates as fixed rates, but for 0.3, which is for rounds of one or two steps."""
FAMILY = {OURS, "meta-fl", "mc-dropout", "bayfl", "bayfl-adam", *SWEEP}
"""Methods of our own; the others are competitors."""
NOT_FEDERATED = {"local", "local-bnn", "central"}
COLUMNS = {
    "G/G accuracy": "G/G",
    "A/G accuracy": "A/G",
    "A/G nll": "A NLL",
    "A/G ece": "A ECE",
    "P/L accuracy": "P/L",
    "A stop round": "stop",
    "G/G accuracy stopped": "G/G stopped",
    "A/G accuracy stopped": "A/G stopped",
    "A/G scaled_nll stopped": "A NLL stopped, scaled",
    "A/G scaled_ece stopped": "A ECE stopped, scaled",
}
KEPT = (
    "method", "seed", *COLUMNS, "G/G nll", "G/G ece", "P/G accuracy", "P/L nll", "P/L accuracy stopped",
    "G stop round", "G/G scaled_nll stopped", "G/G scaled_ece stopped", "bytes_up", "bytes_down", "forward_passes",
    "backward_passes", "train_seconds", "selection_seconds",
)  # fmt: skip
DEAD = 0.15
"""Accuracy of ten classes below which a federation has collapsed."""
LARGEST_ECE, SHARE_OF_SWEEP = 0.05, 1 / 3
Table = dict[str, dict[int, dict[str, float]]]


def read(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file; a file that is not there has none."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def keep(source: Path, target: Path) -> None:
    """Add the runs of a comparison to the file that is kept."""
    rows = {(row["method"], row["seed"]): row for path in (target, source) for row in read(path)}
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, KEPT, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in sorted(rows.values(), key=lambda row: (row["method"], int(row["seed"]))):
            writer.writerow({name: shortened(row.get(name, "")) for name in KEPT})


def shortened(text: str) -> str:
    """Write a number with six digits."""
    try:
        return text if text.isdigit() else f"{float(text):.6g}"
    except ValueError:
        return text


def tabulate(rows: Sequence[dict[str, str]]) -> Table:
    """Return numbers by method and seed."""
    table: Table = {}
    for row in rows:
        numbers = {name: float(value) for name, value in row.items() if value and name not in ("method", "seed")}
        table.setdefault(row["method"], {})[int(row["seed"])] = numbers
    return table


def column(table: Table, method: str, name: str) -> dict[int, float]:
    """Return a number of a method by seed."""
    return {seed: numbers[name] for seed, numbers in table.get(method, {}).items() if name in numbers}


def mean(table: Table, method: str, name: str) -> float | None:
    """Return the mean of a number over seeds."""
    values = column(table, method, name).values()
    return statistics.fmean(values) if values else None


def as_markdown(table: Table) -> str:
    """Mean ± standard deviation over seeds, best averaged accuracy first."""
    lines = [f"| method | seeds | {' | '.join(COLUMNS.values())} |", "|---" * (2 + len(COLUMNS)) + "|"]
    for method in sorted(table, key=lambda method: -(mean(table, method, "A/G accuracy") or 0.0)):
        cells = [cell(name, list(column(table, method, name).values())) for name in COLUMNS]
        lines.append(f"| {method} | {len(table[method])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(name: str, values: list[float]) -> str:
    """Write mean and spread; accuracies in per cent."""
    if not values:
        return "–"
    scale, digits = (100, 1) if "accuracy" in name else (1, 0 if "round" in name else 3)
    spread = f" ± {scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 and digits else ""
    return f"{scale * statistics.fmean(values):.{digits}f}{spread}"


def difference(table: Table, name: str, other: str, other_name: str | None = None) -> Difference | None:
    """Ours minus another method's, paired by seed."""
    return paired_difference(column(table, OURS, name), column(table, other, other_name or name))


def is_not_above(found: Difference | None) -> bool:
    """Whether it is not significantly above 0."""
    return found is not None and found.low <= 0


def is_not_below(found: Difference | None) -> bool:
    """Whether it is not significantly below 0."""
    return found is not None and found.high >= 0


def is_above(found: Difference | None, limit: float = 0.0) -> bool:
    """Whether all of its interval lies above a limit."""
    return found is not None and found.low > limit


def best(table: Table, name: str, among: Callable[[str], bool], lowest: bool = False) -> str:
    """Return the method with the best mean of a number."""
    found = {method: mean(table, method, name) for method in table if among(method)}
    known = {method: value for method, value in found.items() if value is not None}
    return min(known, key=lambda method: known[method] if lowest else -known[method], default="")


def passes(table: Table, method: str) -> float | None:
    """Return the compute of a method's runs: a backward pass counts as two forward ones."""
    forward, backward = (mean(table, method, f"{kind}_passes") for kind in ("forward", "backward"))
    return None if forward is None or backward is None else forward + 2 * backward


def share_of_sweep(table: Table) -> float | None:
    """Return our compute as a share of that of all fixed rates; None if one of them was not run."""
    ours, *sweep = (passes(table, method) for method in (OURS, *SWEEP))
    known = [one for one in sweep if one is not None]
    return ours / sum(known) if ours is not None and len(known) == len(sweep) else None


def judge(table: Table) -> list[tuple[str, str, str]]:
    """Return what is required and wanted, what was measured, and the verdict."""
    found: list[tuple[str, str, str]] = []

    def check(what: str, measured: Difference | float | None, holds: bool) -> None:
        verdict = "" if measured is None else "holds" if holds else "**fails here**"
        found.append((what, describe(measured), verdict))

    worst = min(column(table, OURS, "G/G accuracy").values(), default=None)
    check("required: no collapse (worst seed, G/G)", worst, worst is not None and worst > DEAD)
    nll = difference(table, "A/G nll", THEIRS, "A/G scaled_nll stopped")
    check("required: NLL against FedAvg stopped and scaled", nll, is_not_above(nll))
    ece = difference(table, "A/G ece", THEIRS, "A/G scaled_ece stopped")
    check("required: ECE against FedAvg stopped and scaled", ece, is_not_above(ece))
    own = mean(table, OURS, "A/G ece")
    check(f"required: ECE at most {LARGEST_ECE}", own, own is not None and own <= LARGEST_ECE)
    for what in ("P/L accuracy", "P/L accuracy stopped"):
        personal = difference(table, "P/L accuracy", THEIRS, what)
        check(f"required: P/L above FedAvg's {what}", personal, is_above(personal))
    accuracy = difference(table, "A/G accuracy", THEIRS, "A/G accuracy stopped")
    check("required: accuracy against FedAvg stopped", accuracy, is_not_below(accuracy))
    is_swept = all(method in table for method in SWEEP)
    fixed = best(table, "A/G accuracy", lambda method: is_swept and method in SWEEP)
    sweep = difference(table, "A/G accuracy", fixed)
    check(f"required: accuracy against the best fixed rate ({fixed})", sweep, is_not_below(sweep))
    share = share_of_sweep(table)
    check("required: share of the sweep's passes", share, share is not None and share < SHARE_OF_SWEEP)

    check("wanted: accuracy 3 points above FedAvg stopped", accuracy, is_above(accuracy, 0.03))
    rival = best(table, "A/G accuracy stopped", lambda method: method not in FAMILY | NOT_FEDERATED)
    first = difference(table, "A/G accuracy", rival, "A/G accuracy stopped")
    check(f"wanted: first among the others, stopped (best: {rival})", first, first is not None and first.mean >= 0)
    more = difference(table, "P/L accuracy", THEIRS)
    check("wanted: P/L 5 points above FedAvg's", more, more is not None and more.mean >= 0.05)
    rival = best(table, "P/L accuracy", lambda method: method not in FAMILY)
    personal = difference(table, "P/L accuracy", rival)
    check(f"wanted: P/L not below the best personal method ({rival})", personal, is_not_below(personal))
    for name, title in (("A/G nll", "NLL"), ("A/G ece", "ECE")):
        rival = best(table, name, lambda method: method not in FAMILY | NOT_FEDERATED, lowest=True)
        least = difference(table, name, rival)
        check(f"wanted: the lowest {title} (best other: {rival})", least, least is not None and least.mean <= 0)
    return found


def describe(measured: Difference | float | None) -> str:
    """Write a number, or a difference with its interval."""
    if measured is None:
        return "not measured"
    if isinstance(measured, float):
        return f"{measured:.3f}"
    return f"{measured.mean:+.4f} [{measured.low:+.4f}, {measured.high:+.4f}], {measured.seeds} seeds"


def main(arguments: Sequence[str]) -> int:
    """Keep runs, or show what is kept."""
    if len(arguments) == 3 and arguments[0] == "keep":
        keep(Path(arguments[1]), Path(arguments[2]))
        return 0
    if len(arguments) == 2 and arguments[0] == "show":
        table = tabulate(read(Path(arguments[1])))
        print(as_markdown(table))
        print("\n| criterion | measured | |\n|---|---|---|")
        for row in judge(table):
            print(f"| {' | '.join(row)} |")
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
