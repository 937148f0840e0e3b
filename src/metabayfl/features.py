"""Penultimate features of any network: what goes into its last dense layer."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from metabayfl.options import InputError


class Seen(NamedTuple):
    """The outputs of a pass, and the features [samples, features] that the last layer has made them of."""

    outputs: Tensor
    features: Tensor


def last_dense(name: str, module: nn.Module) -> nn.Linear:
    """Return the last layer with parameters, in the order of the module; for method `name` it must be a dense one."""
    last = [layer for layer in module.modules() if any(True for _ in layer.parameters(recurse=False))][-1]
    if not isinstance(last, nn.Linear):
        raise InputError(
            f"{name} looks at what goes into the last dense layer, and the last layer is {type(last).__name__}: "
            "a model that ends with nn.Linear is accepted"
        )
    return last


def watch(layer: nn.Linear, compute: Callable[[Tensor], Tensor], x: Tensor) -> Seen:
    """Pass inputs through a network and catch what goes into one of its layers, with its graph if there is one."""
    caught: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, arguments: caught.append(arguments[0]))
    try:
        outputs = compute(x)
    finally:
        handle.remove()
    features = torch.cat(caught).flatten(1) if caught else torch.empty(0)
    if len(features) != len(x):
        raise InputError("the last dense layer must be called once for each sample; this model calls it otherwise")
    return Seen(outputs, features)
