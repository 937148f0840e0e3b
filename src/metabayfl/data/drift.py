"""Training data that change from round to round (the paper's D_n^k): a pure function of seed, client and round."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from metabayfl.config import DriftOptions
from metabayfl.data.corrupt import gaussian_noise, label_flips
from metabayfl.options import InputError
from metabayfl.randomness import numpy_generator
from metabayfl.types import TrainData


@dataclass(frozen=True)
class Drift:
    """How training data change; d_n stays as it is."""

    options: DriftOptions
    seed: int
    classes: int | None
    """None: regression, where only samples and noise can drift."""
    clip: tuple[float, float] | None
    """The range of inputs, if they have one."""

    def __post_init__(self) -> None:
        kind, amount = self.options.kind, self.options.amount
        if kind in ("classes", "labels") and self.classes is None:
            raise InputError(f"drift.kind = {kind!r} needs classes; samples and noise are accepted for regression")
        if kind != "noise" and amount > 1:
            raise InputError(f"drift.amount = {amount}: at most 1 is accepted for drift.kind = {kind!r}")

    def size(self, samples: int) -> int:
        """Count the samples that a client of so many has in a round."""
        return math.ceil(self.options.amount * samples) if self.options.kind in ("samples", "classes") else samples

    def apply(self, data: TrainData, client: int, round_: int, rounds: int) -> TrainData:
        """Return a client's training data in a round, counted from 0; clients whose data are pooled have none."""
        if not len(data.y):
            return data
        rng = numpy_generator(self.seed, client, round_, "drift")
        kind, amount = self.options.kind, self.options.amount
        if kind == "noise":
            return replace(data, x=_from(gaussian_noise(data.x.numpy(), amount, rng, self.clip)))
        labels = data.y.numpy()
        if kind == "labels":
            outdated = amount * round_ / max(1, rounds - 1)
            return replace(data, y=_from(label_flips(labels, outdated, self.classes or 0, rng)))
        chances = None if kind == "samples" else _class_mix(labels, self.classes or 0, rng)
        rows = np.sort(rng.choice(len(labels), self.size(len(labels)), replace=False, p=chances))
        return replace(data, x=data.x[_from(rows)], y=data.y[_from(rows)])


def _class_mix(labels: np.ndarray, classes: int, rng: np.random.Generator) -> np.ndarray:
    """Chances of the samples when the mix of classes is drawn anew."""
    weights = rng.dirichlet(np.ones(classes)) + 1e-9
    chances: np.ndarray = weights[labels]
    chances /= chances.sum()
    return chances


def _from(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array)
