import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from metabayfl.inspection import check, find_problems, roles
from metabayfl.likelihood import Categorical
from metabayfl.options import InputError
from metabayfl.task import Task
from strangers import STRANGERS, Cnn, Constants, FrozenBackbone, Tied, meet


class Bare(nn.Module):
    """A module with one parameter of any type."""

    def __init__(self, data: Tensor, requires_grad: bool = True) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.bare = nn.Parameter(data, requires_grad)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(weight_norm(nn.Linear(2, 2)))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str, str]] = {
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "0", "lazy", "one forward pass"),
    "lazy buffers": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False)), "1", "lazy", "one forward pass",
    ),
    "parametrised": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2))),
        "0", "parametrised", "remove_parametrizations",
    ),
    "old weight norm": (old_weight_norm, "0", "recomputes its weight", "remove_weight_norm"),
    "old spectral norm": (lambda: spectral_norm(nn.Linear(2, 2)), "Linear", "recomputes", "remove_spectral_norm"),
    "half": (lambda: nn.Linear(2, 2).half(), "weight", "torch.float16", "module.float()"),
    "bfloat16": (lambda: nn.Linear(2, 2).bfloat16(), "bias", "torch.bfloat16", "module.float()"),
    "complex": (lambda: Bare(torch.zeros(2, dtype=torch.complex64)), "bare", "torch.complex64", "module.float()"),
    "other device": (lambda: nn.Linear(2, 2, device="meta"), "weight", "lies on meta", "module.cpu()"),
    "sparse": (lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)), "0", "sparse gradients", "sparse=False"),
    "max norm": (lambda: nn.EmbeddingBag(3, 2, max_norm=1.0), "EmbeddingBag", "max_norm", "max_norm=None"),
    "cumulative": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None)), "1", "momentum=None", "momentum=0.1",
    ),
    "untrainable": (lambda: nn.Linear(2, 2).requires_grad_(False), "Linear", "no trainable", "requires_grad"),
    "empty": (nn.Identity, "Identity", "no trainable", "requires_grad"),
    "mixed": (lambda: Bare(torch.zeros(2).double()), "Bare", "torch.float32, torch.float64", "module.float()"),
    "not a module": (lambda: torch.relu, "builtin_function_or_method", "not an nn.Module", "pass a torch.nn.Module"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_place_reason_and_fix(case: str) -> None:
    build, where, what, fix = REFUSED[case]
    report = check(build())
    assert not report.ok
    assert any(p.where == where and what in p.what and fix in p.fix for p in report.problems)
    assert str(report).startswith("cannot be federated:\n")
    assert fix in str(report)
    with pytest.raises(InputError) as refusal:
        Task(build(), Categorical(2))
    assert where in str(refusal.value)
    assert fix in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None, track_running_stats=False)),
        Bare(torch.zeros(2, dtype=torch.int64), requires_grad=False),
        Bare(torch.zeros(2, dtype=torch.float16), requires_grad=False),
        nn.Linear(2, 2).double(),
    ],
    ids=["batch statistics", "frozen integers", "frozen half", "double"],
)
def test_harmless_relatives_of_the_refused_are_accepted(module: nn.Module) -> None:
    assert list(find_problems(module)) == []
    Task(module, Categorical(2))


@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_are_welcome(kind: type[nn.Module]) -> None:
    module, _, _ = meet(kind)
    report = check(module)
    named = dict(module.named_parameters())
    assert report.ok
    assert {*report.bayesian, *report.deterministic, *report.frozen} == set(named)
    assert report.frozen == tuple(name for name, p in named.items() if not p.requires_grad)
    assert report.parameters == sum(p.numel() for p in module.parameters() if p.requires_grad)


def test_report_sorts_parameters_and_buffers() -> None:
    report = check(meet(Cnn)[0])
    assert report.deterministic == ("bn.weight", "bn.bias", "bn_out.weight", "bn_out.bias")
    assert report.buffers == ("bn.running_mean", "bn.running_var", "bn_out.running_mean", "bn_out.running_var")
    assert check(meet(Constants)[0]).buffers == ("scale",)
    assert check(meet(Tied)[0]).bayesian == ("embed.weight", "middle.weight", "middle.bias", "head.bias")
    text = str(check(meet(FrozenBackbone)[0]))
    assert "can be federated: 12 trainable parameters" in text
    assert "frozen (kept as they are, never sent): backbone.0.weight, backbone.0.bias" in text


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nn.Linear(8, 4), {"weight": 8, "bias": 8}),
        (nn.Conv2d(3, 5, 3), {"weight": 27, "bias": 27}),
        (nn.Conv2d(4, 8, 3, groups=2), {"weight": 18, "bias": 18}),
        (nn.ConvTranspose2d(3, 5, 2), {"weight": 12, "bias": 12}),
        (nn.Embedding(7, 3), {"weight": 1}),
        (nn.GRU(5, 2), {"weight_ih_l0": 5, "weight_hh_l0": 2, "bias_ih_l0": 5, "bias_hh_l0": 5}),
        (nn.BatchNorm2d(3), {"weight": 0, "bias": 0}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_inputs_of_a_unit(layer: nn.Module, inputs: dict[str, int]) -> None:
    assert {role.name: role.fan_in for role in roles(layer)} == inputs


def test_report_says_when_nothing_can_be_bayesian() -> None:
    report = check(nn.LayerNorm(3))
    assert report.ok
    assert "no layer can be made Bayesian" in str(report)
