"""Tables, npz files and frames: columns become numbers, labels and clients; what does not fit is one line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import metabayfl as mb
from metabayfl import InputError
from metabayfl.config import DataOptions, RunConfig
from metabayfl.data import build
from metabayfl.data.sources import Source, load
from metabayfl.likelihood import Gaussian

ROWS = "age,dose,hospital,ill\n" + "".join(
    f"{20 + row},{row / 2},{'north' if row % 3 else 'south'},{'yes' if row % 2 else 'no'}\n" for row in range(30)
)


def table(home: Path, text: str = ROWS, **options: Any) -> Source:
    (home / "table.csv").write_text(text)
    given = {"label": "ill", "client_column": "hospital", "path": "table.csv"} | options
    return load(DataOptions(name="table", **given), home)


def npz(home: Path, arrays: Mapping[str, Any], **options: Any) -> Source:
    np.savez(home / "mine.npz", **arrays)
    return load(DataOptions(name="npz", path="mine.npz", **options), home)


class TestTable:
    def test_labels_and_clients_are_numbered_in_sorted_order(self, tmp_path: Path) -> None:
        found = table(tmp_path, standardise=False)
        assert (found.class_names, found.client_names) == (("no", "yes"), ("north", "south"))
        ages = found.x[:, 0].astype(int)
        assert np.array_equal(found.y, ages % 2)
        assert np.array_equal(found.owners, (ages - 20) % 3 == 0)
        assert (len(found.x), len(found.test_x), found.classes) == (24, 6, 2)
        assert sorted([*ages, *found.test_x[:, 0].astype(int)]) == list(range(20, 50))

    def test_columns_are_standardised_over_the_training_rows(self, tmp_path: Path) -> None:
        plain, found = table(tmp_path, standardise=False), table(tmp_path)
        assert np.allclose(found.x.mean(axis=0), 0, atol=1e-6)
        assert np.allclose(found.x.std(axis=0), 1, atol=1e-6)
        expected = (plain.test_x - plain.x.mean(axis=0)) / plain.x.std(axis=0)
        assert np.allclose(found.test_x, expected, atol=1e-5)

    def test_real_labels_mean_regression(self, tmp_path: Path) -> None:
        found = table(tmp_path, label="dose", columns=("age",))
        assert (found.classes, found.y.dtype, found.x.shape) == (None, np.float32, (24, 1))
        assert table(tmp_path, label="age", columns=("dose",)).classes == 30
        assert table(tmp_path, label="age", columns=("dose",), regression=True).classes is None

    def test_parquet_and_csv_are_the_same(self, tmp_path: Path) -> None:
        expected = table(tmp_path)
        pd.read_csv(tmp_path / "table.csv").to_parquet(tmp_path / "table.parquet")
        found = table(tmp_path, path="table.parquet")
        assert np.array_equal(found.x, expected.x)
        assert np.array_equal(found.y, expected.y)
        assert found.client_names == expected.client_names

    @pytest.mark.parametrize(
        ("text", "options", "parts"),
        [
            (ROWS, {"label": "sick"}, ["no column 'sick'", "'age', 'dose', 'hospital', 'ill'"]),
            (ROWS, {"client_column": "clinic"}, ["no column 'clinic'", "'hospital'"]),
            (ROWS, {"columns": ("weight",)}, ["no column 'weight'", "'dose'"]),
            (ROWS, {"label": None}, ["data.label is missing", "age, dose, hospital, ill"]),
            (ROWS, {"client_column": None}, ["column 'hospital' is not numeric: row 0 is 'south'", "`columns`"]),
            (ROWS.replace("22,1.0", "22,nan"), {}, ["column 'dose': row 2 is missing ('nan')"]),
            (ROWS.replace("22,1.0", "22,"), {}, ["column 'dose': row 2 is missing ('')"]),
            (ROWS.replace("22,1.0", "22,inf"), {}, ["column 'dose': row 2 is NaN or infinite"]),
            (ROWS.replace("22,1.0", "22,much"), {}, ["column 'dose' is not numeric: row 2 is 'much'"]),
            (ROWS.replace("22,1.0", "22"), {}, ["row 4: 3 values for 4 columns"]),
            (ROWS.replace("yes", "no"), {}, ["column 'ill' holds only 'no'", "2 classes"]),
            (ROWS.replace("dose", "age"), {}, ["different column names"]),
            ("", {}, ["a first line with different column names"]),
            ("ill\nyes\nno\n", {"client_column": None}, ["no columns besides 'ill'"]),
            (ROWS, {"common_test": 0.001}, ["data.common_test = 0.001", "of 30 samples"]),
            (ROWS, {"path": "nothing.csv"}, ["data.path = 'nothing.csv'", "looked for"]),
        ],
    )
    def test_what_does_not_fit(self, text: str, options: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
        with pytest.raises(InputError) as caught:
            table(tmp_path, text, **options)
        assert all(part in str(caught.value) for part in parts), caught.value
        assert "\n" not in str(caught.value)

    def test_files_that_are_no_tables(self, tmp_path: Path) -> None:
        (tmp_path / "x.parquet").write_bytes(b"PAR1 or not")
        with pytest.raises(InputError, match=r"x\.parquet is not a parquet file"):
            table(tmp_path, path="x.parquet")
        (tmp_path / "x.csv").write_bytes(b"a,b\n\xff\xfe,1\n")
        with pytest.raises(InputError, match=r"x\.csv is not a CSV file"):
            table(tmp_path, path="x.csv")


class TestFederationOfAConfig:
    def config(self, home: Path, **data: Any) -> RunConfig:
        (home / "table.csv").write_text(ROWS)
        given = {"name": "table", "path": str(home / "table.csv"), "label": "ill", "client_column": "hospital"}
        return RunConfig(data=given | {"partition": "by-column", "min_size": 1} | data)

    def test_by_column(self, tmp_path: Path) -> None:
        federation, shape = build(self.config(tmp_path))
        sizes = federation.train.sizes() + federation.local_test.sizes()
        owners = load(self.config(tmp_path).data).owners
        assert owners is not None
        assert (shape, sizes.tolist()) == ((2,), np.bincount(owners).tolist())

    def test_by_column_needs_clients(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"'by-column': data\.name = 'table' names no clients.*client_column"):
            build(self.config(tmp_path, client_column=None, columns=("age", "dose")))

    def test_regression_is_shared_out_without_classes(self, tmp_path: Path) -> None:
        options = {"label": "dose", "columns": ("age",), "client_column": None, "clients": 3}
        federation, _ = build(self.config(tmp_path, partition="iid", noise_std=0.5, **options))
        assert len(federation) == 3
        assert federation.likelihood == Gaussian(0.5)
        with pytest.raises(InputError, match="'dirichlet' shares out classes; for regression iid"):
            build(self.config(tmp_path, partition="dirichlet", **options))


class TestNpz:
    def test_arrays_with_a_test_set_and_clients(self, tmp_path: Path) -> None:
        x = np.random.default_rng(0).integers(0, 256, (10, 8, 8), dtype=np.uint8)
        arrays = {"x": x, "y": np.arange(10) % 3, "test_x": x[:4], "test_y": np.arange(4) % 3}
        found = npz(tmp_path, arrays | {"client": np.array(list("aabbbbbbba"))})
        assert (found.x.shape, found.x.dtype, found.classes) == ((10, 1, 8, 8), np.uint8, 3)
        assert found.owners is not None
        assert (found.owners.tolist(), found.client_names) == ([0, 0, 1, 1, 1, 1, 1, 1, 1, 0], ("a", "b"))
        assert np.array_equal(found.test_x[:, 0], x[:4])
        assert np.allclose((found.mean, found.std), [[(x / 255).mean()], [(x / 255).std()]])

    def test_channels_come_first(self, tmp_path: Path) -> None:
        x = np.random.default_rng(0).integers(0, 256, (10, 8, 6, 3), dtype=np.uint8)
        found = npz(tmp_path, {"x": x, "y": np.arange(10.0), "test_x": x, "test_y": np.arange(10.0)})
        assert (found.input_shape, found.classes) == ((3, 8, 6), None)
        assert np.array_equal(found.x[:, 1], x[..., 1])

    def test_without_a_test_set_a_share_is_held_out(self, tmp_path: Path) -> None:
        x = np.arange(20.0)[:, None]
        found = npz(tmp_path, {"x": x, "y": np.arange(20) % 2, "client": np.arange(20) % 5}, common_test=0.25)
        assert (len(found.x), len(found.test_x)) == (15, 5)
        assert np.array_equal(found.owners, found.x[:, 0] % 5)

    @pytest.mark.parametrize(
        ("arrays", "reason"),
        [
            ({"x": np.zeros((4, 2))}, "no array 'y', but x"),
            ({"x": np.zeros((4, 2)), "y": [0, 1, 0]}, "have 4, 3 rows"),
            ({"x": np.zeros((4, 2)), "y": [0, 1, 0, 1], "client": [1, 2]}, "have 4, 4, 2 rows"),
            ({"x": np.zeros((4, 2)), "y": [0, 1, 0, -1]}, "classes are numbered from 0"),
            ({"x": np.full((4, 2), np.nan), "y": [0, 1, 0, 1]}, "NaN or infinite"),
            ({"x": np.zeros((4, 2), int), "y": [0, 1, 0, 1]}, "x is int64"),
            ({"x": np.zeros((4, 2), np.uint8), "y": [0, 1, 0, 1]}, "bytes of shape"),
            ({"x": np.zeros((4, 2)), "y": ["a", "b", "a", "b"]}, "y is <U1"),
            ({"x": np.zeros((4, 2)), "y": [0, 1, 0, 1], "test_x": np.zeros((4, 2))}, "only one of"),
            ({"x": np.zeros((2, 2)), "y": [0, 1], "test_x": np.zeros((2, 3)), "test_y": [0, 1]}, "other shapes"),
            ({"x": np.array([{}], dtype=object), "y": [0]}, "not an npz file of plain arrays"),
        ],
    )
    def test_what_does_not_fit(self, arrays: dict[str, Any], reason: str, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=reason):
            npz(tmp_path, arrays)

    def test_no_npz_file(self, tmp_path: Path) -> None:
        for content in (b"", b"PK nothing", b"\x80\x04K\x01."):
            (tmp_path / "mine.npz").write_bytes(content)
            with pytest.raises(InputError, match=r"mine\.npz is not an npz file"):
                load(DataOptions(name="npz", path="mine.npz"), tmp_path)


class Column(list[Any]):
    """What indexing a Hugging Face dataset by a name gives: something to iterate over."""


class Duck:
    """A Hugging Face dataset as far as we use it."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns, self.column_names = columns, list(columns)

    def __getitem__(self, name: str) -> Column:
        return Column(self.columns[name])


