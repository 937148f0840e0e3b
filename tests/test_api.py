"""Five lines of Python with strangers' modules: train, predict, save, load; what does not fit is one line."""

import copy
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import metabayfl as mb
from metabayfl.result import ClassPrediction, Result, ValuePrediction
from metabayfl.store import RunDirectory
from metabayfl.types import Context, Diverged, Params
from strangers import STRANGERS, Cnn, Constants, FrozenBackbone, NormedMlp, Vit, meet


class Dropping(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.first(x).relu()))


def mlp(inputs: int = 4, outputs: int = 2) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


def easy(clients: int = 2, size: int = 60) -> mb.Federation:
    """Two classes on either side of a plane."""
    x = torch.randn(clients * size, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] + x[:, 1] > 0).long()
    return mb.Federation.from_arrays(list(zip(x.split(size), y.split(size), strict=True)))


def stranger(kind: type[nn.Module]) -> tuple[nn.Module, mb.Federation, Tensor]:
    """A stranger's module, two clients, and inputs to predict."""
    if kind is Dropping:
        _, x, y = meet(NormedMlp, batch=32)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module: nn.Module = Dropping()
    else:
        module, x, y = meet(kind, batch=32)
    return module, mb.Federation.from_arrays([(x[:16], y[:16]), (x[16:], y[16:])], classes=3, batch_size=5), x


def run(module: nn.Module, federation: mb.Federation, method: mb.Method | None = None, **options: Any) -> Result:
    return mb.federate(module, federation, method or mb.BayFL(epochs=1), **({"rounds": 2} | options))


def probabilities(result: Result, x: Any, client: int | None = None) -> Tensor:
    prediction = result.predict(x, client=client)
    assert isinstance(prediction, ClassPrediction)
    return prediction.probs


