import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

from metabayfl import metrics

KEYS = {
    "accuracy",
    "nll",
    "ece",
    "adaptive_ece",
    "brier",
    "predictive_entropy",
    "expected_entropy",
    "mutual_information",
}
# Two posterior samples, two inputs, two classes; their mean is [[0.7, 0.3], [0.3, 0.7]].
HAND_LOGITS = torch.tensor([[[0.9, 0.1], [0.2, 0.8]], [[0.5, 0.5], [0.4, 0.6]]], dtype=torch.float64).log()
HAND_LABELS = torch.tensor([0, 0])

invariance = settings(deadline=None, max_examples=50, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


def binary_entropy(p: float) -> float:
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def confident(confidences: list[float], correct: list[int]) -> tuple[Tensor, Tensor]:
    """Two-class predictions of class 0 with these confidences, right where correct is 1."""
    top = torch.tensor(confidences, dtype=torch.float64)
    return torch.stack([top, 1 - top], -1), 1 - torch.tensor(correct)


def draw(seed: int, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    samples, batch, classes = (int(torch.randint(1, high, (), generator=rng)) for high in (6, 60, 8))
    logits = scale * torch.randn(samples, batch, classes + 1, generator=rng)
    return logits, torch.randint(classes + 1, (batch,), generator=rng)


def test_classification_by_hand() -> None:
    result = metrics.classification(HAND_LOGITS, HAND_LABELS)
    predictive = binary_entropy(0.7)
    expected = sum(map(binary_entropy, (0.9, 0.5, 0.2, 0.4))) / 4
    assert result == pytest.approx(
        {
            "accuracy": 0.5,
            "nll": -(math.log(0.7) + math.log(0.3)) / 2,
            "ece": 0.2,
            "adaptive_ece": 0.2,
            "brier": (2 * 0.3**2 + 2 * 0.7**2) / 2,
            "predictive_entropy": predictive,
            "expected_entropy": expected,
            "mutual_information": predictive - expected,
        }
    )
    assert all(type(value) is float for value in result.values())


def test_uncertainty_is_per_input() -> None:
    expected = [(binary_entropy(0.9) + math.log(2)) / 2, (binary_entropy(0.2) + binary_entropy(0.4)) / 2]
    assert metrics.expected_entropy(HAND_LOGITS).tolist() == pytest.approx(expected)
    assert metrics.predictive_entropy(HAND_LOGITS).tolist() == pytest.approx([binary_entropy(0.7)] * 2)
    gap = [binary_entropy(0.7) - value for value in expected]
    assert metrics.mutual_information(HAND_LOGITS).tolist() == pytest.approx(gap)


def test_samples_that_contradict_each_other_carry_log_two_nats() -> None:
    logits = torch.tensor([[[1e4, -1e4]], [[-1e4, 1e4]]])
    assert metrics.uncertainty(logits) == pytest.approx(
        {"predictive_entropy": math.log(2), "expected_entropy": 0.0, "mutual_information": math.log(2)}
    )


def test_probabilities_are_float64_and_detached() -> None:
    logits = torch.zeros(3, 2, 4, requires_grad=True)
    probs = metrics.probabilities(logits)
    assert probs.dtype == torch.float64
    assert probs.shape == (3, 2, 4)
    assert not probs.requires_grad
    assert torch.equal(metrics.mean_probabilities(logits), torch.full((2, 4), 0.25, dtype=torch.float64))


def test_log_probabilities_are_the_log_of_the_mean() -> None:
    expected = torch.tensor([[0.7, 0.3], [0.3, 0.7]], dtype=torch.float64).log()
    torch.testing.assert_close(metrics.mean_log_probabilities(HAND_LOGITS), expected)


def test_brier_of_the_best_and_the_worst_prediction() -> None:
    certain = torch.eye(3)
    assert metrics.brier(certain, torch.tensor([0, 1, 2])) == 0.0
    assert metrics.brier(certain, torch.tensor([1, 2, 0])) == 2.0


def test_reliability_by_hand() -> None:
    probs, y = confident([0.6, 0.7, 0.9, 1.0], [1, 0, 1, 1])
    result = metrics.reliability(probs, y, bins=4)
    assert result.count.tolist() == [0, 0, 2, 2]
    assert result.confidence.tolist() == pytest.approx([0, 0, 0.65, 0.95])
    assert result.accuracy.tolist() == pytest.approx([0, 0, 0.5, 1.0])
    assert metrics.ece(probs, y, bins=4) == pytest.approx(0.5 * 0.15 + 0.5 * 0.05)


def test_a_confidence_on_an_edge_belongs_to_the_lower_bin() -> None:
    probs, y = confident([0.5, 0.75, 1.0], [1, 1, 1])
    assert metrics.reliability(probs, y, bins=4).count.tolist() == [0, 1, 1, 1]


def test_adaptive_ece_by_hand_differs_from_equal_width() -> None:
    probs, y = confident([0.9, 0.6, 0.8, 0.7], [1, 0, 1, 0])
    assert metrics.adaptive_ece(probs, y, bins=2) == pytest.approx(0.5 * 0.65 + 0.5 * 0.15)
    assert metrics.ece(probs, y, bins=2) == pytest.approx(0.25)


def test_adaptive_ece_with_fewer_inputs_than_bins_gives_each_its_own_bin() -> None:
    probs, y = confident([0.6, 0.7, 0.9], [1, 0, 1])
    assert metrics.adaptive_ece(probs, y) == pytest.approx((0.4 + 0.7 + 0.1) / 3)


def test_adaptive_ece_keeps_equal_confidences_together() -> None:
    probs, y = confident([0.8] * 6, [1, 1, 1, 0, 0, 0])
    assert metrics.adaptive_ece(probs, y, bins=3) == pytest.approx(0.3)


def test_adaptive_ece_against_sorted_chunks() -> None:
    rng = torch.Generator().manual_seed(0)
    probs = torch.randn(150, 6, generator=rng, dtype=torch.float64).softmax(-1)
    y = torch.randint(6, (150,), generator=rng)
    confidence, label = probs.max(-1)
    order = confidence.argsort()
    chunks = zip(confidence[order].chunk(15), (label == y)[order].double().chunk(15), strict=True)
    expected = sum(abs(float(c.mean() - a.mean())) for c, a in chunks) / 15
    assert metrics.adaptive_ece(probs, y) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("classes", [2, 10])
def test_torchmetrics_agrees(seed: int, classes: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    probs = (2 * torch.randn(300, classes, generator=rng, dtype=torch.float64)).softmax(-1)
    y = torch.multinomial(probs.sqrt(), 1, generator=rng)[:, 0]
    accuracy = multiclass_accuracy(probs, y, num_classes=classes, average="micro")
    error = multiclass_calibration_error(probs, y, num_classes=classes, n_bins=15, norm="l1")
    assert metrics.accuracy(probs, y) == pytest.approx(float(accuracy), abs=1e-6)
    assert metrics.ece(probs, y) == pytest.approx(float(error), abs=1e-6)


@invariance
@given(seed=seeds, scale=st.sampled_from([0.0, 0.1, 2.0, 50.0]))
def test_ranges(seed: int, scale: float) -> None:
    logits, y = draw(seed, scale)
    result = metrics.classification(logits, y)
    assert set(result) == KEYS
    assert 0 <= result["brier"] <= 2 + 1e-12
    assert all(0 <= result[key] <= 1 for key in ("accuracy", "ece", "adaptive_ece"))
    assert 0 <= result["nll"] < math.inf
    assert 0 <= result["expected_entropy"] <= result["predictive_entropy"] + 1e-12
    assert metrics.predictive_entropy(logits).max() <= math.log(logits.shape[-1]) + 1e-12
    assert metrics.mutual_information(logits).min() >= 0
    difference = result["predictive_entropy"] - result["expected_entropy"]
    assert result["mutual_information"] == pytest.approx(difference, abs=1e-12)


@invariance
@given(seed=seeds)
def test_the_order_of_inputs_and_of_samples_does_not_matter(seed: int) -> None:
    logits, y = draw(seed)
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randperm(logits.shape[1], generator=rng)
    samples = torch.randperm(logits.shape[0], generator=rng)
    permuted = metrics.classification(logits[samples][:, inputs], y[inputs])
    assert permuted == pytest.approx(metrics.classification(logits, y), abs=1e-12)


@invariance
@given(rows=st.lists(st.tuples(st.integers(5, 10), st.integers(0, 1)), min_size=1, max_size=40), seed=seeds)
def test_the_order_of_inputs_with_equal_confidences_does_not_matter(rows: list[tuple[int, int]], seed: int) -> None:
    probs, y = confident([tenths / 10 for tenths, _ in rows], [right for _, right in rows])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    for error in (metrics.ece, metrics.adaptive_ece):
        assert error(probs[order], y[order], bins=4) == pytest.approx(error(probs, y, bins=4), abs=1e-12)


@invariance
@given(seed=seeds, copies=st.integers(2, 7))
def test_identical_samples_equal_one_sample(seed: int, copies: int) -> None:
    logits, y = draw(seed)
    one = logits[:1]
    repeated = one.expand(copies, -1, -1)
    single = metrics.classification(one, y)
    assert metrics.classification(repeated, y) == pytest.approx(single, abs=1e-12)
    assert single["mutual_information"] == 0.0
    assert metrics.mutual_information(repeated).max() <= 1e-12


def test_extreme_logits_give_the_exact_finite_nll() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]]])
    y = torch.tensor([1, 1])
    result = metrics.classification(logits, y)
    assert all(map(math.isfinite, result.values()))
    assert result["nll"] == pytest.approx(2e4 / 2)
    assert result["predictive_entropy"] == 0.0


