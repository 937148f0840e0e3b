"""Per-FedAvg (Fallah et al., NeurIPS 2020): FedAvg of a start from which a step adapts well. docs/methods.md 3.4."""

from collections.abc import Iterator
from itertools import islice
from typing import ClassVar, Literal

import torch
from torch import Tensor

from metabayfl.methods.base import Count, NotNegative
from metabayfl.methods.fedavg import FedAvg
from metabayfl.optim import Objective, PointLoss, Sgd, descend
from metabayfl.task import Task
from metabayfl.types import Context, Params, TrainData

Variant = Literal["first-order", "hessian-free", "exact"]
Batches = Iterator[tuple[Tensor, Tensor]]


class PerFedAvg(FedAvg):
    """Clients train the global model for what it is after a step on their data; that step is taken to use it."""

    name: ClassVar[str] = "per-fedavg"
    paper: ClassVar[str] = "Fallah et al., NeurIPS 2020"
    is_personal: ClassVar[bool] = True
    passes: ClassVar[float] = 2.0

    variant: Variant = "first-order"
    """How the Hessian enters: left out, by a difference of gradients, or exactly by differentiating twice."""
    adapt_rate: NotNegative = 0.1
    """Learning rate of the adaptation, plain gradient steps; 0 is FedAvg."""
    adapt_steps: Count = 1
    """Mini-batches of its training data that a client adapts on before it uses the model."""

    def objective(self, model: Params, data: TrainData, ctx: Context) -> Objective:
        """Return the loss after one step of adaptation."""
        others = [data.batches(self.epochs, ctx.rng(purpose)) for purpose in ("adapt", "curvature")]
        return AdaptedLoss(ctx.task, model, self.adapt_rate, self.variant, *others)

    def personalise(
        self, down: Params, state: Params, personal: Params | None, data: TrainData, ctx: Context
    ) -> Params:
        """Adapt what the client receives on its training data."""
        loss = PointLoss(ctx.task, ctx.task.join(down, state))
        batches = data.batches(self.adapt_steps, ctx.rng("personalise"))
        descend(loss, Sgd(loss.groups, momentum=0.0), islice(batches, self.adapt_steps), self.adapt_rate)
        return loss.model()


class AdaptedLoss(PointLoss):
    """f(w - a ∇f(w; B1); B2), whose gradient is (1 - a ∇²f(w; B3)) ∇f(w - a ∇f(w; B1); B2)."""

    def __init__(
        self, task: Task, model: Params, rate: float, variant: Variant, adapt: Batches, curvature: Batches
    ) -> None:
        super().__init__(task, model)
        self.rate, self.variant, self.adapt, self.curvature = rate, variant, adapt, curvature

    def __call__(self, x: Tensor, y: Tensor) -> float:
        """Evaluate on a mini-batch B2 after a step on B1."""
        if not self.rate:
            return super().__call__(x, y)
        super().__call__(*next(self.adapt))
        gradient = self.groups[0].gradient
        torch.sub(self.weights, gradient, alpha=self.rate, out=self.task.weights)
        nll = self.task.backward(x, y).item()
        if self.variant != "first-order":
            after = gradient.clone()
            product = difference_product if self.variant == "hessian-free" else hessian_product
            bend = product(self.task, self.weights, after, *next(self.curvature))
            torch.sub(after, bend, alpha=self.rate, out=gradient)
        return nll


def hessian_product(task: Task, weights: Tensor, vector: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """∇²f(w; x, y) v by differentiating twice."""
    task.weights.copy_(weights)
    slots = task.layout.slots
    parameters = [task.module.get_parameter(slot.name) for slot in slots]
    first = torch.autograd.grad(task.loss(x, y), parameters, create_graph=True, materialize_grads=True)
    along = torch.stack([(g * slot.view(vector)).sum() for g, slot in zip(first, slots, strict=True)])
    second = torch.autograd.grad(along.sum(), parameters, materialize_grads=True)
    task.backward_passes += 3 * len(x)  # the gradient, and the way back through it and through the forward pass
    product = torch.empty_like(vector)
    for slot, value in zip(slots, second, strict=True):
        slot.view(product).copy_(value)
    return product


def difference_product(task: Task, weights: Tensor, vector: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """∇²f(w; x, y) v by a central difference of gradients, with the same dropout masks on both sides."""
    random, length = torch.get_rng_state(), vector.norm()
    if not length:
        return torch.zeros_like(vector)
    step = (torch.finfo(vector.dtype).eps ** (1 / 3) * (1 + weights.norm()) / length).item()
    product = torch.zeros_like(vector)
    for side in (step, -step):
        torch.set_rng_state(random)
        torch.add(weights, vector, alpha=side, out=task.weights)
        task.backward(x, y)
        product.add_(task.gradient[: task.size], alpha=0.5 / side)
    return product
