"""A report says what lies in the run directories: nothing more, nothing less, and harmlessly."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from federations import command, federation, network, plan
from metabayfl import compare
from metabayfl.api import run_job
from metabayfl.commands import report as report_command
from metabayfl.config import CompareConfig
from metabayfl.data.federation import Federation
from metabayfl.environment import describe_data
from metabayfl.methods import BayFL, Central, FedAvg, MetaFL
from metabayfl.methods.base import Method
from metabayfl.options import InputError
from metabayfl.report.choices import Scale, rate_map
from metabayfl.report.notes import notes
from metabayfl.report.page import render
from metabayfl.report.runs import Run, by_label, read_runs
from metabayfl.report.series import candidate_curves, megabytes, metric_curve, reliability, seconds, spread_out
from metabayfl.report.tables import as_latex, as_markdown
from metabayfl.store import RunDirectory

HOSTILE = '<img src=x onerror=alert(1)> $a_1$ & "q"'
SECTIONS = ("curves", "calibration", "costs", "rates", "candidates", "labels", "runs", "table")


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of two methods and two seeds, one of them with a label that wants to be a tag."""
    out = tmp_path_factory.mktemp("comparison")
    settings = CompareConfig(
        rounds=3,
        method={"epochs": 1},
        data={"clients": 3, "fraction": 0.1},
        model={"hidden": [4]},
        eval={"every": 1, "samples": 2},
        methods={"meta-bayfl": {}, HOSTILE: {"name": "fedavg"}},
    )
    cells = compare.make_grid(settings, [], [0, 1], out)
    assert [failure for _, failure in compare.run_cells(cells, 1, 1)] == [""] * 4
    return out


def run(path: Path, method: Method | None = None, data: Federation | None = None, **options: Any) -> Path:
    """A small run with the API."""
    model = network() if data is None else nn.Linear(4, 1)
    run_job(model, data or federation(), method or FedAvg(epochs=1), plan(**options), out=path)
    return path


@pytest.fixture(scope="module")
def html(grid: Path) -> str:
    return page(grid)


def rewrite_events(path: Path, change: Any) -> None:
    """Let a function change the list of events of a run."""
    events = change(list(RunDirectory(path).events()))
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def page(*paths: Path) -> str:
    return render(read_runs(paths))


def visible(html: str) -> str:
    """The text of a page without its tags."""
    return re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<[^>]+>", " ", html, flags=re.DOTALL))


class TestPage:
    def test_everything_is_there(self, html: str) -> None:
        assert all(f'<section id="{name}">' in html for name in SECTIONS)
        figures = re.findall(r'<svg [^>]*aria-label="([^"]+)"', html)
        titles = re.findall(r"<text[^>]*>([GP]/[GL] [^<]+)</text>", html)
        assert titles == [
            "G/G accuracy", "P/L accuracy", "G/G NLL", "P/L NLL", "G/G ECE", "P/L ECE",
            "G/G accuracy by megabytes", "G/G accuracy by seconds",
        ]  # fmt: skip
        assert len(figures) == 6 + 2 + 2 + 1 + 1 + 1
        assert "mean ± standard deviation over 2 seeds (0, 1)" in html
        assert "clients = 3" in html
        assert "torch" in html

    def test_it_loads_nothing_and_runs_nothing(self, html: str) -> None:
        addresses = re.findall(r"[a-z]+://[^\"' ]+", html)
        assert set(addresses) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
        assert set(re.findall(r'href="([^"]{1,6})', html)) == {
            "data:,",
            *(x[:6] for x in re.findall(r'href="(#[^"]+)', html)),
        }
        assert "<script" not in html
        assert not re.findall(r"<(?:img|iframe|object|embed|video|audio)\b", html)

    def test_a_label_is_text_and_nothing_else(self, html: str) -> None:
        assert "<img" not in html
        assert "&lt;img src=x onerror=alert(1)&gt; $a_1$ &amp; &#34;q&#34;" in html
        assert re.search(r"<text[^>]*>&lt;img src=x onerror=alert\(1\)&gt; \$a_1\$ &amp; \"q\"</text>", html)

    def test_ids_are_unique_and_references_find_them(self, html: str) -> None:
        ids = re.findall(r'\bid="([^"]+)"', html)
        assert len(ids) == len(set(ids))
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', html)) <= set(ids)

    def test_the_same_runs_give_the_same_bytes(self, html: str, grid: Path) -> None:
        assert page(grid) == html

    def test_colours_follow_the_page(self, html: str) -> None:
        drawn = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
        assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) == set()
        used = set(re.findall(r"var\(--([a-z0-9-]+)\)", drawn))
        assert used <= set(re.findall(r"--([a-z0-9-]+):", html))
        assert {"ink", "series-0", "series-1", "step-4"} <= used


