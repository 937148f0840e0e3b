"""What goes wrong at a client, in a worker, on the disk: named in one line, and nothing else is lost."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from federations import (
    Failing,
    Raising,
    Tripwire,
    bits,
    command,
    configured,
    contents,
    in_child,
    leftovers,
    log,
    network,
    one_line,
    spoiling,
    train,
)
from metabayfl.engine.client import Desk
from metabayfl.engine.local import Loop, TooFewUpdates
from metabayfl.engine.workers import WorkerError
from metabayfl.methods import FedAvg
from metabayfl.options import InputError
from metabayfl.store import CURRENT, EVENTS, Event, RunDirectory
from metabayfl.types import Context, Fit, Params, TrainData

SMALL: dict[str, Any] = {"rounds": 2, "clients": 2, "eval": {"every": 2, "samples": 1}}
NAN = float("nan")


def faults(events: list[Event], client: int) -> set[str]:
    return {event["fault"] for event in events if event["event"] == "client" and event["client"] == client}


def payload(change: Callable[[Params], Any]) -> Callable[[Fit], Fit]:
    return lambda fit: fit._replace(update=fit.update._replace(payload=change(dict(fit.update.payload))))


def update(**parts: Any) -> Callable[[Fit], Fit]:
    return lambda fit: fit._replace(update=fit.update._replace(**parts))


SPOILED: dict[str, tuple[Callable[[Fit], Any], str]] = {
    "nan": (payload(lambda p: p | {"mu": p["mu"] * NAN}), "mu has values that are NaN or infinite"),
    "infinite": (payload(lambda p: p | {"mu": p["mu"] / 0}), "mu has values that are NaN or infinite"),
    "huge": (payload(lambda p: p | {"mu": p["mu"] * 1e12}), "mu has root mean square"),
    "truncated": (payload(lambda p: p | {"mu": p["mu"][:-1]}), "mu has shape (62,), expected (63,)"),
    "renamed": (
        payload(lambda p: {"MU": p["mu"], "buffers": p["buffers"]}),
        "tensors missing: 'mu'; not expected: 'MU'",
    ),
    "double": (payload(lambda p: p | {"mu": p["mu"].double()}), "mu has type torch.float64, expected torch.float32"),
    "no tensor": (payload(lambda p: p | {"mu": p["mu"].tolist()}), "BadUpdate: 'mu' is a list, not a tensor"),
    "sparse": (payload(lambda p: p | {"mu": p["mu"].to_sparse()}), "BadUpdate: 'mu' is not a dense tensor with values"),
    "complex": (
        payload(lambda p: p | {"mu": p["mu"] * 1j}),
        "InputError: tensor 'mu' has type torch.complex64",
    ),
    "no mapping": (payload(list), "BadUpdate: payload is a list, not a mapping of tensors"),
    "weight": (update(weight=NAN), "BadUpdate: weight nan is not a finite number"),
    "no weight": (update(weight=None), "BadUpdate: weight None is not a finite number"),
    "zero weight": (update(weight=0), "BadUpdate: weight 0 is not in (0, inf]"),
    "great weight": (update(weight=1e10), "weight 10000000000.0 is not in (0, 1e+09]"),
    "metric": (
        update(metrics={"loss": torch.tensor(1.0)}),
        "BadUpdate: metric 'loss' is tensor(1.), not a finite number",
    ),
    "nan metric": (update(metrics={"loss": NAN}), "BadUpdate: metric 'loss' is nan, not a finite number"),
    "forged metric": (update(metrics={"fault": 0.0}), "BadUpdate: metric 'fault' has the name of something else"),
    "nothing": (lambda fit: None, "AttributeError: 'NoneType' object has no attribute 'update'"),
    "bad state": (lambda fit: fit._replace(state={"diary": "dear diary"}), "AttributeError: 'str' object"),
}


class TestClients:
    @pytest.fixture(scope="module")
    @staticmethod
    def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
        """The models of a run in which client 1 fails in every round."""
        path = tmp_path_factory.mktemp("without") / "run"
        events = train(path, Failing(epochs=1), rounds=2)
        assert faults(events, 1) == {"ArithmeticError: client one is tired"}
        assert faults(events, 0) == faults(events, 2) == {""}
        return bits(path)

    @pytest.mark.parametrize("name", SPOILED)
    def test_a_bad_update_is_refused_by_name_and_the_round_goes_on(
        self, without: dict[str, bytes], tmp_path: Path, name: str
    ) -> None:
        change, text = SPOILED[name]
        events = train(tmp_path / "run", spoiling(change), rounds=2)
        assert all(one_line(fault).startswith(text) for fault in faults(events, 1)), faults(events, 1)
        assert faults(events, 0) == faults(events, 2) == {""}
        assert bits(tmp_path / "run") == without

    def test_in_workers_too(self, without: dict[str, bytes], tmp_path: Path) -> None:
        for name in ("nan", "metric", "nothing"):
            change, text = SPOILED[name]
            events = train(tmp_path / name, spoiling(change), rounds=2, workers=2)
            assert all(fault.startswith(text) for fault in faults(events, 1))
            assert bits(tmp_path / name) == without

    def test_a_module_that_raises_costs_only_its_client(self, tmp_path: Path) -> None:
        events = train(tmp_path / "run", FedAvg(epochs=1), Raising(), rounds=2)
        assert faults(events, 1) == {"KeyError: 'no batches of four, please'"}
        assert faults(events, 0) == faults(events, 2) == {""}

    def test_a_failure_is_on_record_with_its_cost(self, tmp_path: Path) -> None:
        events = train(tmp_path / "run", Failing(epochs=1), rounds=1)
        event = next(e for e in events if e["event"] == "client" and e["client"] == 1)
        cost = {"seconds", "bytes_down", "forward_passes", "backward_passes"}
        assert event.keys() == {"event", "round", "client", "fault"} | cost

    @pytest.mark.parametrize("name", ["nan", "no tensor", "nothing"])
    def test_if_all_fail_there_is_an_error_and_no_model(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / "run"
        with pytest.raises(TooFewUpdates, match="round 1 has 0 good updates, 1 are needed") as caught:
            train(path, spoiling(SPOILED[name][0], clients=(0, 1, 2)), rounds=2)
        assert all(f"client {client}: " in one_line(caught.value) for client in range(3))
        assert not (path / "model.safetensors").exists()
        train(path, FedAvg(epochs=1), rounds=2)  # with a method that works the run goes on
        train(tmp_path / "well", FedAvg(epochs=1), rounds=2)
        assert bits(path) == bits(tmp_path / "well")

    def test_a_client_that_fails_once_keeps_what_it_had(self, tmp_path: Path) -> None:
        class Once(FedAvg):
            def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
                if (ctx.client, ctx.round) == (1, 1):
                    raise ValueError("not today")
                return super().fit(down, state, data, ctx)

        train(tmp_path / "run", Once(epochs=1), until=2)
        found = RunDirectory(tmp_path / "run").checkpoint()
        assert found is not None
        assert [int(found.latest[client].segment[:6]) for client in range(3)] == [2, 1, 2]
        assert RunDirectory(tmp_path / "run").read_client(found.latest[1]).personal is not None
        events = train(tmp_path / "run", Once(epochs=1))
        assert [e["fault"] for e in events if e["event"] == "client" and e["client"] == 1] == [
            "", "ValueError: not today", "",
        ]  # fmt: skip


class TestWorkers:
    def deadly(self, marker: Path, times: int) -> FedAvg:
        """A method whose client 1 kills its own process in the second round, so many times."""

        class Deadly(FedAvg):
            def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
                deaths = len(marker.read_text()) if marker.exists() else 0
                if (ctx.client, ctx.round) == (1, 1) and deaths < times:
                    marker.write_text("x" * (deaths + 1))
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().fit(down, state, data, ctx)

        return Deadly(epochs=1)

    def test_a_killed_worker_is_named_and_its_client_tried_again(self, tmp_path: Path) -> None:
        events = train(tmp_path / "run", self.deadly(tmp_path / "marker", 1), workers=2)
        train(tmp_path / "whole", FedAvg(epochs=1))
        deaths = [event for event in events if event["event"] == "worker"]
        assert [(event["round"], event["client"]) for event in deaths] == [(2, 1)]
        assert one_line(deaths[0]["fault"]).endswith("died (SIGKILL) during fit of client 1; done again")
        assert bits(tmp_path / "run") == bits(tmp_path / "whole")
        assert log(tmp_path / "run") == log(tmp_path / "whole")
        assert leftovers(tmp_path / "run") == []

    def test_the_second_death_ends_the_run_which_can_go_on(self, tmp_path: Path) -> None:
        method = self.deadly(tmp_path / "marker", 2)
        with pytest.raises(
            WorkerError, match=r"died \(SIGKILL\) during fit of client 1, for the second time$"
        ) as caught:
            train(tmp_path / "run", method, workers=2)
        one_line(caught.value)
        train(tmp_path / "run", method, workers=2)
        train(tmp_path / "whole", FedAvg(epochs=1))
        assert bits(tmp_path / "run") == bits(tmp_path / "whole")

    def test_a_worker_that_exits_is_named_too(self, tmp_path: Path) -> None:
        class Exiting(FedAvg):
            def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
                os._exit(3)

        with pytest.raises(WorkerError, match=r"died \(exit code 3\) during fit of client"):
            train(tmp_path / "run", Exiting(epochs=1), workers=2)


class TestDamage:
    def interrupted(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A run that ended in its second round when all clients had trained."""
        aggregate = Loop._aggregate

        def stop(loop: Loop, before: Any, clients: list[int]) -> Params:
            if before.round == 1:
                raise KeyboardInterrupt
            return aggregate(loop, before, clients)

        with monkeypatch.context() as patch:
            patch.setattr(Loop, "_aggregate", stop)
            with pytest.raises(KeyboardInterrupt):
                train(path)

    def fitted(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        """Watch who trains."""
        seen: list[tuple[int, int]] = []
        fit = Desk.fit

        def watched(desk: Desk, client: int, round_: int) -> Any:
            seen.append((round_, client))
            return fit(desk, client, round_)

        monkeypatch.setattr(Desk, "fit", watched)
        return seen

    def test_whole_records_of_the_round_in_progress_are_used_and_damaged_ones_redone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        train(tmp_path / "whole")
        for number, damage in enumerate((lambda c: c, lambda c: c[:-7], lambda c: c[:20], lambda c: b"", flip)):
            path = tmp_path / str(number)
            self.interrupted(path, monkeypatch)
            (segment,) = (path / "clients").glob("000002-*")
            segment.write_bytes(damage(segment.read_bytes()))
            whole = RunDirectory(path).spooled(2).keys()
            assert len(whole) == (3, 2, 0, 0, 2)[number]
            with monkeypatch.context() as patch:
                seen = self.fitted(patch)
                train(path)
            assert {client for round_, client in seen if round_ == 1} == {0, 1, 2} - whole
            assert bits(path) == bits(tmp_path / "whole")
            assert log(path) == log(tmp_path / "whole")

    @pytest.mark.parametrize("workers", [1, 2])
    def test_a_lost_record_of_a_published_round_is_named(self, tmp_path: Path, workers: int) -> None:
        path = tmp_path / "run"
        train(path, until=2)
        (record,) = (path / "clients").glob("000002-*")
        content = record.read_bytes()
        before = contents(path)
        for damaged, text in ((None, "is missing"), (content[:-1], "is damaged"), (flip(content), "is damaged")):
            record.unlink(missing_ok=True)
            if damaged is not None:
                record.write_bytes(damaged)
            with pytest.raises(InputError, match=text) as caught:
                train(path, workers=workers)
            assert str(record) in one_line(caught.value)
            after = contents(path)
            assert all(after[name] == before[name] for name in before if name != str(record))
        record.write_bytes(content)
        train(path)
        train(tmp_path / "whole")
        assert bits(path) == bits(tmp_path / "whole")

    @pytest.mark.parametrize("name", [CURRENT, EVENTS])
    def test_a_damaged_state_is_refused_and_nothing_touched(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / "run"
        train(path, until=2)
        content = (path / name).read_bytes()
        for damaged in (
            content[: len(content) // 2],
            content[:-3],
            b"",
            flip(content) if name == CURRENT else b"x" + content,
        ):
            (path / name).write_bytes(damaged)
            before = contents(path)
            with pytest.raises(InputError, match="is damaged") as caught:
                train(path)
            assert str(path / name) in one_line(caught.value)
            assert contents(path) == before
        (path / name).write_bytes(content)
        train(path)
        train(tmp_path / "whole")
        assert bits(path) == bits(tmp_path / "whole")


def flip(content: bytes) -> bytes:
    """One bit changed, in the middle of the tensors."""
    changed = bytearray(content)
    changed[-len(content) // 4] ^= 16
    return bytes(changed)


class TestDisk:
    def full_at(self, path: Path, step: int) -> bool:
        """Whether a run fails, in one line, when the disk is full at a step; then it goes on, in the same process."""
        full = False

        def fail() -> None:
            nonlocal full
            full = True
            raise OSError(errno.ENOSPC, "No space left on device")

        Tripwire(path, step, fail)
        with suppress_naming(OSError, "No space left on device"):
            train(path, **SMALL)
        train(path, **SMALL)
        return full

    def everywhere(self, tmp_path: Path, first: int, stride: int) -> int:
        train(tmp_path / "whole", **SMALL)
        step = first
        while in_child(lambda step=step: sys.exit(3 if self.full_at(tmp_path / str(step), step) else 0)) == 3:
            assert bits(tmp_path / str(step)) == bits(tmp_path / "whole"), f"full at step {step}"
            assert log(tmp_path / str(step)) == log(tmp_path / "whole")
            assert leftovers(tmp_path / str(step)) == []
            step += stride
        assert bits(tmp_path / str(step)) == bits(tmp_path / "whole")
        return step

    def test_an_error_at_some_steps(self, tmp_path: Path) -> None:
        """Opening, renaming or removing fails once: one line, and the run goes on as if nothing had been."""
        assert self.everywhere(tmp_path, 2, 9) > 30

    @pytest.mark.slow
    def test_an_error_at_any_step(self, tmp_path: Path) -> None:
        assert self.everywhere(tmp_path, 1, 1) > 30

    @pytest.mark.parametrize("workers", [1, 2])
    def test_a_disk_that_is_really_full(self, small_disk: Path, tmp_path: Path, workers: int) -> None:
        train(tmp_path / "whole", module=wide(), rounds=2)
        failures = []
        for free_kilobytes in (0, 12, 60, 130, 250):
            path, filler = small_disk / "run", small_disk / "filler"
            fill(filler, free_kilobytes)
            try:
                train(path, module=wide(), rounds=2, workers=workers)
            except (OSError, WorkerError) as error:
                failures.append(one_line(error))
                assert str(path) in failures[-1]
            filler.unlink()
            train(path, module=wide(), rounds=2)
            assert bits(path) == bits(tmp_path / "whole")
            assert leftovers(path) == []
            subprocess.run(["rm", "-r", path], check=True)  # noqa: S603, S607
        assert len(failures) >= 3
        assert all("No space left on device" in failure for failure in failures)

    def test_on_the_command_line(self, small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        config, run, filler = str(configured(tmp_path, 3)), small_disk / "run", small_disk / "filler"
        assert command(["run", config, "--out", str(tmp_path / "whole"), "--workers", "1"]) == 0
        fill(filler, 12)
        capsys.readouterr()
        assert command(["run", config, "--out", str(run), "--workers", "1"]) == 1
        said = one_line(capsys.readouterr().err.strip())
        assert "No space left on device" in said
        assert said.endswith(f"; go on with: metabayfl resume {run}")
        assert command(["resume", str(run), "--workers", "2"]) == 1
        one_line(capsys.readouterr().err.strip())
        filler.unlink()
        assert command(["resume", str(run), "--workers", "2"]) == 0
        assert bits(run) == bits(tmp_path / "whole")
        (run / "model.safetensors").unlink()
        (run / CURRENT).write_bytes(flip((run / CURRENT).read_bytes()))
        capsys.readouterr()
        assert command(["resume", str(run), "--workers", "1"]) == 2
        assert f"{run / CURRENT} is damaged" in one_line(capsys.readouterr().err.strip())

    def test_a_directory_that_cannot_be_written(self, small_disk: Path, tmp_path: Path) -> None:
        path = small_disk / "run"
        train(path, until=2)
        before = contents(path)
        remount(small_disk, "ro")
        with pytest.raises(OSError, match="Read-only file system") as caught:
            train(path)
        assert str(path) in one_line(caught.value)
        with pytest.raises(OSError, match="Read-only file system"):
            train(small_disk / "new")
        assert contents(path) == before
        remount(small_disk, "rw")
        train(path)
        train(tmp_path / "whole")
        assert bits(path) == bits(tmp_path / "whole")


@contextmanager
def suppress_naming(kind: type[Exception], text: str) -> Iterator[None]:
    """Let one kind of error pass, if it says so in one line."""
    try:
        yield
    except kind as error:
        if text not in one_line(error):
            raise


def wide() -> torch.nn.Module:
    """A network whose files, of 40 kB, fill a small disk."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 700), torch.nn.ReLU(), torch.nn.Linear(700, 3))


def fill(filler: Path, free_kilobytes: int) -> None:
    """Leave so much space on a disk."""
    state = os.statvfs(filler.parent)
    filler.write_bytes(b"\0" * (state.f_bavail * state.f_frsize - 1024 * free_kilobytes))


def remount(disk: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", disk], check=True)  # noqa: S603, S607


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes, where that is permitted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(  # noqa: S603
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk],  # noqa: S607
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)  # noqa: S603, S607


def test_dropout_of_the_shared_network_is_on() -> None:
    """The bits above depend on it."""
    assert any(isinstance(layer, torch.nn.Dropout) and layer.p > 0 for layer in network())
