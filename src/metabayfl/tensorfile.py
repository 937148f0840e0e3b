"""Named tensors on disk: safetensors with one JSON text beside them, written whole or not at all."""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from metabayfl.options import InputError
from metabayfl.types import Params

KEY = "metabayfl"
DTYPES = {
    torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def encode(tensors: Params, meta: Mapping[str, Any] | None = None) -> bytes:
    """Return the bytes of a file; the same tensors and meta give the same bytes."""
    plain = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
    return safetensors.torch.save(plain, metadata={KEY: json.dumps(meta or {}, sort_keys=True)})


def encoded_size(tensors: Params, meta: Mapping[str, Any] | None = None) -> int:
    """Return len(encode(tensors, meta)) without copying the tensors: 8 bytes, a header padded to 8, the content."""
    header: dict[str, Any] = {"__metadata__": {KEY: json.dumps(meta or {}, sort_keys=True)}}
    stop = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        start, stop = stop, stop + tensor.numel() * tensor.element_size()
        dtype = DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + -(-len(text) // 8) * 8 + stop


def write(path: Path, tensors: Params, meta: Mapping[str, Any] | None = None, *, durable: bool = False) -> None:
    """Write a file atomically."""
    write_bytes(path, encode(tensors, meta), durable=durable)


def write_bytes(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write to a neighbour and rename; with `durable` the content is on the disk before the name is."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path) -> tuple[Params, dict[str, Any]]:
    """Read a file; the tensors are mapped from it, not copied."""
    try:
        with safe_open(path, "pt") as file:
            meta = json.loads((file.metadata() or {}).get(KEY, "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, meta  # noqa: SIM118
    except FileNotFoundError:
        raise InputError(f"{path} is missing") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} is damaged: {error}") from None


def checksum(tensors: Params) -> int:
    """CRC of names and contents."""
    crc = 0
    for name, tensor in sorted(tensors.items()):
        crc = zlib.crc32(name.encode(), crc)
        crc = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, crc)
    return crc
