"""A grid of runs, methods x seeds: resumable, in parallel, never repeated."""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from metabayfl.comparison import Row, row_of
from metabayfl.config import CompareConfig, RunConfig
from metabayfl.engine.process import die_with_parent
from metabayfl.experiment import Experiment, is_finished
from metabayfl.fingerprint import config_hash, source_hash
from metabayfl.ledger import summarise_costs
from metabayfl.methods import create, find
from metabayfl.options import InputError
from metabayfl.store import RunDirectory


@dataclass(frozen=True)
class Cell:
    """One run of the grid; a changed config or changed source files give it another directory."""

    label: str
    config: RunConfig
    path: Path

    @property
    def finished(self) -> bool:
        """Whether the run is done already, with this config and these sources."""
        return is_finished(self.path)


@dataclass(frozen=True)
class Estimate:
    """What is left to do for a method, from one round that was really carried out."""

    label: str
    runs: int
    seconds: float
    bytes: float


def make_grid(
    config: CompareConfig, labels: Sequence[str], seeds: Sequence[int], out: Path, allow_leak: bool = False
) -> list[Cell]:
    """Return the runs of a comparison, checked before anything runs; all hold out d_n if one method chooses by it."""
    sections = {label: method_section(config, label) for label in labels or config.methods}
    methods = [create(section) for section in sections.values()]
    leaking = [label for label, method in zip(sections, methods, strict=True) if method.leaks]
    if leaking and not allow_leak:
        raise InputError(f"{leaking[0]} sees test data (select_on = 'test'): --allow-leak compares it all the same")
    if config.select.held_out is None and any(method.holds_out for method in methods):
        config = config.model_copy(update={"select": config.select.model_copy(update={"held_out": True})})
    cells = []
    for label, section in sections.items():
        for seed in seeds:
            run = config.with_method(section, config.methods.get(label, {}).get("model", {}), seed)
            name = f"{label}-{seed}-{config_hash(run)}-{source_hash(run)}"
            cells.append(Cell(label, run, out / "runs" / name))
    if not cells:
        raise InputError(
            "nothing to compare: pass --methods a,b and --seeds, or give the config [methods.LABEL] sections"
        )
    return cells


def with_tuned(config: CompareConfig, labels: Sequence[str], values: dict[str, Any]) -> CompareConfig:
    """Return a config whose [methods.LABEL] sections begin with tuned values; those of others are left aside."""
    tuned = values.get("methods", {})
    sections = {label: tuned.get(label, {}) | config.methods.get(label, {}) for label in labels or config.methods}
    return config.model_copy(update={"methods": sections})


def method_section(config: CompareConfig, label: str) -> dict[str, Any]:
    """Return the method of a label: the fields of [method] that it has, then its own section [methods.LABEL]."""
    own = {key: value for key, value in config.methods.get(label, {}).items() if key != "model"}
    name = own.pop("name", label)
    fields = find(name).model_fields
    return {"name": name, **{key: value for key, value in config.method.items() if key in fields}, **own}


def run_cells(cells: Sequence[Cell], processes: int, workers: int) -> Iterator[tuple[Cell, str]]:
    """Carry out or resume runs, `processes` at a time with `workers` each; each ends with a failure text or nothing."""
    if processes == 1:
        for cell in cells:
            yield cell, run_cell(cell, workers)
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(processes, context, die_with_parent, (os.getpid(),))
    try:
        futures = {pool.submit(run_cell, cell, workers): cell for cell in cells}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, what has not begun does not begin


def run_cell(cell: Cell, workers: int) -> str:
    """Carry out or resume one run; returns why it failed, or nothing."""
    torch.set_num_threads(1)
    try:
        Experiment.of(cell.config).run(cell.path, workers, resume=cell.path.exists())
    except (InputError, RuntimeError, OSError) as error:
        return str(error)
    return ""


def estimate(cells: Sequence[Cell]) -> list[Estimate]:
    """Carry out one round of each method in a place that is thrown away, and extrapolate to what is left to do."""
    left = [cell for cell in cells if not cell.finished]
    labels = dict.fromkeys(cell.label for cell in left)
    return [_estimate(label, [cell.config for cell in left if cell.label == label]) for label in labels]


def _estimate(label: str, configs: list[RunConfig]) -> Estimate:
    config = configs[0]
    evaluated = config.model_copy(update={"eval": config.eval.model_copy(update={"every": 1})})
    totals = summarise_costs(Experiment.of(evaluated).rehearse())["total"]
    evaluations = len(config.eval.rounds_to_evaluate(config.rounds))
    seconds = totals["train_seconds"] * config.rounds + totals["eval_seconds"] * evaluations
    sent = (totals["bytes_up"] + totals["bytes_down"]) * config.rounds
    return Estimate(label, len(configs), seconds * len(configs), sent * len(configs))


def collect(cells: Sequence[Cell]) -> list[Row]:
    """Return one flat row for each finished run."""
    finished = [cell for cell in cells if cell.finished]
    rows = (row_of(c.label, c.config.seed, c.path.name, list(RunDirectory(c.path).events())) for c in finished)
    return [row for row in rows if row is not None]
