"""Whether methods are said to learn, on numbers whose verdict is known."""

from pathlib import Path
from typing import Any

import pytest

from federations import script

script("benchmarks", "verdict")  # which the other one imports
learning = script("benchmarks", "learning")


def table(**rows: dict[str, float]) -> Any:
    """Three seeds that differ in a common shift."""
    base = {
        "local": {"P/G accuracy": 0.25, "P/L accuracy": 0.46},
        "fedavg": {"G/G accuracy": 0.34, "P/L accuracy": 0.5},
    }
    known = base | {name.replace("_", "-"): row for name, row in rows.items()}
    return {
        name: {seed: {k: v + seed / 100 for k, v in row.items()} for seed in range(3)} for name, row in known.items()
    }


@pytest.mark.parametrize(("accuracy", "said"), [(0.31, "learns"), (0.29, "**fails here**")])
def test_a_global_model_needs_five_points(accuracy: float, said: str) -> None:
    assert learning.judge(table(fedprox={"G/G accuracy": accuracy}), "fedprox") == said
    assert learning.judge(table(bayfl_fast={"G/G accuracy": accuracy}), "bayfl-fast") == said


@pytest.mark.parametrize(
    ("accuracy", "said"), [(0.51, "above local and fedavg"), (0.48, "above local"), (0.45, "above neither")]
)
def test_a_personal_model_is_measured_by_both(accuracy: float, said: str) -> None:
    assert learning.judge(table(ditto={"P/L accuracy": accuracy}), "ditto") == said


def test_what_was_not_measured_gets_no_verdict() -> None:
    assert learning.judge(table(), "local") == ""
    assert learning.judge(table(fedprox={}), "fedprox") == ""
    assert learning.judge(table(), "fedavg") == "learns"


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = learning.as_markdown(table(ditto={"P/L accuracy": 0.51})).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| ditto", "| fedavg", "| local"]
    assert "52.0 ± 1.0 | +5.0 [+5.0, +5.0] | +1.0 [+1.0, +1.0] | above local and fedavg" in lines[2]
    file = tmp_path / "kept.csv"
    file.write_text("method,seed,G/G accuracy,P/L accuracy,P/G accuracy\nlocal,0,,0.4,0.2\nfedavg,0,0.3,0.5,\n")
    assert learning.main([str(file)]) == 0
    assert "| fedavg | 30.0 | +10.0 [+10.0, +10.0] | 50.0 |" in capsys.readouterr().out
    assert learning.main([]) == 2
