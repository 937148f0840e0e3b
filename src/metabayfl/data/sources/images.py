"""Image files, decoded with Pillow; a folder whose sub-folders are classes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from metabayfl.config import DataOptions
from metabayfl.data.sources.cache import cached
from metabayfl.data.sources.files import resolve
from metabayfl.data.sources.source import Source, hold_out, moments
from metabayfl.options import InputError

ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


class Pictures(NamedTuple):
    """Files of images and their classes."""

    paths: list[Path]
    labels: np.ndarray

    @classmethod
    def join(cls, by_class: Sequence[Sequence[Path]]) -> "Pictures":
        """Lay the files of all classes out one after the other."""
        labels = np.repeat(np.arange(len(by_class)), [len(paths) for paths in by_class])
        return cls([path for paths in by_class for path in paths], labels)


def images(options: DataOptions, folder: Path | None) -> Source:
    """Images of your own: a folder whose sub-folders are classes, or train/ and test/ with such folders."""
    home = resolve(options.path, folder, "data.path", "the folder that has a sub-folder for each class")
    divided = (home / "train").is_dir() and (home / "test").is_dir()
    names = _class_names(home / "train" if divided else home)
    train = Pictures.join([picture_files(home / "train" / name if divided else home / name) for name in names])
    test = _pictures(home / "test", names, str(home / "train")) if divided else None
    key = ("images", options.resize, options.grey, options.common_test, decoder())
    files = [*train.paths, *(test.paths if test else ())]
    return cached(files, key, folder or home, lambda: _decode(train, test, names, options))


def read_folder(home: Path, names: Sequence[str], options: DataOptions) -> Source:
    """Read a folder whose sub-folders are some of the classes named; there is no test set."""
    found = _pictures(home, names, f"data.classes, which are {', '.join(names)}")
    key = ("folder", tuple(names), options.resize, options.grey, decoder())

    def decode() -> Source:
        x = decode_all(found.paths, options.resize, options.grey)
        return Source(x, found.labels, x[:0], found.labels[:0], len(names), tuple(names))

    return cached(found.paths, key, home, decode)


def _class_names(home: Path) -> tuple[str, ...]:
    names = _sub_folders(home)
    if len(names) < 2:
        raise InputError(f"{home} has {len(names)} sub-folders; at least 2, one for each class, are needed")
    return tuple(names)


def _sub_folders(home: Path) -> list[str]:
    found = home.iterdir() if home.is_dir() else ()
    return sorted(path.name for path in found if path.is_dir() and not path.name.startswith("."))


def _pictures(home: Path, names: Sequence[str], known: str) -> Pictures:
    """Return the images of classes that are known, of which some may be absent."""
    here = _sub_folders(home)
    if not here:
        raise InputError(f"{home} has no sub-folders; one for each class is needed")
    for name in here:
        if name not in names:
            raise InputError(f"{home / name}: there is no such class in {known}")
    return Pictures.join([picture_files(home / name) if name in here else [] for name in names])


def _decode(train: Pictures, test: Pictures | None, names: tuple[str, ...], options: DataOptions) -> Source:
    x, y = decode_all(train.paths, options.resize, options.grey), train.labels
    if test is None:
        rows, held = hold_out(len(x), options.common_test, "common test", "images")
        x, y, test_x, test_y = x[rows], y[rows], x[held], y[held]
    else:
        test_x, test_y = decode_all(test.paths, options.resize, options.grey), test.labels
    if x.shape[1:] != test_x.shape[1:]:
        raise InputError(f"training images are {x.shape[1:]}, test images {test_x.shape[1:]}; set data.resize")
    return Source(x, y, test_x, test_y, len(names), names, *moments(x))


def picture_files(place: Path) -> list[Path]:
    """Return the image files of a folder, in the order of their names."""
    try:
        names = sorted(name for name in os.listdir(place) if os.path.splitext(name)[1].lower() in ENDINGS)
    except OSError as error:
        raise InputError(f"the folder of images {place} cannot be read: {error.strerror}") from None
    if not names:
        raise InputError(f"{place} holds no images (names that end in {', '.join(sorted(ENDINGS))})")
    return [place / name for name in names]


def decode_all(paths: Sequence[Path], resize: int | None, grey: bool = False) -> np.ndarray:
    """Return images as bytes [n, channels, height, width]: three channels, or one if grey is wanted."""
    pictures: np.ndarray | None = None
    for row, path in enumerate(paths):
        pixels = _decode_one(path, resize, grey)
        if pictures is None:
            pictures = np.empty((len(paths), *pixels.shape), dtype=np.uint8)
        if pixels.shape != pictures.shape[1:]:
            sizes = f"{pixels.shape[1]}x{pixels.shape[2]} pixels, {paths[0]} {pictures.shape[2]}x{pictures.shape[3]}"
            raise InputError(f"{path} has {sizes}; make them equal with data.resize, such as data.resize = 32")
        pictures[row] = pixels
    return np.empty((0, 3, 1, 1), dtype=np.uint8) if pictures is None else pictures


def _decode_one(path: Path, resize: int | None, grey: bool) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(path) as image:
            plain = image.convert("L" if grey else "RGB")
            if resize is not None:
                plain = plain.resize((resize, resize), Image.Resampling.BILINEAR)
            pixels = np.asarray(plain)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = "it is empty" if path.is_file() and not path.stat().st_size else str(error)
        raise InputError(f"{path} is not an image that can be read: {reason}") from None
    return pixels[None] if grey else np.moveaxis(pixels, 2, 0)


def decoder() -> str:
    """Name what decodes images: another version may give other bytes."""
    import PIL

    return f"pillow {PIL.__version__}"
