"""Tiny-ImageNet-200 in its official layout."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from metabayfl.config import DataOptions
from metabayfl.data.sources.cache import cached
from metabayfl.data.sources.files import read_bytes, require_files, require_folder
from metabayfl.data.sources.images import Pictures, decode_all, decoder, picture_files
from metabayfl.data.sources.source import Source, subset_note
from metabayfl.options import InputError

NAME = "tiny-imagenet"
EXPECTED = (100_000, 10_000)
# ImageNet's customary ones.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def tiny_imagenet(options: DataOptions, folder: Path | None) -> Source:
    """Tiny-ImageNet-200: photographs of 64x64 in 200 classes; its part `val` is the test set."""
    above = require_folder(folder, NAME)
    home = above if (above / "wnids.txt").is_file() else above / "tiny-imagenet-200"
    lists = require_files([home / "wnids.txt", home / "words.txt", home / "val" / "val_annotations.txt"], NAME)
    wnids, words, annotations = (list(_lines(path)) for path in lists)
    train = Pictures.join([picture_files(home / "train" / wnid / "images") for wnid in wnids])
    test = _validation(home / "val", {wnid: number for number, wnid in enumerate(wnids)}, annotations)
    names = _class_names(wnids, words)
    files = [*lists, *train.paths, *test.paths]
    return cached(files, (NAME, options.resize, decoder()), above, lambda: _decode(train, test, names, options.resize))


def _lines(path: Path) -> Iterator[str]:
    text = read_bytes(path).decode("utf-8", "replace")
    return (line.strip() for line in text.splitlines() if line.strip())


def _class_names(wnids: Sequence[str], words: Sequence[str]) -> tuple[str, ...]:
    """Return the first word for each class, in the order of wnids.txt, which numbers the classes."""
    known = dict(line.split("\t", 1) for line in words if "\t" in line)
    return tuple(known.get(wnid, wnid).partition(",")[0] for wnid in wnids)


def _validation(place: Path, numbers: Mapping[str, int], annotations: Sequence[str]) -> Pictures:
    """Return the images that val_annotations.txt names: file, class and a box that is not used."""
    paths, labels = [], []
    here = {path.name: path for path in picture_files(place / "images")}
    for line in annotations:
        name, wnid = [*line.split("\t"), "", ""][:2]
        if wnid not in numbers:
            raise InputError(f"{place / 'val_annotations.txt'}: the line {line[:60]!r} names no class of wnids.txt")
        if name not in here:
            raise InputError(f"data.name = {NAME!r}: the file {place / 'images' / name} is missing")
        paths.append(here[name])
        labels.append(numbers[wnid])
    return Pictures(paths, np.array(labels, dtype=np.int64))


def _decode(train: Pictures, test: Pictures, names: tuple[str, ...], resize: int | None) -> Source:
    x, test_x = decode_all(train.paths, resize), decode_all(test.paths, resize)
    note = subset_note("Tiny-ImageNet", (len(x), len(test_x)), EXPECTED)
    return Source(x, train.labels, test_x, test.labels, len(names), names, MEAN, STD, note=note)
