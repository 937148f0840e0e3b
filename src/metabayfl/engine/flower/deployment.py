"""Flower's processes on this host: a superlink, its superexec, and a node for each client; started, mended, ended."""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metabayfl.engine.flower.keys import CA, CERTIFICATE, KEY, make_certificates, make_node_key, write_secret
from metabayfl.engine.flower.processes import Process, end, marked, start
from metabayfl.options import InputError
from metabayfl.remote.wire import one_line
from metabayfl.tensorfile import write_bytes

LOOPBACK = "127.0.0.1"
CONNECTION = "local"
FILE = "deployment.json"
MARK = "METABAYFL_FLOWER"
APP = Path(__file__).with_name("app")
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OMP_NUM_THREADS": "1",
}
"""Nothing is reported, nothing is looked up, nothing is installed; one thread, as in every process of ours."""


class DeploymentError(RuntimeError):
    """Flower's processes did not do what was asked."""


@dataclass
class Deployment:
    """What lies in a deployment's directory."""

    path: Path
    nodes: int
    tls: bool
    keys: bool
    ports: list[int]
    """Of the superlink, then of each node."""
    token: str
    host: str = LOOPBACK
    processes: dict[str, Process] = field(default_factory=dict)

    @classmethod
    def attach(cls, path: Path, address: str, ca: Path | None) -> "Deployment":
        """Note where a superlink is that others run; there is nothing to start or to end."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise InputError(f"{address!r} is not an address: HOST:PORT is accepted")
        made = cls._make(path, 0, ca is not None, False, [int(port)], host)
        if ca is not None:
            write_bytes(made.path / "keys" / CA, ca.read_bytes())
        return made

    @classmethod
    def create(cls, path: Path, nodes: int, tls: bool, keys: bool) -> "Deployment":
        """Make the files of a new deployment: ports, certificates, keys, Flower's own config."""
        made = cls._make(path, nodes, tls or keys, keys, free_ports(nodes + 1), LOOPBACK)
        if made.tls:
            make_certificates(made.path / "keys")
        for node in range(nodes if keys else 0):
            make_node_key(made.path / "keys" / f"node{node}")
        write_secret(made.path / "keys" / "superexec", secrets.token_bytes(32))
        return made

    @classmethod
    def _make(cls, path: Path, nodes: int, tls: bool, keys: bool, ports: list[int], host: str) -> "Deployment":
        if (path / FILE).exists():
            raise InputError(f"{path} holds a deployment already: `metabayfl flower down` ends it")
        made = cls(path.absolute(), nodes, tls, keys, ports, secrets.token_hex(8), host)
        for folder in ("logs", "flwr", "keys", "nodes", "runs"):
            (made.path / folder).mkdir(parents=True, exist_ok=True)
        write_bytes(made.path / "flwr" / "config.toml", made._connection().encode())
        made.save()
        return made

    @classmethod
    def open(cls, path: Path) -> "Deployment":
        """Read a deployment's directory."""
        try:
            values = json.loads((path / FILE).read_text(encoding="utf-8"))
        except OSError:
            raise InputError(f"{path} holds no deployment: `metabayfl flower up` makes one") from None
        values["processes"] = {name: Process(*who) for name, who in values["processes"].items()}
        return cls(path=path.absolute(), **values)

    def save(self) -> None:
        """Write down what there is."""
        values = {name: value for name, value in vars(self).items() if name != "path"}
        write_bytes(self.path / FILE, json.dumps(values, indent=2).encode())

    def _connection(self) -> str:
        trust = f'root-certificates = "{self.path}/keys/{CA}"' if self.tls else "insecure = true"
        address = f'[superlink.{CONNECTION}]\naddress = "{self.address}"\n{trust}\n'
        return f'[superlink]\ndefault = "{CONNECTION}"\n\n{address}'

    @property
    def address(self) -> str:
        """Where the superlink listens."""
        return f"{self.host}:{self.ports[0]}"

    @property
    def environment(self) -> dict[str, str]:
        """What every process of the deployment is told."""
        binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        own = {"FLWR_HOME": f"{self.path}/flwr", MARK: self.token, "PATH": binaries}
        return {**os.environ, **QUIET, **own}

    def names(self) -> list[str]:
        """Return the processes in the order in which they are started; none if others run them."""
        return [] if not self.nodes else ["superlink", "superexec", *(f"node{node}" for node in range(self.nodes))]

    def command(self, name: str) -> list[str]:
        """Return how a process is started."""
        keys = self.path / "keys"
        secret = ["--superexec-auth-secret-file", f"{keys}/superexec"]
        trust = ["--root-certificates", f"{keys}/{CA}"] if self.tls else ["--insecure"]
        if name == "superlink":
            files = ("--ssl-ca-certfile", CA), ("--ssl-certfile", CERTIFICATE), ("--ssl-keyfile", KEY)
            safe = [part for option, file in files for part in (option, f"{keys}/{file}")]
            known = ["--enable-supernode-auth"] if self.keys else []
            place = ["--host", LOOPBACK, "--port", str(self.ports[0]), "--database", f"{self.path}/state.db"]
            apart = ["--isolation", "process", "--disable-runtime-dependency-installation", *secret]
            return [script("flower-superlink"), *(safe if self.tls else trust), *known, *place, *apart]
        if name == "superexec":
            return [script("flower-superexec"), "--runtime-api-address", self.address, *trust, *secret]
        node = int(name.removeprefix("node"))
        identity = ["--auth-supernode-private-key", f"{keys}/node{node}"] if self.keys else []
        place = ["--superlink", self.address, "--host", LOOPBACK, "--port", str(self.ports[1 + node])]
        about = f'client-id={node} state="{self.path}/nodes/{node}"'
        return [script("flower-supernode"), *trust, *identity, *place, "--node-config", about]

    def start(self, name: str) -> None:
        """Start a process that does not run."""
        if not self.is_alive(name):
            self.processes[name] = start(self.command(name), self.environment, self.path / "logs" / f"{name}.log")
            self.save()

    def is_alive(self, name: str) -> bool:
        """Whether a process runs."""
        return name in self.processes and self.processes[name].alive

    def end(self) -> None:
        """End everything that this deployment has started, and what that has started."""
        end([*self.processes.values(), *marked(f"{MARK}={self.token}")])
        self.processes = {}
        self.save()

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """Call Flower's command line and return its JSON."""
        command = [script("flwr"), *arguments, "--format", "json"]
        done = subprocess.run(  # noqa: S603 (our own commands)
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            answer = {"success": False, "error-message": (done.stderr or done.stdout).strip()}
        if done.returncode or not answer.get("success", True):
            why = one_line(answer.get("error-message") or done.stderr) or "no reason given"
            raise DeploymentError(f"flwr {arguments[0]}: {why}")
        return answer


def script(name: str) -> str:
    """Return one of Flower's commands, from the environment in which we run."""
    return str(Path(sys.executable).with_name(name))


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody uses now."""
    sockets = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    ports = [found.getsockname()[1] for found in sockets]
    for found in sockets:
        found.close()
    return ports


def wait_until(what: str, seconds: float, ready: Callable[[], bool], pause_seconds: float = 0.2) -> None:
    """Look again and again until something is so."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise DeploymentError(f"{what}: not within {seconds:g} s")
        time.sleep(pause_seconds)
