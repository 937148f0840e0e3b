"""Arrays of one's own in an npz file: x, y, and if there are any test_x, test_y and client."""

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from metabayfl.config import DataOptions
from metabayfl.data import partition
from metabayfl.data.sources.files import resolve
from metabayfl.data.sources.source import Source, hold_out, moments
from metabayfl.options import InputError

COLOURS = (1, 3)


def npz(options: DataOptions, folder: Path | None) -> Source:
    """Arrays of your own in an npz file: x, y, and if there are any test_x, test_y and client."""
    path = resolve(options.path, folder, "data.path", "an npz file that holds x and y")
    arrays = read_npz(path)
    for name in ("x", "y"):
        if name not in arrays:
            raise InputError(f"{path} holds no array {name!r}, but {', '.join(arrays) or 'nothing'}")
    if ("test_x" in arrays) != ("test_y" in arrays):
        raise InputError(f"{path} holds only one of test_x and test_y; give both or neither")
    x, y = _inputs(arrays["x"], f"{path}: x"), _labels(arrays["y"], f"{path}: y")
    owners, names = owners_of(arrays["client"]) if "client" in arrays else (None, ())
    _check_lengths(path, x, y, owners)
    if "test_x" in arrays:
        test_x, test_y = _inputs(arrays["test_x"], f"{path}: test_x"), _labels(arrays["test_y"], f"{path}: test_y")
        _check_lengths(path, test_x, test_y, None)
        if test_x.shape[1:] != x.shape[1:] or test_y.dtype != y.dtype:
            raise InputError(f"{path}: test_x and test_y are of other shapes or kinds than x and y")
    else:
        train, held = hold_out(len(x), options.common_test, "common test", "npz")
        test_x, test_y, x, y = x[held], y[held], x[train], y[train]
        owners = None if owners is None else owners[train]
    classes = None if y.dtype == np.float32 else int(max(y.max(), test_y.max())) + 1
    mean, std = moments(x) if x.dtype == np.uint8 else ((), ())
    return Source(x, y, test_x, test_y, classes, mean=mean, std=std, owners=owners, client_names=names)


def read_npz(path: Path) -> Mapping[str, np.ndarray]:
    """Return the arrays of an npz file; nothing in it is unpickled."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path} is not an npz file of plain arrays: {str(error).splitlines()[0]}") from None


def owners_of(column: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Number the clients that a column names, in the sorted order of the names."""
    parts = partition.by_column(column)
    owners = np.empty(len(column), dtype=np.int64)
    for number, rows in enumerate(parts):
        owners[rows] = number
    return owners, tuple(str(column[rows[0]]) for rows in parts)


def _inputs(x: np.ndarray, where: str) -> np.ndarray:
    """Return byte images with the channels first, or float32 features."""
    if x.dtype == np.uint8:
        if x.ndim == 3:
            return x[:, None]
        if x.ndim == 4 and (x.shape[1] in COLOURS or x.shape[3] in COLOURS):
            return x if x.shape[1] in COLOURS else np.ascontiguousarray(np.moveaxis(x, 3, 1))
        raise InputError(f"{where} are bytes of shape {x.shape}; images with 1 or 3 channels are accepted")
    if x.dtype.kind != "f" or x.ndim < 2:
        raise InputError(f"{where} is {x.dtype} of shape {x.shape}; images of uint8 or rows of floats are accepted")
    return _finite(x, where)


def _labels(y: np.ndarray, where: str) -> np.ndarray:
    if y.ndim == 1 and len(y) and y.dtype.kind in "iu":
        if y.min() < 0:
            raise InputError(f"{where} holds {y.min()}; classes are numbered from 0")
        return y.astype(np.int64)
    if y.ndim >= 1 and len(y) and y.dtype.kind == "f":
        return _finite(y, where)
    raise InputError(f"{where} is {y.dtype} of shape {y.shape}; whole numbers (classes) or floats are accepted")


def _finite(values: np.ndarray, where: str) -> np.ndarray:
    if not np.isfinite(values).all():
        raise InputError(f"{where} holds NaN or infinite numbers; give finite ones")
    return values.astype(np.float32)


def _check_lengths(path: Path, x: np.ndarray, y: np.ndarray, owners: np.ndarray | None) -> None:
    if not len(x) == len(y) == len(y if owners is None else owners):
        lengths = [len(x), len(y), *([] if owners is None else [len(owners)])]
        raise InputError(f"{path}: inputs, labels and clients have {', '.join(map(str, lengths))} rows; give as many")
