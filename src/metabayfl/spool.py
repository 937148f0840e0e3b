"""Records appended to segment files: thousands of clients leave theirs without a file each."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from metabayfl.options import InputError

LENGTH_BYTES = 8


class Address(NamedTuple):
    """Where a record lies: a segment's name and an offset in it."""

    segment: str
    offset: int


class Spool:
    """A directory of segments, one for each round and writing process; a record is its length and its bytes.

    A record that a crash has cut short is the last of its segment, and is never given out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: tuple[str, BinaryIO] | None = None

    def append(self, round_: int, record: bytes) -> Address:
        """Write a record to this process's segment of a round; on failure nothing of it stays."""
        name = f"{round_:06d}-{os.getpid()}"
        file = self._file(name)
        offset = file.seek(0, os.SEEK_END)
        try:
            file.write(len(record).to_bytes(LENGTH_BYTES, "little") + record)
            file.flush()
        except OSError:
            self.close()
            os.truncate(self.path / name, offset)
            raise
        return Address(name, offset)

    def read(self, address: Address) -> bytes:
        """Return a record."""
        path = self.path / address.segment
        try:
            with path.open("rb") as file:
                file.seek(address.offset)
                record = _next_record(file)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        if record is None:
            raise InputError(f"{path} is damaged: no whole record at {address.offset}")
        return record

    def scan(self, round_: int) -> Iterator[tuple[Address, bytes]]:
        """Return the whole records of a round, from every process that wrote some."""
        for path in sorted(self.path.glob(f"{round_:06d}-*")):
            with path.open("rb") as file:
                offset = 0
                while (record := _next_record(file)) is not None:
                    yield Address(path.name, offset), record
                    offset = file.tell()

    def forget_all_but(self, segments: Iterable[str]) -> None:
        """Remove segments that nobody will read again."""
        keep = set(segments)
        for path in self.path.iterdir():
            if path.name not in keep:
                path.unlink()

    def close(self) -> None:
        """Close the segment being written."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _file(self, name: str) -> BinaryIO:
        if self._open is None or self._open[0] != name:
            self.close()
            self._open = name, (self.path / name).open("ab")
        return self._open[1]


def _next_record(file: BinaryIO) -> bytes | None:
    head = file.read(LENGTH_BYTES)
    length = int.from_bytes(head, "little")
    record = file.read(length) if len(head) == LENGTH_BYTES else b""
    return record if record and len(record) == length else None
