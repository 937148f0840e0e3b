"""What a run leaves: models that predict and say how sure they are, metrics, and a directory to keep."""

import shutil
from dataclasses import asdict, dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from metabayfl import metrics, tensorfile
from metabayfl.data.arrays import as_inputs, whole
from metabayfl.inputs import Scaling
from metabayfl.likelihood import Categorical, Gaussian, Likelihood
from metabayfl.methods import create, table
from metabayfl.methods.base import Method, make_task
from metabayfl.options import InputError
from metabayfl.randomness import keyed_globals
from metabayfl.rebuild import rebuild_model, with_frozen
from metabayfl.store import Event, RunDirectory
from metabayfl.types import Context, Params


@dataclass(frozen=True)
class ClassPrediction:
    """Predicted class probabilities, and how sure they are."""

    logits: Tensor
    """[samples, batch, classes]: one for each weight sample."""

    @cached_property
    def probs(self) -> Tensor:
        """Probabilities [batch, classes], averaged over the weight samples."""
        return metrics.mean_probabilities(self.logits)

    @cached_property
    def entropy(self) -> Tensor:
        """Total uncertainty of each prediction, in nats."""
        return metrics.predictive_entropy(self.logits)

    @cached_property
    def mutual_information(self) -> Tensor:
        """The part of the uncertainty that comes from not knowing the weights: more data would lower it."""
        return metrics.mutual_information(self.logits)


@dataclass(frozen=True)
class ValuePrediction:
    """Predicted values, and how sure they are."""

    outputs: Tensor
    """[samples, batch, targets]: one for each weight sample."""
    noise_std: float

    @cached_property
    def mean(self) -> Tensor:
        """Expected values [batch, targets]."""
        return self.outputs.mean(0)

    @cached_property
    def std(self) -> Tensor:
        """Standard deviation of an observation: spread of the weights and noise together."""
        return (self.outputs.var(0, correction=0) + self.noise_std**2).sqrt()


