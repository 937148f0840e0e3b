import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn.functional import softplus

from metabayfl import aggregate, gaussian
from metabayfl.gaussian import SMALLEST_SIGMA, Elbo, PairedElbo, Prior, Rule, average, kl, rho_of, sigma_of
from metabayfl.inspection import Bayesian
from metabayfl.likelihood import Categorical
from metabayfl.task import Task
from metabayfl.types import Params, Update
from strangers import Recurrent, Tied, meet

RULES: tuple[Rule, ...] = ("rho", "sigma", "var", "mixture", "sum", "product")
exact = {"rtol": 1e-11, "atol": 1e-12}
seeds = st.integers(0, 2**32)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def network(width: int, norm: bool, bayesian: Bayesian = "all") -> Task:
    """Two dense layers; a LayerNorm between them is the deterministic segment."""
    layers = [nn.Linear(3, width), *([nn.LayerNorm(width)] if norm else []), nn.Tanh(), nn.Linear(width, 2)]
    return Task(nn.Sequential(*layers).double(), Categorical(2), bayesian=bayesian)


def posterior_of(task: Task, seed: int) -> Params:
    """Means around 0 and sigmas between about 1e-3 and 3."""
    return {"mu": draw(seed, task.size), "rho": 3.0 * draw(seed + 1, task.bayesian_size) - 1.0}


def client(
    mu: Sequence[float], sigma: Sequence[float], weight: float = 1.0, dtype: torch.dtype = torch.float64
) -> Update:
    rho = rho_of(torch.tensor(sigma, dtype=torch.float64))
    return Update({"mu": torch.tensor(mu, dtype=dtype), "rho": rho.to(dtype)}, weight, {})


def random_clients(seed: int, count: int) -> list[Update]:
    sigma = (2.0 * draw(seed, count, 3)).exp()
    weights = draw(seed + 1, count).exp().tolist()
    return [client(draw(seed + 2 + n, 4).tolist(), sigma[n].tolist(), weights[n]) for n in range(count)]


class TestSpread:
    @given(st.floats(1e-6, 50.0))
    def test_rho_of_undoes_sigma_of(self, sigma: float) -> None:
        value = torch.tensor([sigma], dtype=torch.float64)
        torch.testing.assert_close(sigma_of(rho_of(value)), value, rtol=1e-9, atol=0.0)
        torch.testing.assert_close(sigma_of(rho_of(value.float())), value.float(), rtol=3e-6, atol=0.0)

    def test_rho_of_at_known_values(self) -> None:
        sigma = torch.tensor([math.log(2.0), 0.02, 50.0], dtype=torch.float64)
        expected = torch.tensor([0.0, math.log(math.exp(0.02) - 1.0), 50.0], dtype=torch.float64)
        torch.testing.assert_close(rho_of(sigma), expected, rtol=1e-12, atol=1e-15)
        assert rho_of(torch.tensor([200.0])).item() == 200.0  # exp(200) is infinite in float32

    def test_initial_posterior(self) -> None:
        task = network(4, norm=True)
        start = gaussian.initial(task, 0.02)
        assert torch.equal(start["mu"], task.initial()["mu"])
        assert len(start["rho"]) == task.bayesian_size == task.size - 2 * 4
        torch.testing.assert_close(sigma_of(start["rho"]), torch.full_like(start["rho"], 0.02), **exact)

    def test_samples_have_the_mean_and_spread_they_should(self) -> None:
        count, sigma = 20_000, torch.tensor([0.5, 3.0])
        mean = torch.tensor([1.0, -2.0])
        posterior = {"mu": torch.cat([mean.repeat(count), torch.tensor([7.0])]), "rho": rho_of(sigma).repeat(count)}
        into = torch.empty(2 * count + 1)
        next(gaussian.samples(posterior, 1, generator(0), into))
        draws = into[:-1].view(count, 2)
        assert ((draws.mean(0) - mean) / sigma * math.sqrt(count)).abs().max() < 4.0  # standard errors
        torch.testing.assert_close(draws.std(0), sigma, rtol=0.02, atol=0.0)
        assert into[-1] == 7.0

    @given(seeds, st.integers(1, 7))
    @settings(deadline=None, max_examples=20)
    def test_samples_come_in_pairs_of_mirror_images(self, seed: int, count: int) -> None:
        posterior, into = {"mu": draw(seed, 5), "rho": draw(seed + 1, 3)}, torch.empty(5)
        drawn = [into - posterior["mu"] for _ in gaussian.samples(posterior, count, generator(seed), into)]
        assert len(drawn) == count
        for first, second in zip(drawn[0::2], drawn[1::2], strict=False):
            torch.testing.assert_close(first, -second, rtol=1e-5, atol=1e-6)
        assert len({tuple(one[:3].tolist()) for one in drawn[0::2]}) == (count + 1) // 2
        assert all(one[3:].abs().max() < 1e-6 for one in drawn)


