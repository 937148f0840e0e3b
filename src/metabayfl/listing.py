"""Tables of the methods and of their options, for people."""

from typing import Any

from rich.table import Table

from metabayfl.methods import find, table
from metabayfl.methods.base import Method


def method_table() -> Table:
    """One line for each method."""
    rows = Table(title="metabayfl methods NAME lists the options of one")
    for column in ("name", "model", "headline", "from", "what it does"):
        rows.add_column(column)
    for name, method in sorted(table().items()):
        bayesian = "Bayesian" if is_bayesian(method) else "plain"
        headline = "personal" if method.personal else "global"
        rows.add_row(name, bayesian, headline, method.paper, (method.__doc__ or "").splitlines()[0])
    return rows


def options_table(name: str) -> Table:
    """All options of a method with their defaults and help."""
    method = find(name)
    rows = Table(title=f"{name}: {(method.__doc__ or '').splitlines()[0]}")
    for column in ("option", "default", "accepted", "meaning"):
        rows.add_column(column, no_wrap=column == "option")
    for field, about in method.model_json_schema()["properties"].items():
        rows.add_row(f"method.{field}", str(about.get("default")), _accepted(about), about.get("description", ""))
    return rows


def is_bayesian(method: type[Method]) -> bool:
    """Whether a method's models have a posterior."""
    return method().bayesian_layers != "none"


def _accepted(schema: dict[str, Any]) -> str:
    """Say in a few words what a JSON schema accepts."""
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "anyOf" in schema:
        return " or ".join(_accepted(part) for part in schema["anyOf"])
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema]
    return " ".join([schema.get("type", ""), *bounds])
