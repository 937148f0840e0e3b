"""A grid of runs, methods x seeds: resumable, in parallel, never repeated; and its table."""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from metabayfl.config import CompareConfig, RunConfig
from metabayfl.cost import summarise_costs
from metabayfl.engine import local
from metabayfl.experiment import Experiment, is_finished
from metabayfl.fingerprint import config_hash, source_hash
from metabayfl.methods import find
from metabayfl.options import InputError
from metabayfl.result import Result
from metabayfl.store import RunDirectory


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    label: str
    config: RunConfig
    path: Path

    @property
    def finished(self) -> bool:
        """Whether the run is done already, with this config and these sources."""
        return is_finished(self.path)


@dataclass(frozen=True)
class Estimate:
    """What a run will cost, from one round that was really carried out."""

    label: str
    seconds: float
    bytes: float
    runs: int


def make_grid(config: CompareConfig, labels: Sequence[str], seeds: Sequence[int], out: Path) -> list[Cell]:
    """Return the runs of a comparison; a changed config or source gives a run another directory."""
    cells = []
    for label in labels or list(config.methods):
        for seed in seeds:
            run = RunConfig(**(config.shared() | {"method": method_section(config, label), "seed": seed}))
            Experiment.check(run)
            name = f"{label}-{seed}-{config_hash(run)}-{source_hash(run.method['name'])}"
            cells.append(Cell(label, run, out / "runs" / name))
    if not cells:
        raise InputError("nothing to compare: pass --methods a,b, or give the config [methods.LABEL] sections")
    return cells


def method_section(config: CompareConfig, label: str) -> dict[str, Any]:
    """Return the method of a label: fields of [method] that it has, then those of its own section [methods.LABEL]."""
    own = dict(config.methods.get(label, {}))
    name = own.get("name", label)
    fields = find(name).model_fields
    common = {key: value for key, value in config.method.items() if key in fields}
    return common | own | {"name": name}


def run_grid(
    cells: Sequence[Cell], processes: int, workers: int, report: Callable[[Cell, str], None]
) -> list[str]:
    """Carry out what is not finished, `processes` runs at a time with `workers` each; returns what failed."""
    todo = [cell for cell in cells if not cell.finished]
    failures = []
    for cell, failure in _run_all(todo, processes, workers):
        report(cell, failure)
        if failure:
            failures.append(f"{cell.label} with seed {cell.config.seed}: {failure}")
    return failures


def _run_all(cells: list[Cell], processes: int, workers: int) -> Iterator[tuple[Cell, str]]:
    if processes == 1:
        for cell in cells:
            yield cell, run_cell(cell, workers)
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=context, max_tasks_per_child=None) as pool:
        futures = {pool.submit(run_cell, cell, workers): cell for cell in cells}
        for future in as_completed(futures):
            yield futures[future], future.result()


def run_cell(cell: Cell, workers: int) -> str:
    """Carry out or resume one run; returns why it failed, or nothing."""
    torch.set_num_threads(1)
    try:
        Experiment.of(cell.config).run(cell.path, workers, resume=cell.path.exists())
    except (InputError, RuntimeError, OSError) as error:
        return str(error)
    return ""


def estimate(cells: Sequence[Cell]) -> list[Estimate]:
    """Carry out one round of each method, in a place that is thrown away, and extrapolate to what is left to do."""
    estimates = []
    for label in dict.fromkeys(cell.label for cell in cells):
        todo = [cell for cell in cells if cell.label == label and not cell.finished]
        if todo:
            estimates.append(_estimate(label, todo))
    return estimates


def _estimate(label: str, cells: list[Cell]) -> Estimate:
    config = cells[0].config
    short = config.model_copy(update={"eval": config.eval.model_copy(update={"every": 1})})
    experiment = Experiment.of(short)
    with tempfile.TemporaryDirectory(prefix="metabayfl-plan-") as scratch:
        directory = Path(scratch, "run")
        experiment.run(directory, 1, until=1)
        events = list(RunDirectory(directory).events())
    totals = summarise_costs(events)["total"]
    evaluations = len(config.eval.rounds_to_evaluate(config.rounds))
    seconds = totals["train_seconds"] * config.rounds + totals["eval_seconds"] * evaluations
    sent = (totals["bytes_up"] + totals["bytes_down"]) * config.rounds
    return Estimate(label, seconds * len(cells), sent * len(cells), len(cells))


def collect(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return one flat row for each finished run: label, seed, metrics by view, costs."""
    return [_row(cell, Result.events_of(cell.path)) for cell in cells if cell.finished]


def _row(cell: Cell, events: list[dict[str, Any]]) -> dict[str, Any]:
    last = [event for event in events if event["event"] == "round" and event["metrics"]][-1]
    row: dict[str, Any] = {"method": cell.label, "seed": cell.config.seed, "run": str(cell.path)}
    for view, metrics in last["metrics"].items():
        for name, summary in metrics.items():
            for column, value in summary.items():
                row[f"{view} {name}" if column in ("value", "weighted") else f"{view} {name} {column}"] = value
    totals = summarise_costs(events)["total"]
    return row | totals


__all__ = ["Cell", "Estimate", "collect", "estimate", "local", "make_grid", "run_grid"]
