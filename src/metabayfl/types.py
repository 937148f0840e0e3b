"""The values that flow between server, clients and methods."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from metabayfl.options import InputError
from metabayfl.randomness import torch_generator

if TYPE_CHECKING:
    from metabayfl.task import Task

__all__ = [
    "Context",
    "Delivered",
    "Diverged",
    "Fit",
    "InputError",
    "Params",
    "Received",
    "Sent",
    "TrainData",
    "Update",
    "Weighted",
]

Params = dict[str, Tensor]
"""State is named tensors, everywhere. A model is `mu`, `rho` if it is Bayesian, `buffers` if the module has any."""


class Diverged(RuntimeError):
    """Training left the finite numbers."""


class Update(NamedTuple):
    """What a client sends; all of it crosses the wire and is counted."""

    payload: Params
    weight: float
    metrics: dict[str, float]


class Weighted(Protocol):
    """What an average needs of an update; the payload may be read from disk each time it is asked for."""

    @property
    def payload(self) -> Params:
        """Tensors that the client sent."""
        ...

    @property
    def weight(self) -> float:
        """How much the client counts."""
        ...


class Sent(Weighted, Protocol):
    """All that a client sends."""

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers that the client sent along."""
        ...


class Received(Sent, Protocol):
    """An update as the server sees it."""

    @property
    def client(self) -> int:
        """Whose it is, as the engine knows it: a client's own word does not count."""
        ...


class Delivered(NamedTuple):
    """An update in memory, for those who call `aggregate` without an engine: `Delivered(client, *update)`."""

    client: int
    payload: Params
    weight: float
    metrics: dict[str, float]


class Fit(NamedTuple):
    """What a round leaves behind: the update to send, the private state, and the client's own model."""

    update: Update
    state: Params
    personal: Params


@dataclass(frozen=True)
class TrainData:
    """The data a method may see of one client. Test data live in the engine only."""

    x: Tensor
    y: Tensor
    select_x: Tensor
    select_y: Tensor
    batch_size: int = 32
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None
    """What is done to the inputs of each mini-batch, at random."""

    def __len__(self) -> int:
        return len(self.x)

    def batches(self, epochs: int, rng: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled mini-batches; a last batch of one sample joins the one before it (BatchNorm cannot take one)."""
        for _ in range(epochs):
            order = torch.randperm(len(self.x), generator=rng)
            for rows in order.tensor_split(self._cuts()):
                x = self.x.index_select(0, rows)
                yield x if self.augment is None else self.augment(x, rng), self.y.index_select(0, rows)

    def steps_per_epoch(self) -> int:
        """Count the mini-batches of an epoch."""
        return len(self._cuts()) + 1

    def _cuts(self) -> list[int]:
        cuts = list(range(self.batch_size, len(self.x), self.batch_size))
        return cuts[:-1] if cuts and len(self.x) - cuts[-1] == 1 and self.batch_size > 1 else cuts


@dataclass(frozen=True)
class Context:
    """Where a hook runs: task, round, client (None on the server) and the randomness that belongs to them."""

    task: "Task"
    seed: int = 0
    round: int = 0
    rounds: int = 1
    client: int | None = None
    clients: Mapping[int, int] = field(default_factory=dict)
    """Training samples of each client of the federation."""
    unlabelled: Tensor | None = None
    """The pool U; on the server only."""
    augmented: bool = False
    """Whether training inputs are changed at random, so that a sample stands for many."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What a hook wants to be known of its time: selection. It goes to the log, not over the wire."""

    part: int = 0
    """Part of the round, for hooks that begin anew within one."""

    def rng(self, purpose: str) -> torch.Generator:
        """Return a generator that depends on seed, round, client, purpose and part and on nothing else."""
        named = f"{purpose}.{self.part}" if self.part else purpose
        return torch_generator(self.seed, self.round, self.client, named)
