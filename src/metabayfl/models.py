"""The networks: linear, MLP, the ConvNet of 122,570 parameters, CIFAR ResNets, and any importable callable."""

import importlib
import inspect
import json
import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from metabayfl.types import InputError

SMALLEST_CONVNET = 18
SMALLEST_RESNET = 8
NORM_GROUPS = 8


def build(name: str, *, classes: int = 10, input_shape: tuple[int, ...] = (3, 32, 32), **options: Any) -> nn.Module:
    """Build a network for inputs [B, *input_shape]; `name` is one of NAMES or `module:callable`.

    The result carries `metabayfl_spec`, the plain arguments that rebuild it.
    """
    if not isinstance(input_shape, Sequence) or isinstance(input_shape, str) or not input_shape:
        raise InputError(f"input_shape = {input_shape!r}: give the sizes of one sample, e.g. (3, 32, 32)")
    shape = tuple(_whole("each size in input_shape", size) for size in input_shape)
    outputs = _whole("classes", classes)
    plain = _plain(name, options)
    builder = _builder(name)
    module = builder(**_arguments(name, builder, {"classes": outputs, "input_shape": shape}, plain))
    if not isinstance(module, nn.Module):
        raise InputError(f"model {name!r} returned {type(module).__name__}; it must return a torch.nn.Module")
    module.__dict__["metabayfl_spec"] = {
        "name": name,
        "classes": outputs,
        "input_shape": list(shape),
        "options": plain,
    }
    return module


def _whole(what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise InputError(f"{what} = {value!r}: give a whole number of at least 1")
    return int(value)


def _plain(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as they come back from JSON, so that a first build and a rebuild see the same values."""
    plain = {}
    for option, value in options.items():
        try:
            plain[option] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            raise InputError(
                f"model {name!r}: option {option} = {value!r} cannot be stored; "
                "give finite numbers, strings, booleans, or lists and tables of them"
            ) from None
    return plain


def load_model(name: str) -> nn.Module:
    """Return the model behind a name: a built-in one, what a callable builds, or a module object."""
    found = None if name in _BUILDERS else _imported(name)
    return found if isinstance(found, nn.Module) else build(name)


def _builder(name: str) -> Callable[..., Any]:
    if name in _BUILDERS:
        return _BUILDERS[name]
    found = _imported(name)
    if not callable(found):
        raise InputError(f"model {name!r} is a {type(found).__name__}; it must be a callable that returns a module")
    return found


def _imported(name: str) -> object:
    module, _, attribute = str(name).partition(":")
    if not module or not attribute:
        raise InputError(f"model {name!r} is unknown; accepted: {', '.join(NAMES)} or an import path 'module:callable'")
    try:
        found: object = operator.attrgetter(attribute)(importlib.import_module(module))
    except (ImportError, AttributeError, TypeError, SyntaxError) as error:
        raise InputError(f"model {name!r} cannot be imported ({error}); give 'module:callable'") from error
    return found


def _arguments(
    name: str, builder: Callable[..., Any], sizes: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Join the sizes that the builder accepts with the options, refusing those that it does not."""
    try:
        signature = inspect.signature(builder)
    except (TypeError, ValueError):
        raise InputError(f"model {name!r} does not say what it accepts; give a Python function or class") from None
    kinds = {key: parameter.kind for key, parameter in signature.parameters.items()}
    named = [key for key, kind in kinds.items() if kind in (kind.KEYWORD_ONLY, kind.POSITIONAL_OR_KEYWORD)]
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
    for option, value in options.items():
        if option not in named and not takes_any:
            accepted = ", ".join(key for key in named if key not in sizes) or "none"
            raise InputError(f"model {name!r}: unknown option {option} = {value!r}; accepted: {accepted}")
    arguments = {key: value for key, value in sizes.items() if key in named or takes_any} | dict(options)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise InputError(f"model {name!r} cannot be called with {', '.join(arguments) or 'nothing'}: {error}") from None
    return arguments


def _linear(classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), fc=nn.Linear(math.prod(input_shape), classes)))


