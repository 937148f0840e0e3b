"""From options to a federation: source, unlabelled pool, partition, split, fraction, noise; all keyed by the seed."""

import numpy as np
import torch

from metabayfl.config import DataOptions, SelectOptions
from metabayfl.data import corrupt, partition
from metabayfl.data.arrays import batch_sizes
from metabayfl.data.federation import ClientData, Federation, share, split_rows
from metabayfl.data.sources import Source, load
from metabayfl.likelihood import Categorical
from metabayfl.options import InputError
from metabayfl.randomness import numpy_generator

__all__ = ["Federation", "build"]


def build(options: DataOptions, select: SelectOptions, seed: int) -> tuple[Federation, tuple[int, ...]]:
    """Build the federation that the options describe; also the shape of one input."""
    source = load(options.name)
    pool, rest = _set_aside(source, options.unlabelled, seed)
    parts = _partition(options, source.y[rest], seed)
    sizes = batch_sizes(options.batch_size, len(parts))
    clients = []
    for number, part in enumerate(parts):
        split = split_rows(number, len(part), seed, options.test_fraction, select.fraction)
        held = rest[part][split.test]
        x, y, select_size = _training_data(source, rest[part][split.train], number, options, select, seed)
        test = torch.from_numpy(source.x[held]), torch.from_numpy(source.y[held])
        clients.append(ClientData(x, y, select_size, *test, sizes[number]))
    common = torch.from_numpy(source.test_x), torch.from_numpy(source.test_y)
    unlabelled = torch.from_numpy(source.x[pool]) if len(pool) else None
    return Federation.from_clients(clients, common, Categorical(source.classes), unlabelled), source.input_shape


def _set_aside(source: Source, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose the unlabelled pool; clients share the rest."""
    if count >= len(source.x):
        raise InputError(f"data.unlabelled = {count}: {len(source.x)} samples are there, clients need some of them")
    order = numpy_generator(seed, "unlabelled").permutation(len(source.x))
    return np.sort(order[:count]), np.sort(order[count:])


def _partition(options: DataOptions, labels: np.ndarray, seed: int) -> list[np.ndarray]:
    arguments: dict[str, float] = {}
    if options.partition.startswith("dirichlet"):
        arguments = {"alpha": options.alpha, "min_size": options.min_size}
    return partition.split(options.partition, labels, options.clients, numpy_generator(seed, "partition"), **arguments)


def _training_data(
    source: Source, rows: np.ndarray, number: int, options: DataOptions, select: SelectOptions, seed: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Keep a fraction of a client's training samples and add noise; also the size of d_n. Test parts stay clean."""
    x, y = source.x[rows], source.y[rows]
    kept = corrupt.fraction(y, options.fraction, numpy_generator(seed, "fraction", number))
    noisy = corrupt.gaussian_noise(x, options.noise_variance, numpy_generator(seed, "noise", number))
    return torch.from_numpy(noisy[kept]), torch.from_numpy(y[kept]), share(len(kept), select.fraction)
