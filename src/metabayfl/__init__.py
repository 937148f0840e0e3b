"""Federated learning with Bayesian neural networks on small, noisy, heterogeneous clients."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from metabayfl._version import __version__
from metabayfl.options import InputError

if TYPE_CHECKING:
    from metabayfl import models
    from metabayfl.api import federate
    from metabayfl.data.federation import Federation
    from metabayfl.inspection import check
    from metabayfl.methods import BayFL, FedAvg, MetaBayFL, MetaBayFLDropout, MetaFL
    from metabayfl.methods.base import Method
    from metabayfl.result import Result, load

__all__ = [
    "BayFL",
    "FedAvg",
    "Federation",
    "InputError",
    "MetaBayFL",
    "MetaBayFLDropout",
    "MetaFL",
    "Method",
    "Result",
    "__version__",
    "check",
    "federate",
    "load",
    "models",
]

_HOMES = {
    "Federation": "data.federation",
    "Method": "methods.base",
    "Result": "result",
    "check": "inspection",
    "federate": "api",
    "load": "result",
}


def __getattr__(name: str) -> Any:
    """Import on first use: help and version need no torch. Every method of the name table is there by its class."""
    if name == "models":
        return import_module("metabayfl.models")
    home = import_module(f"metabayfl.{_HOMES.get(name, 'methods')}") if name in _HOMES or name[0].isupper() else None
    if not hasattr(home, name):
        raise AttributeError(f"module 'metabayfl' has no attribute {name!r}")
    return getattr(home, name)
