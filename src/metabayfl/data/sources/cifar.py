"""CIFAR-10 and CIFAR-100 as published for Python: a folder of pickles, or the archive still packed."""

import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metabayfl.config import DataOptions
from metabayfl.data.sources.cache import cached
from metabayfl.data.sources.files import check_sums, read_bytes, require_files, require_folder
from metabayfl.data.sources.pickles import LARGEST_BYTES, read_pickle
from metabayfl.data.sources.source import Source, subset_note
from metabayfl.options import InputError

PIXELS = 3 * 32 * 32
EXPECTED = (50_000, 10_000)


@dataclass(frozen=True)
class Release:
    """How a CIFAR dataset is published; the sums are md5."""

    name: str
    title: str
    folder: str
    archive: str
    train: tuple[str, ...]
    test: str
    meta: str
    label_key: str
    names_key: str
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sums: Mapping[str, str]

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the files that are read."""
        return (*self.train, self.test, self.meta)


CIFAR10 = Release(
    name="cifar10",
    title="CIFAR-10",
    folder="cifar-10-batches-py",
    archive="cifar-10-python.tar.gz",
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test="test_batch",
    meta="batches.meta",
    label_key="labels",
    names_key="label_names",
    classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2023, 0.1994, 0.2010),
    sums={
        "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
        "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    },
)
CIFAR100 = Release(
    name="cifar100",
    title="CIFAR-100",
    folder="cifar-100-python",
    archive="cifar-100-python.tar.gz",
    train=("train",),
    test="test",
    meta="meta",
    label_key="fine_labels",
    names_key="fine_label_names",
    classes=100,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    sums={
        "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        "meta": "7973b15100ade9c7d40fb424638fde48",
    },
)


def cifar10(options: DataOptions, folder: Path | None) -> Source:
    """CIFAR-10: 60,000 photographs of 32x32 in 10 classes."""
    return _load(CIFAR10, options, folder)


def cifar100(options: DataOptions, folder: Path | None) -> Source:
    """CIFAR-100: 60,000 photographs of 32x32 in 100 classes (the fine labels)."""
    return _load(CIFAR100, options, folder)


def _load(release: Release, options: DataOptions, folder: Path | None) -> Source:
    home = require_folder(folder, release.name)
    files = _find(release, home)
    if options.verify:
        check_sums(files, release.sums)
    return cached(files, (release.name,), home, lambda: _decode(release, files))


def _find(release: Release, home: Path) -> list[Path]:
    """Return the unpacked files, or the archive."""
    for place in (home / release.folder, home):
        if any((place / name).is_file() for name in release.train):
            return require_files((place / name for name in release.members), release.name)
    if (home / release.archive).is_file():
        return [home / release.archive]
    raise InputError(
        f"data.name = {release.name!r}: {home} holds neither {release.folder}/{release.train[0]} nor {release.archive}"
    )


def _decode(release: Release, files: list[Path]) -> Source:
    packed = files[0].name == release.archive
    contents = _unpack(release, files[0]) if packed else {path.name: read_bytes(path) for path in files}
    where = {name: f"{files[0] if packed else files[0].parent}/{name}" for name in release.members}
    batches = [_batch(contents.pop(name), release, where[name]) for name in release.train]
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    test_x, test_y = _batch(contents[release.test], release, where[release.test])
    names = _class_names(read_pickle(contents[release.meta], where[release.meta]), release, where[release.meta])
    note = subset_note(release.title, (len(x), len(test_x)), EXPECTED)
    return Source(x, y, test_x, test_y, release.classes, names, release.mean, release.std, note=note)


def _unpack(release: Release, archive: Path) -> dict[str, bytes]:
    """Read the members that are needed, and only those, without writing any file."""
    wanted = {f"{release.folder}/{name}": name for name in release.members}
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = wanted.get(member.name.removeprefix("./"))
                file = tar.extractfile(member) if name and member.isreg() and member.size <= LARGEST_BYTES else None
                if name and file:
                    found[name] = file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise InputError(f"{archive} is truncated or damaged: {error}") from None
    for path, name in wanted.items():
        if name not in found:
            raise InputError(f"{archive} holds no file {path}")
    return found


def _batch(content: bytes, release: Release, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels of one pickle."""
    values = read_pickle(content, where)
    data, labels = (_item(values, key, where) for key in ("data", release.label_key))
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != PIXELS:
        raise InputError(f"{where} is damaged: its data are not rows of {PIXELS} bytes")
    try:
        y = np.array(labels, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{where} is damaged: its {release.label_key} are not whole numbers") from None
    if y.shape != (len(data),) or (len(y) and not 0 <= y.min() <= y.max() < release.classes):
        raise InputError(
            f"{where} is damaged: {len(data)} images need as many {release.label_key} from 0 to {release.classes - 1}"
        )
    return data.reshape(-1, 3, 32, 32), y


def _class_names(values: Any, release: Release, where: str) -> tuple[str, ...]:
    names = _item(values, release.names_key, where)
    if not isinstance(names, list) or len(names) != release.classes:
        raise InputError(f"{where} is damaged: {release.names_key} is not a list of {release.classes} names")
    return tuple(name.decode("latin1") if isinstance(name, bytes) else str(name) for name in names)


def _item(values: Any, key: str, where: str) -> Any:
    if not isinstance(values, dict) or key not in values:
        raise InputError(f"{where} is damaged: it has no {key}")
    return values[key]