def refused(call: Callable[[], Any], *parts: str) -> None:
    with pytest.raises(mb.InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("method", [mb.FedAvg(epochs=1), mb.BayFL(epochs=1)], ids=lambda method: method.name)
@pytest.mark.parametrize("kind", [*STRANGERS, Dropping])
class TestStrangers:
    def test_train_and_predict(self, kind: type[nn.Module], method: mb.Method, tmp_path: Path) -> None:
        module, federation, x = stranger(kind)
        before = copy.deepcopy(module)
        result = run(module, federation, method, out=tmp_path / "run")
        probs, own = probabilities(result, x), probabilities(result, x, client=1)
        for p in (probs, own):
            assert p.shape == (32, 3)
            assert p.isfinite().all()
            torch.testing.assert_close(p.sum(1), torch.ones(32, dtype=p.dtype))
        assert not torch.equal(probs, own)
        assert torch.equal(probs, probabilities(result, x))
        self.assert_untouched(module, before)
        again = mb.load(tmp_path / "run", model=kind())
        assert torch.equal(probabilities(again, x), probs)
        assert torch.equal(probabilities(again, x, client=1), own)

    def assert_untouched(self, module: nn.Module, before: nn.Module) -> None:
        """Not a bit, not a gradient, not a flag of the user's module has changed."""
        assert module.training == before.training
        old = dict((*before.named_parameters(), *before.named_buffers()))
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            assert torch.equal(tensor, old[name]), name
            assert tensor.grad is None
            assert tensor.requires_grad == old[name].requires_grad
            assert tensor.is_contiguous()


class TestBatchNorm:
    @pytest.mark.parametrize("method", [mb.FedAvg, mb.BayFL])
    def test_local_leaves_personal_models_only(self, method: type[mb.Method], tmp_path: Path) -> None:
        module, federation, x = stranger(Cnn)
        result = run(module, federation, method(epochs=1, batchnorm="local"), out=tmp_path / "run")
        assert set(result.metrics) == {"G/L", "P/L"}
        refused(lambda: result.predict(x), "batchnorm = 'local'", "client=0")
        one, other = (probabilities(result, x, client) for client in (0, 1))
        assert not torch.equal(one, other)
        assert torch.equal(probabilities(mb.load(tmp_path / "run"), x, 1), other)
        statistics = [result.module(client).bn.running_mean for client in (0, 1)]
        assert not torch.equal(*statistics)

    def test_average_shares_the_statistics(self) -> None:
        module, federation, x = stranger(Cnn)
        result = run(module, federation)
        exported = result.module()
        assert set(result.metrics) == {"G/G", "G/L", "P/L"}
        assert not torch.equal(exported.bn.running_mean, module.bn.running_mean)
        assert exported(x).shape == (32, 3)


@pytest.mark.parametrize("method", [mb.FedAvg(), mb.BayFL()], ids=lambda method: method.name)
def test_learning_really_happens(method: mb.Method) -> None:
    federation = easy()
    result = run(mlp(), federation, method, rounds=12)
    x = torch.randn(500, 4, generator=torch.Generator().manual_seed(9))
    y = (x[:, 0] + x[:, 1] > 0).long()
    for client in (None, 0, 1):
        assert (probabilities(result, x, client).argmax(1) == y).double().mean() > 0.9
    first, last = result.history[0]["metrics"]["G/G"], result.metrics["G/G"]
    assert last["accuracy"]["value"] > 0.9
    assert last["nll"]["value"] < first["nll"]["value"]


@pytest.fixture(scope="module")
def result() -> Result:
    return run(mlp(), easy(size=20), rounds=3, eval={"every": 2})


class TestResult:
    def test_metrics_have_three_views(self, result: Result) -> None:
        assert set(result.metrics) == {"G/G", "G/L", "P/L"}
        assert set(result.metrics["G/G"]["accuracy"]) == {"value"}
        for view in ("G/L", "P/L"):
            assert set(result.metrics[view]["nll"]) == {"weighted", "mean", "worst", "std"}
        assert result.metrics["G/L"] != result.metrics["P/L"]
        assert [event["round"] for event in result.history] == [2, 3]

    def test_nll_and_kl_are_logged_apart(self, result: Result) -> None:
        clients = [event for event in result.events if event["event"] == "client"]
        assert [(event["round"], event["client"]) for event in clients] == [(r, c) for r in (1, 2, 3) for c in (0, 1)]
        for event in clients:
            assert event["fault"] == ""
            assert event["nll"] > 0
            assert event["kl"] > 0
            assert event["kl_scale"] == pytest.approx(0.75 * event["round"] / 51 / 32)
            assert event["weight"] == 16
            assert min(event["bytes_up"], event["bytes_down"], event["seconds"]) > 0

    def test_two_calls_give_the_same_answer_whatever_was_asked_before(self, result: Result) -> None:
        x = torch.randn(7, 4)
        first = probabilities(result, x)
        probabilities(result, x, client=1)
        result.predict(x, samples=3)
        assert torch.equal(probabilities(result, x), first)
        torch.testing.assert_close(probabilities(result, x[:3]), first[:3])

    def test_uncertainty(self, result: Result) -> None:
        prediction = result.predict(torch.randn(9, 4), samples=4)
        assert isinstance(prediction, ClassPrediction)
        assert prediction.logits.shape == (4, 9, 2)
        assert ((prediction.mutual_information >= 0) & (prediction.mutual_information <= prediction.entropy)).all()
        assert (prediction.mutual_information > 0).any()

    def test_inputs_of_any_origin(self, result: Result) -> None:
        x = torch.randn(5, 4)
        for same in (x.numpy(), x.tolist(), x.numpy()[::-1][::-1]):
            assert torch.equal(probabilities(result, same), probabilities(result, x))

    def test_module_has_the_mean_weights(self, result: Result) -> None:
        module = result.module()
        assert type(module) is nn.Sequential
        mean = result.task.layout.unflatten(result.model()["mu"])
        assert all(torch.equal(tensor, mean[name]) for name, tensor in module.named_parameters())

    @pytest.mark.parametrize(
        ("arguments", "parts"),
        [
            ({"x": torch.ones(3, 5)}, ["cannot take x of shape (3, 5)", "mat1 and mat2"]),
            ({"x": torch.ones(3, 4).long()}, ["cannot take x of shape (3, 4)", "Long"]),
            ({"x": torch.ones(4)}, ["shape (4,)", "a batch of samples"]),
            ({"x": torch.ones(0, 4)}, ["shape (0, 4)", "at least one sample"]),
            ({"x": torch.full((2, 4), torch.nan)}, ["x: 8 of 8 numbers", "NaN"]),
            ({"x": [["a"] * 4]}, ["x: ", "not an array of numbers"]),
            ({"x": torch.ones(3, 4), "samples": 0}, ["samples = 0", "from 1"]),
            ({"x": torch.ones(3, 4), "client": 2}, ["client = 2", "0 to 1"]),
            ({"x": torch.ones(3, 4), "client": -1}, ["client = -1", "0 to 1"]),
            ({"x": torch.ones(3, 4), "client": "1"}, ["client = '1'", "0 to 1"]),
        ],
    )
    def test_bad_questions(self, result: Result, arguments: dict[str, Any], parts: list[str]) -> None:
        refused(lambda: result.predict(**arguments), *parts)

    def test_no_personal_model(self) -> None:
        without = run(mlp(), easy(size=10), rounds=1, keep_personal=False)
        refused(
            lambda: without.predict(torch.ones(1, 4), client=0), "client 0 has no model of its own", "keep_personal"
        )

    def test_a_run_without_directory_disappears_with_its_result(self) -> None:
        result = run(mlp(), easy(size=10), rounds=1)
        path = result.directory.path
        assert path.exists()
        del result
        assert not path.exists()


class TestSaveAndLoad:
    @pytest.mark.parametrize("method", [mb.FedAvg(epochs=1), mb.BayFL(epochs=1)], ids=lambda method: method.name)
    def test_a_sequential_with_frozen_layers_and_constants_is_rebuilt(self, method: mb.Method, tmp_path: Path) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            layers = [layer for _ in range(5) for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())]
            module = nn.Sequential(*layers, nn.Linear(4, 2))
        module[0].requires_grad_(False)
        module[1].num_batches_tracked += 5
        result = run(module, easy(size=20), method)
        result.save(tmp_path / "kept")
        x = torch.randn(6, 4)
        expected = [probabilities(result, x, client) for client in (None, 0)]
        del result  # and with it the directory that the run was in
        again = mb.load(tmp_path / "kept")
        assert [p.requires_grad for p in again.task.module[0].parameters()] == [False, False]
        assert torch.equal(again.module()[0].weight, module[0].weight)
        assert again.module()[1].num_batches_tracked == 5
        for client, probs in zip((None, 0), expected, strict=True):
            assert torch.equal(probabilities(again, x, client), probs)

    def test_double_precision_is_kept(self, tmp_path: Path) -> None:
        result = run(mlp().double(), easy(size=10), rounds=1, out=tmp_path / "run")
        x = torch.randn(6, 4)
        assert mb.load(tmp_path / "run").model()["mu"].dtype == torch.float64
        assert torch.equal(probabilities(mb.load(tmp_path / "run"), x), probabilities(result, x))

    @pytest.mark.parametrize("kind", [FrozenBackbone, Constants, Dropping])
    def test_a_class_without_arguments_is_found_where_it_was_imported(
        self, kind: type[nn.Module], tmp_path: Path
    ) -> None:
        module, federation, x = stranger(kind)
        with torch.no_grad():  # constants that the class itself would not give
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.add_(1)
        result = run(module, federation, rounds=1, out=tmp_path / "run")
        again = mb.load(tmp_path / "run")
        assert type(again.module()) is kind
        assert torch.equal(probabilities(again, x), probabilities(result, x))

    def test_a_class_with_arguments_is_asked_for(self, tmp_path: Path) -> None:
        _, federation, x = stranger(Dropping)
        result = run(Dropping(width=5), federation, rounds=1, out=tmp_path / "run")
        fix = f"load('{tmp_path / 'run'}', model=Dropping(...))"
        refused(lambda: mb.load(tmp_path / "run"), "your class Dropping", fix)
        again = mb.load(tmp_path / "run", model=Dropping(width=5))
        assert torch.equal(probabilities(again, x), probabilities(result, x))

    def test_a_model_passed_again_need_not_be_frozen_again(self, tmp_path: Path) -> None:
        _, federation, x = stranger(Dropping)
        module = Dropping(width=5)
        module.first.requires_grad_(False)
        result = run(module, federation, rounds=1, out=tmp_path / "run")
        fresh = Dropping(width=5)
        assert torch.equal(probabilities(mb.load(tmp_path / "run", fresh), x), probabilities(result, x))
        assert all(p.requires_grad for p in fresh.parameters())

    def test_another_model_is_refused(self, tmp_path: Path) -> None:
        run(mlp(), easy(size=10), rounds=1, out=tmp_path / "run")
        refused(lambda: mb.load(tmp_path / "run", mlp(outputs=3)), "mu.2.bias is (2,) there and (3,) here", "model=...")
        refused(lambda: mb.load(tmp_path / "run", nn.Linear(4, 2)), "holds another model", "missing here")
        refused(lambda: mb.load(tmp_path / "run", model=nn.Linear), "not an nn.Module")

    def test_save_refuses_a_place_that_is_taken(self, tmp_path: Path) -> None:
        result = run(mlp(), easy(size=10), rounds=1)
        (tmp_path / "file").write_text("mine")
        (tmp_path / "empty").mkdir()
        refused(lambda: result.save(tmp_path), f"{tmp_path} is not empty", "another directory")
        refused(lambda: result.save(tmp_path / "file"), "choose another directory")
        assert (tmp_path / "file").read_text() == "mine"
        result.save(str(tmp_path / "empty"))
        assert mb.load(str(tmp_path / "empty")).seed == 0

    def test_what_is_not_a_finished_run(self, tmp_path: Path) -> None:
        refused(lambda: mb.load(tmp_path / "nowhere"), "nowhere is not a run directory", "run.json")
        refused(lambda: mb.load(tmp_path), f"{tmp_path} is not a run directory")
        path = tmp_path / "run"
        run(mlp(), easy(size=10), rounds=1, out=path)
        about = json.loads((path / "run.json").read_text())
        for changed, part in (
            ("{", "damaged"),
            ("[]", "damaged"),
            (json.dumps(about | {"format": 99}), "format version 99; this metabayfl knows version 1"),
            (json.dumps({key: value for key, value in about.items() if key != "likelihood"}), "has no likelihood"),
        ):
            (path / "run.json").write_text(changed)
            refused(lambda: mb.load(path), part)
        (path / "run.json").write_text(json.dumps(about))
        (path / "model.safetensors").unlink()
        refused(lambda: mb.load(path), "run is not finished", "federate(..., out=..., resume=True)")

    def test_a_description_that_names_code_runs_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        run(mlp(), easy(size=10), rounds=1, out=path)
        about = json.loads((path / "run.json").read_text())
        options = {"path": str(tmp_path / "made")}
        about["model"]["spec"] = {"name": "os:mkdir", "classes": 2, "input_shape": [4], "options": options}
        (path / "run.json").write_text(json.dumps(about))
        refused(lambda: mb.load(path), "names code of yours", "model=models.build('os:mkdir'")
        assert not (tmp_path / "made").exists()


