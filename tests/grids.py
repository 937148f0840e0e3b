"""Flower without its processes: a grid that calls the nodes' app in this process, and what can go wrong on the way."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from metabayfl.config import RunConfig
from metabayfl.remote.server import carry_out
from metabayfl.result import Result

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from metabayfl.engine.flower import apps
from metabayfl.engine.flower.carrier import GridCarrier, Waits

QUICK = Waits(join_seconds=5, reply_seconds=60, rejoin_seconds=0.05, poll_seconds=0.01)
Tamper = Callable[[Message, Message], Message]
"""Changes a reply, given the message that is answered."""


class InProcessGrid(Grid):
    """Nodes in this process; `nodes` maps Flower's node ids to node configs and may change at any time."""

    def __init__(self, nodes: dict[int, dict[str, Any]], tamper: Tamper = lambda message, reply: reply) -> None:
        self.nodes, self.tamper = nodes, tamper
        self.replies: dict[str, Message] = {}
        self.log: list[tuple[str, int, Message, Message]] = []
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._deliver(message) for message in messages]

    def _deliver(self, message: Message) -> str:
        number = f"message {len(self.log)}"
        message.metadata.__dict__["_message_id"] = number
        node = message.metadata.dst_node_id
        reply = self._answer(message, node)
        self.log.append((message.metadata.message_type, node, message, reply))
        self.replies[number] = reply
        return number

    def _answer(self, message: Message, node: int) -> Message:
        if node not in self.nodes:
            return Message(Error(5, "node unavailable"), reply_to=message)
        context = Context(1, node, self.nodes[node], RecordDict(), {})
        try:
            return self.tamper(message, apps.client(message, context))
        except Exception as error:
            return Message(Error(2, str(error)), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(number) for number in message_ids if number in self.replies]

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *_: Any, **__: Any) -> Any: ...

    def send_and_receive(self, *_: Any, **__: Any) -> Any: ...


def node_configs(where: Path, clients: int = 3) -> dict[int, dict[str, Any]]:
    """One node for each client; Flower's node ids are in another order."""
    return {100 - n: {"client-id": n, "state": str(where / f"node{n}")} for n in range(clients)}


def over_grid(config: RunConfig, out: Path, grid: Grid, waits: Waits = QUICK, **options: Any) -> Result:
    """Carry out a config with the nodes of a grid."""
    return carry_out(config, out, lambda hello: GridCarrier(grid, hello, waits), **options)
