"""What a user gives becomes tensors: checked once, at the door, with one line for what does not fit."""

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from metabayfl.inputs import holds_numbers
from metabayfl.likelihood import Categorical, Gaussian, Likelihood
from metabayfl.options import InputError

Arrays = tuple[Any, Any]
"""Inputs and labels: numpy arrays, tensors or lists."""
Pair = tuple[Tensor, Tensor]


def as_pair(item: Any, who: str) -> Pair:
    """Return the inputs and labels of one client."""
    x, y = _two(item, who, "(inputs, labels)")
    inputs, labels = as_inputs(x, who), as_labels(y, who)
    if len(inputs) == 0:
        raise InputError(f"{who} is empty: give it samples, or leave it out")
    if len(inputs) != len(labels):
        shape = tuple(labels.shape)
        raise InputError(f"{who} has {len(inputs)} inputs but labels of shape {shape}: one for each input is accepted")
    return inputs, labels


def as_inputs(x: Any, who: str) -> Tensor:
    """Return bytes, which stand for numbers from 0 to 1, as they are, whole numbers as indices, others as float32."""
    tensor = _per_sample(x, who, "inputs")
    if tensor.dtype == torch.uint8:
        return tensor
    if tensor.dtype == torch.bool or tensor.is_floating_point():
        return _finite(tensor.to(torch.float32), who, "inputs")
    return tensor.to(torch.int64)


def as_labels(y: Any, who: str) -> Tensor:
    """Return whole numbers as classes, real ones as float32."""
    tensor = _per_sample(y, who, "labels")
    return _finite(tensor.to(torch.float32), who, "labels") if tensor.is_floating_point() else tensor.to(torch.int64)


def stack_samples(dataset: Dataset[Any], who: str) -> Arrays:
    """Return all samples of a map-style dataset as one pair."""
    length = len(dataset) if hasattr(dataset, "__len__") else 0
    if not length:
        raise InputError(f"{who} is an empty dataset or has no length; a map-style torch Dataset is accepted")
    samples = [_two(dataset[index], f"{who}, sample {index}", "(input, label)") for index in range(length)]
    return _stack([x for x, _ in samples], who, "inputs"), _stack([y for _, y in samples], who, "labels")


def _stack(values: list[Any], who: str, what: str) -> Tensor:
    tensors = [_tensor(value, f"{who}, sample {index}", what) for index, value in enumerate(values)]
    for index, tensor in enumerate(tensors):
        if tensor.shape != tensors[0].shape:
            first, other = tuple(tensors[0].shape), tuple(tensor.shape)
            raise InputError(
                f"{who}: {what} of shape {first} in sample 0, {other} in sample {index}; give all the same"
            )
    return torch.stack(tensors)


def _two(item: Any, who: str, what: str) -> Arrays:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        length = f" of {len(item)}" if isinstance(item, (tuple, list)) else ""
        raise InputError(f"{who} is a {type(item).__name__}{length}; a pair {what} is accepted")
    return item[0], item[1]


def _per_sample(values: Any, who: str, what: str) -> Tensor:
    tensor = _tensor(values, who, what)
    if tensor.ndim == 0:
        raise InputError(f"{who}: the {what} are a single number, {tensor.item()}; one for each sample is accepted")
    return tensor


def _tensor(values: Any, who: str, what: str) -> Tensor:
    """Return numbers of any origin as a tensor on the CPU."""
    try:
        tensor = values.detach().cpu() if isinstance(values, Tensor) else torch.from_numpy(_array(values))
    except (TypeError, ValueError, RuntimeError) as error:
        reason = "rows of different lengths" if "inhomogeneous" in str(error) else str(error).splitlines()[0]
        raise InputError(f"{who}: the {what} are not an array of numbers ({reason})") from None
    if tensor.is_complex():
        raise InputError(f"{who}: the {what} are complex; real or whole numbers are accepted")
    return tensor


def _array(values: Any) -> np.ndarray:
    """Return an array that torch can take: writable, in the machine's byte order and without negative strides."""
    array = np.asarray(values)
    if array.dtype.kind not in "biufc":
        raise TypeError(f"type {array.dtype}")
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return np.require(native, requirements=["C", "W"])


