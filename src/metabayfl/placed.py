"""A module whose parameters are views of one flat vector: models go in and out by names, by parts, or as modules."""

import copy
from collections.abc import Sequence
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from metabayfl.inspection import (
    Bayesian,
    Role,
    choose_bayesian,
    find_problems,
    is_named,
    roles,
    travelling_buffers,
)
from metabayfl.layout import Layout
from metabayfl.types import InputError, Params

BatchNormPolicy = Literal["average", "local"]
PARTS = ("mu", "rho", "buffers")
"""What of a model has a place in the vectors."""
FREQUENCIES = "log_frequencies"
"""What a client's own model may have besides: it is added to the outputs."""


class PlacedModule:
    """One module, copied, whose parameters are views of one flat vector.

    The vector has the Bayesian parameters first, then the deterministic ones, and last those that never leave the
    client (BatchNorm under the policy `local`). `weights` is what the next pass uses; `gradient` is where a backward
    pass leaves its result, with room behind it for the gradient of `rho`. `fan_in` has the inputs of each weight's
    unit, 0 where a prior makes no sense.
    """

    def __init__(
        self,
        module: nn.Module,
        bayesian: Bayesian,
        deterministic: Sequence[str],
        batchnorm: BatchNormPolicy,
        channels_last: bool | None,
    ) -> None:
        problems = list(find_problems(module))
        if problems:
            raise InputError("this model cannot be federated: " + " | ".join(map(str, problems)))
        self.module = _copy(module)
        self.channels_last = has_convolutions(module) if channels_last is None else channels_last
        self._place_parameters(bayesian, deterministic, batchnorm == "local")
        self._place_buffers(batchnorm == "local")

    def _place_parameters(self, bayesian: Bayesian, deterministic: Sequence[str], local: bool) -> None:
        trained = [role for role in roles(self.module) if role.parameter.requires_grad]
        order = {layer: number for number, layer in enumerate(self.module.modules())}
        noisy = choose_bayesian(trained, bayesian, deterministic, order)
        segments = [
            [role for role in trained if role.name in noisy],
            [role for role in trained if role.name not in noisy and not (local and role.is_batchnorm)],
            [role for role in trained if local and role.is_batchnorm],
        ]
        ordered = [role for segment in segments for role in segment]
        self.layout = Layout.of((role.name, role.parameter.shape, self._is_channels_last(role)) for role in ordered)
        sizes = [sum(role.parameter.numel() for role in segment) for segment in segments]
        self.size = sum(sizes)
        self.bayesian_size = sizes[0]
        self.shared_size = sizes[0] + sizes[1]
        self.weights = torch.empty(self.size, dtype=ordered[0].parameter.dtype)
        self.gradient = torch.zeros(self.size + self.bayesian_size, dtype=self.weights.dtype)
        for slot, role in zip(self.layout.slots, ordered, strict=True):
            view = slot.view(self.weights)
            view.copy_(role.parameter.data)
            role.parameter.data = view
            role.parameter.grad = slot.view(self.gradient)
        self._initial_weights = self.weights.clone()
        inputs = [0 if is_named(role.name, deterministic) else role.fan_in for role in ordered]
        self.fan_in = torch.tensor(inputs, dtype=self.weights.dtype).repeat_interleave(
            torch.tensor([role.parameter.numel() for role in ordered])
        )

    def _is_channels_last(self, role: Role) -> bool:
        return self.channels_last and role.belongs_to((nn.Conv2d,)) and role.parameter.ndim == 4

    def _place_buffers(self, local: bool) -> None:
        owners = dict(self.module.named_modules())
        found = list(travelling_buffers(self.module))
        private = [local and isinstance(owners[name.rpartition(".")[0]], _BatchNorm) for name, _ in found]
        ordered = sorted(zip(private, found, strict=True), key=lambda item: item[0])
        self.buffer_layout = Layout.of((name, buffer.shape, False) for _, (name, buffer) in ordered)
        self.shared_buffers = sum(buffer.numel() for is_private, (_, buffer) in ordered if not is_private)
        self._initial_buffers = self.buffers()
        moving = {slot.name for slot in self.buffer_layout.slots}
        self._constants = {n: b.clone() for n, b in self.module.named_buffers() if n not in moving}

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or sent: the copy's parameters would no longer be views of its vector."""
        raise TypeError("a Task cannot be copied; make another one from the module")

    @property
    def has_private_part(self) -> bool:
        """Whether a part of the model never leaves the client."""
        return self.shared_size < self.size or self.shared_buffers < self.buffer_layout.size

    def initial(self) -> Params:
        """Return the model as the user gave it."""
        model = {"mu": self._initial_weights.clone()}
        return model | {"buffers": self._initial_buffers.clone()} if self.buffer_layout.slots else model

    def load(self, model: Params) -> None:
        """Make the next passes use this model's mean and buffers."""
        self.weights.copy_(model["mu"])
        self.load_buffers(model)

    def load_buffers(self, model: Params) -> None:
        """Write a model's buffers into the module; what does not travel is put back to how the user gave it."""
        for slot in self.buffer_layout.slots:
            self.module.get_buffer(slot.name).copy_(slot.view(model["buffers"]))
        for name, constant in self._constants.items():
            self.module.get_buffer(name).data = constant.clone()

    def constants(self) -> Params:
        """Copy out what is neither trained nor sent, by name: frozen parameters and the buffers that do not travel."""
        frozen = {name: p.detach().clone() for name, p in self.module.named_parameters() if not p.requires_grad}
        return frozen | {name: buffer.clone() for name, buffer in self._constants.items()}

    def load_constants(self, constants: Params) -> None:
        """Undo `constants`."""
        parameters = dict(self.module.named_parameters())
        for name, value in constants.items():
            (self._constants if name in self._constants else parameters)[name].data.copy_(value)

    def buffers(self) -> Tensor:
        """Copy out the buffers."""
        flat = torch.empty(self.buffer_layout.size, dtype=self.weights.dtype)
        for slot in self.buffer_layout.slots:
            slot.view(flat).copy_(self.module.get_buffer(slot.name))
        return flat

    def with_buffers(self, model: Params) -> Params:
        """Add the buffers that the passes have left to a model, if the module has any."""
        return model | {"buffers": self.buffers()} if self.buffer_layout.slots else model

    def split(self, model: Params) -> tuple[Params, Params]:
        """Separate what is sent from what never leaves the client (BatchNorm under the policy `local`)."""
        if not self.has_private_part:
            return model, {}
        shared = model | {"mu": model["mu"][: self.shared_size].clone()}
        private = {"private.mu": model["mu"][self.shared_size :].clone()}
        if "buffers" in model:
            shared["buffers"] = model["buffers"][: self.shared_buffers].clone()
            private["private.buffers"] = model["buffers"][self.shared_buffers :].clone()
        return shared, private

    def join(self, shared: Params, state: Params) -> Params:
        """Undo `split`; a client that has no private part yet takes the user's initial one."""
        model: Params = {name: shared[name] for name in PARTS if name in shared}
        for name, initial in self.initial().items():
            if len(model[name]) < len(initial):
                own = state.get(f"private.{name}", initial[len(model[name]) :])
                model[name] = torch.cat([model[name], own])
        return model

    def named(self, model: Params) -> Params:
        """Return a model by the names of its parameters: `mu.NAME`, `rho.NAME`, `buffers.NAME`; frequencies as they
        are."""
        besides = {FREQUENCIES: model[FREQUENCIES]} if FREQUENCIES in model else {}
        return besides | {
            f"{part}.{name}": tensor
            for part, flat in model.items()
            if part not in besides
            for name, tensor in self._layout_of(part).unflatten(flat).items()
        }

    def from_named(self, tensors: Params) -> Params:
        """Undo `named`."""
        parts: dict[str, Params] = {"buffers": {}} if self.buffer_layout.slots else {}
        besides = {FREQUENCIES: tensors[FREQUENCIES]} if FREQUENCIES in tensors else {}
        for key, tensor in tensors.items():
            part, _, name = key.partition(".")
            if key not in besides:
                parts.setdefault(part, {})[name] = tensor
        return {part: self._layout_of(part).flatten(named) for part, named in parts.items()} | besides

    def _layout_of(self, part: str) -> Layout:
        return self.buffer_layout if part == "buffers" else self.layout

    def export(self, mu: Tensor, buffers: Tensor | None = None) -> nn.Module:
        """Return a plain module of the user's class with these weights."""
        module = copy.deepcopy(self.module)
        moving = self.buffer_layout.unflatten(self._initial_buffers if buffers is None else buffers)
        named = self._constants | moving | self.layout.unflatten(mu)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            tensor.grad = None
            value = named.get(name, tensor.detach()).to(tensor.dtype)
            tensor.data = value.clone(memory_format=torch.contiguous_format)
        return module.eval()


def has_convolutions(module: nn.Module) -> bool:
    """Whether the channels-last memory format makes sense."""
    return any(isinstance(layer, nn.Conv2d) for layer in module.modules())


def _copy(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise InputError(f"the model cannot be copied (copy.deepcopy: {error}); give one that can") from None