def _mlp(classes: int, input_shape: tuple[int, ...], hidden: Sequence[int] = (64,), dropout: float = 0.0) -> nn.Module:
    if not isinstance(hidden, Sequence) or isinstance(hidden, str) or not hidden:
        raise InputError(f"hidden = {hidden!r}: give one or more layer widths, e.g. [64, 64]")
    widths = [math.prod(input_shape), *(_whole("each width in hidden", width) for width in hidden)]
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for index, (before, after) in enumerate(pairwise(widths), start=1):
        layers[f"fc{index}"] = nn.Linear(before, after)
        layers[f"relu{index}"] = nn.ReLU()
        layers |= _dropout(index, dropout)
    layers["head"] = nn.Linear(widths[-1], classes)
    return nn.Sequential(layers)


def _convnet(classes: int, input_shape: tuple[int, ...], dropout: float = 0.0) -> nn.Module:
    channels, height, width = _image("convnet", input_shape, SMALLEST_CONVNET)
    after = [((size - 2) // 2 - 2) // 2 - 2 for size in (height, width)]
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(channels, 32, 3), pool1=nn.MaxPool2d(2), relu1=nn.ReLU(),  # pooled first: the same bits
        conv2=nn.Conv2d(32, 64, 3), pool2=nn.MaxPool2d(2), relu2=nn.ReLU(),        # for a quarter of the ReLUs
        conv3=nn.Conv2d(64, 64, 3), relu3=nn.ReLU(),
    )  # fmt: skip
    layers |= _dropout(1, dropout)
    layers |= {"flatten": nn.Flatten(), "fc1": nn.Linear(64 * math.prod(after), 64), "relu4": nn.ReLU()}
    layers |= _dropout(2, dropout)
    layers["fc2"] = nn.Linear(64, classes)
    return nn.Sequential(layers)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and an option-A shortcut: subsample, pad the channels with zeros, no parameters."""

    def __init__(self, before: int, after: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = norm(after)
        self.stride, self.padding = stride, (after - before) // 2

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(residual + shortcut)."""
        residual = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return F.relu(residual + F.pad(shortcut, (0, 0, 0, 0, self.padding, self.padding)))


def _resnet(
    blocks: int, /, classes: int, input_shape: tuple[int, ...], norm: str = "batch", dropout: float = 0.0
) -> nn.Module:
    channels, _, _ = _image("resnet", input_shape, SMALLEST_RESNET)
    norms: dict[str, Callable[[int], nn.Module]] = {
        "batch": nn.BatchNorm2d,
        "group": partial(nn.GroupNorm, NORM_GROUPS),
    }
    if norm not in list(norms):
        raise InputError(f"norm = {norm!r}: accepted: {', '.join(norms)}")
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(channels, 16, 3, padding=1, bias=False), norm1=norms[norm](16), relu1=nn.ReLU()
    )
    for index, (before, after, stride) in enumerate([(16, 16, 1), (16, 32, 2), (32, 64, 2)], start=1):
        first = BasicBlock(before, after, stride, norms[norm])
        layers[f"stage{index}"] = nn.Sequential(
            first, *(BasicBlock(after, after, 1, norms[norm]) for _ in range(blocks - 1))
        )
        layers |= _dropout(index, dropout)
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    layers |= _dropout(4, dropout)
    layers["fc"] = nn.Linear(64, classes)
    return _kaiming(nn.Sequential(layers))


def _kaiming(module: nn.Module) -> nn.Module:
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return module


def _dropout(index: int, probability: float) -> dict[str, nn.Module]:
    if isinstance(probability, bool) or not isinstance(probability, int | float) or not 0 <= probability < 1:
        raise InputError(f"dropout = {probability!r}: give a probability of at least 0 and below 1")
    return {f"dropout{index}": nn.Dropout(probability)} if probability > 0 else {}


def _image(name: str, input_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise InputError(
            f"{name}: input_shape = {input_shape} does not fit; accepted: (channels, height, width) "
            f"with height and width of at least {smallest}"
        )
    channels, height, width = input_shape
    return channels, height, width


_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "linear": _linear,
    "mlp": _mlp,
    "convnet": _convnet,
    "resnet20": partial(_resnet, 3),
    "resnet32": partial(_resnet, 5),
    "resnet44": partial(_resnet, 7),
    "resnet56": partial(_resnet, 9),
}
NAMES: tuple[str, ...] = tuple(_BUILDERS)
