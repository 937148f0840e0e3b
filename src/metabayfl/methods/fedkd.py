"""FedKD (FedMD, Li & Wang, 2019): predictions on U travel, weights never do, unlike FedAvg. docs/methods.md 5.5."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from metabayfl import aggregate
from metabayfl.distillation import count_classes, sharpen
from metabayfl.methods.base import Count, Positive, get, model_of, put
from metabayfl.methods.needs import Need
from metabayfl.methods.pool_distillation import PoolDistillation, unlabelled
from metabayfl.optim import PointLoss, descend, rate_at
from metabayfl.types import Context, Fit, Params, Received, TrainData, Update

INPUTS, ANSWER, HOLDERS = "pool", "answer", "holders"


class FedKD(PoolDistillation):
    """Clients tell what they think of U, learn what all think on average, and train their own models."""

    name: ClassVar[str] = "fedkd"
    paper: ClassVar[str] = "Li & Wang, 2019 (FedMD); Itahara et al., IEEE TMC 2021 (DS-FL)"
    is_personal: ClassVar[bool] = True
    floats_up: ClassVar[None] = None
    floats_down: ClassVar[None] = None
    passes: ClassVar[None] = None

    batchnorm: Literal["average"] = "average"
    """No part of a model travels: clients keep their BatchNorm statistics, and the student has those of U."""
    pool_samples: Count = 1000
    """Samples of U that are used, at most: each client receives them, once."""
    digest_epochs: Count = 1
    """Epochs over U in which a client learns the mean prediction, before those on its own data."""
    distil_rate: Positive = 0.05
    """Learning rate of the student, SGD with momentum 0.9 and weight decay 1e-5; it starts from nothing."""
    distil_epochs: Count = 20
    """Epochs over U in which the server's student, the global model, learns it."""

    @property
    def needs(self) -> frozenset[Need]:
        """U; clients keep it and their models, and the server must know who has it."""
        return super().needs | {Need.STATE}

    def init_server(self, ctx: Context) -> Params:
        """Return the student, the samples of U in use, and that nobody has them."""
        x = unlabelled(self.name, ctx)
        rows = torch.randperm(len(x), generator=ctx.rng("pool"))[: self.pool_samples].sort().values
        return super().init_server(ctx) | {INPUTS: x[rows], HOLDERS: torch.zeros(len(ctx.clients), dtype=torch.uint8)}

    def broadcast(self, server: Params, ctx: Context) -> Params:
        """Send the mean prediction, if there is one yet, and U to those who do not have it."""
        down = {ANSWER: server[ANSWER]} if ANSWER in server else {}
        return down if server[HOLDERS][ctx.client or 0] else down | {INPUTS: server[INPUTS]}

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        """Learn the mean prediction, train on the client's own data, and predict."""
        inputs = down[INPUTS] if INPUTS in down else state[INPUTS]
        own = self.digest(get(state, "own") or self.init_model(ctx), inputs, down.get(ANSWER), data.batch_size, ctx)
        own, metrics = self.train(own, data, ctx)
        update = Update({ANSWER: ctx.task.consult(own, inputs).softmax(1)}, self.weight_of(data), metrics)
        return Fit(update, put(own, "own") | {INPUTS: inputs.clone()}, {})

    def digest(self, own: Params, inputs: Tensor, answer: Tensor | None, batch_size: int, ctx: Context) -> Params:
        """Learn the mean prediction, if there is one."""
        if answer is None:
            return own
        student, pool = PointLoss(ctx.task, own), TrainData(inputs, answer, inputs[:0], answer[:0], batch_size)
        batches = pool.batches(self.digest_epochs, ctx.rng("digest"))
        descend(student, self.make_optimiser(student), batches, rate_at(self.rate, ctx.round, ctx.rounds))
        return student.model()

    def payload_like(self, server: Params, ctx: Context) -> Params:
        """Return probabilities for the samples of U."""
        shape = len(server[INPUTS]), count_classes(self.name, ctx.task)
        return {ANSWER: torch.zeros(shape, dtype=ctx.task.weights.dtype)}

    def aggregate(self, server: Params, updates: Sequence[Received], ctx: Context) -> Params:
        """Average the predictions, sharpen them, and let the student learn them."""
        sums = aggregate.weighted_sums(updates, lambda payload, _: {ANSWER: payload[ANSWER]})
        answer = sharpen(sums[ANSWER], self.temperature).to(ctx.task.weights.dtype)
        holders = server[HOLDERS].clone()
        holders[[update.client for update in updates]] = 1
        student = self.distil(PointLoss(ctx.task, model_of(server)), server[INPUTS], answer, ctx)
        return server | student | {ANSWER: answer, HOLDERS: holders}

    def received_model(self, down: Params, state: Params, ctx: Context) -> Params | None:
        """There is none: the student never leaves the server."""
        return None

    def personalise(
        self, down: Params, state: Params, personal: Params | None, data: TrainData, ctx: Context
    ) -> Params:
        """Return the client's own model; one that never took part learns the mean prediction from the common start."""
        if own := get(state, "own"):
            return own
        return self.digest(self.init_model(ctx), down[INPUTS], down.get(ANSWER), data.batch_size, ctx)
