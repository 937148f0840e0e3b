"""Named tensors on disk: sizes, bytes, and every way of being damaged."""

import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from federations import one_line
from metabayfl import tensorfile
from metabayfl.options import InputError

NAMES = st.text(max_size=12).filter(lambda name: name != tensorfile.METADATA)
SHAPES = st.lists(st.integers(0, 5), max_size=3)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
METAS = st.dictionaries(st.text(max_size=5).filter(lambda key: key != "crc"), PLAIN, max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype, shape = draw(st.sampled_from(list(tensorfile.DTYPES))), draw(SHAPES)
    values = torch.arange(math.prod(shape)).reshape(shape) * 7 - 11
    return values.to(dtype)


HEADERS = st.one_of(
    PLAIN,
    st.fixed_dictionaries({tensorfile.METADATA: PLAIN}),
    st.builds(
        lambda meta, about: {tensorfile.METADATA: {tensorfile.KEY: json.dumps(meta)}, "x": about},
        PLAIN,
        PLAIN | st.fixed_dictionaries({"dtype": st.just("F32") | PLAIN, "shape": PLAIN, "data_offsets": PLAIN}),
    ),
).map(lambda header: json.dumps(header).encode())
FILES = st.dictionaries(NAMES, tensors(), max_size=6)


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


@settings(max_examples=150, deadline=None)
@given(FILES, METAS)
def test_the_size_is_known_before_encoding(named: dict[str, Tensor], meta: dict[str, Any]) -> None:
    assert tensorfile.encoded_size(named, meta) == len(tensorfile.encode(named, meta))


@settings(max_examples=80, deadline=None)
@given(FILES, METAS)
def test_safetensors_reads_what_we_write(named: dict[str, Tensor], meta: dict[str, Any]) -> None:
    read = safetensors.torch.load(tensorfile.encode(named, meta))
    assert read.keys() == named.keys()
    assert all(same(read[name], tensor) for name, tensor in named.items())


@settings(max_examples=100, deadline=None)
@given(FILES, METAS, st.randoms())
def test_the_same_content_gives_the_same_bytes(named: dict[str, Tensor], meta: dict[str, Any], rng: Any) -> None:
    def shuffled(content: dict[str, Any]) -> dict[str, Any]:
        items = list(content.items())
        rng.shuffle(items)
        return dict(items)

    assert tensorfile.encode(shuffled(named), shuffled(meta)) == tensorfile.encode(named, meta)


@settings(max_examples=60, deadline=None)
@given(FILES, METAS)
def test_a_file_comes_back_whole(tmp_path_factory: Any, named: dict[str, Tensor], meta: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("files") / "file.safetensors"
    tensorfile.write(path, named, meta)
    read, about = tensorfile.read(path)
    assert read.keys() == named.keys()
    assert all(same(read[name], tensor) for name, tensor in named.items())
    assert json.dumps(about, sort_keys=True) == json.dumps(meta, sort_keys=True)  # as text: NaN differs from itself
    assert [file.name for file in path.parent.iterdir()] == ["file.safetensors"]


@settings(max_examples=50, deadline=None)
@given(FILES, METAS)
def test_every_tensor_is_aligned(named: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """So that it can be mapped from the file."""
    content = tensorfile.encode(named, meta)
    stop = 8 + int.from_bytes(content[:8], "little")
    assert stop % 8 == 0
    header = json.loads(content[8:stop])
    for name, tensor in named.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        torch.ones(3).expand(2, 3),
        torch.ones(3, requires_grad=True),
    ],
    ids=["transposed", "channels_last", "expanded", "requires_grad"],
)
def test_memory_order_does_not_matter(tensor: Tensor) -> None:
    plain = tensor.detach().clone(memory_format=torch.contiguous_format)
    assert tensorfile.encode({"x": tensor}) == tensorfile.encode({"x": plain})
    assert tensorfile.checksum({"x": tensor}) == tensorfile.checksum({"x": plain})


def test_tensors_may_share_memory() -> None:
    whole = torch.arange(10.0)
    read = safetensors.torch.load(tensorfile.encode({"a": whole, "b": whole, "c": whole[3:], "d": whole[:5]}))
    assert torch.equal(read["b"], whole)
    assert torch.equal(read["c"], whole[3:])
    assert torch.equal(read["d"], whole[:5])


def test_types_that_cannot_be_stored_are_named() -> None:
    for call in (tensorfile.encode, tensorfile.encoded_size, tensorfile.checksum):
        with pytest.raises(InputError, match=r"tensor 'odd' has type torch\.complex64; accepted: float32"):
            call({"fine": torch.ones(1), "odd": torch.ones(1, dtype=torch.complex64)})
    with pytest.raises(InputError, match="cannot be named __metadata__"):
        tensorfile.encode({tensorfile.METADATA: torch.ones(1)})


SMALL = {"mu": torch.tensor([1.5, -2.0]), "n": torch.tensor(3)}


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (({"a": torch.zeros(6)}, {}), ({"b": torch.zeros(6)}, {})),
        (({"a": torch.zeros(6)}, {}), ({"a": torch.zeros(2, 3)}, {})),
        (({"a": torch.zeros(6)}, {}), ({"a": torch.zeros(6, dtype=torch.int32)}, {})),
        (({"a": torch.zeros(6)}, {}), ({"a": -torch.zeros(6)}, {})),
        (({"a": torch.zeros(6)}, {"round": 1}), ({"a": torch.zeros(6)}, {"round": 2})),
    ],
    ids=["name", "shape", "type", "value", "meta"],
)
def test_the_checksum_sees_everything(left: Any, right: Any) -> None:
    assert tensorfile.checksum(*left) != tensorfile.checksum(*right)


