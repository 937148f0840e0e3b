"""The command line: what can be said. What it does is in commands/, imported only when called: help needs no torch."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from metabayfl._version import __version__
from metabayfl.commands.terminal import seed_list, worker_count
from metabayfl.config import RunConfig, read, read_comparison
from metabayfl.interruption import ctrl_c
from metabayfl.options import InputError

DEMO = Path(__file__).with_name("demo.toml")
Handler = Callable[[argparse.Namespace], int]
if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; bad input is one line and exit code 2."""
    sys.path.insert(0, os.getcwd())  # models named as module:callable may lie where the user stands
    options = parser().parse_args(arguments)
    with ctrl_c.noted():
        try:
            _check_what_was_typed(options)
            handler = _handler(options.handler)
            ctrl_c.heed()
            return handler(options)
        except (Exception, KeyboardInterrupt) as error:
            return _tell(error, options)


def _tell(error: BaseException, options: argparse.Namespace) -> int:
    """Say in one line what has ended a command, and return its exit code; what is our mistake is raised again."""
    if isinstance(error, KeyboardInterrupt) or ctrl_c.pressed:
        return _fail("interrupted", 130, options)
    if isinstance(error, InputError):
        return _fail(str(error), 2)
    if isinstance(error, (RuntimeError, OSError)) and type(error) is not RuntimeError:
        return _fail(str(error), 1, options)
    raise error


def _check_what_was_typed(options: argparse.Namespace) -> None:
    """Read the config and the numbers first: a mistake is told at once, before torch is imported."""
    if hasattr(options, "workers"):
        options.workers = worker_count(options.workers)
    if hasattr(options, "seeds"):
        options.seeds = seed_list(options.seeds)
    if getattr(options, "data_dir", None) is not None:
        if not options.data_dir.is_dir():
            raise InputError(f"--data-dir {options.data_dir}: there is no such folder")
        os.environ["METABAYFL_DATA"] = str(options.data_dir.resolve())  # worker processes see it too
    if getattr(options, "verify", False):
        options.set.append("data.verify=true")
    if hasattr(options, "reader"):
        options.settings = options.reader(options.config, options.set)


def _handler(name: str) -> Handler:
    module, _, function = name.partition(":")
    found: Handler = getattr(import_module(f"metabayfl.commands.{module}"), function)
    return found


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
    for add in (
        _add_demo,
        _add_run,
        _add_resume,
        _add_compare,
        _add_tune,
        _add_report,
        _add_explain,
        _add_cost,
        _add_data,
        _add_flower,
        _add_methods,
        _add_check,
    ):
        add(commands)
    return top


def _add_demo(commands: "Commands") -> None:
    demo = commands.add_parser("demo", help="the first minute: five methods on digits, little and noisy data, 3 seeds")
    demo.add_argument(
        "--out", type=Path, default=Path("runs", "demo"), help="directory of the runs (default: runs/demo)"
    )
    _add_running(demo)
    chosen = {
        "config": DEMO,
        "set": [],
        "methods": "",
        "seeds": "0,1,2",
        "plan": False,
        "parallel": "runs",
        "allow_leak": False,
        "tuned": None,
        "record": None,
    }
    demo.set_defaults(reader=read_comparison, handler="compare:compare", **chosen)


def _add_run(commands: "Commands") -> None:
    run = commands.add_parser("run", help="train one method with one seed, as a config says")
    _add_config(run)
    run.add_argument("--out", type=Path, help="directory of the run (default: a new one in runs/)")
    _add_running(run)
    run.set_defaults(handler="run:run")


def _add_resume(commands: "Commands") -> None:
    resume = commands.add_parser("resume", help="go on with an interrupted run")
    resume.add_argument("run", type=Path, help="directory of the run")
    _add_data_dir(resume)
    _add_running(resume)
    resume.set_defaults(handler="run:resume")


