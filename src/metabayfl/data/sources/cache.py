"""Decoded datasets on disk: memory-mapped, named by a hash of the files they come from, written whole or not at all."""

import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from metabayfl.data.sources.source import Source, tell

FORMAT = 1
NAME = ".metabayfl-cache"
ARRAYS = ("x", "y", "test_x", "test_y", "owners", "human_y")


def cached(files: Iterable[Path], key: tuple[Any, ...], home: Path, decode: Callable[[], Source]) -> Source:
    """Return what `decode` makes of the files, as read-only memory maps where a cache can be kept.

    The name of an entry hashes paths, sizes and times of the files and `key`, all on which decoding depends.
    """
    entry = _name(files, key)
    places = [home / NAME, _user_cache()]
    for place in places:
        if (source := _read(place / entry)) is not None:
            return source
    decoded = decode()
    for place in places:
        with suppress(OSError):
            _write(place / entry, decoded)
            if (source := _read(place / entry)) is not None:
                return source
    tell(f"no cache of decoded data: neither {places[0]} nor {places[1]} can be written")
    return _read_only(decoded)


def _name(files: Iterable[Path], key: tuple[Any, ...]) -> str:
    digest = hashlib.blake2b(repr((FORMAT, key)).encode(), digest_size=16)
    for path in files:
        about = path.stat()
        digest.update(repr((str(path), about.st_size, about.st_mtime_ns)).encode())
    return digest.hexdigest()


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "metabayfl")


def _write(entry: Path, source: Source) -> None:
    """Write an entry beside its place and rename it; if another process was faster, its entry stays."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=entry.parent))
    try:
        arrays = {name: array for name in ARRAYS if (array := getattr(source, name)) is not None}
        for name, array in arrays.items():
            np.save(scratch / f"{name}.npy", array, allow_pickle=False)
        plain = {field.name: getattr(source, field.name) for field in fields(source) if field.name not in ARRAYS}
        about = {"sums": {name: _sum(array) for name, array in arrays.items()}, "source": plain}
        (scratch / "about.json").write_text(json.dumps(about), encoding="utf-8")
        scratch.chmod(0o755)
        if entry.exists() and _read(entry) is None:
            shutil.rmtree(entry)
        with suppress(FileExistsError):
            scratch.rename(entry)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _read(entry: Path) -> Source | None:
    """Map an entry; None if it is missing or damaged."""
    try:
        about = json.loads((entry / "about.json").read_text(encoding="utf-8"))
        arrays = {name: np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in about["sums"]}
        if any(_sum(array) != about["sums"][name] for name, array in arrays.items()):
            return None
        values: dict[str, Any] = dict(arrays)
        for name, value in about["source"].items():
            values[name] = tuple(value) if isinstance(value, list) else value
        return Source(**values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError):
        return None


def _sum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _read_only(source: Source) -> Source:
    for name in ARRAYS:
        if (array := getattr(source, name)) is not None:
            array.flags.writeable = False
    return source
