"""metabayfl compare."""

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.table import Table

from metabayfl import comparison
from metabayfl.commands.report import write_page
from metabayfl.commands.terminal import console
from metabayfl.compare import Cell, Estimate, collect, estimate, make_grid, run_cells, with_tuned
from metabayfl.config import read_values
from metabayfl.data.sources import load
from metabayfl.fingerprint import config_hash, source_hash
from metabayfl.options import InputError
from metabayfl.tensorfile import write_bytes


def compare(options: argparse.Namespace) -> int:
    """Carry out what is missing of a grid of runs, and say what came out."""
    out = options.out or Path("runs", f"compare-{options.config.stem}")
    labels = split_labels(options.methods)
    tuned = read_values(options.tuned) if options.tuned else {}
    cells = make_grid(with_tuned(options.settings, labels, tuned), labels, options.seeds, out, options.allow_leak)
    if options.plan:
        return _plan(cells, options.workers, options.json)
    if options.record:
        _append(options.record, "")  # what cannot be recorded is not run
    failures = carry_out(cells, options)
    _report(cells, out, options.json)
    return 1 if failures else 0


def split_labels(text: str) -> list[str]:
    """Read a list of labels."""
    return [label.strip() for label in text.split(",") if label.strip()]


def carry_out(cells: Sequence[Cell], options: argparse.Namespace) -> int:
    """Carry out the runs that are not finished; returns how many failed."""
    processes, workers = (options.workers, 1) if options.parallel == "runs" else (1, options.workers)
    todo = [cell for cell in cells if not cell.finished]
    if todo:
        load(options.settings.data)  # what is wrong with the data is told once, not by every run
    print(f"metabayfl: {len(cells) - len(todo)} of {len(cells)} runs are done already", file=sys.stderr)
    failures = 0
    for number, (cell, failure) in enumerate(run_cells(todo, processes, workers), start=1):
        what = f"{cell.label}, seed {cell.config.seed}: {failure or 'done'}"
        print(f"metabayfl: {number}/{len(todo)} {what}", file=sys.stderr)
        failures += bool(failure)
        if options.record and not failure:
            _record(cell, options.record)
    return failures


def _record(cell: Cell, path: Path) -> None:
    """Append what was run, and when: whoever reads the file sees how often a table was made anew."""
    environment = json.loads((cell.path / "env.json").read_text(encoding="utf-8"))
    line = {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "method": cell.label,
        "seed": cell.config.seed,
        "on": cell.config.eval.on,
        "commit": environment["git_commit"],
        "config": config_hash(cell.config),
        "sources": source_hash(cell.config),
    }
    _append(path, json.dumps(line) + "\n")


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"--record {path}: {error.strerror}; a file in a folder that exists is accepted") from None


def _report(cells: Sequence[Cell], out: Path, as_json: bool) -> None:
    """Write the result as JSON and CSV beside the runs, and print it."""
    rows = collect(cells)
    if not rows:
        return
    begun = [cell.path for cell in cells if (cell.path / "run.json").exists()]
    done = {row["run"] for row in rows}
    summary = comparison.summarise(rows) | {"unfinished": [path.name for path in begun if path.name not in done]}
    text = json.dumps(summary, indent=2)
    write_bytes(out / "compare.json", text.encode())
    write_bytes(out / "compare.csv", comparison.as_csv(rows).encode())
    has_page = write_page(begun, out / "report.html")
    if as_json:
        print(text)
        return
    console().print(comparison.as_table(comparison.caption(summary), comparison.spreads(summary)))
    for title, grid in comparison.besides(summary).items():
        console().print(comparison.as_table(title, grid))
    if len(summary["methods"]) > 1:
        title = comparison.difference_caption(summary)
        console().print(comparison.as_table(title, comparison.differences(summary)))
    print(f"runs, compare.json and compare.csv: {out}")
    if has_page:
        print(f"report: {out / 'report.html'}")


def _plan(cells: Sequence[Cell], workers: int, as_json: bool) -> int:
    """Print what is left to do."""
    estimates = estimate(cells)
    if as_json:
        print(json.dumps([vars(found) for found in estimates]))
        return 0
    console().print(plan_table(estimates, workers))
    return 0


def plan_table(estimates: Sequence[Estimate], workers: int) -> Table:
    """Show what is left to do."""
    columns = ("method", "runs left", "minutes each", "GB sent each")
    table = Table(*columns, title="estimated from one round of each method")
    for found in estimates:
        minutes, gigabytes = found.seconds / found.runs / 60, found.bytes / found.runs / 1e9
        table.add_row(found.label, str(found.runs), f"{minutes:.2f}", f"{gigabytes:.3f}")
    hours = sum(found.seconds for found in estimates) / 3600
    table.caption = f"{hours:.2f} core hours in all, about {hours / workers:.2f} hours with {workers} workers"
    return table
