"""metabayfl data inspect, metabayfl data export."""

import argparse
import json
from pathlib import Path

from metabayfl.commands.terminal import console
from metabayfl.data.holdings import Holdings
from metabayfl.data.sources import load
from metabayfl.survey import inspect as inspect_config
from metabayfl.survey import survey_table


def inspect(options: argparse.Namespace) -> int:
    """Print and draw who holds what."""
    out = options.out or Path("runs", f"data-{options.config.stem}")
    found, written = inspect_config(options.settings, out)
    if options.json:
        rows = [row | {"counts": counts} for row, counts in zip(found.rows(), found.counts.tolist(), strict=True)]
        print(json.dumps({"title": found.title, "classes": found.classes, "clients": rows}))
        return 0
    console().print(survey_table(found))
    print("written: " + ", ".join(map(str, written)))
    return 0


def export(options: argparse.Namespace) -> int:
    """Write which training samples each client holds."""
    config = options.settings
    source = load(config.data)
    holdings = Holdings.of(config.data, source, config.seed)
    holdings.write(options.out, config.data, source, config.seed)
    held = sum(map(len, holdings.clients))
    print(f"{options.out}: {held:,} of {len(source.x):,} training samples, {len(holdings.clients)} clients")
    return 0