class Result:
    """A finished run: its models, its metrics and its log."""

    def __init__(self, path: Path, model: nn.Module | None = None, method: Method | None = None) -> None:
        self.directory = RunDirectory(path)
        about = _complete(self.directory.description(), path)
        self.method = recreate(about, path) if method is None else method
        self.seed, self.rounds, self.clients = about["seed"], about["rounds"], about["clients"]
        constants = self.directory.read_constants()
        module = rebuild_model(about["model"], str(path)) if model is None else model
        if isinstance(module, nn.Module):
            module = with_frozen(module, constants)
        likelihood, channels_last = likelihood_from(about["likelihood"]), about["model"]["channels_last"]
        scaling = None if about["scaling"] is None else Scaling(*map(tuple, about["scaling"]))
        self.task = make_task(self.method, module, likelihood, channels_last, scaling)
        self._check_fit(constants)
        self.task.load_constants(constants)

    def _check_fit(self, constants: Params) -> None:
        """Refuse a module whose names and shapes are not those of the stored model."""
        path = self.directory.path
        stored = tensorfile.read(path / "model.safetensors")[0]
        there = _shapes({name: t for name, t in stored.items() if not name.startswith("rho.")} | constants)
        here = _shapes(self.task.named(self.task.split(self.task.initial())[0]) | self.task.constants())
        wrong = sorted(name for name in there | here if there.get(name) != here.get(name))
        if wrong:
            raise InputError(
                f"{path} holds another model: {wrong[0]} is {there.get(wrong[0], 'missing')} there and "
                f"{here.get(wrong[0], 'missing')} here; pass the one that was trained, as in load(..., model=...)"
            )

    @cached_property
    def events(self) -> list[Event]:
        """The log: one event for each client and round, one for each round."""
        return list(self.directory.events())

    @cached_property
    def history(self) -> list[Event]:
        """Events of the rounds that were evaluated."""
        return [event for event in self.events if event["event"] == "round" and event["metrics"]]

    @property
    def metrics(self) -> dict[str, Any]:
        """Metrics after the last round, by view: G/G, G/L and P/L."""
        found: dict[str, Any] = self.history[-1]["metrics"]
        return found

    def model(self, client: int | None = None, averaged: bool = False) -> Params:
        """Return the global model, as it was after the last round or averaged over rounds, or a client's own."""
        if client is not None:
            return self._personal(client)
        if averaged:
            return self._averaged()
        model = self.directory.read_model("model", self.task)
        if self.method.global_model(model, Context(self.task, self.seed, self.rounds, self.rounds)) is None:
            why = "batchnorm = 'local'" if self.task.has_private_part else self.method.name
            raise InputError(f"{why} leaves no global model: ask for a client's own, such as client=0")
        return model

    def _averaged(self) -> Params:
        if not (self.directory.path / "averaged.safetensors").exists():
            raise InputError(
                f"{self.directory.path} has no averaged model: it is made with average = 0.15, for example"
            )
        return self.directory.read_model("averaged", self.task)

    def _personal(self, client: int) -> Params:
        if isinstance(client, bool) or not isinstance(client, Integral) or not 0 <= int(client) < self.clients:
            raise InputError(f"client = {client!r}: 0 to {self.clients - 1} is accepted")
        name = f"personal/{client:06d}"
        if not (self.directory.path / f"{name}.safetensors").exists():
            remote = ", or it lies on the client's machine" if (self.directory.path / "remote.json").exists() else ""
            why = f"it never took part, or keep_personal was off{remote}"
            raise InputError(f"client {client} has no model of its own: {why}")
        return self.directory.read_model(name, self.task)

    def predict(
        self, x: Any, client: int | None = None, samples: int = 10, averaged: bool = False
    ) -> ClassPrediction | ValuePrediction:
        """Predict with the global model or a client's own; the same call gives the same answer."""
        outputs = self._outputs(self.model(client, averaged), as_inputs(x, "x"), client, whole("samples", samples, 1))
        likelihood = self.task.likelihood
        if isinstance(likelihood, Categorical):
            return ClassPrediction(outputs)
        return ValuePrediction(outputs, likelihood.noise_std)

    def _outputs(self, model: Params, x: Tensor, client: int | None, samples: int) -> Tensor:
        ctx = Context(self.task, self.seed, self.rounds, self.rounds, client)
        shape = tuple(x.shape)
        if not len(x):
            raise InputError(f"x = an array of shape {shape}: at least one sample is accepted")
        try:
            with keyed_globals(self.seed, "predict"):
                outputs = self.method.predict(model, x, samples, ctx)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise InputError(f"the model cannot take x of shape {shape}: {str(error).splitlines()[0]}") from error
        if outputs.ndim < 2 or outputs.shape[1] != len(x):
            raise InputError(f"x = an array of shape {shape}: a batch of samples is accepted, such as x[None] for one")
        return outputs

    def module(self, client: int | None = None) -> nn.Module:
        """Return a plain module of your own class with the mean weights; it takes inputs that are already scaled.

        A client's class frequencies, which `predict` adds to the outputs, are not in it.
        """
        model = self.model(client)
        return self.task.export(model["mu"], model.get("buffers"))

    def save(self, path: str | Path) -> None:
        """Copy the run to a new directory."""
        target = Path(path)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise InputError(f"{target} is not empty: choose another directory")
        shutil.copytree(self.directory.path, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("lock"))


def load(path: str | Path, model: nn.Module | None = None, method: Method | None = None) -> Result:
    """Open a saved run. A model or method of your own class is passed again; built-in ones are rebuilt."""
    return Result(Path(path), model, method)


def class_of(method: Method) -> str:
    """Return where the class of a method is defined."""
    return f"{type(method).__module__}:{type(method).__qualname__}"


def recreate(about: dict[str, Any], path: Path) -> Method:
    """Build the method of a run; one that is not registered under its name must be passed."""
    named = about["method"]["name"]
    if named not in table() or class_of(found := create(about["method"])) != about["method_class"]:
        raise InputError(f"{path} was made with a method of yours, {about['method_class']}: pass it as method=")
    return found


def _complete(about: dict[str, Any], path: Path) -> dict[str, Any]:
    """Refuse a description of a run that is damaged or not finished."""
    missing = [
        key
        for key in ("method", "method_class", "model", "likelihood", "scaling", "seed", "rounds", "clients")
        if key not in about
    ]
    if missing:
        raise InputError(f"{path / 'run.json'} is damaged: it has no {missing[0]}")
    if not (path / "model.safetensors").exists():
        how = f"metabayfl resume {path}" if (path / "config.toml").exists() else "federate(..., out=..., resume=True)"
        raise InputError(f"{path} is not finished: go on with {how}")
    return about


def _shapes(tensors: Params) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def describe_likelihood(likelihood: Likelihood) -> dict[str, Any]:
    """Return a likelihood as plain values."""
    return {"name": type(likelihood).__name__.lower(), **asdict(likelihood)}


def likelihood_from(about: dict[str, Any]) -> Likelihood:
    """Undo `describe_likelihood`."""
    return Categorical(about["classes"]) if about["name"] == "categorical" else Gaussian(about["noise_std"])
