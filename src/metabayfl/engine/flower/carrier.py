"""Messages over Flower's grid: who is there, bounded waits, lost nodes asked again when they come back."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid
from pydantic import Field

from metabayfl.options import InputError, Options
from metabayfl.remote.wire import Introduction, decode_introduction, one_line
from metabayfl.validate import find_duplicates

RECORD, ARRAY, STYPE = "metabayfl", "file", "safetensors"
DESCRIBE, TAKE_PART = "query.describe", "train.take_part"
LOST = {3: "its message was lost", 4: "its answer was lost", 5: "its node was lost", 8: "its process died"}
"""Flower's error codes after which it is worth asking again."""
MOST_TRIES = 10
Positive = Annotated[float, Field(gt=0)]


class Waits(Options):
    """How long a server waits; every wait has an end."""

    join_seconds: Positive = 300
    """For all clients to be there before the first round."""
    reply_seconds: Positive = 3600
    """For the answers of a round."""
    rejoin_seconds: Annotated[float, Field(ge=0)] = 120
    """For a client that is not connected, before the round goes on without it."""
    poll_seconds: Positive = 0.5
    """Between two looks."""


def pack(content: bytes) -> RecordDict:
    """Put a file into a message: one array of bytes, which Flower sends in chunks and never looks into."""
    return RecordDict({RECORD: ArrayRecord({ARRAY: Array("uint8", (len(content),), STYPE, content)})})


def unpack(content: RecordDict) -> bytes:
    """Undo `pack`; anything else raises a ValueError."""
    record = content[RECORD] if set(content) == {RECORD} else None
    if not isinstance(record, ArrayRecord) or set(record) != {ARRAY} or not isinstance(record[ARRAY].data, bytes):
        raise ValueError("a message with other records than ours")
    return record[ARRAY].data


@dataclass
class GridCarrier:
    """Knows which node belongs to which client, by what the nodes say; Flower's node ids change with a restart."""

    grid: Grid
    hello: bytes
    waits: Waits
    online: set[int] = field(default_factory=set)
    known: dict[int, Introduction] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    """Nodes that did not introduce themselves properly, and why."""
    greetings: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Messages by which nodes are being asked who they are, and since when."""

    def assemble(self, clients: int) -> list[Introduction]:
        """Wait until all clients have introduced themselves; who is about to do so is heard."""
        deadline = time.monotonic() + self.waits.join_seconds
        missing = list(range(clients))
        while missing and (self.greetings or time.monotonic() < deadline):
            self._look_around()
            missing = [client for client in range(clients) if isinstance(self._node_of(client), str)]
            if missing:
                time.sleep(self.waits.poll_seconds)
        if missing:
            reasons = [f"client {client} {self._node_of(client)}" for client in missing]
            why = "; ".join([*reasons[:5], *(f"node {node}: {text}" for node, text in self.refused.items())])
            raise InputError(f"after {self.waits.join_seconds:g} s not all {clients} clients are there: {why}")
        return [self.known[int(self._node_of(client))] for client in range(clients)]

    def exchange(self, clients: Sequence[int], request: Callable[[int], bytes]) -> Iterator[tuple[int, bytes | str]]:
        """Ask each client; a node that is lost on the way is asked again when it is back in time."""
        round_ = _Round(list(clients), self.waits)
        while round_.waiting:
            self._look_around()
            for client in round_.to_ask():
                self._ask(client, request, round_)
            for message_id, client in list(round_.asked.items()):
                reply = self._pull(message_id)
                if reply is not None:
                    yield from round_.take(message_id, client, reply)
            yield from round_.give_up(everybody_is_known=not self.greetings)
            if round_.waiting:
                time.sleep(self.waits.poll_seconds)

    def _ask(self, client: int, request: Callable[[int], bytes], round_: "_Round") -> None:
        node = self._node_of(client)
        if isinstance(node, str):
            round_.reasons[client] = node
            return
        message_id = self._push(node, request(client), TAKE_PART)
        if message_id:
            round_.asked[message_id] = client

    def _push(self, node: int, content: bytes, kind: str) -> str | None:
        ttl = self.waits.reply_seconds + self.waits.join_seconds
        return next(iter(self.grid.push_messages([Message(pack(content), node, kind, ttl=ttl)])), None)

    def _pull(self, message_id: str) -> bytes | tuple[int, str] | None:
        """Return an answer, an error, or nothing yet. One at a time: what one node sends must not harm another's."""
        try:
            replies = list(self.grid.pull_messages([message_id]))
            if not replies:
                return None
            if replies[0].has_error():
                return replies[0].error.code, one_line(replies[0].error.reason)
            return unpack(replies[0].content)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return 0, f"its answer cannot be used: {one_line(error)}"

    def _look_around(self) -> None:
        """Find out which nodes are online, and ask new ones who they are."""
        self.online = set(self.grid.get_node_ids())
        for message_id, (node, since) in list(self.greetings.items()):
            answer = self._pull(message_id) if node in self.online else (5, "gone")
            if answer is None and time.monotonic() - since > self.waits.join_seconds:
                answer = 0, "it does not say who it is"
            if answer is not None:
                del self.greetings[message_id]
                self._hear(node, answer)
        strangers = (
            self.online - self.known.keys() - self.refused.keys() - {node for node, _ in self.greetings.values()}
        )
        for node in sorted(strangers):
            greeting = self._push(node, self.hello, DESCRIBE)
            if greeting:
                self.greetings[greeting] = node, time.monotonic()

    def _hear(self, node: int, answer: bytes | tuple[int, str]) -> None:
        """Note who a node says it is."""
        if isinstance(answer, tuple):
            if answer[0] not in LOST:
                self.refused[node] = answer[1]
            return
        try:
            self.known[node] = decode_introduction(answer)
        except ValueError as error:
            self.refused[node] = one_line(error)

    def _node_of(self, client: int) -> int | str:
        """Return the one node of a client, or why there is none."""
        here = {node: self.known[node].client for node in self.online & self.known.keys()}
        if client in find_duplicates(here.values()):
            nodes = sorted(node for node, owner in here.items() if owner == client)
            return f"is claimed by {len(nodes)} nodes: {', '.join(map(str, nodes))}"
        return next((node for node, owner in here.items() if owner == client), "is not connected")


