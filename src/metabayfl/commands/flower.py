"""metabayfl flower up, attach, register, run, resume, status, logs, down."""

import argparse
import json
import shutil
import sys
from pathlib import Path

from rich.table import Table

from metabayfl.commands.run import free_directory, observer, show
from metabayfl.commands.terminal import console
from metabayfl.config import RunConfig, read
from metabayfl.engine.flower.carrier import Waits
from metabayfl.engine.flower.deployment import CONNECTION, FILE, Deployment, DeploymentError
from metabayfl.engine.flower.operate import bring_up, follow, online_nodes, submit
from metabayfl.experiment import is_finished
from metabayfl.methods import create
from metabayfl.options import InputError
from metabayfl.progress import ProgressBar
from metabayfl.result import Result

LOG_LINES = 40


def up(options: argparse.Namespace) -> int:
    """Start a deployment on this host, or what has died of it."""
    if (options.dir / FILE).exists():
        deployment = Deployment.open(options.dir)
    else:
        deployment = Deployment.create(options.dir, options.nodes, options.tls, options.keys)
    bring_up(deployment)
    how = "TLS and node keys" if deployment.keys else "TLS" if deployment.tls else "no encryption"
    print(f"{deployment.nodes} nodes and a superlink at {deployment.address}, {how}: {deployment.path}")
    return 0


def attach(options: argparse.Namespace) -> int:
    """Note where a superlink is that others run."""
    deployment = Deployment.attach(options.dir, options.address, options.ca)
    print(f"attached to {deployment.address}: {deployment.path}")
    return 0


def register(options: argparse.Namespace) -> int:
    """Let nodes with these public keys in."""
    deployment = Deployment.open(options.dir)
    for key in options.keys:
        deployment.flwr("supernode", "register", str(key.absolute()), CONNECTION)
        print(f"registered {key}")
    return 0


def run(options: argparse.Namespace) -> int:
    """Carry out a config with the nodes of a deployment."""
    config: RunConfig = options.settings
    name = create(config.method).name
    options.out = options.out or free_directory(f"{options.config.stem}-{name}-{config.seed}")
    if (options.out / "run.json").exists():
        raise InputError(f"{options.out} holds a run: go on with `metabayfl flower resume {options.out}`")
    return _carry_out(config, options, resume=False)


def resume(options: argparse.Namespace) -> int:
    """Go on with a run whose server app has died."""
    options.out = options.run
    if is_finished(options.out):
        print(f"metabayfl: {options.out} is finished", file=sys.stderr)
        return show(Result(options.out), options)
    if not (options.out / "config.toml").exists():
        raise InputError(f"{options.out} is not a run directory with a config.toml")
    return _carry_out(read(options.out / "config.toml"), options, resume=True)


def _carry_out(config: RunConfig, options: argparse.Namespace, resume: bool) -> int:
    deployment = Deployment.open(options.dir)
    waits = Waits(**{name: getattr(options, name) for name in Waits.model_fields if hasattr(options, name)})
    number, report = submit(deployment, config, options.out, own=options.own, resume=resume, waits=waits)
    print(f"metabayfl: Flower's run {number}", file=sys.stderr)
    try:
        with ProgressBar(config.rounds, create(config.method).name) as bar:
            follow(deployment, number, options.out, report, observer(bar, options.out, options.track))
    except KeyboardInterrupt:
        deployment.flwr("stop", number, CONNECTION)
        raise
    return show(Result(options.out), options)


def status(options: argparse.Namespace) -> int:
    """Say what runs; exit code 1 if something does not."""
    deployment = Deployment.open(options.dir)
    alive = {name: deployment.is_alive(name) for name in deployment.names()}
    try:
        online = len(online_nodes(deployment))
    except DeploymentError:
        online = 0
    about = {"address": deployment.address, "tls": deployment.tls, "keys": deployment.keys, "online": online}
    if options.json:
        print(json.dumps(about | {"processes": alive}))
    else:
        table = Table("process", "pid", "state", title=f"{deployment.address}: {online} nodes online")
        for name, runs in alive.items():
            pid = str(deployment.processes[name].pid) if name in deployment.processes else ""
            table.add_row(name, pid, "runs" if runs else "does not run")
        console().print(table)
    return 0 if all(alive.values()) and online >= deployment.nodes else 1


def logs(options: argparse.Namespace) -> int:
    """Print the last lines of what the processes have written."""
    deployment = Deployment.open(options.dir)
    names = [options.process] if options.process else deployment.names()
    for name in names:
        path = deployment.path / "logs" / f"{name}.log"
        if not path.exists():
            raise InputError(f"no log of {name!r}; accepted: {', '.join(deployment.names())}")
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        print(f"== {name}", *lines[-LOG_LINES:], sep="\n")
    return 0


def down(options: argparse.Namespace) -> int:
    """End what `up` has started; the nodes' states and models stay, the rest of the directory goes."""
    deployment = Deployment.open(options.dir)
    deployment.end()
    for name in ("flwr", "keys", "logs", "runs"):
        shutil.rmtree(deployment.path / name)
    for path in (*deployment.path.glob("state.db*"), deployment.path / FILE):
        path.unlink()
    print(f"ended; the nodes' states and models stay in {Path(options.dir, 'nodes')}")
    return 0