class TestKl:
    @given(seeds, st.integers(1, 20), st.floats(1e-3, 10.0), st.booleans())
    @settings(deadline=None, max_examples=50)
    def test_equals_torch_distributions(self, seed: int, size: int, prior_sigma: float, vector: bool) -> None:
        posterior = {"mu": draw(seed, size + 2), "rho": 3.0 * draw(seed + 1, size)}
        prior = Prior(draw(seed + 2, size), draw(seed + 3, size).exp()) if vector else Prior(0.3, prior_sigma)
        q, p = Normal(posterior["mu"][:size], softplus(posterior["rho"])), Normal(*_tensors(prior))
        assert kl(posterior, prior) == pytest.approx(kl_divergence(q, p).sum().item(), rel=1e-11, abs=1e-11)

    def test_equals_monte_carlo(self) -> None:
        q = Normal(torch.tensor([0.5, -1.0, 0.0, 2.0]), torch.tensor([0.3, 1.0, 2.0, 0.1]))
        p = Normal(torch.zeros(4), torch.full((4,), 0.8))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            theta = q.sample((100_000,))
        terms = (q.log_prob(theta) - p.log_prob(theta)).sum(1)
        standard_error = terms.std().item() / math.sqrt(len(terms))
        value = kl({"mu": q.loc, "rho": rho_of(q.scale)}, Prior(0.0, 0.8))
        assert abs(value - terms.mean().item()) < 4 * standard_error < 0.01 * value

    def test_of_a_posterior_with_itself_is_zero(self) -> None:
        posterior = {"mu": draw(0, 50), "rho": 4.0 * draw(1, 50)}
        assert kl(posterior, Prior(posterior["mu"], sigma_of(posterior["rho"]))) == pytest.approx(0.0, abs=1e-12)


def _tensors(prior: Prior) -> tuple[Tensor, Tensor]:
    return torch.as_tensor(prior.mean, dtype=torch.float64), torch.as_tensor(prior.sigma, dtype=torch.float64)


def explicit_gradients(
    task: Task, posterior: Params, prior: Prior, kl_scale: float, eps: Tensor, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, float]:
    """Autograd of NLL(mu + softplus(rho) eps) + c (KL - log p(what has no spread)), and the NLL."""
    mu, rho = (posterior[name].clone().requires_grad_() for name in ("mu", "rho"))
    size = len(rho)
    theta = torch.cat([mu[:size] + softplus(rho) * eps, mu[size:]])
    weights = {slot.name: slot.view(theta) for slot in task.layout.slots}
    nll = task.likelihood.nll(functional_call(task.module, weights, (x,)), y)
    divergence = kl_divergence(Normal(mu[:size], softplus(rho)), Normal(*_tensors(prior))).sum()
    if prior.rest is not None:
        divergence = divergence - Normal(torch.zeros_like(prior.rest), prior.rest.rsqrt()).log_prob(mu[size:]).sum()
    gradients = torch.autograd.grad(nll + kl_scale * divergence, (mu, rho))
    return *gradients, nll.item()


