"""CIFAR-10N: labels that people gave the training images of CIFAR-10 again (Wei et al. 2022); real label noise."""

import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from metabayfl.data.sources.arrays import read_npz
from metabayfl.data.sources.files import require_folder
from metabayfl.data.sources.pickles import read_pickle
from metabayfl.data.sources.source import Source
from metabayfl.options import InputError

FILES = ("cifar-10n.npz", "CIFAR-10_human.pt")
KEYS = {
    "aggre": "aggre_label",
    "rand1": "random_label1",
    "rand2": "random_label2",
    "rand3": "random_label3",
    "worse": "worse_label",
}


def with_human_labels(source: Source, labels: str, folder: Path | None) -> Source:
    """Add the training labels; test labels stay clean, those of local test parts too."""
    home = require_folder(folder, "cifar10")
    path = next((home / name for name in FILES if (home / name).is_file()), None)
    if path is None:
        raise InputError(f"data.labels = {labels!r}: {home} holds neither {FILES[0]} nor {FILES[1]}")
    found = read_npz(path) if path.suffix == ".npz" else _read_torch(path)
    clean, human = (_column(found, key, path, source) for key in ("clean_label", KEYS[labels]))
    if not np.array_equal(clean, source.y):
        raise InputError(
            f"{path}: clean_label is not what the training images here are labelled; CIFAR-10 as published is needed"
        )
    return replace(source, human_y=human)


def _column(found: Mapping[str, Any], key: str, path: Path, source: Source) -> np.ndarray:
    values = np.asarray(found.get(key, ()))
    if values.shape != source.y.shape or values.dtype.kind not in "iu" or not 0 <= values.min() <= values.max() <= 9:
        raise InputError(f"{path}: {key} is not {len(source.y)} classes from 0 to 9")
    return values.astype(np.int64)


def _read_torch(path: Path) -> Mapping[str, Any]:
    """Read the published file: a zip whose data.pkl holds arrays."""
    try:
        with zipfile.ZipFile(path) as file:
            name = next(name for name in file.namelist() if name.endswith("/data.pkl"))
            content = file.read(name)
    except (OSError, zipfile.BadZipFile, StopIteration, RuntimeError) as error:
        raise InputError(f"{path} is not a file that torch.save wrote: {error}") from None
    values = read_pickle(content, str(path))
    return values if isinstance(values, dict) else {}
