"""The loop: the same bits whoever does the work and in whatever order; who takes part; what a round needs."""

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from federations import Failing, bits, federation, job, log, network, one_line, train
from metabayfl.engine import local, workers
from metabayfl.engine.client import Desk
from metabayfl.engine.scores import subset
from metabayfl.engine.workers import InProcess, Pool
from metabayfl.methods import BayFL, FedAvg, Method
from metabayfl.options import InputError
from metabayfl.store import Event, RunDirectory
from metabayfl.types import Context, Fit, Params, TrainData
from strangers import Cnn, Constants, FrozenBackbone, NormedMlp, meet


def clients_of(events: list[Event], round_: int) -> dict[int, str]:
    """The clients of a round and their faults."""
    return {e["client"]: e["fault"] for e in events if e["event"] == "client" and e["round"] == round_}


class Backwards(InProcess):
    """Clients in the opposite order."""

    def run(self, calls: Any) -> Any:
        return super().run(list(reversed(calls)))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "run"
    train(path)
    return path


class TestSameBits:
    @pytest.mark.parametrize("count", [2, 3])
    def test_with_workers(self, reference: Path, tmp_path: Path, count: int) -> None:
        train(tmp_path / "run", workers=count)
        assert bits(tmp_path / "run") == bits(reference)
        assert log(tmp_path / "run") == log(reference)

    def test_in_reverse_order(self, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local, "make_workers", lambda desk, count: Backwards(desk))
        train(tmp_path / "run")
        assert bits(tmp_path / "run") == bits(reference)
        assert log(tmp_path / "run") == log(reference)

    def test_in_pieces(self, reference: Path, tmp_path: Path) -> None:
        """Stopped after every round and gone on with, by one process or two."""
        for until in (1, 2, 3):
            train(tmp_path / "run", until=until, workers=1 + until % 2)
        assert bits(tmp_path / "run") == bits(reference)
        assert log(tmp_path / "run") == log(reference)

    def test_whatever_the_number_of_threads(self, reference: Path, tmp_path: Path) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            train(tmp_path / "run")
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(before)
        assert bits(tmp_path / "run") == bits(reference)

    def test_when_batchnorm_stays_with_the_clients(self, tmp_path: Path) -> None:
        for count in (1, 2):
            train(tmp_path / str(count), BayFL(epochs=1, batchnorm="local"), workers=count, clients_per_round=2)
        assert bits(tmp_path / "1") == bits(tmp_path / "2")
        assert log(tmp_path / "1") == log(tmp_path / "2")

    def test_when_a_method_writes_over_what_it_receives(self, tmp_path: Path) -> None:
        class Careless(FedAvg):
            def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
                fit = super().fit(down, state, data, ctx)
                down["mu"].mul_(-3.0)
                return fit

        train(tmp_path / "clean", FedAvg(epochs=1))
        train(tmp_path / "careless", Careless(epochs=1))
        assert bits(tmp_path / "careless") == bits(tmp_path / "clean")

    def test_seeds_differ(self, reference: Path, tmp_path: Path) -> None:
        train(tmp_path / "run", seed=1)
        assert bits(tmp_path / "run").keys() == bits(reference).keys()
        assert all(content != bits(reference)[name] for name, content in bits(tmp_path / "run").items())


class TestParticipation:
    def test_a_sample_differs_from_round_to_round_and_not_from_run_to_run(self) -> None:
        one, other = (job(clients=12, clients_per_round=4, rounds=20) for _ in range(2))
        rounds = [one.participants(round_) for round_ in range(20)]
        assert rounds == [other.participants(round_) for round_ in range(20)]
        assert len({tuple(chosen) for chosen in rounds}) == 20
        assert all(len(set(chosen)) == 4 and chosen == sorted(chosen) for chosen in rounds)
        seeded = job(clients=12, clients_per_round=4, seed=1)
        assert [seeded.participants(round_) for round_ in range(20)] != rounds

    def test_everybody_is_sampled_equally_often(self) -> None:
        """Of 400 rounds with 4 of 12 clients, each is in 133 +- 9.4; five standard deviations are allowed."""
        work = job(clients=12, clients_per_round=4)
        counts = torch.zeros(12)
        for round_ in range(400):
            counts[work.participants(round_)] += 1
        assert (counts - 400 / 3).abs().max() < 5 * (400 * 1 / 3 * 2 / 3) ** 0.5

    def test_only_the_invited_train_and_are_remembered(self, tmp_path: Path) -> None:
        events = train(tmp_path / "run", clients=5, clients_per_round=2)
        work = job(clients=5, clients_per_round=2)
        latest: dict[int, int] = {}
        for round_ in (1, 2, 3):
            invited = work.participants(round_ - 1)
            assert list(clients_of(events, round_)) == invited
            for client in invited:
                latest[client] = round_
        checkpoint = RunDirectory(tmp_path / "run").checkpoint()
        assert checkpoint is not None
        assert {client: int(address.segment[:6]) for client, address in checkpoint.latest.items()} == latest
        took_part = {f"personal/{client:06d}.safetensors" for client in latest}
        assert bits(tmp_path / "run").keys() == took_part | {"model.safetensors"}

    def test_all_by_default_and_at_most(self) -> None:
        assert job().participants(0) == [0, 1, 2]
        assert job(clients_per_round=3).participants(7) == [0, 1, 2]

    def test_the_longest_goes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        order: list[int] = []
        fit = Desk.fit
        monkeypatch.setattr(Desk, "fit", lambda desk, client, round_: order.append(client) or fit(desk, client, round_))
        train(tmp_path / "run", rounds=1)
        assert order == [2, 1, 0]