class TestWhatIsSaid:
    def test_one_seed_has_no_band(self, tmp_path: Path) -> None:
        html = page(run(tmp_path / "run"))
        assert "One seed for each method" in html
        assert "±" not in visible(html.split('<section id="table">')[1].split("</section>")[0])
        assert "No method here chooses its rate." in html

    def test_an_unfinished_run_is_shown_as_far_as_it_is(self, tmp_path: Path) -> None:
        path = run(tmp_path / "run", eval={"every": 1, "samples": 2})
        rewrite_events(path, lambda events: [event for event in events if event["round"] == 1])
        html = page(path)
        assert "fedavg seed 0 (round 1 of 3)" in html
        assert "fedavg (unfinished)" in html

    def test_a_run_that_has_not_begun(self, tmp_path: Path) -> None:
        path = run(tmp_path / "run")
        (path / "events.jsonl").unlink()
        html = page(path)
        assert visible(html).count("No round has been evaluated yet.") == 3
        with pytest.raises(InputError, match="no evaluated round yet"):
            report_command.text_of(read_runs([path]), "md")

    def test_regression_has_values_instead_of_classes(self, tmp_path: Path) -> None:
        x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
        data = Federation.from_arrays([(x[:15], x[:15].sum(1)), (x[15:], x[15:].sum(1))])
        html = page(run(tmp_path / "run", data=data))
        assert "G/G RMSE" in html
        assert "coverage of 95 % intervals" in html
        assert "there are no classes to count" in html
        assert "there is no confidence in a class" in html
        assert "accuracy</text>" not in html

    def test_what_an_old_run_did_not_record(self, tmp_path: Path) -> None:
        path = run(tmp_path / "run")
        (path / "data.json").unlink()
        rewrite_events(path, lambda found: [{k: v for k, v in e.items() if k != "reliability"} for e in found])
        assert visible(page(path)).count("Not recorded.") == 2

    def test_without_a_global_model_there_is_no_global_view(self, tmp_path: Path) -> None:
        html = page(run(tmp_path / "run", FedAvg(epochs=1, batchnorm="local")))
        assert "No global model, so no G/G numbers: fedavg." in html
        assert "P/L accuracy by megabytes" in html
        assert "G/G accuracy" not in html

    def test_different_data_are_not_comparable(self, tmp_path: Path) -> None:
        other = Federation.from_arrays([(torch.ones(9, 4) * n, torch.arange(9) % 3) for n in range(3)], batch_size=8)
        run_job(network(), other, BayFL(epochs=1), plan(), out=tmp_path / "other")
        assert "Not comparable: with seed 0" in page(run(tmp_path / "run"), tmp_path / "other")

    def test_pooled_data_are_the_same_data(self, tmp_path: Path) -> None:
        paths = run(tmp_path / "federated"), run(tmp_path / "central", Central(epochs=1))
        assert "Not comparable" not in page(*paths)
        assert RunDirectory(paths[0]).data() == RunDirectory(paths[1]).data()

    def test_many_clients_are_few_in_the_pictures(self, tmp_path: Path) -> None:
        (few,) = read_runs([run(tmp_path / "run", MetaFL(epochs=1))])
        like = few.choices[0]
        many = [like | {"round": r, "client": c} for r in range(1, 51) for c in range(0, 10_000, 50)]
        rounds = [few.rounds[-1] | {"round": r} for r in range(1, 51)]
        about = few.about | {"clients": 10_000, "rounds": 50}
        labels = {"clients": 10_000, "listed": list(range(100)), "samples": [9] * 100, "labels": [[3, 3, 3]] * 100}
        large = replace(few, about=about, events=many + rounds, data=labels | {"all_samples": 90_000})
        html = render([large])
        assert "40 of 50 rounds and 24 of the 200 clients that took part" in html
        assert "24 of 10000 clients are shown" in html
        assert len(html) < 1_000_000

    def test_where_clients_take_part_now_and_then_their_rates_are_shown_by_share(self, tmp_path: Path) -> None:
        (few,) = read_runs([run(tmp_path / "run", MetaFL(epochs=1))])
        events = [few.choices[0] | {"round": r, "client": 10 * r + c} for r in (1, 2, 3, 4) for c in range(10)]
        rounds = [few.rounds[-1] | {"round": r} for r in (1, 2, 3, 4)]
        picture = rate_map("x", 0, replace(few, events=events + rounds), Scale.of([few]))
        assert "share of a round's clients" in picture.caption
        assert ">rate</text>" in picture.svg
        assert ">client</text>" in rate_map("x", 0, few, Scale.of([few])).svg


