"""Judging models: on the common test set, on a client's test part, and on its d_n."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from metabayfl.engine.plan import Job
from metabayfl.randomness import keyed_globals, numpy_generator
from metabayfl.types import Context, Diverged, Params

Metrics = dict[str, float]
Views = dict[str, Metrics]
"""Metrics by view: whose model (G global, A averaged over rounds, P personal) on which samples; docs/methods.md 1.7."""


@dataclass(frozen=True)
class LocalScores:
    """What a client's samples say of the models, by view."""

    client: int
    views: Views


@dataclass(frozen=True)
class GlobalScores:
    """What the common test set says of the models, and bins of confidence of the global one if it predicts classes."""

    views: Views
    reliability: dict[str, list[float]]


def judge_locally(job: Job, models: Mapping[str, Params], ctx: Context) -> Views:
    """Judge models on a client's test part; if the plan says so on d_n too, and scaled by the temperature found there.

    The views */T hold the NLL on d_n by temperature: everybody's together give that of a global model.
    """
    client, views = ctx.client or 0, Views()
    test = subset(*job.federation.local_test.of(client), job.plan.eval.local_subset)
    likelihood, (x, y) = job.task.likelihood, _held_out(job, ctx)
    for who, model in models.items():
        outputs = predict(job, model, test[0], ctx)
        views[f"{who}/L"] = likelihood.measure(outputs, test[1])
        if len(x):
            own = predict(job, model, x, ctx)
            views |= {f"{who}/D": likelihood.measure(own, y), f"{who}/T": likelihood.by_temperature(own, y)}
            views[f"{who}/L"] |= scaled(job, outputs, test[1], coolest(views[f"{who}/T"]))
    return {view: metrics for view, metrics in views.items() if metrics}


def judge_globally(
    job: Job, models: Mapping[str, Params], temperatures: Mapping[str, float], ctx: Context
) -> GlobalScores | None:
    """Judge models on the common test set; None if there is nothing to judge."""
    x, y = common_test(job)
    views: Views = {}
    bins: dict[str, list[float]] = {}
    for who, model in models.items() if len(x) else ():
        outputs = predict(job, model, x, ctx)
        views[f"{who}/G"] = job.task.likelihood.measure(outputs, y)
        views[f"{who}/G"] |= scaled(job, outputs, y, temperatures.get(who))
        bins = bins or job.task.likelihood.reliability(outputs, y)
    return GlobalScores(views, bins) if views else None


def common_test(job: Job) -> tuple[Tensor, Tensor]:
    """Return the samples of the common test set that the plan asks for."""
    return subset(job.federation.test_x, job.federation.test_y, job.plan.eval.subset)


def _held_out(job: Job, ctx: Context) -> tuple[Tensor, Tensor]:
    """Return d_n, if models are to be judged on it and have not been trained on it."""
    data = job.train_data(ctx.client or 0, max(0, ctx.round - 1))
    wanted = job.plan.eval.on_dn and job.held_out and not job.method.leaks
    return (data.select_x, data.select_y) if wanted else (data.select_x[:0], data.select_y[:0])


def coolest(by_temperature: Mapping[str, float]) -> float | None:
    """Return the temperature with the lowest NLL; None if none was tried."""
    return float(min(by_temperature, key=lambda name: by_temperature[name])) if by_temperature else None


def scaled(job: Job, outputs: Tensor, y: Tensor, temperature: float | None) -> Metrics:
    """Metrics of predictions whose logits are divided by a temperature (Guo et al. 2017)."""
    if temperature is None:
        return {}
    found = job.task.likelihood.measure(outputs / temperature, y)
    return {"temperature": temperature} | {f"scaled_{name}": found[name] for name in ("nll", "ece")}


def predict(job: Job, model: Params, x: Tensor, ctx: Context) -> Tensor:
    """Outputs of a model; what is not finite cannot be judged."""
    with keyed_globals(ctx.seed, ctx.round, ctx.client, "module", "predict"):
        outputs = job.method.predict(model, x, job.plan.eval.samples, ctx)
    if not outputs.isfinite().all():
        who = "the global model" if ctx.client is None else f"a model of client {ctx.client}"
        raise Diverged(f"{who} gives outputs that are NaN or infinite after round {ctx.round}")
    return outputs


def subset(x: Tensor, y: Tensor, count: int | None) -> tuple[Tensor, Tensor]:
    """Return so many samples, always the same ones, or all."""
    if count is None or count >= len(x):
        return x, y
    rows = torch.from_numpy(numpy_generator("eval.subset").permutation(len(x))[:count])
    return x[rows], y[rows]
