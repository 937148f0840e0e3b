"""What `metabayfl flower` does with a deployment: bring it up or mend it, hand it a run, follow the run to its end."""

import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

from metabayfl.config import RunConfig, as_toml
from metabayfl.engine.flower.carrier import Waits
from metabayfl.engine.flower.deployment import APP, CONNECTION, Deployment, DeploymentError, wait_until
from metabayfl.engine.flower.keys import CA
from metabayfl.engine.local import Observer
from metabayfl.experiment import is_finished
from metabayfl.options import InputError
from metabayfl.store import RunDirectory
from metabayfl.tensorfile import write_bytes

READY_SECONDS = 180.0
LOOK_SECONDS, ASK_SECONDS = 1.0, 20.0
"""Between two looks at the log of a run, which costs nothing, and two questions to Flower, which cost a process."""
SILENT_SECONDS = 300.0
"""How long a superlink may be away while a run is followed."""


def bring_up(deployment: Deployment) -> None:
    """Start what does not run, and wait until every node is online; calling it again mends what has died."""
    if not deployment.nodes:
        raise InputError(f"{deployment.path} is attached to {deployment.address}, whose processes others run")
    deployment.start("superlink")
    wait_until("the superlink answers", READY_SECONDS, lambda: is_healthy(deployment))
    deployment.start("superexec")
    if deployment.keys:
        register_keys(deployment)
    wait_until("all nodes are online", READY_SECONDS, lambda: _nodes_are_up(deployment), pause_seconds=2.0)


def is_healthy(deployment: Deployment) -> bool:
    """Whether the superlink answers."""
    context = ssl.create_default_context(cafile=deployment.path / "keys" / CA) if deployment.tls else None
    url = f"{'https' if deployment.tls else 'http'}://{deployment.address}/health"
    try:
        with urllib.request.urlopen(url, timeout=5, context=context) as answer:  # noqa: S310 (loopback)
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def register_keys(deployment: Deployment) -> None:
    """Make the nodes' public keys known to the superlink, once."""
    done = deployment.path / "keys" / "registered"
    if not done.exists():
        for node in range(deployment.nodes):
            deployment.flwr("supernode", "register", f"{deployment.path}/keys/node{node}.pub", CONNECTION)
        done.touch()


def _nodes_are_up(deployment: Deployment) -> bool:
    """Start nodes that do not run: one with a key is refused while the superlink takes its last life for alive."""
    for name in deployment.names()[2:]:
        deployment.start(name)
    return len(online_nodes(deployment)) >= deployment.nodes and all(map(deployment.is_alive, deployment.names()))


def online_nodes(deployment: Deployment) -> list[str]:
    """Return Flower's ids of the nodes that are online."""
    nodes = deployment.flwr("supernode", "list", CONNECTION)["nodes"]
    return [node["node-id"] for node in nodes if node["status"] == "online"]


def submit(
    deployment: Deployment, config: RunConfig, out: Path, *, own: Path | None, resume: bool, waits: Waits
) -> tuple[str, Path]:
    """Hand a run to the superlink; returns Flower's id of it, and the file in which its server app reports failure."""
    place = deployment.path / "runs" / f"{time.time_ns()}"
    text, report = place.with_suffix(".toml"), place.with_suffix(".failure")
    write_bytes(text, tomli_w.dumps(as_toml(config)).encode())
    values: dict[str, Any] = {"config": str(text), "out": str(out.absolute()), "report": str(report), "resume": resume}
    values |= {"own": "" if own is None else str(own.absolute())}
    values |= {name.replace("_", "-"): float(value) for name, value in waits.model_dump().items()}
    settings = place.with_suffix(".run.toml")
    write_bytes(settings, tomli_w.dumps(values).encode())
    answer = deployment.flwr("run", str(APP), CONNECTION, "--run-config", str(settings))
    return str(answer["run-id"]), report


def follow(deployment: Deployment, run: str, out: Path, report: Path, observe: Observer) -> None:
    """Pass on the events of a run as they come, until it ends; a run that fails raises."""
    seen = 0
    statuses = _statuses(deployment, run, report)
    while True:
        events = list(RunDirectory(out).events())
        for event in events[seen:]:
            observe(event)
        seen = max(seen, len(events))
        status = "finished:completed" if is_finished(out) else next(statuses)
        if status == "finished:completed":
            return
        if status.startswith("finished"):
            raise failure(report, status)
        time.sleep(LOOK_SECONDS)


def _statuses(deployment: Deployment, run: str, report: Path) -> Iterator[str]:
    """What Flower says of a run, asked now and then; a superlink may be away for a while."""
    heard = asked = time.monotonic()
    while True:
        status = "running"
        if report.exists() or time.monotonic() - asked > ASK_SECONDS:
            try:
                status = status_of(deployment, run)
                heard = time.monotonic()
            except DeploymentError:
                if time.monotonic() - heard > SILENT_SECONDS:
                    raise
            asked = time.monotonic()
        yield status


def failure(report: Path, status: str) -> Exception:
    """Return why the server's app has failed, as it says itself, or that it said nothing."""
    if not report.exists():
        return DeploymentError(f"the run ended as {status}, and its server app could not say why")
    kind, _, text = report.read_text(encoding="utf-8").partition("\n")
    return InputError(text) if kind == InputError.__name__ else DeploymentError(text)


def status_of(deployment: Deployment, run: str) -> str:
    """Return what Flower says of a run: running, finished:completed, finished:failed."""
    return str(deployment.flwr("list", CONNECTION, "--run-id", run)["runs"][0]["status"])
