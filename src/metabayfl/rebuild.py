"""Describe a module in plain values and build it again, without pickle and without importing anything new."""

import inspect
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from metabayfl import models
from metabayfl.options import InputError
from metabayfl.randomness import keyed_globals


def describe_model(module: nn.Module) -> dict[str, Any]:
    """Return its class, and what is needed to build it again if that can be known."""
    about: dict[str, Any] = {"class": f"{type(module).__module__}:{type(module).__qualname__}"}
    if hasattr(module, "metabayfl_spec"):
        return about | {"spec": module.metabayfl_spec}
    with keyed_globals("rebuild"):
        layers = _describe_layers(module)
    return about if layers is None else about | {"layers": layers}


def rebuild_model(about: dict[str, Any], frozen: Iterable[str], where: str) -> nn.Module:
    """Build a module from its description; a class of the user's must be imported already and need no arguments."""
    with keyed_globals("rebuild"):
        module = _rebuild(about, where)
    names = set(frozen)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in names)
    return module


def _rebuild(about: dict[str, Any], where: str) -> nn.Module:
    if "spec" in about:
        spec = about["spec"]
        shape = tuple(spec["input_shape"])
        return models.build(spec["name"], classes=spec["classes"], input_shape=shape, **spec["options"])
    if "layers" in about:
        return _build_layers(about["layers"])
    module, _, name = about["class"].partition(":")
    found = getattr(sys.modules.get(module), name, None)
    if isinstance(found, type) and issubclass(found, nn.Module):
        required = [p for p in inspect.signature(found).parameters.values() if p.default is p.empty]
        if not required:
            return found()
    raise InputError(f"{where} holds weights of your class {name}: pass one, as in load({where!r}, model={name}(...))")


def _describe_layers(module: nn.Module) -> dict[str, Any] | None:
    """Describe a tree of torch.nn.Sequential and torch.nn layers; None if anything else is in it."""
    if type(module) is nn.Sequential:
        inner = {name: _describe_layers(child) for name, child in module.named_children()}
        return None if None in inner.values() else {"class": "Sequential", "children": inner}
    if getattr(nn, type(module).__name__, None) is not type(module) or any(module.children()):
        return None
    described = {"class": type(module).__name__, "arguments": _arguments(module)}
    try:
        same = described["arguments"] is not None and repr(_build_layers(described)) == repr(module)
    except (TypeError, ValueError):
        return None
    return described if same else None


def _arguments(module: nn.Module) -> dict[str, Any] | None:
    """Read a layer's constructor arguments back from its attributes; None if one is not a plain value."""
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(module)).parameters.items():
        if name in ("device", "dtype") or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        value = getattr(module, name, parameter.default)
        if name == "bias" and not isinstance(value, bool):
            value = value is not None
        if not isinstance(value, (bool, int, float, str, tuple, type(None))):
            return None
        arguments[name] = value
    return arguments


def _build_layers(about: dict[str, Any]) -> nn.Module:
    if about["class"] == "Sequential":
        sequence = nn.Sequential()
        for name, child in about["children"].items():
            sequence.add_module(name, _build_layers(child))
        return sequence
    layer = getattr(nn, about["class"], None)
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise InputError(f"{about['class']!r} is not a layer of torch.nn")
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in about["arguments"].items()}
    built: nn.Module = layer(**arguments)
    return built
