"""FedAMP and HeurFedAMP: attention by hand and in its limits, a pull that acts, models kept by the server."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import metabayfl as mb
from federations import federation, network
from metabayfl.methods import FedAMP, HeurFedAMP, Local
from metabayfl.methods.fedamp import AttentiveMessages
from metabayfl.optim import PointLoss
from metabayfl.types import Context, Delivered, Params
from quadratics import EYE, curvature, least_squares, line, play, regression
from test_local import same

CLIENTS = [regression(0, 8, 8), regression(1, 24, 24)]
SGD: dict[str, Any] = {"rate": 0.2, "optimiser": "sgd", "momentum": 0.0}
# On a line at 0, 1 and 3: squared distances 1, 4 and 9, of which 4 is the median.
THREE = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)


def context(client: int | None = None, clients: int = 3) -> Context:
    return Context(line(1, 1.0), client=client, clients=dict.fromkeys(range(clients), 8))


def at(value: float, client: int) -> Delivered:
    return Delivered(client, {"mu": torch.full((3,), value, dtype=torch.float64)}, 1.0, {})


class TestAttention:
    def test_by_hand(self) -> None:
        found = FedAMP(kernel_width=2.0, server_step=0.5).attention(THREE)
        near, middle, far = (0.25 * torch.exp(torch.tensor(-d / 8.0)).item() for d in (1.0, 4.0, 9.0))
        expected = [[1 - near - far, near, far], [near, 1 - near - middle, middle], [far, middle, 1 - far - middle]]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0.0)

    def test_heuristic_by_hand(self) -> None:
        """Others at right angles and at 0 and 180 degrees, sharpness ln 2: shares as 1 : 2 and 1/2 : 1."""
        weights = torch.tensor([[1.0, 0.0], [0.0, 3.0], [2.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
        found = HeurFedAMP(own_share=0.3, sharpness=torch.tensor(2.0).log().item()).attention(weights)
        expected = torch.tensor([0.3, 0.7 * 2 / 7, 0.7 * 4 / 7, 0.7 * 1 / 7], dtype=torch.float64)
        torch.testing.assert_close(found[0], expected, rtol=1e-6, atol=0.0)
        assert found.diagonal().tolist() == [0.3] * 4

    def test_a_wide_kernel_mixes_uniformly(self) -> None:
        found = FedAMP(kernel_width=1e9).attention(THREE)
        torch.testing.assert_close(found, torch.full_like(found, 1 / 3), rtol=1e-6, atol=0.0)

    @pytest.mark.parametrize("width", [1e-6, 1e12])
    def test_with_a_given_step_both_limits_are_ones_own_model(self, width: float) -> None:
        found = FedAMP(kernel_width=width, server_step=0.5).attention(THREE)
        torch.testing.assert_close(found, torch.eye(3, dtype=torch.float64), rtol=0.0, atol=1e-9)

    def test_it_does_not_underflow_in_many_dimensions(self) -> None:
        """Distances of a hundred thousand weights: exp(-d²) is 0, relative to the median it is not."""
        weights = torch.randn(4, 100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        assert torch.exp(-(torch.dist(weights[0], weights[1]) ** 2)) == 0
        found = FedAMP().attention(weights)
        assert found.min() > 0.05
        assert torch.equal(FedAMP().attention(1000 * weights).round(decimals=9), found.round(decimals=9))

    @given(st.integers(1, 6), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(0, 1), st.booleans())
    def test_shares_are_shares(self, clients: int, width: float, step: float, own: float, same_place: bool) -> None:
        weights = torch.randn(clients, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(clients))
        weights = weights[:1].repeat(clients, 1) if same_place else weights
        for method in (FedAMP(kernel_width=width, server_step=step), HeurFedAMP(own_share=own, sharpness=width)):
            found = method.attention(weights)
            assert found.min() >= 0
            torch.testing.assert_close(found.sum(1), torch.ones(clients, dtype=torch.float64))


class TestPull:
    def test_gradient(self) -> None:
        """At w = u it is that of the loss; elsewhere it gains prox (w - u)."""
        ctx, data = context(0), CLIENTS[0]
        start = {"mu": torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)}
        plain, pulled = PointLoss(ctx.task, start), FedAMP(prox=0.7).objective(start, data, ctx)
        move = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
        for offset in (torch.zeros_like(move), move):
            gradients = []
            for objective in (plain, pulled):
                objective.groups[0].values.copy_(start["mu"] + offset)
                objective(data.x, data.y)
                gradients.append(objective.groups[0].gradient.clone())
            torch.testing.assert_close(gradients[1] - gradients[0], 0.7 * offset)

    def test_fixed_point_of_two_clients(self) -> None:
        """(A_i + prox) w_i = A_i v_i + prox u_i, with v_i the least squares and u_i mixed by the attention."""
        prox = 0.9
        found = play(FedAMP(prox=prox, epochs=40, **SGD), line(1, 1.0), CLIENTS, rounds=25)
        own = torch.stack([found.personal[number]["mu"] for number in range(2)])
        mixed = FedAMP().attention(own) @ own
        for number, data in enumerate(CLIENTS):
            a = curvature(data)
            expected = torch.linalg.solve(a + prox * EYE, a @ least_squares(data) + prox * mixed[number])
            torch.testing.assert_close(own[number], expected, rtol=0.0, atol=1e-4)
        assert (own[0] - least_squares(CLIENTS[0])).norm() > 0.1

    def test_a_pull_that_cannot_work_is_refused(self) -> None:
        with pytest.raises(mb.InputError, match=r"^prox = 20.0: rate \* prox = 2: below 2 is accepted"):
            FedAMP(prox=20.0, rate=0.1, optimiser="sgd")


@pytest.mark.parametrize("batchnorm", ["average", "local"])
@pytest.mark.parametrize(
    "method", [FedAMP(prox=0.0, kernel_width=1e-9, epochs=1), HeurFedAMP(prox=0.0, own_share=1.0, epochs=1)]
)
def test_without_others_and_pull_it_is_local_training(method: AttentiveMessages, batchnorm: str) -> None:
    alone = method.model_copy(update={"batchnorm": batchnorm})
    runs = [mb.federate(network(), federation(), m, rounds=3) for m in (alone, Local(epochs=1, batchnorm=batchnorm))]
    assert all(same(runs[0].model(client), runs[1].model(client)) for client in range(3))
    assert runs[0].metrics.keys() == {"P/L"}


class TestServer:
    def server(self) -> Params:
        method, ctx = FedAMP(), context()
        return method.aggregate(method.init_server(ctx), [at(0.0, 0), at(4.0, 2)], ctx)

    def test_the_first_receive_the_start_and_newcomers_the_mean(self) -> None:
        method = FedAMP()
        start = method.init_server(context()) | {"mu": torch.full((3,), 9.0, dtype=torch.float64)}
        assert method.broadcast(start, context(1))["mu"].tolist() == [9.0] * 3
        assert method.broadcast(self.server(), context(1))["mu"].tolist() == [2.0] * 3

    def test_others_receive_their_own_mixture(self) -> None:
        """Two models: their distance is the median, so that the other has the share exp(-1) / 2."""
        share = torch.tensor(-1.0).exp().item() / 2
        for client, expected in ((0, 4 * share), (2, 4 - 4 * share)):
            found = FedAMP().broadcast(self.server(), context(client))
            assert found["mu"].tolist() == pytest.approx([expected] * 3)

    def test_who_is_absent_keeps_its_model(self) -> None:
        after = FedAMP().aggregate(self.server(), [at(8.0, 2)], context())
        assert (after["0.mu"].tolist(), after["2.mu"].tolist()) == ([0.0] * 3, [8.0] * 3)
