"""What crosses between server and node: requests and replies as safetensors files with their checksum, no pickle."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field

from metabayfl import tensorfile
from metabayfl._version import __version__
from metabayfl.options import Options
from metabayfl.types import Params, Update
from metabayfl.validate import BadUpdate, find_malformed, find_metrics_fault, is_finite

LONGEST_TEXT = 300
LARGEST_INTRODUCTION = 4096
COSTS = {
    "seconds", "selection_seconds", "comm_seconds", "peak_memory_bytes", "forward_passes", "backward_passes",
}  # fmt: skip
"""What a node says of its effort."""
Count = Annotated[int, Field(ge=0)]
Metrics = dict[str, float]
Views = dict[str, Metrics]
"""Metrics of a client's models by view."""
VIEWS = {"G/L", "P/L", "P/G"}


class Request(Options):
    """What a server asks of a node; the tensors that go with it are what the client receives."""

    experiment: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    """Name of the run on the node's disk."""
    config: str
    """The config of the run, as TOML."""
    version: str = __version__
    """metabayfl on the server: another one may compute other numbers."""
    do: tuple[str, ...] = ("describe",)
    """describe, or some of score, export, fit, done in this order."""
    round: Count = 0
    """Rounds that are behind the tensors."""
    latest: str = ""
    """Key of the request whose record is the client's state now; empty if it never took part."""
    oldest: Count = 0
    """The first round, counted from 1, whose record may be needed again, whatever happens to the server."""
    sizes: tuple[int, ...] = ()
    """Training samples of all clients."""
    likelihood: dict[str, Any] = Field(default_factory=dict)
    input_shape: tuple[int, ...] = ()
    channels_last: bool = False
    constants: int = 0
    """Checksum of what is neither trained nor sent."""


class Introduction(Options):
    """What a node says of its data before a run: numbers and kinds, no samples."""

    client: Count
    train: Count
    """Training samples, d_n among them."""
    select: Count
    test: Count
    batch_size: Annotated[int, Field(ge=1)]
    input_shape: tuple[Count, ...]
    whole_inputs: bool
    classes: Count
    """Highest label and one; 0 for regression."""
    label_shape: tuple[Count, ...]


@dataclass(frozen=True)
class Reply:
    """What a node answers: an update, metrics of its models on its own test part, what it cost, what failed."""

    client: int
    round: int
    update: Update | None = None
    scores: Views | None = None
    cost: Metrics = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """Why something that was asked for has not been done."""
    size: int = 0
    """Bytes that came over the wire."""


def encode_request(request: Request, down: Params) -> bytes:
    """Return the bytes of a request."""
    return tensorfile.encode_checked(down, request.model_dump(mode="json"))


def decode_request(content: bytes) -> tuple[Request, Params]:
    """Undo `encode_request`."""
    down, meta = tensorfile.decode(bytearray(content))
    return Request(**meta), down


def key_of(request: Request, down: Params) -> str:
    """Return a digest of all that a fit depends on: requests with the same key have the same answer."""
    content = tensorfile.encode(down, request.model_dump(mode="json", exclude={"do", "oldest"}))
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def encode_introduction(introduction: Introduction) -> bytes:
    """Return the bytes of an introduction."""
    return introduction.model_dump_json().encode()


def decode_introduction(content: bytes) -> Introduction:
    """Undo `encode_introduction`; anything else raises a ValueError."""
    if len(content) > LARGEST_INTRODUCTION:
        raise ValueError(f"{len(content)} bytes, above {LARGEST_INTRODUCTION}")
    try:
        return Introduction(**json.loads(content))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not an introduction ({type(error).__name__})") from None


def encode_reply(reply: Reply) -> bytes:
    """Return the bytes of a reply: nothing but what `Reply` names."""
    payload, weight, metrics = reply.update or ({}, 0.0, {})
    about: dict[str, Any] = {
        "client": reply.client,
        "round": reply.round,
        "scores": reply.scores,
        "failures": reply.failures,
    }
    about |= {"fitted": reply.update is not None, "weight": weight, "metrics": metrics, "cost": reply.cost}
    return tensorfile.encode_checked(payload, about)


def decode_reply(content: bytes) -> Reply:
    """Read what a stranger may have sent; what is not a reply raises a ValueError with one line."""
    tensors, meta = tensorfile.decode(bytearray(content))
    try:
        reply = Reply(meta["client"], meta["round"], cost=meta["cost"], size=len(content))
        failures = {name: one_line(text) for name, text in meta["failures"].items() if name in ("fit", "score")}
        scores = (
            None if meta["scores"] is None else {view: meta["scores"][view] for view in VIEWS & meta["scores"].keys()}
        )
        fitted, weight, metrics = meta["fitted"] is True, meta["weight"], meta["metrics"]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise BadUpdate(f"a reply in the wrong form ({type(error).__name__})") from None
    update = Update(tensors, weight, metrics) if fitted else None
    faults = [_cost_fault(reply.cost), *map(find_metrics_fault, (scores or {}).values())]
    faults += [] if update is None else [find_malformed(update)]
    for fault in filter(None, faults):
        raise BadUpdate(fault)
    return replace(reply, update=update, scores=scores, failures=failures)


def _cost_fault(cost: object) -> str:
    fine = isinstance(cost, Mapping) and cost.keys() <= COSTS and all(map(is_finite, cost.values()))
    return "" if fine else f"its costs are not finite numbers with the names {', '.join(sorted(COSTS))}"


def one_line(text: object) -> str:
    """Return a stranger's text as one short line without control characters."""
    plain = "".join(letter if letter.isprintable() else " " for letter in str(text)[: 4 * LONGEST_TEXT])
    return " ".join(plain.split())[:LONGEST_TEXT]
