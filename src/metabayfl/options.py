"""Options with types, ranges and help in one place, and one line for a value that does not fit. No torch here."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class InputError(ValueError):
    """Something the user gave cannot be accepted; the message is one line that says what would be."""


class Options(BaseModel):
    """A frozen set of named options; the text under a field is its help."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError(one_line(error, type(self))) from None


def one_line(error: ValidationError, options: type[BaseModel], prefix: str = "") -> str:
    """Say what is wrong, with the value and what is accepted, for the first few errors of a validation."""
    lines = [_explain(dict(item), options, prefix) for item in error.errors()[:3]]
    return "; ".join(dict.fromkeys(lines))


def _explain(item: Mapping[str, Any], options: type[BaseModel], prefix: str) -> str:
    path = [str(part) for part in item["loc"] if not str(part).startswith(("function-", "constrained-"))]
    name = prefix + ".".join(path)
    if item["type"] == "extra_forbidden":
        known = ", ".join(_fields_at(options, path[:-1])) or "nothing"
        return f"unknown key {name} = {item['input']!r}; accepted here: {known}"
    message = item["msg"].removeprefix("Value error, ")
    return f"{name} = {item['input']!r}: {message[0].lower()}{message[1:]}"


def _fields_at(options: type[BaseModel], path: list[str]) -> list[str]:
    """Names of the fields of the section that a path leads to."""
    for part in path:
        field = options.model_fields.get(part)
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        options = inner
    return list(options.model_fields)
