"""The run directory: created, locked, written whole, read with suspicion."""

import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from federations import bits, in_child, leftovers, log, one_line, train
from metabayfl import tensorfile
from metabayfl.options import InputError
from metabayfl.records import encode_client
from metabayfl.spool import Address, Spool
from metabayfl.store import CURRENT, EVENTS, STAGED, Checkpoint, RunDirectory
from metabayfl.types import Fit, Update

SERVER = {"mu": torch.arange(3.0), "buffers": torch.zeros(0)}
LATEST = {0: Address("000001-7", 0), 2: Address("000001-9", 512), 5: Address("000001-7", 300)}


def made(path: Path) -> RunDirectory:
    directory = RunDirectory(path)
    directory.create({"rounds": 2}, {"seed": 0}, {})
    return directory


def checkpoint(round_: int = 1) -> Checkpoint:
    return Checkpoint(round_, SERVER, LATEST)


def lines(round_: int) -> list[dict[str, Any]]:
    return [
        {"event": "client", "round": round_, "client": 0, "fault": ""},
        {"event": "round", "round": round_, "updates": 1, "metrics": {}},
    ]


@pytest.fixture
def directory(tmp_path: Path) -> Any:
    found = made(tmp_path / "run")
    yield found
    found.unlock()


class TestCreate:
    def test_an_empty_or_missing_directory_is_fine(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        for name in ("empty", "deep/er"):
            made(tmp_path / name).unlock()
            assert RunDirectory(tmp_path / name).description() == {"format": 1, "rounds": 2}
            assert RunDirectory(tmp_path / name).environment() == {"seed": 0}

    def test_what_is_there_is_not_touched(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("mine")
        with pytest.raises(InputError, match="is not empty: choose another directory"):
            made(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
        with pytest.raises(InputError, match="is not empty"):
            made(tmp_path / "thesis.txt")
        made(tmp_path / "run").unlock()
        with pytest.raises(InputError, match="is not empty"):
            made(tmp_path / "run")

    def test_a_start_that_was_killed_can_be_repeated(self, tmp_path: Path) -> None:
        """Whatever the first start wrote before its run.json is not taken over by the second."""
        first = RunDirectory(tmp_path)
        first.create({"rounds": 2}, {}, {"frozen": torch.ones(1)}, config="rounds = 2")
        first.unlock()
        (tmp_path / "run.json").rename(tmp_path / ".run.json.4711")
        assert first.read_constants()
        made(tmp_path).unlock()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["clients", "env.json", "lock", "run.json"]
        assert RunDirectory(tmp_path).read_constants() == {}


class TestDescription:
    @pytest.mark.parametrize("version", [0, 2, "1", None])
    def test_other_formats_are_refused(self, directory: RunDirectory, version: object) -> None:
        directory.write_json("run.json", {"format": version})
        with pytest.raises(InputError, match=f"has format version {version!r}; this metabayfl knows version 1"):
            directory.description()

    @pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"3", b"\xff\xfe", b'{"format": 1'])
    def test_damage_is_told_in_one_line(self, directory: RunDirectory, content: bytes) -> None:
        (directory.path / "run.json").write_bytes(content)
        with pytest.raises(InputError, match=r"run\.json is damaged") as caught:
            directory.description()
        one_line(caught.value)

    def test_another_directory_is_no_run(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"is not a run directory: it has no run\.json"):
            RunDirectory(tmp_path).description()


class TestLock:
    def test_a_second_process_is_refused_by_the_number_of_the_first(self, directory: RunDirectory) -> None:
        def second() -> None:
            with pytest.raises(InputError, match=f"is in use by process {os.getppid()}$"):
                RunDirectory(directory.path).lock()
            assert (directory.path / "lock").read_text() == str(os.getppid())

        assert in_child(second) == 0
        directory.unlock()
        directory.unlock()
        assert in_child(RunDirectory(directory.path).lock) == 0

    def test_a_refused_lock_does_not_close_what_is_not_its_own(self, directory: RunDirectory) -> None:
        def second() -> None:
            refused = RunDirectory(directory.path)
            with pytest.raises(InputError):
                refused.lock()
            other = os.open(directory.path / "run.json", os.O_RDONLY)
            refused.unlock()
            assert os.read(other, 1) == b"{"

        assert in_child(second) == 0

    def test_a_killed_process_frees_it(self, tmp_path: Path) -> None:
        ours, theirs = multiprocessing.Pipe()

        def hold() -> None:
            made(tmp_path / "run")
            theirs.send("locked")
            signal.pause()

        process = multiprocessing.get_context("fork").Process(target=hold)
        process.start()
        assert ours.poll(60)
        with pytest.raises(InputError, match=f"is in use by process {process.pid}$"):
            RunDirectory(tmp_path / "run").lock()
        process.kill()
        process.join()
        free = RunDirectory(tmp_path / "run")
        free.lock()
        assert (tmp_path / "run" / "lock").read_text() == str(os.getpid())
        free.unlock()

    def test_it_clears_up_after_a_killed_process(self, directory: RunDirectory) -> None:
        directory.unlock()
        (directory.path / "personal").mkdir()
        for name in (
            ".staged.safetensors.12",
            "clients/.checkpoint.safetensors.7",
            "personal/.000000.safetensors.99",
        ):
            (directory.path / name).write_bytes(b"half a fi")
        (directory.path / ".notes").write_text("mine")
        directory.lock()
        assert [path.name for path in directory.path.rglob(".*")] == [".notes"]


class TestClients:
    def fit(self) -> Fit:
        mu, own = torch.arange(4.0), torch.ones(2)
        update = Update({"mu": mu, "n": torch.tensor(3)}, 5.0, {"nll": 0.25})
        return Fit(update, {"mu": mu, "own": own, "view": mu[1:3]}, {"mu": own, "again": own})

    def test_a_record_comes_back(self, directory: RunDirectory) -> None:
        """Parts may share tensors and memory with each other, in any way."""
        fit = self.fit()
        address = directory.write_client(2, encode_client(1, fit, {"seconds": 0.5}, keep_personal=True))
        record = directory.read_client(address)
        assert record.client == 1
        assert (record.weight, record.metrics, record.cost["seconds"]) == (5.0, {"nll": 0.25}, 0.5)
        for found, expected in (
            (record.payload, fit.update.payload),
            (record.state, fit.state),
            (record.personal, fit.personal),
        ):
            assert found is not None
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)

    def test_what_is_sent_and_kept_is_stored_once_and_counted_alone(self, directory: RunDirectory) -> None:
        payload = {"mu": torch.zeros(1000)}
        plain = encode_client(0, Fit(Update(payload, 1.0, {}), {}, {}), {}, keep_personal=True)
        kept = encode_client(0, Fit(Update(payload, 1.0, {}), dict(payload), dict(payload)), {}, keep_personal=True)
        assert len(kept) < len(plain) + 100
        address = directory.write_client(1, kept)
        sent = tensorfile.encode(payload, {"weight": 1.0, "metrics": {}})
        assert directory.read_client(address).cost["bytes_up"] == len(sent)

    def test_a_personal_model_may_be_left_out(self, directory: RunDirectory) -> None:
        address = directory.write_client(1, encode_client(0, self.fit(), {}, keep_personal=False))
        assert directory.read_client(address).personal is None
        assert directory.read_client(address).state.keys() == {"mu", "own", "view"}

    def test_only_records_that_will_be_read_are_kept(self, directory: RunDirectory) -> None:
        found = {
            (client, round_): directory.write_client(round_, encode_client(client, self.fit(), {}, keep_personal=False))
            for client, round_ in ((0, 1), (1, 1), (0, 2), (2, 3), (0, 4))
        }
        directory.forget_clients(Checkpoint(4, {}, {0: found[0, 4], 1: found[1, 1]}))
        assert sorted(path.name[:6] for path in directory.spool.path.iterdir()) == ["000001", "000004"]
        assert directory.read_client(found[1, 1]).client == 1
        with pytest.raises(InputError, match="is missing"):
            directory.read_client(found[2, 3])


