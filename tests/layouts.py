"""Small datasets in the layouts in which the large ones are published."""

import gzip
import pickle
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

CIFAR10_FILES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"]
IDX_FILES = {"train-images-idx3-ubyte": 12, "train-labels-idx1-ubyte": 12, "t10k-images-idx3-ubyte": 5,
             "t10k-labels-idx1-ubyte": 5}  # fmt: skip


def byte_images(samples: int, size: int = 32, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (samples, channels, size, size), dtype=np.uint8)


def write_cifar10(home: Path, per_batch: int = 20, protocol: int = 2) -> Path:
    folder = home / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for number, name in enumerate(CIFAR10_FILES[:-1]):
        labels = [(number + row) % 10 for row in range(per_batch)]
        data = byte_images(per_batch, seed=number).reshape(per_batch, -1)
        write_pickle(folder / name, {b"data": data, b"labels": labels, b"batch_label": b"x"}, protocol)
    names = [f"class{number}".encode() for number in range(10)]
    write_pickle(folder / "batches.meta", {b"label_names": names, b"num_vis": 3072}, protocol)
    return folder


def write_cifar100(home: Path, samples: int = 200) -> Path:
    folder = home / "cifar-100-python"
    folder.mkdir(parents=True)
    for name in ("train", "test"):
        labels = [row % 100 for row in range(samples)]
        data = byte_images(samples).reshape(samples, -1)
        write_pickle(folder / name, {"data": data, "fine_labels": labels, "coarse_labels": labels})
    write_pickle(folder / "meta", {"fine_label_names": [f"fine{number}" for number in range(100)]})
    return folder


def write_pickle(path: Path, value: Any, protocol: int = 2) -> None:
    path.write_bytes(pickle.dumps(value, protocol))


def pack(folder: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    return archive


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes() + values.astype(np.uint8).tobytes()


def idx_contents() -> Mapping[str, bytes]:
    return {
        name: idx(np.arange(count) % 10 if "labels" in name else byte_images(count, 28)[:, 0])
        for name, count in IDX_FILES.items()
    }


def write_idx(folder: Path, packed: bool = True) -> Path:
    folder.mkdir(parents=True)
    for name, content in idx_contents().items():
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return folder


def write_image(path: Path, size: int = 8, colour: int | tuple[int, int, int] = (10, 20, 30)) -> Path:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", (size, size), colour).save(path)
    return path


def write_tiny_imagenet(home: Path) -> Path:
    """Two classes, numbered in the order of wnids.txt, which is not that of their names; one image is greyscale."""
    folder = home / "tiny-imagenet-200"
    for wnid, red in (("n02", 200), ("n01", 100)):
        for number in range(3):
            write_image(folder / "train" / wnid / "images" / f"{wnid}_{number}.png", 64, (red, 0, number))
    write_image(folder / "train" / "n01" / "images" / "n01_9.png", 64, 77)
    for number, red in enumerate((200, 100)):
        write_image(folder / "val" / "images" / f"val_{number}.png", 64, (red, 1, 1))
    (folder / "wnids.txt").write_text("n02\nn01\n")
    (folder / "words.txt").write_text("n00\tnothing\nn01\tgoldfish, Carassius auratus\nn02\tbullfrog\n")
    (folder / "val" / "val_annotations.txt").write_text("val_1.png\tn01\t0\t0\t9\t9\nval_0.png\tn02\t0\t0\t9\t9\n")
    return folder
