"""A loss that pulls towards a fixed point: FedProx, Ditto, pFedMe, FedAMP, Meta-BayFL (docs/methods.md 2.2, 3.6, 5)."""

from typing import Self

import torch
from torch import Tensor

from metabayfl.optim import Objective
from metabayfl.types import Params


class Proximal:
    """An objective plus prox/2 times the squared distance of its weights, or means, to a centre.

    The centre covers the parameters that are shared: those that never leave a client have no counterpart elsewhere.
    """

    def __init__(self, inner: Objective, centre: Tensor, prox: float) -> None:
        self.inner, self.task, self.groups = inner, inner.task, inner.groups
        self.centre, self.prox = centre[: inner.task.shared_size].clone(), prox
        self._pull = torch.empty_like(self.centre)

    def __call__(self, x: Tensor, y: Tensor) -> float:
        """Evaluate on a mini-batch; the gradient gains prox (w - centre)."""
        nll = self.inner(x, y)
        if self.prox:
            self.groups[0].gradient[: len(self.centre)].add_(self.offset(), alpha=self.prox)
        return nll

    def offset(self) -> Tensor:
        """Return w - centre, in a place that the next call uses again."""
        return torch.sub(self.groups[0].values[: len(self.centre)], self.centre, out=self._pull)

    def model(self) -> Params:
        """Copy out the model as it is now."""
        return self.inner.model()

    def metrics(self) -> dict[str, float]:
        """Return what the objective says, and how far the weights are from the centre."""
        return self.inner.metrics() | {"distance": self.offset().norm().item()}

    def skip_draw_of(self, other: Self) -> None:
        """Be as random as another that has been evaluated once more."""
        self.inner.skip_draw_of(other.inner)
