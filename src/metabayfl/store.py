"""The run directory, format 1 (docs/run-directory.md): everything a run needs to go on after any interruption."""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from metabayfl import tensorfile
from metabayfl.options import InputError
from metabayfl.task import Task
from metabayfl.types import Fit, Params

FORMAT = 1
CURRENT = "checkpoint.safetensors"
STAGED = "staged.safetensors"
CONSTANTS = "constants.safetensors"
EVENTS = "events.jsonl"
STARTING = {"clients", "lock", "env.json", "config.toml", CONSTANTS}
Event = dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """The state after a published round: the server's, and the round in which each client last took part (0: never)."""

    round: int
    server: Params
    latest: torch.Tensor


@dataclass(frozen=True)
class ClientRecord:
    """What a client left in a round, read from disk when it is asked for."""

    path: Path
    weight: float
    metrics: dict[str, float]
    cost: dict[str, float]
    """Seconds in the hook, bytes up and down."""

    @property
    def payload(self) -> Params:
        """Tensors that the client sent."""
        return self._part("payload")

    @property
    def state(self) -> Params:
        """Tensors that stay with the client."""
        return self._part("state")

    @property
    def personal(self) -> Params | None:
        """Return the client's own model, if it is kept."""
        return self._part("personal") or None

    def _part(self, part: str) -> Params:
        tensors, meta = tensorfile.read(self.path)
        own = {name.removeprefix(f"{part}."): value for name, value in tensors.items() if name.startswith(f"{part}.")}
        return own | {name: tensors[f"payload.{name}"] for name in meta["same"].get(part, ())}


