"""A loss that pulls towards a fixed point: FedProx, Ditto, pFedMe (docs/methods.md 2.2, 5.1, 5.2)."""

import torch
from torch import Tensor

from metabayfl.optim import PointLoss
from metabayfl.task import Task
from metabayfl.types import Params


class Proximal(PointLoss):
    """The NLL of a plain network plus prox/2 times the squared distance to a centre.

    The centre covers the parameters that are shared: those that never leave a client have no counterpart elsewhere.
    """

    def __init__(self, task: Task, model: Params, centre: Tensor, prox: float) -> None:
        super().__init__(task, model)
        self.centre, self.prox = centre[: task.shared_size].clone(), prox
        self._pull = torch.empty_like(self.centre)

    def __call__(self, x: Tensor, y: Tensor) -> float:
        """Evaluate on a mini-batch; the gradient gains prox (w - centre)."""
        nll = super().__call__(x, y)
        if self.prox:
            self.groups[0].gradient[: len(self.centre)].add_(self.offset(), alpha=self.prox)
        return nll

    def offset(self) -> Tensor:
        """Return w - centre, in a place that the next call uses again."""
        return torch.sub(self.weights[: len(self.centre)], self.centre, out=self._pull)

    def metrics(self) -> dict[str, float]:
        """Return how far the weights are from the centre."""
        return {"distance": self.offset().norm().item()}
