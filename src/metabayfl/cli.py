"""The command line. Torch is imported only by the commands that need it."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from metabayfl._version import __version__
from metabayfl.options import InputError

if TYPE_CHECKING:
    from metabayfl.result import Result

Handler = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; bad input is one line and exit code 2."""
    sys.path.insert(0, os.getcwd())  # models named as module:callable may lie where the user stands
    options = parser().parse_args(arguments)
    handler: Handler = options.handler
    try:
        return handler(options)
    except InputError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130, options)
    except (RuntimeError, OSError) as error:
        if type(error) is RuntimeError:
            raise
        return _fail(str(error), 1, options)


def _fail(message: str, code: int, options: argparse.Namespace | None = None) -> int:
    run = getattr(options, "out", None) or getattr(options, "run", None)
    hint = f"; go on with: metabayfl resume {run}" if run is not None and Path(run, "config.toml").exists() else ""
    print(f"metabayfl: {message}{hint}", file=sys.stderr)
    return code


def parser() -> argparse.ArgumentParser:
    """Describe the commands."""
    top = argparse.ArgumentParser(prog="metabayfl", description="Federated learning with Bayesian neural networks.")
    top.add_argument("--version", action="version", version=f"metabayfl {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="train one method with one seed, as a config says")
    run.add_argument("config", type=Path, help="TOML file, such as configs/demo.toml")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the config")
    run.add_argument("--out", type=Path, help="directory of the run (default: a new one in runs/)")
    _add_running(run)
    run.set_defaults(handler=_run)

    resume = commands.add_parser("resume", help="go on with an interrupted run")
    resume.add_argument("run", type=Path, help="directory of the run")
    _add_running(resume)
    resume.set_defaults(handler=_resume)

    methods = commands.add_parser("methods", help="list the methods, or the options of one")
    methods.add_argument("name", nargs="?", help="method whose options are wanted")
    methods.set_defaults(handler=_methods)

    cost = commands.add_parser("cost", help="estimate bytes, seconds and memory of every method before training")
    cost.add_argument("config", type=Path, help="TOML file, such as configs/demo.toml")
    cost.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the config")
    cost.add_argument("--device", required=True, help="raspberry-pi-4, phone, or a profile of your own: FILE.toml")
    cost.add_argument("--link", required=True, help="bandwidth and latency of a client, such as 10Mbit/50ms")
    cost.add_argument("--json", action="store_true", help="print the result as JSON")
    cost.set_defaults(handler=_cost)

    check = commands.add_parser("check", help="say whether a model can be federated and made Bayesian")
    check.add_argument("model", help="module:name of a class, a function that builds a model, or a model")
    check.set_defaults(handler=_check)
    return top


def _add_running(command: argparse.ArgumentParser) -> None:
    command.add_argument("--workers", default="auto", help="processes: a number, or auto for one per core")
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def worker_count(text: str) -> int:
    """Read the value of --workers."""
    if text == "auto":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--workers {text!r}: a number from 1, or auto, is accepted")
    return int(text)


def free_directory(stem: str) -> Path:
    """Return a name in runs/ that is not taken."""
    names = (Path("runs", stem if number == 1 else f"{stem}-{number}") for number in range(1, 10**6))
    return next(path for path in names if not path.exists())


def _run(options: argparse.Namespace) -> int:
    from metabayfl.config import read

    config = read(options.config, options.set)
    workers = worker_count(options.workers)
    from metabayfl.experiment import Experiment
    from metabayfl.progress import ProgressBar

    experiment = Experiment.of(config)
    name = experiment.method.name
    options.out = options.out or free_directory(f"{options.config.stem}-{name}-{config.seed}")
    with ProgressBar(config.rounds, name) as bar:
        result = experiment.run(options.out, workers, bar)
    return _show(result, options)


def _resume(options: argparse.Namespace) -> int:
    workers = worker_count(options.workers)
    from metabayfl.experiment import is_finished, resume
    from metabayfl.progress import ProgressBar
    from metabayfl.store import RunDirectory

    if is_finished(options.run):
        print(f"metabayfl: {options.run} is finished", file=sys.stderr)
    about = RunDirectory(options.run).description() if (options.run / "run.json").exists() else {}
    with ProgressBar(about.get("rounds", 0), about.get("method", {}).get("name", "")) as bar:
        result = resume(options.run, workers, bar)
    return _show(result, options)


def _show(result: "Result", options: argparse.Namespace) -> int:
    path = result.directory.path
    if options.json:
        about = {"run": str(path), "method": result.method.name, "seed": result.seed}
        print(json.dumps(about | {"metrics": result.metrics}))
        return 0
    from rich.console import Console

    from metabayfl.progress import metrics_table

    Console(width=None if sys.stdout.isatty() else 160).print(metrics_table(result.metrics))
    print(f"run: {path}")
    return 0


def _methods(options: argparse.Namespace) -> int:
    from metabayfl.listing import print_method, print_methods

    if options.name:
        print_method(options.name)
    else:
        print_methods()
    return 0


def _cost(options: argparse.Namespace) -> int:
    from metabayfl.config import read

    config = read(options.config, options.set)
    from metabayfl.cost import estimate, estimate_table, parse_link, read_device

    found = estimate(config, read_device(options.device), parse_link(options.link))
    if options.json:
        print(json.dumps(found.model_dump()))
        return 0
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 160).print(estimate_table(found))
    return 0


def _check(options: argparse.Namespace) -> int:
    from metabayfl.check import check
    from metabayfl.models import load_model

    report = check(load_model(options.model))
    print(f"{options.model} {report}")
    return 0 if report.ok else 1
