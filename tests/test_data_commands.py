"""metabayfl data inspect and export, --data-dir, --verify: what is printed and written, and how it ends."""

import json
import sys
from pathlib import Path

import pytest

from layouts import write_cifar10, write_image
from metabayfl import cli
from metabayfl.experiment import is_finished

CONFIG = """
rounds = 2
method = {name = "fedavg", epochs = 1}
data = {name = "cifar10", clients = 2, partition = "iid"}
model = {name = "linear"}
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path.copy())
    monkeypatch.setenv("METABAYFL_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    monkeypatch.setattr("metabayfl.data.sources.source._told", set())
    (tmp_path / "c.toml").write_text(CONFIG)
    write_cifar10(tmp_path / "data")
    return tmp_path


def fails(capsys: pytest.CaptureFixture[str], arguments: list[str], *parts: str) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if "training images" not in line]
    assert len(lines) == 1, captured.err
    assert all(part in lines[0] for part in parts), lines[0]


def test_inspect(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    assert cli.main(["data", "inspect", "c.toml", "--data-dir", "data"]) == 0
    captured = capsys.readouterr()
    assert "cifar10, iid, 2 clients, seed 0" in captured.out
    assert (workplace / "runs" / "data-c" / "clients.png").exists()
    assert cli.main(["data", "inspect", "c.toml", "--out", "here", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["samples"] for row in found["clients"]] == [50, 50]
    assert len(found["clients"][0]["counts"]) == 10
    assert (workplace / "here" / "samples.svg").exists()


def test_the_flag_counts_more_than_the_variable(monkeypatch: pytest.MonkeyPatch, workplace: Path) -> None:
    monkeypatch.setenv("METABAYFL_DATA", str(workplace / "nowhere"))
    assert cli.main(["data", "export", "c.toml", "--data-dir", "data", "--out", "p.json"]) == 0


def test_an_exported_partition_is_used(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    assert cli.main(["data", "export", "c.toml", "--data-dir", "data", "--out", "p.json"]) == 0
    assert capsys.readouterr().out == "p.json: 100 of 100 training samples, 2 clients\n"
    values = json.loads((workplace / "p.json").read_text())
    values["clients"] = values["clients"][::-1]
    (workplace / "p.json").write_text(json.dumps(values))
    assert cli.main(["data", "export", "c.toml", "--set=data.partition_file=p.json", "--out", "q.json"]) == 0
    assert json.loads((workplace / "q.json").read_text())["clients"] == values["clients"]


def test_resume_remembers_the_folder(monkeypatch: pytest.MonkeyPatch, workplace: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("metabayfl.api.local.run", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        assert cli.main(["run", "c.toml", "--data-dir", "data", "--out", "run", "--workers=1"]) == 130
    assert not is_finished(workplace / "run")
    assert str(workplace) not in (workplace / "run" / "config.toml").read_text()
    monkeypatch.setenv("METABAYFL_DATA", "")
    assert cli.main(["resume", "run", "--workers=1"]) == 0
    assert is_finished(workplace / "run")


def test_resume_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("metabayfl.api.local.run", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        cli.main(["run", "c.toml", "--data-dir", "data", "--out", "run", "--workers=1"])
    capsys.readouterr()
    monkeypatch.setenv("METABAYFL_DATA", "")
    (workplace / "data").rename(workplace / "moved")
    fails(capsys, ["resume", "run", "--workers=1"], f"{workplace / 'data'} is not a folder", "--data-dir")
    assert cli.main(["resume", "run", "--workers=1", "--data-dir", "moved"]) == 0


def test_compare_tells_about_the_data_once(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    base = ["compare", "c.toml", "--methods=fedavg", "--seeds=0,1", "--workers=1", "--out=cmp"]
    fails(capsys, base, "--data-dir", "METABAYFL_DATA")
    assert cli.main([*base, "--data-dir=data"]) == 0
    assert caplog.text.count("100 of 50,000 training images") == 1
    assert cli.main([*base, "--data-dir=data", "--verify"]) == 0  # a check is no part of a run's identity
    assert "2 of 2 runs are done already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (["--data-dir=nowhere"], ["--data-dir nowhere", "no such folder"]),
        ([], ["data.name = 'cifar10'", "--data-dir DIR"]),
        (["--data-dir=."], ["cifar-10-batches-py/data_batch_1", "cifar-10-python.tar.gz"]),
        (["--data-dir=data", "--verify"], ["data.verify", "data_batch_1", "md5"]),
        (["--data-dir=data", "--set=data.name=imagenet"], ["unknown data.name", "tiny-imagenet"]),
        (["--data-dir=data", "--set=data.name=images", "--set=data.path=pets"], ["pets/dog/0.png is not an image"]),
        (["--data-dir=data", "--set=data.clients=500"], ["clients = 500", "100 samples"]),
        (
            ["--data-dir=data", "--set=data.partition=dirichlet", "--set=data.alpha=0.01", "--set=data.clients=9"],
            ["dirichlet", "min_size is 10", "raise alpha"],
        ),
        (["--data-dir=data", "--set=data.partition=step", "--set=data.clients=7"], ["step: 7 clients", "nearest"]),
        (["--data-dir=data", "--set=data.partition=by-column"], ["by-column", "client_column"]),
        (["--data-dir=data", "--set=data.labels=worse"], ["data.labels = 'worse'", "cifar-10n.npz"]),
        (["--data-dir=data", "--set=data.partition_file=p.json"], ["data.partition_file = 'p.json' is not there"]),
    ],
)
def test_bad_input_is_one_line(
    changes: list[str], parts: list[str], capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    write_image(workplace / "data" / "pets" / "cat" / "0.png")
    (workplace / "data" / "pets" / "dog").mkdir()
    (workplace / "data" / "pets" / "dog" / "0.png").write_text("woof")
    fails(capsys, ["data", "inspect", "c.toml", "--out=out", *changes], *parts)
    assert not (workplace / "out").exists()
