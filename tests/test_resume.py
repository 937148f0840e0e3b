"""Kill it whenever you like: what goes on afterwards ends with the same bits."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import metabayfl
from federations import Tripwire, bits, federate, in_child, killed_after, leftovers, log, one_line, train
from metabayfl.cli import main
from metabayfl.options import InputError
from metabayfl.store import CURRENT, EVENTS, RunDirectory

CONFIG = """
rounds = {rounds}
[method]
name = "bayfl"
epochs = 1
[data]
clients = 3
fraction = 0.1
[model]
hidden = [4]
[eval]
every = {rounds}
samples = 2
"""
SMALL: dict[str, Any] = {"rounds": 2, "clients": 2, "eval": {"every": 2, "samples": 1}}
SLICES = 8


def crash_everywhere(tmp_path: Path, steps: Callable[[int], bool], workers: int = 1) -> int:
    """Die at chosen steps that a run takes on its files, one run for each, and go on; returns how many there are."""
    train(tmp_path / "whole", **SMALL)
    step = 0
    while True:
        step += 1
        if not steps(step):
            continue
        path = tmp_path / str(step)

        def die(path: Path = path, step: int = step) -> None:
            Tripwire(path, step, lambda: os._exit(9))
            train(path, workers=workers, **SMALL)

        code = in_child(die)
        if code == 0:
            return step
        assert code == 9
        train(path, **SMALL)
        assert bits(path) == bits(tmp_path / "whole"), f"killed before step {step}"
        assert log(path) == log(tmp_path / "whole")
        assert leftovers(path) == []


class TestCrash:
    def test_before_some_steps_on_the_files(self, tmp_path: Path) -> None:
        """One slice of all steps; the slow test takes the others."""
        assert crash_everywhere(tmp_path, lambda step: step % SLICES == 1) > 30

    @pytest.mark.slow
    def test_before_any_step_on_the_files(self, tmp_path: Path) -> None:
        assert crash_everywhere(tmp_path, lambda step: step % SLICES != 1) > 30

    @pytest.mark.slow
    def test_twenty_kills_at_random_moments(self, tmp_path: Path) -> None:
        """Kill -9 of the main process of two workers; what it was doing depends on the machine, the result does not."""
        started = time.perf_counter()
        federate(tmp_path / "whole", workers=2)
        duration = time.perf_counter() - started
        expected, killed = bits(tmp_path / "whole"), 0
        for trial in range(20):
            path, rng = tmp_path / str(trial), random.Random(trial)  # noqa: S311
            for _ in range(rng.randint(1, 2)):
                killed += killed_after(rng.uniform(0, duration), partial(federate, path, workers=2))
            federate(path, workers=rng.randint(1, 2))
            assert bits(path) == expected, f"trial {trial}"
            assert log(path) == log(tmp_path / "whole")
            assert leftovers(path) == []
        assert killed


class TestInterrupt:
    def test_an_interrupt_keeps_what_is_published(self, tmp_path: Path) -> None:
        from federations import federation, network, plan
        from metabayfl.api import run_job
        from metabayfl.methods import BayFL

        def interrupt(event: dict[str, Any]) -> None:
            if event["event"] == "round" and event["round"] == 2:
                raise KeyboardInterrupt

        path = tmp_path / "run"
        with pytest.raises(KeyboardInterrupt):
            run_job(network(), federation(), BayFL(epochs=1), plan(), out=path, workers=2, observe=interrupt)
        assert multiprocessing.active_children() == []
        found = RunDirectory(path).checkpoint()
        assert found is not None
        assert found.round == 2
        assert in_child(RunDirectory(path).lock) == 0
        federate(path)
        federate(tmp_path / "whole")
        assert bits(path) == bits(tmp_path / "whole")

    @pytest.mark.slow
    def test_ctrl_c_on_the_command_line(self, tmp_path: Path) -> None:
        """The whole group gets the signal, as in a terminal; the run is too long to end by itself."""
        run = tmp_path / "run"
        command = launch(tmp_path, ["run", str(configured(tmp_path, 10**6)), "--out", str(run), "--workers", "2"])
        try:
            wait_for(lambda: (run / EVENTS).exists() and b'"round"' in (run / EVENTS).read_bytes(), command)
            os.killpg(command.pid, signal.SIGINT)
            _, errors = command.communicate(timeout=60)
        finally:
            end(command)
        assert command.returncode == 130
        assert one_line(errors.strip()) == f"metabayfl: interrupted; go on with: metabayfl resume {run}"
        with pytest.raises(ProcessLookupError):
            os.killpg(command.pid, 0)
        found = RunDirectory(run).checkpoint()
        assert found is not None
        assert found.round > 0

    @pytest.mark.slow
    def test_kill_on_the_command_line(self, tmp_path: Path, quiet: None) -> None:
        """No worker outlives a killed main process, and `metabayfl resume` ends with the bits of a run left alone."""
        config, run, whole = configured(tmp_path, 60), tmp_path / "run", tmp_path / "whole"
        command = launch(tmp_path, ["run", str(config), "--out", str(run), "--workers", "2"])
        try:
            wait_for((run / CURRENT).exists, command)
            os.kill(command.pid, signal.SIGKILL)
            command.communicate(timeout=60)
            wait_for(lambda: not alive(command.pid), None)
        finally:
            end(command)
        assert main(["resume", str(run), "--workers", "2"]) == 0
        assert main(["run", str(config), "--out", str(whole), "--workers", "1"]) == 0
        assert bits(run) == bits(whole)


class TestResume:
    def test_without_a_checkpoint_it_starts_at_the_beginning(self, tmp_path: Path, quiet: None) -> None:
        config, run, whole = configured(tmp_path, 2), tmp_path / "run", tmp_path / "whole"
        assert main(["run", str(config), "--out", str(whole), "--workers", "1"]) == 0
        for count in range(1, 4):
            (run / "clients").mkdir(parents=True)
            for name in ["lock", "config.toml", "env.json", "run.json"][: count + 1]:
                (run / name).write_bytes((whole / name).read_bytes())
            (run / ".run.json.4711").write_text("{")
            assert main(["resume", str(run), "--workers", "1"]) == 0
            assert bits(run) == bits(whole)
            run.rename(tmp_path / f"done-{count}")

    def test_a_finished_run_says_so(self, tmp_path: Path, quiet: None, capsys: pytest.CaptureFixture[str]) -> None:
        run = tmp_path / "run"
        assert main(["run", str(configured(tmp_path, 2)), "--out", str(run), "--workers", "1"]) == 0
        before = contents(run)
        capsys.readouterr()
        assert main(["resume", str(run)]) == 0
        assert one_line(capsys.readouterr().err.strip()) == f"metabayfl: {run} is finished"
        assert contents(run) == before

    def test_models_that_were_not_exported_are_exported(self, tmp_path: Path) -> None:
        train(tmp_path / "run")
        before = bits(tmp_path / "run")
        (tmp_path / "run" / "model.safetensors").unlink()
        (tmp_path / "run" / "personal" / "000001.safetensors").unlink()
        train(tmp_path / "run")
        assert bits(tmp_path / "run") == before

    def test_a_lost_checkpoint_is_not_taken_for_a_new_run(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        train(path, until=2)
        checkpoint = (path / CURRENT).read_bytes()
        (path / CURRENT).unlink()
        before = contents(path)
        with pytest.raises(InputError, match="has lost its checkpoint: put it back, or start in a new directory"):
            train(path)
        assert contents(path) == before
        (path / CURRENT).write_bytes(checkpoint)
        train(path)
        train(tmp_path / "whole")
        assert bits(path) == bits(tmp_path / "whole")

    def test_a_run_in_use_is_refused_in_one_line(
        self, tmp_path: Path, quiet: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = tmp_path / "run"
        assert main(["run", str(configured(tmp_path, 1)), "--out", str(run), "--workers", "1"]) == 0
        (run / "model.safetensors").unlink()
        holder = RunDirectory(run)
        holder.lock()
        capsys.readouterr()
        assert in_child(lambda: sys.exit(main(["resume", str(run), "--workers", "1"]))) == 2
        holder.unlock()
        assert main(["resume", str(run), "--workers", "1"]) == 0

    def test_another_format_is_refused(self, tmp_path: Path, quiet: None, capsys: pytest.CaptureFixture[str]) -> None:
        run = tmp_path / "run"
        assert main(["run", str(configured(tmp_path, 1)), "--out", str(run), "--workers", "1"]) == 0
        text = (run / "run.json").read_text().replace('"format": 1', '"format": 7')
        (run / "run.json").write_text(text)
        before = contents(run)
        capsys.readouterr()
        assert main(["resume", str(run), "--workers", "1"]) == 2
        assert "has format version 7; this metabayfl knows version 1" in one_line(capsys.readouterr().err.strip())
        assert contents(run) == before


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what `main` changes: the import path of its process."""
    monkeypatch.setattr(sys, "path", sys.path.copy())


def configured(tmp_path: Path, rounds: int) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(rounds=rounds))
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "lock"}


def launch(where: Path, arguments: list[str]) -> "subprocess.Popen[str]":
    """Start the command line in a process group of its own."""
    start = "import sys; from metabayfl.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", start, *arguments]
    return subprocess.Popen(  # noqa: S603 (our own interpreter and arguments)
        command,
        cwd=where,
        env=os.environ | {"PYTHONPATH": str(Path(metabayfl.__file__).parents[1])},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait_for(condition: Callable[[], bool], command: "subprocess.Popen[str] | None") -> None:
    """Wait for something that will happen, however slow the machine is; two minutes mean that it will not."""
    for _ in range(12_000):
        if condition():
            return
        assert command is None or command.poll() is None, command.communicate()
        time.sleep(0.01)
    raise TimeoutError


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def end(command: "subprocess.Popen[str]") -> None:
    """Leave no process behind, whatever a test has found."""
    if alive(command.pid):
        os.killpg(command.pid, signal.SIGKILL)
    command.communicate()
