"""From a config to a run: data, model and method by name."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from torch import nn

from metabayfl import models
from metabayfl.api import run_job
from metabayfl.config import RunConfig, as_toml, read
from metabayfl.data import Federation, build
from metabayfl.engine import local
from metabayfl.engine.local import Observer
from metabayfl.engine.plan import make_job
from metabayfl.likelihood import Likelihood
from metabayfl.methods import create
from metabayfl.methods.base import Method
from metabayfl.options import InputError
from metabayfl.randomness import keyed_globals
from metabayfl.rebuild import build_spec
from metabayfl.result import Result, load
from metabayfl.store import Event, RunDirectory


@dataclass(frozen=True)
class Experiment:
    """A config with everything it names."""

    config: RunConfig
    method: Method
    federation: Federation
    model: nn.Module

    @classmethod
    def of(cls, config: RunConfig) -> "Experiment":
        """Build what a config names; the cheap checks come first."""
        method = create(config.method)
        federation, input_shape = build(config)
        return cls(config, method, federation, build_model(config, federation.likelihood, input_shape))

    def run(self, out: Path, workers: int, observe: Observer = lambda event: None, *, resume: bool = False) -> Result:
        """Carry it out in a directory."""
        return run_job(
            self.model,
            self.federation,
            self.method,
            self.config.plan(),
            out=out,
            workers=workers,
            resume=resume,
            observe=observe,
            config=tomli_w.dumps(as_toml(self.config)),
        )

    def rehearse(self) -> list[Event]:
        """Carry out the first round in a place that is thrown away; returns its events."""
        job = make_job(self.method, self.model, self.federation, self.config.plan())
        with tempfile.TemporaryDirectory(prefix="metabayfl-rehearsal-") as scratch:
            directory = RunDirectory(Path(scratch))
            directory.create({}, {}, {})
            local.run(job, directory, until=1)
            return list(directory.events())


def build_model(config: RunConfig, likelihood: Likelihood, input_shape: tuple[int, ...]) -> nn.Module:
    """Build the model that a config names, for labels and inputs of this kind."""
    classes = getattr(likelihood, "classes", 1)
    with keyed_globals(config.seed, "model"):
        return models.build(
            config.model.name, classes=classes, input_shape=input_shape, **(config.model.model_extra or {})
        )


def is_finished(path: Path) -> bool:
    """Whether a run has published its last round and written its models."""
    directory = RunDirectory(path)
    if not (path / "run.json").exists():
        return False
    rounds = directory.description()["rounds"]
    checkpoint = directory.checkpoint()
    return checkpoint is not None and checkpoint.round >= rounds and (path / "model.safetensors").exists()


def resume(path: Path, workers: int, observe: Observer = lambda event: None) -> Result:
    """Go on with an interrupted run; a finished one is only opened."""
    if is_finished(path):
        spec = RunDirectory(path).description()["model"].get("spec")
        return load(path, None if spec is None else build_spec(spec))
    if (path / "remote.json").exists():
        raise InputError(f"{path} is a run with clients on other machines: `metabayfl flower resume {path}` goes on")
    config = path / "config.toml"
    if not config.exists():
        why = "was started from Python: call federate(..., out=..., resume=True)"
        raise InputError(f"{path} " + (why if (path / "run.json").exists() else "is not a run directory"))
    return Experiment.of(read(config)).run(path, workers, observe, resume=True)
