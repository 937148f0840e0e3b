"""Flower carries the messages: the only place that imports flwr."""

from importlib.util import find_spec

from metabayfl.options import InputError

if find_spec("flwr") is None:
    raise InputError("this needs Flower: pip install 'metabayfl[flower]'")
