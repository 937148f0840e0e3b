"""Which values suit a method: every combination is run, and the clients' d_n decide. No test data are looked at."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metabayfl.comparison import Row
from metabayfl.config import CompareConfig, parse_value
from metabayfl.methods import find
from metabayfl.options import InputError

Values = dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """A method with one combination of values."""

    label: str
    method: str
    values: Values

    @property
    def name(self) -> str:
        """How its runs are called."""
        return " ".join([self.label, *(f"{key}={_shown(value)}" for key, value in self.values.items())])


@dataclass(frozen=True)
class Score:
    """What d_n says of a candidate: mean accuracy and NLL over seeds, of the model that the method is about."""

    candidate: Candidate
    accuracy: float
    nll: float


def read_choices(texts: Iterable[str]) -> dict[str, list[Any]]:
    """Read `key=a,b,c`, once for each option."""
    choices: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        found = [parse_value(value.strip()) for value in values.split(",") if value.strip()]
        if not key or not equals or not found:
            raise InputError(f"--values {text!r}: key=a,b,c is accepted, such as rate=1e-3,1e-2,1e-1")
        choices[key] = found
    return choices


def candidates(config: CompareConfig, labels: Sequence[str], choices: Mapping[str, Sequence[Any]]) -> list[Candidate]:
    """Return every combination for each method, of the options that it has."""
    found = []
    for label in labels:
        name = config.methods.get(label, {}).get("name", label)
        known = find(name).model_fields
        own = {key: values for key, values in choices.items() if key in known}
        if not own:
            raise InputError(f"{label} has no option {', '.join(choices)}: `metabayfl methods {name}` lists them")
        for combination in itertools.product(*own.values()):
            found.append(Candidate(label, name, dict(zip(own, combination, strict=True))))
    return found


def config_for(config: CompareConfig, tried: Sequence[Candidate]) -> CompareConfig:
    """Return a comparison of the candidates: judged on d_n, after the last round alone."""
    sections = {one.name: {"name": one.method, **config.methods.get(one.label, {}), **one.values} for one in tried}
    if config.select.held_out is False:
        raise InputError("select.held_out = false: tuning needs d_n held out of training, true is accepted")
    held_out = config.select.model_copy(update={"held_out": True})
    judged = config.eval.model_copy(update={"on_dn": True, "every": config.rounds})
    return config.model_copy(update={"methods": sections, "eval": judged, "select": held_out})


def score(tried: Sequence[Candidate], rows: Sequence[Row]) -> list[Score]:
    """Average what d_n says of each candidate; one whose runs failed has no score."""
    found = []
    for one in tried:
        whose = "P" if find(one.method).is_personal or not find(one.method).exchanges else "G"
        own = [row for row in rows if row["method"] == one.name and f"{whose}/D accuracy" in row]
        if own:
            accuracy, nll = (sum(row[f"{whose}/D {name}"] for row in own) / len(own) for name in ("accuracy", "nll"))
            found.append(Score(one, accuracy, nll))
    return found


def choose(scores: Iterable[Score]) -> dict[str, Score]:
    """Return the best candidate of each label: by accuracy on d_n, then by NLL."""
    best: dict[str, Score] = {}
    for found in scores:
        label = found.candidate.label
        rank = (-found.accuracy, found.nll)
        if label not in best or rank < (-best[label].accuracy, best[label].nll):
            best[label] = found
    return best


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
