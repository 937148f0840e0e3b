"""Training data that change from round to round."""

from typing import Any

import pytest
import torch

import metabayfl as mb
from metabayfl.config import DriftOptions, RunConfig
from metabayfl.data import build
from metabayfl.data.drift import Drift
from metabayfl.experiment import Experiment
from metabayfl.types import TrainData

ROUNDS = 6


def drifting(**options: Any) -> mb.Federation:
    return build(RunConfig(data={"clients": 3, "partition": "iid"}, drift=options))[0]


def in_round(federation: mb.Federation, round_: int, client: int = 0) -> TrainData:
    return federation.train_data(client, True, round_, ROUNDS)


def names(x: torch.Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for row in x}


@pytest.mark.parametrize("kind", ["samples", "classes", "labels", "noise"])
def test_a_round_is_a_function_of_seed_client_and_round(kind: str) -> None:
    federation = drifting(kind=kind, amount=0.3)
    one, same, next_ = (in_round(federation, round_) for round_ in (2, 2, 3))
    assert torch.equal(one.x, same.x)
    assert torch.equal(one.y, same.y)
    assert not (torch.equal(one.x, next_.x) and torch.equal(one.y, next_.y))
    assert torch.equal(one.select_x, next_.select_x)
    assert len(one) == federation.train_sizes(held_out=True)[0]


@pytest.mark.parametrize("kind", ["samples", "classes"])
def test_a_share_of_the_samples_each_time(kind: str) -> None:
    federation = drifting(kind=kind, amount=0.25)
    everything = federation.client(0).train_data(held_out=True)
    here = in_round(federation, 1)
    assert names(here.x) < names(everything.x)
    assert len(names(here.x)) == len(here) == -(-len(everything) // 4)


def test_a_class_mix_of_its_own() -> None:
    federation = drifting(kind="classes", amount=0.2)
    mixes = torch.stack([torch.bincount(in_round(federation, k).y, minlength=10) for k in range(ROUNDS)]).float()
    even = torch.stack(
        [torch.bincount(in_round(drifting(kind="samples", amount=0.2), k).y, minlength=10) for k in range(ROUNDS)]
    )
    assert mixes.var(0).sum() > 3 * even.float().var(0).sum()


def test_labels_go_out_of_date() -> None:
    federation = drifting(kind="labels", amount=0.5)
    right = federation.client(0).train_data(held_out=True).y
    wrong = [(in_round(federation, round_).y != right).float().mean().item() for round_ in range(ROUNDS)]
    assert wrong[0] == 0
    assert wrong[-1] == pytest.approx(0.5, abs=0.1)
    assert wrong[1] < wrong[3] < wrong[5]


def test_a_run_on_drifting_data_is_reproducible(tmp_path: Any) -> None:
    config = RunConfig(rounds=2, data={"clients": 3}, drift={"kind": "samples", "amount": 0.3})
    models = []
    for workers in (1, 2):
        Experiment.of(config).run(tmp_path / str(workers), workers)
        models.append((tmp_path / str(workers) / "model.safetensors").read_bytes())
    assert models[0] == models[1]


def test_classes_cannot_drift_in_a_regression() -> None:
    with pytest.raises(mb.InputError, match=r"drift\.kind = 'labels' needs classes"):
        Drift(DriftOptions(kind="labels"), 0, None, None)
