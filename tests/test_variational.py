"""What methods with a Gaussian posterior share: where the prior and the weight of the KL come from."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metabayfl import Federation
from metabayfl.config import Plan
from metabayfl.engine.plan import make_job
from metabayfl.gaussian import Elbo, Prior, sigma_of
from metabayfl.ivon import IvonLoss
from metabayfl.likelihood import Categorical
from metabayfl.methods.base import make_task
from metabayfl.methods.bayfl import BayFL
from metabayfl.methods.meta_bayfl import MetaBayFL
from metabayfl.types import Context, TrainData

DATA = TrainData(torch.zeros(10, 2, 4, 4), torch.zeros(10, dtype=torch.long), torch.zeros(0), torch.zeros(0), 5)


def network() -> nn.Module:
    """A convolution of fan-in 18, a norm layer, and a dense layer of fan-in 12."""
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(12, 2))


def context(method: BayFL, round_: int = 0) -> Context:
    return Context(make_task(method, network(), Categorical(2)), round=round_, client=0, clients={0: 10, 1: 30})


def prior_of(**options: Any) -> tuple[Prior, dict[str, Tensor]]:
    """Return the prior, and the precisions of what has no spread by name."""
    method = BayFL(**options)
    ctx = context(method)
    prior = method.prior_of(method.init_model(ctx), ctx)
    assert prior.rest is not None
    slots = [slot for slot in ctx.task.layout.slots if slot.start >= ctx.task.bayesian_size]
    return prior, {slot.name: prior.rest[slot.start - ctx.task.bayesian_size :][: slot.shape.numel()] for slot in slots}


class TestPrior:
    def test_its_scale_follows_from_the_inputs_of_a_unit(self) -> None:
        prior, rest = prior_of()
        torch.testing.assert_close(prior.sigma, torch.full((26,), 2 / 12**0.5))
        torch.testing.assert_close(rest["0.weight"], torch.full((54,), 18 / 4))
        torch.testing.assert_close(rest["0.bias"], torch.full((3,), 18 / 4))

    def test_or_is_a_number(self) -> None:
        prior, rest = prior_of(prior_sigma=0.5)
        torch.testing.assert_close(prior.sigma, torch.full((26,), 0.5))
        torch.testing.assert_close(rest["0.weight"], torch.full((54,), 4.0))

    @pytest.mark.parametrize("prior_sigma", [0.5, "fan-in"])
    def test_norm_layers_and_what_is_named_have_none(self, prior_sigma: float | str) -> None:
        _, rest = prior_of(prior_sigma=prior_sigma)
        assert not rest["1.weight"].any()
        assert not rest["1.bias"].any()
        _, rest = prior_of(prior_sigma=prior_sigma, deterministic=("0.*",))
        assert not any(precision.any() for precision in rest.values())

    def test_a_received_posterior_says_nothing_of_what_has_no_spread(self) -> None:
        method = BayFL(prior="global")
        ctx = context(method)
        assert method.prior_of(method.init_model(ctx), ctx).rest is None


class TestWarmUp:
    @pytest.mark.parametrize(("round_", "share"), [(0, 0.2), (1, 0.4), (4, 1.0), (9, 1.0)])
    def test_the_weight_of_the_kl_grows(self, round_: int, share: float) -> None:
        method = BayFL(warm_up=4, kl_weight=0.8)
        ctx = context(method, round_)
        elbo = method.objective(method.init_model(ctx), DATA, ctx)
        assert isinstance(elbo, Elbo)
        assert elbo.kl_scale == pytest.approx(share * 0.8 / 40)

    def test_not_of_ivon(self) -> None:
        method = BayFL(warm_up=4, kl_weight=0.8, backend="ivon", kl="client")
        ctx = context(method)
        loss = method.objective(method.init_model(ctx), DATA, ctx)
        assert isinstance(loss, IvonLoss)
        assert loss.kl_scale == pytest.approx(0.8 / 10)


class TestAugmentedSamples:
    @pytest.mark.parametrize(("augmented", "counts"), [(True, 4.0), (False, 1.0)])
    def test_each_counts_as_several(self, augmented: bool, counts: float) -> None:
        method = BayFL(kl_weight=0.8, warm_up=0, initial_sigma=0.1, augmented_counts=4.0)
        ctx = replace(context(method), augmented=augmented)
        model = method.init_model(ctx)
        elbo = method.objective(model, DATA, ctx)
        assert isinstance(elbo, Elbo)
        assert elbo.kl_scale == pytest.approx(0.8 / 40 / counts)
        torch.testing.assert_close(sigma_of(model["rho"]), torch.full((26,), 0.1 / counts**0.5))

    def test_the_engine_says_whether_they_are(self) -> None:
        x, y = torch.rand(20, 1, 16, 16), torch.arange(20) % 2
        plain = Federation.from_arrays([(x, y)])
        network = nn.Sequential(nn.Flatten(), nn.Linear(256, 2))
        for augment in (False, True):
            job = make_job(BayFL(), network, replace(plain, augment=augment), Plan(rounds=1))
            assert job.context(0).augmented == job.context(0, client=0).augmented == augment

    def test_not_with_the_letter_of_the_paper(self) -> None:
        assert MetaBayFL(preset="paper").augmented_counts == 1.0


def test_without_data_everything_goes_to_the_prior() -> None:
    """Inputs of zero tell nothing: the dense layer's posterior is its prior, the convolution's weights are zero."""
    method = BayFL(kl="client", kl_weight=10.0, warm_up=0, rate=0.1, rho_rate=1.0, epochs=800, momentum=0.0)
    ctx = context(method)
    model, _ = method.train(method.init_model(ctx), DATA, ctx)
    named = ctx.task.named(model)
    assert named["mu.0.weight"].abs().max() < 1e-4
    torch.testing.assert_close(sigma_of(named["rho.3.weight"]), torch.full((2, 12), 2 / 12**0.5), rtol=0.02, atol=0.0)