class TestElbo:
    @given(seeds, st.integers(1, 5), st.booleans(), st.booleans(), st.sampled_from([0.0, 1e-4, 0.1, 3.0]))
    @settings(deadline=None, max_examples=60)
    def test_closed_form_gradients_equal_autograd(
        self, seed: int, width: int, norm: bool, vector_prior: bool, kl_scale: float
    ) -> None:
        task = network(width, norm)
        assert (task.bayesian_size < task.size) == norm
        posterior = posterior_of(task, seed)
        size = task.bayesian_size
        prior = Prior(0.0, 0.1)
        if vector_prior:
            prior = Prior(draw(seed + 2, size), draw(seed + 3, size).exp(), draw(seed + 5, task.size - size).exp())
        x, y = draw(seed + 4, 6, 3), torch.tensor([0, 1, 0, 1, 1, 1])

        elbo = Elbo(task, posterior, prior, kl_scale, generator(seed))
        for _ in range(2):  # the second call must not remember the first
            eps = torch.empty(size, dtype=torch.float64).normal_(generator=elbo.noise.clone_state())
            nll = elbo(x, y)
        mu_gradient, rho_gradient, expected_nll = explicit_gradients(task, posterior, prior, kl_scale, eps, x, y)
        assert nll == pytest.approx(expected_nll, rel=1e-12)
        torch.testing.assert_close(elbo.groups[0].gradient, mu_gradient, **exact)
        torch.testing.assert_close(elbo.groups[1].gradient, rho_gradient, **exact)
        assert torch.equal(elbo.model()["mu"], posterior["mu"])
        assert torch.equal(elbo.model()["rho"], posterior["rho"])

    def test_gradients_do_not_depend_on_the_batch_size(self) -> None:
        task = network(4, norm=True)
        x, y = draw(3, 12, 3), torch.tensor([0, 1, 1] * 4)

        def gradient(rows: slice, copies: int = 1) -> Tensor:
            elbo = Elbo(task, posterior_of(task, 1), Prior(0.0, 0.1), 0.05, generator(7))
            elbo(x[rows].repeat(copies, 1), y[rows].repeat(copies))
            return task.gradient.clone()

        whole = gradient(slice(None))
        torch.testing.assert_close(gradient(slice(None), copies=3), whole, **exact)
        parts = [gradient(slice(start, start + 4)) for start in (0, 4, 8)]
        torch.testing.assert_close(torch.stack(parts).mean(0), whole, **exact)

    def test_without_kl_an_infinite_term_does_no_harm(self) -> None:
        task = network(2, norm=False)
        posterior = posterior_of(task, 0) | {"rho": torch.full((task.size,), -800.0, dtype=torch.float64)}
        elbo = Elbo(task, posterior, Prior(0.0, 0.1), 0.0, generator(0))
        elbo(draw(0, 4, 3), torch.tensor([0, 1, 0, 1]))
        assert not elbo.groups[1].gradient.any()
        assert elbo.groups[0].gradient.isfinite().all()
        assert torch.equal(task.weights, posterior["mu"])

    def test_sigma_stays_below_a_bound(self) -> None:
        task = network(2, norm=False)
        elbo = Elbo(task, posterior_of(task, 0), Prior(0.0, 0.1), 0.1, generator(0), largest_sigma=0.3)
        elbo.rho.fill_(50.0)
        assert elbo.model()["rho"].max().item() == pytest.approx(rho_of(torch.tensor(0.3)).item())
        assert elbo(draw(0, 4, 3), torch.tensor([0, 1, 0, 1])) < 100
        assert sigma_of(elbo.rho).max().item() == pytest.approx(0.3)

    def test_rho_has_its_own_rate_and_no_decay(self) -> None:
        task = network(2, norm=False)
        mean, spread = Elbo(task, posterior_of(task, 0), Prior(0.0, 0.1), 0.0, generator(0), rho_rate=7.0).groups
        assert (mean.rate_factor, mean.decays, spread.rate_factor, spread.decays) == (1.0, True, 7.0, False)