class TestQuorum:
    def test_enough_good_updates_make_a_round(self, tmp_path: Path) -> None:
        events = train(tmp_path / "run", Failing(epochs=1), min_updates=2)
        assert [event["updates"] for event in events if event["event"] == "round"] == [2, 2, 2]

    def test_too_few_stop_the_run(self, tmp_path: Path) -> None:
        with pytest.raises(local.TooFewUpdates, match="round 1 has 2 good updates, 3 are needed") as caught:
            train(tmp_path / "run", Failing(epochs=1), min_updates=3)
        assert "client 1: ArithmeticError: client one is tired" in one_line(caught.value)
        assert not (tmp_path / "run" / "model.safetensors").exists()
        checkpoint = RunDirectory(tmp_path / "run").checkpoint()
        assert checkpoint is not None
        assert checkpoint.round == 0

    def test_a_crowd_of_faults_is_cut_short(self, tmp_path: Path) -> None:
        with pytest.raises(local.TooFewUpdates, match=r"client 4: missed the deadline; 7 more\)") as caught:
            train(tmp_path / "run", clients=12, deadline={"seconds": 1e-9})
        assert len(one_line(caught.value)) < 300


KNOWN_LATE = [
    [0, 2, 3, 5, 6, 7], [0, 3, 5, 6, 7], [0, 3, 4, 5, 6, 7], [0, 3, 5, 6, 7], [0, 3, 5, 6, 7], [0, 2, 3, 4, 5, 6, 7],
]  # fmt: skip


class TestDeadline:
    SLOW = {"seconds": 0.025, "spread": 1.0}  # noqa: RUF012

    def late(self, **options: Any) -> list[list[int]]:
        work = job(FedAvg(epochs=2), clients=8, deadline=self.SLOW, **options)
        return [[client for client in range(8) if work.is_late(client, round_)] for round_ in range(6)]

    def test_the_same_clients_are_late_everywhere(self) -> None:
        """Known answer: nothing real is timed, so these are late on every machine."""
        assert self.late() == KNOWN_LATE
        assert self.late(seed=1) != KNOWN_LATE

    def test_the_late_ones_are_named_and_left_out(self, tmp_path: Path) -> None:
        for count in (1, 2):
            train(tmp_path / str(count), FedAvg(epochs=2), clients=8, deadline=self.SLOW, workers=count)
        events = list(RunDirectory(tmp_path / "1").events())
        for round_ in (1, 2, 3):
            late = [client for client, fault in clients_of(events, round_).items() if fault == "missed the deadline"]
            assert late == KNOWN_LATE[round_ - 1]
        assert bits(tmp_path / "1") == bits(tmp_path / "2")

    def test_more_time_lets_more_clients_in(self) -> None:
        counts = []
        for seconds in (0.001, 0.02, 0.05, 10.0):
            work = job(FedAvg(epochs=2), clients=8, deadline={"seconds": seconds, "spread": 1.0})
            counts.append(sum(work.is_late(client, 0) for client in range(8)))
        assert counts == sorted(counts, reverse=True)
        assert (counts[0], counts[-1]) == (8, 0)


