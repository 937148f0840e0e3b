"""Clients and their data: train, d_n for selection, local test; checked once, at the door."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from metabayfl.likelihood import Categorical, Gaussian, Likelihood
from metabayfl.options import InputError
from metabayfl.randomness import numpy_generator
from metabayfl.types import TrainData

Arrays = tuple[Any, Any]
"""Inputs and labels: numpy arrays, tensors or lists."""


@dataclass(frozen=True)
class ClientData:
    """One client: its training data, the last `select_size` rows of which are d_n, and its own test part."""

    x: Tensor
    y: Tensor
    select_size: int
    test_x: Tensor
    test_y: Tensor
    batch_size: int = 32

    def train_data(self, held_out: bool, dtype: torch.dtype = torch.float32) -> TrainData:
        """Return what a method may see; with `held_out` the rows of d_n are not trained on."""
        x = self.x.to(dtype) if self.x.is_floating_point() else self.x
        cut = len(x) - self.select_size
        stop = cut if held_out else len(x)
        return TrainData(x[:stop], self.y[:stop], x[cut:], self.y[cut:], self.batch_size)


@dataclass(frozen=True)
class Rows:
    """Samples of all clients one after the other; client n has the rows from offsets[n] to offsets[n + 1]."""

    x: Tensor
    y: Tensor
    offsets: np.ndarray

    @classmethod
    def join(cls, parts: Sequence[tuple[Tensor, Tensor]]) -> "Rows":
        """Lay the clients' samples out one after the other."""
        offsets = np.cumsum([0, *(len(x) for x, _ in parts)])
        return cls(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), offsets)

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        """Views of one client's samples."""
        rows = slice(int(self.offsets[client]), int(self.offsets[client + 1]))
        return self.x[rows], self.y[rows]

    def sizes(self) -> np.ndarray:
        """Count each client's samples."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Federation:
    """Clients, a common test set, an unlabelled pool and the likelihood of the labels.

    A few large tensors hold everybody's samples, so that ten thousand clients cost no more than their data and worker
    processes share them.
    """

    train: Rows
    local_test: Rows
    select_sizes: np.ndarray
    batch_sizes: np.ndarray
    test_x: Tensor
    test_y: Tensor
    likelihood: Likelihood
    unlabelled: Tensor | None = None

    def __len__(self) -> int:
        return len(self.select_sizes)

    def client(self, number: int) -> ClientData:
        """Views of one client's data."""
        return ClientData(
            *self.train.of(number),
            int(self.select_sizes[number]),
            *self.local_test.of(number),
            int(self.batch_sizes[number]),
        )

    def train_sizes(self, held_out: bool) -> dict[int, int]:
        """Count the training samples of each client."""
        sizes = self.train.sizes() - (self.select_sizes if held_out else 0)
        return dict(enumerate(sizes.tolist()))

    @classmethod
    def from_arrays(
        cls,
        clients: Sequence[Arrays],
        test: Arrays | None = None,
        *,
        seed: int = 0,
        test_fraction: float = 0.2,
        select_fraction: float = 0.2,
        batch_size: int | Sequence[int] = 32,
        classes: int | None = None,
        noise_std: float = 1.0,
        unlabelled: Any = None,
    ) -> "Federation":
        """Build a federation from one (inputs, labels) pair per client.

        Of each client `test_fraction` becomes its local test part, and `select_fraction` of the rest its d_n. Without
        a `test` set, the local test parts together are the common one. Whole-number labels mean classes, real ones
        regression with observations of standard deviation `noise_std`.
        """
        if not clients:
            raise InputError("a federation needs at least one client, got none")
        pairs = [_pair(x, y, f"client {number}") for number, (x, y) in enumerate(clients)]
        common = None if test is None else _pair(*test, "test")
        likelihood = _likelihood(pairs + ([common] if common else []), classes, noise_std)
        sizes = batch_sizes(batch_size, len(pairs))
        parts = tuple(
            split_client(x, y, number, seed, test_fraction, select_fraction, sizes[number])
            for number, (x, y) in enumerate(pairs)
        )
        pool = None if unlabelled is None else as_inputs(unlabelled, "unlabelled")
        return cls.from_clients(parts, common, likelihood, pool)

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[ClientData],
        test: tuple[Tensor, Tensor] | None,
        likelihood: Likelihood,
        unlabelled: Tensor | None = None,
    ) -> "Federation":
        """Build a federation from clients that are already split."""
        if test is None:
            test = torch.cat([c.test_x for c in clients]), torch.cat([c.test_y for c in clients])
        if len(test[0]) == 0:
            raise InputError("there is nothing to test on: pass test=(x, y) or a test_fraction above 0")
        return cls(
            Rows.join([(client.x, client.y) for client in clients]),
            Rows.join([(client.test_x, client.test_y) for client in clients]),
            np.array([client.select_size for client in clients]),
            np.array([client.batch_size for client in clients]),
            *test,
            likelihood,
            unlabelled,
        )

    @classmethod
    def from_datasets(
        cls, clients: Sequence[Dataset[Any]], test: Dataset[Any] | None = None, **options: Any
    ) -> "Federation":
        """Build a federation from one map-style torch Dataset per client; options as `from_arrays`."""
        arrays = [_stack(dataset, f"client {number}") for number, dataset in enumerate(clients)]
        return cls.from_arrays(arrays, None if test is None else _stack(test, "test"), **options)


