"""Ditto: FedAvg's model to the bit, local training without the pull, and the personal fixed point."""

import pytest
import torch
from torch import nn

import metabayfl as mb
from federations import federation, network
from metabayfl.methods import Ditto, FedAvg, Local
from quadratics import EYE, curvature, fixed_point, least_squares, line, play, regression
from test_local import same

optimisers = pytest.mark.parametrize("optimiser", ["adam", "sgd"])


@optimisers
@pytest.mark.parametrize("batchnorm", ["average", "local"])
class TestIdentities:
    """With dropout and BatchNorm, by the engine."""

    def test_the_global_model_is_that_of_fedavg(self, optimiser: str, batchnorm: str) -> None:
        options = {"epochs": 2, "optimiser": optimiser, "batchnorm": batchnorm}
        runs = [mb.federate(network(), federation(), method(**options), rounds=3) for method in (Ditto, FedAvg)]
        servers = [run.directory.checkpoint() for run in runs]
        assert servers[0] is not None
        assert servers[1] is not None
        assert same(servers[0].server, servers[1].server)

    def test_without_a_pull_it_is_local_training(self, optimiser: str, batchnorm: str) -> None:
        options = {"epochs": 2, "optimiser": optimiser, "batchnorm": batchnorm}
        ditto = mb.federate(network(), federation(), Ditto(prox=0.0, **options), rounds=3)
        local = mb.federate(network(), federation(), Local(**options), rounds=3)
        assert all(same(ditto.model(client), local.model(client)) for client in range(3))
        pulled = mb.federate(network(), federation(), Ditto(prox=1.0, **options), rounds=3)
        assert not same(pulled.model(0), local.model(0))


def test_personal_models_reach_their_fixed_point() -> None:
    """(A_n + prox) v_n = A_n w_n + prox w_g, with w_g where FedAvg has settled."""
    clients, prox = [regression(0, 8, 8), regression(1, 24, 24)], 2.0
    settled = fixed_point(clients, [0.25, 0.75], lambda a: EYE - torch.linalg.matrix_power(EYE - 0.2 * a, 5))
    method = Ditto(prox=prox, rate=0.2, epochs=5, optimiser="sgd", momentum=0.0)
    found = play(method, line(1, 1.0), clients, rounds=10, mu=settled)
    torch.testing.assert_close(found.server["mu"], settled, rtol=0.0, atol=1e-12)
    for number, data in enumerate(clients):
        a = curvature(data)
        expected = torch.linalg.solve(a + prox * EYE, a @ least_squares(data) + prox * found.server["mu"])
        torch.testing.assert_close(found.personal[number]["mu"], expected, rtol=0.0, atol=1e-8)


def test_a_client_without_a_personal_model_uses_what_it_receives() -> None:
    result = mb.federate(nn.Linear(4, 3), federation(), Ditto(epochs=1), rounds=1, clients_per_round=1)
    assert {"G/G", "G/L", "P/L"} == result.metrics.keys()
