"""FedFomo: weights by hand, nothing useful changes nothing, and candidates chosen by use or by chance."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import metabayfl as mb
from federations import federation, network
from metabayfl.methods import FedFomo, Local
from metabayfl.methods.fedfomo import mix
from metabayfl.types import Context, Delivered, Params
from quadratics import line, regression
from test_local import same

DATA = regression(0, 12, 12)
DATA = replace(DATA, select_x=DATA.x[:6], select_y=DATA.y[:6])


def at(value: float) -> Params:
    return {"mu": torch.full((3,), value, dtype=torch.float64)}


def context(client: int | None = 0, round_: int = 0, clients: int = 6) -> Context:
    return Context(line(1, 1.0), round=round_, client=client, clients=dict.fromkeys(range(clients), 12))


class TestMixing:
    def test_by_hand(self) -> None:
        """Usefulness 3 and 1 of models at 4 and 8, seen from 0: 3/4 · 4 + 1/4 · 8 = 5; harmful ones do not count."""
        others = {1: at(4.0), 2: at(8.0), 3: at(100.0)}
        assert mix(at(0.0), others, {1: 3.0, 2: 1.0, 3: -2.0})["mu"].tolist() == [5.0] * 3

    def test_without_use_nothing_changes(self) -> None:
        own = at(1.0)
        for usefulness in ({}, {1: -1.0}, {1: 0.0}):
            assert torch.equal(mix(own, {1: at(4.0)}, usefulness)["mu"], own["mu"])

    def test_usefulness_is_the_gain_on_d_n_per_distance(self) -> None:
        method, ctx = FedFomo(), context()
        losses = [method.loss(model, DATA, ctx) for model in (at(0.0), at(0.5))]
        found = method.usefulness(at(0.0), {1: at(0.5), 2: at(0.0)}, DATA, ctx)
        assert found[1] == pytest.approx((losses[0] - losses[1]) / (0.5 * 3**0.5))
        assert found[2] == 0.0

    def test_a_model_of_its_own_as_the_only_candidate_is_local_training(self) -> None:
        method, ctx = FedFomo(epochs=2), context()
        own = method.init_model(ctx)
        fit = method.fit({"mu.3": own["mu"].clone()}, {}, DATA, ctx)
        alone = Local(epochs=2).fit({}, {}, DATA, ctx)
        assert torch.equal(fit.update.payload["mu"], alone.state["own.mu"])

    def test_without_d_n_there_is_one_clear_line(self) -> None:
        bare = replace(DATA, select_x=DATA.x[:0], select_y=DATA.y[:0])
        with pytest.raises(mb.InputError, match=r"fedfomo chooses by d_n, and client 0 has none"):
            FedFomo().fit({}, {}, bare, context())


class TestCandidates:
    def server(self) -> Params:
        """Six clients, of whom five have sent models; client 0 found 4 and 2 the most useful."""
        method, ctx = FedFomo(), context(None)
        server = method.init_server(ctx)
        rows = {0: torch.tensor([0.0, 0.1, 0.5, -0.2, 0.9, 0.0])}
        updates = [Delivered(n, at(float(n)) | {"affinity": rows.get(n, torch.zeros(6))}, 1.0, {}) for n in range(5)]
        return method.aggregate(server, updates, ctx)

    def test_the_most_useful_come_first(self) -> None:
        method = FedFomo(explore=0.0, candidates=2)
        assert method.choose(self.server(), context(0)) == [2, 4]
        assert method.broadcast(self.server(), context(0)).keys() == {"mu.2", "mu.4"}

    def test_never_oneself_never_the_unknown_never_twice(self) -> None:
        server = self.server()
        for client in range(6):
            chosen = FedFomo(candidates=9).choose(server, context(client))
            assert chosen == [other for other in range(5) if other != client]

    def test_chance_decays(self) -> None:
        """With certain exploration all come up; ten rounds later only the useful ones."""
        server, method = self.server(), FedFomo(explore=1.0, explore_decay=0.1, candidates=1)
        first = {method.choose(server, replace(context(0), seed=seed))[0] for seed in range(40)}
        later = {method.choose(server, replace(context(0, round_=10), seed=seed))[0] for seed in range(40)}
        assert (first, later) == ({1, 2, 3, 4}, {4})

    def test_usefulness_adds_up_and_models_are_replaced(self) -> None:
        method, server = FedFomo(), self.server()
        again = Delivered(0, at(7.0) | {"affinity": torch.ones(6)}, 1.0, {})
        after = method.aggregate(server, [again], context(None))
        assert after["affinity"][0].tolist() == pytest.approx([1.0, 1.1, 1.5, 0.8, 1.9, 1.0])
        assert after["mu.0"].tolist() == [7.0] * 3
        assert server["affinity"][0, 0] == 0


def test_bytes_down_are_those_of_the_models(tmp_path: Path) -> None:
    """Nothing in the first round; then as many models as there are others, up to the number of candidates."""
    result = mb.federate(network(), federation(), FedFomo(epochs=1, candidates=1), rounds=3)
    down = {(event["round"], event["client"]): event["bytes_down"] for event in result.events if "bytes_down" in event}
    up = [event["bytes_up"] for event in result.events if "bytes_up" in event]
    assert all(down[1, client] < 100 for client in range(3))
    assert all(0.5 * min(up) < down[3, client] < max(up) for client in range(3))
    assert result.metrics.keys() == {"P/L"}
    assert not same(result.model(0), result.model(1))
