"""Problems whose answer is known beforehand: conjugate regression, quadratics, and limits in which methods coincide."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from metabayfl.gaussian import sigma_of
from metabayfl.likelihood import Categorical
from metabayfl.methods import BayFL, FedAvg
from metabayfl.methods.base import Method
from metabayfl.task import Task
from metabayfl.types import Context, Params, TrainData
from quadratics import EYE, NOISE, fixed_point, least_squares, line, regression, run
from strangers import Cnn, FrozenBackbone, NormedMlp, Recurrent, Vit, meet

PRIOR = 0.6
COPIES = 200


class TestConjugateRegression:
    """Many targets that are copies of one: each finds the same posterior with its own noise; their mean is precise."""

    @pytest.mark.parametrize(
        ("options", "others", "batch_size", "temperature"),
        [
            ({"kl": "client", "kl_weight": 1.0}, 48, 16, 1.0),
            ({"kl": "client", "kl_weight": 1.0}, 48, 8, 1.0),
            ({"kl": "client", "kl_weight": 0.5, "rho_rate": 2.0}, 48, 16, 0.5),
            ({"kl": "federation", "kl_weight": 1.0, "rho_rate": 4.0}, 48, 16, 0.25),
        ],
        ids=["elbo", "mini-batches", "tempered", "federation"],
    )
    def test_bayfl_finds_the_mean_field_optimum(
        self, options: dict[str, object], others: int, batch_size: int, temperature: float
    ) -> None:
        data = regression(0, 16, batch_size)
        mean, sigma = self.optimum(data, temperature)
        found_mean, found_sigma = self.trained(data, others, options)
        tolerance = 0.03
        assert ((found_mean - mean) / sigma).abs().max() < tolerance
        assert (found_sigma / sigma - 1.0).abs().max() < tolerance

        for factor in (0.5, 2.0):  # a KL of half or twice the size would be far outside
            wrong_mean, wrong_sigma = self.optimum(data, factor * temperature)
            assert ((wrong_mean - mean) / sigma).abs().max() > 5 * tolerance
            assert (wrong_sigma / sigma - 1.0).abs().max() > 5 * tolerance

    @staticmethod
    def optimum(data: TrainData, temperature: float) -> tuple[Tensor, Tensor]:
        """Minimise NLL + temperature · KL: the exact posterior's mean, and sigma² = 1/diagonal of its precision."""
        precision = data.x.T @ data.x / NOISE**2 / temperature + EYE / PRIOR**2
        mean = torch.linalg.solve(precision, data.x.T @ data.y / NOISE**2 / temperature)
        return mean.flatten(), precision.diagonal().rsqrt()

    @staticmethod
    def trained(data: TrainData, others: int, options: dict[str, object]) -> tuple[Tensor, Tensor]:
        epochs = 20 // data.steps_per_epoch()
        method = BayFL(
            prior_sigma=PRIOR,
            initial_sigma=0.2,
            optimiser="sgd",
            momentum=0.0,
            rate="0.5/k",
            epochs=epochs,
            warm_up=0,
            **({"rho_rate": 1.0} | options),
        )
        task = line(COPIES, NOISE, bayesian="all")
        copies = replace(data, y=data.y.expand(-1, COPIES))
        model = method.init_model(Context(task))
        for round_ in range(60):
            ctx = Context(task, round=round_, rounds=60, client=0, clients={0: len(data), 1: others})
            model, _ = method.train(model, copies, ctx)
        return model["mu"].view(COPIES, 3).mean(0), sigma_of(model["rho"]).view(COPIES, 3).mean(0)

    def test_prior_alone_is_found_without_data(self) -> None:
        """Inputs of zero say nothing: the optimum is the prior itself, where the KL is zero."""
        nothing = TrainData(torch.zeros(4, 3).double(), torch.zeros(4, 1).double(), EYE[:0], EYE[:0], 4)
        method = BayFL(
            prior_sigma=0.3,
            initial_sigma=0.1,
            kl="client",
            kl_weight=1.0,
            warm_up=0,
            rho_rate=1.0,
            rate=0.2,
            epochs=400,
        )
        task = line(1, NOISE, bayesian="all")
        start = method.init_model(Context(task)) | {"mu": EYE[0]}
        model, metrics = method.train(start, nothing, Context(task, client=0))
        torch.testing.assert_close(sigma_of(model["rho"]), torch.full_like(model["rho"], 0.3), rtol=1e-6, atol=0.0)
        torch.testing.assert_close(model["mu"], torch.zeros_like(model["mu"]), rtol=0.0, atol=1e-6)
        assert metrics["kl"] == pytest.approx(0.0, abs=1e-9)
        assert metrics["kl_scale"] == 0.25

    def test_global_prior_is_the_received_posterior(self) -> None:
        nothing = TrainData(torch.zeros(4, 3).double(), torch.zeros(4, 1).double(), EYE[:0], EYE[:0], 4)
        method = BayFL(prior="global", kl="client", kl_weight=1.0, optimiser="sgd", rate=0.1, epochs=50)
        received = {"mu": EYE[0], "rho": -EYE[1]}
        model, metrics = method.train(received, nothing, Context(line(1, NOISE, bayesian="all"), client=0))
        for name, tensor in received.items():
            torch.testing.assert_close(model[name], tensor, rtol=0.0, atol=1e-12)
        assert metrics["kl"] == pytest.approx(0.0, abs=1e-12)


