"""Processes that outlive the command that started them: known by pid and start time, so no other one is ever ended."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PATIENCE_SECONDS = 15.0
START_TIME = 19
"""Place of the start time in /proc/PID/stat, counted after the name, which may have spaces in it."""


class Process(NamedTuple):
    """A process: its id comes again one day, its id and start time together do not."""

    pid: int
    start: int

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return started_at(self.pid) == self.start


def started_at(pid: int) -> int | None:
    """Return when a process started, in ticks since boot; None if it is not there or only waits to be buried."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[START_TIME])


def start(command: list[str], environment: Mapping[str, str], log: Path) -> Process:
    """Start a process of its own session that writes to a log."""
    appending = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), appending, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    pid = os.posix_spawnp(command[0], command, environment, file_actions=files, setsid=True)
    return Process(pid, started_at(pid) or 0)


def marked(mark: str) -> list[Process]:
    """Return the processes, children of children among them, that have this text in their environment."""
    found = []
    for path in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            pid = int(path.name)
            if pid != os.getpid() and mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(Process(pid, started_at(pid) or 0))
    return [process for process in found if process.start]


def end(processes: Sequence[Process]) -> None:
    """End processes: politely, and after a while by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            send(process, number)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(process.alive for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)


def send(process: Process, number: signal.Signals) -> None:
    """Signal a process, by a handle that cannot come to mean another one."""
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(process.pid)
        try:
            if process.alive:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)
