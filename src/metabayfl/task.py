"""A model as a pure function of flat vectors: parameters and buffers in, outputs or gradients out."""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from metabayfl.inputs import Preparation, Scaling
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
from metabayfl.likelihood import Likelihood
from metabayfl.types import InputError, Params

BatchNormPolicy = Literal["average", "local"]
EVALUATION_BATCH = 512


class Task:
    """One module, copied, whose parameters are views of one flat vector.

    The vector has the Bayesian parameters first, then the deterministic ones, and last those that never leave the
    client (BatchNorm under the policy `local`). `weights` is what the next pass uses; `gradient` is where a backward
    pass leaves its result, with room behind it for the gradient of `rho`. `fan_in` has the inputs of each weight's
    unit, 0 where a prior makes no sense. A pass is counted for each sample.
    """

    def __init__(
        self,
        module: nn.Module,
        likelihood: Likelihood,
        *,
        bayesian: Bayesian = "none",
        deterministic: Sequence[str] = (),
        batchnorm: BatchNormPolicy = "average",
        channels_last: bool | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        problems = list(find_problems(module))
        if problems:
            raise InputError("this model cannot be federated: " + " | ".join(map(str, problems)))
        self.likelihood = likelihood
        self.scaling = scaling
        self.module = _copy(module)
        self.channels_last = has_convolutions(module) if channels_last is None else channels_last
        self._place_parameters(bayesian, deterministic, batchnorm == "local")
        self._place_buffers(batchnorm == "local")
        self.prepare = Preparation(self.weights.dtype, self.channels_last, scaling)
        self.module.train()
        self.forward_passes = self.backward_passes = 0
        self._split: dict[bool, tuple[nn.Module | None, nn.Module]] = {}

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

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean negative log-likelihood of a mini-batch at `weights`; its gradient is left in `gradient`."""
        nll = self.loss(x, y)
        self.differentiate(nll, len(x))
        return nll.detach()

    def mirrored_backward(self, x: Tensor, y: Tensor, mirror: Callable[[], None]) -> tuple[Tensor, Tensor]:
        """Like `backward`, but `mirror` changes the noisy weights before the second half of the mini-batch is passed.

        Returns the NLL and the first half's part of the noisy weights' gradient. What comes before the first noisy
        layer is passed only once.
        """
        half = (len(x) + 1) // 2
        body, head = self._halves(dropout=False)
        self._train(len(x))
        features = self.prepare(x) if body is None else body(self.prepare(x))
        halves = [part.detach().requires_grad_(features.requires_grad) for part in features.split(half)]

        def pass_half(seen: Tensor, labels: Tensor) -> Tensor:
            nll = self.likelihood.nll(head(seen), labels) * (len(labels) / len(y))
            nll.backward()  # type: ignore[no-untyped-call]
            return nll.detach()

        self.gradient.zero_()
        nll = pass_half(halves[0], y[:half])
        first = self.gradient[: self.bayesian_size].clone()
        mirror()
        nll += pass_half(halves[1], y[half:])
        if features.requires_grad:
            features.backward(torch.cat([part.grad for part in halves if part.grad is not None]))
        self.backward_passes += len(x)
        return nll, first

    def differentiate(self, loss: Tensor, samples: int) -> None:
        """Leave the gradient of a loss of so many samples, which has its graph, in `gradient`."""
        self.gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        self.backward_passes += samples

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean negative log-likelihood of a mini-batch at `weights` in training mode, with its graph."""
        return self.likelihood.nll(self.forward(x), y)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs at `weights` in training mode, with their graph."""
        self._train(len(x))
        outputs: Tensor = self.module(self.prepare(x))
        return outputs

    def _train(self, samples: int) -> None:
        """Be in training mode, and count so many samples that are passed."""
        if not self.module.training:
            self.module.train()
        self.forward_passes += samples

    def consult(self, model: Params, x: Tensor) -> Tensor:
        """Outputs of another model in evaluation mode; the buffers of the one in training are put back."""
        buffers = self.buffers()
        self.load(model)
        outputs = self.outputs(x)
        self.load_buffers({"buffers": buffers})
        return outputs

    @torch.no_grad()
    def outputs(self, x: Tensor) -> Tensor:
        """Outputs at `weights` in evaluation mode."""
        self.module.eval()
        self.forward_passes += len(x)
        return torch.cat([self.module(self.prepare(piece)) for piece in torch.split(x, EVALUATION_BATCH)])

    @torch.no_grad()
    def drawn_outputs(self, x: Tensor, draws: Callable[[], Iterable[None]], *, dropout: bool = False) -> Tensor:
        """Outputs [draws, batch, ...] in evaluation mode, at the weights that each draw puts into `weights`.

        All draws are made anew for every piece of x; what comes before the first noisy layer is passed only once. With
        `dropout` the dropout layers, and only they, go on dropping out.
        """
        self.module.eval()
        for layer in self._dropout_layers() if dropout else ():
            layer.train()
        pieces = [self._drawn(piece, draws(), dropout) for piece in torch.split(x, EVALUATION_BATCH)]
        return torch.cat(pieces, dim=1)

    def _drawn(self, x: Tensor, draws: Iterable[None], dropout: bool) -> Tensor:
        body, head = self._halves(dropout)
        features, outputs = None, []
        for _ in draws:
            if body is None or features is None:
                self.forward_passes += len(x)
                features = self.prepare(x) if body is None else body(self.prepare(x))
            outputs.append(head(features.clone() if body is not None else features))
        return torch.stack(outputs)

    def _halves(self, dropout: bool) -> tuple[nn.Module | None, nn.Module]:
        """Split a plain sequence of layers before the first one that is noisy; any other module is all head."""
        if dropout not in self._split:
            self._split[dropout] = self._find_halves(dropout)
        return self._split[dropout]

    def _find_halves(self, dropout: bool) -> tuple[nn.Module | None, nn.Module]:
        layers, module = list(self.module.children()), self.module
        if type(module) is not nn.Sequential or module._forward_hooks or module._forward_pre_hooks:
            return None, module
        noisy = {self.module.get_parameter(slot.name) for slot in self.layout.slots if slot.start < self.bayesian_size}
        for place, layer in enumerate(layers):
            drops = dropout and any(isinstance(part, _DropoutNd) for part in layer.modules())
            if drops or not noisy.isdisjoint(layer.parameters()):
                return (module[:place] if place else None), module[place:]
        return None, module

    @property
    def has_dropout(self) -> bool:
        """Whether the module has dropout layers."""
        return bool(self._dropout_layers())

    def _dropout_layers(self) -> list[nn.Module]:
        return [layer for layer in self.module.modules() if isinstance(layer, _DropoutNd)]

    def verify(self, x: Tensor, y: Tensor) -> None:
        """Refuse data that the model cannot take, or a model whose outputs do not fit the labels."""
        self.load(self.initial())
        try:
            outputs = self.outputs(x[:2])
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(f"the model cannot take inputs of shape {tuple(x.shape[1:])}: {reason}") from error
        self.likelihood.check(outputs, y[:2])

    def runs_on(self, x: Tensor) -> bool:
        """Whether the initial model takes these inputs in the task's memory format."""
        self.load(self.initial())
        try:
            self.outputs(x)
        except Exception:  # whatever a stranger's forward raises
            return False
        return True

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
        model: Params = {name: shared[name] for name in ("mu", "rho", "buffers") if name in shared}
        for name, initial in self.initial().items():
            if len(model[name]) < len(initial):
                own = state.get(f"private.{name}", initial[len(model[name]) :])
                model[name] = torch.cat([model[name], own])
        return model

    def named(self, model: Params) -> Params:
        """Return a model by the names of its parameters: `mu.NAME`, `rho.NAME`, `buffers.NAME`."""
        return {
            f"{part}.{name}": tensor
            for part, flat in model.items()
            for name, tensor in self._layout_of(part).unflatten(flat).items()
        }

    def from_named(self, tensors: Params) -> Params:
        """Undo `named`."""
        parts: dict[str, Params] = {"buffers": {}} if self.buffer_layout.slots else {}
        for key, tensor in tensors.items():
            part, _, name = key.partition(".")
            parts.setdefault(part, {})[name] = tensor
        return {part: self._layout_of(part).flatten(named) for part, named in parts.items()}

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
