"""Clients on other machines as workers of the loop: one message per client and round, answers are checked."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from metabayfl import tensorfile
from metabayfl.engine.client import Desk, Receipt
from metabayfl.engine.scores import LocalScores
from metabayfl.engine.workers import Call, Death
from metabayfl.records import encode_client
from metabayfl.remote.wire import Reply, Request, decode_reply, encode_request, key_of
from metabayfl.types import Fit, Params
from metabayfl.validate import Limits, find_size_fault


class Carrier(Protocol):
    """Carries messages to the nodes of clients and brings the answers: all that an engine has to add."""

    def exchange(self, clients: Sequence[int], request: Callable[[int], bytes]) -> Iterator[tuple[int, bytes | str]]:
        """Ask each client once, as often as it takes; gives its answer, or a text that says why there is none."""
        ...


@dataclass
class Nodes:
    """Workers of the loop, each of them a machine with the data of one client."""

    desk: Desk
    carrier: Carrier
    base: Request
    """What every request of the run says."""
    deaths: list[Death] = field(default_factory=list)
    early: dict[tuple[int, int], Reply] = field(default_factory=dict)
    """Updates that came with the scores of the round before, by client and round."""
    exported: set[int] = field(default_factory=set)
    asked: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Key and size of what each client was asked last."""

    def run(self, calls: Sequence[Call]) -> Iterator[Any]:
        """Carry out calls of one name: on the server what needs no client's data, on the nodes everything else."""
        name = calls[0][0] if calls else ""
        if name == "score_global":
            yield from (self.desk.score_global(*arguments) for _, arguments in calls)
        if name in ("fit", "score_client", "export_personal"):
            clients, rounds = [arguments[0] for _, arguments in calls], {arguments[1] for _, arguments in calls}
            for round_ in rounds:
                yield from getattr(self, name)(clients, round_)

    def close(self) -> None:
        """Nodes live on."""

    def fit(self, clients: Sequence[int], round_: int) -> Iterator[Receipt]:
        """Let clients take part in a round, unless their updates have come already."""
        ready = [client for client in clients if (client, round_) in self.early]
        for client in ready:
            yield self._keep(client, round_, self.early.pop((client, round_)))
        rest = [client for client in clients if client not in ready]
        for client, reply in self._ask(rest, round_, lambda client: ("fit",)):
            yield self._keep(client, round_, reply)

    def score_client(self, clients: Sequence[int], round_: int) -> Iterator[LocalScores]:
        """Let clients judge their models; with the same message those of the next round begin to train."""
        plan = self.desk.job.plan
        last = round_ == plan.rounds
        next_up = set() if last else set(self.desk.job.participants(round_))
        self.early.clear()

        def tasks(client: int) -> tuple[str, ...]:
            trains = client in next_up and not self.desk.job.is_late(client, round_)
            exports = last and plan.keep_personal and client in self.desk.load(round_).latest
            return ("score", *(["fit"] if trains else []), *(["export"] if exports else []))

        for client, reply in self._ask(clients, round_, tasks):
            if isinstance(reply, str) or reply.scores is None:
                why = reply if isinstance(reply, str) else reply.failures.get("score", "no scores in its answer")
                self.deaths.append((client, f"no scores of its models: {why}"))
                continue
            if reply.update is not None:
                self.early[client, round_] = reply
            self.exported |= {client} if last else set()
            yield LocalScores(client, reply.scores)

    def export_personal(self, clients: Sequence[int], round_: int) -> Iterator[None]:
        """Let clients write their own models, on their own disks."""
        rest = [client for client in clients if client not in self.exported]
        for client, reply in self._ask(rest, round_, lambda client: ("export",)):
            why = reply if isinstance(reply, str) else reply.failures.get("score", "")
            if why:
                self.deaths.append((client, f"its own model is not exported: {why}"))
            yield None

    def _ask(
        self, clients: Sequence[int], round_: int, tasks: Callable[[int], tuple[str, ...]]
    ) -> Iterator[tuple[int, Reply | str]]:
        """Send each client its request and read the answers; a text says why one cannot be used."""
        ctx = self.desk.job.context(round_)
        limits = Limits(self.desk.job.method.payload_like(self.desk.load(round_).server, ctx))

        def request(client: int) -> bytes:
            return self._request(client, round_, tasks(client))

        for client, content in self.carrier.exchange(clients, request) if clients else ():
            yield client, content if isinstance(content, str) else read_reply(client, round_, content, limits)

    def _request(self, client: int, round_: int, tasks: tuple[str, ...]) -> bytes:
        down = self.desk.broadcast(self.desk.job.context(round_, client))
        state = {"round": round_, "latest": self._latest(client, round_), "oldest": self._oldest(client)}
        request = self.base.model_copy(update=state | {"do": tasks})
        content = encode_request(request, down)
        self.asked[client] = key_of(request, down), len(content)
        return content

    def _latest(self, client: int, round_: int) -> str:
        """Key of the request whose answer is the client's state after some rounds."""
        address = self.desk.load(round_).latest.get(client)
        return "" if address is None else str(self.desk.directory.read_client(address).meta["request"])

    def _oldest(self, client: int) -> int:
        """The round of the client's last record that is published: the server never goes back behind it."""
        published = self.desk.directory.checkpoint()
        address = None if published is None else published.latest.get(client)
        return 0 if address is None else int(address.segment[:6])

    def _keep(self, client: int, round_: int, reply: Reply | str) -> Receipt:
        """Spool an update as it came; the loop looks at its values."""
        key, bytes_down = self.asked.get(client, ("", 0))
        cost: dict[str, float] = {"bytes_down": bytes_down}
        if isinstance(reply, str) or reply.update is None:
            why = reply if isinstance(reply, str) else reply.failures.get("fit", "no update in its answer")
            return Receipt(client, cost, failure=why)
        fit, origin = Fit(reply.update, {}, {}), {"request": key}
        record = encode_client(client, fit, reply.cost | cost | {"bytes_up": reply.size}, False, origin)
        return Receipt(client, {}, address=self.desk.directory.write_client(round_ + 1, record))


def read_reply(client: int, round_: int, content: bytes, limits: Limits) -> Reply | str:
    """Return the answer of a client, or what is wrong with it; its size is looked at before anything else."""
    fault = find_size_fault(len(content), limits)
    if fault:
        return fault
    try:
        reply = decode_reply(content)
    except ValueError as error:
        return f"its answer cannot be used: {error}"
    if reply.client != client or reply.round != round_:
        return f"its answer is of client {reply.client!r:.20}, round {reply.round!r:.20}: it was not asked for that"
    return reply


def base_request(desk: Desk, experiment: str, config: str, likelihood: dict[str, Any]) -> Request:
    """Return what every request of a run says."""
    job = desk.job
    constants: Params = job.task.constants()
    return Request(
        experiment=experiment,
        config=config,
        sizes=tuple(job.train_sizes.values()),
        likelihood=likelihood,
        input_shape=tuple(job.federation.train.x.shape[1:]),
        channels_last=job.task.channels_last,
        constants=tensorfile.checksum(constants),
    )
