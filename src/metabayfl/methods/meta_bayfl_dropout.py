"""Meta-BayFL with MC dropout (Gal & Ghahramani, ICML 2016) instead of a Gaussian posterior. docs/methods.md 3.3."""

from itertools import repeat
from typing import ClassVar

from torch import Tensor

from metabayfl.methods.base import NotNegative
from metabayfl.methods.class_frequencies import ClassFrequencies, shift
from metabayfl.methods.fedavg import FedAvg
from metabayfl.methods.rate_selection import RateSelection
from metabayfl.randomness import keyed_globals
from metabayfl.types import Context, InputError, Params


class MetaBayFLDropout(RateSelection, ClassFrequencies, FedAvg):
    """Meta-FL that predicts with several dropout masks: uncertainty at the price of a plain network."""

    name: ClassVar[str] = "meta-bayfl-dropout"
    paper: ClassVar[str] = "Rahman & Nguyen, IEEE TETCI (our reading)"

    weight_decay: NotNegative = 5e-4
    """L2 penalty: the prior, when dropout is seen as variational inference."""

    def init_server(self, ctx: Context) -> Params:
        """Return the model and the guard; a module without dropout is refused."""
        if not ctx.task.has_dropout:
            raise InputError(f"{self.name} needs nn.Dropout layers; built-in models have them with model.dropout = 0.2")
        return super().init_server(ctx)

    def predict(self, model: Params, x: Tensor, samples: int, ctx: Context) -> Tensor:
        """Outputs under dropout masks, the same for every call."""
        ctx.task.load(model)
        with keyed_globals(ctx.rng("predict").initial_seed()):
            outputs = ctx.task.drawn_outputs(x, lambda: repeat(None, samples), dropout=True)
        return shift(outputs, model)
