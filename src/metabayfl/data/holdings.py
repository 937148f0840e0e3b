"""Who holds which training samples: drawn from the seed, named by the data, or read from an index file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metabayfl.config import DataOptions
from metabayfl.data import partition
from metabayfl.data.pools import set_aside
from metabayfl.data.sources import Source, data_folder
from metabayfl.data.sources.files import resolve
from metabayfl.options import InputError
from metabayfl.randomness import numpy_generator
from metabayfl.tensorfile import write_bytes

FORMAT = "metabayfl partition 1"
POOLS = ("dev", "unlabelled")


@dataclass(frozen=True)
class Holdings:
    """Row numbers of the training samples of each client and of the pools; no row is in two places."""

    clients: list[np.ndarray]
    dev: np.ndarray
    unlabelled: np.ndarray

    @classmethod
    def of(cls, options: DataOptions, source: Source, seed: int) -> "Holdings":
        """Set the pools aside and share out the rest, or read who holds what."""
        if options.partition_file is not None:
            return read(options, source, seed)
        dev, rest = set_aside(source, np.arange(len(source.x)), options.dev, "dev", seed)
        pool, rest = set_aside(source, rest, _own_pool(options), "unlabelled", seed)
        return cls([rest[part] for part in _share_out(options, source, rest, seed)], dev, pool)

    def write(self, path: Path, options: DataOptions, source: Source, seed: int) -> None:
        """Write an index file: JSON that names the dataset and the rows of each client."""
        about = {"format": FORMAT, "dataset": options.name, "samples": len(source.x), "seed": seed}
        rows = {name: getattr(self, name).tolist() for name in POOLS}
        rows["clients"] = [part.tolist() for part in self.clients]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, json.dumps(about | rows).encode())


def _own_pool(options: DataOptions) -> int:
    return options.unlabelled if options.unlabelled_from is None else 0


def _share_out(options: DataOptions, source: Source, rows: np.ndarray, seed: int) -> list[np.ndarray]:
    """Return who holds which of the rows, as positions among them."""
    if options.partition == "by-column":
        if source.owners is None:
            raise InputError(
                f"data.partition = 'by-column': data.name = {options.name!r} names no clients here; "
                "a table with data.client_column does, and an npz file with an array `client`"
            )
        return partition.by_column(source.owners[rows])
    arguments: dict[str, float] = {}
    if options.partition.startswith("dirichlet"):
        arguments = {"alpha": options.alpha, "min_size": options.min_size}
    labels = source.y[rows]
    if source.classes is None:
        # Targets are no classes: all samples are of one kind, and only partitions that ignore classes make sense.
        if options.partition != "iid":
            accepted = "iid and by-column are accepted"
            raise InputError(f"data.partition = {options.partition!r} shares out classes; for regression {accepted}")
        labels = np.zeros(len(rows), dtype=np.int64)
    rng = numpy_generator(seed, "partition")
    return partition.split(options.partition, labels, options.clients, rng, **arguments)


def read(options: DataOptions, source: Source, seed: int) -> Holdings:
    """Read an index file, refusing what does not fit the data."""
    path = resolve(options.partition_file, data_folder(), "data.partition_file", "a file of `metabayfl data export`")
    values = _values(path)
    found = values.get("dataset"), values.get("samples")
    if found != (options.name, len(source.x)):
        raise InputError(
            f"{path} is for {found[1]} training samples of {found[0]!r}; here are {len(source.x)} of {options.name!r}"
        )
    clients = values.get("clients")
    if not isinstance(clients, list) or not clients:
        raise InputError(f"{path} has no clients: a list of row numbers for each is needed")
    parts = [_rows(part, f"{path}, client {number}", len(source.x)) for number, part in enumerate(clients)]
    given = {name: _rows(values[name], f"{path}, {name}", len(source.x)) for name in POOLS if values.get(name)}
    taken = _disjoint([*parts, *given.values()], path, len(source.x))
    free = np.flatnonzero(~taken)
    pools = {}
    for name, count in (("dev", options.dev), ("unlabelled", _own_pool(options))):
        if name in given:
            pools[name] = given[name]
            if len(given[name]) != count:
                raise InputError(f"data.{name} = {count}, but {path} sets {len(given[name])} samples aside")
        else:
            pools[name], free = set_aside(source, free, count, name, seed) if count else (np.arange(0), free)
    return Holdings(parts, **pools)


def _values(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise InputError(f"{path} is not an index file of `metabayfl data export` (format: {FORMAT!r})")
    return values


def _rows(values: Any, where: str, samples: int) -> np.ndarray:
    rows = np.asarray(values) if isinstance(values, list) and values else np.empty(0)
    if rows.ndim != 1 or rows.dtype.kind != "i" or rows.min() < 0 or rows.max() >= samples:
        raise InputError(f"{where}: a list of row numbers from 0 to {samples - 1} is accepted")
    return np.sort(rows).astype(np.int64)


def _disjoint(parts: Sequence[np.ndarray], path: Path, samples: int) -> np.ndarray:
    """Return which rows are taken, refusing rows that are taken twice."""
    counts = np.bincount(np.concatenate(parts), minlength=samples)
    if counts.max() > 1:
        raise InputError(f"{path}: row {counts.argmax()} is held {counts.max()} times; each row has one holder")
    return counts > 0
