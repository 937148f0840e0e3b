"""Tables: CSV and parquet files (and frames, in data/frames.py) with a label column and perhaps a client column."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from metabayfl.config import DataOptions
from metabayfl.data.sources.arrays import owners_of
from metabayfl.data.sources.files import resolve
from metabayfl.data.sources.source import Source, hold_out
from metabayfl.options import InputError

Columns = Mapping[str, np.ndarray]
MISSING = ("", "na", "nan", "null", "none")


class Rows(NamedTuple):
    """A table as numbers."""

    x: np.ndarray
    y: np.ndarray
    class_names: tuple[str, ...]
    """Empty for regression."""
    owners: np.ndarray | None
    client_names: tuple[str, ...]


def table(options: DataOptions, folder: Path | None) -> Source:
    """A table of your own, CSV or parquet: a label column, numeric columns, perhaps a client column."""
    path = resolve(options.path, folder, "data.path", "a file whose name ends in .csv or .parquet")
    columns = read_columns(path)
    if options.label is None:
        raise InputError(f"data.label is missing: name the label column of {path}; it has {', '.join(columns)}")
    rows = as_rows(columns, str(path), options.label, options.client_column, options.columns, options.regression)
    train, held = hold_out(len(rows.x), options.common_test, "common test", "table")
    x, test_x = rows.x[train], rows.x[held]
    if options.standardise:
        # Constant columns stay zero; the test rows take no part in the statistics.
        centre, spread = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64)
        x, test_x = ((part - centre) / np.where(spread > 0, spread, 1) for part in (x, test_x))
    owners = None if rows.owners is None else rows.owners[train]
    return Source(
        x.astype(np.float32),
        rows.y[train],
        test_x.astype(np.float32),
        rows.y[held],
        len(rows.class_names) or None,
        rows.class_names,
        owners=owners,
        client_names=rows.client_names,
    )


def read_columns(path: Path) -> Columns:
    """Read a table; the format goes by how the name ends."""
    return read_parquet(path) if path.suffix == ".parquet" else read_csv(path)


def read_csv(path: Path) -> Columns:
    """Read a CSV file whose first line names the columns; everything is text."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            head, *lines = [line for line in csv.reader(file) if line] or [[]]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not a CSV file: {error}") from None
    names = [name.strip() for name in head]
    if not lines or len(set(names)) < len(names):
        raise InputError(f"{path}: a first line with different column names, and rows below it, are needed")
    for number, line in enumerate(lines, start=2):
        if len(line) != len(names):
            raise InputError(f"{path}, row {number}: {len(line)} values for {len(names)} columns")
    return dict(zip(names, map(np.array, zip(*lines, strict=True)), strict=True))


def read_parquet(path: Path) -> Columns:
    """Read a parquet file."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise InputError(f"{path}: parquet files need pyarrow: pip install 'metabayfl[tables]'") from None
    try:
        found = parquet.read_table(path)
    except (ArrowException, OSError) as error:
        raise InputError(f"{path} is not a parquet file: {str(error).splitlines()[0]}") from None
    return {name: found.column(name).to_numpy() for name in found.column_names}


def as_rows(
    columns: Columns,
    where: str,
    label: str,
    client: str | None,
    chosen: Sequence[str] | None,
    regression: bool = False,
    classes: Sequence[str] | None = None,
) -> Rows:
    """Turn columns into features, labels and clients; whole numbers or text as labels mean classes, others targets.

    Classes are numbered in sorted order, or as `classes` names them.
    """
    for name in (label, *([client] if client else []), *(chosen or ())):
        if name not in columns:
            raise InputError(f"{where} has no column {name!r}, but {', '.join(map(repr, columns))}")
    features = [name for name in columns if name not in (label, client)] if chosen is None else list(chosen)
    if not features:
        raise InputError(f"{where} has no columns besides {label!r}{f' and {client!r}' if client else ''}")
    x = np.stack([numbers(columns[name], f"{where}, column {name!r}") for name in features], axis=1)
    y, names = _labels(columns[label], f"{where}, column {label!r}", regression, classes)
    owners, clients = owners_of(_present(columns[client], f"{where}, column {client!r}")) if client else (None, ())
    return Rows(x, y, names, owners, clients)


def numbers(column: np.ndarray, where: str) -> np.ndarray:
    """Return a column as float32, refusing text and what is missing."""
    present = _present(column, where)
    try:
        values = present.astype(np.float64)
    except (ValueError, TypeError):
        raise InputError(
            f"{where} is not numeric: row {_first_text(column)}; encode it, or name the `columns` to use"
        ) from None
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise InputError(f"{where}: row {bad[0]} is NaN or infinite ({len(bad)} such rows); fill or drop them")
    return values.astype(np.float32)


def _first_text(column: np.ndarray) -> str:
    for row, value in enumerate(column.tolist()):
        try:
            float(value)
        except (ValueError, TypeError):
            return f"{row} is {value!r}"
    return "0"


def _present(column: np.ndarray, where: str) -> np.ndarray:
    """Refuse missing values."""
    if column.dtype.kind in "biuf":
        return column
    for row, value in enumerate(column.tolist()):
        if value is None or str(value).strip().lower() in MISSING:
            raise InputError(f"{where}: row {row} is missing ({value!r}); fill or drop such rows")
    return column


def _labels(
    column: np.ndarray, where: str, regression: bool, classes: Sequence[str] | None
) -> tuple[np.ndarray, tuple[str, ...]]:
    values = _present(column, where)
    if classes is not None:
        return _numbered(values, classes, where), tuple(classes)
    if values.dtype.kind not in "biuf":
        values = _parsed(values)
    if regression or values.dtype.kind == "f":
        return numbers(values, where), ()
    found, y = np.unique(values, return_inverse=True)
    if len(found) < 2:
        raise InputError(f"{where} holds only {str(found[0])!r}; at least 2 classes are needed")
    return y.astype(np.int64), tuple(map(str, found))


def _numbered(labels: np.ndarray, classes: Sequence[str], where: str) -> np.ndarray:
    """Return the places of labels among the names of the classes."""
    places = {name: place for place, name in enumerate(classes)}
    texts = [str(label).strip() for label in labels.tolist()]
    for row, text in enumerate(texts):
        if text not in places:
            raise InputError(f"{where}: row {row} is {text!r}; the classes are {', '.join(classes)}")
    return np.array([places[text] for text in texts], dtype=np.int64)


def _parsed(texts: np.ndarray) -> np.ndarray:
    """Read texts as whole numbers, else as real ones, else leave them."""
    for kind in (np.int64, np.float64):
        try:
            return texts.astype(kind)
        except (ValueError, TypeError, OverflowError):
            continue
    return texts.astype(str)
