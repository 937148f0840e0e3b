"""The name table of the methods; third parties add theirs by the entry point group `metabayfl.methods`."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from metabayfl.methods.base import Method
from metabayfl.methods.bayfl import BayFL
from metabayfl.methods.central import Central
from metabayfl.methods.ditto import Ditto
from metabayfl.methods.fedamp import FedAMP
from metabayfl.methods.fedavg import FedAvg
from metabayfl.methods.fedavgm import FedAvgM
from metabayfl.methods.fedbe import FedBE
from metabayfl.methods.fedcon import FedCon
from metabayfl.methods.fedfomo import FedFomo
from metabayfl.methods.fedkd import FedKD
from metabayfl.methods.fedmask import FedMask
from metabayfl.methods.fedphp import FedPHP
from metabayfl.methods.fedprox import FedProx
from metabayfl.methods.heurfedamp import HeurFedAMP
from metabayfl.methods.local import Local
from metabayfl.methods.local_bnn import LocalBNN
from metabayfl.methods.meta_bayfl import MetaBayFL
from metabayfl.methods.meta_bayfl_dropout import MetaBayFLDropout
from metabayfl.methods.meta_fl import MetaFL
from metabayfl.methods.per_fedavg import PerFedAvg
from metabayfl.methods.pfedbayes import PFedBayes
from metabayfl.methods.pfedbl import PFedBL
from metabayfl.methods.pfedme import PFedMe
from metabayfl.methods.pvi import PVI
from metabayfl.options import InputError

__all__ = [
    "METHODS",
    "PVI",
    "BayFL",
    "Central",
    "Ditto",
    "FedAMP",
    "FedAvg",
    "FedAvgM",
    "FedBE",
    "FedCon",
    "FedFomo",
    "FedKD",
    "FedMask",
    "FedPHP",
    "FedProx",
    "HeurFedAMP",
    "Local",
    "LocalBNN",
    "MetaBayFL",
    "MetaBayFLDropout",
    "MetaFL",
    "Method",
    "PFedBL",
    "PFedBayes",
    "PFedMe",
    "PerFedAvg",
    "create",
    "find",
    "table",
]

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        BayFL,
        Central,
        Ditto,
        FedAMP,
        FedAvg,
        FedAvgM,
        FedBE,
        FedCon,
        FedFomo,
        FedKD,
        FedMask,
        FedPHP,
        FedProx,
        HeurFedAMP,
        Local,
        LocalBNN,
        MetaBayFL,
        MetaBayFLDropout,
        MetaFL,
        PerFedAvg,
        PFedBayes,
        PFedBL,
        PFedMe,
        PVI,
    )
}


def table() -> dict[str, type[Method]]:
    """All methods by name, ours and those that installed packages register."""
    return METHODS | {point.name: point.load() for point in entry_points(group="metabayfl.methods")}


def find(name: str) -> type[Method]:
    """Return a method by name."""
    methods = table()
    if not isinstance(name, str) or name not in methods:
        raise InputError(f"unknown method {name!r}; accepted: {', '.join(sorted(methods))}")
    return methods[name]


def create(options: Mapping[str, Any]) -> Method:
    """Build a method from a config section with its `name` and fields."""
    values = dict(options)
    name = values.pop("name", BayFL.name)
    try:
        return find(name)(**values)
    except InputError as error:
        raise InputError(f"method.{error}" if name in table() else str(error)) from None
