"""What a person sees of a run: a bar with time left and metrics while it goes, a table at its end. No torch here."""

import sys
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

Event = dict[str, Any]
WIDE = 130
"""Characters that a table with all summaries needs."""


class ProgressBar:
    """Follows the events of a run; quiet when nobody looks at a terminal, except for what went wrong."""

    def __init__(self, rounds: int, title: str) -> None:
        self.console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task(title, total=rounds, metrics="")

    def __enter__(self) -> Self:
        """Show the bar."""
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the bar as it is."""
        self.progress.stop()

    def __call__(self, event: Event) -> None:
        """Take notice of an event."""
        if event["event"] == "round":
            self.progress.update(self.task, completed=event["round"])
            if event["metrics"]:
                self.progress.update(self.task, metrics=headline(event["metrics"]))
        elif event["fault"]:
            where = f"round {event['round']}, client {event['client']}"
            print(f"metabayfl: {where}: {event['fault']}", file=sys.stderr)


def headline(metrics: dict[str, Any]) -> str:
    """Return the most telling metric of each view in a few characters."""
    name = "accuracy" if any("accuracy" in values for values in metrics.values()) else "rmse"
    found = {view: values[name] for view, values in metrics.items() if name in values and view != "G/L"}
    return " ".join([name, *(f"{view} {next(iter(summary.values())):.3f}" for view, summary in found.items())])


def metrics_table(metrics: dict[str, Any], width: int = WIDE) -> Table:
    """Return the metrics of a round: a row for each, a column for each view and, if there is room, each summary."""
    columns = [(view, column) for view, values in metrics.items() for column in next(iter(values.values()))]
    if width < WIDE:
        columns = [(view, column) for view, column in columns if column in ("value", "weighted", "worst")]
    table = Table(title="G: global model, P: personal; /G: common test set, /L: the clients' own")
    table.add_column("metric")
    for view, column in columns:
        table.add_column(view if column == "value" else f"{view} {column}", justify="right")
    names = dict.fromkeys(name for values in metrics.values() for name in values)
    for name in names:
        table.add_row(name, *(_cell(metrics[view].get(name, {}), column) for view, column in columns))
    return table


def _cell(summary: dict[str, float], column: str) -> str:
    return f"{summary[column]:.4f}" if column in summary else ""
