"""Five lines of Python: a module, arrays of clients, a method, a result."""

import json
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from metabayfl.config import EvalOptions, Plan, SelectOptions
from metabayfl.data.arrays import whole
from metabayfl.data.federation import Federation
from metabayfl.diagnosis import diagnose
from metabayfl.engine import local
from metabayfl.engine.local import MISSED_DEADLINE
from metabayfl.engine.plan import Job, make_job
from metabayfl.environment import describe_data, describe_environment
from metabayfl.inputs import holds_numbers
from metabayfl.methods import BayFL
from metabayfl.methods.base import Method
from metabayfl.methods.needs import refuse_unmet
from metabayfl.options import InputError
from metabayfl.rebuild import describe_model
from metabayfl.result import Result, class_of, describe_likelihood
from metabayfl.store import RunDirectory
from metabayfl.types import TrainData


def federate(
    model: nn.Module,
    federation: Federation,
    method: Method | None = None,
    *,
    rounds: int = 20,
    seed: int = 0,
    out: str | Path | None = None,
    workers: int = 1,
    resume: bool = False,
    held_out: bool | None = None,
    eval: EvalOptions | Mapping[str, Any] | None = None,
    observe: local.Observer = lambda event: None,
    **plan: Any,
) -> Result:
    """Train a model on a federation.

    The module is copied and its weights are where training starts. `out` keeps the run in a directory, from which
    `resume=True` goes on after an interruption; `workers` processes share the clients. `plan` takes the options of
    `metabayfl.config.Plan`, such as clients_per_round.
    """
    options = Plan(rounds=rounds, seed=seed, select=SelectOptions(held_out=held_out), eval=eval or {}, **plan)
    result = run_job(
        model,
        federation,
        BayFL() if method is None else method,
        options,
        out=out,
        workers=workers,
        resume=resume,
        observe=observe,
    )
    faults = [event for event in result.events if event.get("fault") and event["fault"] != MISSED_DEADLINE]
    if faults:
        first = f"round {faults[0]['round']}, client {faults[0]['client']}: {faults[0]['fault']}"
        warnings.warn(f"{len(faults)} updates did not count ({first})", stacklevel=2)
    for found in diagnose(result.events, result.method.model_dump()):
        warnings.warn(found, stacklevel=2)
    return result


def run_job(
    model: nn.Module,
    federation: Federation,
    method: Method,
    plan: Plan,
    *,
    out: str | Path | None = None,
    workers: int | local.Crew = 1,
    resume: bool = False,
    observe: local.Observer = lambda event: None,
    config: str = "",
) -> Result:
    """Carry out a plan in a run directory, new or to be resumed; `config` is the text it came from, kept with it."""
    if not callable(workers):
        whole("workers", workers, 1)
    check_kinds(model, federation, method)
    if method.leaks:
        warnings.warn(f"{method.name} sees test data here: the run is marked, its numbers are no results", stacklevel=3)
    job = make_job(method, model, federation, plan)
    check_job(job)
    directory = RunDirectory(Path(tempfile.mkdtemp(prefix="metabayfl-") if out is None else out))
    try:
        open_run(directory, describe(model, job), job, federation, resume, config)
        local.run(job, directory, workers, observe)
        result = Result(directory.path, model, method)
    except BaseException:
        if out is None:
            shutil.rmtree(directory.path, ignore_errors=True)
        raise
    finally:
        directory.unlock()
    if out is None:
        weakref.finalize(result, shutil.rmtree, directory.path, ignore_errors=True)
    return result


def describe(model: nn.Module, job: Job) -> dict[str, Any]:
    """Return what a run is, in plain values."""
    return {
        "method": {"name": job.method.name, **job.method.model_dump(mode="json")},
        "method_class": class_of(job.method),
        "model": describe_model(model) | {"channels_last": job.task.channels_last},
        "likelihood": describe_likelihood(job.federation.likelihood),
        "scaling": job.task.scaling,
        "leaks": job.method.leaks,
        "clients": len(job.federation),
        **job.plan.model_dump(mode="json"),
    }


def open_run(
    directory: RunDirectory, about: dict[str, Any], job: Job, federation: Federation, resume: bool, config: str
) -> None:
    """Begin a run, or make sure that a run to be resumed is the same one; data are described before any pooling."""
    environment = describe_environment(federation, job.plan.seed)
    if not resume or not (directory.path / "run.json").exists():
        directory.create(about, environment, job.task.constants(), config, describe_data(federation))
        return
    directory.lock()
    before = directory.description()
    now = json.loads(json.dumps(about))
    different = sorted(key for key in now if before.get(key) != now[key])
    if different:
        raise InputError(f"{directory.path} is another run: {', '.join(different)} differ from what is asked for now")
    if directory.environment().get("data_hash") != environment["data_hash"]:
        raise InputError(f"{directory.path} was made with other data: its data hash differs")
    constants = directory.read_constants()
    if constants.keys() != job.task.constants().keys():
        raise InputError(f"{directory.path} is another run: other parameters are frozen than in the model given now")
    job.task.load_constants(constants)


def check_kinds(model: nn.Module, federation: Federation, method: Method) -> None:
    """Refuse what only looks like a model, a federation or a method."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model = {model!r} is not an nn.Module: an object such as MyNet() is accepted")
    if not isinstance(federation, Federation):
        raise InputError(f"the federation is a {type(federation).__name__}; Federation.from_arrays(...) makes one")
    if not isinstance(method, Method):
        raise InputError(f"method = {method!r}: an object such as BayFL() or FedAvg(rate=0.01) is accepted")


def hint(data: TrainData) -> str:
    """Say how inputs and labels were understood, if that may be why a model does not fit them."""
    hints = "" if holds_numbers(data.x) else "; whole-number inputs are indices: give real numbers if they are not"
    if data.y.is_floating_point() and torch.equal(data.y, data.y.round()):
        hints += "; real labels mean regression: give whole numbers if they are classes"
    return hints


def check_batchnorm(job: Job) -> None:
    """Refuse mini-batches of one sample where a layer normalises over the mini-batch."""
    if not any(isinstance(layer, _BatchNorm) for layer in job.task.module.modules()):
        return
    for client, samples in job.train_sizes.items():
        if min(samples, int(job.federation.batch_sizes[client])) < 2:
            raise InputError(
                f"client {client} has mini-batches of 1 sample, and BatchNorm needs at least 2: "
                "give it more samples or a larger batch_size, or use a model with GroupNorm"
            )


def check_job(job: Job) -> None:
    """Refuse what cannot work before anything is written."""
    refuse_unmet(job.method.name, job.method.needs, job.offers)
    first = job.train_data(0, 0)
    try:
        job.task.verify(first.x, first.y)
    except InputError as error:
        raise InputError(f"{error}{hint(first)}") from error
    empty = [client for client, size in job.train_sizes.items() if size < 1]
    if empty:
        raise InputError(f"client {empty[0]} has nothing to train on once d_n is held out")
    check_batchnorm(job)
    wanted = job.plan.clients_per_round
    if wanted is not None and wanted > len(job.federation):
        raise InputError(f"clients_per_round = {wanted}: there are {len(job.federation)} clients")
    invited = len(job.participants(0))
    if job.plan.min_updates > invited:
        raise InputError(f"min_updates = {job.plan.min_updates}: only {invited} clients are invited to a round")
