"""FedFomo (Zhang et al., ICLR 2021): clients mix others' models by their own validation loss. docs/methods.md 4.6."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from metabayfl.methods.base import Count, NotNegative, put
from metabayfl.methods.needs import Need
from metabayfl.methods.own_models import OwnModels
from metabayfl.options import InputError
from metabayfl.types import Context, Fit, Params, Received, TrainData, Update


class FedFomo(OwnModels):
    """Each client receives some other clients' models and goes towards those that do better on its d_n."""

    name: ClassVar[str] = "fedfomo"
    paper: ClassVar[str] = "Zhang et al., ICLR 2021"
    selects: ClassVar[bool] = True
    floats_down: ClassVar[float] = 5.0

    candidates: Count = 5
    """Models of others that a client receives in a round, at most."""
    explore: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Probability that a candidate is chosen at random instead of by its past use, in the first round."""
    explore_decay: NotNegative = 0.05
    """How much that probability falls in each round."""

    @property
    def needs(self) -> frozenset[Need]:
        """The server keeps the clients' models, and clients their own."""
        return super().needs | {Need.INDIVIDUAL, Need.MODELS}

    def init_server(self, ctx: Context) -> Params:
        """Return the common start and a table of how useful client j has been to client i; models come later."""
        everybody = len(ctx.clients)
        return super().init_server(ctx) | {"affinity": torch.zeros(everybody, everybody)}

    def broadcast(self, server: Params, ctx: Context) -> Params:
        """Return other clients' models; the newest of each."""
        chosen = self.choose(server, ctx)
        return {name: server[name] for other in chosen for name in server if name.endswith(f".{other}")}

    def choose(self, server: Params, ctx: Context) -> list[int]:
        """Take the most useful clients, each place at random with the probability of exploring."""
        known = sorted(int(name.removeprefix("mu.")) for name in server if name.startswith("mu."))
        left = [other for other in known if other != ctx.client]
        row, rng = server["affinity"][ctx.client or 0], ctx.rng("candidates")
        chosen: list[int] = []
        explore = max(0.0, self.explore - self.explore_decay * ctx.round)
        while left and len(chosen) < self.candidates:
            by_chance = torch.rand(1, generator=rng).item() < explore
            place = int(torch.randint(len(left), (1,), generator=rng)) if by_chance else int(row[left].argmax())
            chosen.append(left.pop(place))
        return sorted(chosen)

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        """Mix what is useful into the client's own model, then train that."""
        own = self.own_model(state, ctx)
        others = self.received(down, own, ctx)
        usefulness = self.usefulness(own, others, data, ctx)
        model, metrics = self.train(mix(own, others, usefulness), data, ctx)
        row = torch.zeros(len(ctx.clients))
        for other, value in usefulness.items():
            row[other] = value
        payload = ctx.task.split(model)[0] | {"affinity": row}
        metrics |= {"received": len(others), "mixed": sum(value > 0 for value in usefulness.values())}
        return Fit(Update(payload, 1.0, metrics), put(model, "own"), {})

    def received(self, down: Params, own: Params, ctx: Context) -> dict[int, Params]:
        """Return the received models by client; what never leaves a client is this client's own."""
        private = ctx.task.split(own)[1]
        numbers = [int(name.removeprefix("mu.")) for name in down if name.startswith("mu.")]
        parts = {n: {name: down[f"{name}.{n}"] for name in ("mu", "buffers") if f"{name}.{n}" in down} for n in numbers}
        return {number: ctx.task.join(part, private) for number, part in parts.items()}

    def usefulness(self, own: Params, others: dict[int, Params], data: TrainData, ctx: Context) -> dict[int, float]:
        """(L(own) - L(other)) / |other - own|, with L the loss on d_n; a model that is no other has none."""
        if not len(data.select_x):
            raise InputError(f"{self.name} chooses by d_n, and client {ctx.client} has none: raise select.fraction")
        before = self.loss(own, data, ctx)
        found = {}
        for number, other in others.items():
            distance = (other["mu"] - own["mu"]).norm().item()
            found[number] = (before - self.loss(other, data, ctx)) / distance if distance else 0.0
        return found

    def loss(self, model: Params, data: TrainData, ctx: Context) -> float:
        """Mean loss of a model on d_n."""
        outputs = self.predict(model, data.select_x, 1, ctx)
        return ctx.task.likelihood.losses(outputs, data.select_y).mean().item()

    def payload_like(self, server: Params, ctx: Context) -> Params:
        """Return a model and a row of the table."""
        model = {name: server[name] for name in ("mu", "buffers") if name in server}
        return model | {"affinity": server["affinity"][0]}

    def aggregate(self, server: Params, updates: Sequence[Received], ctx: Context) -> Params:
        """Keep each client's newest model, and add what it said of the others to the table."""
        after = server | {"affinity": server["affinity"].clone()}
        for update in updates:
            number, payload = update.client, update.payload
            after["affinity"][number] += payload["affinity"]
            after |= {f"{name}.{number}": payload[name].clone() for name in ("mu", "buffers") if name in payload}
        return after


def mix(own: Params, others: dict[int, Params], usefulness: dict[int, float]) -> Params:
    """Go from one's own model towards the useful ones, by their shares of all positive usefulness."""
    positive = {number: value for number, value in usefulness.items() if value > 0}
    total = sum(positive.values())
    mixed: dict[str, Tensor] = dict(own)
    for number, value in positive.items():
        for name, tensor in mixed.items():
            mixed[name] = tensor + value / total * (others[number][name] - own[name])
    return mixed
