"""Samples that no client holds: the unlabelled pool U and the dev pool."""

import numpy as np

from metabayfl.data.sources import Source
from metabayfl.options import InputError
from metabayfl.randomness import numpy_generator


def set_aside(source: Source, rows: np.ndarray, count: int, name: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose `count` of the rows, each class by its share; returns them and the rest, both sorted."""
    if count >= len(rows):
        raise InputError(f"data.{name} = {count}: {len(rows)} samples are there, and some must be left")
    order = rows[numpy_generator(seed, name).permutation(len(rows))]
    labels = source.y[order] if source.classes is not None else np.zeros(len(order), dtype=np.int64)
    chosen = np.zeros(len(order), dtype=bool)
    for label, wanted in enumerate(_shares(np.bincount(labels), count)):
        chosen[np.flatnonzero(labels == label)[:wanted]] = True
    return np.sort(order[chosen]), np.sort(order[~chosen])


def like(labels: np.ndarray, rows: np.ndarray, pool: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Choose rows of a pool with the class mix of other rows: as many as those, or as many as the pool allows."""
    if labels.dtype.kind == "f":
        return np.sort(rng.permutation(pool)[: len(rows)])
    wanted = np.bincount(labels[rows], minlength=int(labels.max()) + 1)
    there = np.bincount(labels[pool], minlength=len(wanted))
    both = (wanted > 0) & (there > 0)
    scale = min(1.0, float((there[both] / wanted[both]).min())) if both.any() else 0.0
    order = rng.permutation(pool)
    counts = np.maximum(np.floor(scale * wanted).astype(int), both)
    return np.sort(np.concatenate([order[labels[order] == label][:count] for label, count in enumerate(counts)]))


def _shares(sizes: np.ndarray, count: int) -> np.ndarray:
    """Share out a count in proportion to sizes, by largest remainders."""
    shares, remainders = np.divmod(sizes * count, max(1, sizes.sum()))
    rest = np.argsort(-remainders, kind="stable")[: count - shares.sum()]
    shares[rest] += 1
    return shares