class TestSpool:
    def test_records_come_back_in_any_order(self, tmp_path: Path) -> None:
        spool = Spool(tmp_path)
        records = [bytes([number]) * (number + 1) * 1000 for number in range(5)]
        found = [spool.append(3, record) for record in records]
        for address, record in reversed(list(zip(found, records, strict=True))):
            assert spool.read(address) == record
        assert [bytes(record) for _, record in spool.scan(3)] == records
        assert list(spool.scan(4)) == []
        assert len(list(tmp_path.iterdir())) == 1

    def test_a_record_cut_short_is_never_given_out(self, tmp_path: Path) -> None:
        spool = Spool(tmp_path)
        spool.append(1, b"whole" * 9)
        last = spool.append(1, b"cut" * 9)
        path = tmp_path / last.segment
        content = path.read_bytes()
        for length in range(last.offset, len(content)):
            path.write_bytes(content[:length])
            assert [bytes(record) for _, record in spool.scan(1)] == [b"whole" * 9]
            with pytest.raises(InputError, match=r"is damaged: no whole record at \d+$"):
                spool.read(last)

    def test_nobody_goes_on_with_the_segment_of_a_dead_process(self, tmp_path: Path) -> None:
        """In a container the process ids of one start are those of the next."""
        dead = Spool(tmp_path).append(1, b"cut" * 9)
        path = tmp_path / dead.segment
        path.write_bytes(path.read_bytes()[:-4])
        spool = Spool(tmp_path)
        for number in range(3):
            spool.append(1, bytes([number]) * 9)
        assert sorted(bytes(record) for _, record in Spool(tmp_path).scan(1)) == [bytes([n]) * 9 for n in range(3)]

    @pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
    def test_a_failed_write_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
    ) -> None:
        spool = Spool(tmp_path)
        first = spool.append(1, b"first")

        def half(file: Any, content: bytes) -> None:
            file.write(content[:9])
            raise error

        with monkeypatch.context() as patch:
            patch.setattr("metabayfl.spool._write_all", half)
            with pytest.raises(type(error)):
                spool.append(1, b"second")
        third = spool.append(1, b"third")
        assert third.segment == first.segment
        assert [bytes(record) for _, record in spool.scan(1)] == [b"first", b"third"]

    def test_damage_in_the_middle_is_noticed_everywhere(self, directory: RunDirectory) -> None:
        """Whatever bit is changed, each record is either as it was or refused."""
        fit = Fit(Update({"mu": torch.ones(2)}, 1.0, {}), {}, {})
        found = [directory.write_client(1, encode_client(n, fit, {}, keep_personal=False)) for n in range(2)]
        path = directory.spool.path / found[0].segment
        content = path.read_bytes()
        for place in range(len(content)):
            flipped = bytearray(content)
            flipped[place] ^= 1 << place % 8
            path.write_bytes(flipped)
            broken = int(place >= found[1].offset)
            assert directory.read_client(found[1 - broken]).client == 1 - broken
            with pytest.raises(InputError, match="is damaged") as caught:
                directory.read_client(found[broken])
            assert str(path) in one_line(caught.value)
            assert broken not in directory.spooled(1)


