"""pFedMe: its fixed point on quadratics, theta as the personal model, and rates that cannot work."""

from itertools import pairwise
from typing import Any

import pytest
import torch

import metabayfl as mb
from federations import federation, network
from metabayfl.methods import PFedMe
from quadratics import EYE, curvature, fixed_point, least_squares, line, play, regression

CLIENTS = [regression(0, 8, 8), regression(1, 24, 24)]


@pytest.mark.parametrize("steps", [1, 4])
def test_the_fixed_point_of_two_quadratics(steps: int) -> None:
    """An envelope has the curvature M = prox (A + prox)⁻¹ A; theta solves (A + prox) theta = A w_n + prox w."""
    rate, prox = 0.2, 2.0
    method = PFedMe(rate=rate, prox=prox, inner_rate=0.25, inner_steps=60, epochs=steps)

    def pull(a: torch.Tensor) -> torch.Tensor:
        envelope = prox * torch.linalg.solve(a + prox * EYE, a)
        return EYE - torch.linalg.matrix_power(EYE - rate * envelope, steps)

    expected = fixed_point(CLIENTS, [0.25, 0.75], pull)
    found = play(method, line(1, 1.0), CLIENTS, rounds=1, mu=expected)
    torch.testing.assert_close(found.server["mu"], expected, rtol=0.0, atol=1e-10)
    for data, own in zip(CLIENTS, found.personal.values(), strict=True):
        a, towards = curvature(data), expected
        for _ in range(steps):  # theta belongs to the w before its last step
            theta = torch.linalg.solve(a + prox * EYE, a @ least_squares(data) + prox * towards)
            towards = towards - rate * prox * (towards - theta)
        torch.testing.assert_close(own["mu"], theta, rtol=0.0, atol=1e-10)


def test_with_a_growing_pull_theta_comes_to_w() -> None:
    """inner_rate * prox and rate * prox fixed."""
    distances = []
    for prox in (1.0, 10.0, 100.0, 1000.0):
        method = PFedMe(prox=prox, inner_rate=0.5 / prox, rate=0.1 / prox, inner_steps=10, epochs=1)
        found = play(method, line(1, 1.0), CLIENTS, rounds=1)
        distances.append((found.personal[0]["mu"] - found.server["mu"]).norm().item())
    assert all(after < before / 5 for before, after in pairwise(distances))


@pytest.mark.parametrize("batchnorm", ["average", "local"])
def test_the_personal_model_is_not_what_is_sent(batchnorm: str) -> None:
    """Handing out the live tensors, which the next download overwrites, would give w for theta."""
    result = mb.federate(network(), federation(), PFedMe(epochs=1, batchnorm=batchnorm), rounds=2)
    checkpoint = result.directory.checkpoint()
    assert checkpoint is not None
    for client, address in checkpoint.latest.items():
        sent = result.directory.read_client(address).payload["mu"]
        assert (result.model(client)["mu"][: len(sent)] - sent).abs().max() > 1e-4
    assert result.metrics["P/L"] != result.metrics["G/L"]


def test_the_server_mixes() -> None:
    half, whole, twice = (
        play(PFedMe(epochs=1, server_mix=mix), line(1, 1.0), CLIENTS, rounds=1).server["mu"] for mix in (0.5, 1.0, 2.0)
    )
    torch.testing.assert_close(half, 0.5 * whole)
    torch.testing.assert_close(twice, 2 * whole)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rate": 0.1, "prox": 10.0}, "rate * prox = 1: below 1 is accepted"),
        ({"rate": "0.2/k", "prox": 10.0}, "rate * prox = 2: below 1 is accepted"),
        ({"rate": 0.1}, "prox = 15.0: rate * prox = 1.5: below 1 is accepted"),
        ({"inner_rate": 0.2, "prox": 10.0}, "inner_rate * prox = 2: below 2 is accepted"),
    ],
)
def test_rates_that_cannot_work_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(mb.InputError) as caught:
        PFedMe(**options)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 200
