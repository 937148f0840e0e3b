"""Pickles: arrays of numbers come out as they went in; anything else is refused, and nothing of it is run."""

import io
import os
import pickle
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from metabayfl import InputError
from metabayfl.data.sources.pickles import LARGEST_BYTES, read_pickle

PROTOCOLS = [0, 1, 2, 3, 4]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_come_out_as_they_went_in(protocol: int, order: Any) -> None:
    data = np.asarray(np.arange(24).reshape(4, 6), dtype=np.uint8, order=order)
    values = {b"data": data, "labels": [1, 2, 3], b"name": b"batch"}
    found = read_pickle(pickle.dumps(values, protocol), "file")
    assert found["data"].dtype == np.uint8
    assert np.array_equal(found["data"], data)
    assert (found["labels"], found["name"]) == ([1, 2, 3], b"batch")


@given(arrays.arrays(st.sampled_from(["u1", "<i8", "<f4"]), arrays.array_shapes(max_side=5)))
def test_any_plain_array(values: np.ndarray) -> None:
    found = read_pickle(pickle.dumps({"data": values}, 2), "file")["data"]
    np.testing.assert_array_equal(found, values)
    assert found.dtype == values.dtype


def test_the_files_of_python_2() -> None:
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01(K\x02K\x03t"
        b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x06abcdeftb"
    )
    found = read_pickle(b"\x80\x02}(U\x04data" + array + b"U\x06labels](K\x06K\x09eu.", "file")
    assert found["data"].tolist() == [[97, 98, 99], [100, 101, 102]]
    assert found["labels"] == [6, 9]


class Call:
    """Pickles as a call of some function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def attacks(trace: Path) -> dict[str, bytes]:
    """Files that would leave a trace if anything of them was run."""
    touch = f"touch {trace}"
    inner = pickle.dumps(Call(os.system, touch))
    return {
        "os.system": inner,
        "subprocess": pickle.dumps(Call(subprocess.check_output, ["touch", str(trace)])),
        "eval": pickle.dumps(Call(eval, f"open({str(trace)!r}, 'w')")),
        "exec": pickle.dumps(Call(exec, f"open({str(trace)!r}, 'w')")),
        "open": pickle.dumps(Call(open, str(trace), "w")),
        "getattr": pickle.dumps({"data": Call(getattr, "", "join")}),
        "pickle in a pickle": pickle.dumps(Call(pickle.loads, inner)),
        "numpy's own loader": b"\x80\x02cnumpy\nload\nX\x01\x00\x00\x00xtR.",
        "numpy by another name": b"cnumpy.core.multiarray\nos\n.",
        "dotted name": b"\x80\x04\x8c\x05numpy\x8c\x0bndarray.dot\x93.",
        "codecs": b"\x80\x02c_codecs\nlookup\nX\x05\x00\x00\x00utf-8\x85R.",
        "inst": b"(S'" + touch.encode() + b"'\nios\nsystem\n.",
        "persistent id": b"\x80\x02X\x01\x00\x00\x00aQ.",
    }


@pytest.mark.parametrize("name", attacks(Path("x")))
def test_attacks_are_refused_and_not_run(name: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with pytest.raises(InputError, match=r"evil\.bin is not a dataset: it .*; nothing of it was run"):
        read_pickle(attacks(trace)[name], "evil.bin")
    assert not trace.exists()


def test_the_attacks_would_work_on_a_plain_unpickler(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    pickle.Unpickler(io.BytesIO(attacks(trace)["os.system"])).load()  # noqa: S301
    assert trace.exists()


MADE = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
DTYPE = b"cnumpy\ndtype\nU\x02%sK\x00K\x01\x87R"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "damaged"),
        (b"not a pickle", "damaged"),
        (pickle.dumps({"data": np.zeros(3)}, 2)[:-9], "damaged"),
        (pickle.dumps(np.array([{}], dtype=object), 2), "type 'O8'"),
        (pickle.dumps(np.zeros(3, ">i4"), 2), "byte order '>'"),
        (MADE + b"(K\x01K\x7f\x85" + DTYPE % b"u1" + b"\x89U\x03abctb.", "shape .127,. with 3 bytes"),
        (MADE + b"(K\x01K\x03\x85U\x02u1\x89U\x03abctb.", "without type"),
        (MADE + b"(K\x01J\xff\xff\xff\xffJ\xff\xff\xff\xff\x86" + DTYPE % b"u1" + b"\x89U\x01atb.", "damaged"),
        (b"\x80\x02cnumpy\nndarray\n(K\x01K\x02tR.", "damaged"),
        (b"\x80\x02cnumpy\nndarray\n}X\x01\x00\x00\x00aK\x01sb.", "damaged"),
        (b"\x80\x02cnumpy\ndtype\n}X\x08\x00\x00\x00__call__K\x01sb.", "damaged"),
        (b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.", "encoded as 'rot13'"),
    ],
)
def test_damaged_files_are_refused(content: bytes, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        read_pickle(content, "file")


@given(st.binary(max_size=60), st.integers(0, 500))
def test_a_file_with_changed_bytes_is_read_or_refused(noise: bytes, at: int) -> None:
    content = bytearray(pickle.dumps({"data": np.arange(40, dtype=np.uint8), "labels": [1, 2]}, 2))
    content[at : at + len(noise)] = noise
    with suppress(InputError):
        read_pickle(bytes(content), "file")  # any other error fails the test


def test_huge_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metabayfl.data.sources.pickles.LARGEST_BYTES", 10)
    with pytest.raises(InputError, match="at most 10"):
        read_pickle(b"x" * 11, "file")
    assert LARGEST_BYTES > 200_000_000
