"""FedAvg (McMahan et al., AISTATS 2017): clients train the received model, the server averages. docs/methods.md 2.1."""

from typing import ClassVar

from metabayfl.methods.base import Method


class FedAvg(Method):
    """Federated averaging of a plain network."""

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
