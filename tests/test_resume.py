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
from federations import (
    Tripwire,
    bits,
    command,
    configured,
    contents,
    federate,
    in_child,
    killed_after,
    leftovers,
    log,
    one_line,
    train,
)
from metabayfl.options import InputError
from metabayfl.store import CURRENT, RunDirectory

SMALL: dict[str, Any] = {"rounds": 2, "clients": 2, "eval": {"every": 2, "samples": 1}}
SLICES = 8
PATIENCE = 120
"""Seconds after which what has not happened will not, however slow the machine is."""


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
        process = launch(tmp_path, ["run", str(configured(tmp_path, 10**6)), "--out", str(run), "--workers", "2"])
        try:
            wait_for(lambda: published(run) > 0, process)
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=PATIENCE)
        finally:
            end(process)
        assert process.returncode == 130
        assert one_line(errors.strip()) == f"metabayfl: interrupted; go on with: metabayfl resume {run}"
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
        assert published(run) > 0

    @pytest.mark.slow
    def test_ctrl_c_ends_a_comparison(self, tmp_path: Path) -> None:
        """Runs that have not begun do not begin."""
        out, chosen = tmp_path / "out", ["--methods", "fedavg", "--seeds", "0-9", "--workers", "2"]
        process = launch(tmp_path, ["compare", str(configured(tmp_path, 10**6)), *chosen, "--out", str(out)])
        try:
            wait_for(lambda: any(out.rglob(CURRENT)), process)
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=PATIENCE)
        finally:
            end(process)
        assert process.returncode == 130
        assert errors.splitlines()[-1] == "metabayfl: interrupted"
        assert 0 < len(list(out.rglob("run.json"))) < 10

    @pytest.mark.slow
    def test_kill_on_the_command_line(self, tmp_path: Path) -> None:
        """No worker outlives a killed main process, and `metabayfl resume` ends with the bits of a run left alone."""
        config, run, whole = configured(tmp_path, 12), tmp_path / "run", tmp_path / "whole"
        process = launch(tmp_path, ["run", str(config), "--out", str(run), "--workers", "2"])
        try:
            wait_for((run / CURRENT).exists, process)
            os.kill(process.pid, signal.SIGKILL)
            process.communicate(timeout=PATIENCE)
            wait_for(lambda: not alive(process.pid), None)
        finally:
            end(process)
        assert command(["resume", str(run), "--workers", "2"]) == 0
        assert command(["run", str(config), "--out", str(whole), "--workers", "1"]) == 0
        assert bits(run) == bits(whole)


class TestResume:
    def test_without_a_checkpoint_it_starts_at_the_beginning(self, tmp_path: Path) -> None:
        config, run, whole = configured(tmp_path, 2), tmp_path / "run", tmp_path / "whole"
        assert command(["run", str(config), "--out", str(whole), "--workers", "1"]) == 0
        for count in range(1, 4):
            (run / "clients").mkdir(parents=True)
            for name in ["lock", "config.toml", "env.json", "run.json"][: count + 1]:
                (run / name).write_bytes((whole / name).read_bytes())
            (run / ".run.json.4711").write_text("{")
            assert command(["resume", str(run), "--workers", "1"]) == 0
            assert bits(run) == bits(whole)
            run.rename(tmp_path / f"done-{count}")

    def test_a_finished_run_says_so(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = tmp_path / "run"
        assert command(["run", str(configured(tmp_path, 2)), "--out", str(run), "--workers", "1"]) == 0
        before = contents(run)
        capsys.readouterr()
        assert command(["resume", str(run)]) == 0
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

    def test_a_run_in_use_is_refused_in_one_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = tmp_path / "run"
        assert command(["run", str(configured(tmp_path, 1)), "--out", str(run), "--workers", "1"]) == 0
        (run / "model.safetensors").unlink()
        holder = RunDirectory(run)
        holder.lock()
        capsys.readouterr()
        assert in_child(lambda: sys.exit(command(["resume", str(run), "--workers", "1"]))) == 2
        holder.unlock()
        assert command(["resume", str(run), "--workers", "1"]) == 0

    def test_another_format_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = tmp_path / "run"
        assert command(["run", str(configured(tmp_path, 1)), "--out", str(run), "--workers", "1"]) == 0
        text = (run / "run.json").read_text().replace('"format": 1', '"format": 7')
        (run / "run.json").write_text(text)
        before = contents(run)
        capsys.readouterr()
        assert command(["resume", str(run), "--workers", "1"]) == 2
        assert "has format version 7; this metabayfl knows version 1" in one_line(capsys.readouterr().err.strip())
        assert contents(run) == before


def launch(where: Path, arguments: list[str]) -> "subprocess.Popen[str]":
    """Start the command line in a process group of its own."""
    start = "import sys; from metabayfl.cli import main; sys.exit(main())"
    return subprocess.Popen(  # noqa: S603 (our own interpreter and arguments)
        [sys.executable, "-c", start, *arguments],
        cwd=where,
        env=os.environ | {"PYTHONPATH": str(Path(metabayfl.__file__).parents[1])},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[str] | None") -> None:
    """Wait for something that will happen, within our patience."""
    for _ in range(100 * PATIENCE):
        if condition():
            return
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise TimeoutError


def published(run: Path) -> int:
    """The last round that a run has published; -1 before the first state."""
    found = RunDirectory(run).checkpoint()
    return -1 if found is None else found.round


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def end(process: "subprocess.Popen[str]") -> None:
    """Leave no process behind, whatever a test has found."""
    if alive(process.pid):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
