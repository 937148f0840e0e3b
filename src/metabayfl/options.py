"""Options with types, ranges and help in one place, and one line for a value that does not fit. No torch here."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

PLAIN_WORDS = {
    "dict_type": "a section with keys of its own is accepted",
    "model_type": "a section with keys of its own is accepted",
    "tuple_type": "a list is accepted",
}


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

    # Sections are checked by pydantic itself, as if they had no __init__: only the outermost one words the errors.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_not_one(cls, value: Any, field: ValidationInfo) -> Any:
        annotation = cls.model_fields[field.field_name or ""].annotation
        accepted = (annotation, *get_args(annotation))
        if isinstance(value, bool) and not any(one in (bool, Any) or isinstance(one, bool) for one in accepted):
            raise ValueError("true and false are not accepted here")
        return value


def one_line(error: ValidationError, options: type[BaseModel]) -> str:
    """Say what is wrong, with the value and what is accepted, for the first few errors of a validation."""
    found: dict[str, list[str]] = {}
    for item in error.errors():
        name, problem = _explain(dict(item), options)
        found.setdefault(name, []).append(problem)
    lines = [f"{name}: {', or '.join(dict.fromkeys(problems))}" for name, problems in found.items()]
    return "; ".join(lines[:3])


def _explain(item: Mapping[str, Any], options: type[BaseModel]) -> tuple[str, str]:
    """Return `name = value` and what is wrong with it."""
    path, section = _path(item["loc"], options)
    if item["type"] == "extra_forbidden":
        known = ", ".join(section.model_fields) or "nothing"
        return f"{path} = {item['input']!r}", f"unknown key; accepted here: {known}"
    message = PLAIN_WORDS.get(item["type"], item["msg"].removeprefix("Value error, "))
    return f"{path} = {item['input']!r}", message[0].lower() + message[1:]


def _path(place: Sequence[str | int], options: type[BaseModel]) -> tuple[str, type[BaseModel]]:
    """Return where an error is as the user would write it, and the section; inside a value only indices count."""
    names: list[str] = []
    inside = False
    for part in place:
        if inside:
            names += [str(part)] if isinstance(part, int) else []
            continue
        names.append(str(part))
        inner = options.model_fields[str(part)].annotation if part in options.model_fields else None
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            options = inner
        else:
            inside = True
    return ".".join(names), options
