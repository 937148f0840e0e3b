"""Tuning: every combination is tried, d_n decides, and a comparison takes the values over."""

from pathlib import Path

import pytest

from federations import one_line
from metabayfl import compare, tuning
from metabayfl.cli import main
from metabayfl.config import CompareConfig, read_values
from metabayfl.options import InputError
from metabayfl.tuning import Candidate, Score

CONFIG = """
rounds = 2
[data]
clients = 2
partition = "iid"
fraction = 0.2
[method]
epochs = 1
[eval]
samples = 2
[methods.fedavg]
[methods.slow]
name = "fedavg"
epochs = 2
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


class TestCandidates:
    def test_all_combinations_of_the_options_that_a_method_has(self) -> None:
        choices = tuning.read_choices(["rate=1e-3,1e-2", "optimiser=sgd, adam", "kl_weight=0.1"])
        found = tuning.candidates(CompareConfig(), ["fedavg", "bayfl"], choices)
        assert len(found) == 8
        assert found[1].values == {"rate": 1e-3, "optimiser": "adam"}
        assert found[-1].name == "bayfl rate=0.01 optimiser=adam kl_weight=0.1"

    @pytest.mark.parametrize("text", ["rate", "rate=", "=1", "rate=,"])
    def test_mistakes_are_named(self, text: str) -> None:
        with pytest.raises(InputError, match="key=a,b,c is accepted"):
            tuning.read_choices([text])

    def test_an_option_that_nobody_has(self) -> None:
        with pytest.raises(InputError, match="fedavg has no option prox: `metabayfl methods fedavg` lists them"):
            tuning.candidates(CompareConfig(), ["fedavg"], {"prox": [1]})

    def test_d_n_must_be_held_out(self) -> None:
        with pytest.raises(InputError, match=r"select.held_out = false: .* true is accepted"):
            tuning.config_for(CompareConfig(select={"held_out": False}), [])


class TestChoice:
    def test_accuracy_decides_then_the_nll(self) -> None:
        first, second, third = (Candidate("fedavg", "fedavg", {"rate": rate}) for rate in (1, 2, 3))
        scores = [Score(first, 0.5, 0.1), Score(second, 0.6, 0.9), Score(third, 0.6, 0.8)]
        assert tuning.choose(scores)["fedavg"].candidate is third

    def test_personal_methods_are_judged_by_their_personal_models(self) -> None:
        row = {"G/D accuracy": 0.1, "G/D nll": 1.0, "P/D accuracy": 0.9, "P/D nll": 0.2}
        for name, wanted in {"fedavg": 0.1, "ditto": 0.9, "local": 0.9}.items():
            one = Candidate(name, name, {"rate": 1.0})
            assert tuning.score([one], [row | {"method": one.name}])[0].accuracy == wanted

    def test_a_run_that_failed_has_no_score(self) -> None:
        assert tuning.score([Candidate("fedavg", "fedavg", {})], []) == []


def test_a_comparison_takes_the_values_over() -> None:
    config = CompareConfig(methods={"fedavg": {"epochs": 3}})
    values = {"methods": {"fedavg": {"rate": 0.5, "epochs": 9}, "ditto": {"rate": 0.1}, "no such": {"rate": 0.2}}}
    found = compare.with_tuned(config, ["fedavg", "ditto"], values)
    assert compare.method_section(found, "fedavg") == {"name": "fedavg", "epochs": 3, "rate": 0.5}
    assert compare.method_section(found, "ditto") == {"name": "ditto", "rate": 0.1}
    assert list(compare.with_tuned(config, [], values).methods) == ["fedavg"]  # other tables were tuned for the rest


def test_on_the_command_line(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = ["tune", str(config), "--values", "rate=1e-5,1e-2", "--out", str(out), "--workers", "1"]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "fedavg rate=1e-05" in shown.out
    assert "G/G" not in shown.out
    assert read_values(out / "tuned.toml") == {"methods": {"fedavg": {"rate": 0.01}, "slow": {"rate": 0.01}}}
    assert main(command) == 0
    assert "4 of 4 runs are done already" in capsys.readouterr().err
    tuned = ["--tuned", str(out / "tuned.toml"), "--seeds", "0", "--workers", "1", "--out", str(tmp_path / "compared")]
    assert main(["compare", str(config), *tuned]) == 0


def test_nothing_to_tune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bare.toml"
    path.write_text("rounds = 1\n")
    assert main(["tune", str(path), "--values", "rate=1"]) == 2
    assert one_line(capsys.readouterr().err).startswith("metabayfl: nothing to tune: pass --methods a,b")