class TestRuns:
    def test_variants_of_a_method_are_told_apart(self, tmp_path: Path) -> None:
        slow, fast = run(tmp_path / "slow"), run(tmp_path / "fast", FedAvg(epochs=1, rate=0.1))
        again = run(tmp_path / "again", seed=1)
        assert [found.label for found in read_runs([slow, fast, again])] == ["fedavg", "fedavg (fast)", "fedavg"]

    @pytest.mark.parametrize("section", ["data", "corrupt", "drift"])
    def test_other_data_are_no_repetition(self, tmp_path: Path, section: str) -> None:
        paths = [run(tmp_path / str(seed), seed=seed) for seed in range(3)]
        for path, value, verify in zip(paths, (1, 1, 2), ("true", "false", "true"), strict=True):
            (path / "config.toml").write_text(f"{section}.amount = {value}\ndata.verify = {verify}\n")
        found = read_runs(paths)
        assert [run.label for run in found] == ["fedavg", "fedavg", "fedavg (2)"]
        assert "Not comparable: the configs differ in [data], [corrupt] or [drift]." in notes(by_label(found))

    def test_a_damaged_config(self, tmp_path: Path) -> None:
        path = run(tmp_path / "run")
        for text in ("[data", "data = 1"):
            (path / "config.toml").write_text(text)
            with pytest.raises(InputError, match=r"config\.toml is damaged"):
                read_runs([path])

    def test_a_run_counts_once_and_its_copy_is_not_a_repetition(self, tmp_path: Path) -> None:
        path = run(tmp_path / "run")
        copy = run(tmp_path / "copy")
        assert len(read_runs([path, path])) == 1
        assert [found.label for found in read_runs([path, copy])] == ["fedavg", "fedavg (copy)"]

    def test_a_comparison_is_what_its_last_result_names(self, grid: Path) -> None:
        everything = read_runs([grid])
        names = [found.path.name for found in everything]
        listed = {"runs": [{"run": names[0]}], "unfinished": [names[1]]}
        (grid / "compare.json").write_text(json.dumps(listed))
        try:
            assert [found.path.name for found in read_runs([grid])] == names[:2]
            (grid / "compare.json").write_text("{")
            with pytest.raises(InputError, match=r"compare\.json is damaged"):
                read_runs([grid])
        finally:
            (grid / "compare.json").unlink()

    def test_a_directory_that_is_no_run(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="is not a run directory"):
            read_runs([tmp_path])
        (tmp_path / "runs").mkdir()
        with pytest.raises(InputError, match="there is no run here yet"):
            read_runs([tmp_path])


def made_of(events: Sequence[dict[str, Any]], seed: int = 0) -> Run:
    return Run(Path("x"), "x", {"seed": seed, "rounds": 2}, {}, None, "", list(events))


def judged(round_: int, accuracy: float, **more: Any) -> dict[str, Any]:
    return {"event": "round", "round": round_, "metrics": {"G/G": {"accuracy": {"value": accuracy}}}, **more}


