"""metabayfl run, metabayfl resume."""

import argparse
import json
import os
import sys
from pathlib import Path

from metabayfl.commands.terminal import console
from metabayfl.config import RunConfig
from metabayfl.data.sources.files import VARIABLE, data_folder
from metabayfl.diagnosis import diagnose
from metabayfl.engine.local import Observer
from metabayfl.experiment import Experiment, is_finished
from metabayfl.experiment import resume as resume_run
from metabayfl.progress import ProgressBar, metrics_table
from metabayfl.result import Result
from metabayfl.store import Event, RunDirectory
from metabayfl.track import TensorBoard


def run(options: argparse.Namespace) -> int:
    """Train one method with one seed."""
    config: RunConfig = options.settings
    experiment = Experiment.of(config)
    name = experiment.method.name
    options.out = options.out or free_directory(f"{options.config.stem}-{name}-{config.seed}")
    with ProgressBar(config.rounds, name) as bar:
        result = experiment.run(options.out, options.workers, observer(bar, options.out, options.track))
    return show(result, options)


def resume(options: argparse.Namespace) -> int:
    """Go on with an interrupted run."""
    if is_finished(options.run):
        print(f"metabayfl: {options.run} is finished", file=sys.stderr)
    about = RunDirectory(options.run).description() if (options.run / "run.json").exists() else {}
    use_remembered_folder(options.run)
    with ProgressBar(about.get("rounds", 0), about.get("method", {}).get("name", "")) as bar:
        result = resume_run(options.run, options.workers, observer(bar, options.run, options.track))
    return show(result, options)


def use_remembered_folder(run: Path) -> None:
    """Read data from where the run found them, unless the user names a folder."""
    remembered = RunDirectory(run).environment().get("data_folder") if (run / "env.json").exists() else None
    if data_folder() is None and remembered:
        os.environ[VARIABLE] = remembered


def free_directory(stem: str) -> Path:
    """Return a name in runs/ that is not taken."""
    names = (Path("runs", stem if number == 1 else f"{stem}-{number}") for number in range(1, 10**6))
    return next(path for path in names if not path.exists())


def observer(bar: ProgressBar, out: Path, track: bool) -> Observer:
    """Return who follows the run: the bar, and TensorBoard if it is wanted."""
    if not track:
        return bar
    curves = TensorBoard(out.with_name(f"{out.name}-tensorboard"))

    def both(event: Event) -> None:
        bar(event)
        curves(event)

    return both


def show(result: Result, options: argparse.Namespace) -> int:
    """Print the metrics of a finished run."""
    path = result.directory.path
    for found in diagnose(result.events, result.method.model_dump()):
        print(f"metabayfl: warning: {found}", file=sys.stderr)
    if options.json:
        about = {"run": str(path), "method": result.method.name, "seed": result.seed}
        print(json.dumps(about | {"metrics": result.metrics}))
        return 0
    screen = console()
    screen.print(metrics_table(result.metrics, screen.width))
    print(f"run: {path}")
    return 0
