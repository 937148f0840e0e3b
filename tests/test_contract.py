"""What every registered method keeps to: pure hooks, named tensors, the same bits whatever the order, honest costs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from federations import bits, log, network, one_line, plan
from metabayfl import tensorfile
from metabayfl.api import check_job, run_job
from metabayfl.data.federation import Federation
from metabayfl.engine import local
from metabayfl.engine.client import Desk
from metabayfl.engine.local import MISSED_DEADLINE
from metabayfl.engine.plan import Job, make_job
from metabayfl.engine.workers import Call, InProcess
from metabayfl.methods import METHODS, Method
from metabayfl.methods.needs import Need, refuse_unmet
from metabayfl.options import InputError
from metabayfl.randomness import keyed_globals
from metabayfl.result import Result
from metabayfl.store import Event, RunDirectory
from metabayfl.types import Context, Delivered, Fit, Params, TrainData
from metabayfl.validate import Limits, find_fault

named = pytest.mark.parametrize("name", sorted(METHODS))
POOL = torch.randn(20, 4, generator=torch.Generator().manual_seed(9))


def make(name: str, **options: Any) -> Method:
    """A method with a short round; the rest as a user gets it."""
    return METHODS[name](**{"epochs": 1, **options})


def policies(name: str) -> tuple[str, ...]:
    """What a method accepts for BatchNorm."""
    return get_args(METHODS[name].model_fields["batchnorm"].annotation)


def uneven(sizes: Sequence[int] = (16, 9, 4), one_class: bool = False, batch_size: int = 4) -> Federation:
    """Clients of very different sizes; the smallest trains on three samples, two if d_n is held out."""
    rng = torch.Generator().manual_seed(0)
    pairs = []
    for client, size in enumerate(sizes):
        x = torch.randn(size, 4, generator=rng)
        pairs.append((x, torch.full((size,), client % 3) if one_class else x[:, :3].argmax(1)))
    return Federation.from_arrays(pairs, batch_size=batch_size, classes=3, unlabelled=POOL)


def plain_network() -> nn.Module:
    """No BatchNorm; wide enough that what is not a weight does not count."""
    with keyed_globals("plain"):
        return nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Dropout(0.2), nn.Linear(40, 3))


def run(
    path: Path,
    method: Method,
    federation: Federation | None = None,
    module: nn.Module | None = None,
    workers: int = 1,
    **options: Any,
) -> Result:
    """Begin a run or go on with it."""
    work, wish = federation or uneven(), plan(rounds=2, **options)
    return run_job(module or network(), work, method, wish, out=path, workers=workers, resume=True)


def clients(result: Result) -> list[Event]:
    return [event for event in result.events if event["event"] == "client"]


def is_finite(value: object) -> bool:
    """Whether all numbers in nested mappings are finite."""
    if isinstance(value, Mapping):
        return all(map(is_finite, value.values()))
    return bool(torch.as_tensor(value).isfinite().all())


def contents(params: Params) -> dict[str, bytes]:
    return {name: tensorfile.encode({name: tensor}) for name, tensor in params.items()}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """A run of each method, made once."""
    made: dict[str, Result] = {}

    def find(name: str) -> Result:
        if name not in made:
            made[name] = run(tmp_path_factory.mktemp(name) / "run", make(name))
        return made[name]

    return find


@named
class TestBits:
    """The bits do not depend on who works when."""

    def test_workers(self, name: str, reference: Callable[[str], Result], tmp_path: Path) -> None:
        run(tmp_path, make(name), workers=2)
        self.compare(reference(name), tmp_path)

    def test_order(
        self, name: str, reference: Callable[[str], Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(local, "make_workers", lambda desk, count: Backwards(desk))
        run(tmp_path, make(name))
        self.compare(reference(name), tmp_path)

    def test_resume(self, name: str, reference: Callable[[str], Result], tmp_path: Path) -> None:
        """With the state that clients and server had after the first round."""
        whole = local.run

        def stop_early(job: Job, directory: RunDirectory, *arguments: Any) -> None:
            whole(job, directory, *arguments, until=1)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local, "run", stop_early)
            with pytest.raises(InputError, match="is not finished"):
                run(tmp_path, make(name))
        run(tmp_path, make(name))
        self.compare(reference(name), tmp_path)

    @staticmethod
    def compare(expected: Result, path: Path) -> None:
        assert bits(path) == bits(expected.directory.path)
        assert log(path) == log(expected.directory.path)


class Backwards(InProcess):
    """Does everything in the other order."""

    def run(self, calls: Sequence[Call]) -> Iterator[Any]:
        yield from super().run(calls[::-1])


@named
class TestRun:
    def test_updates_and_metrics_are_sound(self, name: str, reference: Callable[[str], Result]) -> None:
        result = reference(name)
        assert all(event["fault"] == "" for event in clients(result))
        assert result.metrics["P/L"].keys() >= {"accuracy", "nll"}
        assert is_finite(result.metrics)
        assert all(model.isfinite().all() for model in result.model(0).values())

    def test_bytes_are_those_of_the_messages(self, name: str, reference: Callable[[str], Result]) -> None:
        result = reference(name)
        directory = result.directory
        checkpoint = directory.checkpoint()
        assert checkpoint is not None
        for event in clients(result)[-len(checkpoint.latest) :]:
            record = directory.read_client(checkpoint.latest[event["client"]])
            sent = len(tensorfile.encode(record.payload, {"weight": record.weight, "metrics": record.metrics}))
            assert event["bytes_up"] == (sent if result.method.exchanges else 0)
            assert (event["bytes_down"] > 0) == result.method.exchanges

    def test_clients_that_drop_out_are_missed_for_a_round(self, name: str, tmp_path: Path) -> None:
        """Two of four are invited; client 2 never makes it in time."""
        deadline = {"seconds": 0.06, "step_seconds": 0.01, "spread": 0.0}
        result = run(tmp_path, make(name), uneven((16, 9, 30, 12)), clients_per_round=2, deadline=deadline)
        late = [event for event in clients(result) if event["fault"] == MISSED_DEADLINE]
        if not result.method.pools:
            assert {event["client"] for event in late} == {2}
            assert {event["client"] for event in clients(result)} < {0, 1, 2, 3}
        assert is_finite(result.metrics)

    @pytest.mark.parametrize("federation", [uneven((12,)), uneven((8, 8), one_class=True)], ids=["alone", "one class"])
    @pytest.mark.parametrize("module", [network, plain_network], ids=["batchnorm", "plain"])
    def test_odd_federations(
        self, name: str, federation: Federation, module: Callable[[], nn.Module], tmp_path: Path
    ) -> None:
        result = run(tmp_path, make(name), federation, module())
        assert not any(event["fault"] for event in clients(result))
        assert is_finite(result.metrics)

    def test_local_batchnorm(self, name: str, tmp_path: Path) -> None:
        if "local" not in policies(name):
            with pytest.raises(InputError, match="batchnorm = 'local': input should be 'average'"):
                make(name, batchnorm="local")
            return
        result = run(tmp_path, make(name, batchnorm="local"))
        assert not any(event["fault"] for event in clients(result))
        assert is_finite(result.metrics)
        assert "G/G" not in result.metrics or METHODS[name].pools


class Bench:
    """A method's hooks, called by hand for the clients of one round after another."""

    def __init__(self, method: Method, module: nn.Module | None = None, federation: Federation | None = None) -> None:
        self.job = make_job(method, module or network(), federation or uneven(), plan(rounds=2))
        check_job(self.job)
        self.method, self.round = method, 0
        self.server = method.init_server(self.job.context(0))
        self.states = {client: method.init_client(self.job.context(0, client)) for client in self.job.participants(0)}
        self.fits: dict[int, Fit] = {}

    def down(self, client: int) -> Params:
        received = self.method.broadcast(self.server, self.job.context(self.round, client))
        return {name: tensor.clone() for name, tensor in received.items()}

    def fit(self, client: int, down: Params, state: Params) -> Fit:
        ctx = self.job.context(self.round, client)
        data = self.job.train_data(client, self.round)
        with keyed_globals("fit", self.round, client):
            return self.method.fit(down, state, data, ctx)

    def play(self) -> None:
        """Carry out a round."""
        self.fits = {client: self.fit(client, self.down(client), state) for client, state in self.states.items()}
        updates = [Delivered(client, *fit.update) for client, fit in self.fits.items()]
        with keyed_globals("aggregate", self.round):
            self.server = self.method.aggregate(self.server, updates, self.job.context(self.round))
        self.states = {client: fit.state for client, fit in self.fits.items()}
        self.round += 1


