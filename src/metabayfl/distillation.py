"""Learning from predictions of other models instead of labels: FedPHP, FedBE, federated distillation."""

from torch import Tensor
from torch.nn.functional import kl_div

from metabayfl.likelihood import Categorical
from metabayfl.optim import PointLoss
from metabayfl.options import InputError
from metabayfl.task import Task
from metabayfl.types import Params


class Distillation(PointLoss):
    """(1 - share) NLL + share T² KL(teacher || student), with both predictions softened by the temperature T."""

    def __init__(self, task: Task, model: Params, teacher: Params, share: float, temperature: float) -> None:
        super().__init__(task, model)
        self.teacher = {name: tensor.clone() for name, tensor in teacher.items()}
        self.share, self.temperature = share, temperature

    def __call__(self, x: Tensor, y: Tensor) -> float:
        """Evaluate on a mini-batch; the teacher sees the same inputs in evaluation mode."""
        target = (self.task.consult(self.teacher, x) / self.temperature).softmax(1)
        self.task.weights.copy_(self.weights)
        outputs = self.task.forward(x)
        nll = self.task.likelihood.nll(outputs, y)
        transfer = kl_div((outputs / self.temperature).log_softmax(1), target, reduction="batchmean")
        loss = (1 - self.share) * nll + self.share * self.temperature**2 * transfer
        self.task.differentiate(loss, len(x))
        return nll.item()


def refuse_regression(name: str, task: Task) -> None:
    """Refuse a task whose predictions are not classes."""
    if not isinstance(task.likelihood, Categorical):
        raise InputError(f"{name} learns from predicted classes: whole-number labels are accepted")