class TestQuadratics:
    """f_n(w) = |X_n w - y_n|² / 2|D_n|; E steps of rate eta take w to w_n + (1 - eta A_n)^E (w - w_n)."""

    RATE = 0.2

    @pytest.mark.parametrize("weighting", ["samples", "uniform"])
    @pytest.mark.parametrize("steps", [1, 5])
    def test_fedavg_reaches_its_fixed_point(self, steps: int, weighting: str) -> None:
        clients = [regression(0, 8, 8), regression(1, 24, 24)]
        shares = [0.25, 0.75] if weighting == "samples" else [0.5, 0.5]
        method = FedAvg(rate=self.RATE, epochs=steps, optimiser="sgd", momentum=0.0, weighting=weighting)
        found = run(method, line(1, 1.0), clients, rounds=300 // steps)["mu"]
        expected = fixed_point(clients, shares, lambda a: EYE - torch.linalg.matrix_power(EYE - self.RATE * a, steps))
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-8)

        pooled = fixed_point(clients, shares, lambda a: a)
        if weighting == "samples":
            x, y = torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])
            torch.testing.assert_close(pooled, torch.linalg.lstsq(x, y).solution.flatten(), rtol=0.0, atol=1e-12)
        assert ((found - pooled).abs().max() > 0.01) == (steps > 1)  # clients that take several steps drift

    def test_one_client_is_least_squares(self) -> None:
        data = regression(2, 12, 12)
        method = FedAvg(rate=0.1, epochs=20, optimiser="sgd", momentum=0.5)
        found = run(method, line(1, 1.0), [data], rounds=40)["mu"]
        torch.testing.assert_close(found, least_squares(data), rtol=0.0, atol=1e-8)


def three_clients(kind: type[nn.Module]) -> list[TrainData]:
    """Clients of different sizes; the last batch of one of them takes a lone sample in."""
    _, x, y = meet(kind, batch=34)
    return [TrainData(x[rows], y[rows], x[:0], y[:0], 4) for rows in (slice(9), slice(9, 16), slice(16, 34))]


class TestLimits:
    """Rule rho, rho = -100 and no KL: BayFL is FedAvg (identity 2 of docs/methods.md 8)."""

    @pytest.mark.parametrize("optimiser", ["adam", "sgd"])
    @pytest.mark.parametrize("kind", [Recurrent, FrozenBackbone])
    def test_bit_for_bit(self, kind: type[nn.Module], optimiser: str) -> None:
        fedavg, bayfl = self.both(kind, optimiser)
        assert bayfl.keys() == fedavg.keys()
        assert all(torch.equal(bayfl[name], fedavg[name]) for name in fedavg)

    def test_up_to_rounding_where_mini_batches_are_split(self) -> None:
        fedavg, bayfl = self.both(Recurrent, "sgd", antithetic=True)
        for name, tensor in fedavg.items():
            torch.testing.assert_close(bayfl[name], tensor, rtol=0.0, atol=2e-6)

    @pytest.mark.parametrize("kind", [NormedMlp, Cnn])
    def test_up_to_rounding_where_the_order_in_the_vector_differs(self, kind: type[nn.Module]) -> None:
        """A fused step rounds differently in the last few numbers of a vector, and these are others here."""
        fedavg, bayfl = self.both(kind, "sgd")
        assert bayfl.keys() == fedavg.keys()
        for name, tensor in fedavg.items():
            torch.testing.assert_close(bayfl[name], tensor, rtol=0.0, atol=2e-6)

    @staticmethod
    def both(kind: type[nn.Module], optimiser: str, antithetic: bool = False) -> tuple[Params, Params]:
        """The servers of FedAvg and BayFL after three rounds, by name."""
        options = {"optimiser": optimiser, "rate": 0.01, "epochs": 2, "weight_decay": 0.01}
        plain, noisy = (Task(meet(kind)[0], Categorical(3), bayesian=which) for which in ("none", "all"))
        fedavg = run(FedAvg(**options), plain, three_clients(kind), rounds=3)
        assert (fedavg["mu"] - plain.initial()["mu"]).abs().max() > 0.01
        rho = torch.full((noisy.bayesian_size,), -100.0)
        method = BayFL(**options, rule="rho", kl_weight=0.0, antithetic=antithetic, class_frequencies=False)
        bayfl = run(method, noisy, three_clients(kind), rounds=3, rho=rho)
        assert torch.equal(bayfl.pop("rho"), rho)
        return plain.named(fedavg), noisy.named(bayfl)

    def test_a_spread_makes_the_difference(self) -> None:
        task = Task(meet(NormedMlp)[0], Categorical(3), bayesian="all")
        clients = three_clients(NormedMlp)
        results = [
            run(BayFL(rate=0.01, rule="rho", kl_weight=0.0, initial_sigma=s), task, clients, 3) for s in (1e-6, 0.1)
        ]
        assert (results[0]["mu"] - results[1]["mu"]).abs().max() > 1e-3


