"""The one place that reads pickles, which CIFAR is published in: plain containers and arrays of numbers, no code.

Not even numpy is called: the names by which pickles rebuild an array lead to the stand-ins below, which keep what they
are given. Only when the file is read to its end and well-formed, an array is made of the bytes.
"""

import io
import math
import pickle
from typing import Any, NoReturn

import numpy as np

from metabayfl.options import InputError

KINDS = {"b1", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"}
LARGEST_BYTES = 2**30


class _Marker:
    """Stands for the class numpy.ndarray, which a pickle names but need not call."""

    __slots__ = ()


class _Dtype:
    """Stands for numpy.dtype: only the name of the type counts."""

    __slots__ = ("order", "text")

    def __init__(self, text: Any) -> None:
        name = text.decode("latin1") if isinstance(text, bytes) else text
        if name not in KINDS:
            raise pickle.UnpicklingError(f"an array of type {name!r}")
        self.text, self.order = name, "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1].decode("latin1") if isinstance(state[1], bytes) else state[1]
        if order not in ("<", "|"):
            raise pickle.UnpicklingError(f"an array of byte order {order!r}")


class _Array:
    """Stands for an array until its state is known."""

    __slots__ = ("values",)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes) or not isinstance(shape, tuple):
            raise pickle.UnpicklingError("an array without type, shape or bytes")
        if math.prod(shape) * int(dtype.text[1:]) != len(raw):
            raise pickle.UnpicklingError(f"an array of shape {shape} with {len(raw)} bytes")
        self.values = np.frombuffer(raw, dtype.text).reshape(shape, order="F" if fortran else "C")


class _MakeArray:
    """Stands for numpy.core.multiarray._reconstruct."""

    __slots__ = ()

    def __call__(self, *_: Any) -> _Array:
        return _Array()


class _MakeDtype:
    """Stands for numpy.dtype as a function."""

    __slots__ = ()

    def __call__(self, text: Any, *_: Any) -> _Dtype:
        return _Dtype(text)


class _Encode:
    """Stands for _codecs.encode, by which Python 3 writes bytes in old protocols: latin1 and nothing else."""

    __slots__ = ()

    def __call__(self, text: str, encoding: str) -> bytes:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"text encoded as {encoding!r}")
        return text.encode("latin1")


STANDINS: dict[tuple[str, str], type] = {
    ("numpy.core.multiarray", "_reconstruct"): _MakeArray,
    ("numpy._core.multiarray", "_reconstruct"): _MakeArray,
    ("numpy", "ndarray"): _Marker,
    ("numpy", "dtype"): _MakeDtype,
    ("_codecs", "encode"): _Encode,
}


class _Unpickler(pickle.Unpickler):
    """Admits the names of numpy's array reconstruction, and gives a fresh stand-in for each."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STANDINS:
            raise Refused(f"it asks for {module}.{name}, which arrays of numbers do not need")
        return STANDINS[module, name]()

    def persistent_load(self, _: Any) -> NoReturn:
        raise Refused("it refers to objects outside the file")


class Refused(pickle.UnpicklingError):
    """A pickle that wants more than arrays."""


def read_pickle(content: bytes, where: str) -> Any:
    """Return the containers, texts and arrays of a pickle; `where` names it in errors."""
    if len(content) > LARGEST_BYTES:
        raise InputError(f"{where} has {len(content):,} bytes; at most {LARGEST_BYTES:,} are accepted")
    try:
        return _plain(_Unpickler(io.BytesIO(content), encoding="bytes").load())
    except Refused as error:
        raise InputError(f"{where} is not a dataset: {error}; nothing of it was run") from None
    except Exception as error:  # whatever a damaged or hostile file leads to
        raise InputError(f"{where} is damaged: {str(error) or type(error).__name__}") from None


def _plain(value: Any) -> Any:
    """Put arrays in the place of their stand-ins, and text in the place of bytes that are keys."""
    if isinstance(value, _Array):
        return value.values
    if isinstance(value, dict):
        return {_text(key): _plain(item) for key, item in value.items()}
    return value


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
