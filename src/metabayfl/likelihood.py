"""How outputs of a network become a likelihood of the labels."""

import math
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import cross_entropy

from metabayfl import metrics
from metabayfl.options import InputError

TEMPERATURES = tuple(2.0 ** (step / 8) for step in range(-12, 25))


@dataclass(frozen=True)
class Categorical:
    """Classes: the outputs are logits [batch, classes], the labels whole numbers."""

    classes: int

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Mean negative log-likelihood of a mini-batch."""
        return cross_entropy(outputs, y)

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Negative log-likelihood of each label under the mean of predictions [samples, batch, classes]."""
        return -metrics.mean_log_probabilities(outputs).gather(1, y[:, None]).squeeze(1)

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """All metrics of predictions [samples, batch, classes]."""
        return metrics.classification(outputs, y)

    def reliability(self, outputs: Tensor, y: Tensor) -> dict[str, list[float]]:
        """Count, mean confidence and accuracy in each bin of the confidence."""
        bins = metrics.reliability(metrics.mean_probabilities(outputs), y)
        return {name: [round(value, 6) for value in found.tolist()] for name, found in vars(bins).items()}

    def by_temperature(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """NLL of predictions whose logits are divided by each of a grid of temperatures."""
        return {
            f"{temperature:.4g}": self.losses(outputs / temperature, y).mean().item() for temperature in TEMPERATURES
        }

    def check(self, outputs: Tensor, y: Tensor) -> None:
        """Refuse a model whose outputs do not fit the labels."""
        if outputs.ndim != 2 or outputs.shape[0] != len(y):
            raise InputError(
                f"the model gives outputs of shape {tuple(outputs.shape)} for {len(y)} samples; "
                f"a classifier gives ({len(y)}, {self.classes})"
            )
        if outputs.shape[1] != self.classes:
            raise InputError(f"the model has {outputs.shape[1]} outputs, but the labels need {self.classes} classes")


@dataclass(frozen=True)
class Gaussian:
    """Regression: the outputs are means [batch, targets] with a known standard deviation of the observations."""

    noise_std: float = 1.0

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Mean over the batch, sum over the targets."""
        squares = (outputs - y.reshape(outputs.shape)).square().sum() / len(y)
        constant = outputs[0].numel() * (math.log(self.noise_std) + 0.5 * math.log(2 * math.pi))
        return 0.5 * squares / self.noise_std**2 + constant

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Negative log-likelihood of each target under the mixture of predictions [samples, batch, targets]."""
        means = outputs.double().flatten(2) if outputs.ndim > 2 else outputs.double().unsqueeze(2)
        squares = ((means - y.double().reshape(means.shape[1:])) / self.noise_std).square().sum(2)
        constant = means.shape[2] * (math.log(self.noise_std) + 0.5 * math.log(2 * math.pi))
        return constant + math.log(len(means)) - (-0.5 * squares).logsumexp(0)

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """All metrics of predictions [samples, batch, targets]."""
        return metrics.regression(outputs.flatten(2) if outputs.ndim > 2 else outputs.unsqueeze(2), y, self.noise_std)

    def reliability(self, outputs: Tensor, y: Tensor) -> dict[str, list[float]]:
        """Return nothing: values have no top label whose confidence could be binned."""
        return {}

    def by_temperature(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """Return nothing: values have no logits that a temperature could scale."""
        return {}

    def check(self, outputs: Tensor, y: Tensor) -> None:
        """Refuse a model whose outputs do not fit the targets."""
        if outputs.shape[0] != len(y) or outputs.numel() != y.numel():
            raise InputError(
                f"the model gives outputs of shape {tuple(outputs.shape)}, the targets have shape {tuple(y.shape)}"
            )


Likelihood = Categorical | Gaussian
