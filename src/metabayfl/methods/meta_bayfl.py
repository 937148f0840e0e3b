"""Meta-BayFL (Rahman & Nguyen): BayFL whose clients try several rates and keep the best. docs/methods.md 3.1."""

from typing import Any, ClassVar, Literal

from pydantic import model_validator

from metabayfl.methods.personal_posterior import PersonalPosterior
from metabayfl.methods.posterior_distillation import PosteriorDistillation
from metabayfl.methods.rate_selection import RateSelection

IVON_REACH = 4.0
"""Rate times steps of a cautious round of IVON, whose steps are smaller."""
THE_PAPER: dict[str, Any] = {
    "rates": (1e-4, 1e-3, 1e-2),
    "optimiser": "sgd",
    "momentum": 0.0,
    "bayesian": "all",
    "rho_rate": 1.0,
    "antithetic": False,
    "kl_weight": 1.0,
    "kl": "client",
    "warm_up": 0,
    "augmented_counts": 1.0,
    "prior": "fixed",
    "prior_sigma": 0.1,
    "rule": "var",
    "weighting": "uniform",
    "select_every": "epoch",
    "try_every": 1,
    "pooled": False,
    "score_by": "nll",
    "trial_data": "dn",
    "trial_epochs": 1.0,
    "train_on_dn": True,
    "class_frequencies": False,
    "choice": "best",
    "guard": False,
    "keep_better": False,
    "personal": "last",
}
"""The letter of the paper, as docs/methods.md 3.5 reads it; no guards, and nothing tuned."""


class MetaBayFL(PersonalPosterior, RateSelection, PosteriorDistillation):
    """BayFL whose clients choose their rate, each round anew, by the loss on d_n."""

    name: ClassVar[str] = "meta-bayfl"
    paper: ClassVar[str] = "Rahman & Nguyen, IEEE TETCI"

    preset: Literal["default", "paper"] = "default"
    """Where values come from that are not given: our defaults, or the letter of the paper (for comparison)."""

    @model_validator(mode="before")
    @classmethod
    def fill_in(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Take what is not given from the preset."""
        return THE_PAPER | values if values.get("preset") == "paper" else values

    @property
    def reach(self) -> float:
        """Rate times steps of a cautious round; IVON's steps are smaller."""
        return IVON_REACH if self.backend == "ivon" else super().reach