class TestSeries:
    def test_mean_and_spread_over_seeds(self) -> None:
        runs = [made_of([judged(1, 0.5), judged(2, 0.6)]), made_of([judged(1, 0.7)], seed=1)]
        curve = metric_curve(runs, "G/G", "accuracy")
        assert curve.x == [1.0, 2.0]
        assert curve.y[0] == pytest.approx((0.6, 0.02**0.5, 2))
        assert curve.y[1] == (0.6, None, 1)
        assert metric_curve(runs, "P/L", "accuracy") == ([], [])

    def test_costs_add_up(self) -> None:
        clients = [{"event": "client", "round": r, "bytes_up": 1e6, "bytes_down": 2e6} for r in (1, 1, 2)]
        found = made_of([*clients, judged(1, 0.5, train_seconds=1.5), judged(2, 0.5, train_seconds=2.0)])
        assert megabytes(found) == {1: 6.0, 2: 9.0}
        assert seconds(found) == {1: 1.5, 2: 3.5}

    def test_bins_of_several_seeds_are_pooled_by_their_counts(self) -> None:
        bins = [{"count": [1, 0], "confidence": [0.2, 0], "accuracy": [1, 0]},
                {"count": [3, 2], "confidence": [0.4, 0.9], "accuracy": [0, 0.5]}]  # fmt: skip
        found = reliability([made_of([judged(1, 0.5, reliability=b)], seed=s) for s, b in enumerate(bins)])
        assert found is not None
        assert found.counts == [4, 2]
        assert found.confidence == pytest.approx([0.35, 0.9])
        assert found.accuracy == pytest.approx([0.25, 0.5])

    def test_candidates_by_rate_or_by_number_if_they_change_every_round(self) -> None:
        def choices(rate: float) -> list[dict[str, Any]]:
            trials = {f"trial_nll.{r * rate:g}": 1e30 if r > 1 else r for r in (0.1, 1, 10)}
            return [{"event": "client", "round": int(1 / rate), "incoming_nll": 2.0} | trials]

        constant = candidate_curves([made_of(choices(1.0))])
        assert list(constant) == ["received model", "rate 0.1", "rate 1"]  # the third was no number
        falling = candidate_curves([made_of([e for k in range(1, 9) for e in choices(1 / k)])])
        assert list(falling) == ["received model", "candidate 1", "candidate 2"]

    def test_spread_out(self) -> None:
        assert spread_out([5, 1, 3], 3) == [1, 3, 5]
        assert spread_out(range(101), 3) == [0, 50, 100]

    def test_steps_of_many_rates(self) -> None:
        events = [{"event": "client", "round": 1, "client": 0, "incoming_nll": 1.0, "rate": 10.0**-k,
                   f"trial_nll.{10.0**-k:g}": 1.0} for k in range(7)]  # fmt: skip
        scale = Scale.of([made_of(events)])
        assert scale.rates == pytest.approx([1e-6, 10**-4.5, 1e-3, 10**-1.5, 1.0])
        assert [scale.step(rate) for rate in (1e-6, 1e-3, 1.0)] == [0, 2, 4]
        assert scale.area(0) < scale.area(2) < scale.area(4)


class TestRecords:
    def test_bins_hold_the_common_test_set_and_give_its_calibration_error(self, grid: Path) -> None:
        for found in read_runs([grid]):
            last = found.history[-1]
            bins = last["reliability"]
            total = sum(bins["count"])
            gaps = zip(bins["count"], bins["confidence"], bins["accuracy"], strict=True)
            error = sum(n * abs(a - c) for n, c, a in gaps) / total
            assert error == pytest.approx(last["metrics"]["G/G"]["ece"]["value"], abs=1e-5)

    def test_labels_of_the_training_parts_are_counted(self) -> None:
        data = federation()
        about = describe_data(data)
        assert about["listed"] == [0, 1, 2]
        assert about["samples"] == [sum(counts) for counts in about["labels"]] == data.train.sizes().tolist()
        assert about["labels"][1] == torch.bincount(data.train.of(1)[1], minlength=3).tolist()

    def test_a_large_federation_leaves_a_small_file(self) -> None:
        pairs = [(torch.zeros(2, 1), torch.tensor([0, 9]))] * 10_000
        about = describe_data(
            Federation.from_arrays(pairs, test=(torch.zeros(1, 1), torch.tensor([0])), test_fraction=0)
        )
        assert about["clients"] == 10_000
        assert (about["listed"][0], about["listed"][-1], len(about["listed"])) == (0, 9999, 100)
        assert about["all_samples"] == 20_000
        assert len(json.dumps(about)) < 10_000