class TestPairedElbo:
    @given(seeds, st.sampled_from([0.0, 0.1]), st.integers(2, 7), st.sampled_from(["all", "last"]))
    @settings(deadline=None, max_examples=60)
    def test_it_is_the_mean_of_two_samples_with_opposite_noise(
        self, seed: int, kl_scale: float, rows: int, bayesian: Bayesian
    ) -> None:
        """Each half of the mini-batch by autograd, weighted by its rows; the KL counts once."""
        task = network(3, norm=False, bayesian=bayesian)
        posterior, prior = posterior_of(task, seed), Prior(0.0, 0.1)
        x, y = draw(seed + 4, rows, 3), torch.tensor([0, 1, 0, 1, 1, 1, 0])[:rows]
        elbo = PairedElbo(task, posterior, prior, kl_scale, generator(seed))
        for _ in range(2):
            eps = torch.empty(task.bayesian_size, dtype=torch.float64).normal_(generator=elbo.noise.clone_state())
            nll = elbo(x, y)
        half = (rows + 1) // 2
        parts = [
            (part / rows, explicit_gradients(task, posterior, prior, kl_scale, sign * eps, x[cut], y[cut]))
            for part, sign, cut in ((half, 1, slice(half)), (rows - half, -1, slice(half, None)))
        ]
        expected = [sum(share * found[index] for share, found in parts) for index in range(3)]
        torch.testing.assert_close(elbo.groups[0].gradient, expected[0], **exact)
        torch.testing.assert_close(elbo.groups[1].gradient, expected[1], **exact)
        assert nll == pytest.approx(expected[2], rel=1e-12)

    @pytest.mark.parametrize("kind", [Tied, Recurrent])
    def test_all_of_a_module_sees_the_opposite_noise(self, kind: type[nn.Module]) -> None:
        """Each half passed alone, with its weights in the module itself."""
        module, x, y = meet(kind, dtype=torch.float64)
        task = Task(module, Categorical(3), bayesian="all")
        posterior = task.initial() | {"rho": draw(1, task.bayesian_size) - 2.0}
        noise = generator(0)
        eps = torch.empty(task.bayesian_size, dtype=torch.float64).normal_(generator=noise.clone_state())
        nll = PairedElbo(task, posterior, Prior(0.0, 0.1), 0.0, noise)(x, y)
        found = task.gradient.clone()

        halves = []
        for sign, cut in ((1, slice(5)), (-1, slice(5, 9))):
            task.load(posterior)
            task.weights[: len(eps)] += sign * sigma_of(posterior["rho"]) * eps
            loss = len(y[cut]) / 9 * task.backward(x[cut], y[cut])
            halves.append((loss, len(y[cut]) / 9 * task.gradient[: task.size]))
        (first, by_first), (second, by_second) = halves
        assert nll == pytest.approx((first + second).item(), rel=1e-12)
        torch.testing.assert_close(found[: task.size], by_first + by_second, **exact)
        by_sigma = eps * (by_first - by_second)[: len(eps)]
        torch.testing.assert_close(found[task.size :], by_sigma * torch.sigmoid(posterior["rho"]), **exact)

    def test_one_sample_is_not_split(self) -> None:
        task = network(3, norm=False)
        found = []
        for kind in (Elbo, PairedElbo):
            kind(task, posterior_of(task, 1), Prior(0.0, 0.1), 0.1, generator(0))(draw(0, 1, 3), torch.tensor([1]))
            found.append(task.gradient.clone())
        assert torch.equal(*found)

    def test_the_gradient_by_sigma_loses_most_of_its_noise(self) -> None:
        """It varies with the draw; paired, the product of the gradient at mu with the noise is gone."""
        task = network(4, norm=False)
        x, y = draw(3, 2, 3).repeat_interleave(2, 0)[[0, 2, 1, 3]], torch.tensor([0, 1, 0, 1])
        posterior = posterior_of(task, 1) | {"rho": torch.full((task.size,), -5.0, dtype=torch.float64)}

        def spread(kind: type[Elbo]) -> float:
            elbo = kind(task, posterior, Prior(0.0, 0.1), 0.0, generator(0))
            found = []
            for _ in range(200):
                elbo(x, y)
                found.append(elbo.groups[1].gradient.clone())
            return torch.stack(found).std(0).mean().item()

        assert spread(PairedElbo) < 0.1 * spread(Elbo)


