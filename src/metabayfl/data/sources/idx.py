"""MNIST and Fashion-MNIST: idx files, gzipped or not, under the names that everyone downloads."""

import gzip
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from metabayfl.config import DataOptions
from metabayfl.data.sources.cache import cached
from metabayfl.data.sources.files import check_sums, read_bytes, require_folder
from metabayfl.data.sources.source import Source, subset_note
from metabayfl.options import InputError

FILES = tuple(f"{part}-{what}-ubyte" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1"))
DEBIAN = Path("/usr/share/datasets")
EXPECTED = (60_000, 10_000)
BYTES = 8


@dataclass(frozen=True)
class Release:
    """How a dataset in MNIST's format is published; the sums are md5."""

    name: str
    title: str
    folders: tuple[str, ...]
    class_names: tuple[str, ...]
    mean: float
    std: float
    sums: Mapping[str, str]


MNIST = Release(
    name="mnist",
    title="MNIST",
    folders=("mnist", "MNIST/raw", "MNIST"),
    class_names=tuple("0123456789"),
    mean=0.1307,
    std=0.3081,
    sums={
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
)
FASHION_MNIST = Release(
    name="fashion-mnist",
    title="Fashion-MNIST",
    folders=("fashion-mnist", "FashionMNIST/raw", "FashionMNIST"),
    class_names=(
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
    mean=0.2860,
    std=0.3530,
    sums={
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
)  # fmt: skip


def mnist(options: DataOptions, folder: Path | None) -> Source:
    """MNIST: 70,000 handwritten digits of 28x28."""
    return _load(MNIST, options, require_folder(folder, MNIST.name))


def fashion_mnist(options: DataOptions, folder: Path | None) -> Source:
    """Fashion-MNIST: 70,000 pieces of clothing of 28x28; also where Debian's package puts it."""
    packaged = DEBIAN / "fashion-mnist"
    home = packaged if folder is None and packaged.is_dir() else require_folder(folder, FASHION_MNIST.name)
    return _load(FASHION_MNIST, options, home)


def _load(release: Release, options: DataOptions, home: Path) -> Source:
    files = _find(release, home)
    if options.verify:
        check_sums(files, release.sums)
    return cached(files, (release.name,), home, lambda: _decode(release, files))


def _find(release: Release, home: Path) -> list[Path]:
    for place in (*(home / name for name in release.folders), home):
        if any(_variants(place / FILES[0])):
            return [_one(place / name, release) for name in FILES]
    raise InputError(f"data.name = {release.name!r}: {home} holds no {release.folders[0]}/{FILES[0]}.gz")


def _variants(path: Path) -> list[Path]:
    """Names under which a file is found: gzipped or not, with the dot that some tools put before idx."""
    names = (path.name, path.name.replace("-idx", ".idx"))
    return [found for name in names for end in (".gz", "") if (found := path.with_name(name + end)).is_file()]


def _one(path: Path, release: Release) -> Path:
    found = _variants(path)
    if not found:
        raise InputError(f"data.name = {release.name!r}: the file {path}.gz is missing")
    return found[0]


def _decode(release: Release, files: list[Path]) -> Source:
    x, y, test_x, test_y = (read_idx(path) for path in files)
    for images, labels, path in ((x, y, files[0]), (test_x, test_y, files[2])):
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            shapes = f"{images.shape} and {labels.shape}"
            raise InputError(f"{path} and its labels have shapes {shapes}; [n, height, width] and [n] are accepted")
        if len(labels) and labels.max() >= len(release.class_names):
            raise InputError(
                f"{path}: its labels go up to {labels.max()}; 0 to {len(release.class_names) - 1} are accepted"
            )
    note = subset_note(release.title, (len(x), len(test_x)), EXPECTED)
    train, test = (x[:, None], y.astype(np.int64)), (test_x[:, None], test_y.astype(np.int64))
    names = release.class_names
    return Source(*train, *test, len(names), names, (release.mean,), (release.std,), note=note)


def read_idx(path: Path) -> np.ndarray:
    """Read an idx file of bytes: two zeros, the type, the number of dimensions, the dimensions, the data."""
    content = read_bytes(path)
    try:
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is truncated or damaged: {error}") from None
    if len(content) < 4 or content[:3] != bytes([0, 0, BYTES]):
        raise InputError(f"{path} is not an idx file of bytes: it begins with {content[:4].hex() or 'nothing'}")
    start = 4 + 4 * content[3]
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4))
    if len(content) < start or len(content) - start != math.prod(shape):
        raise InputError(
            f"{path} is truncated: shape {shape} needs {math.prod(shape):,} bytes, got {len(content) - start:,}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
