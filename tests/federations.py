"""Small federations, networks and methods, and ways to run them, kill them and compare what they leave."""

import importlib.util
import multiprocessing
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from metabayfl.api import run_job
from metabayfl.cli import main
from metabayfl.config import Plan
from metabayfl.data.federation import Federation
from metabayfl.engine import local
from metabayfl.engine.plan import Job, make_job
from metabayfl.methods import BayFL, FedAvg, Method
from metabayfl.store import Event, RunDirectory
from metabayfl.types import Context, Fit, Params, TrainData

SECONDS = {
    "seconds",
    "selection_seconds",
    "comm_seconds",
    "train_seconds",
    "eval_seconds",
    "peak_memory_bytes",
    "server_peak_memory_bytes",
}


def federation(clients: int = 3, samples: int = 12) -> Federation:
    """Clients of different sizes, four inputs, three classes; always the same numbers."""
    rng = torch.Generator().manual_seed(0)
    pairs = []
    for client in range(clients):
        x = torch.randn(samples + 3 * client, 4, generator=rng)
        pairs.append((x, x[:, :3].argmax(1)))
    return Federation.from_arrays(pairs, batch_size=8)


def network(dropout: float = 0.2) -> nn.Sequential:
    """A small network with dropout and BatchNorm; always the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, 3)
        )  # fmt: skip


def plan(**options: Any) -> Plan:
    return Plan(**{"rounds": 3, "eval": {"every": 2, "samples": 2}, **options})


def job(method: Method | None = None, module: nn.Module | None = None, clients: int = 3, **options: Any) -> Job:
    data, chosen = federation(clients), method or BayFL(epochs=1)
    return make_job(chosen, module or network(), data, plan(**options))


def train(path: Path, method: Method | None = None, module: nn.Module | None = None, **options: Any) -> list[Event]:
    """Begin a run, or go on with it, by the engine alone; returns its log."""
    workers, until = options.pop("workers", 1), options.pop("until", None)
    work, directory = job(method, module, **options), RunDirectory(path)
    if (path / "run.json").exists():
        directory.lock()
    else:
        directory.create({"rounds": work.plan.rounds}, {}, work.task.constants())
    try:
        local.run(work, directory, workers, until=until)
    finally:
        directory.unlock()
    return list(directory.events())


def federate(path: Path, workers: int = 1, **options: Any) -> None:
    """Begin a run or go on with it, as a user does."""
    method = options.pop("method", None) or BayFL(epochs=1)
    run_job(network(), federation(), method, plan(**options), out=path, workers=workers, resume=True)


def bits(path: Path) -> dict[str, bytes]:
    """The models that a run has left."""
    return {str(file.relative_to(path)): file.read_bytes() for file in (path / "model.safetensors", *models(path))}


def models(path: Path) -> list[Path]:
    return sorted((path / "personal").glob("*.safetensors"))


def log(path: Path) -> list[Event]:
    """The events of a run without what depends on the machine."""
    events = [event for event in RunDirectory(path).events() if event["event"] != "worker"]
    return [{key: value for key, value in event.items() if key not in SECONDS} for event in events]


def leftovers(path: Path) -> list[str]:
    """Files that a finished run should not have."""
    expected = [
        "checkpoint",
        "events",
        "model",
        "personal",
        "clients",
        "lock",
        "env",
        "run",
        "config",
        "constants",
        "data",
    ]
    strange = [file for file in path.rglob("*") if file.name.startswith(".") or file.name.startswith("staged")]
    return [str(file) for file in strange] + [f.name for f in path.iterdir() if f.name.split(".")[0] not in expected]


def one_line(error: BaseException | str) -> str:
    """The text of an error, which must be one line."""
    text = str(error)
    assert text.strip(), "an empty message"
    assert len(text.splitlines()) == 1, text
    return text


CONFIG = """
rounds = {rounds}
[method]
name = "bayfl"
epochs = 1
[data]
clients = 3
fraction = 0.1
[model]
hidden = [4]
[eval]
every = {rounds}
samples = 2
"""


def configured(where: Path, rounds: int) -> Path:
    """A config for the command line, of the smallest of runs."""
    path = where / "config.toml"
    path.write_text(CONFIG.format(rounds=rounds))
    return path


def command(arguments: list[str]) -> int:
    """Run the command line here; what it changes in this process, the import path, is put back."""
    path = sys.path.copy()
    try:
        return main(arguments)
    finally:
        sys.path[:] = path


def script(folder: str, name: str) -> ModuleType:
    """A script of this repository, as a module."""
    path = Path(__file__).parents[1] / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def contents(path: Path) -> dict[str, bytes]:
    """All files under a path, by name."""
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "lock"}


class Failing(FedAvg):
    """Client 1 cannot be trained."""

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        if ctx.client == 1:
            raise ArithmeticError("client one is tired\nand says so in two lines")
        return super().fit(down, state, data, ctx)


def spoiling(change: Callable[[Fit], Any], clients: tuple[int, ...] = (1,)) -> Method:
    """FedAvg whose clients of these numbers return something else from fit."""

    class Spoiling(FedAvg):
        def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
            fit = super().fit(down, state, data, ctx)
            changed: Fit = change(fit) if ctx.client in clients else fit
            return changed

    return Spoiling(epochs=1)


class Raising(nn.Module):
    """A network that cannot be trained with the samples of client 1, which has 15."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network(dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) == 4:
            raise KeyError("no batches of four, please")
        return self.inner(x)


def in_child(work: Callable[[], None]) -> int:
    """Do something in a forked process, wait for its end, and return its exit code."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def killed_after(seconds: float, work: Callable[[], None]) -> bool:
    """Do something in a forked process and kill it -9 after some time; returns whether it was still at work."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


class Tripwire:
    """Counts what this process does to the files under a path, and acts at one of these steps.

    Python tells its audit hooks before a file is opened, renamed or removed. A hook stays for the life of a process:
    use it in a forked one.
    """

    EVENTS = ("open", "os.rename", "os.remove", "os.mkdir")

    def __init__(self, path: Path, step: int, act: Callable[[], None]) -> None:
        self.path, self.step, self.act = str(path), step, act
        self.seen = 0
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in self.EVENTS and str(arguments[0]).startswith(self.path):
            self.seen += 1
            if self.seen == self.step:
                self.act()