class TestAverage:
    # Two clients with a = 1/4, 3/4, mu = 1, 2 and sigma = 0.1, 0.3: docs/methods.md 1.4 by hand.
    BY_HAND = {  # noqa: RUF012
        "rho": (1.75, None),
        "sigma": (1.75, 0.25),
        "var": (1.75, math.sqrt(0.07)),
        "mixture": (1.75, math.sqrt(0.07 + 0.1875)),
        "sum": (1.75, math.sqrt(0.01 / 16 + 0.09 * 9 / 16)),
        "product": (1.25, math.sqrt(0.03)),
    }

    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_by_hand(self, rule: Rule, dtype: torch.dtype) -> None:
        updates = [client([1.0, 10.0], [0.1], 5.0, dtype), client([2.0, 20.0], [0.3], 15.0, dtype)]
        tolerance = 1e-12 if dtype == torch.float64 else 1e-6
        result = average(updates, rule)
        mean, sigma = self.BY_HAND[rule]
        if sigma is None:
            sigma = math.log1p(math.exp(0.25 * math.log(math.expm1(0.1)) + 0.75 * math.log(math.expm1(0.3))))
        assert result["mu"].dtype == result["rho"].dtype == dtype
        assert result["mu"].tolist() == pytest.approx([mean, 17.5], rel=tolerance)  # the second is deterministic
        assert sigma_of(result["rho"]).item() == pytest.approx(sigma, rel=tolerance)

    @pytest.mark.parametrize("rule", RULES)
    def test_identical_clients(self, rule: Rule) -> None:
        one = random_clients(3, 1)[0]
        result = average([one._replace(weight=weight) for weight in (1.0, 2.0, 5.0)], rule)
        shrinkage = (1 + 4 + 25) / 64 if rule == "sum" else 1.0
        torch.testing.assert_close(result["mu"], one.payload["mu"], **exact)
        variance = sigma_of(one.payload["rho"]) ** 2 * shrinkage
        torch.testing.assert_close(sigma_of(result["rho"]) ** 2, variance, **exact)

    @pytest.mark.parametrize("rule", RULES)
    def test_one_client_is_the_identity(self, rule: Rule) -> None:
        one = random_clients(5, 1)[0]
        result = average([one], rule)
        for name, tensor in one.payload.items():
            torch.testing.assert_close(result[name], tensor, **exact)

    @pytest.mark.parametrize("rule", RULES)
    @given(seeds, st.permutations(range(5)))
    @settings(deadline=None, max_examples=20)
    def test_order_of_clients_is_irrelevant(self, rule: Rule, seed: int, order: list[int]) -> None:
        updates = random_clients(seed, 5)
        result, other = average(updates, rule), average([updates[n] for n in order], rule)
        for name in result:
            torch.testing.assert_close(other[name], result[name], rtol=1e-10, atol=1e-12)

    @given(seeds)
    @settings(deadline=None, max_examples=30)
    def test_order_of_the_spreads(self, seed: int) -> None:
        """Power means of sigma grow with their exponent (-2, 1, 2), and disagreement between means adds."""
        updates = random_clients(seed, 4)
        rules: tuple[Rule, ...] = ("product", "sigma", "var", "mixture")
        spreads = [sigma_of(average(updates, rule)["rho"]) for rule in rules]
        assert all((small <= large * (1 + 1e-9)).all() for small, large in itertools.pairwise(spreads))
        assert (sigma_of(average(updates, "rho")["rho"]) <= spreads[1] * (1 + 1e-9)).all()

    def test_mixture_does_not_cancel(self) -> None:
        """Squares of the means are 1e12 times the variance; even in float64 their difference would be lost."""
        updates = [client([1234567.0 + n / 8], [1e-3], 1.0 + n, torch.float32) for n in (0, 1)]
        expected = math.sqrt(1e-6 + 1 / 3 * 2 / 3 * (1 / 8) ** 2)
        assert sigma_of(average(updates, "mixture")["rho"]).item() == pytest.approx(expected, rel=2e-6)

    @pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "rho"])
    @pytest.mark.parametrize("rho", [-14.0, -100.0, -1000.0])
    def test_sigma_has_a_floor(self, rule: Rule, rho: float) -> None:
        payload = {"mu": torch.tensor([1.0]), "rho": torch.tensor([rho])}
        result = average([Update(payload, 1.0, {}), Update(payload, 1.0, {})], rule)
        assert sigma_of(result["rho"]).item() == pytest.approx(SMALLEST_SIGMA, rel=3e-6)
        assert result["mu"].item() == 1.0

    def test_rho_has_none(self) -> None:
        payload = {"mu": torch.tensor([1.0]), "rho": torch.tensor([-100.0])}
        assert average([Update(payload, 1.0, {}), Update(payload, 3.0, {})], "rho")["rho"].item() == -100.0

    @pytest.mark.parametrize("rule", RULES)
    def test_buffers_are_averaged_plainly_and_inputs_left_alone(self, rule: Rule) -> None:
        buffers = [torch.tensor([1.0]), torch.tensor([2.0])]
        updates = [client([0.5, float(n)], [0.1], 1.0 + 2.0 * n) for n in (0, 1)]
        updates = [u._replace(payload=u.payload | {"buffers": b}) for u, b in zip(updates, buffers, strict=True)]
        before = [{name: tensor.clone() for name, tensor in update.payload.items()} for update in updates]
        assert average(updates, rule)["buffers"].tolist() == [1.75]
        for update, copy in zip(updates, before, strict=True):
            assert all(torch.equal(update.payload[name], copy[name]) for name in copy)

    def test_sums_run_in_float64(self) -> None:
        """In float32 the ones vanish beside 2**25."""
        values = [2.0**25, 1.0, 1.0, 1.0, 1.0, -(2.0**25)]
        updates = [Update({"mu": torch.tensor([value])}, 1.0, {}) for value in values]
        assert aggregate.mean(updates)["mu"].item() == pytest.approx(4 / 6, rel=1e-6)
        assert aggregate.mean(updates)["mu"].dtype == torch.float32

    def test_nothing_to_average_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no updates"):
            aggregate.mean([])
        with pytest.raises(ValueError, match="no updates"):
            average([], "var")
