"""The command line: what it prints, what it writes, how it ends; bad input is one line and exit code 2."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import metabayfl as mb
from metabayfl import cli
from metabayfl._version import __version__
from metabayfl.commands.terminal import seed_list, worker_count
from metabayfl.config import read
from metabayfl.environment import data_hash
from metabayfl.experiment import Experiment
from metabayfl.listing import is_bayesian
from metabayfl.methods import BayFL, FedAvg
from metabayfl.progress import ProgressBar, headline, metrics_table

DEMO = str(Path(__file__).parents[1] / "configs" / "demo.toml")
SMALL = [
    "--workers=1", "--set=rounds=2", "--set=method.epochs=1", "--set=data.clients=2",
    "--set=data.fraction=0.1", "--set=data.unlabelled=0", "--set=model.hidden=[8]",
]  # fmt: skip
MODELS = """
from torch import nn

class Good(nn.Module):
    def __init__(self, classes=10, input_shape=(1, 8, 8), hidden=(4,)):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden[0]), nn.ReLU(), nn.Linear(hidden[0], classes))

    def forward(self, x):
        return self.layers(x)

class Bad(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(3)

class Needy(nn.Module):
    def __init__(self, width):
        super().__init__()

number = 3
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test stands in an empty directory, and sys.path is put back after it."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "here"


@pytest.fixture
def own_models(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (workplace / "models_of_test_cli.py").write_text(MODELS)
    monkeypatch.delitem(sys.modules, "models_of_test_cli", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return "models_of_test_cli"


def run(*changes: str, out: str = "run") -> list[str]:
    return ["run", DEMO, *SMALL, *changes, f"--out={out}"]


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def output(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    captured = capsys.readouterr()
    assert captured.err == ""
    found: dict[str, Any] = json.loads(captured.out)
    return found


class TestHelp:
    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            cli.main(["--version"])
        assert caught.value.code == 0
        assert capsys.readouterr().out == f"metabayfl {__version__}\n"

    def test_help_version_and_config_errors_come_without_torch(self) -> None:
        code = """
import contextlib, sys
from metabayfl.cli import main
for arguments in (["--help"], ["run", "--help"], ["--version"], ["methods", "--help"]):
    with contextlib.suppress(SystemExit):
        main(arguments)
assert main(["run", "no.toml"]) == 2
assert main(["run", sys.argv[1], "--set", "rounds=0"]) == 2
assert main(["run", sys.argv[1], "--workers", "x"]) == 2
assert not {"torch", "numpy", "sklearn"} & sys.modules.keys()
"""
        environment = os.environ | {"PYTHONPATH": str(Path(mb.__file__).parents[1])}
        command = [sys.executable, "-c", code, DEMO]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)  # noqa: S603
        assert done.returncode == 0, done.stderr
        assert "train one method" in done.stdout
        assert len(done.stderr.splitlines()) == 3

    def test_a_command_is_needed(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            cli.main([])
        assert caught.value.code == 2
        assert "COMMAND" in capsys.readouterr().err


class TestRun:
    def test_json(self, capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
        assert cli.main([*run("--set=seed=3", "--set=method.name=fedavg"), "--json"]) == 0
        found = output(capsys)
        assert (found["run"], found["method"], found["seed"]) == ("run", "fedavg", 3)
        assert found["metrics"] == mb.load(workplace / "run").metrics
        assert set(found["metrics"]) == {"G/G", "G/L", "P/L"}
        assert 0 <= found["metrics"]["G/G"]["accuracy"]["value"] <= 1

    def test_a_table_for_people_and_silence_without_a_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(run()) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        assert captured.out.endswith("run: run\n")
        for word in ("accuracy", "nll", "ece", "G/G", "G/L weighted", "P/L worst"):
            assert word in captured.out

    def test_a_new_directory_for_each_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["run", DEMO, *SMALL, "--set=rounds=1", "--json"]
        runs = []
        for _ in range(2):
            assert cli.main(arguments) == 0
            runs.append(output(capsys)["run"])
        assert runs == ["runs/demo-bayfl-0", "runs/demo-bayfl-0-2"]

    def test_the_config_as_run_gives_the_same_run_bit_for_bit(self, workplace: Path) -> None:
        assert cli.main(run("--set=corrupt.noise_variance=0.3", "--set=method.rate=0.01/sqrt(k)", out="one")) == 0
        assert cli.main(["run", "one/config.toml", "--workers=1", "--out=two"]) == 0
        one, two = content(workplace / "one"), content(workplace / "two")
        one, two = ({k: v for k, v in run.items() if not k.startswith("clients")} for run in (one, two))
        assert one.keys() == two.keys()
        for name in one.keys() - {"events.jsonl", "lock", "checkpoint.safetensors"}:
            assert one[name] == two[name], name
        events = [mb.load(workplace / name).events for name in ("one", "two")]
        for first, second in zip(*events, strict=True):
            for name in first.keys() | second.keys():
                if "seconds" not in name and "memory" not in name:
                    assert first[name] == second[name]

    def test_what_it_depended_on_is_written_down(self, workplace: Path) -> None:
        assert cli.main(run("--set=seed=7")) == 0
        environment = json.loads((workplace / "run" / "env.json").read_text())
        assert environment["packages"]["torch"] == torch.__version__
        assert (environment["metabayfl"], environment["seed"]) == (__version__, 7)
        config = read(workplace / "run" / "config.toml")
        assert environment["data_hash"] == data_hash(Experiment.of(config).federation)
        about = json.loads((workplace / "run" / "run.json").read_text())
        assert (about["method"]["name"], about["method"]["epochs"], about["rounds"]) == ("bayfl", 1, 2)


WRONG: list[tuple[list[str], list[str]]] = [
    (["run", "no.toml"], ["cannot read config no.toml"]),
    (run("--set=method.name=fedagv"), ["unknown method 'fedagv'", "bayfl, central"]),
    (run("--set=method.rate=-1"), ["method.rate = -1", "positive number"]),
    (run("--set=method.kl_wieght=1"), ["method.kl_wieght = 1: unknown key", "kl_weight"]),
    (run("--set=round=1"), ["round = 1: unknown key", "rounds, seed"]),
    (run("--set=data.alhpa=1"), ["data.alhpa = 1: unknown key", "alpha"]),
    (run("--set=rounds"), ["--set 'rounds'", "key=value"]),
    (run("--workers=0"), ["--workers '0'", "from 1, or auto"]),
    (run("--workers=many"), ["--workers 'many'", "from 1, or auto"]),
    (run("--workers=-2"), ["--workers '-2'", "from 1, or auto"]),
    (run("--set=data.name=imagenet"), ["data.name = 'imagenet'", "digits", "cifar10"]),
    (run("--set=data.clients=5000"), ["clients = 5000", "1397 samples"]),
    (run("--set=model.name=mpl"), ["'mpl'", "mlp", "module:callable"]),
    (run("--set=model.name=nowhere_at_all:Net"), ["nowhere_at_all", "cannot be imported"]),
    (run("--set=model.width=3"), ["width = 3", "hidden, dropout"]),
    (run("--set=clients_per_round=3"), ["clients_per_round = 3", "2 clients"]),
    (["resume", "nowhere"], ["nowhere is not a run directory"]),
    (["resume", "nowhere", "--workers=0"], ["--workers '0'"]),
    (["methods", "nonsense"], ["unknown method 'nonsense'", "bayfl, central"]),
    (["check", "nonsense"], ["'nonsense'", "mlp", "module:callable"]),
    (["check", "nowhere_at_all:Net"], ["nowhere_at_all", "cannot be imported"]),
]


@pytest.mark.parametrize(("arguments", "parts"), WRONG, ids=[" ".join(a[-2:]) for a, _ in WRONG])
def test_bad_input_is_one_line_and_nothing_is_written(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("metabayfl: ")
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("\n")
    assert all(part in captured.err for part in parts), captured.err
    assert list(workplace.iterdir()) == []


class TestOut:
    def refused(self, arguments: list[str], path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        before = content(path)
        capsys.readouterr()
        assert cli.main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert f"{path.name} is not empty: choose another directory" in captured.err
        assert content(path) == before

    def test_a_finished_run_is_not_overwritten(self, capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
        assert cli.main(run("--set=rounds=1")) == 0
        self.refused(run(), workplace / "run", capsys)

    def test_a_directory_of_the_users(self, capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
        for name in ("notes.txt", "config.toml"):
            path = workplace / name.replace(".", "-")
            path.mkdir()
            (path / name).write_text("# mine\nrounds = 1\n")
            self.refused(run(out=path.name), path, capsys)
        own = workplace / "config-toml"
        self.refused(["run", str(own / "config.toml"), f"--out={own.name}"], own, capsys)

    def test_a_file(self, capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
        (workplace / "run").write_text("mine")
        assert cli.main(run()) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert (workplace / "run").read_text() == "mine"

    def test_a_place_that_cannot_be_is_one_line(self, capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
        (workplace / "file").write_text("mine")
        assert cli.main(run(out="file/run")) == 1
        assert capsys.readouterr().err.count("\n") == 1


class TestResume:
    def test_of_a_finished_run_says_so(self, capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
        assert cli.main([*run("--set=rounds=1"), "--json"]) == 0
        first = output(capsys)
        before = content(workplace / "run")
        assert cli.main(["resume", "run", "--json"]) == 0
        captured = capsys.readouterr()
        assert captured.err == "metabayfl: run is finished\n"
        assert json.loads(captured.out) == first
        assert content(workplace / "run") == before

    def test_after_an_interruption_the_bits_are_the_same(
        self, capsys: pytest.CaptureFixture[str], workplace: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert cli.main(run(out="whole")) == 0
        capsys.readouterr()

        def interrupt(bar: ProgressBar, event: dict[str, Any]) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(ProgressBar, "__call__", interrupt)
            assert cli.main(run(out="cut")) == 130
        assert capsys.readouterr().err == "metabayfl: interrupted; go on with: metabayfl resume cut\n"
        with pytest.raises(mb.InputError, match="not finished: go on with metabayfl resume"):
            mb.load(workplace / "cut")
        assert cli.main(["resume", "cut", "--workers=1"]) == 0
        for name in ("model.safetensors", "personal/000001.safetensors"):
            assert (workplace / "cut" / name).read_bytes() == (workplace / "whole" / name).read_bytes()

    def test_of_a_run_from_python_names_the_fix(self, capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
        x, y = torch.randn(10, 4), torch.arange(10) % 2
        mb.federate(torch.nn.Linear(4, 2), mb.Federation.from_arrays([(x, y)]), rounds=1, out="run")
        (workplace / "run" / "model.safetensors").unlink()
        assert cli.main(["resume", "run"]) == 2
        assert "was started from Python: call federate(..., out=..., resume=True)" in capsys.readouterr().err

    def test_of_a_directory_that_is_no_run(self, capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
        (workplace / "notes").mkdir()
        assert cli.main(["resume", "notes"]) == 2
        assert capsys.readouterr().err == "metabayfl: notes is not a run directory\n"


class TestOwnModels:
    def test_run_and_resume(self, capsys: pytest.CaptureFixture[str], own_models: str, workplace: Path) -> None:
        assert cli.main(run(f"--set=model.name={own_models}:Good", "--set=rounds=1")) == 0
        capsys.readouterr()
        assert cli.main(["resume", "run"]) == 0
        assert "is finished" in capsys.readouterr().err
        with pytest.raises(mb.InputError, match=r"pass its model, as in .*input_shape=\(1, 8, 8\), hidden=\[8\]"):
            mb.load(workplace / "run")
        model = mb.models.build(f"{own_models}:Good", classes=10, input_shape=(1, 8, 8), hidden=[8])
        prediction = mb.load(workplace / "run", model).predict(torch.zeros(2, 1, 8, 8))
        assert prediction.probs.shape == (2, 10)

    def test_check(self, capsys: pytest.CaptureFixture[str], own_models: str) -> None:
        assert cli.main(["check", f"{own_models}:Good"]) == 0
        good = capsys.readouterr()
        assert "can be federated: 310 trainable parameters" in good.out
        assert "Bayesian: layers.1.weight" in good.out
        assert cli.main(["check", f"{own_models}:Bad"]) == 1
        bad = capsys.readouterr()
        assert "cannot be federated" in bad.out
        assert "layer: is not initialised yet (a lazy module); run one forward pass before" in bad.out
        assert good.err == bad.err == ""

    @pytest.mark.parametrize(("name", "part"), [("Needy", "'width'"), ("number", "callable"), ("Nobody", "Nobody")])
    def test_check_of_what_cannot_be_built(
        self, capsys: pytest.CaptureFixture[str], own_models: str, name: str, part: str
    ) -> None:
        assert cli.main(["check", f"{own_models}:{name}"]) == 2
        captured = capsys.readouterr()
        assert part in captured.err
        assert captured.err.count("\n") == 1

    def test_check_of_a_built_in(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["check", "resnet20"]) == 0
        captured = capsys.readouterr().out
        assert "resnet20 can be federated: 269,722 trainable parameters" in captured
        assert "buffers that travel with the model: norm1.running_mean" in captured


class TestMethods:
    def test_all(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["methods"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert any("bayfl" in line and "Bayesian" in line for line in lines)
        assert any("fedavg" in line and "plain" in line and "McMahan" in line for line in lines)
        assert (is_bayesian(BayFL), is_bayesian(FedAvg)) == (True, False)

    @pytest.mark.parametrize("method", [BayFL, FedAvg])
    def test_every_option_with_its_default(self, capsys: pytest.CaptureFixture[str], method: type[mb.Method]) -> None:
        assert cli.main(["methods", method.name]) == 0
        lines = capsys.readouterr().out.splitlines()
        for name, field in method.model_fields.items():
            row = next(line for line in lines if f" method.{name} " in line)
            default = [] if field.default == () else field.default
            assert f" {default} " in row

    def test_ranges_and_choices(self, capsys: pytest.CaptureFixture[str]) -> None:
        cli.main(["methods", "bayfl"])
        text = capsys.readouterr().out
        for accepted in ("integer ≥ 1", "number > 0", "number ≥ 0 < 1", "sgd | adam", "number or string"):
            assert accepted in text


class TestWorkers:
    def test_count(self) -> None:
        assert worker_count("3") == 3
        assert worker_count("auto") >= 1


class TestCompare:
    COMPARE = ("compare", DEMO, *SMALL, "--seeds=0-1", "--out=grid")

    def test_seeds(self) -> None:
        assert seed_list("0,1,2") == [0, 1, 2]
        assert seed_list("3, 5-7") == [3, 5, 6, 7]
        for text in ("", "a", "1-", "1,1", "-3"):
            with pytest.raises(mb.InputError, match="--seeds"):
                seed_list(text)

    def test_a_grid_is_run_once(self, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = [*self.COMPARE, "--methods=fedavg,bayfl", "--json"]
        assert cli.main(arguments) == 0
        first = capsys.readouterr()
        assert "0 of 4 runs are done" in first.err
        summary = json.loads(first.out)
        assert set(summary["methods"]) == {"fedavg", "bayfl"}
        assert summary["methods"]["bayfl"]["G/G nll"]["difference"]["seeds"] == 2
        assert cli.main(arguments) == 0
        again = capsys.readouterr()
        assert "4 of 4 runs are done" in again.err
        assert json.loads(again.out) == summary
        assert len((workplace / "grid" / "compare.csv").read_text().splitlines()) == 5

    def test_every_run_is_recorded_once(self, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = [*self.COMPARE, "--methods=fedavg", "--record=runs.jsonl"]
        assert cli.main(arguments) == 0
        assert cli.main(arguments) == 0
        lines = [json.loads(line) for line in (workplace / "runs.jsonl").read_text().splitlines()]
        found = sorted((line["method"], line["seed"], line["on"]) for line in lines)
        assert found == [("fedavg", 0, "test"), ("fedavg", 1, "test")]
        assert lines[0]["config"] != lines[1]["config"]
        assert lines[0]["sources"] == lines[1]["sources"]
        assert cli.main([*self.COMPARE, "--methods=bayfl", "--record=nowhere/runs.jsonl"]) == 2
        assert "nowhere/runs.jsonl" in capsys.readouterr().err

    def test_the_demo_compares_five_methods(self, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
        options = cli.parser().parse_args(["demo", "--workers=1"])
        cli._check_what_was_typed(options)
        assert list(options.settings.methods) == ["fedavg", "bayfl", "meta-fl", "mc-dropout", "meta-bayfl"]
        assert options.seeds == [0, 1, 2]
        options.settings = options.settings.model_copy(update={"rounds": 1})
        options.seeds = [0]
        assert cli._handler(options.handler)(options) == 0
        assert "mc-dropout" in capsys.readouterr().out
        assert (workplace / "runs" / "demo" / "compare.csv").exists()

    def test_a_plan_runs_nothing(self, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([*self.COMPARE, "--methods=fedavg", "--plan"]) == 0
        assert "core hours in all" in capsys.readouterr().out
        assert not (workplace / "grid").exists()

    def test_a_failing_run_is_named(self, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
        wild = ["--set=method.optimiser=sgd", "--set=method.rate=1e30"]
        assert cli.main([*self.COMPARE, "--methods=fedavg", "--seeds=0", *wild]) == 1
        assert "fedavg, seed 0: round 1 has 0 good updates" in capsys.readouterr().err


METRICS = {
    "G/G": {"accuracy": {"value": 0.5}, "nll": {"value": 1.25}},
    "P/L": {"accuracy": {"weighted": 0.75, "worst": 0.25}, "nll": {"weighted": 1.0, "worst": 2.0}},
}


class TestProgress:
    def test_faults_are_told_even_without_a_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        with ProgressBar(2, "bayfl") as bar:
            bar({"event": "client", "round": 1, "client": 4, "fault": ""})
            bar({"event": "client", "round": 1, "client": 5, "fault": "Diverged: nll is NaN"})
            bar({"event": "round", "round": 1, "metrics": METRICS})
            bar({"event": "round", "round": 2, "metrics": {}})
        captured = capsys.readouterr()
        assert captured.err == "metabayfl: round 1, client 5: Diverged: nll is NaN\n"
        assert captured.out == ""

    def test_headline(self) -> None:
        assert headline(METRICS) == "accuracy G/G 0.500 P/L 0.750"
        assert headline({"G/G": {"nll": {"value": 1}, "rmse": {"value": 0.25}}}) == "rmse G/G 0.250"

    def test_table(self) -> None:
        console = Console(width=100)
        with console.capture() as captured:
            console.print(metrics_table(METRICS))
        rows = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in captured.get().splitlines()]
        assert ["accuracy", "0.5000", "0.7500", "0.2500"] in rows
        assert ["nll", "1.2500", "1.0000", "2.0000"] in rows
