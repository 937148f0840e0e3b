"""The table of a report for a text or a paper: Markdown and LaTeX."""

import re
from collections.abc import Sequence
from typing import Any

from metabayfl.comparison import caption, spreads

LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}
WHEN = "numbers after the last round, no round or seed chosen by its result"


def as_markdown(summary: dict[str, Any]) -> str:
    """Return mean ± standard deviation as a Markdown table."""
    header, *rows = [[_markdown(cell) for cell in row] for row in spreads(summary)]
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{text}\n\n{_markdown(caption(summary))}; {WHEN}\n"


def as_latex(summary: dict[str, Any]) -> str:
    """Return mean ± standard deviation as a LaTeX table for the package booktabs."""
    header, *rows = [_latex_row(row) for row in spreads(summary)]
    columns = "l" + "r" * (len(spreads(summary)[0]) - 1)
    lines = [f"% {_latex(caption(summary))}; {WHEN}", f"\\begin{{tabular}}{{{columns}}}", r"\toprule", header]
    return "\n".join([*lines, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}", ""])


def _markdown(text: str) -> str:
    """Escape what would be a sign of Markdown or HTML."""
    return re.sub(r"([\\`*_|\[\]<>~#&])", r"\\\1", _one_line(text))


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(_latex, cells)) + r" \\"


def _latex(text: str) -> str:
    return "".join(LATEX.get(sign, sign) for sign in _one_line(text))


def _one_line(text: str) -> str:
    return " ".join(text.split())
