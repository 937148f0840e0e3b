"""The samples of one client, read on its own machine: an npz file, a table or a folder of images.

What must be the same on all nodes (columns, classes and their numbers, the size of images) is in the config of the run.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from metabayfl.config import DataOptions
from metabayfl.data.arrays import Pair, as_pair
from metabayfl.data.sources.arrays import read_npz
from metabayfl.data.sources.images import read_folder
from metabayfl.data.sources.table import as_rows, read_columns
from metabayfl.options import InputError

Read = tuple[np.ndarray, np.ndarray]
CLASSES = "data.classes, the names of the classes in the order of their numbers"


def read_samples(path: Path, options: DataOptions) -> Pair:
    """Read the inputs and labels of one client; the reader is chosen by how the name ends."""
    if not path.exists():
        raise InputError(f"data = {str(path)!r}: there is no such file or folder on this node")
    kind = "folder" if path.is_dir() else path.suffix
    if kind not in READERS:
        files = ", ".join(name for name in READERS if name.startswith("."))
        raise InputError(f"data = {str(path)!r}: a folder of images or a file that ends in {files} is accepted")
    return as_pair(READERS[kind](path, options), str(path))


def _read_arrays(path: Path, options: DataOptions) -> Read:
    """Read the arrays x and y of an npz file."""
    arrays = read_npz(path)
    if not {"x", "y"} <= arrays.keys():
        raise InputError(f"{path} has the arrays {', '.join(sorted(arrays))}; x and y are needed")
    return arrays["x"], arrays["y"].astype(np.float32) if options.regression else arrays["y"]


def _read_table(path: Path, options: DataOptions) -> Read:
    """Read the columns that the config names; their order and the numbers of classes never depend on the file."""
    if options.label is None or options.columns is None:
        missing = "label" if options.label is None else "columns"
        raise InputError(f"{path} is a table: the config must name its columns, and data.{missing} is missing")
    if (options.classes is None) != options.regression:
        raise InputError(f"{path} is a table: the config must have either {CLASSES}, or data.regression = true")
    columns = read_columns(path)
    rows = as_rows(columns, str(path), options.label, None, options.columns, options.regression, options.classes)
    return rows.x, rows.y


def _read_images(path: Path, options: DataOptions) -> Read:
    """Read the images in the sub-folders of a folder."""
    if options.classes is None:
        raise InputError(f"{path} is a folder of images: the config must have {CLASSES}")
    found = read_folder(path, options.classes, options)
    return found.x, found.y


READERS: dict[str, Callable[[Path, DataOptions], Read]] = {
    ".npz": _read_arrays,
    ".csv": _read_table,
    ".parquet": _read_table,
    "folder": _read_images,
}
