"""Is an update what it should be? Every engine asks before a server averages it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from metabayfl.types import Params, Received

LARGEST_METRICS = 64


@dataclass(frozen=True)
class Limits:
    """What an update may look like: the tensors a server expects, and bounds on weight and size."""

    like: Params
    largest_weight: float = 1e9
    largest_norm: float = 1e6
    """Largest root mean square of a tensor."""


def find_fault(update: Received, limits: Limits) -> str:
    """Return what is wrong with an update; an empty text if nothing is."""
    return (
        _weight_fault(update.weight, limits)
        or _metrics_fault(update.metrics)
        or _names_fault(update.payload, limits.like)
        or next(filter(None, (_tensor_fault(n, t, limits) for n, t in update.payload.items())), "")
    )


def _weight_fault(weight: object, limits: Limits) -> str:
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
        return f"weight {weight!r} is not a finite number"
    return "" if 0 < weight <= limits.largest_weight else f"weight {weight:g} is not in (0, {limits.largest_weight:g}]"


def _metrics_fault(metrics: object) -> str:
    if not isinstance(metrics, Mapping) or len(metrics) > LARGEST_METRICS:
        return f"metrics are not a mapping of at most {LARGEST_METRICS} numbers"
    bad = [k for k, v in metrics.items() if not isinstance(k, str) or not isinstance(v, (int, float))]
    return f"metric {bad[0]!r} is not a number" if bad else ""


def _names_fault(payload: object, like: Params) -> str:
    if not isinstance(payload, Mapping):
        return "the payload is not a mapping of tensors"
    missing, extra = sorted(like.keys() - payload.keys()), sorted(map(str, payload.keys() - like.keys()))
    if missing or extra:
        return f"tensors missing: {', '.join(missing) or 'none'}; not expected: {', '.join(extra[:3]) or 'none'}"
    return ""


def _tensor_fault(name: str, tensor: object, limits: Limits) -> str:
    expected = limits.like[name]
    if not isinstance(tensor, torch.Tensor):
        return f"{name} is not a tensor"
    if tensor.dtype != expected.dtype:
        return f"{name} has type {tensor.dtype}, expected {expected.dtype}"
    if tensor.shape != expected.shape:
        return f"{name} has shape {tuple(tensor.shape)}, expected {tuple(expected.shape)}"
    if not tensor.numel() or not tensor.is_floating_point():
        return ""
    norm = torch.linalg.vector_norm(tensor, dtype=torch.float64).item() / math.sqrt(tensor.numel())
    if not math.isfinite(norm):
        return f"{name} has values that are NaN or infinite"
    large = norm > limits.largest_norm
    return f"{name} has root mean square {norm:.3g}, above {limits.largest_norm:g}" if large else ""
