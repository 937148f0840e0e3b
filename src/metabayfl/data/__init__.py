"""From a config to a federation: source, pools, partition, split, fraction, corruption; all keyed by the seed."""

import numpy as np
import torch

from metabayfl.config import DataOptions, RunConfig
from metabayfl.data import corrupt
from metabayfl.data.arrays import batch_sizes
from metabayfl.data.augment import SMALLEST_SIDE
from metabayfl.data.drift import Drift
from metabayfl.data.federation import ClientData, Federation, share, split_rows
from metabayfl.data.holdings import Holdings
from metabayfl.data.pools import like, set_aside
from metabayfl.data.sources import Source, load
from metabayfl.inputs import Scaling
from metabayfl.likelihood import Categorical, Gaussian, Likelihood
from metabayfl.options import InputError
from metabayfl.randomness import numpy_generator

__all__ = ["Federation", "build"]


def build(config: RunConfig) -> tuple[Federation, tuple[int, ...]]:
    """Build the federation that a config describes; also the shape of one input."""
    source = load(config.data)
    check_augmentation(config, source)
    builder = Builder(config, source)
    clients = [builder.client(number) for number in range(len(builder.holdings.clients))]
    federation = Federation.from_clients(
        clients,
        builder.common_test(),
        likelihood_for(source.classes, config.data),
        builder.unlabelled(),
        scaling=Scaling(source.mean, source.std) if source.mean else None,
        drift=builder.drift(),
        augment=config.data.augment,
    )
    return federation, source.input_shape


def likelihood_for(classes: int | None, options: DataOptions) -> Likelihood:
    """Return the likelihood of so many classes, or of values."""
    if classes is None:
        return Gaussian(options.noise_std)
    if options.noise_std != DataOptions().noise_std:
        raise InputError(f"data.noise_std = {options.noise_std}: it is for regression, and the labels are classes")
    return Categorical(classes)


class Builder:
    """Who holds which rows of a source, and in what state."""

    def __init__(self, config: RunConfig, source: Source) -> None:
        self.config, self.source, self.seed = config, source, config.seed
        self.holdings = Holdings.of(config.data, source, config.seed)
        clients = len(self.holdings.clients)
        self.batch_sizes = batch_sizes(config.data.batch_size, clients)
        self.corruption = corrupt.Corruption.of(config.corrupt, clients, source.in_unit_range, source.classes)
        if config.eval.on == "dev" and not config.data.dev:
            raise InputError("eval.on = 'dev' needs samples that no client holds: set data.dev, such as 5000")

    def rows(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return one client's rows of the source: to train and to test."""
        held, fractions = self.holdings.clients[number], (self.config.data.test_fraction, self.config.select.fraction)
        split = split_rows(number, len(held), self.seed, *fractions)
        return held[split.train], held[split.test]

    def client(self, number: int) -> ClientData:
        """Return one client's data: split, thinned out and corrupted."""
        train, held = self.rows(number)
        if self.config.eval.on == "dev":
            held = like(self.source.y, held, self.holdings.dev, numpy_generator(self.seed, number, "local dev"))
        x, y = self.corruption.train(self.source.x[train], self.source.given_y[train], number, self.seed)
        kept = self._kept(train, number)
        test_x = self.corruption.test(self.source.x[held], number, self.seed)
        test = _tensor(test_x), _tensor(self.source.y[held])
        size = share(len(kept), self.config.select.fraction)
        return ClientData(_tensor(x[kept]), _tensor(y[kept]), size, *test, self.batch_sizes[number])

    def _kept(self, rows: np.ndarray, number: int) -> np.ndarray:
        """Choose a share of a client's training samples, the same share of each class."""
        labels = self.source.y[rows] if self.source.classes is not None else np.zeros(len(rows), dtype=np.int64)
        return corrupt.fraction(labels, self.config.data.fraction, numpy_generator(self.seed, "fraction", number))

    def common_test(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the global model is judged on."""
        source = self.source
        if self.config.eval.on == "dev":
            return _tensor(source.x[self.holdings.dev]), _tensor(source.y[self.holdings.dev])
        return _tensor(source.test_x), _tensor(source.test_y)

    def drift(self) -> Drift | None:
        """Return how training data change from round to round."""
        options = self.config.drift
        clip = self.corruption.clip
        return None if options.kind == "none" else Drift(options, self.seed, self.source.classes, clip)

    def unlabelled(self) -> torch.Tensor | None:
        """Return the pool U: inputs without labels."""
        data = self.config.data
        if data.unlabelled_from is None:
            return _tensor(self.source.x[pool]) if len(pool := self.holdings.unlabelled) else None
        # Tiny-ImageNet is larger than the images of CIFAR, and can be scaled to them.
        resize = self.source.input_shape[-1] if data.unlabelled_from == "tiny-imagenet" else None
        other = load(DataOptions(name=data.unlabelled_from, resize=resize))
        if other.input_shape != self.source.input_shape or other.x.dtype != self.source.x.dtype:
            shapes = f"{other.input_shape}, {data.name} of {self.source.input_shape}"
            raise InputError(f"data.unlabelled_from = {data.unlabelled_from!r}: its inputs are of shape {shapes}")
        pool, _ = set_aside(other, np.arange(len(other.x)), data.unlabelled, "unlabelled", self.seed)
        return _tensor(other.x[pool])


def check_augmentation(config: RunConfig, source: Source) -> None:
    """Refuse to crop and flip what is not a picture."""
    shape = source.input_shape
    if config.data.augment and (len(shape) != 3 or min(shape[1:]) < SMALLEST_SIDE):
        least = f"images of at least {SMALLEST_SIDE} x {SMALLEST_SIDE} are accepted"
        raise InputError(f"data.augment = true: inputs are of shape {shape}; {least}")


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))  # a mapped file is copied
