"""Records appended to segment files: thousands of clients leave theirs without a file each."""

import os
import secrets
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from metabayfl.options import InputError
from metabayfl.tensorfile import naming

LENGTH_BYTES = 8


class Address(NamedTuple):
    """Where a record lies: a segment's name and an offset in it."""

    segment: str
    offset: int


class Spool:
    """A directory of segments, one for each round and writing process; a record is its length and its bytes.

    A record that a crash has cut short is the last of its segment, and is never given out. Nobody goes on with the
    segment of another: process ids come again, so a name has a random part too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.token = secrets.token_hex(4)

    def append(self, round_: int, record: bytes) -> Address:
        """Write a record to this process's segment of a round; on failure nothing of it stays."""
        name = f"{round_:06d}-{os.getpid()}-{self.token}"
        path = self.path / name
        with naming(path), path.open("ab", buffering=0) as file:
            offset = file.seek(0, os.SEEK_END)
            try:
                _write_all(file, len(record).to_bytes(LENGTH_BYTES, "little") + record)
            except BaseException:
                os.truncate(path, offset)
                raise
        return Address(name, offset)

    def read(self, address: Address) -> bytearray:
        """Return a record."""
        path = self.path / address.segment
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(address.offset)
                record = _next_record(file)
        except FileNotFoundError:
            raise InputError(f"{path} is missing") from None
        if record is None:
            raise InputError(f"{path} is damaged: no whole record at {address.offset}")
        return record

    def scan(self, round_: int) -> Iterator[tuple[Address, bytearray]]:
        """Return the whole records of a round, from every process that wrote some."""
        for path in sorted(self.path.glob(f"{round_:06d}-*")):
            with path.open("rb", buffering=0) as file:
                offset = 0
                while (record := _next_record(file)) is not None:
                    yield Address(path.name, offset), record
                    offset = file.tell()

    def rounds(self) -> list[int]:
        """Return the rounds that have segments."""
        return sorted({int(path.name[:6]) for path in self.path.iterdir()})

    def forget_all_but(self, segments: Iterable[str]) -> None:
        """Remove segments that nobody will read again."""
        keep = set(segments)
        for path in self.path.iterdir():
            if path.name not in keep:
                path.unlink()


def _write_all(file: FileIO, content: bytes) -> None:
    """Write everything: one call of the operating system may take only a part, as on a disk that is nearly full."""
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


def _next_record(file: FileIO) -> bytearray | None:
    head = file.read(LENGTH_BYTES)
    record = bytearray(min(int.from_bytes(head, "little"), os.fstat(file.fileno()).st_size))
    whole = len(head) == LENGTH_BYTES and int.from_bytes(head, "little") == len(record) > 0
    return record if whole and _fill(file, record) else None


def _fill(file: FileIO, record: bytearray) -> bool:
    """Read until the record is full; False if the file ends before."""
    view, got = memoryview(record), 0
    while got < len(record) and (more := file.readinto(view[got:])):
        got += more
    return got == len(record)