def _add_compare(commands: "Commands") -> None:
    compare = commands.add_parser("compare", help="several methods and seeds on the same data, with intervals")
    _add_config(compare, read_comparison)
    _add_grid(compare, "compare", seeds="0,1,2")
    tuned = "values that `metabayfl tune` chose; they come before those of [methods.LABEL]"
    compare.add_argument("--tuned", type=Path, metavar="FILE", help=tuned)
    record = "append a line for each run that is carried out: date, commit, config hash; so that tries are counted"
    compare.add_argument("--record", type=Path, metavar="FILE", help=record)
    compare.add_argument("--allow-leak", action="store_true", help="accept methods that see test data, for study")
    compare.add_argument("--plan", action="store_true", help="only estimate time and bytes")
    _add_running(compare)
    compare.set_defaults(handler="compare:compare")


def _add_tune(commands: "Commands") -> None:
    tune = commands.add_parser("tune", help="find the best value of an option for each method, by its accuracy on d_n")
    _add_config(tune, read_comparison)
    _add_grid(tune, "tune", seeds="100")
    values = "an option and its candidates, such as rate=1e-3,1e-2,1e-1; all combinations of several are tried"
    tune.add_argument("--values", action="append", required=True, metavar="KEY=A,B,C", help=values)
    _add_running(tune)
    tune.set_defaults(handler="tune:tune", allow_leak=False, record=None)


def _add_grid(command: argparse.ArgumentParser, verb: str, seeds: str) -> None:
    command.add_argument("--methods", default="", help="names or labels: fedavg,bayfl (default: all [methods.LABEL])")
    command.add_argument("--seeds", default=seeds, help=f"such as 0,1,2 or 0-4 (default: {seeds})")
    command.add_argument("--out", type=Path, help=f"directory of the runs (default: runs/{verb}-CONFIG)")
    command.add_argument("--parallel", choices=["runs", "clients"], default="runs", help="what the workers share")


def _add_report(commands: "Commands") -> None:
    report = commands.add_parser("report", help="curves, calibration, choices and the table of runs as one HTML page")
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directories of runs or of a comparison")
    form = "a page, or the table: Markdown, LaTeX, or CSV with a line for each run (default: html)"
    report.add_argument("--format", choices=["html", "md", "latex", "csv"], default="html", help=form)
    where = "file, or - for standard output (default: report.html beside the runs; tables are printed)"
    report.add_argument("--out", type=Path, metavar="FILE", help=where)
    report.set_defaults(handler="report:report")


def _add_explain(commands: "Commands") -> None:
    explain = commands.add_parser("explain", help="what a client tried in a round, what it chose, and why")
    explain.add_argument("run", type=Path, help="directory of the run")
    explain.add_argument("--client", type=int, required=True, help="number of the client, counted from 0")
    explain.add_argument("--round", type=int, help="round, counted from 1 (default: the client's last)")
    explain.set_defaults(handler="explain:explain")


def _add_cost(commands: "Commands") -> None:
    cost = commands.add_parser("cost", help="estimate bytes, seconds and memory of every method before training")
    _add_config(cost)
    cost.add_argument("--device", required=True, help="raspberry-pi-4, phone, or a profile of your own: FILE.toml")
    cost.add_argument("--link", required=True, help="bandwidth and latency of a client, such as 10Mbit/50ms")
    _add_json(cost)
    cost.set_defaults(handler="look:cost")


def _add_data(commands: "Commands") -> None:
    data = commands.add_parser("data", help="look at the data of a config: who holds what")
    actions = data.add_subparsers(required=True, metavar="ACTION")
    inspect = actions.add_parser("inspect", help="print and draw who holds what, and some images as clients have them")
    _add_config(inspect)
    inspect.add_argument("--out", type=Path, help="directory of the pictures (default: runs/data-CONFIG)")
    _add_json(inspect)
    inspect.set_defaults(handler="data:inspect")
    export = actions.add_parser(
        "export", help="write which training samples each client holds, for data.partition_file"
    )
    _add_config(export)
    export.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write, such as parts.json")
    export.set_defaults(handler="data:export")


