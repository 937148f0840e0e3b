"""Who holds what, counted and drawn: counts add up, pictures exist and say what they show."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from metabayfl import pictures
from metabayfl.config import RunConfig
from metabayfl.data import Builder
from metabayfl.data.sources import load
from metabayfl.survey import Survey, inspect, survey, survey_table


def builder(**sections: Any) -> Builder:
    config = RunConfig(**sections)
    return Builder(config, load(config.data))


def test_counts_add_up() -> None:
    made = builder(data={"clients": 4, "unlabelled": 97}, select={"fraction": 0.25})
    found = survey(made)
    assert found.counts.shape == (4, 10)
    assert found.counts.sum() == 1300
    assert np.array_equal(found.counts.sum(axis=1), found.train + found.test)
    expected = [np.bincount(made.source.y[rows], minlength=10).tolist() for rows in made.holdings.clients]
    assert found.counts.tolist() == expected


def test_labels_are_counted_as_clients_have_them() -> None:
    clean, flipped = (
        survey(builder(data={"clients": 2, "partition": "iid"}, corrupt={"label_flips": flips})) for flips in (0, 1)
    )
    assert not np.array_equal(clean.counts, flipped.counts)
    assert np.array_equal(clean.train, flipped.train)


def test_shares_and_entropies_of_known_counts() -> None:
    ones = np.ones(3, dtype=int)
    found = Survey("", ("a", "b", "c"), ("x", "y"), np.array([[4, 4], [8, 0], [6, 2]]), 4 * ones, ones, 4 * ones)
    rows = found.rows()
    assert [row["largest class"] for row in rows] == [0.5, 1.0, 0.75]
    assert [row["entropy"] for row in rows] == [1.0, 0.0, pytest.approx(0.8113, abs=1e-4)]
    assert [row["classes"] for row in rows] == [2, 1, 2]


def test_of_many_clients_the_table_shows_some_and_the_file_all(tmp_path: Path) -> None:
    config = RunConfig(data={"clients": 100, "partition": "iid", "min_size": 2})
    found, written = inspect(config, tmp_path)
    table = survey_table(found)
    assert table.row_count == 40
    assert "the first 40 of 100 clients" in str(table.caption)
    with (tmp_path / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["client"] for row in rows] == [str(number) for number in range(100)]
    assert sum(int(row[f"class {label}"]) for row in rows for label in range(10)) == 1397
    assert {path.name for path in written} == {
        "clients.csv", "clients.png", "clients.svg", "samples.png", "samples.svg",
    }  # fmt: skip


def test_pictures_are_pictures_and_the_same_each_time(tmp_path: Path) -> None:
    config = RunConfig(data={"clients": 3}, corrupt={"noise_variance": 0.1})
    for name in ("one", "two"):
        inspect(config, tmp_path / name)
    for name in ("clients.png", "samples.png"):
        with Image.open(tmp_path / "one" / name) as image:
            assert image.width > 300
            assert len(image.convert("RGB").getcolors(2**24) or ()) > 10
    for name in ("clients.png", "clients.svg", "samples.svg"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize("shape", [(1, 2), (5, 10), (40, 40), (41, 10), (20, 200), (1000, 10)])
def test_any_number_of_clients_and_classes(shape: tuple[int, int]) -> None:
    axes = Figure().subplots()
    counts = np.random.default_rng(0).integers(0, 9, shape)
    pictures.draw_holdings(axes, counts)
    if max(shape) <= 40:
        (bubbles,) = axes.collections
        assert len(bubbles.get_offsets()) == (counts > 0).sum()
        areas = bubbles.get_sizes()
        assert np.allclose(areas / areas.max(), counts[counts > 0] / counts.max())
    else:
        assert ("sorted by their largest class" in axes.get_xlabel()) == (shape[0] > 40)
        assert axes.images[0].get_array().shape == shape[::-1]
    assert len(axes.get_yticks()) <= 25
    assert len(axes.get_xticks()) <= 25


def test_targets_are_counted_in_bins(tmp_path: Path) -> None:
    text = "a,y\n" + "".join(f"{row},{row}.5\n" for row in range(40))
    (tmp_path / "t.csv").write_text(text)
    data = {"name": "table", "path": str(tmp_path / "t.csv"), "label": "y", "partition": "iid", "clients": 2}
    found, written = inspect(RunConfig(data=data), tmp_path / "out")
    assert found.counts.shape == (2, 8)
    assert found.counts.sum() == 32
    assert not any(path.name.startswith("samples") for path in written)


def test_images_before_and_after() -> None:
    before = np.zeros((2, 3, 4, 4), np.uint8)
    after = np.full((2, 3, 4, 4), 255, np.uint8)
    figure = pictures.samples_figure([pictures.Samples("client 0", "", before, after, ["cat", "dog"])])
    above, below = (np.asarray(axes.images[0].get_array()) for axes in figure.axes)
    assert above.shape == below.shape == (4, 9, 3)
    assert above[:, [0, 3, 5, 8]].max() == 0
    assert below.min() == 1
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == ["cat", "dog"]
