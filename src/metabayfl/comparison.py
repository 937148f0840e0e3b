"""What a comparison says: mean and spread over seeds, paired differences; as table, JSON and CSV. No torch here."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from metabayfl.ledger import summarise_costs
from metabayfl.statistics import Difference, Spread, paired_difference, spread

Row = dict[str, Any]
STOPPED = " stopped"
"""Ends the name of a number at the round at which the clients' NLL on d_n was lowest."""
HEADLINES = {
    "G/G accuracy": "G/G acc",
    "P/L accuracy": "P/L acc",
    "P/G accuracy": "P/G acc",
    "G/G nll": "G/G NLL",
    "G/G ece": "G/G ECE",
    "G/G rmse": "G/G RMSE",
    "P/L rmse": "P/L RMSE",
    "bytes_up": "MB up",
    "bytes_down": "MB down",
    "train_seconds": "train s",
    "selection_seconds": "of it selection",
    "eval_seconds": "eval s",
}
BESIDES = {
    "after the last round, averaged over rounds (A) and personal (P)": {
        "A/G accuracy": "A/G acc",
        "A/G nll": "A/G NLL",
        "A/G ece": "A/G ECE",
        "P/L nll": "P/L NLL",
    },
    "scaled by the temperature found on d_n": {
        "G/G scaled_nll": "G/G NLL",
        "G/G scaled_ece": "G/G ECE",
        "A/G scaled_nll": "A/G NLL",
        "A/G scaled_ece": "A/G ECE",
        "P/L scaled_nll": "P/L NLL",
    },
    "stopped at the lowest NLL on d_n": {
        "G stop round": "round",
        "G/G accuracy stopped": "G/G acc",
        "G/G nll stopped": "G/G NLL",
        "G/G ece stopped": "G/G ECE",
        "G/G scaled_nll stopped": "scaled NLL",
        "G/G scaled_ece stopped": "scaled ECE",
        "A/G accuracy stopped": "A/G acc",
        "P/L accuracy stopped": "P/L acc",
    },
}
"""More numbers, each group a table of its own, where a plan asks for them (eval.on_dn, average)."""
IDENTITY = ("method", "seed", "run")


def summarise(rows: Sequence[Row], reference: str | None = None) -> dict[str, Any]:
    """Mean and spread of every number by method, and its paired difference to the reference (the first method)."""
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)
    base = reference or next(iter(by_method))
    return {
        "reference": base,
        "methods": {
            method: {name: _entry(name, own, by_method[base] if method != base else None) for name in _numbers(own)}
            for method, own in by_method.items()
        },
        "runs": list(rows),
    }


def _entry(name: str, rows: list[Row], base: list[Row] | None) -> dict[str, Any]:
    ours = {row["seed"]: row[name] for row in rows if name in row}
    entry: dict[str, Any] = spread(list(ours.values()))._asdict()
    if base is not None:
        difference = paired_difference(ours, {row["seed"]: row[name] for row in base if name in row})
        entry["difference"] = None if difference is None else difference._asdict()
    return entry


def _numbers(rows: list[Row]) -> list[str]:
    return [name for name in rows[0] if name not in IDENTITY]


Grid = list[list[str]]
"""A table as text: the names of its columns, then its rows."""


def row_of(method: str, seed: int, run: str, events: Sequence[Row]) -> Row | None:
    """Return a run as one flat row: label, seed, metrics by view after its last evaluation, costs; None without one."""
    judged = [event for event in events if event["event"] == "round" and event["metrics"]]
    if not judged:
        return None
    row: Row = {"method": method, "seed": seed, "run": run} | _flat(judged[-1]["metrics"])
    total: Row = summarise_costs(events)["total"]
    return row | _stopped(judged) | total


def _flat(views: Row) -> Row:
    return {
        f"{view} {name}" if column in ("value", "weighted") else f"{view} {name} {column}": value
        for view, metrics in views.items()
        for name, summary in metrics.items()
        for column, value in summary.items()
    }


