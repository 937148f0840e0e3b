"""Is an update what it should be? Every engine asks before a server averages it."""

import math
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

import torch

from metabayfl.tensorfile import encoded_size
from metabayfl.types import Params, Sent

LARGEST_METRICS = 96
LONGEST_NAME = 64
LOG_FIELDS = {
    "event",
    "round",
    "client",
    "fault",
    "weight",
    "seconds",
    "selection_seconds",
    "comm_seconds",
    "peak_memory_bytes",
    "bytes_up",
    "bytes_down",
    "forward_passes",
    "backward_passes",
}
"""What an engine says about an update in its log; a metric cannot have these names."""
META_BYTES = 1 << 17
"""Room for the weight and as many metrics, with names as long, as are allowed."""

Id = TypeVar("Id", bound=Hashable)


class BadUpdate(ValueError):
    """A client's update cannot be sent."""


@dataclass(frozen=True)
class Limits:
    """What an update may look like: the tensors a server expects, and bounds on weight and size."""

    like: Params
    largest_weight: float = 1e9
    largest_norm: float = 1e6
    """Largest root mean square of a tensor."""

    @property
    def largest_bytes(self) -> int:
        """Largest encoded update; a good one is never above."""
        return encoded_size(self.like) + META_BYTES


def find_size_fault(encoded_bytes: int, limits: Limits) -> str:
    """Return what is wrong with the size of an encoded update; asked before anything is decoded."""
    large = encoded_bytes > limits.largest_bytes
    return f"an update of {encoded_bytes} bytes, above {limits.largest_bytes}" if large else ""


def find_duplicates(clients: Iterable[Id]) -> list[Id]:
    """Return the clients that sent more than one update, each of them once, in the order of their first."""
    return [client for client, count in Counter(clients).items() if count > 1]


def find_fault(update: Sent, limits: Limits) -> str:
    """Return what is wrong with an update; an empty text if nothing is."""
    malformed = find_malformed(update, limits.largest_weight)
    if malformed:
        return malformed
    payload = update.payload
    return _names_fault(payload, limits.like) or _first(_value_fault(n, t, limits) for n, t in payload.items())


def find_malformed(update: Sent, largest_weight: float = math.inf) -> str:
    """Return why an update cannot even be sent, whatever the server expects; an empty text if it can."""
    return (
        _weight_fault(update.weight, largest_weight)
        or find_metrics_fault(update.metrics)
        or _payload_fault(update.payload)
    )


def _first(faults: Iterable[str]) -> str:
    return next(filter(None, faults), "")


def is_finite(value: object) -> TypeGuard[float]:
    """Whether a value is a plain number: not a bool, not an array, not too large for a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _weight_fault(weight: object, largest: float) -> str:
    if not is_finite(weight):
        return f"weight {_short(weight)} is not a finite number"
    return "" if 0 < weight <= largest else f"weight {_short(weight)} is not in (0, {largest:g}]"


def find_metrics_fault(metrics: object) -> str:
    """Return what is wrong with numbers that a client sends along."""
    if not isinstance(metrics, Mapping) or len(metrics) > LARGEST_METRICS:
        return f"metrics are not a mapping of at most {LARGEST_METRICS} numbers"
    return _first(_metric_fault(name, value) for name, value in metrics.items())


def _metric_fault(name: object, value: object) -> str:
    if not isinstance(name, str) or len(name) > LONGEST_NAME:
        return f"metric {_short(name)} is not named by a text of at most {LONGEST_NAME} characters"
    if name in LOG_FIELDS:
        return f"metric {name!r} has the name of something else in the log"
    return "" if is_finite(value) else f"metric {name!r} is {_short(value)}, not a finite number"


def _payload_fault(payload: object) -> str:
    if not isinstance(payload, Mapping):
        return f"payload is a {type(payload).__name__}, not a mapping of tensors"
    return _first(_kind_fault(name, value) for name, value in payload.items())


def _kind_fault(name: object, value: object) -> str:
    if not isinstance(name, str):
        return f"payload has the name {_short(name)}, which is not a text"
    if not isinstance(value, torch.Tensor):
        return f"{_short(name)} is a {type(value).__name__}, not a tensor"
    dense = value.layout is torch.strided and not value.is_nested and not value.is_meta
    return "" if dense else f"{_short(name)} is not a dense tensor with values"


def _names_fault(payload: Params, like: Params) -> str:
    missing, extra = (_listed(a.keys() - b.keys()) for a, b in ((like, payload), (payload, like)))
    return f"tensors missing: {missing or 'none'}; not expected: {extra or 'none'}" if missing or extra else ""


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(map(_short, ordered[:3])) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")


def _value_fault(name: str, tensor: torch.Tensor, limits: Limits) -> str:
    expected = limits.like[name]
    if tensor.dtype != expected.dtype:
        return f"{name} has type {tensor.dtype}, expected {expected.dtype}"
    if tensor.shape != expected.shape:
        return f"{name} has shape {tuple(tensor.shape)}, expected {tuple(expected.shape)}"
    if not tensor.numel() or not tensor.is_floating_point():
        return ""
    norm = torch.linalg.vector_norm(tensor, dtype=torch.float64).item() / math.sqrt(tensor.numel())
    if not math.isfinite(norm) and not tensor.isfinite().all():
        return f"{name} has values that are NaN or infinite"
    fine = norm <= limits.largest_norm
    return "" if fine else f"{name} has root mean square {norm:.3g}, above {limits.largest_norm:g}"


def _short(value: object) -> str:
    """Return a value that a stranger sent, in one short line."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # whatever it is, the fault must be told; a whole number may be too long to print
        text = f"of type {type(value).__name__}"
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 3]}..."
