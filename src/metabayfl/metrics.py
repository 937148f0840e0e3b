"""Accuracy, proper scores, calibration and uncertainty of predictions made with S posterior samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Reliability:
    """One entry per bin; an empty bin has count, confidence and accuracy 0."""

    count: Tensor
    confidence: Tensor
    accuracy: Tensor


def probabilities(logits: Tensor) -> Tensor:
    """Softmax over the classes of logits [S, B, C], in float64."""
    return _sampled(logits, "logits").softmax(-1)


def mean_probabilities(logits: Tensor) -> Tensor:
    """The predictive distribution p̄ = (1/S) Σ_s softmax(logits_s), [B, C]."""
    return probabilities(logits).mean(0)


def mean_log_probabilities(logits: Tensor) -> Tensor:
    """The log of p̄, [B, C], finite where p̄ itself would underflow to 0."""
    return _log_mean_exp(_sampled(logits, "logits").log_softmax(-1))


def accuracy(probs: Tensor, y: Tensor) -> float:
    """Share of the rows of probs [B, C] whose largest entry is the label."""
    probs, y = _labelled(probs, y)
    return _average(probs.argmax(-1) == y)


def nll(log_probs: Tensor, y: Tensor) -> float:
    """−mean log p̄(y), from the log probabilities [B, C] of `mean_log_probabilities`."""
    log_probs = log_probs.detach().double()
    _, y = _labelled(log_probs.exp(), y)
    return max(0.0, -_average(log_probs.gather(-1, y[:, None])))


def brier(probs: Tensor, y: Tensor) -> float:
    """Mean over the batch of Σ_c (p_c − 1[y = c])², between 0 and 2."""
    probs, y = _labelled(probs, y)
    return _average((probs - torch.nn.functional.one_hot(y, probs.shape[-1])).square().sum(-1))


def reliability(probs: Tensor, y: Tensor, bins: int = 15) -> Reliability:
    """Top-label confidence against accuracy in the equal-width bins (k/bins, (k+1)/bins]."""
    confidence, correct = _top_label(probs, y, bins)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=confidence.device)[1:-1]
    return _binned(confidence, correct, torch.bucketize(confidence, edges), bins)


def ece(probs: Tensor, y: Tensor, bins: int = 15) -> float:
    """Expected calibration error Σ_b (n_b/n) |accuracy_b − confidence_b| over equal-width bins."""
    return _calibration_gap(reliability(probs, y, bins))


def adaptive_ece(probs: Tensor, y: Tensor, bins: int = 15) -> float:
    """The calibration error over bins of equal mass; equal confidences share a bin."""
    confidence, correct = _top_label(probs, y, bins)
    starts = torch.arange(1, bins, device=confidence.device) * len(confidence) // bins
    edges = confidence.sort().values[starts]
    return _calibration_gap(_binned(confidence, correct, torch.bucketize(confidence, edges, right=True), bins))


def predictive_entropy(logits: Tensor) -> Tensor:
    """Total uncertainty H[p̄] of each input, [B], in nats."""
    return torch.sum(torch.special.entr(mean_probabilities(logits)), -1)


def expected_entropy(logits: Tensor) -> Tensor:
    """Aleatoric uncertainty (1/S) Σ_s H[p_s] of each input, [B], in nats."""
    return torch.sum(torch.special.entr(probabilities(logits)), -1).mean(0)


def mutual_information(logits: Tensor) -> Tensor:
    """Epistemic uncertainty H[p̄] − (1/S) Σ_s H[p_s] of each input, [B], floored at 0."""
    return (predictive_entropy(logits) - expected_entropy(logits)).clamp_min(0)


def uncertainty(logits: Tensor) -> dict[str, float]:
    """The three uncertainties averaged over the batch; needs no labels."""
    return {
        "predictive_entropy": _average(predictive_entropy(logits)),
        "expected_entropy": _average(expected_entropy(logits)),
        "mutual_information": _average(mutual_information(logits)),
    }


def classification(logits: Tensor, y: Tensor) -> dict[str, float]:
    """Every classification metric of logits [S, B, C] against labels [B]."""
    probs = mean_probabilities(logits)
    return {
        "accuracy": accuracy(probs, y),
        "nll": nll(mean_log_probabilities(logits), y),
        "ece": ece(probs, y),
        "adaptive_ece": adaptive_ece(probs, y),
        "brier": brier(probs, y),
        **uncertainty(logits),
    }


def regression(outputs: Tensor, y: Tensor, noise_std: float) -> dict[str, float]:
    """Metrics of the mixture (1/S) Σ_s N(outputs_s, noise_std²) for outputs [S, B, D] and targets [B, D] or [B]."""
    if not (math.isfinite(noise_std) and noise_std > 0):
        raise ValueError(f"noise_std must be positive and finite, got {noise_std}")
    outputs = _sampled(outputs, "outputs")
    target = _targets(y, outputs)
    mean, variance = outputs.mean(0), outputs.var(0, correction=0)
    log_scale = math.log(noise_std) + 0.5 * math.log(2 * math.pi)
    log_density = (-0.5 * ((target - outputs) / noise_std).square() - log_scale).sum(-1)
    return {
        "nll": -_average(_log_mean_exp(log_density)),
        "rmse": math.sqrt(_average((mean - target).square())),
        "coverage_95": _average((mean - target).abs() <= 1.96 * (variance + noise_std**2).sqrt()),
    }


def summarise(values: Sequence[float], sizes: Sequence[float], higher_is_better: bool = True) -> dict[str, float]:
    """Size-weighted mean, plain mean, worst and population std over the clients that have data; {} if none has."""
    if any(size < 0 for size in sizes):
        raise ValueError(f"client sizes must not be negative, got {list(sizes)}")
    clients = [(value, size) for value, size in zip(values, sizes, strict=True) if size > 0]
    if not clients:
        return {}
    kept = [value for value, _ in clients]
    if not all(map(math.isfinite, kept)):
        raise ValueError(f"values of clients with data must be finite, got {kept}")
    mean = math.fsum(kept) / len(kept)
    return {
        "weighted": math.fsum(value * size for value, size in clients) / sum(size for _, size in clients),
        "mean": mean,
        "worst": float(min(kept) if higher_is_better else max(kept)),
        "std": math.sqrt(math.fsum((value - mean) ** 2 for value in kept) / len(kept)),
    }


def _sampled(samples: Tensor, name: str) -> Tensor:
    if samples.ndim != 3 or samples.numel() == 0:
        raise ValueError(f"{name} must be a non-empty [samples, batch, outputs] tensor, got {tuple(samples.shape)}")
    if not samples.isfinite().all():
        raise ValueError(f"{name} must be finite, got {int((~samples.isfinite()).sum())} NaN or infinite entries")
    return samples.detach().double()


def _labelled(probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if probs.ndim != 2 or probs.numel() == 0:
        raise ValueError(f"probabilities must be a non-empty [batch, classes] tensor, got {tuple(probs.shape)}")
    if y.shape != probs.shape[:1] or y.is_floating_point():
        raise ValueError(f"labels must be {len(probs)} integers, got {y.dtype} of shape {tuple(y.shape)}")
    probs, y = probs.detach().double(), y.to(probs.device, torch.int64)
    # NaN fails the comparison too; the tolerance admits half-precision probabilities.
    if not ((probs >= 0).all() and ((probs.sum(-1) - 1).abs() < 1e-2).all()):
        raise ValueError("probabilities must be non-negative and sum to 1 over the classes")
    if y.min() < 0 or y.max() >= probs.shape[-1]:
        raise ValueError(f"labels must be in 0..{probs.shape[-1] - 1}, got {int(y.min())}..{int(y.max())}")
    return probs, y


def _targets(y: Tensor, outputs: Tensor) -> Tensor:
    target = y[:, None] if y.ndim == 1 else y
    if target.shape != outputs.shape[1:] or not target.isfinite().all():
        raise ValueError(f"targets must be finite and of shape {tuple(outputs.shape[1:])}, got {tuple(y.shape)}")
    return target.detach().to(outputs)


def _top_label(probs: Tensor, y: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    probs, y = _labelled(probs, y)
    confidence, label = probs.max(-1)
    return confidence, (label == y).double()


def _binned(confidence: Tensor, correct: Tensor, bin_index: Tensor, bins: int) -> Reliability:
    membership = torch.nn.functional.one_hot(bin_index, bins).double()
    count = membership.sum(0)
    size = count.clamp_min(1)
    return Reliability(count.long(), confidence @ membership / size, correct @ membership / size)


def _calibration_gap(bins: Reliability) -> float:
    return float((bins.count * (bins.accuracy - bins.confidence).abs()).sum() / bins.count.sum())


def _log_mean_exp(logs: Tensor) -> Tensor:
    return logs.logsumexp(0) - math.log(len(logs))


def _average(values: Tensor) -> float:
    return float(values.double().mean())
