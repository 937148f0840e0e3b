import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from metabayfl.config import Plan
from metabayfl.data.federation import Federation
from metabayfl.engine.plan import make_job
from metabayfl.inputs import Scaling
from metabayfl.likelihood import Categorical, Gaussian
from metabayfl.methods import BayFL, FedAvg
from metabayfl.methods.base import Method
from metabayfl.randomness import keyed_globals
from metabayfl.task import Task
from metabayfl.types import Context, Fit, InputError, Params, TrainData
from strangers import STRANGERS, Cnn, Constants, FrozenBackbone, NormedMlp, Recurrent, Tied, Vit, meet

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
strangers = pytest.mark.parametrize("kind", STRANGERS)
policies = pytest.mark.parametrize(
    "options", [{}, {"bayesian": "all"}, {"bayesian": "last", "batchnorm": "local"}], ids=["point", "all", "last-local"]
)


def classifier(module: nn.Module, **options: object) -> Task:
    return Task(module, Categorical(3), **options)  # type: ignore[arg-type]


def with_seed(call: Callable[[], Tensor]) -> Tensor:
    """The same dropout masks for two modules."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return call()


def train_plain(module: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """One pass of the module as its author would train it; gradients by name."""
    loss = with_seed(lambda: cross_entropy(module.train()(x), y))
    loss.backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def fit(method: Method, task: Task, client: int, x: Tensor, y: Tensor) -> Fit:
    ctx = Context(task, seed=3, client=client, clients={0: len(x), 1: len(x)})
    data = TrainData(x, y, x[:0], y[:0], batch_size=4)
    with keyed_globals("fit", client):
        return method.fit(method.init_server(ctx), method.init_client(ctx), data, ctx)


def assert_same_bits(one: Params, other: Params) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@strangers
@policies
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gradients_and_outputs_equal_the_plain_module(
    kind: type[nn.Module], options: dict[str, str], dtype: torch.dtype
) -> None:
    module, x, y = meet(kind, dtype=dtype)
    task = classifier(module, **options)
    plain = copy.deepcopy(module)
    close = {"rtol": 0.0, "atol": TOLERANCE[dtype]}

    task.load(task.initial())
    task.gradient.fill_(7.0)  # what an earlier pass may have left
    nll = with_seed(lambda: task.backward(x, y))
    expected = train_plain(plain, x, y)
    gradients = task.layout.unflatten(task.gradient[: task.size])
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], **close)
    assert not task.gradient[task.size :].any()
    with torch.no_grad():
        torch.testing.assert_close(nll, cross_entropy(with_seed(lambda: module.train()(x)), y), **close)
        torch.testing.assert_close(task.outputs(x), plain.eval()(x), **close)  # buffers have moved in both


@strangers
def test_user_module_is_left_alone(kind: type[nn.Module]) -> None:
    module, x, y = meet(kind)
    before = copy.deepcopy(module.state_dict())
    module.eval()
    task = classifier(module, bayesian="all")
    task.load(task.initial())
    task.backward(x, y)
    task.weights.zero_()
    assert_same_bits(dict(module.state_dict()), dict(before))
    assert not module.training
    assert all(parameter.grad is None for parameter in module.parameters())


@strangers
@policies
def test_export_returns_the_module_bit_by_bit(kind: type[nn.Module], options: dict[str, str]) -> None:
    module, x, y = meet(kind)
    task = classifier(module, **options)
    task.load(task.initial())
    task.backward(x, y)
    task.weights.mul_(2.0)
    exported = task.export(task.initial()["mu"])

    assert type(exported) is kind
    assert_same_bits(dict(exported.state_dict()), dict(module.state_dict()))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        other = exported.get_parameter(name) if isinstance(tensor, nn.Parameter) else exported.get_buffer(name)
        assert (other.dtype, other.stride(), other.requires_grad) == (
            tensor.dtype,
            tensor.stride(),
            tensor.requires_grad,
        )
        assert other.grad is None
        assert other.untyped_storage().nbytes() == other.nbytes  # not a view of the vector
    assert not exported.training


def test_export_takes_the_buffers_it_is_given() -> None:
    module, x, y = meet(Cnn)
    task = classifier(module)
    task.load(task.initial())
    task.backward(x, y)
    model = task.with_buffers({"mu": task.weights.clone()})
    task.load(task.initial())
    task.outputs(x)
    exported = task.export(model["mu"], model["buffers"])
    module(x)
    torch.testing.assert_close(exported.bn_out.running_mean, module.bn_out.running_mean, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(exported.bn.running_var, module.bn.running_var, rtol=0.0, atol=1e-6)


def test_export_keeps_the_type_of_a_buffer() -> None:
    module, _, _ = meet(NormedMlp)
    module.register_buffer("threshold", torch.tensor([0.5], dtype=torch.float64))
    task = classifier(module)
    assert task.export(task.initial()["mu"], task.initial()["buffers"]).get_buffer("threshold").dtype == torch.float64


@pytest.mark.parametrize("channels", [1, 3])
def test_view_after_a_convolution_rules_channels_last_out(channels: int) -> None:
    class Tutorial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(channels, 4, 3)
            self.head = nn.Linear(4 * 6 * 6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.conv(x).view(-1, 4 * 6 * 6))

    x = torch.randn(2, channels, 8, 8)
    assert classifier(nn.Sequential(nn.Conv2d(channels, 4, 3), nn.Flatten())).runs_on(x)
    assert not classifier(Tutorial()).runs_on(x)
    assert classifier(Tutorial(), channels_last=False).runs_on(x)
    federation = Federation.from_arrays([(torch.randn(20, channels, 8, 8), torch.arange(20) % 3)])
    assert not make_job(FedAvg(), Tutorial(), federation, Plan()).task.channels_last
    assert make_job(
        FedAvg(), nn.Sequential(nn.Conv2d(channels, 3, 8), nn.Flatten()), federation, Plan()
    ).task.channels_last


def test_a_task_is_not_copied() -> None:
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(classifier(nn.Linear(2, 3)))


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="'encoder"):
        Task(nn.Linear(2, 3), Categorical(3), bayesian="all", deterministic=["encoder.*"])


def test_the_last_layer_may_be_tied_to_the_first() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.LayerNorm(4), nn.Linear(4, 5))
    model[3].weight = model[0].weight
    task = Task(model, Categorical(5), bayesian="last")
    assert [slot.name for slot in task.layout.slots if slot.stop <= task.bayesian_size] == ["0.weight", "3.bias"]


def test_an_infinite_mask_is_a_constant() -> None:
    model = nn.Linear(2, 3)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    task = classifier(model)
    assert "buffers" not in task.initial()
    assert torch.equal(task.constants()["mask"], model.mask)


def test_outputs_in_pieces_equal_outputs_at_once() -> None:
    module, x, _ = meet(NormedMlp, batch=1100, dtype=torch.float64)
    task = classifier(module)
    torch.testing.assert_close(task.outputs(x), module(x), rtol=0.0, atol=1e-12)


def test_tied_parameters_count_once_and_stay_tied() -> None:
    module, _, _ = meet(Tied)
    task = classifier(module, bayesian="all")
    assert task.size == task.bayesian_size == 3 * 6 + (6 * 6 + 6) + 3
    exported = task.export(task.initial()["mu"] + 1.0)
    assert exported.head.weight is exported.embed.weight
    assert torch.equal(exported.head.weight, module.head.weight + 1.0)


@pytest.mark.parametrize("method", [FedAvg(rate=0.1, epochs=2), BayFL(rate=0.1, epochs=2)], ids=lambda m: m.name)
def test_frozen_parameters_never_move(method: Method) -> None:
    module, x, y = meet(FrozenBackbone)
    task = classifier(module, bayesian=method.bayesian_layers)
    model = fit(method, task, 0, x, y).personal
    exported = task.export(model["mu"], model["buffers"])
    assert task.size == 3 * 3 + 3
    assert torch.equal(exported.backbone[0].weight, module.backbone[0].weight)
    assert torch.equal(exported.backbone[1].weight, module.backbone[1].weight)
    assert not torch.equal(exported.head.weight, module.head.weight)
    assert not torch.equal(exported.backbone[1].running_mean, module.backbone[1].running_mean)  # a buffer, not frozen


@strangers
@pytest.mark.parametrize("method", [FedAvg(rate=0.05, epochs=2), BayFL(rate=0.05, epochs=2)], ids=lambda m: m.name)
def test_one_client_leaves_nothing_behind_for_the_next(kind: type[nn.Module], method: Method) -> None:
    module, x, y = meet(kind, batch=13)
    shared = classifier(module, bayesian=method.bayesian_layers)
    fit(method, shared, 0, x.flip(0), y)
    shared.outputs(x)
    second = fit(method, shared, 1, x, y)
    alone = fit(method, classifier(module, bayesian=method.bayesian_layers), 1, x, y)
    assert_same_bits(second.update.payload, alone.update.payload)
    assert second.update.metrics == alone.update.metrics


def test_load_restores_what_does_not_travel() -> None:
    module, x, y = meet(Constants)
    task = classifier(module)
    assert [slot.name for slot in task.buffer_layout.slots] == ["scale"]
    task.load(task.initial())
    task.backward(x, y)
    task.backward(x, y)
    assert (task.module.passes.item(), len(task.module.cache)) == (5, 3)
    task.load(task.initial())
    assert task.module.passes.item() == 3
    assert torch.equal(task.module.cache, torch.ones(1))
    task.backward(x, y)
    task.load(task.initial())
    assert task.module.passes.item() == 3  # the constant itself was not the one that counted


def test_model_is_a_copy() -> None:
    module, x, y = meet(Cnn)
    task = classifier(module)
    task.load(task.initial())
    model = task.with_buffers({"mu": task.weights.clone()})
    task.backward(x, y)
    task.weights.zero_()
    assert_same_bits(model, task.initial())
    task.initial()["mu"].zero_()
    assert task.initial()["mu"].any()


class TestBatchNorm:
    @pytest.mark.parametrize("method", [FedAvg, BayFL])
    def test_average_sends_everything(self, method: type[Method]) -> None:
        module, x, y = meet(Cnn)
        task = classifier(module, bayesian=method().bayesian_layers)
        updates = [fit(method(), task, client, x * (client + 1), y).update for client in (0, 1)]
        first, second = (task.buffer_layout.unflatten(update.payload["buffers"]) for update in updates)
        assert set(first) == {f"{layer}.running_{what}" for layer in ("bn", "bn_out") for what in ("mean", "var")}
        heavier = [updates[0], updates[1]._replace(weight=3 * updates[0].weight)]
        server = method().aggregate({}, heavier, Context(task))
        averaged = task.buffer_layout.unflatten(server["buffers"])
        for name, tensor in averaged.items():
            torch.testing.assert_close(tensor, 0.25 * first[name] + 0.75 * second[name], rtol=1e-6, atol=0.0)
        assert not task.has_private_part
        assert method().global_model(server, Context(task)) == server

    @pytest.mark.parametrize("method", [FedAvg, BayFL])
    def test_local_keeps_scale_shift_and_statistics(self, method: type[Method]) -> None:
        module, x, y = meet(Cnn)
        task = classifier(module, bayesian=method().bayesian_layers, batchnorm="local")
        result = fit(method(), task, 0, x, y)
        batchnorm = {"bn.weight", "bn.bias", "bn_out.weight", "bn_out.bias"}
        sent = task.layout.unflatten(result.update.payload["mu"])
        assert set(sent) == {name for name, _ in module.named_parameters()} - batchnorm
        assert sum(len(tensor) for tensor in result.update.payload.values()) == task.shared_size + task.bayesian_size
        assert len(result.state["private.mu"]) == len(result.state["private.buffers"]) == 2 * (4 + 5)
        assert method().global_model(result.update.payload, Context(task)) is None

    def test_local_private_part_comes_back(self) -> None:
        module, x, y = meet(Cnn)
        task = classifier(module, bayesian="all", batchnorm="local")
        method, ctx = BayFL(batchnorm="local", class_frequencies=False), Context(task)
        result = fit(method, task, 0, x, y)
        assert_same_bits(task.join(*task.split(result.personal)), result.personal)
        joined = task.join(method.init_server(ctx), result.state)
        assert torch.equal(joined["buffers"], result.personal["buffers"])
        assert torch.equal(joined["mu"][task.shared_size :], result.personal["mu"][task.shared_size :])
        assert torch.equal(joined["mu"][: task.shared_size], task.initial()["mu"][: task.shared_size])
        newcomer = task.join(result.update.payload, {})
        assert torch.equal(newcomer["buffers"], task.initial()["buffers"])
        assert torch.equal(newcomer["mu"][: task.shared_size], result.update.payload["mu"])

    def test_local_keeps_other_buffers_shared(self) -> None:
        module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
        module[1].register_buffer("scale", torch.tensor([2.0]))  # comes after the statistics
        task = classifier(module, batchnorm="local")
        assert task.split(task.initial())[0]["buffers"].tolist() == [2.0]

    def test_without_batchnorm_local_is_average(self) -> None:
        module, _, _ = meet(NormedMlp)
        task = classifier(module, batchnorm="local")
        assert not task.has_private_part
        assert task.split(task.initial())[1] == {}


@pytest.mark.parametrize(
    ("kind", "options", "names"),
    [
        (NormedMlp, {"bayesian": "all"}, {"first.weight", "first.bias", "last.weight", "last.bias"}),
        (NormedMlp, {"bayesian": "last"}, {"last.weight", "last.bias"}),
        (NormedMlp, {"bayesian": "all", "deterministic": ["last.*", "*.bias"]}, {"first.weight"}),
        (NormedMlp, {"bayesian": "last", "deterministic": ["last.*"]}, {"first.weight", "first.bias"}),
        (Cnn, {"bayesian": "dense"}, {"head.weight", "head.bias"}),
        (Vit, {"bayesian": "last"}, {"head.weight", "head.bias"}),
        (Recurrent, {"bayesian": "dense"}, {"head.weight", "head.bias"}),
        (FrozenBackbone, {"bayesian": "all"}, {"head.weight", "head.bias"}),
        (Cnn, {"bayesian": "none"}, set()),
    ],
)  # fmt: skip
def test_bayesian_segment(kind: type[nn.Module], options: dict[str, object], names: set[str]) -> None:
    module, _, _ = meet(kind)
    task = classifier(module, **options)
    assert set(task.layout.unflatten(task.weights[: task.bayesian_size])) == names
    assert task.bayesian_size == sum(p.numel() for name, p in module.named_parameters() if name in names)


def test_vit_and_gru_have_bayesian_attention_and_recurrence() -> None:
    vit, gru = (classifier(meet(kind)[0], bayesian="all") for kind in (Vit, Recurrent))
    noisy = vit.layout.unflatten(vit.weights[: vit.bayesian_size])
    assert {"block.self_attn.in_proj_weight", "block.linear1.bias", "patches.weight"} <= set(noisy)
    assert not {"cls_token", "block.norm1.weight"} & set(noisy)
    assert gru.bayesian_size == gru.size


def test_impossible_choices_are_refused() -> None:
    with pytest.raises(InputError, match=r"bayesian = 'dense': no such layer .*metabayfl\.check"):
        classifier(nn.Sequential(nn.Conv1d(1, 1, 3), nn.LayerNorm(3)), bayesian="dense")
    with pytest.raises(InputError, match="bayesian = 'all'"):
        classifier(meet(NormedMlp)[0], bayesian="all", deterministic=["*"])
    with pytest.raises(InputError, match=r"cannot be federated: Embedding: .* \| .*max_norm=None"):
        classifier(nn.Embedding(3, 3, sparse=True, max_norm=1.0))


def test_verify_says_what_does_not_fit() -> None:
    module, x, y = meet(NormedMlp)
    classifier(module).verify(x, y)
    with pytest.raises(InputError, match=r"cannot take inputs of shape \(5,\): mat1 and mat2"):
        classifier(module).verify(torch.randn(9, 5), y)
    with pytest.raises(InputError, match="has 3 outputs, but the labels need 4 classes"):
        Task(module, Categorical(4)).verify(x, y)
    with pytest.raises(InputError, match=r"outputs of shape \(2, 3\), the targets have shape \(2,\)"):
        Task(module, Gaussian()).verify(x, torch.randn(9))
    with pytest.raises(InputError, match=r"outputs of shape \(2, 3, 4\) for 2 samples"):
        classifier(nn.Sequential(nn.Linear(4, 12), nn.Unflatten(1, (3, 4)))).verify(x, y)


class TestInputs:
    """Bytes stand for numbers from 0 to 1; what the module sees is scaled."""

    def task(self, scaling: Scaling | None = None) -> Task:
        return Task(nn.Sequential(nn.Flatten(), nn.Linear(8, 2)), Categorical(2), scaling=scaling)

    def test_bytes_and_numbers_are_the_same(self) -> None:
        images = torch.randint(256, (5, 2, 2, 2), dtype=torch.uint8)
        task = self.task()
        assert torch.equal(task.outputs(images), task.outputs(images / 255))

    def test_channels_are_scaled(self) -> None:
        images = torch.rand(5, 2, 2, 2)
        mean, std = torch.tensor([0.2, 0.4]).view(2, 1, 1), torch.tensor([0.5, 0.25]).view(2, 1, 1)
        seen = self.task(Scaling((0.2, 0.4), (0.5, 0.25))).prepare(images)
        assert torch.allclose(seen, (images - mean) / std)

    def test_inputs_follow_the_type_of_the_model_and_are_never_changed(self) -> None:
        task = Task(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)).double(), Categorical(2))
        x = -torch.ones(4, 3)
        assert task.outputs(x).dtype == torch.float64
        task.backward(x, torch.zeros(4, dtype=torch.int64))
        assert (x == -1).all()

    def test_indices_stay_indices(self) -> None:
        words = torch.tensor([[1, 2]])
        assert torch.equal(self.task(Scaling((0.5,), (0.5,))).prepare(words), words)


class TestDraws:
    """Several weight samples: the layers before the first noisy one are passed once, and nothing else changes."""

    @staticmethod
    def convolutional() -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 8),
            nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 3),
        )  # fmt: skip

    @pytest.mark.parametrize("layers", ["all", "dense", "last"])
    def test_they_equal_passes_one_by_one(self, layers: str) -> None:
        method = BayFL(bayesian=layers)
        task = classifier(self.convolutional(), bayesian=layers)
        ctx, x = Context(task), torch.randn(600, 1, 6, 6)
        model = method.init_model(ctx)
        task.forward_passes = 0
        found = method.predict(model, x, 3, ctx)
        assert task.forward_passes == 600 * (3 if layers == "all" else 1)
        for drawn, _ in zip(found, method.draws(model, 3, ctx), strict=True):
            assert torch.equal(drawn, task.outputs(x))

    def test_dropout_alone_is_noisy(self) -> None:
        task, x = classifier(self.convolutional()), torch.randn(20, 1, 6, 6)
        task.load(task.initial())
        found = task.drawn_outputs(x, lambda: [None] * 4, dropout=True)
        assert len({draw.sum().item() for draw in found}) == 4
        still = task.drawn_outputs(x, lambda: [None] * 2)
        assert torch.equal(still[0], still[1])
        assert torch.equal(still[0], task.outputs(x))

    @strangers
    def test_any_module_can_be_asked(self, kind: str) -> None:
        """Modules that are not a plain sequence of layers are passed whole."""
        module, x, _ = meet(kind)
        task = classifier(module, bayesian="last")
        method, ctx = BayFL(bayesian="last"), Context(task)
        model = method.init_model(ctx)
        found = method.predict(model, x, 2, ctx)
        for drawn, _ in zip(found, method.draws(model, 2, ctx), strict=True):
            assert torch.equal(drawn, task.outputs(x))
