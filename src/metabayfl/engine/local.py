"""The loop on one machine: invite, fit, validate, average, judge, publish; and go on after any interruption."""

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from metabayfl.engine.client import Desk, Receipt, keyed
from metabayfl.engine.plan import Job
from metabayfl.engine.process import keep_heap, one_thread, peak_memory_bytes
from metabayfl.engine.scores import coolest
from metabayfl.engine.workers import Workers, make_workers
from metabayfl.interruption import ctrl_c
from metabayfl.methods.base import model_of
from metabayfl.metrics import summarise
from metabayfl.options import InputError
from metabayfl.store import Checkpoint, Event, RunDirectory, SpooledUpdate
from metabayfl.types import Params
from metabayfl.validate import Limits, find_fault

Observer = Callable[[Event], None]
Crew = Callable[[Desk], Workers]
Views = dict[str, dict[str, dict[str, float]]]
"""Metrics by view, by name, by summary over clients."""
LISTED_FAULTS = 5
MISSED_DEADLINE = "missed the deadline"
BETTER_WHEN_HIGHER = ("accuracy", "coverage_95")


class TooFewUpdates(RuntimeError):
    """A round in which fewer clients sent a good update than the plan asks for."""


def run(
    job: Job,
    directory: RunDirectory,
    crew: int | Crew = 1,
    observe: Observer = lambda event: None,
    until: int | None = None,
) -> None:
    """Carry a job to its last round, or only until an earlier one; published rounds are not repeated.

    The crew is a number of processes, or whatever else finds workers for a desk.
    """
    keep_heap()
    with one_thread():
        desk = Desk(job, directory)
        workers = make_workers(desk, crew) if isinstance(crew, int) else crew(desk)
        try:
            Loop(job, directory, workers, observe).run(until)
        finally:
            workers.close()