class TestReproducibility:
    @pytest.mark.parametrize("method", [FedAvg(epochs=2, rate=0.02), BayFL(epochs=2, rate=0.02)], ids=lambda m: m.name)
    @pytest.mark.parametrize("kind", [NormedMlp, Cnn])
    def test_bits_are_a_function_of_the_seed(self, method: Method, kind: type[nn.Module]) -> None:
        def server(seed: int, **options: Callable[[int], Sequence[int]]) -> Params:
            task = Task(meet(kind)[0], Categorical(3), bayesian=method.bayesian_layers)
            return run(method, task, three_clients(kind), 2, seed=seed, **options)

        first = server(1)
        for same in (server(1), server(1, visits=lambda count: range(count)[::-1])):
            assert same.keys() == first.keys()
            assert all(torch.equal(same[name], first[name]) for name in first)
        assert not any(torch.equal(server(2)[name], first[name]) for name in first)

    @pytest.mark.parametrize("method", [FedAvg(), BayFL(), BayFL(prior="global")], ids=["fedavg", "bayfl", "global"])
    def test_hooks_leave_their_arguments_alone(self, method: Method) -> None:
        task = Task(meet(Cnn)[0], Categorical(3), bayesian=method.bayesian_layers)
        ctx = Context(task, client=0, clients={0: 9})
        server = method.init_server(ctx)
        before = {name: tensor.clone() for name, tensor in server.items()}
        fits = [method.fit(server, {}, data, ctx) for data in three_clients(Cnn)]
        sent = [{name: tensor.clone() for name, tensor in fit.update.payload.items()} for fit in fits]
        averaged = method.aggregate(server, [fit.update for fit in fits], ctx)
        method.predict(averaged, torch.zeros(2, 1, 8, 8), 2, ctx)
        for now, then in [(server, before), *zip((fit.update.payload for fit in fits), sent, strict=True)]:
            assert all(torch.equal(now[name], then[name]) for name in then)

    def test_predictions_repeat_and_spread(self) -> None:
        module, x, _ = meet(Vit)
        task = Task(module, Categorical(3), bayesian="all")
        method = BayFL(initial_sigma=0.1)
        model = method.init_model(Context(task))
        outputs = [method.predict(model, x, 5, Context(task, seed=seed)) for seed in (1, 1, 2)]
        assert outputs[0].shape == (5, len(x), 3)
        assert torch.equal(outputs[0], outputs[1])
        assert not torch.equal(outputs[0], outputs[2])
        assert (outputs[0].std(0) > 0).all()
        flat = method.predict(model | {"rho": torch.full_like(model["rho"], -100.0)}, x, 1, Context(task))
        torch.testing.assert_close(flat[0], FedAvg().predict(task.initial(), x, 1, Context(task))[0])


def test_steps_of_rho_follow_the_natural_gradient_where_sgd_would_stand_still() -> None:
    assert BayFL().rho_factor(0.01 / 100) == pytest.approx(120)
    assert BayFL().rho_factor(0.01 / 10_000) == 1000
    assert BayFL(optimiser="adam").rho_factor(0.01 / 100) == 1
    assert BayFL(rho_rate=3.0).rho_factor(0.01 / 100) == 3
    assert BayFL().rho_factor(0.0) == 1