def _finite(tensor: Tensor, who: str, what: str) -> Tensor:
    bad = ~tensor.isfinite()
    if bad.any():
        first = int(bad.reshape(len(bad), -1).any(1).nonzero()[0])
        count = f"{int(bad.sum())} of {bad.numel()} numbers"
        raise InputError(f"{who}: {count} in the {what} are NaN or infinite, first in sample {first}; give finite ones")
    return tensor


def check_alike(x: Tensor, who: str, first: Tensor) -> None:
    """Refuse inputs of another shape or kind than those of the first client."""
    if x.shape[1:] != first.shape[1:]:
        shapes = f"{tuple(x.shape[1:])}, client 0 of shape {tuple(first.shape[1:])}"
        raise InputError(f"{who} has inputs of shape {shapes}; give all the same")
    if holds_numbers(x) != holds_numbers(first):
        kinds = ["real", "whole-number"][:: 1 if holds_numbers(x) else -1]
        raise InputError(f"{who} has {kinds[0]} inputs, client 0 {kinds[1]} ones; give all the same kind")


def of_one_type(pairs: Mapping[str, Pair]) -> list[Pair]:
    """Return clients' samples for one tensor: bytes stay bytes only if everybody has them."""
    types = {x.dtype for x, _ in pairs.values()}
    return [(x / 255 if x.dtype == torch.uint8 and len(types) > 1 else x, y) for x, y in pairs.values()]


def likelihood_of(pairs: Mapping[str, Pair], classes: int | None, noise_std: float) -> Likelihood:
    """Check that everybody has the same kinds of inputs and labels, and choose the likelihood."""
    first_x, first_y = next(iter(pairs.values()))
    for who, (x, y) in pairs.items():
        check_alike(x, who, first_x)
        if y.is_floating_point() != first_y.is_floating_point():
            raise InputError(
                f"{who} and client 0 differ: whole-number labels mean classes, real ones regression; give all the same"
            )
        if y.is_floating_point() and y.shape[1:] != first_y.shape[1:]:
            shapes = f"{tuple(y.shape)}, client 0 of shape {tuple(first_y.shape)}"
            raise InputError(f"{who} has labels of shape {shapes}; give all the same number of targets")
    if first_y.is_floating_point():
        if isinstance(noise_std, bool) or not isinstance(noise_std, Real) or not 0 < noise_std < math.inf:
            raise InputError(f"noise_std = {noise_std!r}: a positive number is accepted")
        return Gaussian(float(noise_std))
    return _categorical({who: y for who, (_, y) in pairs.items()}, classes)


def _categorical(labels: Mapping[str, Tensor], classes: int | None) -> Categorical:
    for who, y in labels.items():
        if y.ndim != 1:
            raise InputError(
                f"{who} has labels of shape {tuple(y.shape)}; one class number for each sample is accepted"
            )
        if y.min() < 0:
            raise InputError(f"{who} has the label {int(y.min())}; classes are numbered from 0")
    highest = {who: int(y.max()) for who, y in labels.items()}
    count = max(highest.values()) + 1 if classes is None else whole("classes", classes, 2)
    for who, high in highest.items():
        if high >= count:
            raise InputError(f"{who} has the label {high}; 0 to {count - 1} is accepted with classes = {count}")
    if count < 2:
        raise InputError("all labels are 0: at least 2 classes are needed (classes=2 if the others are only absent)")
    return Categorical(count)


def whole(name: str, value: Any, least: int) -> int:
    """Return a whole number of some least size, refusing anything else."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{name} = {value!r}: a whole number from {least} is accepted")
    return int(value)


def check_fraction(name: str, value: Any) -> None:
    """Refuse what is not a share of samples that leaves some behind."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
        raise InputError(f"{name} = {value!r}: a number from 0 to below 1 is accepted")


def batch_sizes(batch_size: int | Sequence[int], clients: int) -> list[int]:
    """Return the mini-batch size of each client."""
    sizes: list[Any] = [*batch_size] if isinstance(batch_size, (list, tuple, np.ndarray)) else [batch_size] * clients
    whole_numbers = all(isinstance(size, Integral) and not isinstance(size, bool) and int(size) >= 1 for size in sizes)
    if len(sizes) != clients or not whole_numbers:
        raise InputError(
            f"batch_size = {batch_size!r}: a whole number from 1 is accepted, or one for each of the {clients} clients"
        )
    return [int(size) for size in sizes]
