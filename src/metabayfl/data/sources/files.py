"""Finding the files of a dataset, and saying exactly which one is expected where. Nothing is ever downloaded."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from metabayfl.options import InputError

VARIABLE = "METABAYFL_DATA"


def data_folder() -> Path | None:
    """Return the folder that METABAYFL_DATA names, if it is set; the flag --data-dir sets it too."""
    text = os.environ.get(VARIABLE)
    return Path(text).resolve() if text else None


def require_folder(folder: Path | None, name: str) -> Path:
    """Return the data folder, or say how to name one."""
    if folder is None:
        raise InputError(f"data.name = {name!r} is read from a folder: pass --data-dir DIR or set {VARIABLE}")
    if not folder.is_dir():
        raise InputError(f"the data folder {folder} is not a folder (--data-dir or {VARIABLE})")
    return folder.resolve()


def resolve(path: str | None, folder: Path | None, option: str, example: str) -> Path:
    """Return an existing file or folder: absolute, or relative to the data folder or to where the user stands."""
    if not path:
        raise InputError(f"{option} is missing: give {example}")
    places = [base / path for base in (folder, Path.cwd()) if base is not None]
    for place in places:
        if place.exists():
            return place.resolve()
    raise InputError(f"{option} = {path!r} is not there; looked for {' and '.join(map(str, dict.fromkeys(places)))}")


def require_files(paths: Iterable[Path], name: str) -> list[Path]:
    """Return the files, refusing the first that is missing."""
    found = list(paths)
    for path in found:
        if not path.is_file():
            raise InputError(f"data.name = {name!r}: the file {path} is missing")
    return found


def read_bytes(path: Path) -> bytes:
    """Read a file whole."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def check_sums(paths: Iterable[Path], official: Mapping[str, str]) -> None:
    """Refuse a file whose md5 is not the official one."""
    for path in paths:
        if path.name not in official:
            raise InputError(f"data.verify: no official checksum is known for {path}")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if found != official[path.name]:
            raise InputError(f"data.verify: {path} has md5 {found}, the official file {official[path.name]}")
