"""Randomness as a function of its key: the same key gives the same numbers, in any order and in any process."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

Key = int | str | None


def seed_of(*key: Key) -> int:
    """Hash a key to 63 bits."""
    plain = tuple(part if part is None or isinstance(part, str) else int(part) for part in key)
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def torch_generator(*key: Key) -> torch.Generator:
    """Return a torch generator for this key."""
    return torch.Generator().manual_seed(seed_of(*key))


def numpy_generator(*key: Key) -> np.random.Generator:
    """Return a numpy generator for this key."""
    return np.random.default_rng(seed_of(*key))


@contextmanager
def keyed_globals(*key: Key) -> Iterator[None]:
    """Seed the global generators (nn.Dropout and user code draw from them) inside, and put them back after."""
    seed = seed_of(*key)
    saved = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)  # torch.manual_seed also queues calls for devices that are not there
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(saved[0])
        np.random.set_state(saved[1])
        random.setstate(saved[2])
