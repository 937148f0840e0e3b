"""The server's side of a run whose clients are elsewhere: who is there, then the same loop as on one machine."""

import json
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import tomli_w
import torch

from metabayfl.api import run_job
from metabayfl.config import RunConfig, as_toml
from metabayfl.data.arrays import Pair
from metabayfl.engine.client import Desk
from metabayfl.engine.local import Observer
from metabayfl.experiment import build_model
from metabayfl.methods import create
from metabayfl.options import InputError
from metabayfl.remote.data import absent, agree, common_data
from metabayfl.remote.wire import Introduction, Request, encode_request
from metabayfl.remote.workers import Carrier, Nodes, base_request
from metabayfl.result import Result, describe_likelihood

ROSTER = "remote.json"


class Assembly(Carrier, Protocol):
    """A carrier that also finds out which clients are there."""

    def assemble(self, clients: int) -> list[Introduction]:
        """Wait until all clients have introduced themselves, and return what they said in the order of their ids."""
        ...


Connect = Callable[[bytes], Assembly]
"""Makes a carrier from the request by which nodes are asked to introduce themselves."""


def carry_out(
    config: RunConfig,
    out: Path,
    connect: Connect,
    *,
    own: Path | None = None,
    resume: bool = False,
    observe: Observer = lambda event: None,
) -> Result:
    """Carry out a config with clients that hold their own data; `own` is the server's file, with a common test set."""
    method, text = create(config.method), tomli_w.dumps(as_toml(config))
    if method.pools:
        raise InputError(
            f"{method.name} puts everybody's data into one place: it cannot run where data stay with nodes"
        )
    common = common_data(config, own)
    experiment, roster = _recall(out) if resume else ("", [])
    experiment = experiment or secrets.token_hex(8)
    carrier = connect(encode_request(Request(experiment=experiment, config=text), {}))
    roster = roster or carrier.assemble(config.data.clients)
    likelihood = common.likelihood or agree(roster, common.test, config.data)
    test = _common(common.test, roster, config)
    federation = absent(roster, test, likelihood, common.pool, common.traits)

    def crew(desk: Desk) -> Nodes:
        _remember(desk, experiment, roster)
        return Nodes(desk, carrier, base_request(desk, experiment, text, describe_likelihood(likelihood)))

    model = build_model(config, likelihood, roster[0].input_shape)
    return run_job(
        model, federation, method, config.plan(), out=out, workers=crew, resume=resume, observe=observe, config=text
    )


def _common(test: Pair | None, roster: Sequence[Introduction], config: RunConfig) -> Pair:
    """Return the common test set, which may be empty if clients have tests of their own."""
    if test is None and not any(one.test for one in roster):
        raise InputError(f"there is nothing to test on: data.test_fraction = {config.data.test_fraction} and no file")
    return (torch.empty(0), torch.empty(0)) if test is None else test


def _remember(desk: Desk, experiment: str, roster: Sequence[Introduction]) -> None:
    if not (desk.directory.path / ROSTER).exists():
        about = {"experiment": experiment, "clients": [one.model_dump(mode="json") for one in roster]}
        desk.directory.write_json(ROSTER, about)


def _recall(out: Path) -> tuple[str, list[Introduction]]:
    """Return the name of a run on its nodes and the clients it began with; nothing if it has not begun."""
    if not (out / ROSTER).exists():
        return "", []
    about = json.loads((out / ROSTER).read_text(encoding="utf-8"))
    return about["experiment"], [Introduction(**one) for one in about["clients"]]
