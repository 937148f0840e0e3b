"""Clients' class frequencies beside the shared network instead of in it. docs/methods.md 3.8."""

import torch
from torch import Tensor

from metabayfl.likelihood import Categorical
from metabayfl.methods.base import Method
from metabayfl.placed import FREQUENCIES
from metabayfl.types import Context, Fit, Params, TrainData

PSEUDO_COUNT = 0.5
"""What a class counts that a client has never seen."""


class ClassFrequencies(Method):
    """A method whose shared network learns what tells classes apart, while each client knows how often it has which.

    A client trains p_n(y|x) ∝ frequency_n(y) exp f_y(x); f is shared. Its own model has the frequencies, the global
    one has none, as if classes were equally frequent.
    """

    class_frequencies: bool = True
    """Let clients add the logarithm of their class frequencies to the outputs, so that the shared network need not
    learn them; the average of clients that each have learnt their own is worse. Classes only."""

    def offset(self, data: TrainData, ctx: Context) -> Tensor | None:
        """Return the logarithm of the client's class frequencies."""
        likelihood = ctx.task.likelihood
        if not self.class_frequencies or not isinstance(likelihood, Categorical):
            return None
        counts = torch.bincount(data.y, minlength=likelihood.classes) + PSEUDO_COUNT
        return (counts / counts.sum()).log().to(ctx.task.weights.dtype)

    def leave(self, model: Params, metrics: dict[str, float], data: TrainData, ctx: Context) -> Fit:
        """Give the client's own model its frequencies; they are not sent."""
        fit = super().leave(model, metrics, data, ctx)
        return fit._replace(personal=self.with_frequencies(fit.personal, data, ctx))

    def personalise(
        self, down: Params, state: Params, personal: Params | None, data: TrainData, ctx: Context
    ) -> Params:
        """Return the client's own model; a newcomer's is the received one with its frequencies."""
        model = super().personalise(down, state, personal, data, ctx)
        return self.with_frequencies(model, data, ctx) if personal is None else model

    def with_frequencies(self, model: Params, data: TrainData, ctx: Context) -> Params:
        """Return a model that knows how often the client has which class."""
        offset = self.offset(data, ctx)
        return model if offset is None else model | {FREQUENCIES: offset}

    def predict(self, model: Params, x: Tensor, samples: int, ctx: Context) -> Tensor:
        """Outputs, with the frequencies of a client's own model."""
        return shift(super().predict(model, x, samples, ctx), model)


def shift(outputs: Tensor, model: Params) -> Tensor:
    """Add the frequencies to outputs, if the model has any."""
    return outputs + model[FREQUENCIES] if FREQUENCIES in model else outputs