@pytest.mark.parametrize(
    ("name", "batchnorm"), [(name, policy) for name in sorted(METHODS) for policy in policies(name)]
)
class TestHooks:
    def test_arguments_are_left_alone(self, name: str, batchnorm: str) -> None:
        """Also in the second round, when there is a state."""
        bench = Bench(make(name, batchnorm=batchnorm))
        bench.play()
        federation, ctx = bench.job.federation, bench.job.context(1)
        data = {"x": federation.train.x, "y": federation.train.y}
        down, state, server = bench.down(0), bench.states[0], bench.server
        kept = [contents(params) for params in (data, down, state, server)]
        fit = bench.fit(0, down, state)
        sent = contents(fit.update.payload)
        bench.method.aggregate(server, [Delivered(client, *fit.update) for client in (0, 1)], ctx)
        own = bench.method.personalise(down, state, fit.personal or None, self.data(bench), replace(ctx, client=0))
        bench.method.predict(own, POOL, 2, ctx)
        assert [contents(params) for params in (data, down, state, server)] == kept
        assert contents(fit.update.payload) == sent

    def test_values_are_named_finite_tensors(self, name: str, batchnorm: str) -> None:
        bench = Bench(make(name, batchnorm=batchnorm))
        bench.play()
        limits = Limits(bench.method.payload_like(bench.server, bench.job.context(1)))
        for fit in bench.fits.values():
            assert find_fault(fit.update, limits) == ""
            for params in (bench.server, fit.update.payload, fit.state, fit.personal):
                assert all(isinstance(key, str) and type(value) is Tensor for key, value in params.items())
                assert not any(value.requires_grad or value.is_complex() for value in params.values())
                assert is_finite({key: value for key, value in params.items() if key != "guard"})

    def test_models_are_copies(self, name: str, batchnorm: str) -> None:
        """Whatever happens to what was received or to the task, a client's own model and state stay as they are."""
        bench = Bench(make(name, batchnorm=batchnorm))
        bench.play()
        task, down, state = bench.job.task, bench.down(0), bench.states[0]
        fit = bench.fit(0, down, state)
        ctx = bench.job.context(1, 0)
        own = bench.method.personalise(down, fit.state, fit.personal or None, self.data(bench), ctx)
        kept = [contents(params) for params in (own, fit.state, fit.update.payload)]
        buffers = [buffer for buffer in task.module.buffers() if buffer.is_floating_point()]
        for tensor in (*down.values(), *state.values(), task.weights, task.gradient, *buffers):
            tensor.data.add_(1)
        assert [contents(params) for params in (own, fit.state, fit.update.payload)] == kept

    @staticmethod
    def data(bench: Bench) -> Any:
        return bench.job.train_data(0, bench.round)


