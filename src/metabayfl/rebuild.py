"""Describe a module in plain values and build it again, without pickle and without importing anything new."""

import copy
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from metabayfl import models
from metabayfl.options import InputError
from metabayfl.randomness import keyed_globals


def describe_model(module: nn.Module) -> dict[str, Any]:
    """Return its class, and what is needed to build it again if that can be known."""
    about: dict[str, Any] = {"class": f"{type(module).__module__}:{type(module).__qualname__}"}
    about["dtype"] = "float64" if _dtype(module) == torch.float64 else "float32"
    spec = getattr(module, "metabayfl_spec", None)
    if spec is not None and (spec["name"] not in models.NAMES or _is_same(lambda: build_spec(spec), module)):
        return about | {"spec": spec}
    layers = json.loads(json.dumps(_describe_layers(module)))
    if layers is not None and _is_same(lambda: _build_layers(layers), module):
        return about | {"layers": layers}
    return about | {"text": _text_hash(module)}


def rebuild_model(about: dict[str, Any], where: str) -> nn.Module:
    """Build a module from its description; a class of the user's must be imported already and need no arguments."""
    with keyed_globals("rebuild"):
        module = _rebuild(about, where)
    dtype = torch.float64 if about["dtype"] == "float64" else torch.float32
    return module if _dtype(module) == dtype else module.to(dtype)


def with_frozen(module: nn.Module, names: Iterable[str]) -> nn.Module:
    """Return a module in which these parameters are frozen and no others; a copy, unless it is so already."""
    frozen = set(names)
    if all(parameter.requires_grad != (name in frozen) for name, parameter in module.named_parameters()):
        return module
    module = copy.deepcopy(module)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return module


def build_spec(spec: dict[str, Any]) -> nn.Module:
    """Build what a config has named. A `module:callable` is imported and called: only for configs that are trusted."""
    shape = tuple(spec["input_shape"])
    return models.build(spec["name"], classes=spec["classes"], input_shape=shape, **spec["options"])


def _rebuild(about: dict[str, Any], where: str) -> nn.Module:
    if "spec" in about:
        spec = about["spec"]
        if spec["name"] in models.NAMES:
            return build_spec(spec)
        sizes = f"classes={spec['classes']}, input_shape={tuple(spec['input_shape'])}"
        call = ", ".join([repr(spec["name"]), sizes, *(f"{key}={value!r}" for key, value in spec["options"].items())])
        raise InputError(f"{where} names code of yours: pass its model, as in load(..., model=models.build({call}))")
    if "layers" in about:
        return _build_layers(about["layers"])
    module, _, name = about["class"].partition(":")
    found = getattr(sys.modules.get(module), name, None)
    if isinstance(found, type) and issubclass(found, nn.Module) and not _required(found):
        built = found()
        if _text_hash(built) == about["text"]:
            return built
    raise InputError(f"{where} holds weights of your class {name}: pass one, as in load({where!r}, model={name}(...))")


def _dtype(module: nn.Module) -> torch.dtype | None:
    return next((tensor.dtype for _, tensor in _tensors(module) if tensor.is_floating_point()), None)


def _required(kind: type[nn.Module]) -> list[str]:
    """Names of the arguments that a class cannot be built without."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(kind).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


def _text_hash(module: nn.Module) -> str:
    text = re.sub(r"0x[0-9a-f]+", "", repr(module))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _is_same(build: Callable[[], nn.Module], module: nn.Module) -> bool:
    """Whether a description, carried out without memory, gives the same layers, names, shapes and ties."""
    changed = any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in module.modules())
    try:
        with keyed_globals("rebuild"), torch.device("meta"):
            return not changed and _form(build()) == _form(module)
    except (TypeError, ValueError):
        return False


def _form(module: nn.Module) -> tuple[str, list[tuple[str, torch.Size, str]]]:
    first: dict[int, str] = {}
    return repr(module), [(name, t.shape, first.setdefault(id(t), name)) for name, t in _tensors(module)]


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _describe_layers(module: nn.Module) -> dict[str, Any] | None:
    """Describe a tree of torch.nn.Sequential and torch.nn layers; None if anything else is in it."""
    if type(module) is nn.Sequential:
        inner = [(name, child if child is None else _describe_layers(child)) for name, child in module._modules.items()]
        return None if any(layer is None for _, layer in inner) else {"class": "Sequential", "children": inner}
    if getattr(nn, type(module).__name__, None) is not type(module) or module._modules:
        return None
    arguments = _arguments(module)
    return None if arguments is None else {"class": type(module).__name__, "arguments": arguments}


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
        for name, child in about["children"]:
            sequence.add_module(name, _build_layers(child))
        return sequence
    layer = getattr(nn, about["class"], None)
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise InputError(f"{about['class']!r} is not a layer of torch.nn")
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in about["arguments"].items()}
    built: nn.Module = layer(**arguments)
    return built
