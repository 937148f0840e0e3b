import csv
import io
import time
from pathlib import Path

import pytest

from federations import killed_after
from metabayfl import compare, comparison, fingerprint
from metabayfl.config import CompareConfig, RunConfig, read_comparison
from metabayfl.options import InputError
from metabayfl.statistics import paired_difference, spread
from metabayfl.store import RunDirectory

CONFIG = {
    "rounds": 2,
    "method": {"name": "bayfl", "epochs": 1, "kl_weight": 0.5},
    "data": {"clients": 2, "partition": "iid", "fraction": 0.05},
    "eval": {"every": 2, "samples": 2},
}
CONFIGS = set(Path(__file__).parents[1].glob("configs/*.toml")) - set(
    Path(__file__).parents[1].glob("configs/*_tuned.toml")
)


def config(**changes: object) -> CompareConfig:
    return CompareConfig(**(CONFIG | changes))


def locked(path: Path) -> bool:
    """Return whether a process works on a run."""
    run = RunDirectory(path)
    try:
        run.lock()
    except InputError:
        return True
    run.unlock()
    return False


class TestGrid:
    def test_fields_of_method_reach_the_methods_that_have_them(self) -> None:
        assert compare.method_section(config(), "fedavg") == {"name": "fedavg", "epochs": 1}
        assert compare.method_section(config(), "bayfl") == {"name": "bayfl", "epochs": 1, "kl_weight": 0.5}

    def test_a_section_of_its_own_names_a_variant(self) -> None:
        variants = {"slow": {"name": "fedavg", "rate": 1e-4}, "bayfl": {"kl_weight": 0.1}}
        found = config(methods=variants)
        assert compare.method_section(found, "slow") == {"name": "fedavg", "epochs": 1, "rate": 1e-4}
        assert compare.method_section(found, "bayfl")["kl_weight"] == 0.1
        grid = compare.make_grid(found, [], [3], Path("out"))
        assert [(cell.label, cell.config.seed) for cell in grid] == [("slow", 3), ("bayfl", 3)]

    def test_if_one_method_chooses_by_d_n_nobody_trains_on_it(self) -> None:
        def held_out(labels: list[str], **changes: object) -> list[bool | None]:
            return [
                cell.config.select.held_out for cell in compare.make_grid(config(**changes), labels, [0], Path("out"))
            ]

        assert held_out(["fedavg", "bayfl"]) == [None, None]
        assert held_out(["fedavg", "meta-bayfl"]) == [True, True]
        assert held_out(["fedavg", "meta-bayfl"], select={"held_out": False}) == [False, False]

    def test_a_label_may_have_model_options_of_its_own(self) -> None:
        variants = {"fedavg": {}, "wide": {"name": "fedavg", "model": {"hidden": [128]}}}
        found = [cell.config for cell in compare.make_grid(config(methods=variants), [], [0], Path("out"))]
        assert [run.model.model_extra for run in found] == [{}, {"hidden": [128]}]
        assert "model" not in found[1].method

    def test_mistakes_are_found_before_anything_runs(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="unknown method 'nonsense'"):
            compare.make_grid(config(), ["fedavg", "nonsense"], [0], tmp_path)
        with pytest.raises(InputError, match="rate = -1"):
            compare.make_grid(config(methods={"fedavg": {"rate": -1}}), ["fedavg"], [0], tmp_path)
        with pytest.raises(InputError, match="nothing to compare"):
            compare.make_grid(config(), [], [0], tmp_path)
        leaking = config(methods={"meta-fl": {"select_on": "test"}})
        with pytest.raises(InputError, match=r"meta-fl sees test data .*--allow-leak"):
            compare.make_grid(leaking, ["meta-fl"], [0], tmp_path)
        assert len(compare.make_grid(leaking, ["meta-fl"], [0], tmp_path, allow_leak=True)) == 1
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("path", sorted(CONFIGS), ids=lambda path: path.stem)
    def test_configs_of_the_repository_are_in_order(self, path: Path, tmp_path: Path) -> None:
        """Every label has a method, every field is known, and no two rows are the same run."""
        found = read_comparison(path)
        cells = compare.make_grid(found, [], [0], tmp_path)
        assert len({fingerprint.config_hash(cell.config) for cell in cells}) == len(found.methods) > 0

    def test_a_run_is_not_repeated_unless_its_config_changed(self, tmp_path: Path) -> None:
        cells = compare.make_grid(config(), ["fedavg"], [0, 1], tmp_path)
        assert [failure for _, failure in compare.run_cells(cells, 1, 1)] == ["", ""]
        again = compare.make_grid(config(), ["fedavg"], [0, 1, 2], tmp_path)
        assert [cell.finished for cell in again] == [True, True, False]
        changed = compare.make_grid(config(rounds=3), ["fedavg"], [0], tmp_path)
        assert not changed[0].finished

    def test_two_at_a_time_gives_the_rows_of_one_at_a_time(self, tmp_path: Path) -> None:
        rows = []
        for processes in (1, 2):
            cells = compare.make_grid(config(), ["fedavg", "bayfl"], [0], tmp_path / str(processes))
            assert all(not failure for _, failure in compare.run_cells(cells, processes, 1))
            rows.append([{k: v for k, v in row.items() if "seconds" not in k} for row in compare.collect(cells)])
        assert rows[0] == rows[1]
        assert {"G/G accuracy", "P/L accuracy worst", "bytes_up"} <= rows[0][0].keys()

    def test_a_killed_comparison_leaves_nobody_at_work(self, tmp_path: Path) -> None:
        cells = compare.make_grid(config(rounds=100_000), ["fedavg"], [0, 1], tmp_path)
        assert killed_after(8, lambda: list(compare.run_cells(cells, 2, 1)))
        deadline = time.monotonic() + 30
        for cell in cells:
            assert cell.path.exists()
            while locked(cell.path):
                assert time.monotonic() < deadline
                time.sleep(0.1)

    def test_a_failing_run_is_reported_and_the_others_go_on(self, tmp_path: Path) -> None:
        variants = {"wild": {"name": "fedavg", "optimiser": "sgd", "rate": 1e30}, "tame": {"name": "fedavg"}}
        cells = compare.make_grid(config(methods=variants), [], [0], tmp_path)
        outcome = {cell.label: failure for cell, failure in compare.run_cells(cells, 1, 1)}
        assert "good updates" in outcome["wild"]
        assert outcome["tame"] == ""
        assert [row["method"] for row in compare.collect(cells)] == ["tame"]

    def test_the_plan_extrapolates_what_is_left(self, tmp_path: Path) -> None:
        cells = compare.make_grid(config(rounds=4), ["fedavg"], [0, 1], tmp_path)
        (before,) = compare.estimate(cells)
        assert (before.label, before.runs) == ("fedavg", 2)
        assert not tmp_path.joinpath("runs").exists()
        list(compare.run_cells(cells[:1], 1, 1))
        (row,) = compare.collect(cells)
        (after,) = compare.estimate(cells)
        assert after.runs == 1
        assert after.bytes == pytest.approx(row["bytes_up"] + row["bytes_down"], rel=0.01)