@named
class TestDeclarations:
    def test_numbers_sent_and_gradients_computed(self, name: str) -> None:
        """Of one client, at the default options, on a network without BatchNorm."""
        method = METHODS[name]()
        whole = uneven((200, 200), batch_size=4 if method.selects else 40)
        bench = Bench(method, plain_network(), whole)
        bench.play()
        task, parameters = bench.job.task, sum(p.numel() for p in plain_network().parameters())
        rates = len(getattr(method, "rates", ()))
        evidence = 2 * (rates + 2) * rates / parameters  # numbers of 64 bits, whatever the size of the network
        up, down = (numbers(params) / parameters - evidence for params in (bench.fits[0].update.payload, bench.down(0)))
        if method.floats_up is None or method.floats_down is None or method.passes is None:
            assert Need.UNLABELLED in method.needs
            return
        if method.exchanges:
            assert up == pytest.approx(method.floats_up, abs=0.1)
            assert down <= method.floats_down + 0.1
        else:
            assert (method.floats_up, method.floats_down) == (0, 0)
        task.backward_passes = 0
        bench.fit(0, bench.down(0), bench.states[0])
        fedavg = method.epochs * bench.job.train_sizes[0]
        assert task.backward_passes / fedavg == pytest.approx(method.passes, rel=0.05)

    def test_the_passes_of_a_round_are_logged(self, name: str, reference: Callable[[str], Result]) -> None:
        for event in clients(reference(name)):
            assert event["forward_passes"] >= event["backward_passes"] > 0

    def test_a_need_that_is_not_met_is_refused_in_one_line(self, name: str) -> None:
        method = METHODS[name]()
        for need in method.needs:
            with pytest.raises(InputError, match=f"^{name} needs {need}: ") as caught:
                refuse_unmet(name, method.needs, set(Need) - {need})
            one_line(caught.value)
        refuse_unmet(name, method.needs, set(Need))


@pytest.mark.parametrize("name", ["fedamp", "fedfomo", "fedkd"])
def test_nobody_can_pass_for_another_client(name: str, reference: Callable[[str], Result], tmp_path: Path) -> None:
    """All clients claim to be client 0; the server still keeps what it has of each in that client's place."""
    honest = METHODS[name].fit

    def lie(method: Method, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        return honest(method, down, state, data, replace(ctx, client=0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(METHODS[name], "fit", lie)
        lying = run(tmp_path, make(name))
    states = [result.directory.checkpoint() for result in (reference(name), lying)]
    servers = [state.server for state in states if state is not None]
    assert servers[0].keys() == servers[1].keys()
    assert all(server.get("holders", torch.ones(3)).tolist() == [1, 1, 1] for server in servers)


def numbers(params: Params) -> float:
    """Bytes as 32-bit numbers."""
    return sum(tensor.nbytes for tensor in params.values()) / 4


def test_a_desk_counts_only_the_fit_itself() -> None:
    """Judging a model before or after makes no difference."""
    job = make_job(make("fedavg"), plain_network(), uneven((200,)), plan(rounds=1))
    desk = Desk(job, RunDirectory(Path()))
    job.task.outputs(POOL)
    cost: dict[str, float] = {}
    ctx = job.context(0, 0)
    desk._train(job.method.init_server(ctx), {}, ctx, cost)
    assert cost["forward_passes"] == cost["backward_passes"] == 160
