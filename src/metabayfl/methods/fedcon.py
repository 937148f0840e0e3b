"""FedCon (MOON; Li et al., CVPR 2021): FedAvg, and local features stay near the received ones. docs/methods.md 2.8."""

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from metabayfl.features import last_dense, watch
from metabayfl.methods.base import NotNegative, Positive, get, put
from metabayfl.methods.fedavg import FedAvg
from metabayfl.methods.needs import Need
from metabayfl.optim import PointLoss
from metabayfl.task import Task
from metabayfl.types import Context, Fit, Params, TrainData

PREVIOUS = "previous"


class FedCon(FedAvg):
    """FedAvg whose clients keep their features near the received model's and away from their own last ones."""

    name: ClassVar[str] = "fedcon"
    paper: ClassVar[str] = "Li et al., CVPR 2021 (MOON)"

    contrast: NotNegative = 1.0
    """Weight of the contrastive loss; 0 is FedAvg."""
    temperature: Positive = 0.5
    """Of the contrastive loss: small ones look at the sign of the difference only."""

    @property
    def needs(self) -> frozenset[Need]:
        """Clients keep the model of their last round."""
        return frozenset({Need.STATE}) if self.contrast else frozenset()

    def init_server(self, ctx: Context) -> Params:
        """Return the model; one without a dense last layer is refused."""
        if self.contrast:
            last_dense(self.name, ctx.task.module)
        return super().init_server(ctx)

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        """Train with the contrast to the client's last model; the first time there is none, as in FedAvg."""
        if not self.contrast:
            return super().fit(down, state, data, ctx)
        received, previous = ctx.task.join(down, state), get(state, PREVIOUS)
        if previous:
            layer = last_dense(self.name, ctx.task.module)
            objective = Contrastive(ctx.task, received, previous, self.contrast, self.temperature, layer)
            model, metrics = self.minimise(objective, data, ctx)
        else:
            model, metrics = self.train(received, data, ctx)
        fit = self.leave(model, metrics, data, ctx)
        return fit._replace(state=fit.state | put(model, PREVIOUS))


class Contrastive(PointLoss):
    """NLL + contrast · -log(e^(cos(z, z_g)/T) / (e^(cos(z, z_g)/T) + e^(cos(z, z_p)/T))), z the penultimate features.

    z_g and z_p are those of the received and of the previous model for the same inputs, in evaluation mode.
    """

    def __init__(
        self, task: Task, received: Params, previous: Params, contrast: float, temperature: float, layer: nn.Linear
    ) -> None:
        super().__init__(task, received)
        self.references = [{name: tensor.clone() for name, tensor in model.items()} for model in (received, previous)]
        self.contrast, self.temperature, self.layer = contrast, temperature, layer
        self.last_contrast = 0.0

    def __call__(self, x: Tensor, y: Tensor) -> float:
        """Evaluate on a mini-batch."""
        fixed = [watch(self.layer, partial(self.task.consult, model), x).features for model in self.references]
        self.task.weights.copy_(self.weights)
        own = watch(self.layer, self.task.forward, x)
        nll = self.task.likelihood.nll(own.outputs, y)
        near = torch.stack([cosine_similarity(own.features, other, dim=1) for other in fixed], dim=1)
        contrast = cross_entropy(near / self.temperature, torch.zeros(len(x), dtype=torch.int64))
        self.task.differentiate(nll + self.contrast * contrast, len(x))
        self.last_contrast = contrast.item()
        return nll.item()

    def metrics(self) -> dict[str, float]:
        """Return the contrastive loss of the last mini-batch; log 2 is none."""
        return {"contrast": self.last_contrast}
