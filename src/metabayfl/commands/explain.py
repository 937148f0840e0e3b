"""metabayfl explain."""

import argparse

from metabayfl.commands.terminal import console
from metabayfl.comparison import as_table
from metabayfl.explanation import explain as in_words
from metabayfl.explanation import find_event, trials_grid, warnings_of
from metabayfl.report.runs import read_run


def explain(options: argparse.Namespace) -> int:
    """Say what a client tried in a round, what it chose, and why."""
    run = read_run(options.run)
    event = find_event(run.events, options.client, options.round, int(run.about["clients"]))
    print(f"{run.label}, seed {run.seed}: client {event['client']}, round {event['round']} of {run.about['rounds']}")
    grid = trials_grid(event, run.about)
    if len(grid) > 1:
        console().print(as_table("what was tried", grid))
    print("\n".join(in_words(event, run.about)))
    for warning in warnings_of(event, run.about):
        print(f"Warning: {warning}.")
    return 0
