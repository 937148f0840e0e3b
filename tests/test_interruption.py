"""Ctrl-C ends a command with exit code 130, also where Python or a library loses the exception."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from federations import command, configured
from metabayfl import cli
from metabayfl.interruption import CtrlC
from metabayfl.progress import ProgressBar
from metabayfl.store import RunDirectory


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Finalised:
    """Gets the signal where Python ignores what is raised."""

    def __del__(self) -> None:
        press()


def swallow() -> None:
    try:
        press()
    except KeyboardInterrupt:
        return


def spoil() -> None:
    try:
        press()
    except KeyboardInterrupt as error:
        raise ImportError("half imported") from error


def test_one_that_is_lost_in_a_finaliser_ends_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)

    def interrupt(bar: ProgressBar, event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 2:
            Finalised()

    monkeypatch.setattr(ProgressBar, "__call__", interrupt)
    run = tmp_path / "run"
    assert command(["run", str(configured(tmp_path, 10)), "--out", str(run), "--workers", "1"]) == 130
    assert len(lost) == 1
    assert capsys.readouterr().err == f"metabayfl: interrupted; go on with: metabayfl resume {run}\n"
    found = RunDirectory(run).checkpoint()
    assert found is not None
    assert found.round == 2


@pytest.mark.parametrize("happening", [press, swallow, spoil])
def test_while_a_command_is_imported(
    happening: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def handler(name: str) -> cli.Handler:
        happening()
        return lambda options: 0

    with monkeypatch.context() as patch:
        patch.setattr(cli, "_handler", handler)
        assert command(["methods"]) == 130
    assert capsys.readouterr().err == "metabayfl: interrupted\n"
    assert command(["methods"]) == 0


class TestHandler:
    def test_is_put_back(self) -> None:
        before = signal.getsignal(signal.SIGINT)
        with CtrlC().noted():
            assert signal.getsignal(signal.SIGINT) is not before
        assert signal.getsignal(signal.SIGINT) is before

    def test_a_second_time_is_raised_too(self) -> None:
        ctrl_c = CtrlC()
        with ctrl_c.noted():
            for _ in range(2):
                with pytest.raises(KeyboardInterrupt):
                    press()
            with pytest.raises(KeyboardInterrupt):
                ctrl_c.heed()

    def test_who_ignores_the_signal_goes_on_to_do_so(self) -> None:
        """As behind `nohup`, or in the background of a script."""
        before, ctrl_c = signal.signal(signal.SIGINT, signal.SIG_IGN), CtrlC()
        try:
            with ctrl_c.noted():
                press()
            ctrl_c.heed()
        finally:
            signal.signal(signal.SIGINT, before)

    def test_in_another_thread_nothing_is_changed(self) -> None:
        found: list[Any] = []

        def look() -> None:
            with CtrlC().noted():
                found.append(signal.getsignal(signal.SIGINT))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert found == [signal.default_int_handler]
