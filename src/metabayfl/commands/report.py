"""metabayfl report."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from metabayfl import comparison
from metabayfl.options import InputError
from metabayfl.report.page import render, summary_of
from metabayfl.report.runs import Run, read_runs
from metabayfl.report.tables import as_latex, as_markdown
from metabayfl.tensorfile import write_bytes


def report(options: argparse.Namespace) -> int:
    """Write what runs say: a page, or a table."""
    is_page = options.format == "html"
    out = options.out or (default_path(options.runs) if is_page else Path("-"))
    if out.is_dir():
        raise InputError(f"--out {out} is a directory: give the name of a file, or - for standard output")
    runs = read_runs(options.runs)
    text = render(runs) if is_page else text_of(runs, options.format)
    if str(out) == "-":
        sys.stdout.write(text)
    else:
        write_bytes(out, text.encode())
        print(f"report: {out}")
    return 0


def text_of(runs: Sequence[Run], form: str) -> str:
    """Return the table of runs: `md`, `latex`, or `csv` with a line for each run."""
    summary = summary_of(runs)
    if summary is None:
        raise InputError(f"{runs[0].path} has no evaluated round yet: there is nothing for a table")
    if form == "csv":
        return comparison.as_csv(summary["runs"])
    return as_markdown(summary) if form == "md" else as_latex(summary)


def default_path(paths: Sequence[Path]) -> Path:
    """Return where the page goes: into the one directory that is meant, or here if there are several."""
    return paths[0] / "report.html" if len(paths) == 1 else Path("report.html")


def write_page(paths: Sequence[Path], out: Path) -> bool:
    """Write the page of a comparison; whatever is wrong with it must not take the comparison along."""
    try:
        write_bytes(out, render(read_runs(paths)).encode())
    except Exception as error:  # the runs and their numbers are on disk already
        print(f"metabayfl: no report: {type(error).__name__}: {error}", file=sys.stderr)
        return False
    return True
