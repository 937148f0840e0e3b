"""Meta-BayFL's personal posterior: the shared model to the bit, local training without a pull, its fixed point."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import metabayfl as mb
from federations import federation, network
from metabayfl.gaussian import as_prior, kl
from metabayfl.likelihood import Categorical
from metabayfl.methods import LocalBNN, MetaBayFL
from metabayfl.methods.base import get, make_task
from metabayfl.methods.needs import Need
from metabayfl.types import Context, Params, TrainData
from quadratics import EYE, curvature, least_squares, line, play, regression
from test_local import same
from test_meta_bayfl import client_data, take_part

ONE_RATE: dict[str, Any] = {"rates": (0.01,), "guard": False, "keep_better": False, "epochs": 2}


def with_selection(data: TrainData) -> TrainData:
    return replace(data, select_x=data.x[:4], select_y=data.y[:4])


@pytest.mark.parametrize("batchnorm", ["average", "local"])
def test_the_shared_model_is_untouched_to_the_bit(batchnorm: str) -> None:
    options = {"epochs": 1, "batchnorm": batchnorm}
    runs = [
        mb.federate(network(), federation(), MetaBayFL(personal=personal, **options), rounds=3)
        for personal in ("last", "prox")
    ]
    servers = [run.directory.checkpoint() for run in runs]
    assert servers[0] is not None
    assert servers[1] is not None
    shared = [{name: t for name, t in server.server.items() if name != "guard"} for server in servers if server]
    assert same(*shared)
    assert torch.equal(servers[0].server["guard"], servers[1].server["guard"])
    assert not same(runs[0].model(0), runs[1].model(0))


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_without_a_pull_it_is_local_training(optimiser: str) -> None:
    clients = [with_selection(regression(seed, 12, 4)) for seed in (0, 1)]
    task = line(1, 1.0, bayesian="all")
    prox = MetaBayFL(personal="prox", prox=0.0, kl="client", optimiser=optimiser, **ONE_RATE)
    alone = LocalBNN(rate=0.01, optimiser=optimiser, epochs=2, kl_weight=prox.kl_weight)
    found, expected = (play(method, task, clients, rounds=3) for method in (prox, alone))
    assert all(same(found.personal[number], expected.personal[number]) for number in (0, 1))


def test_fixed_point() -> None:
    """Without noise and KL: (A_n + prox) v_n = A_n w_n + prox mu_g, with mu_g where BayFL has settled."""
    clients, prox = [with_selection(regression(0, 8, 8)), with_selection(regression(1, 24, 24))], 0.7
    options = ONE_RATE | {"rates": (0.2,), "optimiser": "sgd", "momentum": 0.0, "epochs": 4}
    method = MetaBayFL(personal="prox", prox=prox, kl_weight=0.0, rho_rate=0.0, initial_sigma=1e-6, **options)
    found = play(method, line(1, 1.0, bayesian="all"), clients, rounds=30)
    for number, data in enumerate(clients):
        a = curvature(data)
        expected = torch.linalg.solve(a + prox * EYE, a @ least_squares(data) + prox * found.server["mu"])
        torch.testing.assert_close(found.personal[number]["mu"], expected, rtol=0.0, atol=1e-4)


def far(model: Params) -> Params:
    return model | {"mu": model["mu"] + 1.0}


@pytest.mark.parametrize("backend", ["bbb", "ivon"])
class TestPull:
    def method(self, backend: str, **options: Any) -> MetaBayFL:
        return MetaBayFL(personal="prox", backend=backend, optimiser="sgd", momentum=0.0, epochs=20, **options)

    def train(self, method: MetaBayFL) -> tuple[Params, Params]:
        """From a personal posterior far from the received one, at which it has arrived or not."""
        data = client_data()
        ctx = Context(make_task(method, network(), Categorical(3)), client=0, clients={0: len(data)})
        received = method.init_model(ctx)
        return method.train_own(far(received), received, 0.01, data, ctx)[0], received

    def test_it_acts(self, backend: str) -> None:
        own, received = self.train(self.method(backend, prox=50.0))
        assert (own["mu"] - received["mu"]).norm() < 0.2 * (far(received)["mu"] - received["mu"]).norm()

    def test_the_global_prior_is_the_received_posterior(self, backend: str) -> None:
        """A heavy KL takes the personal posterior there, though its own start is elsewhere."""
        own, received = self.train(self.method(backend, prox=0.0, prior="global", kl_weight=1.0))
        assert kl(own, as_prior(received)) < 0.1 * kl(far(received), as_prior(received))


class TestState:
    def test_it_persists_and_is_what_is_judged(self) -> None:
        method, data = MetaBayFL(personal="prox", epochs=1), client_data()
        fit, down = take_part(method, data)
        ctx = Context(make_task(method, network(), Categorical(3)), client=2, clients={2: len(data)})
        own = method.personalise(down, fit.state, None, data, ctx)
        assert same(own, get(fit.state, "own"))
        assert not torch.equal(own["mu"], fit.update.payload["mu"])

    def test_an_average_goes_a_share_of_the_way_each_round(self) -> None:
        method, data = MetaBayFL(personal="average", personal_share=0.25, personal_mix=1.0, **ONE_RATE), client_data()
        ctx = Context(make_task(method, network(), Categorical(3)), client=2, clients={2: len(data)})
        down = method.init_server(ctx)
        first = method.fit(down, {}, data, ctx)
        assert torch.equal(first.state["own.mu"], first.update.payload["mu"])
        second = method.fit(down, first.state, data, replace(ctx, round=1))
        wanted = 0.75 * first.update.payload["mu"] + 0.25 * second.update.payload["mu"]
        torch.testing.assert_close(second.state["own.mu"], wanted)
        assert same(method.personalise(down, second.state, None, data, ctx), get(second.state, "own"))

    @pytest.mark.parametrize("mix", [0.0, 0.3])
    def test_an_average_is_mixed_with_what_is_received_now(self, mix: float) -> None:
        method, data = MetaBayFL(personal_mix=mix, **ONE_RATE), client_data()
        ctx = Context(make_task(method, network(), Categorical(3)), client=2, clients={2: len(data)})
        fit = method.fit(method.init_server(ctx), {}, data, ctx)
        down = method.init_server(ctx)
        down["mu"] += 1.0
        own = method.personalise(down, fit.state, None, data, ctx)
        for name in ("mu", "rho"):
            torch.testing.assert_close(own[name], (1 - mix) * down[name] + mix * fit.state[f"own.{name}"])
        assert torch.equal(own["log_frequencies"], fit.state["own.log_frequencies"])

    def test_what_diverges_stays_as_it_was(self) -> None:
        method, data = MetaBayFL(personal="prox", prox=1e9, optimiser="sgd", epochs=1), client_data()
        fit, down = take_part(method, data)
        assert fit.update.metrics["personal_diverged"] == 1
        assert torch.equal(fit.state["own.mu"], down["mu"])

    def test_it_is_needed_only_where_it_is_asked_for(self) -> None:
        assert not MetaBayFL(personal="last").needs
        assert MetaBayFL(personal="prox").needs == MetaBayFL().needs == {Need.STATE}
