"""Flower carries the messages: the only place that imports flwr."""
