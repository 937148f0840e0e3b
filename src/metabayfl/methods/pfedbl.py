"""pFedBL (Yu et al., 2025), our RECONSTRUCTION from its abstract: BayFL with personal priors. docs/methods.md 4.2."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from metabayfl.distillation import count_classes
from metabayfl.features import last_dense, watch
from metabayfl.gaussian import Elbo, as_prior
from metabayfl.methods.base import Count, Positive, model_of
from metabayfl.methods.needs import Need
from metabayfl.methods.pool_distillation import unlabelled
from metabayfl.methods.variational import Variational
from metabayfl.optim import descend, rate_at
from metabayfl.options import InputError
from metabayfl.task import Task
from metabayfl.types import Context, Fit, Params, Received, TrainData

STATISTICS = "feature_mean", "feature_variance"
SMALLEST = 1e-12


class PFedBL(Variational):
    """Clients shift the global posterior to their own labels, by feature statistics from U, and take it as prior."""

    name: ClassVar[str] = "pfedbl"
    paper: ClassVar[str] = "Yu et al., 2025 (a reconstruction from the abstract)"
    is_personal: ClassVar[bool] = True
    floats_down: ClassVar[float] = 3.0

    batchnorm: Literal["average"] = "average"
    """BatchNorm is averaged: the server predicts, and for that it needs whole models."""
    prior: Literal["personal"] = "personal"  # type: ignore[assignment]
    """Prior of a client: the received posterior, its last layer trained on features drawn by the client's labels."""
    kl: Literal["client"] = "client"
    """Divide the KL by the client's training samples."""
    rule: Literal["mixture"] = "mixture"
    """The average minimises the sum of KL(q_n || q)."""
    backend: Literal["bbb"] = "bbb"
    """Gradients of the ELBO (Bayes by backprop)."""
    kl_share: Positive = 0.1
    """What the KL weighs beside the NLL: after a client's first round its kl_weight is kl_share NLL |D_n| / KL."""
    smallest_kl_weight: Positive = 1e-4
    """Lower bound of that weight."""
    largest_kl_weight: Positive = 0.01
    """Upper bound of that weight: it rises by itself, as a heavier KL makes the KL smaller."""
    drawn_features: Count = 200
    """Features that a client draws to shift the last layer."""
    prior_epochs: Annotated[int, Field(ge=0)] = 5
    """Epochs over them; 0 takes the received posterior as prior."""
    teacher_draws: Count = 2
    """Weight samples with which each client's posterior predicts U."""

    @property
    def needs(self) -> frozenset[Need]:
        """U, the posteriors one by one, and a weight that clients keep."""
        return frozenset({Need.UNLABELLED, Need.INDIVIDUAL, Need.STATE})

    def init_server(self, ctx: Context) -> Params:
        """Return the posterior; a variance below 0 says that nothing is known of the features yet."""
        classes, layer = count_classes(self.name, ctx.task), last_dense(self.name, ctx.task.module)
        last_rows(self.name, layer, ctx.task)
        unknown = torch.zeros(classes, layer.in_features, dtype=ctx.task.weights.dtype)
        return super().init_server(ctx) | dict(zip(STATISTICS, (unknown, unknown - 1), strict=True))

    def payload_like(self, server: Params, ctx: Context) -> Params:
        """Return a posterior."""
        return model_of(server)

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        """Shift the received posterior to the client's labels, and train from there with that as prior."""
        prior = self.personal_prior(ctx.task.join(down, state), down, data, ctx)
        weight = float(state["kl_weight"][0]) if "kl_weight" in state else self.kl_weight
        scale = weight / len(data)
        elbo = Elbo(ctx.task, prior, as_prior(prior), scale, ctx.rng("noise"), self.rho_factor(scale))
        model, metrics = self.minimise(elbo, data, ctx)
        fit = self.leave(model, metrics | {"kl_weight": weight}, data, ctx)
        following = torch.tensor([self.next_weight(metrics["nll"], metrics["kl"], len(data))], dtype=torch.float64)
        return fit._replace(state=fit.state | {"kl_weight": following})

    def next_weight(self, nll: float, kl: float, samples: int) -> float:
        """zeta = kl_share NLL |D_n| / KL, within its bounds: then zeta KL / |D_n| is kl_share NLL."""
        wished = self.kl_share * nll * samples / max(kl, SMALLEST)
        return min(max(wished, self.smallest_kl_weight), self.largest_kl_weight)

    def personal_prior(self, received: Params, down: Params, data: TrainData, ctx: Context) -> Params:
        """Train the last layer, with itself as prior, on features of the classes that the client has."""
        mean, variance = (down[name] for name in STATISTICS)
        if not self.prior_epochs or variance.min() < 0:
            return received
        layer = last_dense(self.name, ctx.task.module)
        rows = last_rows(self.name, layer, ctx.task)
        last = {name: received[name][rows] for name in ("mu", "rho")}
        bare = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, dtype=mean.dtype)
        task, scale = Task(bare, ctx.task.likelihood, bayesian="all"), self.kl_weight / self.drawn_features
        elbo = Elbo(task, last, as_prior(last), scale, ctx.rng("feature noise"), self.rho_factor(scale))
        drawn = self.draw(mean, variance, data, ctx.rng("features"))
        batches = drawn.batches(self.prior_epochs, ctx.rng("feature batches"))
        descend(elbo, self.make_optimiser(elbo), batches, rate_at(self.rate, ctx.round, ctx.rounds))
        return received | {name: received[name].index_copy(0, rows, new) for name, new in elbo.model().items()}

    def draw(self, mean: Tensor, variance: Tensor, data: TrainData, rng: torch.Generator) -> TrainData:
        """Draw labels as often as the client has them, and features of their classes."""
        labels = data.y[torch.randint(len(data), (self.drawn_features,), generator=rng)]
        noise = torch.randn(len(labels), mean.shape[1], generator=rng, dtype=mean.dtype)
        features = mean[labels] + variance[labels].sqrt() * noise
        return TrainData(features, labels, features[:0], labels[:0], data.batch_size)

    def aggregate(self, server: Params, updates: Sequence[Received], ctx: Context) -> Params:
        """Average by the rule `mixture`, and describe the features of each class on U as the clients see it."""
        mean, x = super().aggregate(server, updates, ctx), unlabelled(self.name, ctx)
        outputs = (self.predict(update.payload, x, self.teacher_draws, ctx) for update in updates)
        soft, confidence = agree(torch.stack([drawn.softmax(2).mean(0) for drawn in outputs]))
        layer = last_dense(self.name, ctx.task.module)
        features = watch(layer, lambda x: ctx.task.consult(mean, x), x).features
        return mean | dict(zip(STATISTICS, describe_classes(features, soft * confidence[:, None]), strict=True))