class _Round:
    """Who has been asked in an exchange, who has answered, and since when somebody is missing."""

    def __init__(self, clients: list[int], waits: Waits) -> None:
        self.waits, self.started = waits, time.monotonic()
        self.waiting = dict.fromkeys(clients, self.started)
        """Clients without an answer, and since when they are not connected."""
        self.asked: dict[str, int] = {}
        self.tries: dict[int, int] = {}
        self.reasons: dict[int, str] = {}
        self.lost: dict[int, str] = {}

    def to_ask(self) -> list[int]:
        """Clients who have no request under way."""
        busy = set(self.asked.values())
        return [client for client in self.waiting if client not in busy]

    def take(self, message_id: str, client: int, reply: bytes | tuple[int, str]) -> Iterator[tuple[int, bytes | str]]:
        """Note an answer; after some errors a client is asked again."""
        del self.asked[message_id]
        code, text = reply if isinstance(reply, tuple) else (None, "")
        self.tries[client] = self.tries.get(client, 0) + 1
        if code in LOST and self.tries[client] < MOST_TRIES:
            self.waiting[client], self.lost[client] = time.monotonic(), f"{LOST[code]}; it "
            return
        del self.waiting[client]
        yield client, reply if isinstance(reply, bytes) else f"{LOST.get(reply[0], 'it failed')}: {text}"

    def give_up(self, everybody_is_known: bool) -> Iterator[tuple[int, str]]:
        """Go on without clients who are away for too long, and without everybody when the time is over."""
        now = time.monotonic()
        busy = set(self.asked.values())
        for client, since in list(self.waiting.items()):
            if now - self.started > self.waits.reply_seconds:
                reason = f"no answer within {self.waits.reply_seconds:g} s"
            elif everybody_is_known and client not in busy and now - since > self.waits.rejoin_seconds:
                reason = self.lost.get(client, "") + self.reasons.get(client, "is not connected")
            else:
                continue
            del self.waiting[client]
            yield client, reason
