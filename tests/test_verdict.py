"""The judge of the main table: what is kept of runs, and what it says of numbers whose verdict is known."""

import csv
from pathlib import Path
from typing import Any

import pytest

from federations import script

verdict = script("benchmarks", "verdict")
ablations = script("benchmarks", "ablations")
FEDAVG = {"A/G accuracy stopped": 0.34, "A/G scaled_nll stopped": 1.83, "A/G scaled_ece stopped": 0.03}
FEDAVG |= {"P/L accuracy": 0.50, "P/L accuracy stopped": 0.48, "A/G nll": 2.8, "A/G ece": 0.35}
OURS = {"G/G accuracy": 0.35, "A/G accuracy": 0.36, "A/G nll": 1.79, "A/G ece": 0.03, "P/L accuracy": 0.53}
PASSES = {"forward_passes": 300.0, "backward_passes": 100.0}


def table(**ours: float) -> Any:
    """Three seeds that differ in nothing but a common shift."""
    rows = {"fedavg": FEDAVG, "meta-bayfl": OURS | PASSES | ours}
    return {
        method: {seed: {n: v + seed / 1e4 for n, v in row.items()} for seed in range(3)} for method, row in rows.items()
    }


def verdicts(found: Any) -> dict[str, str]:
    return {what: said for what, _, said in verdict.judge(found)}


def said(found: Any, start: str) -> str:
    (answer,) = [said for what, said in verdicts(found).items() if what.startswith(start)]
    return answer


@pytest.mark.parametrize(
    ("start", "number", "good", "bad"),
    [
        ("required: no collapse", "G/G accuracy", 0.30, 0.10),
        ("required: NLL against", "A/G nll", 1.80, 1.90),
        ("required: ECE against", "A/G ece", 0.02, 0.04),
        ("required: ECE at most", "A/G ece", 0.049, 0.051),
        ("required: P/L above FedAvg's P/L accuracy stopped", "P/L accuracy", 0.49, 0.47),
        ("required: accuracy against FedAvg", "A/G accuracy", 0.35, 0.33),
        ("wanted: accuracy 3 points", "A/G accuracy", 0.38, 0.36),
        ("wanted: P/L 5 points", "P/L accuracy", 0.56, 0.54),
        ("wanted: the lowest NLL", "A/G nll", 2.7, 2.9),
    ],
)
def test_each_criterion_can_hold_and_fail(start: str, number: str, good: float, bad: float) -> None:
    assert said(table(**{number: good}), start) == "holds"
    assert said(table(**{number: bad}), start) == "**fails here**"


def test_what_was_not_measured_gets_no_verdict() -> None:
    assert said(table(), "required: share of the sweep's passes") == ""
    assert said(table(), "required: accuracy against the best fixed rate") == ""
    one_rate = {verdict.SWEEP[0]: {seed: {"A/G accuracy": 0.3} for seed in range(3)}}
    assert said(table() | one_rate, "required: accuracy against the best fixed rate") == ""


@pytest.mark.parametrize(("backward", "expected"), [(100.0, "holds"), (400.0, "**fails here**")])
def test_the_sweep_is_all_candidates_as_fixed_rates(backward: float, expected: str) -> None:
    found = table(backward_passes=backward)
    found |= {label: {seed: PASSES | {"A/G accuracy": 0.3} for seed in range(3)} for label in verdict.SWEEP}
    assert said(found, "required: share of the sweep's passes") == expected
    assert said(found, "required: accuracy against the best fixed rate") == "holds"


def test_runs_are_kept_once_with_their_numbers(tmp_path: Path) -> None:
    source, target = tmp_path / "compare.csv", tmp_path / "kept.csv"
    for accuracy in ("0.25", "0.30000001"):
        with source.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["method", "seed", "run", "A/G accuracy"])
            writer.writeheader()
            writer.writerows(
                [{"method": "fedavg", "seed": seed, "run": "x", "A/G accuracy": accuracy} for seed in "01"]
            )
        verdict.keep(source, target)
    kept = verdict.tabulate(verdict.read(target))
    assert kept == {"fedavg": {0: {"A/G accuracy": 0.3}, 1: {"A/G accuracy": 0.3}}}
    assert "| fedavg | 2 |" in verdict.as_markdown(kept)
    assert "30.0" in verdict.as_markdown(kept)


class TestAblations:
    """Differences to the method as it is, on the seeds that both have."""

    FOUND = {  # noqa: RUF012
        "meta-bayfl": {0: {"A/G accuracy": 0.36, "A/G nll": 1.8}, 1: {"A/G accuracy": 0.34, "A/G nll": 1.9}},
        "no-guard": {0: {"A/G accuracy": 0.35, "A/G nll": 1.7}, 2: {"A/G accuracy": 0.30, "A/G nll": 1.7}},
        "paper": {0: {"A/G accuracy": 0.10, "A/G nll": 2.3}, 1: {"A/G accuracy": 0.10, "A/G nll": 2.3}},
    }

    def test_they_are_paired_by_seed(self) -> None:
        found = ablations.differences(self.FOUND, "A/G accuracy")
        assert found["no-guard"] == pytest.approx([-0.01])
        assert found["paper"] == pytest.approx([-0.26, -0.24])
        assert found["meta-bayfl"] == [0.0, 0.0]

    def test_one_row_each_under_the_comments_of_the_config_and_a_collapse_at_the_edge(self) -> None:
        accuracy = ablations.draw(self.FOUND).axes[0]
        rows = [label.get_text() for label in accuracy.get_yticklabels()]
        assert rows == ["Guards and choices", "no-guard", "The letter of the paper", "paper"]
        places = [float(x) for dots in accuracy.collections for x, _ in dots.get_offsets()]
        assert min(places) == -ablations.LIMITS["A/G accuracy"]

    def test_a_mean_is_of_what_was_measured_and_not_of_what_is_drawn(self) -> None:
        found = {
            "meta-bayfl": {0: {"A/G accuracy": 0.3}, 1: {"A/G accuracy": 0.3}},
            "paper": {0: {"A/G accuracy": 0.1}, 1: {"A/G accuracy": 0.38}},
        }
        mean = ablations.draw(found).axes[0].collections[-1].get_offsets()[0][0]
        assert mean == pytest.approx(-0.06)
