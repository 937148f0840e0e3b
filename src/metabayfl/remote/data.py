"""The data of one client, on its own machine; and a federation as a server sees it, which holds nobody's samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from metabayfl.config import DataOptions, RunConfig
from metabayfl.data import build, likelihood_for
from metabayfl.data.arrays import Pair, as_inputs, as_pair, batch_sizes
from metabayfl.data.drift import Drift
from metabayfl.data.federation import ClientData, Federation, Rows, split_rows
from metabayfl.data.sources.arrays import read_npz
from metabayfl.inputs import Scaling, holds_numbers
from metabayfl.likelihood import Likelihood
from metabayfl.options import InputError
from metabayfl.remote.samples import read_samples
from metabayfl.remote.wire import Introduction

NODES = "nodes"
"""data.name of a run whose clients hold their own data."""
USED = {"name", "clients", "batch_size", "test_fraction"}
USED |= {"label", "columns", "classes", "regression", "noise_std", "resize", "grey"}
"""Options of [data] that mean something then."""


class Traits(TypedDict):
    """What else there is to a federation, and every client knows."""

    scaling: Scaling | None
    drift: Drift | None
    augment: bool


NO_TRAITS: Traits = {"scaling": None, "drift": None, "augment": False}


def traits_of(federation: Federation) -> Traits:
    """Return what a client has to know of a federation besides its own samples."""
    return {"scaling": federation.scaling, "drift": federation.drift, "augment": federation.augment}


def own_data(config: RunConfig, client: int, path: Path | None) -> tuple[ClientData, Traits]:
    """Return a client's data: its own, or its part of the federation that the config describes."""
    if client >= config.data.clients:
        raise InputError(f"client-id = {client}: 0 to {config.data.clients - 1} is accepted with data.clients")
    if config.data.name == NODES:
        if path is None:
            raise InputError(f"data.name = {NODES!r}: the node of client {client} needs data=PATH in its node config")
        return _split(read_samples(path, config.data), config, client), NO_TRAITS
    federation, _ = build(config)
    return federation.client(client), traits_of(federation)


def _split(samples: Pair, config: RunConfig, client: int) -> ClientData:
    """Split a client's samples as `Federation.from_arrays` does."""
    x, y = samples
    split = split_rows(client, len(x), config.seed, config.data.test_fraction, config.select.fraction)
    size = batch_sizes(config.data.batch_size, config.data.clients)[client]
    return ClientData(x[split.train], y[split.train], split.select_size, x[split.test], y[split.test], size)


def introduce(client: int, data: ClientData) -> Introduction:
    """Say how many samples a client has, and of what kind."""
    labels = torch.cat([data.y, data.test_y])
    return Introduction(
        client=client,
        train=len(data.x),
        select=data.select_size,
        test=len(data.test_x),
        batch_size=data.batch_size,
        input_shape=tuple(data.x.shape[1:]),
        whole_inputs=not holds_numbers(data.x),
        classes=0 if labels.is_floating_point() else int(labels.max()) + 1,
        label_shape=tuple(labels.shape[1:]),
    )


def alone(client: int, data: ClientData, clients: int, likelihood: Likelihood, traits: Traits) -> Federation:
    """Return the federation as a client sees it: only its own samples are there."""
    everyone = np.ones(clients, dtype=np.int64)
    parts = ((data.x, data.y), (data.test_x, data.test_y))
    train, test = (Rows(x, y, np.repeat([0, len(x)], [client + 1, clients - client])) for x, y in parts)
    sizes = everyone * data.select_size, everyone * data.batch_size
    return Federation(train, test, *sizes, data.test_x[:0], data.test_y[:0], likelihood, **traits)


def absent(
    roster: Sequence[Introduction], common: Pair, likelihood: Likelihood, pool: Tensor | None, traits: Traits
) -> Federation:
    """Return the federation as a server sees it: sizes are known, samples are blank and take no memory."""
    rows = [_blank(roster, [getattr(one, part) for one in roster]) for part in ("train", "test")]
    sizes = [np.array([getattr(one, name) for one in roster]) for name in ("select", "batch_size")]
    return Federation(rows[0], rows[1], sizes[0], sizes[1], *common, likelihood, pool, **traits)


def _blank(roster: Sequence[Introduction], sizes: Sequence[int]) -> Rows:
    first, total = roster[0], sum(sizes)
    x = torch.zeros(1, *first.input_shape, dtype=torch.int64 if first.whole_inputs else torch.float32)
    y = torch.zeros(1, *first.label_shape, dtype=torch.int64 if first.classes else torch.float32)
    x, y = (tensor.expand(total, *tensor.shape[1:]) if total else tensor[:0] for tensor in (x, y))
    return Rows(x, y, np.cumsum([0, *sizes]))


class Common(NamedTuple):
    """What a server holds itself: the common test set, the pool U, and the likelihood if that is known."""

    test: Pair | None
    pool: Tensor | None
    likelihood: Likelihood | None
    traits: Traits


def common_data(config: RunConfig, path: Path | None) -> Common:
    """Return what a server holds itself."""
    if config.data.name != NODES:
        federation, _ = build(config)
        test = federation.test_x, federation.test_y
        return Common(test, federation.unlabelled, federation.likelihood, traits_of(federation))
    _refuse_unused(config)
    arrays = {} if path is None else read_npz(path)
    strange = sorted(arrays.keys() - {"test_x", "test_y", "unlabelled"})
    if strange or ("test_x" in arrays) != ("test_y" in arrays):
        raise InputError(f"{path} has {', '.join(arrays)}; test_x with test_y, and unlabelled, are accepted")
    pair = as_pair((arrays["test_x"], arrays["test_y"]), f"{path}, test") if "test_x" in arrays else None
    pool = as_inputs(arrays["unlabelled"], f"{path}, unlabelled") if "unlabelled" in arrays else None
    return Common(pair, pool, None, NO_TRAITS)


def _refuse_unused(config: RunConfig) -> None:
    """Refuse options that would be ignored where nodes bring their own data."""
    sections = {"data": config.data, "corrupt": config.corrupt, "drift": config.drift}
    changed = [
        (f"{section}.{name}", getattr(options, name))
        for section, options in sections.items()
        for name, field in type(options).model_fields.items()
        if getattr(options, name) != field.default and not (section == "data" and name in USED)
    ]
    changed += [("eval.on", "dev")] if config.eval.on == "dev" else []
    for name, value in changed:
        raise InputError(f"{name} = {value!r} cannot be used with data.name = {NODES!r}: clients' data are as they are")
    names = config.data.classes
    if names is not None and not 2 <= len(set(names)) == len(names):
        raise InputError(f"data.classes = {list(names)!r}: at least 2 different names are accepted")


def agree(roster: Sequence[Introduction], test: Pair | None, data: DataOptions) -> Likelihood:
    """Return the likelihood that fits all clients; refuse clients whose samples are of different kinds."""
    kinds = {(one.input_shape, one.whole_inputs, one.label_shape, one.classes > 0): one.client for one in roster}
    if len(kinds) > 1:
        first, second = sorted(kinds.values())[:2]
        raise InputError(f"clients {first} and {second} have inputs or labels of different shapes or kinds")
    if not roster[0].classes:
        return likelihood_for(None, data)
    found = max(*(one.classes for one in roster), 0 if test is None else int(test[1].max()) + 1)
    if data.classes is not None and found > len(data.classes):
        raise InputError(f"labels go up to {found - 1}; data.classes names {len(data.classes)} classes, from 0")
    return likelihood_for(max(2, found) if data.classes is None else len(data.classes), data)
