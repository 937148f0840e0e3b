"""Curves are taken out of runs as they were measured, kept once, and drawn."""

import csv
from pathlib import Path

import pytest

import metabayfl as mb
from federations import federation, network, script

script("benchmarks", "verdict")  # which the other one imports
curves = script("benchmarks", "curves")


def test_curves_are_those_of_the_runs(tmp_path: Path) -> None:
    result = mb.federate(network(), federation(), mb.FedAvg(), rounds=3, out=tmp_path / "run", average=0.5)
    kept = tmp_path / "kept.csv"
    for _ in range(2):  # a second time nothing is added
        assert curves.main(["keep", str(tmp_path / "run"), str(kept)]) == 0
    rows = list(csv.DictReader(kept.read_text().splitlines()))
    assert [(row["method"], row["seed"], row["round"]) for row in rows] == [("fedavg", "0", str(n)) for n in (1, 2, 3)]
    assert float(rows[-1]["A/G nll"]) == pytest.approx(result.metrics["A/G"]["nll"]["value"], rel=1e-5)
    assert float(rows[-1]["P/L accuracy"]) == pytest.approx(result.metrics["P/L"]["accuracy"]["weighted"], rel=1e-5)
    assert curves.curves(rows, "A/G ece")["fedavg"][0].keys() == {1, 2, 3}


def test_the_picture_has_a_line_for_each_seed_and_their_mean(tmp_path: Path) -> None:
    rows = [
        {"method": method, "seed": str(seed), "round": str(n), "A/G accuracy": f"{seed + n}", "A/G nll": "1"}
        | {"A/G ece": "", "P/L accuracy": "0.5"}
        for method in ("a", "b")
        for seed in (0, 2)
        for n in (1, 2)
    ]
    accuracy, _, calibration, _ = curves.draw(rows, ["a", "b"]).axes
    assert [list(line.get_ydata()) for line in accuracy.lines[:3]] == [[1, 2], [3, 4], [2, 3]]
    assert len(accuracy.lines) == 6
    assert all(len(line.get_xdata()) == 0 for line in calibration.lines)


def test_usage() -> None:
    assert curves.main(["keep", "x"]) == curves.main(["draw", "x", "y"]) == curves.main([]) == 2
