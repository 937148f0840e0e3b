"""What of a module can be federated and made Bayesian, what cannot, and the fix."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod

from metabayfl.options import InputError

Bayesian = Literal["none", "auto", "all", "dense", "last"]
DENSE = (nn.Linear, nn.Bilinear, nn.MultiheadAttention)
BAYESIAN = (*DENSE, _ConvNd, nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.RNNCellBase)
OLD_HOOKS = ("WeightNorm", "SpectralNorm")


class Problem(NamedTuple):
    """Something that stands in the way, and what to do about it."""

    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.fix}"


class Role(NamedTuple):
    """A trainable or frozen parameter and the part it can play; a tied one has several owners."""

    name: str
    parameter: nn.Parameter
    owners: list[nn.Module]

    @property
    def can_be_bayesian(self) -> bool:
        """Weights and biases of linear, convolution, embedding and recurrent layers."""
        return self.belongs_to(BAYESIAN)

    @property
    def is_dense(self) -> bool:
        """Weights and biases of fully connected layers."""
        return self.belongs_to(DENSE)

    @property
    def is_batchnorm(self) -> bool:
        """Scale and shift of a BatchNorm layer."""
        return self.belongs_to((_BatchNorm,))

    @property
    def fan_in(self) -> int:
        """Inputs of a unit of the layer that a weight or bias belongs to; 0 for scales and shifts of norm layers."""
        if not self.can_be_bayesian:
            return 0
        owner = self.owners[0]
        weights = [self.parameter] if self.parameter.ndim > 1 else [p for p in owner.parameters(False) if p.ndim > 1]
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag) or not weights:
            return 1
        units = weights[0].shape[1 if isinstance(owner, _ConvTransposeNd) else 0]
        return weights[0].numel() // units

    def belongs_to(self, layers: tuple[type[nn.Module], ...]) -> bool:
        """Whether one of the owners is such a layer."""
        return any(isinstance(owner, layers) for owner in self.owners)


@dataclass(frozen=True)
class Report:
    """The answer of `check`; printing it tells a person everything."""

    problems: tuple[Problem, ...]
    bayesian: tuple[str, ...]
    deterministic: tuple[str, ...]
    frozen: tuple[str, ...]
    buffers: tuple[str, ...]
    parameters: int

    @property
    def ok(self) -> bool:
        """Whether the module can be federated."""
        return not self.problems

    def __str__(self) -> str:
        if self.problems:
            return "\n".join(["cannot be federated:", *(f"  {problem}" for problem in self.problems)])
        lines = [f"can be federated: {self.parameters:,} trainable parameters"]
        for title, names in (
            ("Bayesian", self.bayesian),
            ("deterministic (a mean only)", self.deterministic),
            ("frozen (kept as they are, never sent)", self.frozen),
            ("buffers that travel with the model", self.buffers),
        ):
            if names:
                lines.append(f"  {title}: {', '.join(names)}")
        if not self.bayesian:
            lines.append("  no layer can be made Bayesian: Bayesian methods will refuse this module")
        return "\n".join(lines)


def check(module: nn.Module) -> Report:
    """Say what of a module is trained, what can be Bayesian, and what stands in the way."""
    problems = tuple(find_problems(module))
    if problems:
        return Report(problems, (), (), (), (), 0)
    found = roles(module)
    trained = [role for role in found if role.parameter.requires_grad]
    return Report(
        problems=(),
        bayesian=tuple(role.name for role in trained if role.can_be_bayesian),
        deterministic=tuple(role.name for role in trained if not role.can_be_bayesian),
        frozen=tuple(role.name for role in found if not role.parameter.requires_grad),
        buffers=tuple(name for name, _ in travelling_buffers(module)),
        parameters=sum(role.parameter.numel() for role in trained),
    )


def roles(module: nn.Module) -> list[Role]:
    """Each parameter once, in order, with the modules that own it; tied parameters stand where they come first."""
    found: dict[int, Role] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in owner.named_parameters(prefix, recurse=False):
            found.setdefault(id(parameter), Role(name, parameter, [])).owners.append(owner)
    return list(found.values())


def choose_bayesian(
    trained: Sequence[Role], bayesian: Bayesian, deterministic: Sequence[str], order: Mapping[nn.Module, int]
) -> set[str]:
    """Return the names of the parameters that get a spread; `order` numbers the layers."""
    if bayesian == "none":
        return set()
    for pattern in deterministic:
        if not any(fnmatchcase(role.name, pattern) for role in trained):
            raise InputError(
                f"deterministic: no parameter is named {pattern!r}; metabayfl.check(model) lists the names"
            )
    able = [role for role in trained if role.can_be_bayesian and not is_named(role.name, deterministic)]
    dense = [role for role in able if role.is_dense]
    if bayesian == "dense" or (bayesian == "auto" and dense):
        able = dense
    if bayesian == "last" and able:
        last = max((owner for role in able for owner in role.owners), key=order.__getitem__)
        able = [role for role in able if last in role.owners]
    if not able:
        raise InputError(f"bayesian = {bayesian!r}: no such layer here; metabayfl.check(model) lists what there is")
    return {role.name for role in able}


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns fits a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def travelling_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Floating-point buffers of the state_dict, such as running statistics; counters and masks stay where they are."""
    saved = module.state_dict(keep_vars=True).keys()
    for name, buffer in module.named_buffers():
        if name in saved and buffer.is_floating_point() and bool(buffer.isfinite().all()):
            yield name, buffer


