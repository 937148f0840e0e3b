"""Meta-FL (Rahman & Nguyen, IEEE TVT 2024): FedAvg with the choice of rates of Meta-BayFL. docs/methods.md 3.2."""

from typing import ClassVar

from metabayfl.methods.class_frequencies import ClassFrequencies
from metabayfl.methods.fedavg import FedAvg
from metabayfl.methods.rate_selection import RateSelection


class MetaFL(RateSelection, ClassFrequencies, FedAvg):
    """FedAvg whose clients choose their rate, each round anew, by the loss on d_n."""

    name: ClassVar[str] = "meta-fl"
    paper: ClassVar[str] = "Rahman & Nguyen, IEEE TVT 2024"
