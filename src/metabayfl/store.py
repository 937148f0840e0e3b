"""The run directory, format 1 (docs/run-directory.md): everything a run needs to go on after any interruption."""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from metabayfl import tensorfile
from metabayfl.options import InputError
from metabayfl.records import ClientRecord
from metabayfl.spool import Address, Spool
from metabayfl.task import Task
from metabayfl.types import Params

FORMAT = 1
CURRENT = "checkpoint.safetensors"
STAGED = "staged.safetensors"
CONSTANTS = "constants.safetensors"
EVENTS = "events.jsonl"
STARTING = {"clients", "lock", "env.json", "data.json", "config.toml", CONSTANTS}
Event = dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """The state after a published round: the server's, and the last record of each client that ever took part."""

    round: int
    server: Params
    latest: dict[int, Address]
    averaged: Params = field(default_factory=dict)
    """The global model averaged over rounds, if the plan asks for it."""


@dataclass(frozen=True)
class SpooledUpdate:
    """An update that lies on disk; its payload is read each time it is asked for."""

    directory: "RunDirectory"
    client: int
    address: Address
    weight: float
    metrics: dict[str, float]

    @property
    def payload(self) -> Params:
        """Tensors that the client sent."""
        return self.directory.read_client(self.address).payload


class RunDirectory:
    """One run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spool = Spool(path / "clients")
        self._lock: int | None = None

    def create(
        self,
        description: Mapping[str, Any],
        environment: Mapping[str, Any],
        constants: Params,
        config: str = "",
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Start a run in an empty or missing directory, or in one whose start was interrupted."""
        here = self.path.iterdir() if self.path.is_dir() else ()
        begun = {path.name for path in here if not tensorfile.is_temporary(path)}
        interrupted = "lock" in begun or not begun - {"clients"}
        if (self.path.exists() and not self.path.is_dir()) or begun - STARTING or not interrupted:
            raise InputError(f"{self.path} is not empty: choose another directory, or `metabayfl resume {self.path}`")
        self.spool.path.mkdir(parents=True, exist_ok=True)
        self.lock()
        for name in begun - {"clients", "lock"}:
            (self.path / name).unlink()
        if config:
            tensorfile.write_bytes(self.path / "config.toml", config.encode())
        if constants:
            tensorfile.write(self.path / CONSTANTS, constants)
        if data:
            self.write_json("data.json", data, indent=None)
        self.write_json("env.json", environment)
        self.write_json("run.json", {"format": FORMAT, **description})

    def description(self) -> dict[str, Any]:
        """Read what the run is; a format that this version does not know is refused."""
        found = self.read_json("run.json")
        if found.get("format") != FORMAT:
            raise InputError(
                f"{self.path} has format version {found.get('format')!r}; this metabayfl knows version {FORMAT}"
            )
        return found

    def environment(self) -> dict[str, Any]:
        """Read what the run depends on besides its config."""
        return self.read_json("env.json")

    def data(self) -> dict[str, Any] | None:
        """Read what the clients hold; None if it is not recorded."""
        return self.read_json("data.json") if (self.path / "data.json").exists() else None

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

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a small JSON file."""
        try:
            found: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"{self.path} is not a run directory: it has no {name}") from None
        except (OSError, ValueError) as error:
            raise InputError(f"{self.path / name} is damaged: {error}") from None
        if not isinstance(found, dict):
            raise InputError(f"{self.path / name} is damaged: it holds no table")
        return found

    def write_json(self, name: str, content: Mapping[str, Any], indent: int | None = 2) -> None:
        """Write a small JSON file atomically."""
        text = json.dumps(content, indent=indent, sort_keys=True) + "\n"
        tensorfile.write_bytes(self.path / name, text.encode())

    def write_client(self, round_: int, record: bytes) -> Address:
        """Spool what a client left in a round (counted from 1), as `encode_client` returns it."""
        return self.spool.append(round_, record)

    def read_client(self, address: Address) -> ClientRecord:
        """Read a client's record."""
        content = self.spool.read(address)
        try:
            return ClientRecord(*tensorfile.decode(content))
        except ValueError as error:
            raise InputError(f"{self.spool.path / address.segment} is damaged at {address.offset}: {error}") from None

    def spooled(self, round_: int) -> dict[int, Address]:
        """Where the whole records of a round lie that an interrupted run has left."""
        found: dict[int, Address] = {}
        for address, _ in self.spool.scan(round_):
            with suppress(InputError):
                found[self.read_client(address).client] = address
        return found

    def forget_clients(self, checkpoint: Checkpoint) -> None:
        """Remove records that no later round will read."""
        self.spool.forget_all_but(address.segment for address in checkpoint.latest.values())

    def stage(self, checkpoint: Checkpoint) -> None:
        """Write the state after a round beside the current one, so that it can be judged before it is published."""
        tensors = {f"server.{name}": tensor for name, tensor in checkpoint.server.items()}
        tensors |= {f"averaged.{name}": tensor for name, tensor in checkpoint.averaged.items()}
        segments = sorted({address.segment for address in checkpoint.latest.values()})
        number = {segment: index for index, segment in enumerate(segments)}
        latest = [(client, number[segment], offset) for client, (segment, offset) in checkpoint.latest.items()]
        tensors["latest"] = torch.tensor(latest, dtype=torch.int64).reshape(-1, 3)
        tensorfile.write(self.path / STAGED, tensors, {"round": checkpoint.round, "segments": segments})

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
        rows = tensors.pop("latest").tolist()
        latest = {client: Address(meta["segments"][number], offset) for client, number, offset in rows}
        server, averaged = (_named(tensors, f"{whose}.") for whose in ("server", "averaged"))
        return Checkpoint(meta["round"], server, latest, averaged)

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


def _named(tensors: Params, start: str) -> Params:
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def _event_of(line: bytes) -> Event:
    """Read a line of the log; a damaged one gives an empty event."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) and {"event", "round"} <= event.keys() else {}