def _stopped(judged: Sequence[Row]) -> Row:
    """Return the numbers of each kind of model at the round at which its mean NLL on d_n was lowest."""
    row: Row = {}
    for who in "GAP":
        known = [event for event in judged if f"{who}/D" in event["metrics"]]
        if known:
            best = min(known, key=lambda event: event["metrics"][f"{who}/D"]["nll"]["weighted"])
            own = {view: metrics for view, metrics in best["metrics"].items() if view.startswith(who)}
            row |= {f"{name}{STOPPED}": value for name, value in _flat(own).items()}
            row[f"{who} stop round"] = best["round"]
    return row


def caption(summary: dict[str, Any]) -> str:
    """Say what the cells of `spreads` are."""
    seeds = sorted({row["seed"] for row in summary["runs"]})
    if len(seeds) == 1:
        return f"seed {seeds[0]} alone: no spread is known"
    return f"mean ± standard deviation over {len(seeds)} seeds ({', '.join(map(str, seeds))})"


def spreads(summary: dict[str, Any], titles: Mapping[str, str] = HEADLINES) -> Grid:
    """Mean ± standard deviation over seeds of the headline numbers, or of others with their titles."""
    shown = _shown(summary, titles)
    rows = [
        [method, *(_spread_cell(name, entries.get(name)) for name in shown)]
        for method, entries in summary["methods"].items()
    ]
    return [["method", *(titles[name] for name in shown)], *rows]


def besides(summary: dict[str, Any]) -> dict[str, Grid]:
    """Return the tables beside the main one, by what they show; none if the plan asked for nothing more."""
    if not any(name.endswith(STOPPED) or name.startswith("A/") for name in _known(summary)):
        return {}
    return {title: spreads(summary, titles) for title, titles in BESIDES.items() if _shown(summary, titles)}


def difference_caption(summary: dict[str, Any]) -> str:
    """Say what the cells of `differences` are."""
    return f"difference to {summary['reference']}, paired by seed, 95 % bootstrap interval (* leaves out 0)"


def differences(summary: dict[str, Any]) -> Grid:
    """Paired differences to the reference with 95 % bootstrap intervals over seeds."""
    shown = [name for name in _shown(summary) if "/" in name]
    rows = [
        [method, *(_difference_cell(entries.get(name)) for name in shown)]
        for method, entries in summary["methods"].items()
        if method != summary["reference"]
    ]
    return [["method", *(HEADLINES[name] for name in shown)], *rows]


def as_table(title: str, grid: Grid) -> Table:
    """Show a grid in a terminal."""
    result = Table(title=escape(title))
    for number, name in enumerate(grid[0]):
        result.add_column(name, justify="right" if number else "left")
    for row in grid[1:]:
        result.add_row(*map(escape, row))
    return result


def as_csv(rows: Sequence[Row]) -> str:
    """One line per run."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _known(summary: dict[str, Any]) -> set[str]:
    return {name for entries in summary["methods"].values() for name in entries}


def _shown(summary: dict[str, Any], titles: Mapping[str, str] = HEADLINES) -> list[str]:
    known = _known(summary)
    return [name for name in titles if name in known]


def _spread_cell(name: str, entry: dict[str, Any] | None) -> str:
    if entry is None:
        return ""
    mean, std, _ = Spread(entry["mean"], entry["std"], entry["seeds"])
    scale, digits = (1e-6, 2) if name.startswith("bytes") else (1.0, 1 if name.endswith("seconds") else 4)
    text = f"{mean * scale:.{digits}f}"
    return text if std is None else f"{text} ± {std * scale:.{digits}f}"


def _difference_cell(entry: dict[str, Any] | None) -> str:
    if not entry or not entry.get("difference"):
        return ""
    found = Difference(**entry["difference"])
    star = "*" if found.leaves_out_zero else ""
    return f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]{star}"