class TestRegression:
    def test_mean_and_spread(self) -> None:
        x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
        y = x[:, :2].sum(1)
        clients = list(zip(x.split(40), y.split(40), strict=True))
        federation = mb.Federation.from_arrays(clients, noise_std=0.25)
        result = run(mlp(outputs=1), federation, mb.BayFL(rate=0.01), rounds=10)
        prediction = result.predict(x)
        assert isinstance(prediction, ValuePrediction)
        assert prediction.mean.shape == prediction.std.shape == (80, 1)
        assert (prediction.std > 0.25).all()  # noise, and what is not known of the weights
        error = (prediction.mean[:, 0] - y).square().mean().sqrt()
        assert error < 0.25
        assert set(result.metrics["G/G"]) == {"nll", "rmse", "coverage_95"}

    def test_a_plain_network_knows_the_noise_only(self) -> None:
        x = torch.randn(20, 4)
        federation = mb.Federation.from_arrays([(x, x[:, :2])], noise_std=0.5)
        prediction = run(mlp(), federation, mb.FedAvg(epochs=1), rounds=1).predict(x)
        assert isinstance(prediction, ValuePrediction)
        assert prediction.mean.shape == (20, 2)
        assert (prediction.std == 0.5).all()


X, Y = torch.randn(20, 4), torch.arange(20) % 2
TINY = mb.Federation.from_arrays([(X, Y), (X, Y)])
REFUSED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "too many outputs": (lambda: run(mlp(outputs=3), TINY), ["3 outputs", "2 classes"]),
    "outputs of another shape": (
        lambda: run(nn.Sequential(nn.Linear(4, 2), nn.Unflatten(1, (1, 2))), TINY),
        ["(2, 1, 2)", "(2, 2)"],
    ),
    "inputs of another shape": (lambda: run(mlp(inputs=5), TINY), ["inputs of shape (4,)", "mat1 and mat2"]),
    "indices for a dense layer": (
        lambda: run(mlp(), mb.Federation.from_arrays([(X.long(), Y)])),
        ["inputs of shape (4,)", "whole-number inputs are indices", "real numbers"],
    ),
    "real labels for a classifier": (
        lambda: run(mlp(), mb.Federation.from_arrays([(X, Y.float())])),
        ["(2, 2)", "(2,)", "real labels mean regression", "whole numbers"],
    ),
    "a class for a model": (lambda: run(nn.Linear, TINY), ["not an nn.Module"]),
    "a lazy model": (lambda: run(nn.LazyLinear(2), TINY), ["lazy", "forward pass"]),
    "a list for a federation": (lambda: run(mlp(), [(X, Y)]), ["a list", "Federation.from_arrays"]),
    "a name for a method": (lambda: run(mlp(), TINY, "fedavg"), ["method = 'fedavg'", "BayFL()"]),
    "a class for a method": (lambda: run(mlp(), TINY, mb.BayFL), ["method = <class", "BayFL()"]),
    "no rounds": (lambda: run(mlp(), TINY, rounds=0), ["rounds = 0", "greater than or equal to 1"]),
    "an unknown option": (lambda: run(mlp(), TINY, round=3), ["round = 3: unknown key", "clients_per_round"]),
    "an unknown evaluation": (lambda: run(mlp(), TINY, eval={"evry": 3}), ["eval.evry = 3", "every"]),
    "no workers": (lambda: run(mlp(), TINY, workers=0), ["workers = 0", "from 1"]),
    "workers as text": (lambda: run(mlp(), TINY, workers="2"), ["workers = '2'", "from 1"]),
    "more clients than there are": (
        lambda: run(mlp(), TINY, clients_per_round=3),
        ["clients_per_round = 3", "2 clients"],
    ),
    "more updates than there are": (lambda: run(mlp(), TINY, min_updates=3), ["min_updates = 3", "2 clients"]),
}