class TestFrames:
    def frame(self) -> pd.DataFrame:
        columns = {"a": np.arange(20.0), "b": np.arange(20), "who": ["x", "y"] * 10, "ill": ["no", "yes"] * 10}
        return pd.DataFrame(columns)

    def test_a_frame_with_a_client_column(self) -> None:
        federation = mb.Federation.from_frame(self.frame(), label="ill", client="who", test_fraction=0.2)
        assert len(federation) == 2
        for number in range(2):
            client = federation.client(number)
            assert (len(client.x), len(client.test_x)) == (8, 2)
            assert set(client.y.tolist()) == {number}
            assert set((client.x[:, 0] % 2).tolist()) == {number}

    def test_parts_name_the_rows(self) -> None:
        parts = [[0, 2, 4, 5], range(6, 20)]
        federation = mb.Federation.from_frame(self.frame(), label="ill", parts=parts, columns=["b"])
        held = [*federation.client(0).x[:, 0].tolist(), *federation.client(0).test_x[:, 0].tolist()]
        assert sorted(held) == [0, 2, 4, 5]

    def test_what_does_not_fit(self) -> None:
        frame = self.frame()
        for call, reason in (
            (lambda: mb.Federation.from_frame([1], label="ill", client="who"), "a pandas DataFrame is accepted"),
            (lambda: mb.Federation.from_frame(frame, label="sick", client="who"), "no column 'sick', but 'a', 'b'"),
            (lambda: mb.Federation.from_frame(frame, label="ill"), "either client"),
            (lambda: mb.Federation.from_frame(frame, label="ill", columns=["a"]), "either client"),
            (lambda: mb.Federation.from_frame(frame, label="ill", parts=[[99]], columns=["a"]), "from 0 to 19"),
            (lambda: mb.Federation.from_frame(frame.assign(a=np.nan), "ill", "who"), "row 0 is NaN"),
        ):
            with pytest.raises(InputError, match=reason):
                call()

    def test_a_hugging_face_dataset(self) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
        duck = Duck(image=[Image.fromarray(image) for image in pixels], label=[0, 1] * 6, who=list("aaabbb") * 2)
        federation = mb.Federation.from_huggingface(duck, client="who", test_fraction=0.2)
        assert federation.train.x.shape[1:] == (3, 8, 8)
        everything = np.concatenate([federation.train.x.numpy(), federation.local_test.x.numpy()])
        assert sorted(image.tobytes() for image in everything) == sorted(
            np.moveaxis(image, 2, 0).tobytes() for image in pixels
        )
        with pytest.raises(InputError, match="no column 'picture', but 'image', 'label', 'who'"):
            mb.Federation.from_huggingface(duck, image="picture", client="who")
        with pytest.raises(InputError, match="a Dataset with column_names"):
            mb.Federation.from_huggingface([1, 2], client="who")
        with pytest.raises(InputError, match="is a str; images or numbers"):
            mb.Federation.from_huggingface(Duck(image=["a"], label=[0], who=["a"]), client="who")
        duck.columns["image"][3] = Image.new("L", (8, 8))
        with pytest.raises(InputError, match="have 2 shapes"):
            mb.Federation.from_huggingface(duck, client="who")

    def test_grey_images_get_a_channel(self) -> None:
        duck = Duck(image=[Image.new("L", (8, 8), row) for row in range(6)], label=[0, 1] * 3)
        federation = mb.Federation.from_huggingface(duck, parts=[range(3), range(3, 6)])
        assert federation.train.x.shape[1:] == (1, 8, 8)
