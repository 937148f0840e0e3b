"""Sources: what lies in a folder comes out as arrays; what is missing or damaged is one line that names the file."""

import gzip
import hashlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from layouts import (
    CIFAR10_FILES,
    byte_images,
    idx_contents,
    pack,
    write_cifar10,
    write_cifar100,
    write_idx,
    write_image,
    write_pickle,
    write_tiny_imagenet,
)
from metabayfl import InputError
from metabayfl.config import DataOptions
from metabayfl.data.sources import SOURCES, Source, cifar, load
from metabayfl.data.sources.idx import read_idx

REAL = os.environ.get("METABAYFL_DATA")


@pytest.fixture(autouse=True)
def no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees the user's data folder or cache."""
    monkeypatch.delenv("METABAYFL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    monkeypatch.setattr("metabayfl.data.sources.source._told", set())


def source(home: Path, name: str, **options: Any) -> Source:
    return load(DataOptions(name=name, **options), home)


def refused(home: Path | None, *parts: str, **options: Any) -> None:
    with pytest.raises(InputError) as caught:
        load(DataOptions(**options), home)
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


class TestCifar:
    def test_the_folder_and_the_packed_archive_are_the_same(self, tmp_path: Path) -> None:
        folder = write_cifar10(tmp_path / "a")
        (tmp_path / "b").mkdir()
        pack(folder, tmp_path / "b" / "cifar-10-python.tar.gz")
        one, other, inside = (
            source(tmp_path / "a", "cifar10"),
            source(tmp_path / "b", "cifar10"),
            source(folder, "cifar10"),
        )
        for field in ("x", "y", "test_x", "test_y"):
            assert np.array_equal(getattr(one, field), getattr(other, field))
            assert np.array_equal(getattr(one, field), getattr(inside, field))
        assert one.class_names == other.class_names == tuple(f"class{number}" for number in range(10))

    def test_batches_follow_each_other(self, tmp_path: Path) -> None:
        write_cifar10(tmp_path, per_batch=20)
        found = source(tmp_path, "cifar10")
        assert (found.x.shape, found.x.dtype, found.y.dtype) == ((100, 3, 32, 32), np.uint8, np.int64)
        assert np.array_equal(found.x[20:40], byte_images(20, seed=1))
        assert found.y[20:23].tolist() == [1, 2, 3]
        assert np.array_equal(found.test_x, byte_images(20, seed=5))
        assert found.input_shape == (3, 32, 32)

    def test_cifar100_has_the_fine_labels(self, tmp_path: Path) -> None:
        write_cifar100(tmp_path)
        found = source(tmp_path, "cifar100")
        assert (found.classes, found.class_names[99], found.y[101]) == (100, "fine99", 1)

    def test_a_subset_is_told_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        write_cifar10(tmp_path)
        for _ in range(2):
            found = source(tmp_path, "cifar10")
        assert found.note == "CIFAR-10: 100 of 50,000 training images, 20 of 10,000 test images"
        assert caplog.messages == [f"metabayfl: {found.note}"]

    def test_human_labels_are_for_training_only(self, tmp_path: Path) -> None:
        write_cifar10(tmp_path)
        clean = source(tmp_path, "cifar10")
        human = {
            "clean_label": np.array(clean.y),
            "worse_label": (clean.y + 1) % 10,
            "random_label2": (clean.y + 2) % 10,
        }
        np.savez(tmp_path / "cifar-10n.npz", **human)
        worse = source(tmp_path, "cifar10", labels="worse")
        assert np.array_equal(worse.given_y, (clean.y + 1) % 10)
        assert np.array_equal(worse.y, clean.y)
        assert np.array_equal(worse.test_y, clean.test_y)
        (tmp_path / "cifar-10n.npz").unlink()
        refused(tmp_path, "data.labels = 'rand2'", "CIFAR-10_human.pt", name="cifar10", labels="rand2")
        torch.save(human, tmp_path / "CIFAR-10_human.pt")
        assert np.array_equal(source(tmp_path, "cifar10", labels="rand2").given_y, (clean.y + 2) % 10)
        refused(tmp_path, "aggre_label is not 100 classes", name="cifar10", labels="aggre")

    def test_human_labels_of_other_images_are_refused(self, tmp_path: Path) -> None:
        write_cifar10(tmp_path)
        y = source(tmp_path, "cifar10").y
        np.savez(tmp_path / "cifar-10n.npz", clean_label=y[::-1], worse_label=y)
        refused(tmp_path, "clean_label", "as published", name="cifar10", labels="worse")

    def test_checksums_are_enforced_if_wanted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = write_cifar10(tmp_path)
        refused(tmp_path, "data_batch_1", "md5", "c99cafc152244af753f735de768cd75f", name="cifar10", verify=True)
        sums = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in CIFAR10_FILES}  # noqa: S324
        monkeypatch.setattr(cifar, "CIFAR10", replace(cifar.CIFAR10, sums=sums))
        source(tmp_path, "cifar10", verify=True)
        (folder / "data_batch_4").write_bytes((folder / "data_batch_4").read_bytes() + b" ")
        refused(tmp_path, "data_batch_4", "md5", name="cifar10", verify=True)

    @pytest.mark.parametrize("name", CIFAR10_FILES)
    def test_a_missing_file_is_named(self, name: str, tmp_path: Path) -> None:
        (write_cifar10(tmp_path) / name).unlink()
        refused(tmp_path, f"cifar-10-batches-py/{name} is missing", name="cifar10")

    def test_wrong_folders(self, tmp_path: Path) -> None:
        refused(None, "--data-dir", "METABAYFL_DATA", name="cifar10")
        refused(tmp_path / "no", f"{tmp_path / 'no'} is not a folder", name="cifar10")
        refused(tmp_path, "cifar-10-batches-py/data_batch_1", "cifar-10-python.tar.gz", name="cifar10")
        refused(tmp_path, "cifar-100-python/train", "cifar-100-python.tar.gz", name="cifar100")

    def test_the_environment_names_the_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_cifar10(tmp_path)
        monkeypatch.setenv("METABAYFL_DATA", str(tmp_path))
        assert len(load(DataOptions(name="cifar10")).x) == 100

    def test_truncated_files(self, tmp_path: Path) -> None:
        folder = write_cifar10(tmp_path)
        archive = pack(folder, tmp_path / "cifar-10-python.tar.gz")
        content = (folder / "data_batch_2").read_bytes()
        (folder / "data_batch_2").write_bytes(content[: len(content) // 2])
        refused(tmp_path, "data_batch_2 is damaged", name="cifar10")
        for path in folder.iterdir():
            path.unlink()
        packed = archive.read_bytes()
        archive.write_bytes(packed[: len(packed) // 2])
        refused(tmp_path, "cifar-10-python.tar.gz is truncated or damaged", name="cifar10")
        archive.write_bytes(b"no archive")
        refused(tmp_path, "cifar-10-python.tar.gz is truncated or damaged", name="cifar10")

    def test_an_archive_without_a_member(self, tmp_path: Path) -> None:
        folder = write_cifar10(tmp_path / "a")
        (folder / "test_batch").unlink()
        (folder / "test_batch").symlink_to(folder / "data_batch_1")
        pack(folder, tmp_path / "cifar-10-python.tar.gz")
        refused(tmp_path, "holds no file cifar-10-batches-py/test_batch", name="cifar10")

    @pytest.mark.parametrize(
        ("values", "reason"),
        [
            ([1, 2], "it has no data"),
            ({"labels": [1]}, "it has no data"),
            ({"data": np.zeros((2, 3072), np.uint8)}, "it has no labels"),
            ({"data": np.zeros((2, 3071), np.uint8), "labels": [1, 2]}, "rows of 3072 bytes"),
            ({"data": np.zeros((2, 3072), np.float32), "labels": [1, 2]}, "rows of 3072 bytes"),
            ({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, "2 images need as many labels"),
            ({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 10]}, "from 0 to 9"),
            ({"data": np.zeros((2, 3072), np.uint8), "labels": [1, -1]}, "from 0 to 9"),
            ({"data": np.zeros((2, 3072), np.uint8), "labels": [1, "x"]}, "not whole numbers"),
        ],
    )
    def test_a_batch_that_is_something_else(self, values: Any, reason: str, tmp_path: Path) -> None:
        write_pickle(write_cifar10(tmp_path) / "data_batch_3", values)
        refused(tmp_path, "data_batch_3 is damaged", reason, name="cifar10")

    def test_a_malicious_batch_is_not_run(self, tmp_path: Path) -> None:
        (write_cifar10(tmp_path) / "data_batch_3").write_bytes(
            b"cos\nsystem\n(S'touch %s/trace'\ntR." % bytes(tmp_path)
        )
        refused(tmp_path, "data_batch_3 is not a dataset", "os.system", "nothing of it was run", name="cifar10")
        assert not (tmp_path / "trace").exists()


class TestIdx:
    @pytest.mark.parametrize("packed", [True, False])
    @pytest.mark.parametrize(
        ("name", "folder"), [("mnist", "MNIST/raw"), ("fashion-mnist", "fashion-mnist"), ("mnist", ".")]
    )
    def test_files_as_everyone_has_them(self, packed: bool, name: str, folder: str, tmp_path: Path) -> None:
        write_idx(tmp_path / "data" / folder, packed)
        found = source(tmp_path / "data", name)
        assert (found.x.shape, found.test_x.shape, found.classes) == ((12, 1, 28, 28), (5, 1, 28, 28), 10)
        assert np.array_equal(found.x[:, 0], byte_images(12, 28)[:, 0])
        assert found.y.tolist() == [*range(10), 0, 1]
        assert "12 of 60,000 training images" in found.note

    def test_a_dot_before_idx(self, tmp_path: Path) -> None:
        folder = write_idx(tmp_path / "mnist")
        for path in list(folder.iterdir()):
            path.rename(path.with_name(path.name.replace("-idx", ".idx")))
        assert len(source(tmp_path, "mnist").x) == 12

    def test_what_is_missing_or_damaged(self, tmp_path: Path) -> None:
        refused(tmp_path, "mnist/train-images-idx3-ubyte.gz", name="mnist")
        folder = write_idx(tmp_path / "mnist")
        labels = folder / "t10k-labels-idx1-ubyte.gz"
        content = labels.read_bytes()
        labels.unlink()
        refused(tmp_path, "t10k-labels-idx1-ubyte.gz is missing", name="mnist")
        labels.write_bytes(content[:-10])
        refused(tmp_path, "t10k-labels-idx1-ubyte.gz is truncated or damaged", name="mnist")
        plain = idx_contents()["t10k-labels-idx1-ubyte"]
        labels.write_bytes(gzip.compress(plain[:-1]))
        refused(tmp_path, "is truncated: shape (5,) needs 5 bytes, got 4", name="mnist")
        labels.write_bytes(gzip.compress(plain[:-1] + b"\x0a"))
        refused(tmp_path, "its labels go up to 10", name="mnist")
        labels.write_bytes(gzip.compress(idx_contents()["train-labels-idx1-ubyte"]))
        refused(tmp_path, "shapes (5, 28, 28) and (12,)", name="mnist")
        refused(tmp_path, "has md5", name="mnist", verify=True)

    @pytest.mark.parametrize("content", [b"", b"\0\0", b"\0\0\x0d\x01\0\0\0\0", b"plain text", b"\0\0\x08\x03\0\0"])
    def test_no_idx_file(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(InputError, match=r"idx file|truncated"):
            read_idx(tmp_path / "file")


class TestTinyImageNet:
    def test_the_official_layout(self, tmp_path: Path) -> None:
        write_tiny_imagenet(tmp_path)
        found = source(tmp_path, "tiny-imagenet")
        assert (found.x.shape, found.test_x.shape, found.classes) == ((7, 3, 64, 64), (2, 3, 64, 64), 2)
        assert found.class_names == ("bullfrog", "goldfish")
        assert found.y.tolist() == [0, 0, 0, 1, 1, 1, 1]
        assert found.x[:, 0, 0, 0].tolist() == [200, 200, 200, 100, 100, 100, 77]
        assert found.x[6, :, 5, 5].tolist() == [77, 77, 77]
        assert (found.test_y.tolist(), found.test_x[:, 0, 0, 0].tolist()) == ([1, 0], [100, 200])
        assert "7 of 100,000 training images, 2 of 10,000 test images" in found.note

    def test_resized(self, tmp_path: Path) -> None:
        write_tiny_imagenet(tmp_path)
        assert source(tmp_path, "tiny-imagenet", resize=32).input_shape == (3, 32, 32)
        assert source(tmp_path, "tiny-imagenet").input_shape == (3, 64, 64)

    def test_what_is_missing(self, tmp_path: Path) -> None:
        refused(tmp_path, "tiny-imagenet-200/wnids.txt is missing", name="tiny-imagenet")
        folder = write_tiny_imagenet(tmp_path)
        (folder / "val" / "images" / "val_1.png").unlink()
        refused(tmp_path, "val_1.png is missing", name="tiny-imagenet")
        write_image(folder / "val" / "images" / "val_1.png", 64)
        (folder / "wnids.txt").write_text("n01\nn03\n")
        refused(tmp_path, "train/n03/images", name="tiny-imagenet")
        (folder / "wnids.txt").write_text("n01\n")
        refused(tmp_path, "names no class of wnids.txt", name="tiny-imagenet")
        refused(tmp_path, "no official checksums are known", name="tiny-imagenet", verify=True)


class TestImages:
    def test_classes_are_folders(self, tmp_path: Path) -> None:
        for number in range(10):
            write_image(tmp_path / "pets" / ("cat" if number % 2 else "dog") / f"{number}.png", colour=(number, 0, 0))
        found = source(tmp_path, "images", path="pets", common_test=0.3)
        assert (found.class_names, len(found.x), len(found.test_x)) == (("cat", "dog"), 7, 3)
        everything = np.concatenate([found.x, found.test_x])[:, 0, 0, 0]
        assert sorted(everything.tolist()) == list(range(10))
        labels = np.concatenate([found.y, found.test_y])
        assert np.array_equal(labels, 1 - everything % 2)
        assert np.allclose(found.mean, [found.x[:, 0].mean() / 255, 0, 0])
        assert np.allclose(found.std, [found.x[:, 0].std() / 255, 1, 1])

    def test_train_and_test_folders(self, tmp_path: Path) -> None:
        for part, count in (("train", 3), ("test", 1)):
            for name in ("a", "b"):
                for number in range(count):
                    write_image(tmp_path / part / name / f"{number}.png")
        assert source(tmp_path, "images", path=str(tmp_path), grey=True).x.shape == (6, 1, 8, 8)
        write_image(tmp_path / "test" / "c" / "0.png")
        refused(tmp_path, "test/c", "no such class", name="images", path=str(tmp_path))

    def test_what_is_no_image(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            write_image(tmp_path / "x" / name / "0.png")
        (tmp_path / "x" / "b" / "1.png").write_bytes(b"not an image")
        refused(tmp_path, "x/b/1.png is not an image", name="images", path="x")
        write_image(tmp_path / "x" / "b" / "1.png", size=9)
        refused(tmp_path, "x/b/1.png has 9x9 pixels", "data.resize", name="images", path="x")
        assert source(tmp_path, "images", path="x", resize=4, common_test=0.4).input_shape == (3, 4, 4)
        whole = (tmp_path / "x" / "b" / "0.png").read_bytes()
        (tmp_path / "x" / "b" / "0.png").write_bytes(whole[:-30])
        refused(tmp_path, "x/b/0.png is not an image", name="images", path="x", resize=4)
        refused(tmp_path, "data.path = 'y'", str(tmp_path / "y"), name="images", path="y")
        refused(tmp_path, "data.path is missing", name="images")
        (tmp_path / "x" / "c").mkdir()
        refused(tmp_path, "x/c holds no images", name="images", path="x")


class TestOptions:
    def test_every_source_says_what_it_is(self) -> None:
        assert all((make.__doc__ or "").endswith(".") for make in SOURCES.values())

    @pytest.mark.parametrize(
        ("options", "parts"),
        [
            ({"name": "imagenet"}, ["unknown data.name = 'imagenet'", "cifar10", "tiny-imagenet", "table"]),
            ({"resize": 16}, ["data.resize = 16 is not used by data.name = 'digits'", "tiny-imagenet"]),
            ({"labels": "worse"}, ["data.labels = 'worse'", "cifar10"]),
            ({"verify": True}, ["no official checksums are known for data.name = 'digits'"]),
            ({"path": "x"}, ["data.path = 'x'", "npz"]),
        ],
    )
    def test_options_that_would_be_ignored_are_refused(self, options: dict[str, Any], parts: list[str]) -> None:
        refused(None, *parts, **options)


@pytest.mark.skipif(REAL is None, reason="METABAYFL_DATA names no folder with the real datasets")
class TestRealData:
    @pytest.fixture
    def home(self, tmp_path: Path) -> Path:
        """A view of the real folder in which the cache is the test's own."""
        for path in Path(REAL or "").iterdir():
            if not path.name.startswith("."):
                (tmp_path / path.name).symlink_to(path)
        return tmp_path

    def test_cifar10_has_the_official_checksums_and_counts(self, home: Path) -> None:
        found = source(home, "cifar10", verify=True)
        assert (found.x.shape, found.test_x.shape, found.note) == ((50_000, 3, 32, 32), (10_000, 3, 32, 32), "")
        assert np.bincount(found.y).tolist() == [5000] * 10
        assert found.class_names[:2] == ("airplane", "automobile")
        assert np.allclose(found.x[:, 0].mean() / 255, found.mean[0], atol=1e-3)
        shares = {kind: (source(home, "cifar10", labels=kind).given_y != found.y).mean() for kind in ("aggre", "worse")}
        assert shares == {"aggre": pytest.approx(0.0902, abs=2e-4), "worse": pytest.approx(0.4021, abs=1e-4)}

    def test_cifar100(self, home: Path) -> None:
        found = source(home, "cifar100")
        assert np.bincount(found.test_y).tolist() == [100] * 100
        assert found.class_names[0] == "apple"


@pytest.mark.parametrize("found", [True, False])
def test_digits_are_those_of_scikit_learn(found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from the file in its package, or through its function where the file is not where it was."""
    if not found:
        monkeypatch.setattr(sys.modules["metabayfl.data.sources.digits"], "find_spec", lambda name: None)
    source = load(DataOptions(name="digits"))
    x, y = np.concatenate([source.x, source.test_x]), np.concatenate([source.y, source.test_y])
    pixels, labels = load_digits(return_X_y=True)
    ours = sorted((*image, label) for image, label in zip((16 * x.reshape(-1, 64)).tolist(), y.tolist(), strict=True))
    assert ours == sorted((*image, label) for image, label in zip(pixels.tolist(), labels.tolist(), strict=True))