def _add_flower(commands: "Commands") -> None:
    flower = commands.add_parser("flower", help="the same methods across machines (extra `flower`); docs/deployment.md")
    actions = flower.add_subparsers(required=True, metavar="ACTION")
    up = actions.add_parser("up", help="start a superlink and nodes on this host, or what has died of them")
    up.add_argument("--nodes", type=int, default=3, help="clients, each a node of its own (default: 3)")
    up.add_argument("--tls", action="store_true", help="encrypt: certificates are made for you")
    up.add_argument("--keys", action="store_true", help="let only known nodes in: keys are made for you; implies --tls")
    attach = actions.add_parser("attach", help="use a superlink that others run")
    attach.add_argument("address", help="HOST:PORT of the superlink")
    attach.add_argument("--ca", type=Path, help="certificate of the authority that signed the superlink's")
    register = actions.add_parser("register", help="let nodes in by their public keys")
    register.add_argument("keys", type=Path, nargs="+", help="files such as node0.pub")
    run = actions.add_parser("run", help="carry out a config with the nodes")
    _add_config(run)
    run.add_argument("--out", type=Path, help="directory of the run (default: a new one in runs/)")
    resume = actions.add_parser("resume", help="go on with a run whose server has died")
    resume.add_argument("run", type=Path, help="directory of the run")
    for command in (run, resume):
        _add_waits(command)
    status = actions.add_parser("status", help="say what runs; exit code 1 if something does not")
    _add_json(status)
    logs = actions.add_parser("logs", help="print the last lines of the processes' logs")
    logs.add_argument("process", nargs="?", help="superlink, superexec or nodeN (default: all)")
    actions.add_parser("down", help="end what `up` has started")
    for name, command in actions.choices.items():
        command.add_argument("--dir", type=Path, default=Path(".metabayfl-flower"), help="the deployment's directory")
        command.set_defaults(handler=f"flower:{name}")


def _add_waits(command: argparse.ArgumentParser) -> None:
    command.add_argument("--own", type=Path, help="the server's npz file: test_x and test_y, unlabelled")
    waits = {
        "join": (300, "for all clients before the first round"),
        "reply": (3600, "for the answers of a round"),
        "rejoin": (120, "for a client that is not connected, before a round goes on without it"),
    }
    for name, (seconds, what) in waits.items():
        text = f"longest wait {what} (default: {seconds})"
        command.add_argument(f"--{name}-seconds", type=float, default=seconds, metavar="S", help=text)
    command.add_argument("--track", action="store_true", help="write curves for TensorBoard (extra `track`)")
    _add_json(command)


def _add_methods(commands: "Commands") -> None:
    methods = commands.add_parser("methods", help="list the methods, or the options of one")
    methods.add_argument("name", nargs="?", help="method whose options are wanted")
    methods.set_defaults(handler="look:methods")


def _add_check(commands: "Commands") -> None:
    check = commands.add_parser("check", help="say whether a model can be federated and made Bayesian")
    check.add_argument("model", help="module:name of a class, a function that builds a model, or a model")
    check.set_defaults(handler="look:check")


def _add_config(command: argparse.ArgumentParser, reader: Callable[..., RunConfig] = read) -> None:
    command.add_argument("config", type=Path, help="TOML file, such as configs/demo.toml")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the config")
    command.add_argument("--verify", action="store_true", help="refuse data files without the official checksums")
    _add_data_dir(command)
    command.set_defaults(reader=reader)


def _add_data_dir(command: argparse.ArgumentParser) -> None:
    command.add_argument("--data-dir", type=Path, metavar="DIR", help="folder of the datasets (else METABAYFL_DATA)")


def _add_running(command: argparse.ArgumentParser) -> None:
    command.add_argument("--workers", default="auto", help="processes: a number, or auto for one per core")
    command.add_argument("--track", action="store_true", help="write curves for TensorBoard (extra `track`)")
    _add_json(command)


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print the result as JSON")
