"""BayFL (Meta-BayFL's paper, "FL with BNN"): FedAvg of Gaussian posteriors at a fixed rate. docs/methods.md 2.3."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from metabayfl.methods.base import NotNegative, Positive
from metabayfl.methods.class_frequencies import ClassFrequencies
from metabayfl.methods.variational import Variational
from metabayfl.optim import OptimiserName, Rate
from metabayfl.types import Context


class BayFL(ClassFrequencies, Variational):
    """Clients maximise the ELBO of a Bayesian network, the server averages the posteriors."""

    name: ClassVar[str] = "bayfl"
    paper: ClassVar[str] = "Meta-BayFL's paper (its baseline with a fixed rate)"

    optimiser: OptimiserName = "sgd"
    """Local optimiser, fresh in every round."""
    rate: Rate = 1e-2
    """Learning rate: a number, or a schedule over rounds k of K: 'a/sqrt(K)', 'a/k', 'a/sqrt(k)'."""
    bayesian: Literal["auto", "all", "dense", "last"] = "auto"
    """Layers with a posterior: all that can have one, the dense ones, or the last; auto: the dense ones, or all where
    there are none."""
    rho_rate: NotNegative | Literal["auto"] = "auto"
    """Factor on the learning rate of rho. auto: 1 for adam; sgd, whose steps are as small as the gradient, follows the
    natural gradient at about a hundredth of the rate, and sigma stays below three times that of a fixed prior."""
    antithetic: bool = True
    """Let half of each mini-batch see the weight noise with its sign turned, which cancels most of what it does to
    gradients; not where layers normalise over the mini-batch."""
    prior_sigma: Positive | Literal["fan-in"] = "fan-in"
    """Standard deviation of the fixed prior; fan-in: 2 / sqrt(inputs of a unit), layer by layer. Weights without a
    posterior have it too (they go to their most probable value); norm layers and `deterministic` ones have not."""
    kl: Literal["client", "federation"] = "federation"
    """Divide the KL by the client's training samples (its own ELBO) or by everybody's (one posterior for all data)."""
    kl_weight: NotNegative = 0.75
    """Weight of the KL; 1 is the exact ELBO, which prefers the prior when weights outnumber samples."""
    warm_up: Annotated[int, Field(ge=0)] = 50
    """Rounds in which the weight of the KL grows from little to all of it; not for ivon, whose steps depend on it."""
    augmented_counts: Positive = 10.0
    """Samples that one counts as where training inputs are augmented: the KL is divided by it, initial_sigma by its
    root."""

    def sample_counts(self, ctx: Context) -> float:
        """Return how many samples each one counts as: an augmented one is seen in many forms."""
        return self.augmented_counts if ctx.augmented else 1.0