@pytest.mark.parametrize(("call", "parts"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_one_line_before_anything_is_written(
    call: Callable[[], Any], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    refused(call, *parts)
    assert list(tmp_path.iterdir()) == []


class TestOut:
    def test_a_directory_that_is_not_empty_is_left_alone(self, tmp_path: Path) -> None:
        for name in ("notes.txt", "config.toml"):
            path = tmp_path / name.replace(".", "-")
            path.mkdir()
            (path / name).write_text("mine")
            refused(lambda path=path: run(mlp(), TINY, out=path), f"{path} is not empty", "another directory")
            assert [(p.name, p.read_text()) for p in path.iterdir()] == [(name, "mine")]

    def test_a_failed_run_without_directory_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

        def interrupt(event: dict[str, Any]) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(mlp(), TINY, observe=interrupt)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        "make", [mlp, lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 4), nn.Flatten())]
    )
    def test_resume_is_the_same_run_or_refused(self, make: Callable[[], nn.Module], tmp_path: Path) -> None:
        module, path = make(), tmp_path / "run"
        result = run(module, TINY, out=path)
        again = run(module, TINY, out=path, resume=True)
        assert torch.equal(again.model()["mu"], result.model()["mu"])
        refused(lambda: run(module, TINY, out=path, resume=True, rounds=3), "is another run", "rounds")
        refused(lambda: run(module, TINY, mb.BayFL(rate=0.5), out=path, resume=True), "is another run", "method")
        refused(lambda: run(module, easy(), out=path, resume=True), "other data")

    def test_resume_takes_the_frozen_weights_of_the_run(self, tmp_path: Path) -> None:
        def frozen(value: float) -> nn.Module:
            module = mlp()
            nn.init.constant_(module[0].weight, value)
            module[0].requires_grad_(False)
            return module

        whole = run(frozen(0.1), TINY, out=tmp_path / "whole")
        with pytest.raises(KeyboardInterrupt):
            run(frozen(0.1), TINY, out=tmp_path / "cut", observe=self.interrupt)
        refused(lambda: run(mlp(), TINY, out=tmp_path / "cut", resume=True), "other parameters are frozen")
        cut = run(frozen(0.9), TINY, out=tmp_path / "cut", resume=True)
        assert torch.equal(cut.model()["mu"], whole.model()["mu"])

    @staticmethod
    def interrupt(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 1:
            raise KeyboardInterrupt


class TestTestDataAreNeverSeen:
    """The same training with poisoned test data: every bit of what was trained must be the same."""

    @staticmethod
    def poisoned(federation: mb.Federation) -> mb.Federation:
        local_test = replace(federation.local_test, x=torch.full_like(federation.local_test.x, torch.nan))
        return replace(federation, local_test=local_test, test_x=torch.full_like(federation.test_x, torch.nan))

    @pytest.mark.parametrize("method", [mb.FedAvg(epochs=1), mb.BayFL(epochs=1)], ids=lambda method: method.name)
    def test_not_by_training(self, method: mb.Method, tmp_path: Path) -> None:
        """Judged after the last round only, poison stops the run there: rounds 1 and 2 are published, 3 is staged."""
        options: dict[str, Any] = {"rounds": 3, "eval": {"every": 3}}
        run(mlp(), easy(size=20), method, out=tmp_path / "clean", **options)
        with pytest.raises(Diverged, match="NaN or infinite after round 3"):
            run(mlp(), self.poisoned(easy(size=20)), method, out=tmp_path / "poisoned", **options)
        clean = RunDirectory(tmp_path / "clean").checkpoint()
        staged = RunDirectory(tmp_path / "poisoned").checkpoint(staged=True)
        assert clean is not None
        assert staged is not None
        assert clean.server.keys() == staged.server.keys()
        assert all(torch.equal(clean.server[name], staged.server[name]) for name in clean.server)
        assert not torch.isnan(staged.server["mu"]).any()

    def test_not_by_a_hook(self) -> None:
        """What a client's hooks are given has no storage in common with test data."""
        federation = easy(size=20)
        data = federation.client(0).train_data(held_out=False)
        given = {tensor.untyped_storage().data_ptr() for tensor in (data.x, data.y, data.select_x, data.select_y)}
        kept = (federation.local_test.x, federation.local_test.y, federation.test_x, federation.test_y)
        assert not given & {tensor.untyped_storage().data_ptr() for tensor in kept}


def test_the_callers_random_state_and_threads_are_untouched() -> None:
    module, federation, x = stranger(Vit)  # it drops out
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    threads = torch.get_num_threads()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    result = run(module, federation, rounds=1)
    result.predict(x)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert torch.get_num_threads() == threads


def test_the_result_depends_on_the_seed_and_not_on_the_callers_random_state() -> None:
    module, federation, _ = stranger(Dropping)
    found = []
    for state, seed in ((1, 0), (2, 0), (1, 1)):
        torch.manual_seed(state)
        found.append(run(module, federation, rounds=1, seed=seed).model()["mu"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    numpy_seed = run(module, federation, rounds=1, seed=np.int64(1)).model()["mu"]
    assert torch.equal(numpy_seed, found[2])


def test_training_starts_at_the_users_weights() -> None:
    module = mlp()
    result = run(module, TINY, mb.FedAvg(rate=1e-12, epochs=1), rounds=1)
    for name, tensor in result.module().named_parameters():
        torch.testing.assert_close(tensor, module.get_parameter(name), rtol=0, atol=1e-9)


def test_held_out_changes_what_is_trained_on() -> None:
    weights = [run(mlp(), TINY, rounds=1, held_out=held_out).events[0]["weight"] for held_out in (None, False, True)]
    assert weights == [16, 16, 13]


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"select_fraction": 0.0, "test_fraction": 0.5}])
def test_batchnorm_with_mini_batches_of_one_is_refused(options: dict[str, Any]) -> None:
    """The second client trains on a single sample."""
    x, y = torch.randn(22, 4), torch.arange(22) % 2
    federation = mb.Federation.from_arrays([(x[:20], y[:20]), (x[20:], y[20:])], **options)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    with pytest.raises(mb.InputError, match="mini-batches of 1 sample"):
        mb.federate(model, federation, rounds=1)


class Halved(mb.FedAvg):
    """A method that nobody has registered."""

    def predict(self, model: Params, x: Tensor, samples: int, ctx: Context) -> Tensor:
        return super().predict(model, x, samples, ctx) / 2


def test_a_method_of_the_users_own(tmp_path: Path) -> None:
    federation, x = easy(size=20), easy(size=20).test_x
    own, plain = (run(mlp(), federation, kind(epochs=1), out=tmp_path / kind.__name__) for kind in (Halved, mb.FedAvg))
    assert torch.allclose(own.predict(x).logits * 2, plain.predict(x).logits)
    with pytest.raises(mb.InputError, match=r"method of yours, .*Halved: pass it as method="):
        mb.load(tmp_path / "Halved")
    assert torch.equal(mb.load(tmp_path / "Halved", method=Halved()).predict(x).logits, own.predict(x).logits)


def test_a_model_that_changes_its_input_does_not_change_the_users() -> None:
    class InPlace(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x -= 1
            return self.head(x)

    x, y = torch.randn(20, 4), torch.arange(20) % 2
    before = x.clone()
    result = mb.federate(InPlace(), mb.Federation.from_arrays([(x, y)]), rounds=1)
    result.predict(x)
    assert torch.equal(x, before)
