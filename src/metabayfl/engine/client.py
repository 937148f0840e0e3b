"""What happens at the clients: the same code in this process and in a worker."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from metabayfl import tensorfile
from metabayfl.engine.plan import Job
from metabayfl.engine.process import peak_memory_bytes
from metabayfl.engine.scores import GlobalScores, LocalScores, Metrics, judge_globally, judge_locally
from metabayfl.options import InputError
from metabayfl.randomness import keyed_globals
from metabayfl.records import ClientRecord, encode_client
from metabayfl.spool import Address
from metabayfl.store import Checkpoint, RunDirectory
from metabayfl.types import Context, Params
from metabayfl.validate import BadUpdate, find_malformed


@dataclass(frozen=True)
class Receipt:
    """How a fit ended: where its record lies, or why it failed."""

    client: int
    cost: Metrics
    failure: str = ""
    address: Address | None = None


class Desk:
    """Runs the clients of a job one at a time, against the run directory."""

    def __init__(self, job: Job, directory: RunDirectory) -> None:
        self.job, self.directory = job, directory
        self.origin: dict[str, str] = {}
        """What a record says of where it comes from."""
        self._checkpoint: Checkpoint | None = None

    def fit(self, client: int, round_: int) -> Receipt:
        """Let a client take part in a round (counted from 0) and spool what it leaves."""
        ctx = self.job.context(round_, client)
        down, last = self._receive(ctx)
        state = self._state(last, ctx)
        exchanges = self.job.method.exchanges
        cost: Metrics = {"bytes_down": tensorfile.encoded_size(down)} if exchanges else {"bytes_down": 0, "bytes_up": 0}
        started = time.perf_counter()
        try:
            record = self._train(down, state, ctx, cost)
        except Exception as error:  # a stranger's model may raise anything; the round can go on without this client
            return Receipt(client, cost, describe(error))
        address = self.directory.write_client(round_ + 1, record)
        own = {
            "comm_seconds": time.perf_counter() - started - cost["seconds"],
            "peak_memory_bytes": peak_memory_bytes(),
        }
        return Receipt(client, own, address=address)

    def _train(self, down: Params, state: Params, ctx: Context, cost: Metrics) -> bytes:
        """Let the method fit; returns the client's record, and notes the seconds among the costs."""
        task, data = ctx.task, self.job.train_data(ctx.client or 0, ctx.round)
        task.forward_passes = task.backward_passes = 0
        started = time.perf_counter()
        try:
            with keyed(ctx, "fit"):
                fit = self.job.method.fit(down, state, data, ctx)
        finally:
            cost["seconds"] = time.perf_counter() - started
            cost |= {"forward_passes": task.forward_passes, "backward_passes": task.backward_passes}
            cost |= {f"{what}_seconds": seconds for what, seconds in ctx.seconds.items()}
        fault = find_malformed(fit.update)
        if fault:
            raise BadUpdate(fault)
        return encode_client(ctx.client or 0, fit, cost, self.job.plan.keep_personal, self.origin)

    def score_client(self, client: int, round_: int) -> LocalScores:
        """Judge the global and the personal model on a client's samples after `round_` rounds.

        Where clients work alone there is no global model: then the personal one is judged on the common test set too.
        """
        job, ctx = self.job, self.job.context(round_, client)
        down, last = self._receive(ctx)
        state = self._state(last, ctx)
        received, averaged = job.method.received_model(down, state, ctx), self.averaged(round_)
        personal = self._personal(down, state, last, ctx)
        models = {"G": received, "A": averaged, "P": personal}
        views = judge_locally(job, {who: model for who, model in models.items() if model}, ctx)
        if received is None and not job.method.exchanges:
            common = judge_globally(job, {"P": personal}, {}, ctx)
            views |= {} if common is None else common.views
        return LocalScores(client, views)

    def score_global(self, round_: int, temperatures: Mapping[str, float]) -> GlobalScores | None:
        """Judge the global model on the common test set after `round_` rounds; None if one of them is not there."""
        ctx = self.job.context(round_)
        models = {"G": self.job.method.global_model(self.load(round_).server, ctx), "A": self.averaged(round_)}
        return judge_globally(self.job, {who: model for who, model in models.items() if model}, temperatures, ctx)

    def averaged(self, round_: int) -> Params:
        """Return the global model averaged over rounds; empty if there is none."""
        return self.load(round_).averaged

    def export_personal(self, client: int, round_: int) -> None:
        """Write a client's own model by the names of its parameters."""
        ctx = self.job.context(round_, client)
        down, last = self._receive(ctx)
        model = self._personal(down, self._state(last, ctx), last, ctx)
        self.directory.write_model(f"personal/{client:06d}", model, self.job.task)

    def load(self, round_: int) -> Checkpoint:
        """Return the state after `round_` rounds, published or staged."""
        if self._checkpoint is None or self._checkpoint.round != round_:
            candidates = (self.directory.checkpoint(staged=staged) for staged in (False, True))
            self._checkpoint = next((c for c in candidates if c is not None and c.round == round_), None)
        if self._checkpoint is None:
            raise InputError(f"{self.directory.path} has no state after round {round_}")
        return self._checkpoint

    def broadcast(self, ctx: Context) -> Params:
        """Return what a client receives."""
        with keyed(ctx, "broadcast"):
            return self.job.method.broadcast(self.load(ctx.round).server, ctx)

    def _receive(self, ctx: Context) -> tuple[Params, ClientRecord | None]:
        """Return what a client receives, as copies that are its own, and what it left when it last took part."""
        down = {name: tensor.clone() for name, tensor in self.broadcast(ctx).items()}
        latest = self.load(ctx.round).latest.get(ctx.client or 0)
        return down, None if latest is None else self.directory.read_client(latest)

    def _state(self, last: ClientRecord | None, ctx: Context) -> Params:
        if last is not None:
            return last.state
        with keyed(ctx, "init_client"):
            return self.job.method.init_client(ctx)

    def _personal(self, down: Params, state: Params, last: ClientRecord | None, ctx: Context) -> Params:
        kept = None if last is None else last.personal
        with keyed(ctx, "personalise"):
            return self.job.method.personalise(down, state, kept, self.job.train_data(ctx.client or 0, ctx.round), ctx)


def keyed(ctx: Context, hook: str) -> AbstractContextManager[None]:
    """Seed the global generators for one hook, from its context alone."""
    return keyed_globals(ctx.seed, ctx.round, ctx.client, "module", hook)


def describe(error: BaseException) -> str:
    """One line about an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