def agree(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Combine clients' probabilities [clients, samples, classes] by weights exp(-entropy); returns their mean too."""
    sure = torch.exp((probabilities * probabilities.clamp_min(SMALLEST).log()).sum(2))
    return (sure[..., None] * probabilities).sum(0) / sure.sum(0)[:, None], sure.mean(0)


def describe_classes(features: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return weighted mean and variance of the features [samples, features] of each class."""
    shares = (weights / weights.sum(0).clamp_min(SMALLEST)).T.double()
    centre = features.double().mean(0)
    around = features.double() - centre
    mean = shares @ around
    variance = (shares @ around.square() - mean.square()).clamp_min(0.0)
    return (mean + centre).to(features.dtype), variance.to(features.dtype)


def last_rows(name: str, layer: nn.Linear, task: Task) -> Tensor:
    """Return where the last layer lies in the flat vector; it must have a posterior."""
    parameters = dict(task.module.named_parameters())
    slots = [s for s in task.layout.slots if parameters[s.name] is layer.weight or parameters[s.name] is layer.bias]
    if any(slot.stop > task.bayesian_size for slot in slots) or not slots:
        raise InputError(f"{name} shifts the posterior of the last layer: leave it out of method.deterministic")
    return torch.cat([torch.arange(slot.start, slot.stop) for slot in slots])