class TestFingerprint:
    def test_config_hash_sees_every_value(self) -> None:
        base = RunConfig(**CONFIG)
        assert fingerprint.config_hash(base) == fingerprint.config_hash(RunConfig(**CONFIG))
        assert fingerprint.config_hash(base) != fingerprint.config_hash(RunConfig(**(CONFIG | {"seed": 1})))

    def test_a_run_stands_on_the_core_but_not_on_other_methods_or_the_front(self) -> None:
        names = fingerprint.imported_by("metabayfl.experiment") | fingerprint.imported_by("metabayfl.methods.fedavg")
        assert {"metabayfl.task", "metabayfl.engine.local", "metabayfl.methods.base", "metabayfl.optim"} <= names
        assert not names & {"metabayfl.methods.bayfl", "metabayfl.cli", "metabayfl.compare", "metabayfl.progress"}
        assert "metabayfl.gaussian" in fingerprint.imported_by("metabayfl.methods.bayfl")

    def test_source_hash_follows_the_files(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bayfl, fedavg = (RunConfig(method={"name": name}) for name in ("bayfl", "fedavg"))
        before = fingerprint.source_hash(bayfl), fingerprint.source_hash(fedavg)
        read = Path.read_bytes
        monkeypatch.setattr(Path, "read_bytes", lambda p: read(p) + b"#" * (p.name == "bayfl.py"))
        assert fingerprint.source_hash(bayfl) != before[0]
        assert fingerprint.source_hash(fedavg) == before[1]

    def test_a_model_from_outside_counts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(tmp_path)
        file = tmp_path / "outside_net.py"
        found = []
        for text in ("NET = 1", "NET = 2"):
            file.write_text(text, encoding="utf-8")
            found.append(
                fingerprint.source_hash(RunConfig(model={"name": "outside_net:NET"}, method={"name": "fedavg"}))
            )
        assert found[0] != found[1]


class TestStatistics:
    def test_spread_by_hand(self) -> None:
        assert spread([1.0, 2.0, 3.0]) == (2.0, 1.0, 3)
        assert spread([4.0]) == (4.0, None, 1)

    def test_pairs_share_a_seed(self) -> None:
        found = paired_difference({0: 1.0, 1: 2.0, 7: 100.0}, {0: 0.5, 1: 1.5, 9: -100.0})
        assert found is not None
        assert found == (0.5, 0.5, 0.5, 2)
        assert found.leaves_out_zero
        assert paired_difference({0: 1.0}, {1: 1.0}) is None

    def test_the_interval_has_the_width_of_the_mean(self) -> None:
        ours = {seed: float(seed % 2) for seed in range(400)}
        found = paired_difference(ours, dict.fromkeys(ours, 0.5))
        assert found is not None
        assert not found.leaves_out_zero
        half_width = (found.high - found.low) / 2
        assert half_width == pytest.approx(1.96 * 0.5 / 20, rel=0.05)

    def test_one_seed_says_nothing_about_chance(self) -> None:
        found = paired_difference({0: 1.0}, {0: 0.0})
        assert found is not None
        assert not found.leaves_out_zero


class TestSummary:
    ROWS = (
        {"method": "a", "seed": 0, "run": "x", "G/G accuracy": 0.5, "bytes_up": 1e6},
        {"method": "a", "seed": 1, "run": "x", "G/G accuracy": 0.7, "bytes_up": 1e6},
        {"method": "b", "seed": 0, "run": "x", "G/G accuracy": 0.6, "bytes_up": 2e6},
        {"method": "b", "seed": 1, "run": "x", "G/G accuracy": 0.9, "bytes_up": 2e6},
    )

    def test_mean_spread_and_difference(self) -> None:
        found = comparison.summarise(self.ROWS)
        assert found["methods"]["a"]["G/G accuracy"]["mean"] == pytest.approx(0.6)
        assert "difference" not in found["methods"]["a"]["G/G accuracy"]
        assert found["methods"]["b"]["G/G accuracy"]["difference"]["mean"] == pytest.approx(0.15)

    def test_csv_has_a_line_for_each_run(self) -> None:
        lines = list(csv.DictReader(io.StringIO(comparison.as_csv(self.ROWS))))
        assert [(line["method"], float(line["G/G accuracy"])) for line in lines][3] == ("b", 0.9)
