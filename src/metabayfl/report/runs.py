"""Which runs a report is about, as their directories describe them."""

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from metabayfl.comparison import Row, row_of
from metabayfl.options import InputError
from metabayfl.store import Event, RunDirectory

NEEDED = ("method", "seed", "rounds", "clients", "likelihood")
CELL = re.compile(r"(?P<label>.+)-\d+-[0-9a-f]{16}-[0-9a-f]{16}")
"""How `metabayfl compare` names a run: label, seed, hashes of config and sources."""
DATA = ("data", "corrupt", "drift")
"""Sections of a config that make the data of a run; run.json has all the others."""


@dataclass(frozen=True)
class Run:
    """What a run has left, except for its models."""

    path: Path
    label: str
    about: dict[str, Any]
    environment: dict[str, Any]
    data: dict[str, Any] | None
    config: str
    events: list[Event]

    @property
    def seed(self) -> int:
        """What everything random in the run depends on."""
        return int(self.about["seed"])

    @property
    def is_classifier(self) -> bool:
        """Whether the run predicts classes, not values."""
        return bool(self.about["likelihood"].get("name") == "categorical")

    @cached_property
    def rounds(self) -> list[Event]:
        """Events of the published rounds."""
        return [event for event in self.events if event["event"] == "round"]

    @cached_property
    def history(self) -> list[Event]:
        """Events of the rounds that were evaluated."""
        return [event for event in self.rounds if event["metrics"]]

    @cached_property
    def choices(self) -> list[Event]:
        """What each client reported of a choice between rates; empty for methods that do not choose."""
        return [event for event in self.events if event["event"] == "client" and "incoming_nll" in event]

    @property
    def last_round(self) -> int:
        """Rounds that were published so far."""
        return max((event["round"] for event in self.rounds), default=0)

    @property
    def finished(self) -> bool:
        """Whether the last round of the plan is published."""
        return self.last_round >= int(self.about["rounds"])

    @property
    def variant(self) -> str:
        """Everything that was chosen, but for the seed: runs that differ in it are not repetitions of each other."""
        chosen = {key: value for key, value in self.about.items() if key != "seed"}
        return json.dumps([chosen, self.data_options], sort_keys=True)

    @cached_property
    def data_options(self) -> str:
        """What the config says of the data, as text; nothing for runs that were started from Python."""
        try:
            sections = tomllib.loads(self.config)
            chosen = {name: {**sections.get(name, {}), "verify": None} for name in DATA}  # checking changes no number
        except (tomllib.TOMLDecodeError, TypeError) as error:
            raise InputError(f"{self.path / 'config.toml'} is damaged: {error}") from None
        return json.dumps(chosen, sort_keys=True)

    def row(self) -> Row | None:
        """Return the run as a row of a comparison; an unfinished one is not counted among the finished ones."""
        label = self.label if self.finished else f"{self.label} (unfinished)"
        return row_of(label, self.seed, self.path.name, self.events)


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the directories of the runs meant: a directory of a comparison stands for the runs in it."""
    found = [run for path in paths for run in (_runs_of_comparison(path) if is_comparison(path) else [path])]
    return list({run.resolve(): run for run in found}.values())


def is_comparison(path: Path) -> bool:
    """Whether `metabayfl compare` or `metabayfl demo` works in a directory."""
    return (path / "runs").is_dir() and not (path / "run.json").exists()


def _runs_of_comparison(path: Path) -> Iterator[Path]:
    """Return the runs that the last comparison names; those of older configs and sources lie beside them."""
    listed = path / "compare.json"
    if not listed.exists():
        yield from sorted(run.parent for run in path.glob("runs/*/run.json"))
        return
    try:
        content = json.loads(listed.read_text(encoding="utf-8"))
        names = [str(row["run"]) for row in content["runs"]] + [str(name) for name in content.get("unfinished", ())]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{listed} is damaged ({error}): run metabayfl compare again") from None
    yield from (path / "runs" / Path(name).name for name in names)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read runs; different ones that would share a label get the name of their directory as well."""
    runs = [read_run(path) for path in find_runs(paths)]
    if not runs:
        raise InputError(f"{', '.join(map(str, paths))}: there is no run here yet")
    names: dict[str, dict[str, str]] = {}
    taken: set[tuple[str, str, int]] = set()
    labelled = []
    for run in runs:
        key = run.variant if (run.label, run.variant, run.seed) not in taken else str(run.path)
        taken.add((run.label, key, run.seed))
        known = names.setdefault(run.label, {})
        name = known.setdefault(key, run.label if not known else f"{run.label} ({run.path.name})")
        labelled.append(replace(run, label=name))
    return labelled


def read_run(path: Path) -> Run:
    """Read one run, finished or not."""
    directory = RunDirectory(path)
    about = directory.description()
    missing = [key for key in NEEDED if key not in about]
    if missing:
        raise InputError(f"{path / 'run.json'} is damaged: it has no {missing[0]}")
    config = path / "config.toml"
    text = config.read_text(encoding="utf-8", errors="replace") if config.exists() else ""
    cell = CELL.fullmatch(path.resolve().name)
    label = cell["label"] if cell else str(about["method"]["name"])
    return Run(path, label, about, directory.environment(), directory.data(), text, list(directory.events()))


def by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Repetitions of the same thing with different seeds, in the order given."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return {label: sorted(group, key=lambda run: run.seed) for label, group in groups.items()}