def split_client(
    x: Tensor, y: Tensor, number: int, seed: int, test_fraction: float, select_fraction: float, batch_size: int
) -> ClientData:
    """Split one client's samples into training, d_n and test, keyed by seed and client."""
    for name, value in (("test_fraction", test_fraction), ("select_fraction", select_fraction)):
        if not 0 <= value < 1:
            raise InputError(f"{name} = {value!r}: a number from 0 to below 1 is accepted")
    if len(x) < 2 and test_fraction > 0:
        raise InputError(
            f"client {number} has {len(x)} sample; at least 2 are needed, one to train and one to test: "
            "leave it out, or give a common test set and test_fraction=0"
        )
    tests = share(len(x), test_fraction)
    order = torch.from_numpy(numpy_generator(seed, "split", number).permutation(len(x)))
    train, held = order[tests:], order[:tests]
    return ClientData(x[train], y[train], share(len(train), select_fraction), x[held], y[held], batch_size)


def share(samples: int, fraction: float) -> int:
    """Return a rounded share; any share above zero gets a sample, and at least one stays behind."""
    return min(samples - 1, max(1, round(samples * fraction))) if fraction > 0 else 0


def _pair(x: Any, y: Any, who: str) -> tuple[Tensor, Tensor]:
    inputs = as_inputs(x, who)
    labels = torch.as_tensor(np.asarray(y) if not isinstance(y, Tensor) else y)
    if labels.is_floating_point():
        labels = labels.to(torch.float32)
        _require_finite(labels, who, "labels")
    else:
        labels = labels.to(torch.int64)
    if len(inputs) == 0:
        raise InputError(f"{who} is empty; at least 2 samples are needed")
    if labels.ndim == 0 or len(inputs) != len(labels):
        raise InputError(f"{who} has {len(inputs)} inputs but labels of shape {tuple(labels.shape)}")
    return inputs, labels


def as_inputs(x: Any, who: str) -> Tensor:
    """Return whole numbers as indices, bytes as numbers from 0 to 1, everything else as float32."""
    try:
        tensor = torch.as_tensor(np.asarray(x) if not isinstance(x, Tensor) else x.detach())
    except (TypeError, ValueError) as error:
        raise InputError(f"{who}: the inputs are not an array of numbers ({error})") from None
    if tensor.dtype == torch.uint8:
        return tensor.to(torch.float32) / 255
    if not tensor.is_floating_point():
        return tensor.to(torch.int64)
    tensor = tensor.to(torch.float32)
    _require_finite(tensor, who, "inputs")
    return tensor


def _require_finite(tensor: Tensor, who: str, what: str) -> None:
    bad = ~tensor.isfinite()
    if bad.any():
        first = int(bad.reshape(len(bad), -1).any(1).nonzero()[0])
        raise InputError(f"{who}: {int(bad.sum())} of the {what} are NaN or infinite, first in sample {first}")


def _likelihood(pairs: list[tuple[Tensor, Tensor]], classes: int | None, noise_std: float) -> Likelihood:
    """Check that clients agree on shapes and kinds of labels, and choose the likelihood."""
    shapes = {tuple(x.shape[1:]) for x, _ in pairs}
    if len(shapes) > 1:
        raise InputError(f"the clients' inputs have different shapes: {', '.join(map(str, sorted(shapes)))}")
    kinds = {y.is_floating_point() for _, y in pairs}
    if len(kinds) > 1:
        raise InputError("some labels are whole numbers (classes), some are real (regression); give all the same kind")
    if kinds == {True}:
        return Gaussian(noise_std)
    low, high = min(int(y.min()) for _, y in pairs), max(int(y.max()) for _, y in pairs)
    if any(y.ndim != 1 for _, y in pairs):
        raise InputError("class labels must be one number per sample")
    count = high + 1 if classes is None else classes
    if low < 0 or high >= count:
        raise InputError(f"labels run from {low} to {high}; 0 to {count - 1} is accepted with {count} classes")
    if count < 2:
        raise InputError("all labels are 0: classification needs at least 2 classes (pass classes=)")
    return Categorical(count)


def batch_sizes(batch_size: int | Sequence[int], clients: int) -> list[int]:
    """Return the mini-batch size of each client."""
    sizes = [batch_size] * clients if isinstance(batch_size, int) else list(batch_size)
    if len(sizes) != clients or any(size < 1 for size in sizes):
        raise InputError(f"batch_size = {batch_size!r}: one number from 1, or one for each of the {clients} clients")
    return sizes


def _stack(dataset: Dataset[Any], who: str) -> Arrays:
    length = len(dataset) if hasattr(dataset, "__len__") else 0
    if not length:
        raise InputError(f"{who} is an empty dataset or has no length; a map-style torch Dataset is accepted")
    items = [dataset[index] for index in range(length)]
    return torch.stack([torch.as_tensor(x) for x, _ in items]), torch.stack([torch.as_tensor(y) for _, y in items])
