"""A BatchNorm ResNet-20 in a federation: what is averaged, and what never leaves a client."""

from functools import cache

import pytest
import torch

import metabayfl as mb
from metabayfl.randomness import keyed_globals

BRIGHT, DARK = 0.9, 0.1


def federation(brightness: tuple[float, float] = (BRIGHT, DARK)) -> mb.Federation:
    """Two clients whose images differ in brightness, so that their statistics differ."""
    rng = torch.Generator().manual_seed(0)
    images = [light + 0.1 * torch.rand(20, 1, 8, 8, generator=rng) for light in brightness]
    return mb.Federation.from_arrays([(x, torch.arange(20) % 2) for x in images], batch_size=8)


@cache
def trained(policy: str, brightness: tuple[float, float] = (BRIGHT, DARK)) -> mb.Result:
    with keyed_globals("net"):
        model = mb.models.build("resnet20", classes=2, input_shape=(1, 8, 8))
    method = mb.FedAvg(epochs=1, batchnorm=policy)  # type: ignore[arg-type]
    return mb.federate(model, federation(brightness), method, rounds=1)


def statistics_of(result: mb.Result, client: int | None) -> torch.Tensor:
    """Running means of the first BatchNorm layer."""
    return result.task.buffer_layout.unflatten(result.model(client)["buffers"])["norm1.running_mean"]


@pytest.mark.parametrize("policy", ["average", "local"])
def test_it_trains(policy: str) -> None:
    metrics = trained(policy).metrics
    assert ("G/G" in metrics) == (policy == "average")
    assert 0 <= metrics["P/L"]["accuracy"]["weighted"] <= 1


def test_averaged_statistics_lie_between_those_of_the_clients() -> None:
    result = trained("average")
    torch.testing.assert_close(statistics_of(result, None), (statistics_of(result, 0) + statistics_of(result, 1)) / 2)


def test_local_statistics_do_not_depend_on_the_other_client() -> None:
    """After one round only what was sent could tell a client about the other, and it has not been received yet."""
    beside_dark, beside_bright = trained("local"), trained("local", (BRIGHT, BRIGHT))
    assert torch.equal(statistics_of(beside_dark, 0), statistics_of(beside_bright, 0))
    assert not torch.equal(statistics_of(beside_dark, 0), statistics_of(beside_dark, 1))


def test_local_statistics_are_not_sent() -> None:
    up = [
        next(e["bytes_up"] for e in trained(policy).events if e["event"] == "client") for policy in ("average", "local")
    ]
    channels = 7 * 16 + 6 * 32 + 6 * 64
    assert up[0] - up[1] == pytest.approx(4 * channels * len(("scale", "shift", "mean", "variance")), abs=200)