@pytest.mark.parametrize("samples", range(1, 12))
def test_nll_of_certainty_is_never_negative_not_even_minus_zero(samples: int) -> None:
    logits = torch.tensor([[[1e4, -1e4]]]).expand(samples, -1, -1)
    nll = metrics.classification(logits, torch.tensor([0]))["nll"]
    assert math.copysign(1.0, nll) == 1.0
    assert nll == pytest.approx(0.0, abs=1e-12)


def test_one_hopeless_sample_costs_only_its_share() -> None:
    logits = torch.tensor([[[1e4, -1e4]], [[-1e4, 1e4]]])
    assert metrics.classification(logits, torch.tensor([0]))["nll"] == pytest.approx(math.log(2))


@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 2, 3), (2, 2, 0), (2, 3)])
def test_empty_or_misshapen_logits_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"logits must be a non-empty \[samples, batch, outputs\]"):
        metrics.classification(torch.zeros(shape), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="got 1 NaN or infinite"):
        metrics.uncertainty(torch.tensor([[[value, 0.0]]]))


SCORES = [metrics.accuracy, metrics.brier, metrics.reliability, metrics.ece, metrics.adaptive_ece]


@pytest.mark.parametrize("score", [*SCORES, metrics.nll])
def test_empty_batches_are_refused(score: Callable[[Tensor, Tensor], object]) -> None:
    with pytest.raises(ValueError, match="non-empty"):
        score(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("row", [[1.0, 1.0], [1.5, -0.5], [math.nan, 1.0]])
def test_what_is_no_distribution_is_refused(score: Callable[[Tensor, Tensor], object], row: list[float]) -> None:
    with pytest.raises(ValueError, match="sum to 1"):
        score(torch.tensor([row]), torch.tensor([0]))


def test_nll_refuses_plain_probabilities() -> None:
    with pytest.raises(ValueError, match="sum to 1"):
        metrics.nll(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.tensor([0, 2]), "labels must be in 0..1"),
        (torch.tensor([-1, 0]), "labels must be in 0..1"),
        (torch.tensor([0]), "labels must be 2 integers"),
        (torch.tensor([0.0, 1.0]), "labels must be 2 integers"),
    ],
)
def test_labels_that_do_not_fit_are_refused(y: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.classification(HAND_LOGITS, y)


@pytest.mark.parametrize("error", [metrics.reliability, metrics.ece, metrics.adaptive_ece])
def test_bins_must_be_positive(error: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="bins must be at least 1"):
        error(*confident([0.8], [1]), bins=0)


def test_regression_by_hand() -> None:
    outputs = torch.tensor([[[0.0], [1.0]], [[2.0], [1.0]]])
    result = metrics.regression(outputs, torch.tensor([2.0, 4.0]), noise_std=0.5)

    def density(residual: float) -> float:
        return math.exp(-0.5 * (residual / 0.5) ** 2) / (0.5 * math.sqrt(2 * math.pi))

    first, second = (density(2) + density(0)) / 2, density(3)
    assert result == pytest.approx(
        {"nll": -(math.log(first) + math.log(second)) / 2, "rmse": math.sqrt((1 + 9) / 2), "coverage_95": 0.5}
    )
    assert all(type(value) is float for value in result.values())


def test_regression_nll_against_a_torch_mixture() -> None:
    rng = torch.Generator().manual_seed(0)
    outputs = torch.randn(4, 7, 3, generator=rng, dtype=torch.float64)
    y = torch.randn(7, 3, generator=rng, dtype=torch.float64)
    components = torch.distributions.Independent(torch.distributions.Normal(outputs.transpose(0, 1), 0.7), 1)
    weights = torch.distributions.Categorical(torch.ones(7, 4, dtype=torch.float64))
    expected = -torch.distributions.MixtureSameFamily(weights, components).log_prob(y).mean()
    assert metrics.regression(outputs, y, 0.7)["nll"] == pytest.approx(float(expected))


@pytest.mark.parametrize(("distance", "covered"), [(1.95, 1.0), (1.97, 0.0)])
def test_coverage_adds_the_variance_over_samples_to_the_noise(distance: float, covered: float) -> None:
    outputs = torch.tensor([[[-3.0]], [[3.0]]])
    y = torch.tensor([distance * math.sqrt(3.0**2 + 4.0**2)])
    assert metrics.regression(outputs, y, noise_std=4.0)["coverage_95"] == covered


def test_coverage_of_calibrated_noise_is_95_percent() -> None:
    y = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    result = metrics.regression(torch.zeros(1, 20_000, 1), y, noise_std=1.0)
    assert result["coverage_95"] == pytest.approx(0.95, abs=0.006)
    assert result["rmse"] == pytest.approx(1.0, abs=0.02)


def test_regression_far_from_every_target_stays_finite() -> None:
    result = metrics.regression(torch.full((3, 2, 1), 1e4), torch.full((2,), -1e4), noise_std=0.01)
    assert result["nll"] == pytest.approx(0.5 * 2e6**2, rel=1e-9)


def test_regression_refuses_an_empty_batch() -> None:
    with pytest.raises(ValueError, match="outputs must be a non-empty"):
        metrics.regression(torch.zeros(2, 0, 1), torch.zeros(0), noise_std=1.0)


@pytest.mark.parametrize("y", [torch.zeros(3), torch.zeros(3, 1), torch.zeros(2, 3), torch.full((3, 2), math.nan)])
def test_regression_refuses_targets_that_do_not_fit(y: Tensor) -> None:
    with pytest.raises(ValueError, match=r"targets must be finite and of shape \(3, 2\)"):
        metrics.regression(torch.zeros(4, 3, 2), y, noise_std=1.0)


@pytest.mark.parametrize("noise_std", [0.0, -1.0, math.nan, math.inf])
def test_regression_refuses_noise_that_is_not_positive(noise_std: float) -> None:
    with pytest.raises(ValueError, match="noise_std must be positive"):
        metrics.regression(torch.zeros(1, 1, 1), torch.zeros(1), noise_std)


def test_summary_by_hand() -> None:
    expected = {"weighted": 0.8, "mean": 0.7, "worst": 0.5, "std": 0.2}
    assert metrics.summarise([0.5, 0.9], [10, 30]) == pytest.approx(expected)
    assert metrics.summarise([0.5, 0.9], [10, 30], higher_is_better=False) == pytest.approx(expected | {"worst": 0.9})


def test_summary_leaves_out_clients_without_data() -> None:
    expected = metrics.summarise([0.5, 0.9], [10, 30])
    assert metrics.summarise([math.nan, 0.5, 0.0, 0.9], [0, 10, 0, 30]) == expected
    assert metrics.summarise([math.nan], [0]) == {}
    assert metrics.summarise([], []) == {}


@invariance
@given(
    clients=st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 1000)), min_size=1, max_size=20).flatmap(
        lambda clients: st.tuples(st.just(clients), st.permutations(clients))
    )
)
def test_summary_does_not_depend_on_the_order_of_clients(
    clients: tuple[list[tuple[float, int]], list[tuple[float, int]]],
) -> None:
    first, second = (metrics.summarise(*map(list, zip(*order, strict=True))) for order in clients)
    assert first == second


@pytest.mark.parametrize(
    ("values", "sizes"), [([0.5], [1, 2]), ([0.5, 0.6], [1, -1]), ([math.nan, 0.5], [1, 1]), ([math.inf], [1])]
)
def test_summary_refuses_values_it_cannot_weigh(values: list[float], sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"shorter|longer|negative|finite"):
        metrics.summarise(values, sizes)