class TestTables:
    SUMMARY: dict[str, Any] = {  # noqa: RUF012 (never changed)
        "reference": "a|b_1",
        "methods": {"a|b_1": {"G/G accuracy": {"mean": 0.5, "std": 0.1, "seeds": 2}},
                    r"100% \x{y}~^ #1 & <b>": {"G/G accuracy": {"mean": 0.25, "std": None, "seeds": 1}}},
        "runs": [{"seed": 0}, {"seed": 1}],
    }  # fmt: skip

    def test_markdown(self) -> None:
        lines = as_markdown(self.SUMMARY).splitlines()
        assert lines[:3] == ["| method | G/G acc |", "| --- | ---: |", r"| a\|b\_1 | 0.5000 ± 0.1000 |"]
        assert lines[3] == r"| 100% \\x{y}\~^ \#1 \& \<b\> | 0.2500 |"

    def test_latex(self) -> None:
        lines = as_latex(self.SUMMARY).splitlines()
        assert r"a|b\_1 & 0.5000 $\pm$ 0.1000 \\" in lines
        name = r"100\% \textbackslash{}x\{y\}\textasciitilde{}\textasciicircum{} \#1 \& \textless{}b\textgreater{}"
        assert rf"{name} & 0.2500 \\" in lines
        assert lines[1] == r"\begin{tabular}{lr}"


class TestCommand:
    def test_the_page_goes_beside_the_runs(
        self, grid: Path, html: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert command(["report", str(grid)]) == 0
        assert capsys.readouterr().out == f"report: {grid / 'report.html'}\n"
        assert (grid / "report.html").read_text() == html
        monkeypatch.chdir(tmp_path)
        runs = sorted(str(path.parent) for path in grid.glob("runs/*/run.json"))
        assert command(["report", *runs[:2]]) == 0
        assert Path("report.html").exists()

    def test_tables_are_printed_or_written(
        self, grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert command(["report", str(grid), "--format=csv"]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 1 + 4
        assert command(["report", str(grid), "--format=latex", f"--out={tmp_path / 'table.tex'}"]) == 0
        assert "toprule" in (tmp_path / "table.tex").read_text()
        assert command(["report", str(grid), "--out=-"]) == 0
        assert "<!DOCTYPE html>" in capsys.readouterr().out

    @pytest.mark.parametrize("wrong", [["nowhere"], [".", "--out=."]])
    def test_mistakes_are_one_line(
        self, wrong: list[str], grid: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(grid)
        assert command(["report", *wrong]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1

    def test_a_failing_report_does_not_lose_a_comparison(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(runs: Sequence[Run]) -> str:
            raise ZeroDivisionError("no ink")

        monkeypatch.setattr(report_command, "render", fail)
        config = tmp_path / "c.toml"
        config.write_text("rounds = 1\n[method]\nepochs = 1\n[data]\nclients = 2\nfraction = 0.1\n")
        arguments = ["compare", str(config), "--methods=fedavg", "--seeds=0", f"--out={tmp_path}", "--workers=1"]
        assert command(arguments) == 0
        said = capsys.readouterr()
        assert "no report: ZeroDivisionError: no ink" in said.err
        assert "fedavg" in said.out
        assert (tmp_path / "compare.json").exists()

    def test_matplotlib_is_imported_for_pages_only(self, grid: Path) -> None:
        code = (
            "import sys; from metabayfl.cli import main; "
            f"main(['report', {str(grid)!r}, '--format=md']); assert 'matplotlib' not in sys.modules"
        )
        environment = {"PYTHONPATH": str(Path(compare.__file__).parents[1]), "PATH": ""}
        call = [sys.executable, "-c", code]
        done = subprocess.run(call, capture_output=True, text=True, check=False, env=environment)  # noqa: S603
        assert done.returncode == 0, done.stderr
