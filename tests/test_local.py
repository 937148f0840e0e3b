"""Local and central training: nothing is sent, and what is tested stays with the clients."""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import metabayfl as mb
from federations import federation, network, plan
from metabayfl.api import check_job
from metabayfl.config import DriftOptions
from metabayfl.data.drift import Drift
from metabayfl.engine.plan import make_job
from metabayfl.inputs import Scaling
from metabayfl.methods import Central, FedAvg, Local, LocalBNN
from metabayfl.types import Params
from quadratics import least_squares, line, play, regression


def events(result: mb.Result) -> list[dict[str, Any]]:
    return [event for event in result.events if event["event"] == "client"]


def same(one: Params, two: Params) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


class TestLocal:
    def test_each_client_finds_its_own_least_squares(self) -> None:
        clients = [regression(0, 8, 8), regression(1, 24, 24)]
        found = play(Local(rate=0.2, epochs=20, optimiser="sgd", momentum=0.5), line(1, 1.0), clients, rounds=10)
        for number, data in enumerate(clients):
            torch.testing.assert_close(found.personal[number]["mu"], least_squares(data), rtol=0.0, atol=1e-4)

    def test_others_make_no_difference(self) -> None:
        """The first client of three ends as it does in a federation with other followers."""
        runs = [mb.federate(network(), federation(clients), Local(epochs=1), rounds=2) for clients in (1, 3)]
        assert same(runs[0].model(0), runs[1].model(0))
        assert not same(runs[1].model(0), runs[1].model(1))

    @pytest.mark.parametrize("method", [Local(epochs=1), LocalBNN(epochs=1)], ids=["plain", "Bayesian"])
    def test_there_is_no_global_view_and_nothing_is_sent(self, method: mb.Method, tmp_path: Path) -> None:
        result = mb.federate(network(), federation(), method, rounds=2, out=tmp_path / "run")
        assert result.metrics.keys() == {"P/L", "P/G"}
        assert all(event["bytes_up"] == event["bytes_down"] == 0 for event in events(result))
        with pytest.raises(mb.InputError, match=f"{method.name} leaves no global model: ask for a client's own"):
            result.predict(torch.zeros(2, 4))
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
        again = mb.load(tmp_path / "run", network())
        assert torch.equal(again.predict(x, client=1).probs, result.predict(x, client=1).probs)

    def test_own_models_are_judged_on_the_common_test_set(self) -> None:
        data = federation()
        result = mb.federate(network(), data, Local(epochs=1), rounds=1)
        right = [(result.predict(data.test_x, client=n).probs.argmax(1) == data.test_y).double() for n in range(3)]
        assert result.metrics["P/G"]["accuracy"]["mean"] == pytest.approx(torch.stack(right).mean().item())

    def test_a_client_that_never_took_part_has_the_start(self) -> None:
        result = mb.federate(network(), federation(), Local(epochs=1), rounds=1, clients_per_round=1)
        assert len({event["client"] for event in events(result)}) == 1
        assert result.metrics["P/L"]["accuracy"].keys() >= {"worst"}


class TestPooling:
    def test_every_sample_is_there_once_and_d_n_comes_last(self) -> None:
        data = federation()
        pooled = data.pooled()
        assert pooled.train.sizes().tolist() == [len(data.train.x), 0, 0]
        assert pooled.select_sizes.tolist() == [data.select_sizes.sum(), 0, 0]
        sort = [np.lexsort(x.T.numpy()) for x in (data.train.x, pooled.train.x)]
        assert torch.equal(data.train.x[sort[0]], pooled.train.x[sort[1]])
        assert torch.equal(data.train.y[sort[0]], pooled.train.y[sort[1]])
        selected = torch.cat([data.client(n).train_data(True).select_x for n in range(3)])
        assert torch.equal(pooled.client(0).train_data(True).select_x, selected)
        assert pooled.local_test is data.local_test
        assert torch.equal(pooled.pooled().train.x, pooled.train.x)

    def test_everything_else_of_a_federation_is_kept(self) -> None:
        data = replace(
            federation(),
            unlabelled=torch.zeros(2, 4),
            scaling=Scaling((0.5,), (0.5,)),
            drift=Drift(DriftOptions(kind="samples"), 0, 3, None),
            augment=True,
        )
        pooled, gathered = data.pooled(), {"train", "select_sizes", "batch_sizes"}
        kept = [field.name for field in fields(data) if field.name not in gathered]
        assert all(getattr(pooled, name) is getattr(data, name) for name in kept)
        everybody = data.train.sizes().sum() - data.select_sizes.sum()
        assert len(pooled.train_data(0, True, 0, 1).x) == math.ceil(everybody / 2)

    @pytest.mark.parametrize("kind", ["samples", "classes", "labels", "noise"])
    def test_pooled_data_drift(self, kind: Any) -> None:
        data = replace(federation(), drift=Drift(DriftOptions(kind=kind), 0, 3, None))
        drifting, steady = (mb.federate(network(), d, Central(epochs=1), rounds=2) for d in (data, federation()))
        assert drifting.metrics.keys() == steady.metrics.keys()
        assert not same(drifting.model(), steady.model())

    def test_central_is_fedavg_with_one_client(self) -> None:
        data = federation()
        pooled = data.pooled()
        alone = mb.Federation(
            mb.data.federation.Rows(pooled.train.x, pooled.train.y, pooled.train.offsets[:2]),
            mb.data.federation.Rows(data.test_x, data.test_y, np.array([0, len(data.test_x)])),
            pooled.select_sizes[:1], pooled.batch_sizes[:1], data.test_x, data.test_y, data.likelihood,
        )  # fmt: skip
        runs = [
            mb.federate(network(), data, Central(epochs=1), rounds=2),
            mb.federate(network(), alone, FedAvg(epochs=1), rounds=2),
        ]
        assert same(runs[0].model(), runs[1].model())
        assert runs[0].metrics["G/G"] == runs[1].metrics["G/G"]

    def test_tests_stay_with_the_clients_and_nothing_is_sent(self) -> None:
        result = mb.federate(network(), federation(), Central(epochs=1), rounds=2, clients_per_round=2)
        assert result.metrics.keys() == {"G/G", "G/L", "P/L"}
        assert result.metrics["G/L"] == result.metrics["P/L"]
        assert result.metrics["P/L"]["accuracy"]["std"] > 0
        assert [event["client"] for event in events(result)] == [0, 0]
        assert all(event["bytes_up"] == event["bytes_down"] == 0 for event in events(result))

    def test_two_updates_cannot_be_asked_of_one_place(self) -> None:
        with pytest.raises(mb.InputError, match="min_updates = 2: only 1 clients are invited"):
            check_job(make_job(Central(), network(), federation(), plan(min_updates=2)))