def find_problems(module: nn.Module) -> Iterator[Problem]:
    """Everything that stands in the way of federating this module."""
    if not isinstance(module, nn.Module):
        yield Problem(type(module).__name__, "is not an nn.Module", "pass a torch.nn.Module")
        return
    for path, owner in module.named_modules():
        yield from _layer_problems(path or type(owner).__name__, owner)
    trained = [role for role in roles(module) if role.parameter.requires_grad]
    if not trained:
        yield Problem(
            type(module).__name__, "has no trainable parameters", "set requires_grad on what should be trained"
        )
    types = sorted({str(role.parameter.dtype) for role in trained})
    if len(types) > 1:
        yield Problem(type(module).__name__, f"mixes parameter types {', '.join(types)}", "call module.float()")
    for role in trained:
        yield from _parameter_problems(role)


def _layer_problems(path: str, owner: nn.Module) -> Iterator[Problem]:
    if isinstance(owner, LazyModuleMixin) and owner.has_uninitialized_params():
        yield Problem(path, "is not initialised yet (a lazy module)", "run one forward pass before")
    if parametrize.is_parametrized(owner):
        yield Problem(path, "is parametrised", "bake it in with torch.nn.utils.parametrize.remove_parametrizations")
    hooks = [type(hook).__name__ for hook in owner._forward_pre_hooks.values()]
    if any(name in OLD_HOOKS for name in hooks):
        yield Problem(path, "recomputes its weight before each call", "call remove_weight_norm / remove_spectral_norm")
    if any(isinstance(hook, BasePruningMethod) for hook in owner._forward_pre_hooks.values()):
        yield Problem(path, "is pruned", "make it permanent with torch.nn.utils.prune.remove")
    if isinstance(owner, _BatchNorm) and owner.momentum is None and owner.track_running_stats:
        yield Problem(path, "averages over all batches ever seen (momentum=None)", "set momentum=0.1")
    if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
        if owner.sparse:
            yield Problem(path, "has sparse gradients", "build it with sparse=False")
        if owner.max_norm is not None:
            yield Problem(path, "rescales its own weight in forward (max_norm)", "build it with max_norm=None")


def _parameter_problems(role: Role) -> Iterator[Problem]:
    parameter = role.parameter
    if parameter.dtype not in (torch.float32, torch.float64):
        yield Problem(role.name, f"has type {parameter.dtype}", "float32 or float64 is accepted: call module.float()")
    elif parameter.device.type != "cpu":
        yield Problem(role.name, f"lies on {parameter.device}", "training runs on the CPU: call module.cpu()")