@dataclass
class Loop:
    """The server's side of a run."""

    job: Job
    directory: RunDirectory
    workers: Workers
    observe: Observer

    def __post_init__(self) -> None:
        self.evaluated = self.job.plan.eval.rounds_to_evaluate(self.job.plan.rounds)

    def run(self, until: int | None = None) -> None:
        """Go from the last published round to the last one of the plan, and export the models there."""
        checkpoint = self.directory.checkpoint() or self._begin()
        self.directory.drop_events_after(checkpoint.round)
        while checkpoint.round < min(self.job.plan.rounds, until or self.job.plan.rounds):
            ctrl_c.heed()
            checkpoint = self._round(checkpoint)
        if checkpoint.round == self.job.plan.rounds:
            self._export(checkpoint)

    def _begin(self) -> Checkpoint:
        if any(self.directory.events()):
            raise InputError(f"{self.directory.path} has lost its checkpoint: put it back, or start in a new directory")
        ctx = self.job.context(0)
        with keyed(ctx, "init_server"):
            server = self.job.method.init_server(ctx)
        checkpoint = Checkpoint(0, server, {})
        self.directory.stage(checkpoint)
        self.directory.publish([])
        return checkpoint

    def _round(self, before: Checkpoint) -> Checkpoint:
        """One round, from a published state to the next."""
        started = time.perf_counter()
        number = before.round + 1
        events, updates = self._fit(before)
        if len(updates) < self.job.plan.min_updates:
            raise TooFewUpdates(self._explain_shortage(events, number, len(updates)))
        latest = before.latest | {client: update.address for client, update in updates.items()}
        server = self._aggregate(before, list(updates.values()))
        after = Checkpoint(number, server, latest, self._average(before, server))
        self.directory.stage(after)
        trained = time.perf_counter()
        judged = self._judge(number)
        events += self._deaths(number)
        events.append({"event": "round", "round": number, "updates": len(updates)} | judged)
        events[-1] |= {"train_seconds": trained - started, "eval_seconds": time.perf_counter() - trained}
        events[-1] |= {"server_peak_memory_bytes": peak_memory_bytes()}
        self.directory.publish(events)
        self.directory.forget_clients(after)
        for event in events:
            self.observe(event)
        return after

    def _fit(self, before: Checkpoint) -> tuple[list[Event], dict[int, SpooledUpdate]]:
        """Let the invited clients train, longest first; returns an event for each and the good updates, by id."""
        invited = self.job.participants(before.round)
        receipts = {
            client: Receipt(client, {}, failure=MISSED_DEADLINE)
            for client in invited
            if self.job.is_late(client, before.round)
        }
        limits = Limits(self.job.method.payload_like(before.server, self.job.context(before.round)))
        receipts |= self._receipts_of_an_interrupted_round(before.round + 1, limits)
        todo = sorted(set(invited) - receipts.keys(), key=lambda c: (-self.job.train_sizes[c], c))
        receipts |= {receipt.client: receipt for receipt in self._call("fit", todo, before.round)}
        events, updates = [], {}
        for client in invited:
            event, update = self._inspect(receipts[client], limits)
            events.append({"event": "client", "round": before.round + 1, "client": client} | event)
            if update is not None:
                updates[client] = update
        return events, updates

    def _receipts_of_an_interrupted_round(self, round_: int, limits: Limits) -> dict[int, Receipt]:
        """Return the clients whose good records lie there already; bad ones may have been mended since."""
        found = self.directory.spooled(round_).items()
        good = [(c, a) for c, a in found if not find_fault(self.directory.read_client(a), limits)]
        return {client: Receipt(client, {}, address=address) for client, address in good}

    def _inspect(self, receipt: Receipt, limits: Limits) -> tuple[Event, SpooledUpdate | None]:
        """Return what to log of a client, and its update if it is good; `fault` says why it is not."""
        if receipt.address is None:
            return {"fault": receipt.failure, **receipt.cost}, None
        record = self.directory.read_client(receipt.address)
        fault = find_fault(record, limits)
        event = {"fault": fault, "weight": record.weight, **record.metrics, **record.cost, **receipt.cost}
        update = SpooledUpdate(self.directory, receipt.client, receipt.address, record.weight, record.metrics)
        return event, None if fault else update

    def _aggregate(self, before: Checkpoint, updates: list[SpooledUpdate]) -> Params:
        ctx = self.job.context(before.round)
        with keyed(ctx, "aggregate"):
            return self.job.method.aggregate(before.server, updates, ctx)

    def _average(self, before: Checkpoint, server: Params) -> Params:
        """Return the mean of the global models of all rounds so far, or from some round on a running mean."""
        model = self.job.method.global_model(server, self.job.context(before.round + 1))
        if not self.job.plan.average or model is None:
            return {}
        share = max(self.job.plan.average, 1.0 / (before.round + 1))
        return {name: before.averaged.get(name, tensor).lerp(tensor, share) for name, tensor in model.items()}

    def _judge(self, round_: int) -> Event:
        """Metrics by view (docs/methods.md 1.7) and bins of confidence, if this is a round to evaluate."""
        if round_ not in self.evaluated:
            return {"metrics": {}}
        local = self._judge_locally(round_)
        losses = {who: local.pop(f"{who}/T", {}) for who in "GAP"}
        found = {who: coolest({name: summary["weighted"] for name, summary in losses[who].items()}) for who in "GA"}
        temperatures = {who: temperature for who, temperature in found.items() if temperature is not None}
        common = next(iter(self.workers.run([("score_global", (round_, temperatures))])))
        if common is None:
            return {"metrics": local}
        views = {
            view: {name: {"value": value} for name, value in metrics.items()} for view, metrics in common.views.items()
        }
        bins = {"reliability": common.reliability} if common.reliability else {}
        return {"metrics": views | local} | bins

    def _judge_locally(self, round_: int) -> Views:
        """Weighted mean, plain mean, worst and spread over clients, for each metric on their own samples."""
        sizes = self.job.federation.local_test.sizes()
        values: dict[tuple[str, str], array[float]] = {}
        weights: dict[tuple[str, str], array[float]] = {}  # a client that did not answer, or has no d_n, has none
        for scores in self._call("score_client", np.flatnonzero(sizes).tolist(), round_):
            for view, metrics in scores.views.items():
                for name, value in metrics.items():
                    values.setdefault((view, name), array("d")).append(value)
                    weights.setdefault((view, name), array("d")).append(sizes[scores.client])
        views: Views = {}
        for (view, name), found in values.items():
            better = name in BETTER_WHEN_HIGHER
            views.setdefault(view, {})[name] = summarise(found, weights[view, name], higher_is_better=better)
        return views

    def _call(self, name: str, clients: Sequence[int], round_: int) -> Iterator[Any]:
        for answer in self.workers.run([(name, (client, round_)) for client in clients]):
            ctrl_c.heed()
            yield answer

    def _export(self, checkpoint: Checkpoint) -> None:
        """Write the models for those who will use them."""
        model = self.job.method.global_model(checkpoint.server, self.job.context(checkpoint.round))
        if self.job.plan.keep_personal:
            list(self._call("export_personal", sorted(checkpoint.latest), checkpoint.round))
        for event in self._deaths(checkpoint.round):
            self.observe(event)
        self.directory.forget_clients(checkpoint)
        self.directory.tidy()
        shared = model_of(checkpoint.server) if model is None else model
        if checkpoint.averaged:
            self.directory.write_model("averaged", checkpoint.averaged, self.job.task)
        self.directory.write_model("model", shared, self.job.task)

    def _deaths(self, round_: int) -> list[Event]:
        """Return an event for each worker that has died since the last call; what it did was done again."""
        deaths, self.workers.deaths = self.workers.deaths, []
        return [{"event": "worker", "round": round_, "client": who, "fault": fault} for who, fault in deaths]

    def _explain_shortage(self, events: list[Event], round_: int, good: int) -> str:
        faults = [f"client {event['client']}: {event['fault']}" for event in events if event["fault"]]
        more = [f"{len(faults) - LISTED_FAULTS} more"] if len(faults) > LISTED_FAULTS else []
        why = "; ".join(faults[:LISTED_FAULTS] + more)
        return f"round {round_} has {good} good updates, {self.job.plan.min_updates} are needed ({why})"
