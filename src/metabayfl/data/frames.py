"""Frames of pandas and datasets of Hugging Face, by what they can do: neither library is needed here."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from metabayfl.data import partition
from metabayfl.data.sources.table import as_rows
from metabayfl.options import InputError

Pairs = list[tuple[np.ndarray, np.ndarray]]


def frame_arrays(
    frame: Any, label: str, client: str | None, parts: Sequence[Any] | None, columns: Sequence[str] | None
) -> Pairs:
    """Return inputs and labels of each client from a frame whose other columns are numeric."""
    if not hasattr(frame, "columns") or not hasattr(frame, "__getitem__"):
        raise InputError(f"frame is a {type(frame).__name__}; a pandas DataFrame is accepted")
    _check_choice(client, parts)
    found = {str(name): np.asarray(frame[name]) for name in frame.columns}
    rows = as_rows(found, "the frame", label, client, columns)
    return _by_client(rows.x, rows.y, None if client is None else found[client], parts)


def huggingface_arrays(dataset: Any, image: str, label: str, client: str | None, parts: Sequence[Any] | None) -> Pairs:
    """Return inputs and labels of each client from a dataset with a column of images (or numbers)."""
    names = getattr(dataset, "column_names", None)
    if isinstance(names, Mapping) or names is None:
        splits = f"; choose one of its splits: {', '.join(names)}" if names else ""
        raise InputError(f"dataset is a {type(dataset).__name__}; a Dataset with column_names is accepted{splits}")
    _check_choice(client, parts)
    for name in (image, label, *([client] if client else [])):
        if name not in names:
            raise InputError(f"the dataset has no column {name!r}, but {', '.join(map(repr, names))}")
    pixels = [_pixels(value, row) for row, value in enumerate(dataset[image])]
    shapes = {values.shape for values in pixels}
    if len(shapes) > 1:
        raise InputError(f"the images of column {image!r} have {len(shapes)} shapes, such as {sorted(shapes)[:2]}")
    owners = None if client is None else np.asarray(list(dataset[client]))
    return _by_client(np.stack(pixels), np.asarray(list(dataset[label])), owners, parts)


def _check_choice(client: str | None, parts: Sequence[Any] | None) -> None:
    if (client is None) == (parts is None):
        raise InputError("give either client, the column that names them, or parts, the row numbers of each client")


def _pixels(value: Any, row: int) -> np.ndarray:
    """Return one image with the channels first, or one row of numbers."""
    if hasattr(value, "convert") and getattr(value, "mode", "L") not in ("L", "RGB"):
        value = value.convert("RGB")
    pixels = np.asarray(value)
    if pixels.dtype.kind not in "biuf" or pixels.ndim not in (1, 2, 3):
        raise InputError(f"sample {row} is a {type(value).__name__}; images or numbers are accepted")
    if pixels.dtype != np.uint8:
        return pixels.astype(np.float32)
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)


def _by_client(x: np.ndarray, y: np.ndarray, owners: np.ndarray | None, parts: Sequence[Any] | None) -> Pairs:
    """Divide rows among clients: by a column, or as `parts` says."""
    rows = partition.by_column(owners) if owners is not None else [np.asarray(part) for part in parts or ()]
    for number, part in enumerate(rows):
        if part.ndim != 1 or part.dtype.kind not in "iu" or (len(part) and not 0 <= part.min() <= part.max() < len(x)):
            raise InputError(f"parts[{number}]: row numbers from 0 to {len(x) - 1} are accepted")
    return [(x[part], y[part]) for part in rows]