class TestWorkers:
    def test_a_desk_in_another_process_has_the_same_task(self, tmp_path: Path) -> None:
        """Pickled and read back, parameters must still be views of the flat vector; constants and frozen ones stay."""
        for kind in (NormedMlp, Constants, FrozenBackbone, Cnn):
            module, x, _ = meet(kind)
            work = job(module=module)
            copy = pickle.loads(pickle.dumps(work))  # noqa: S301
            for task in (work.task, copy.task):
                task.load({name: tensor + 0.25 for name, tensor in task.initial().items()})
            assert torch.equal(copy.task.outputs(x), work.task.outputs(x))
            assert copy.task.constants().keys() == work.task.constants().keys()
            copy.task.weights.zero_()
            assert not any(p.any() for p in copy.task.module.parameters() if p.requires_grad)

    @pytest.mark.slow
    def test_spawned_workers_give_the_same_bits(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        train(tmp_path / "here", rounds=2)
        monkeypatch.setattr(local, "make_workers", lambda desk, count: Pool(desk, 2, start_method="spawn"))
        train(tmp_path / "spawned", rounds=2)
        assert bits(tmp_path / "spawned") == bits(tmp_path / "here")
        assert log(tmp_path / "spawned") == log(tmp_path / "here")

    def test_what_cannot_be_sent_to_a_spawned_worker_is_refused(self, tmp_path: Path) -> None:
        class Local(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 3)

            def forward(self, x: Tensor) -> Tensor:
                return self.layer(x)

        class Mine(FedAvg):
            pass

        with_lambda = network()
        with_lambda[2].shape = lambda x: x
        for method, module in ((FedAvg(), Local()), (FedAvg(), with_lambda), (Mine(), network())):
            desk = Desk(job(method, module), RunDirectory(tmp_path))
            with pytest.raises(InputError, match=r"cannot be sent to a worker process .*: use --workers 1$") as caught:
                Pool(desk, 2, start_method="spawn")
            one_line(caught.value)

    def test_workers_do_not_hear_an_interrupt(self, tmp_path: Path) -> None:
        """Ctrl-C reaches the whole group; the main process decides what happens."""
        pool = Pool(Desk(job(), RunDirectory(tmp_path)), 2)
        try:
            for worker in pool.workers:
                assert worker.process.pid is not None
                os.kill(worker.process.pid, signal.SIGINT)
            with pytest.raises(InputError, match="has no state after round 0"):
                list(pool.run([("fit", (0, 0))]))
            assert pool.deaths == []
            assert all(worker.process.is_alive() for worker in pool.workers)
        finally:
            pool.close()

    def test_answers_come_for_every_call(self, tmp_path: Path) -> None:
        class Echo(Desk):
            def echo(self, *numbers: int) -> tuple[int, ...]:
                return numbers

            def fail(self, *numbers: int) -> None:
                raise LookupError("not here\nnor there")

            def refuse(self, *numbers: int) -> None:
                raise InputError("not like this")

        pool = Pool(Echo(job(), RunDirectory(tmp_path)), 3)
        try:
            calls = [("echo", (number, 1)) for number in range(50)]
            assert sorted(pool.run(calls)) == [(number, 1) for number in range(50)]
            assert list(pool.run([])) == []
            with pytest.raises(workers.WorkerError, match=r"^fail of client 4: LookupError: not here$"):
                list(pool.run([("fail", (4, 1))]))
            with pytest.raises(InputError, match=r"^not like this$"):
                list(pool.run([("refuse", (4, 1))]))
            with pytest.raises(workers.WorkerError, match=r"^fail: LookupError"):
                list(pool.run([("fail", (4,))]))
        finally:
            pool.close()
        assert not any(worker.process.is_alive() for worker in pool.workers)


class TestHooks:
    """What the engine promises to a method."""

    def test_updates_come_in_the_order_of_ids_and_can_be_read_twice(self, tmp_path: Path) -> None:
        seen: list[list[float]] = []

        class Watching(FedAvg):
            def aggregate(self, server: Params, updates: Any, ctx: Context) -> Params:
                seen.append([update.weight for update in updates])
                assert all(torch.equal(u.payload["mu"], u.payload["mu"]) for u in updates)
                return super().aggregate(server, updates, ctx)

        train(tmp_path / "run", Watching(epochs=1), clients=4, rounds=2)
        sizes = list(federation(4).train_sizes(held_out=False).values())
        assert seen == [sizes, sizes]

    def test_an_update_says_whose_it_is(self, tmp_path: Path) -> None:
        seen: list[int] = []

        class Watching(FedAvg):
            def aggregate(self, server: Params, updates: Any, ctx: Context) -> Params:
                seen.extend(update.client for update in updates)
                return super().aggregate(server, updates, ctx)

        events = train(tmp_path / "run", Watching(epochs=1), clients=5, rounds=3, clients_per_round=2)
        assert seen == [event["client"] for event in events if event["event"] == "client"]
        assert len(seen) == 6

    def test_the_private_state_comes_back_to_its_client_only(self, tmp_path: Path) -> None:
        class Counting(FedAvg):
            def init_client(self, ctx: Context) -> Params:
                return {"diary": torch.tensor([ctx.client or 0])}

            def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
                fit = super().fit(down, state, data, ctx)
                diary = torch.cat([state["diary"], torch.tensor([10 + ctx.round])])
                return fit._replace(state={"diary": diary}, personal={})

        method: Method = Counting(epochs=1)
        train(tmp_path / "run", method, clients=4, clients_per_round=3, workers=2)
        work = job(method, clients=4, clients_per_round=3)
        checkpoint = RunDirectory(tmp_path / "run").checkpoint()
        assert checkpoint is not None
        for client in range(4):
            rounds = [round_ for round_ in range(3) if client in work.participants(round_)]
            record = RunDirectory(tmp_path / "run").read_client(checkpoint.latest[client])
            assert record.state["diary"].tolist() == [client, *(10 + round_ for round_ in rounds)]


def test_a_subset_for_judging_is_always_the_same() -> None:
    x, y = torch.arange(20.0)[:, None], torch.arange(20)
    few, more = subset(x, y, 5), subset(x, y, 8)
    assert len(few[0]) == 5
    assert torch.equal(few[0][:, 0].long(), few[1])
    assert set(few[1].tolist()) < set(more[1].tolist())
    assert subset(x, y, None)[0] is subset(x, y, 20)[0] is x
