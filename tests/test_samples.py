"""What a node reads: columns and classes have the places that the config gives them, whatever its file looks like."""

from pathlib import Path
from typing import Any

import pytest
import torch

from federations import one_line
from layouts import write_image
from metabayfl.config import DataOptions, RunConfig
from metabayfl.data.arrays import Pair
from metabayfl.data.sources import load
from metabayfl.likelihood import Categorical, Gaussian
from metabayfl.options import InputError
from metabayfl.remote.data import agree, common_data
from metabayfl.remote.samples import read_samples
from metabayfl.remote.wire import Introduction

CLASSES = ["cat", "dog", "eel"]
TABLE = {"label": "pet", "columns": ["a", "b"], "classes": CLASSES}


def read(path: Path, **options: Any) -> Pair:
    return read_samples(path, DataOptions(name="nodes", **options))


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def introduction(classes: int) -> Introduction:
    about = {"client": 0, "train": 5, "select": 1, "test": 2, "batch_size": 8, "input_shape": (3,)}
    return Introduction(**about, whole_inputs=False, classes=classes, label_shape=())


class TestTables:
    def test_columns_and_classes_have_the_places_of_the_config(self, tmp_path: Path) -> None:
        one = read(written(tmp_path / "1.csv", "a,b,pet\n1,2,eel\n3,4,dog\n"), **TABLE)
        two = read(written(tmp_path / "2.csv", "pet,more,b,a\n eel ,x,2,1\ndog,y,4,3\n"), **TABLE)
        assert all(map(torch.equal, one, two))
        assert one[0].tolist() == [[1, 2], [3, 4]]
        assert one[1].tolist() == [2, 1]

    def test_one_class_is_enough(self, tmp_path: Path) -> None:
        assert read(written(tmp_path / "1.csv", "a,b,pet\n1,2,dog\n"), **TABLE)[1].tolist() == [1]

    def test_numbers_are_names_too(self, tmp_path: Path) -> None:
        path = written(tmp_path / "1.csv", "a,b,pet\n1,2,7\n1,2,3\n")
        assert read(path, **TABLE | {"classes": ["3", "5", "7"]})[1].tolist() == [2, 0]

    def test_regression(self, tmp_path: Path) -> None:
        y = read(written(tmp_path / "1.csv", "a,b,pet\n1,2,3\n"), **TABLE | {"classes": None, "regression": True})[1]
        assert y.dtype == torch.float32
        assert y.tolist() == [3]

    def test_parquet(self, tmp_path: Path) -> None:
        pandas = pytest.importorskip("pandas")
        pandas.DataFrame({"pet": ["dog"], "b": [2.0], "a": [1]}).to_parquet(tmp_path / "1.parquet")
        x, y = read(tmp_path / "1.parquet", **TABLE)
        assert (x.tolist(), y.tolist()) == ([[1, 2]], [1])


class TestImages:
    def folder(self, where: Path, *names: str) -> Path:
        for shade, name in enumerate(names):
            write_image(where / name / "1.png", 4, (50 * shade, 0, 0))
        return where

    def test_classes_have_the_places_of_the_config(self, tmp_path: Path) -> None:
        home = self.folder(tmp_path / "own", "eel", "cat")
        for _ in range(2):  # decoded, and from the cache
            x, y = read(home, classes=CLASSES, resize=2)
            assert x.shape == (2, 3, 2, 2)
            assert x.dtype == torch.uint8
            assert y.tolist() == [0, 2]
            assert x[:, 0, 0, 0].tolist() == [50, 0]
        assert read(home, classes=["eel", "cat"], resize=2)[1].tolist() == [0, 1]
        assert read(home, classes=CLASSES, grey=True)[0].shape == (2, 1, 4, 4)

    def test_other_folders_are_refused(self, tmp_path: Path) -> None:
        home = self.folder(tmp_path / "own", "fox")
        with pytest.raises(InputError, match=r"fox: there is no such class in data\.classes, which are cat, dog, eel"):
            read(home, classes=CLASSES)
        (tmp_path / "empty").mkdir()
        with pytest.raises(InputError, match="empty has no sub-folders; one for each class is needed"):
            read(tmp_path / "empty", classes=CLASSES)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("no.csv", {}, "there is no such file or folder on this node"),
        ("a.txt", {}, "a folder of images or a file that ends in .npz, .csv, .parquet is accepted"),
        ("folder", {}, "is a folder of images: the config must have data.classes, the names of the classes"),
        ("a.csv", {}, "data.label is missing"),
        ("a.csv", TABLE | {"columns": None}, "data.columns is missing"),
        ("a.csv", TABLE | {"classes": None}, "must have either data.classes, the names"),
        ("a.csv", TABLE | {"regression": True}, "or data.regression = true"),
        ("a.csv", TABLE | {"columns": ["a", "c"]}, "has no column 'c'"),
        ("a.csv", TABLE | {"classes": ["cat", "eel"]}, "column 'pet': row 1 is 'dog'; the classes are cat, eel"),
        ("a.npz", {}, "a.npz is not an npz file of plain arrays"),
    ],
)
def test_what_cannot_be_read_is_one_line(name: str, options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for file in ("a.csv", "a.txt", "a.npz"):
        written(tmp_path / file, "a,b,pet\n1,2,cat\n1,2,dog\n")
    with pytest.raises(InputError) as caught:
        read(tmp_path / name, **options)
    assert reason in one_line(caught.value)
    assert name in str(caught.value)


class TestAgreement:
    def test_here_there_are_no_nodes(self) -> None:
        with pytest.raises(InputError, match="`metabayfl flower run` goes to them"):
            load(DataOptions(name="nodes"))

    def test_the_config_says_how_many_classes_there_are(self) -> None:
        named = DataOptions(name="nodes", classes=tuple(CLASSES))
        assert agree([introduction(2)], None, named) == Categorical(3)
        assert agree([introduction(2)], None, DataOptions(name="nodes")) == Categorical(2)
        with pytest.raises(InputError, match=r"labels go up to 3; data\.classes names 3 classes, from 0"):
            agree([introduction(4)], None, named)

    def test_values_have_the_noise_of_the_config(self) -> None:
        noisy = DataOptions(name="nodes", noise_std=0.5)
        assert agree([introduction(0)], None, noisy) == Gaussian(0.5)
        with pytest.raises(InputError, match=r"data\.noise_std = 0\.5: it is for regression"):
            agree([introduction(2)], None, noisy)

    @pytest.mark.parametrize(
        ("sections", "reason"),
        [
            ({"corrupt": {"label_flips": 0.1}}, "corrupt.label_flips = 0.1 cannot be used"),
            ({"drift": {"kind": "noise"}}, "drift.kind = 'noise' cannot be used"),
            ({"data": {"augment": True}}, "data.augment = True cannot be used"),
            ({"data": {"fraction": 0.5}}, "data.fraction = 0.5 cannot be used"),
            ({"eval": {"on": "dev"}}, "eval.on = 'dev' cannot be used"),
            ({"data": {"classes": ["cat"]}}, "data.classes = ['cat']: at least 2 different names"),
            ({"data": {"classes": ["cat", "cat"]}}, "at least 2 different names"),
        ],
    )
    def test_options_that_nodes_would_ignore_are_refused(self, sections: dict[str, Any], reason: str) -> None:
        config = RunConfig(**sections | {"data": {"name": "nodes", **sections.get("data", {})}})
        with pytest.raises(InputError) as caught:
            common_data(config, None)
        assert reason in one_line(caught.value)
