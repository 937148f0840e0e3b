"""Do the methods learn? Each against clients that work alone and against FedAvg, on the same seeds. docs/methods.md 10.

A global model is worth the exchange if it beats the clients' own models on everybody's data by 5 points: it on the
common test set (G/G) against `local` there (P/G). A personal one is if it beats both `local` and `fedavg` on the
clients' own data (P/L). Numbers are those after the last round.

Usage: python benchmarks/learning.py results/bench_small.csv
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from verdict import Table, cell, column, mean, read, tabulate

from metabayfl.methods import METHODS
from metabayfl.statistics import Difference, paired_difference

ALONE, FEDERATED = "local", "fedavg"
NEEDED = 0.05
"""What a global model must gain on clients that work alone."""
COMMON, OWN, EVERYWHERE = "G/G accuracy", "P/L accuracy", "P/G accuracy"


def difference(table: Table, method: str, name: str, other: str, other_name: str) -> Difference | None:
    """A method's number minus another method's, paired by seed."""
    return paired_difference(column(table, method, name), column(table, other, other_name))


def is_personal(method: str) -> bool:
    """Whether a row is judged by the clients' own models; variants, whose labels are no method's name, are not."""
    return method in METHODS and METHODS[method].is_personal


def judge(table: Table, method: str) -> str:
    """Say whether it is worth it; a personal one is above another if the interval of their difference is above 0."""
    if method == ALONE:
        return ""
    if is_personal(method):
        against = {other: difference(table, method, OWN, other, OWN) for other in (ALONE, FEDERATED)}
        beaten = [other for other, found in against.items() if found and found.mean > 0 and found.leaves_out_zero]
        return f"above {' and '.join(beaten)}" if beaten else "above neither"
    gained = difference(table, method, COMMON, ALONE, EVERYWHERE)
    return "" if gained is None else "learns" if gained.mean >= NEEDED else "**fails here**"


def as_markdown(table: Table) -> str:
    """Return a row for each method: what it has, what it gains, the verdict; best on the clients' own data first."""
    titles = ["method", "common test", "over local", "own tests", "over local", "over fedavg", ""]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for method in sorted(table, key=lambda method: -(mean(table, method, OWN) or 0.0)):
        on_all = COMMON if column(table, method, COMMON) else EVERYWHERE
        cells = [
            cell(on_all, list(column(table, method, on_all).values())),
            points(difference(table, method, on_all, ALONE, EVERYWHERE)),
            cell(OWN, list(column(table, method, OWN).values())),
            *(points(difference(table, method, OWN, other, OWN)) for other in (ALONE, FEDERATED)),
        ]
        lines.append(f"| {method} | {' | '.join(cells)} | {judge(table, method)} |")
    return "\n".join(lines)


def points(found: Difference | None) -> str:
    """Write a difference and its interval in percentage points."""
    if found is None:
        return "–"
    return f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    print(as_markdown(tabulate(read(Path(arguments[0])))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
