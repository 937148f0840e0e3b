"""pFedBayes: the prior step has the gradient of the KL and moves only the prior; posteriors persist."""

import pytest
import torch
from torch.distributions import Normal, kl_divergence

import metabayfl as mb
from federations import federation, network
from metabayfl import gaussian
from metabayfl.gaussian import Elbo, Prior, rho_of, sigma_of
from metabayfl.methods import PFedBayes
from metabayfl.methods.base import get
from metabayfl.methods.pfedbayes import Follower
from metabayfl.types import Context
from quadratics import line, play, regression
from test_local import same

CLIENTS = [regression(0, 8, 8), regression(1, 24, 24)]
DRAW = torch.Generator().manual_seed(0)
MU, RHO, OWN_MU, OWN_RHO = (torch.randn(3, generator=DRAW, dtype=torch.float64) for _ in range(4))


def leader() -> Elbo:
    """A personal posterior."""
    task = line(1, 1.0, bayesian="all")
    return Elbo(task, {"mu": OWN_MU, "rho": OWN_RHO}, Prior(0.0, 1.0), 0.1, torch.Generator())


class TestPriorStep:
    def test_its_gradient_is_that_of_the_kl(self) -> None:
        mu, rho = MU.clone().requires_grad_(), RHO.clone().requires_grad_()
        kl = kl_divergence(Normal(OWN_MU, sigma_of(OWN_RHO)), Normal(mu, sigma_of(rho))).sum()
        expected = torch.autograd.grad(0.3 * kl, [mu, rho])
        follower = Follower({"mu": MU, "rho": RHO})
        follower.follow(leader(), 0.3)
        for group, gradient in zip(follower.groups, expected, strict=True):
            torch.testing.assert_close(group.gradient, gradient)

    def test_it_moves_the_prior_and_nothing_else(self) -> None:
        personal, follower = leader(), Follower({"mu": MU, "rho": RHO})
        before = {"mu": personal.mu.clone(), "rho": personal.rho.clone(), "task": personal.task.gradient.clone()}
        follower.follow(personal, 0.3)
        gaussian.kl({"mu": personal.mu, "rho": personal.rho}, follower.prior())
        for group in follower.groups:
            group.values.sub_(group.gradient, alpha=0.1)
        assert torch.equal(personal.mu, before["mu"])
        assert torch.equal(personal.rho, before["rho"])
        assert torch.equal(personal.task.gradient, before["task"])
        assert not torch.equal(follower.mu, MU)
        assert not torch.equal(follower.rho, RHO)

    def test_it_leads_to_the_personal_posterior(self) -> None:
        personal, follower = leader(), Follower({"mu": MU, "rho": RHO})
        for _ in range(2000):
            follower.follow(personal, 1.0)
            for group in follower.groups:
                group.values.sub_(group.gradient, alpha=0.02)
            follower.moved()
        torch.testing.assert_close(follower.mu, OWN_MU, rtol=0.0, atol=1e-6)
        torch.testing.assert_close(follower.rho, OWN_RHO, rtol=0.0, atol=1e-6)


def test_the_personal_posterior_minimises_nll_plus_kl_to_a_prior_that_stands_still() -> None:
    """Inputs of zero say nothing: q goes to the received posterior, where it has no reason to leave."""
    nothing = regression(0, 8, 8)
    nothing.x.zero_()
    method = PFedBayes(optimiser="sgd", momentum=0.0, rate=0.05, epochs=30, kl_weight=8.0)
    received = {"mu": torch.ones(3, dtype=torch.float64), "rho": rho_of(torch.full((3,), 0.5, dtype=torch.float64))}
    found = play(method, line(1, 1.0, bayesian="all"), [nothing], rounds=4, **received)
    assert (found.personal[0]["mu"] - found.server["mu"]).abs().max() < 1e-2
    assert (sigma_of(found.personal[0]["rho"]) - sigma_of(found.server["rho"])).abs().max() < 1e-2
    assert (found.server["mu"] > 0.3).all()


def test_a_weak_prior_leaves_clients_alone_and_a_strong_one_holds_them() -> None:
    distances = []
    for weight in (1e-6, 100.0):
        method = PFedBayes(kl_weight=weight, rate=0.01, epochs=20)
        found = play(method, line(1, 1.0, bayesian="all"), CLIENTS, rounds=10)
        distances.append((found.personal[0]["mu"] - found.personal[1]["mu"]).norm().item())
    assert distances[1] < 0.5 * distances[0]


def test_posteriors_persist_and_are_copies() -> None:
    result = mb.federate(network(), federation(), PFedBayes(epochs=1), rounds=2)
    checkpoint = result.directory.checkpoint()
    assert checkpoint is not None
    for client, address in checkpoint.latest.items():
        record = result.directory.read_client(address)
        assert same(get(record.state, "own"), result.model(client))
        assert not torch.equal(record.payload["mu"], result.model(client)["mu"])
    assert result.metrics.keys() == {"G/G", "G/L", "P/L"}


@pytest.mark.parametrize("mix", [0.5, 2.0])
def test_the_server_mixes(mix: float) -> None:
    task = line(1, 1.0, bayesian="all")
    start = PFedBayes().init_server(Context(task))
    whole, part = (
        play(PFedBayes(epochs=1, server_mix=share), task, CLIENTS, rounds=1).server for share in (1.0, mix)
    )  # fmt: skip
    for name in ("mu", "rho"):
        torch.testing.assert_close(part[name], start[name] + mix * (whole[name] - start[name]))
