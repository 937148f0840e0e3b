"""One self-contained HTML page about runs."""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from metabayfl import comparison
from metabayfl._version import __version__
from metabayfl.comparison import Grid
from metabayfl.report.notes import notes
from metabayfl.report.runs import Run, by_label


def render(runs: Sequence[Run]) -> str:
    """Return the page; the same runs give the same text."""
    from metabayfl.report.sections import sections  # matplotlib, which only a page needs

    groups = by_label(runs)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("metabayfl.report").joinpath("template.html").read_text(encoding="utf-8"))
    return template.render(
        version=__version__,
        title=", ".join(groups) if len(groups) <= 6 else f"{len(groups)} methods",
        facts=_facts(runs),
        notes=notes(groups),
        tables=_tables(runs),
        sections=sections(groups),
        runs=_run_grid(runs),
        configs={label: group[0].config or _as_json(group[0].about) for label, group in groups.items()},
        environment=_environment(runs),
    )


def summary_of(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return the numbers of a table; None before the first evaluation."""
    rows = [row for run in runs if (row := run.row()) is not None]
    return comparison.summarise(rows) if rows else None


def _tables(runs: Sequence[Run]) -> list[tuple[str, Grid]]:
    summary = summary_of(runs)
    if summary is None:
        return []
    tables = [(comparison.caption(summary), comparison.spreads(summary))]
    if len(summary["methods"]) > 1:
        tables.append((comparison.difference_caption(summary), comparison.differences(summary)))
    return tables


def _facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return the size of it all, at a glance."""
    counts = {"run": {len(runs)}, "seed": {len({run.seed for run in runs})}}
    counts |= {name: {int(run.about[f"{name}s"]) for run in runs} for name in ("client", "round")}
    return [
        (name if found == {1} else f"{name}s", " / ".join(map(str, sorted(found)))) for name, found in counts.items()
    ]


def _run_grid(runs: Sequence[Run]) -> Grid:
    rows = [
        [
            run.label,
            str(run.seed),
            "finished" if run.finished else f"round {run.last_round} of {run.about['rounds']}",
            str(run.environment.get("data_hash", "not recorded")),
            str(run.path),
        ]
        for run in runs
    ]
    return [["method", "seed", "state", "data hash", "directory"], *rows]


def _environment(runs: Sequence[Run]) -> Grid:
    """What the numbers depend on besides the configs; where runs differ, all that occurs."""
    flat = [_flat(run.environment) for run in runs]
    names = [name for name in dict.fromkeys(n for f in flat for n in f) if name not in ("seed", "data_hash")]
    return [["what", "value"], *([n, " | ".join(dict.fromkeys(f.get(n, "not recorded") for f in flat))] for n in names)]


def _flat(values: Mapping[str, Any], start: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in values.items():
        found |= _flat(value, f"{start}{key} ") if isinstance(value, Mapping) else {f"{start}{key}": str(value)}
    return found


def _as_json(about: Mapping[str, Any]) -> str:
    return json.dumps(about, indent=2, sort_keys=True)
