"""What an engine is to carry out, and the decisions that depend on nothing but its seed."""

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from metabayfl.config import Plan
from metabayfl.data.federation import Federation
from metabayfl.methods.base import Method, make_task
from metabayfl.methods.needs import Need
from metabayfl.randomness import numpy_generator
from metabayfl.task import Task
from metabayfl.types import Context, TrainData


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
        return self.method.holds_out if wish is None else wish

    @property
    def offers(self) -> frozenset[Need]:
        """What a method gets here beyond a model and training data."""
        absent = {Need.UNLABELLED} if self.federation.unlabelled is None else set()
        return frozenset(Need) - absent

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
            augmented=self.federation.augment,
        )

    @property
    def train_sizes(self) -> Mapping[int, int]:
        """Training samples of each client that can be invited: all of them, or the one that has everybody's."""
        if self.sizes is not None:
            return self.sizes
        cached: dict[int, int] | None = self.__dict__.get("_train_sizes")
        if cached is None:
            sizes = self.federation.train_sizes(self.held_out)
            cached = self.__dict__["_train_sizes"] = {0: sizes[0]} if self.method.pools else sizes
        return cached

    def train_data(self, client: int, round_: int) -> TrainData:
        """Return what the method may see of a client in a round counted from 0; test data only if it leaks."""
        data = self.federation.train_data(client, self.held_out, round_, self.plan.rounds)
        if not self.method.leaks:
            return data
        test_x, test_y = self.federation.local_test.of(client)
        return replace(data, select_x=test_x, select_y=test_y)

    def participants(self, round_: int) -> list[int]:
        """Clients invited to a round (counted from 0), in the order of their ids."""
        everybody = len(self.train_sizes)
        wanted = self.plan.clients_per_round
        if wanted is None or wanted >= everybody:
            return list(range(everybody))
        chosen = numpy_generator(self.plan.seed, round_, "participants").choice(everybody, wanted, replace=False)
        return sorted(chosen.tolist())

    def is_late(self, client: int, round_: int) -> bool:
        """Whether a client's simulated time exceeds the deadline; nothing real is timed, pooled data have no device."""
        deadline = self.plan.deadline
        if deadline.seconds is None or self.method.pools:
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
    federation = federation.pooled() if method.pools else federation
    task = make_task(method, model, federation.likelihood, scaling=federation.scaling)
    if task.channels_last and not task.runs_on(federation.train.x[:2]):
        task = make_task(method, model, federation.likelihood, channels_last=False, scaling=federation.scaling)
    return Job(method, task, federation, plan)
