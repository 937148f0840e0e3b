"""What an engine is to carry out, and the decisions that depend on nothing but its seed."""

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from metabayfl.config import Plan
from metabayfl.data.federation import Federation
from metabayfl.methods.base import Method, make_task
from metabayfl.randomness import numpy_generator
from metabayfl.task import Task
from metabayfl.types import Context


@dataclass(frozen=True)
class Job:
    """A method, a model and data, with the plan of the run."""

    method: Method
    task: Task
    federation: Federation
    plan: Plan
    sizes: Mapping[int, int] | None = None
    """Training samples of each client, where the federation does not know them: on the machine of one client."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as a plain module: a task, whose parameters are views, must be laid out anew in another process."""
        model, content = self.task.initial(), io.BytesIO()
        torch.save(self.task.export(model["mu"], model.get("buffers")), content)
        return _arrive, (self.method, content.getvalue(), self.federation, self.plan)

    @property
    def held_out(self) -> bool:
        """Whether d_n is left out of training."""
        wish = self.plan.select.held_out
        return self.method.selects if wish is None else wish

    def context(self, round_: int, client: int | None = None) -> Context:
        """Return the context of a hook in a round counted from 0."""
        return Context(
            task=self.task,
            seed=self.plan.seed,
            round=round_,
            rounds=self.plan.rounds,
            client=client,
            clients=self.train_sizes,
            unlabelled=self.federation.unlabelled if client is None else None,
        )

    @property
    def train_sizes(self) -> Mapping[int, int]:
        """Training samples of each client."""
        if self.sizes is not None:
            return self.sizes
        cached: dict[int, int] | None = self.__dict__.get("_train_sizes")
        if cached is None:
            cached = self.__dict__["_train_sizes"] = self.federation.train_sizes(self.held_out)
        return cached

    def participants(self, round_: int) -> list[int]:
        """Clients invited to a round (counted from 0), in the order of their ids."""
        everybody = len(self.federation)
        wanted = self.plan.clients_per_round
        if wanted is None or wanted >= everybody:
            return list(range(everybody))
        chosen = numpy_generator(self.plan.seed, round_, "participants").choice(everybody, wanted, replace=False)
        return sorted(chosen.tolist())

    def is_late(self, client: int, round_: int) -> bool:
        """Whether a client's simulated time exceeds the deadline; nothing real is timed."""
        deadline = self.plan.deadline
        if deadline.seconds is None:
            return False
        slowness = math.exp(deadline.spread * numpy_generator(self.plan.seed, client, "speed").standard_normal())
        jitter = math.exp(0.1 * numpy_generator(self.plan.seed, client, round_, "speed").standard_normal())
        steps = -(-self.train_sizes[client] // int(self.federation.batch_sizes[client])) * self.method.epochs
        return steps * deadline.step_seconds * slowness * jitter > deadline.seconds


def _arrive(method: Method, content: bytes, federation: Federation, plan: Plan) -> Job:
    """Undo `Job.__reduce__`, in a worker that this program has just started."""
    module = torch.load(io.BytesIO(content), weights_only=False)
    return make_job(method, module, federation, plan)


def make_job(method: Method, model: nn.Module, federation: Federation, plan: Plan) -> Job:
    """Lay a model out for a method and join everything; `x.view(n, -1)` after a convolution rules channels-last out."""
    task = make_task(method, model, federation.likelihood)
    x = federation.train.x[:2]
    if task.channels_last and not task.runs_on(x.to(task.weights.dtype) if x.is_floating_point() else x):
        task = make_task(method, model, federation.likelihood, channels_last=False)
    return Job(method, task, federation, plan)
