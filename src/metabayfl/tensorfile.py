"""Named tensors on disk: safetensors with one JSON text beside them, written whole or not at all."""

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from metabayfl.options import InputError
from metabayfl.types import Params

KEY = "metabayfl"
METADATA = "__metadata__"
DTYPES = {
    torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TYPES = {name: dtype for dtype, name in DTYPES.items()}


def encode(tensors: Params, meta: Mapping[str, Any] | None = None) -> bytes:
    """Return the bytes of a file; the same tensors and meta give the same bytes, tensors may share memory."""
    header, names = _header(tensors, meta)
    return b"".join([len(header).to_bytes(8, "little"), header, *(_raw(tensors[name]) for name in names)])


def encoded_size(tensors: Params, meta: Mapping[str, Any] | None = None) -> int:
    """Return len(encode(tensors, meta)) without copying the tensors."""
    header, _ = _header(tensors, meta)
    return 8 + len(header) + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _header(tensors: Params, meta: Mapping[str, Any] | None) -> tuple[bytes, list[str]]:
    """Return the header, padded to 8 bytes, and the order of the tensors: widest types first, so all are aligned."""
    if METADATA in tensors:
        raise InputError(f"a tensor cannot be named {METADATA}")
    about: dict[str, Any] = {METADATA: {KEY: json.dumps(meta or {}, sort_keys=True)}}
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    stop = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise InputError(f"tensor {name!r} has type {tensor.dtype}; accepted: {accepted}")
        start, stop = stop, stop + tensor.numel() * tensor.element_size()
        about[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
    text = json.dumps(about, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 8), names


def _raw(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def checksum(tensors: Params, meta: Mapping[str, Any] | None = None) -> int:
    """CRC of everything in a file: names, types, shapes, contents and meta."""
    header, names = _header(tensors, meta)
    crc = zlib.crc32(header)
    for name in names:
        crc = zlib.crc32(_raw(tensors[name]), crc)
    return crc


def encode_checked(tensors: Params, meta: Mapping[str, Any] | None = None) -> bytes:
    """Return the bytes of a file that `read` accepts: with its checksum in the meta."""
    return encode(tensors, {**(meta or {}), "crc": checksum(tensors, meta)})


def write(path: Path, tensors: Params, meta: Mapping[str, Any] | None = None) -> None:
    """Write a file atomically, with its checksum."""
    write_bytes(path, encode_checked(tensors, meta))


def write_bytes(path: Path, content: bytes) -> None:
    """Write to a neighbour and rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path):
            temporary.write_bytes(content)
            temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def is_temporary(path: Path) -> bool:
    """Whether a file is what a killed process left of `write_bytes`."""
    return path.name.startswith(".") and path.suffix[1:].isdecimal()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors of the operating system name a file: a full disk does not say where it is."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def decode(content: bytearray) -> tuple[Params, dict[str, Any]]:
    """Undo `encode_checked`; the tensors are views of the content. What is damaged raises a ValueError."""
    try:
        tensors, meta = _views(content)
        header, _ = _header(tensors, meta)
        exact = content[: 8 + len(header)] == len(header).to_bytes(8, "little") + header
        exact = exact and len(content) == encoded_size(tensors, meta)
        intact = meta.pop("crc", None) == checksum(tensors, meta) and exact
    except (KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"it cannot be read ({type(error).__name__})") from None
    if not intact:
        raise ValueError("its content does not match its checksum")
    return tensors, meta


def _views(content: bytearray) -> tuple[Params, dict[str, Any]]:
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    meta: dict[str, Any] = json.loads(header.pop(METADATA)[KEY])
    tensors = {}
    for name, about in header.items():
        dtype, (begin, end) = TYPES[about["dtype"]], about["data_offsets"]
        count = (end - begin) // dtype.itemsize
        at = {"count": count, "offset": start + begin}
        flat = torch.frombuffer(content, dtype=dtype, **at) if count else torch.empty(0, dtype=dtype)
        tensors[name] = flat.view(about["shape"])
    return tensors, meta


def read(path: Path) -> tuple[Params, dict[str, Any]]:
    """Read and verify a file; the tensors are mapped from it, not copied."""
    try:
        with safe_open(path, "pt") as file:
            meta = json.loads((file.metadata() or {}).get(KEY, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if not isinstance(meta, dict):
            raise ValueError(f"{KEY} holds no table")
        crc = meta.pop("crc", None)
        intact = crc == checksum(tensors, meta)
    except FileNotFoundError:
        raise InputError(f"{path} is missing") from None
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {error}") from None
    if not intact:
        raise InputError(f"{path} is damaged: its content does not match its checksum")
    return tensors, meta
