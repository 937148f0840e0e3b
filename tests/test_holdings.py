"""Who holds what: written to an index file and read back, the same federation; files that do not fit are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metabayfl import InputError
from metabayfl.config import DataOptions, RunConfig
from metabayfl.data import build
from metabayfl.data.holdings import FORMAT, Holdings
from metabayfl.data.sources import Source
from metabayfl.environment import data_hash


def some_source(samples: int = 60) -> Source:
    x, y = np.arange(samples, dtype=np.float32)[:, None] / samples, np.arange(samples) % 3
    return Source(x, y, x, y, 3, owners=np.arange(samples) % 4, client_names=tuple("abcd"))


def export(config: RunConfig, path: Path) -> RunConfig:
    """Write the partition of a config, and return the config that reads it."""
    from metabayfl.data.sources import load

    source = load(config.data)
    Holdings.of(config.data, source, config.seed).write(path, config.data, source, config.seed)
    changed = {"partition_file": str(path), "partition": "iid", "clients": 99}
    return config.model_copy(update={"data": config.data.model_copy(update=changed)})


def test_a_partition_read_back_gives_the_same_federation(tmp_path: Path) -> None:
    config = RunConfig(seed=3, data={"clients": 4, "unlabelled": 100, "dev": 50, "fraction": 0.5})
    again = export(config, tmp_path / "deep" / "parts.json")
    assert data_hash(build(again)[0]) == data_hash(build(config)[0])


def test_another_seed_splits_the_same_clients_otherwise(tmp_path: Path) -> None:
    config = RunConfig(data={"clients": 4})
    again = export(config, tmp_path / "parts.json").model_copy(update={"seed": 1})
    one, other = build(config)[0], build(again)[0]
    assert data_hash(one) != data_hash(other)
    for number in range(4):
        held = [np.concatenate([c.x.numpy(), c.test_x.numpy()]) for c in (one.client(number), other.client(number))]
        assert sorted(image.tobytes() for image in held[0]) == sorted(image.tobytes() for image in held[1])


@given(st.integers(0, 99), st.sampled_from(["iid", "dirichlet", "shards", "by-column"]), st.integers(0, 9))
def test_no_row_is_in_two_places(seed: int, partition: Any, pool: int) -> None:
    options = DataOptions(partition=partition, clients=3, min_size=1, alpha=1, dev=pool, unlabelled=9 - pool)
    found = Holdings.of(options, some_source(), seed)
    rows = np.concatenate([*found.clients, found.dev, found.unlabelled])
    assert sorted(rows.tolist()) == list(range(60))
    assert (len(found.dev), len(found.unlabelled)) == (pool, 9 - pool)
    if partition == "by-column":
        assert all(len(set((rows % 4).tolist())) == 1 for rows in found.clients)


def write(path: Path, **changes: Any) -> str:
    about = {"format": FORMAT, "dataset": "digits", "samples": 60, "clients": [[0, 1, 2, 5], [3, 4, 6]]}
    path.write_text(json.dumps({key: value for key, value in (about | changes).items() if value is not None}))
    return str(path)


def test_pools_come_from_what_no_client_holds(tmp_path: Path) -> None:
    options = DataOptions(partition_file=write(tmp_path / "p.json"), unlabelled=20, dev=10)
    found = Holdings.of(options, some_source(), 0)
    assert [part.tolist() for part in found.clients] == [[0, 1, 2, 5], [3, 4, 6]]
    pools = {*found.dev.tolist(), *found.unlabelled.tolist()}
    assert len(pools) == 30
    assert min(pools) > 6


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "csv"}, "not an index file"),
        ({"dataset": "cifar10"}, "for 60 training samples of 'cifar10'; here are 60 of 'digits'"),
        ({"samples": 50_000}, "for 50000 training samples of 'digits'; here are 60"),
        ({"clients": None}, "has no clients"),
        ({"clients": []}, "has no clients"),
        ({"clients": [[0, 1], []]}, "client 1: a list of row numbers from 0 to 59"),
        ({"clients": [[0, 60]]}, "client 0: a list of row numbers from 0 to 59"),
        ({"clients": [[-1, 3]]}, "client 0: a list of row numbers"),
        ({"clients": [[0.5, 3]]}, "client 0: a list of row numbers"),
        ({"clients": [["a"]]}, "client 0: a list of row numbers"),
        ({"clients": [[0, 1, 0]]}, "row 0 is held 2 times"),
        ({"clients": [[0, 1], [1, 2]]}, "row 1 is held 2 times"),
        ({"clients": [[0, 1]], "dev": [1, 2]}, "row 1 is held 2 times"),
        ({"dev": [7, 8]}, "data.dev = 0, but .* sets 2 samples aside"),
    ],
)
def test_files_that_do_not_fit(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    options = DataOptions(partition_file=write(tmp_path / "p.json", **changes))
    with pytest.raises(InputError, match=reason):
        Holdings.of(options, some_source(), 0)


def test_no_file_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data\.partition_file = 'nothing\.json' is not there; looked for"):
        Holdings.of(DataOptions(partition_file="nothing.json"), some_source(), 0)
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read as JSON"):
        Holdings.of(DataOptions(partition_file=str(tmp_path / "p.json")), some_source(), 0)
    with pytest.raises(InputError, match=r"data\.dev = 60: 53 samples are there"):
        Holdings.of(DataOptions(partition_file=write(tmp_path / "p.json"), dev=60), some_source(), 0)