class TestCheckpoint:
    def test_staged_then_published(self, directory: RunDirectory) -> None:
        assert directory.checkpoint() is None
        directory.stage(checkpoint(1))
        assert directory.checkpoint() is None
        staged = directory.checkpoint(staged=True)
        assert staged is not None
        assert staged.round == 1
        directory.publish(lines(1))
        found = directory.checkpoint()
        assert found is not None
        assert directory.checkpoint(staged=True) is None
        assert (found.round, found.latest, list(directory.events())) == (1, LATEST, lines(1))
        assert found.server.keys() == SERVER.keys()
        assert all(torch.equal(found.server[name], tensor) for name, tensor in SERVER.items())

    def test_damage_is_told_in_one_line(self, directory: RunDirectory) -> None:
        directory.stage(checkpoint())
        directory.publish([])
        path = directory.path / CURRENT
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[-5] ^= 4
        for damaged in (
            content[:-1],
            content[:40],
            b"",
            bytes(flipped),
            content.replace(b'"round\\": 1', b'"round\\": 3'),
        ):
            path.write_bytes(damaged)
            assert damaged != content
            with pytest.raises(InputError, match=r"checkpoint\.safetensors is damaged") as caught:
                directory.checkpoint()
            one_line(caught.value)


class TestEvents:
    def test_a_line_cut_short_is_left_out_and_dropped(self, directory: RunDirectory) -> None:
        directory.stage(checkpoint())
        directory.publish([*lines(1), *lines(2)])
        path = directory.path / EVENTS
        whole = path.read_bytes()
        starts = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
        for length in range(starts[1], len(whole)):
            path.write_bytes(whole[:length])
            events = list(directory.events())
            assert events == [*lines(1), *lines(2)][: len(events)]
            directory.drop_events_after(1)
            assert list(directory.events()) == lines(1)

    def test_events_of_a_published_round_are_not_lost(self, directory: RunDirectory) -> None:
        path = directory.path / EVENTS
        text = "".join(json.dumps(event) + "\n" for event in [*lines(1), *lines(2)])
        for damaged in (
            text[:-4],
            text.replace('"round": 2, "client"', '"round": 2 "client"'),
            text[: len(text) // 2],
            "",
        ):
            path.write_text(damaged)
            with pytest.raises(InputError, match=r"events\.jsonl is damaged after round [01], but round 2") as caught:
                directory.drop_events_after(2)
            one_line(caught.value)
            assert path.read_text() == damaged

    @pytest.mark.parametrize("line", [b"[]", b"3", b"{}", b"\xff\xff", b'{"round": 9}', b"\0\0\0", b"NaN"])
    def test_strange_lines_end_the_log(self, directory: RunDirectory, line: bytes) -> None:
        content = "".join(json.dumps(event) + "\n" for event in lines(1)).encode()
        (directory.path / EVENTS).write_bytes(content + line + b"\n" + content)
        assert list(directory.events()) == lines(1)
        directory.drop_events_after(1)
        assert (directory.path / EVENTS).read_bytes() == content


class TestARun:
    def test_no_file_is_written_in_place(self, tmp_path: Path) -> None:
        """But the log, which is appended to, and the lock."""
        path = tmp_path / "run"

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and str(arguments[0]).startswith(str(path)):
                written = arguments[2] & (os.O_WRONLY | os.O_RDWR)
                log = Path(arguments[0]).name == EVENTS or Path(arguments[0]).parent.name == "clients"
                appended = arguments[2] & os.O_APPEND and log
                fine = tensorfile.is_temporary(Path(arguments[0])) or appended or Path(arguments[0]).name == "lock"
                if written and not fine:
                    os._exit(7)

        def run() -> None:
            sys.addaudithook(watch)
            train(path, rounds=2)
            train(path, rounds=2)

        assert in_child(run) == 0
        assert leftovers(path) == []

    def test_nothing_temporary_is_left(self, tmp_path: Path) -> None:
        train(tmp_path / "run", workers=2, rounds=2)
        assert leftovers(tmp_path / "run") == []
        assert {path.name[:6] for path in (tmp_path / "run" / "clients").iterdir()} == {"000002"}

    def test_a_leftover_of_a_crash_harms_nobody(self, tmp_path: Path) -> None:
        """A staged round that a power cut has damaged is not read: its round is done again."""
        train(tmp_path / "whole")
        path = tmp_path / "cut"
        train(path, until=1)
        (path / STAGED).write_bytes(b"\0" * 100)
        train(path)
        assert log(path) == log(tmp_path / "whole")
        assert bits(path) == bits(tmp_path / "whole")
        assert leftovers(path) == []
