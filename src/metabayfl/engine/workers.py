"""Who does the work: this process, or a pool of processes with one thread each."""

import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
import torch.multiprocessing as mp

from metabayfl.engine.client import Desk, describe
from metabayfl.engine.process import die_with_parent, keep_heap
from metabayfl.options import InputError

Call = tuple[str, tuple[Any, ...]]
"""A method of the desk and its arguments: client and round, or a round and what the global model is judged with."""
Death = tuple[int | None, str]
"""The client whose call a worker died in, and how."""


class WorkerError(RuntimeError):
    """A worker could not do its work for a reason that is not the client's."""


class Workers(Protocol):
    """Carries out calls in any order and gives the answers as they come."""

    deaths: list[Death]
    """What went wrong with workers and does not belong to an update: calls done again, scores that are missing."""

    def run(self, calls: Sequence[Call]) -> Iterator[Any]:
        """Carry out calls, all of the same name."""
        ...

    def close(self) -> None:
        """End all work."""
        ...


class InProcess:
    """No pool: one call after the other, here."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.deaths: list[Death] = []

    def run(self, calls: Sequence[Call]) -> Iterator[Any]:
        """Carry out calls in order."""
        for name, arguments in calls:
            yield getattr(self.desk, name)(*arguments)

    def close(self) -> None:
        """Nothing to end."""


@dataclass
class Worker:
    """A process, the way to talk to it, and what it is doing."""

    process: BaseProcess
    connection: Connection
    call: Call | None = None


class Pool:
    """One process per core, one thread each; calls go out in the order given, to whoever is free.

    Workers are forked where that is possible, so that models from notebooks need not be importable; data are shared
    with them by the operating system, results lie in the run directory. A worker that dies is replaced and its call
    tried once more.
    """

    def __init__(self, desk: Desk, count: int, start_method: str | None = None) -> None:
        self.desk = desk
        self.context = mp.get_context(start_method or ("fork" if sys.platform == "linux" else "spawn"))
        self.deaths: list[Death] = []
        self.workers: list[Worker] = []
        try:
            for _ in range(count):
                self.workers.append(self._start())
        except BaseException:
            self.close()
            raise

    def run(self, calls: Sequence[Call]) -> Iterator[Any]:
        """Carry out calls; answers come as they are ready."""
        waiting = deque(calls)
        tried: dict[Call, int] = {}
        while waiting or any(worker.call for worker in self.workers):
            for worker in self.workers:
                if waiting and worker.call is None:
                    self._send(worker, waiting.popleft())
            for worker in self._ready():
                message = _receive(worker)
                if message is None:
                    self._replace(worker, tried)
                    continue
                worker.call = None
                answer, failure = message
                if failure is not None:
                    raise failure
                yield answer

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()

    def _ready(self) -> list[Worker]:
        ready = wait([worker.connection for worker in self.workers if worker.call])
        return [worker for worker in self.workers if worker.connection in ready]

    def _send(self, worker: Worker, call: Call) -> None:
        worker.call = call
        with suppress(OSError):  # a dead worker shows itself when its answer is read
            worker.connection.send(call)

    def _start(self) -> Worker:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(  # type: ignore[attr-defined]
            target=serve, args=(self.desk, theirs, os.getpid()), daemon=True
        )
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a worker never sees Ctrl-C
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"the model or data cannot be sent to a worker process ({describe(error)}): use --workers 1"
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return Worker(process, ours)

    def _replace(self, worker: Worker, tried: dict[Call, int]) -> None:
        """Put a new process in the place of a dead one and let it try the call again, once."""
        call = worker.call or ("nothing", ())
        worker.process.join()
        worker.connection.close()
        death = f"worker {worker.process.pid} died ({_reason(worker.process.exitcode or 0)}) during {_title(call)}"
        tried[call] = tried.get(call, 0) + 1
        if tried[call] > 1:
            hint = "" if self.context.get_start_method() == "fork" else "; --workers 1 works without worker processes"
            raise WorkerError(f"{death}, for the second time{hint}")
        self.deaths.append((_client(call), f"{death}; done again"))
        fresh = self._start()
        worker.process, worker.connection = fresh.process, fresh.connection
        self._send(worker, call)


def _client(call: Call) -> int | None:
    return call[1][0] if len(call[1]) > 1 and call[0] != "score_global" else None


def _title(call: Call) -> str:
    client = _client(call)
    return call[0] if client is None else f"{call[0]} of client {client}"


def _reason(exit_code: int) -> str:
    named = -exit_code in {*signal.Signals}
    return signal.Signals(-exit_code).name if named else f"exit code {exit_code}"


def _receive(worker: Worker) -> tuple[Any, Exception | None] | None:
    """Return an answer and a failure; None if the worker is dead."""
    try:
        message: tuple[Any, Exception | None] = worker.connection.recv()
    except (EOFError, OSError):
        return None
    return message


def serve(desk: Desk, connection: Connection, parent: int) -> None:
    """Answer calls until the parent goes away."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    keep_heap()
    with suppress(EOFError, OSError):
        while True:
            call: Call = connection.recv()
            connection.send(_answer(desk, call))


def _answer(desk: Desk, call: Call) -> tuple[Any, Exception | None]:
    """Carry out a call; whatever goes wrong, the parent decides."""
    name, arguments = call
    try:
        return getattr(desk, name)(*arguments), None
    except InputError as error:
        return None, InputError(str(error))
    except Exception as error:
        return None, WorkerError(f"{_title(call)}: {describe(error)}")


def make_workers(desk: Desk, count: int) -> InProcess | Pool:
    """Return a pool, or this process alone for one worker."""
    return InProcess(desk) if count == 1 else Pool(desk, count)
