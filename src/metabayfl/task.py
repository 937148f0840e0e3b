"""A model as a pure function of flat vectors: parameters and buffers in, outputs or gradients out."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.dropout import _DropoutNd

from metabayfl.inputs import Preparation, Scaling
from metabayfl.inspection import Bayesian
from metabayfl.likelihood import Likelihood
from metabayfl.placed import BatchNormPolicy, PlacedModule
from metabayfl.types import InputError, Params

EVALUATION_BATCH = 256
"""With 512 a pass of ConvNet was measured to take 1.6 times as long; its activations are then blocks above 32 MB."""


class Task(PlacedModule):
    """A module, laid out as one vector, and what its outputs mean: passes forward and backward at `weights`.

    A pass is counted for each sample.
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
        super().__init__(module, bayesian, deterministic, batchnorm, channels_last)
        self.likelihood = likelihood
        self.scaling = scaling
        self.prepare = Preparation(self.weights.dtype, self.channels_last, scaling)
        self.module.train()
        self.forward_passes = self.backward_passes = 0
        self._found_halves: dict[bool, tuple[nn.Module | None, nn.Module]] = {}

    def backward(self, x: Tensor, y: Tensor, offset: Tensor | None = None) -> Tensor:
        """Mean negative log-likelihood of a mini-batch at `weights`; its gradient is left in `gradient`.

        `offset` is added to the outputs.
        """
        nll = self.loss(x, y, offset)
        self.differentiate(nll, len(x))
        return nll.detach()

    def mirrored_backward(self, x: Tensor, y: Tensor, offset: Tensor | None = None) -> Tensor:
        """Like `backward`, but the second half of the mini-batch sees `mirrored` in place of the noisy weights.

        The gradient by `mirrored` is left behind the other one, where that of `rho` has its room. What comes before the
        noisy weights is passed only once.
        """
        body, head = self._halves(dropout=False)
        self._train(len(x))
        features = self.prepare(x) if body is None else body(self.prepare(x))
        ours, theirs = (part.clone() for part in features.split((len(x) + 1) // 2))  # a head may change its inputs
        outputs = torch.cat([head(ours), functional_call(head, self._twins, (theirs,), tie_weights=False)])
        nll = self._nll(outputs, y, offset)
        self.differentiate(nll, len(x))
        return nll.detach()

    @cached_property
    def mirrored(self) -> Tensor:
        """Other values of the noisy weights, for `mirrored_backward`."""
        return self.weights[: self.bayesian_size].clone()

    @cached_property
    def _twins(self) -> dict[str, Tensor]:
        """`mirrored` by all names of the parameters, each with its place in `gradient`."""
        twins = {}
        for slot in self.layout.slots:
            if slot.stop <= self.bayesian_size:
                twin = slot.view(self.mirrored).requires_grad_()
                twin.grad = slot.view(self.gradient[self.size :])
                twins[self.module.get_parameter(slot.name)] = twin
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: twins[parameter] for name, parameter in named if parameter in twins}

    def differentiate(self, loss: Tensor, samples: int) -> None:
        """Leave the gradient of a loss of so many samples, which has its graph, in `gradient`."""
        self.gradient.zero_()
        torch.autograd.backward(loss)
        self.backward_passes += samples

    def loss(self, x: Tensor, y: Tensor, offset: Tensor | None = None) -> Tensor:
        """Mean negative log-likelihood of a mini-batch at `weights` in training mode, with its graph."""
        return self._nll(self.forward(x), y, offset)

    def _nll(self, outputs: Tensor, y: Tensor, offset: Tensor | None) -> Tensor:
        return self.likelihood.nll(outputs if offset is None else outputs + offset, y)

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
        if dropout not in self._found_halves:
            self._found_halves[dropout] = self._find_halves(dropout)
        return self._found_halves[dropout]

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
