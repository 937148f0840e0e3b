"""Clients and their data: train, d_n for selection, local test."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from metabayfl.data.arrays import (
    Arrays,
    as_inputs,
    as_pair,
    batch_sizes,
    check_alike,
    check_fraction,
    likelihood_of,
    of_one_type,
    stack_samples,
    whole,
)
from metabayfl.data.augment import crop_and_flip
from metabayfl.data.drift import Drift
from metabayfl.data.frames import frame_arrays, huggingface_arrays
from metabayfl.inputs import Scaling
from metabayfl.likelihood import Likelihood
from metabayfl.options import InputError
from metabayfl.randomness import numpy_generator
from metabayfl.types import TrainData


@dataclass(frozen=True)
class ClientData:
    """One client: its training data, the last `select_size` rows of which are d_n, and its own test part."""

    x: Tensor
    y: Tensor
    select_size: int
    test_x: Tensor
    test_y: Tensor
    batch_size: int = 32

    def train_data(self, held_out: bool) -> TrainData:
        """Return what a method may see; with `held_out` the rows of d_n are not trained on."""
        cut = len(self.x) - self.select_size
        stop = cut if held_out else len(self.x)
        return TrainData(self.x[:stop], self.y[:stop], self.x[cut:], self.y[cut:], self.batch_size)


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

    def take(self, chosen: Sequence[np.ndarray]) -> "Rows":
        """Copy out the chosen rows of each client, in that order."""
        rows = torch.from_numpy(
            np.concatenate([start + part for start, part in zip(self.offsets, chosen, strict=False)])
        )
        return Rows(self.x[rows], self.y[rows], np.cumsum([0, *map(len, chosen)]))


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
    scaling: Scaling | None = None
    """What is done to inputs before the model sees them."""
    drift: Drift | None = None
    """How training data change from round to round."""
    augment: bool = False
    """Whether training images are cropped and flipped at random."""

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
        sizes = (self.train.sizes() - (self.select_sizes if held_out else 0)).tolist()
        return dict(enumerate(sizes if self.drift is None else map(self.drift.size, sizes)))

    def train_data(self, client: int, held_out: bool, round_: int, rounds: int) -> TrainData:
        """Return what a method may see of a client in a round counted from 0."""
        data = self.client(client).train_data(held_out)
        data = data if self.drift is None else self.drift.apply(data, client, round_, rounds)
        return replace(data, augment=crop_and_flip) if self.augment else data

    def pooled(self) -> "Federation":
        """Give the first client everybody's training data, all d_n at their end; test parts stay where they are."""
        cuts = (self.train.sizes() - self.select_sizes).tolist()
        parts = [self.train.of(number) for number in range(len(self))]
        order = [*(slice(cut) for cut in cuts), *(slice(cut, None) for cut in cuts)]
        pieces = [(x[rows], y[rows]) for (x, y), rows in zip(parts * 2, order, strict=True)]
        x, y = torch.cat([x for x, _ in pieces]), torch.cat([y for _, y in pieces])
        select_sizes = np.array([self.select_sizes.sum(), *[0] * (len(self) - 1)])
        batch_sizes = np.full_like(self.batch_sizes, self.batch_sizes.max())
        rows = Rows(x, y, np.array([0, *[len(x)] * len(self)]))
        return replace(self, train=rows, select_sizes=select_sizes, batch_sizes=batch_sizes)

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
        regression with observations of standard deviation `noise_std`. Whole-number inputs are indices, such as words;
        bytes (uint8) stand for numbers from 0 to 1.
        """
        pairs = {
            f"client {n}": as_pair(item, f"client {n}") for n, item in enumerate(() if clients is None else clients)
        }
        if not pairs:
            raise InputError("a federation needs at least one client, got none")
        common = None if test is None else as_pair(test, "test")
        likelihood = likelihood_of(pairs | ({"test": common} if common else {}), classes, noise_std)
        key, sizes = whole("seed", seed, 0), batch_sizes(batch_size, len(pairs))
        check_fraction("test_fraction", test_fraction)
        check_fraction("select_fraction", select_fraction)
        pool = None if unlabelled is None else as_inputs(unlabelled, "unlabelled")
        if pool is not None:
            check_alike(pool, "unlabelled", pairs["client 0"][0])
        rows = Rows.join(of_one_type(pairs))
        pairs.clear()
        split = [split_rows(n, size, key, test_fraction, select_fraction) for n, size in enumerate(rows.sizes())]
        train, local_test = rows.take([part.train for part in split]), rows.take([part.test for part in split])
        select_sizes = np.array([part.select_size for part in split])
        return cls(train, local_test, select_sizes, np.array(sizes), *_test_set(common, local_test), likelihood, pool)

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[ClientData],
        test: tuple[Tensor, Tensor] | None,
        likelihood: Likelihood,
        unlabelled: Tensor | None = None,
        **more: Any,
    ) -> "Federation":
        """Build a federation from clients that are already split; `more` are other fields."""
        local_test = Rows.join([(client.test_x, client.test_y) for client in clients])
        return cls(
            Rows.join([(client.x, client.y) for client in clients]),
            local_test,
            np.array([client.select_size for client in clients]),
            np.array([client.batch_size for client in clients]),
            *_test_set(test, local_test),
            likelihood,
            unlabelled,
            **more,
        )

    @classmethod
    def from_datasets(
        cls, clients: Sequence[Dataset[Any]], test: Dataset[Any] | None = None, **options: Any
    ) -> "Federation":
        """Build a federation from one map-style torch Dataset per client; options as `from_arrays`."""
        arrays = [stack_samples(dataset, f"client {number}") for number, dataset in enumerate(clients)]
        return cls.from_arrays(arrays, None if test is None else stack_samples(test, "test"), **options)

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        label: str,
        client: str | None = None,
        *,
        parts: Sequence[Any] | None = None,
        columns: Sequence[str] | None = None,
        **options: Any,
    ) -> "Federation":
        """Build a federation from a pandas frame; options as `from_arrays`.

        Clients are the values of the column `client`, in sorted order, or `parts`, the row numbers of each. All other
        columns, or `columns`, must be numeric. A label column of text or whole numbers means classes.
        """
        return cls.from_arrays(frame_arrays(frame, label, client, parts, columns), **options)

    @classmethod
    def from_huggingface(
        cls,
        dataset: Any,
        image: str = "image",
        label: str = "label",
        client: str | None = None,
        *,
        parts: Sequence[Any] | None = None,
        **options: Any,
    ) -> "Federation":
        """Build a federation from a Hugging Face dataset (one split); clients as in `from_frame`."""
        return cls.from_arrays(huggingface_arrays(dataset, image, label, client, parts), **options)


def _test_set(given: tuple[Tensor, Tensor] | None, local_test: Rows) -> tuple[Tensor, Tensor]:
    """Return the common test set: the one that is given, or the local test parts together."""
    x, y = (local_test.x, local_test.y) if given is None else given
    if len(x) == 0:
        raise InputError("there is nothing to test on: pass test=(x, y) or a test_fraction above 0")
    return x, y


class Split(NamedTuple):
    """Rows of one client: training, of which the last `select_size` are d_n, and test."""

    train: np.ndarray
    test: np.ndarray
    select_size: int


def split_rows(number: int, samples: int, seed: int, test_fraction: float, select_fraction: float) -> Split:
    """Split one client's samples, keyed by seed and client."""
    if samples < 2 and test_fraction > 0:
        raise InputError(
            f"client {number} has {samples} sample; at least 2 are needed, one to train and one to test: "
            "leave it out, or give a common test set and test_fraction=0"
        )
    tests = share(samples, test_fraction)
    order = numpy_generator(seed, "split", number).permutation(samples)
    return Split(order[tests:], order[:tests], share(samples - tests, select_fraction))


def share(samples: int, fraction: float) -> int:
    """Return a rounded share; any share above zero gets a sample, and at least one stays behind."""
    return min(samples - 1, max(1, round(samples * fraction))) if fraction > 0 else 0
