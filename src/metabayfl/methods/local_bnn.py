"""Local Bayesian training: no federation; each client maximises its own ELBO. docs/methods.md 2.6."""

from typing import ClassVar, Literal

from metabayfl.methods.base import NotNegative
from metabayfl.methods.bayfl import BayFL
from metabayfl.methods.local import Local


class LocalBNN(Local, BayFL):
    """Every client alone with a Bayesian network."""

    name: ClassVar[str] = "local-bnn"
    paper: ClassVar[str] = "no federation"

    prior: Literal["fixed"] = "fixed"
    """Prior: N(0, prior_sigma²); nothing is received that could be another one."""
    class_frequencies: Literal[False] = False
    """There is nobody to share a network with: frequencies are learnt with the rest."""
    kl: Literal["client"] = "client"
    """Divide the KL by the client's training samples."""
    kl_weight: NotNegative = 0.1
    """Weight of the KL; 1 is the exact ELBO, which prefers the prior when weights outnumber samples."""
