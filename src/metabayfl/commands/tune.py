"""metabayfl tune."""

import argparse
import json
from pathlib import Path

import tomli_w

from metabayfl import comparison
from metabayfl.commands.compare import carry_out, split_labels
from metabayfl.commands.terminal import console
from metabayfl.compare import collect, make_grid
from metabayfl.options import InputError
from metabayfl.tensorfile import write_bytes
from metabayfl.tuning import Score, candidates, choose, config_for, read_choices, score


def tune(options: argparse.Namespace) -> int:
    """Carry out what is missing of all combinations, and write down which is best for each method."""
    out = options.out or Path("runs", f"tune-{options.config.stem}")
    labels = split_labels(options.methods) or list(options.settings.methods)
    if not labels:
        raise InputError("nothing to tune: pass --methods a,b or give the config [methods.LABEL] sections")
    tried = candidates(options.settings, labels, read_choices(options.values))
    cells = make_grid(config_for(options.settings, tried), [one.name for one in tried], options.seeds, out)
    failures = carry_out(cells, options)
    scores = score(tried, collect(cells))
    best = choose(scores)
    chosen = {"methods": {label: found.candidate.values for label, found in best.items()}}
    write_bytes(out / "tuned.toml", tomli_w.dumps(chosen).encode())
    if options.json:
        print(json.dumps(chosen))
        return 1 if failures else 0
    _show(scores, best)
    print(f"chosen values, for `metabayfl compare --tuned`: {out / 'tuned.toml'}")
    return 1 if failures else 0


def _show(scores: list[Score], best: dict[str, Score]) -> None:
    header = ["method and values", "accuracy on d_n", "NLL on d_n", ""]
    rows = [
        [one.candidate.name, f"{one.accuracy:.4f}", f"{one.nll:.4f}", "chosen" if one in best.values() else ""]
        for one in scores
    ]
    console().print(comparison.as_table("what the clients' d_n say after the last round", [header, *rows]))