def damaged(path: Path, content: bytes) -> str:
    """What reading says about a file with this content; an empty text if it is accepted."""
    path.write_bytes(content)
    try:
        tensorfile.read(path)
    except InputError as error:
        text = one_line(error)
        return text if str(path) in text else ""
    return ""


def test_a_flipped_bit_in_any_byte_is_noticed(tmp_path: Path) -> None:
    content = tensorfile.encode_checked(SMALL, {"round": 2, "weight": 12.0})
    path = tmp_path / "file"
    assert damaged(path, content) == ""
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        assert damaged(path, bytes(flipped)), f"bit {place % 8} of byte {place}"


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    content = tensorfile.encode_checked(SMALL, {"round": 2})
    for length in range(len(content)):
        assert damaged(tmp_path / "file", content[:length]), f"{length} bytes"
    assert damaged(tmp_path / "file", content + b"\0")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_garbage_is_refused(tmp_path_factory: Any, garbage: bytes, with_header: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage"
    header = len(garbage).to_bytes(8, "little") if with_header else b""
    assert "is damaged" in damaged(path, header + garbage)


def test_metadata_that_is_no_table_is_refused(tmp_path: Path) -> None:
    for text in ("[]", "3", "null", '"crc"', "{", "[" * 100_000):
        content = safetensors.torch.save({"x": torch.ones(2)}, metadata={tensorfile.KEY: text})
        assert "is damaged" in damaged(tmp_path / "file", content)
    foreign = safetensors.torch.save({"x": torch.ones(2)})
    assert "checksum" in damaged(tmp_path / "file", foreign)


def test_what_is_not_a_file_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is missing"):
        tensorfile.read(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is damaged"):
        tensorfile.read(tmp_path)


class TestDecode:
    """The same files in memory, for records that lie beside others in one file."""

    @settings(max_examples=60, deadline=None)
    @given(FILES, METAS)
    def test_it_undoes_encode(self, named: dict[str, Tensor], meta: dict[str, Any]) -> None:
        read, about = tensorfile.decode(bytearray(tensorfile.encode_checked(named, meta)))
        assert read.keys() == named.keys()
        assert all(same(read[name], tensor) for name, tensor in named.items())
        assert json.dumps(about, sort_keys=True) == json.dumps(meta, sort_keys=True)

    def refused(self, content: bytes) -> bool:
        try:
            tensorfile.decode(bytearray(content))
        except ValueError as error:
            return bool(one_line(error))
        return False

    def test_every_flipped_bit_and_every_truncation_is_noticed(self) -> None:
        content = tensorfile.encode_checked(SMALL, {"round": 2, "weight": 12})
        assert not self.refused(content)
        for place in range(8 * len(content)):
            flipped = bytearray(content)
            flipped[place // 8] ^= 1 << place % 8
            assert self.refused(bytes(flipped)), f"bit {place % 8} of byte {place // 8}"
        assert all(self.refused(content[:length]) for length in range(len(content)))
        assert self.refused(content + b"\0")

    @settings(max_examples=200, deadline=None)
    @given(st.binary(max_size=60) | HEADERS)
    def test_garbage_is_refused(self, garbage: bytes) -> None:
        assert self.refused(garbage)
        assert self.refused(len(garbage).to_bytes(8, "little") + garbage + b"\0" * 16)


class TestWriting:
    def test_a_failed_write_leaves_the_old_content_and_no_temporary(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "file"
        tensorfile.write_bytes(path, b"old")
        write = Path.write_bytes

        def full(self: Path, content: bytes) -> int:
            write(self, content[:2])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left on device") as caught:
            tensorfile.write_bytes(path, b"new")
        assert str(path) in one_line(caught.value)
        assert path.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [path]

    def test_an_interrupted_write_leaves_the_old_content_and_no_temporary(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "file"
        tensorfile.write_bytes(path, b"old")

        def interrupted(self: Path, target: Path) -> Path:
            raise KeyboardInterrupt

        monkeypatch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tensorfile.write_bytes(path, b"new")
        assert path.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [path]

    def test_only_our_temporaries_are_taken_for_such(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []
        replace = Path.replace

        def watched(self: Path, target: Path) -> Path:
            seen.append(self)
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", watched)
        tensorfile.write_bytes(tmp_path / "run.json", b"{}")
        assert [tensorfile.is_temporary(path) for path in seen] == [True]
        for name in ("run.json", ".hidden", "model.123", "000001-000002.safetensors", ".git", "."):
            assert not tensorfile.is_temporary(tmp_path / name)
