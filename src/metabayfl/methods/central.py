"""Central training: FedAvg with all training data in one place, what a federation can hope for. docs/methods.md 2.4."""

from typing import ClassVar

from metabayfl.methods.fedavg import FedAvg


class Central(FedAvg):
    """One plain network on everybody's training data."""

    name: ClassVar[str] = "central"
    paper: ClassVar[str] = "no federation"
    pools: ClassVar[bool] = True
    exchanges: ClassVar[bool] = False
    floats_up: ClassVar[float] = 0.0
    floats_down: ClassVar[float] = 0.0