def _event_of(line: bytes) -> Event:
    """Read a line of the log; a damaged one gives an empty event."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) and {"event", "round"} <= event.keys() else {}


def encode_client(fit: Fit, cost: Mapping[str, float], keep_personal: bool) -> bytes:
    """Return what a client leaves as a record; a tensor that is sent and also kept is stored once."""
    payload, weight, metrics = fit.update
    tensors = {f"payload.{name}": tensor for name, tensor in payload.items()}
    same: dict[str, list[str]] = {}
    for part, named in (("state", fit.state), ("personal", fit.personal if keep_personal else {})):
        same[part] = [name for name, tensor in named.items() if tensor is payload.get(name)]
        tensors |= {f"{part}.{name}": tensor for name, tensor in named.items() if name not in same[part]}
    bytes_up = tensorfile.encoded_size(payload, {"weight": weight, "metrics": metrics})
    meta = {"same": same, "weight": weight, "metrics": metrics, "cost": {**cost, "bytes_up": bytes_up}}
    return tensorfile.encode_checked(tensors, meta)


class RunDirectory:
    """One run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clients = path / "clients"
        self._lock: int | None = None

    def create(
        self, description: Mapping[str, Any], environment: Mapping[str, Any], constants: Params, config: str = ""
    ) -> None:
        """Start a run in an empty or missing directory, or in one whose start was interrupted."""
        here = self.path.iterdir() if self.path.is_dir() else ()
        begun = {path.name for path in here if not tensorfile.is_temporary(path)}
        if (self.path.exists() and not self.path.is_dir()) or begun - STARTING:
            raise InputError(f"{self.path} is not empty: choose another directory, or `metabayfl resume {self.path}`")
        self.clients.mkdir(parents=True, exist_ok=True)
        self.lock()
        for name in begun - {"clients", "lock"}:
            (self.path / name).unlink()
        if config:
            tensorfile.write_bytes(self.path / "config.toml", config.encode())
        if constants:
            tensorfile.write(self.path / CONSTANTS, constants)
        self.write_json("env.json", environment)
        self.write_json("run.json", {"format": FORMAT, **description})

    def description(self) -> dict[str, Any]:
        """Read what the run is; a format that this version does not know is refused."""
        found = self._read_json("run.json")
        if found.get("format") != FORMAT:
            raise InputError(
                f"{self.path} has format version {found.get('format')!r}; this metabayfl knows version {FORMAT}"
            )
        return found

    def environment(self) -> dict[str, Any]:
        """Read what the run depends on besides its config."""
        return self._read_json("env.json")

    def read_constants(self) -> Params:
        """Read what of the module is neither trained nor sent: frozen parameters and constant buffers."""
        path = self.path / CONSTANTS
        return tensorfile.read(path)[0] if path.exists() else {}

    def lock(self) -> None:
        """Refuse a second process, and clear up after the last one; the lock ends with the process, however it ends."""
        path = self.path / "lock"
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.read(handle, 20).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise InputError(f"{self.path} is in use by process {holder}") from None
        self._lock = handle
        os.ftruncate(handle, 0)
        with tensorfile.naming(path):
            os.write(handle, str(os.getpid()).encode())
        self.tidy()

    def tidy(self) -> None:
        """Remove what killed processes left of files; for the holder of the lock only."""
        for path in self.path.rglob(".*"):
            if tensorfile.is_temporary(path):
                path.unlink()

    def unlock(self) -> None:
        """Let others use the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"{self.path} is not a run directory: it has no {name}") from None
        except (OSError, ValueError) as error:
            raise InputError(f"{self.path / name} is damaged: {error}") from None
        if not isinstance(found, dict):
            raise InputError(f"{self.path / name} is damaged: it holds no table")
        return found

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a small JSON file atomically."""
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        tensorfile.write_bytes(self.path / name, text.encode())

    def client_path(self, client: int, round_: int) -> Path:
        """Where a client's record of a round (counted from 1) lies."""
        return self.clients / f"{client:06d}-{round_:06d}.safetensors"

    def write_client(self, client: int, round_: int, record: bytes) -> None:
        """Spool what a client left, as `encode_client` returns it."""
        tensorfile.write_bytes(self.client_path(client, round_), record)

    def read_client(self, client: int, round_: int) -> ClientRecord:
        """Open a client's record."""
        path = self.client_path(client, round_)
        _, meta = tensorfile.read(path)
        return ClientRecord(path, meta["weight"], meta["metrics"], meta["cost"])

    def forget_clients(self, checkpoint: Checkpoint) -> None:
        """Remove records that no later round will read."""
        keep = {self.client_path(n, int(r)).name for n, r in enumerate(checkpoint.latest.tolist())}
        for path in self.clients.iterdir():
            if path.name not in keep:
                path.unlink()

    def stage(self, checkpoint: Checkpoint) -> None:
        """Write the state after a round beside the current one, so that it can be judged before it is published."""
        tensors = {f"server.{name}": tensor for name, tensor in checkpoint.server.items()}
        tensors["latest"] = checkpoint.latest
        tensorfile.write(self.path / STAGED, tensors, {"round": checkpoint.round})

    def publish(self, events: Iterable[Event]) -> None:
        """Make the staged round the current one: everything to disk once, then one rename."""
        path = self.path / EVENTS
        with tensorfile.naming(path), path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(event) + "\n" for event in events)
        os.sync()
        (self.path / STAGED).replace(self.path / CURRENT)
        tensorfile.sync_directory(self.path)

    def checkpoint(self, *, staged: bool = False) -> Checkpoint | None:
        """Return the last published round, or the one that is staged; None if there is none."""
        path = self.path / (STAGED if staged else CURRENT)
        if not path.exists():
            return None
        tensors, meta = tensorfile.read(path)
        latest = tensors.pop("latest")
        return Checkpoint(meta["round"], {name.removeprefix("server."): t for name, t in tensors.items()}, latest)

    def write_model(self, name: str, model: Params, task: Task) -> None:
        """Write a model by the names of its parameters, in their usual shapes."""
        path = self.path / f"{name}.safetensors"
        path.parent.mkdir(exist_ok=True)
        tensorfile.write(path, task.named(model), {"format": FORMAT})

    def read_model(self, name: str, task: Task) -> Params:
        """Read a model that `write_model` wrote."""
        return task.from_named(tensorfile.read(self.path / f"{name}.safetensors")[0])

    def events(self) -> Iterator[Event]:
        """Events of the run so far; a line cut short by a crash is left out."""
        path = self.path / EVENTS
        lines = path.read_bytes().splitlines() if path.exists() else []
        yield from takewhile(bool, map(_event_of, lines))

    def drop_events_after(self, round_: int) -> None:
        """Forget events of rounds that were never published; those that were must be there."""
        kept = [event for event in self.events() if event["round"] <= round_]
        last = max((event["round"] for event in kept if event["event"] == "round"), default=0)
        if last < round_:
            advice = f"but round {round_} is published: mend or remove its first bad line"
            raise InputError(f"{self.path / EVENTS} is damaged after round {last}, {advice}")
        tensorfile.write_bytes(self.path / EVENTS, "".join(json.dumps(event) + "\n" for event in kept).encode())
