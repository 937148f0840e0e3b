"""Tables of the methods and of their options, for people."""

from typing import Any

from rich.table import Table

from metabayfl.methods import find, table
from metabayfl.methods.base import Method
from metabayfl.methods.needs import Need


def method_table() -> Table:
    """One line for each method."""
    caption = """up / down: numbers that a client sends and receives in a round, in multiples of the network's
gradients: passes of a client in a round, in multiples of FedAvg's; both at the default options; U: its size decides
metabayfl methods NAME says what a method does and lists its options"""
    rows = Table(caption=caption, caption_justify="left")
    for column in ("name", "model", "headline", "up / down", "gradients", "needs", "from"):
        rows.add_column(column, no_wrap=column == "name")
    for name, method in sorted(table().items()):
        model = "Bayesian" if is_bayesian(method) else "plain"
        headline = "personal" if method.is_personal else "global"
        sent = f"{_multiple(method.floats_up)} / {_multiple(method.floats_down)}"
        needs = ", ".join(need for need in Need if need in method().needs)
        rows.add_row(name, model, headline, sent, _multiple(method.passes), needs, method.paper)
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


def _multiple(value: float | None) -> str:
    return "U" if value is None else f"{value:.3g}"


def _accepted(schema: dict[str, Any]) -> str:
    """Say in a few words what a JSON schema accepts."""
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "anyOf" in schema:
        return " or ".join(_accepted(part) for part in schema["anyOf"])
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema]
    return " ".join([schema.get("type", ""), *bounds])
