"""The cache of decoded data: the same arrays, mapped; rebuilt when damaged or when the files change."""

import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from layouts import byte_images
from metabayfl.data.sources import cache
from metabayfl.data.sources.cache import NAME, cached
from metabayfl.data.sources.source import Source


class Decoder:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Source:
        self.calls += 1
        x, y = byte_images(6), np.arange(6)
        return Source(x, y, x[:2], y[:2], 6, tuple("abcdef"), (0.5,), (0.25,), np.arange(6) % 2, ("p", "q"), "a note")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_bytes(b"content")
    return [tmp_path / "data" / "file"]


def entries(home: Path) -> list[Path]:
    return list((home / NAME).iterdir())


def same(one: Source, other: Source) -> bool:
    arrays = ("x", "y", "test_x", "test_y", "owners")
    plain = ("classes", "class_names", "mean", "std", "client_names", "note")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays) and all(
        getattr(one, name) == getattr(other, name) for name in plain
    )


def test_the_second_time_nothing_is_decoded(files: list[Path]) -> None:
    decode = Decoder()
    found = [cached(files, ("key",), files[0].parent, decode) for _ in range(3)]
    assert decode.calls == 1
    assert all(same(source, Decoder()()) for source in found)
    assert isinstance(found[0].x, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        found[0].x[0] = 0


def test_other_files_or_options_are_other_entries(files: list[Path]) -> None:
    decode = Decoder()
    cached(files, ("key",), files[0].parent, decode)
    cached(files, ("other",), files[0].parent, decode)
    os.utime(files[0], ns=(1, 1))
    cached(files, ("key",), files[0].parent, decode)
    files[0].write_bytes(b"more content")
    os.utime(files[0], ns=(1, 1))
    cached(files, ("key",), files[0].parent, decode)
    assert decode.calls == 4
    assert len(entries(files[0].parent)) == 4


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["x.npy", "y.npy", "about.json"])
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_entry_is_rebuilt(damage: Callable[[Path], None], name: str, files: list[Path]) -> None:
    decode = Decoder()
    cached(files, (), files[0].parent, decode)
    damage(entries(files[0].parent)[0] / name)
    assert same(cached(files, (), files[0].parent, decode), decode())
    calls = decode.calls
    assert same(cached(files, (), files[0].parent, decode), Decoder()())
    assert decode.calls == calls
    assert len(entries(files[0].parent)) == 1


def test_a_folder_that_cannot_be_written_uses_the_users_cache(files: list[Path], tmp_path: Path) -> None:
    (files[0].parent / NAME).write_text("a file where the cache would be")
    decode = Decoder()
    for _ in range(2):
        assert same(cached(files, (), files[0].parent, decode), Decoder()())
    assert decode.calls == 1
    assert len(list((tmp_path / "user" / "metabayfl").iterdir())) == 1


def test_without_any_cache_it_works(files: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (files[0].parent / NAME).write_text("no")
    (tmp_path / "user").write_text("no")
    found = cached(files, (), files[0].parent, Decoder())
    assert same(found, Decoder()())
    assert not found.x.flags.writeable
    assert "no cache of decoded data" in caplog.text


def _ask(files: list[Path], start: "multiprocessing.synchronize.Barrier") -> bool:
    start.wait()
    return same(cached(files, (), files[0].parent, Decoder()), Decoder()())


def test_two_processes_at_once(files: list[Path]) -> None:
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(3), context.Queue()
    workers = [context.Process(target=lambda: answers.put(_ask(files, start))) for _ in range(3)]
    for worker in workers:
        worker.start()
    assert [answers.get(timeout=60) for _ in workers] == [True] * 3
    for worker in workers:
        worker.join()
    assert len(entries(files[0].parent)) == 1


def test_an_entry_that_appears_meanwhile_stays(files: list[Path], tmp_path: Path) -> None:
    cached(files, (), files[0].parent, Decoder())
    entry = entries(files[0].parent)[0]
    shutil.copytree(entry, tmp_path / "other")
    shutil.rmtree(entry)

    def slow() -> Source:
        shutil.copytree(tmp_path / "other", entry)
        return Decoder()()

    assert same(cached(files, (), files[0].parent, slow), Decoder()())
    assert [path.name for path in entries(files[0].parent)] == [entry.name]
    assert cache._read(entry) is not None
