"""A module is described in plain values and built again; nothing new is imported, and what is not sure is refused."""

import json
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from metabayfl import models
from metabayfl.options import InputError
from metabayfl.rebuild import describe_model, rebuild_model, with_frozen
from strangers import NormedMlp


class Plain(nn.Module):
    """Needs no arguments; two of them change what it computes, one of them its shapes."""

    def __init__(self, width: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.layer(x))


class Needy(Plain):
    def __init__(self, width: int) -> None:
        super().__init__(width)


class NoInit(nn.Module):
    """Inherits a constructor that takes anything."""


class Precise(nn.Module):
    """A plain layer beside a constant of higher precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64))


class OwnLinear(nn.Linear):
    pass


def stored(module: nn.Module) -> dict[str, Any]:
    """A description as a run directory gives it back: its keys come sorted."""
    found: dict[str, Any] = json.loads(json.dumps(describe_model(module), sort_keys=True))
    return found


def shapes(module: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in module.state_dict().items()]


width = st.integers(1, 5)
flag = st.booleans()
LAYERS = st.one_of(
    st.builds(nn.Linear, width, width, bias=flag),
    st.builds(nn.Conv2d, width, width, st.integers(1, 3) | st.tuples(width, width), padding=st.just("same") | width),
    st.builds(nn.Conv1d, st.just(2), st.just(4), width, groups=st.sampled_from([1, 2]), bias=flag),
    st.builds(nn.BatchNorm2d, width, eps=st.just(1e-3), momentum=st.just(0.2), affine=flag, track_running_stats=flag),
    st.builds(nn.LayerNorm, width | st.tuples(width, width), elementwise_affine=flag, bias=flag),
    st.builds(nn.GroupNorm, st.just(1), width, affine=flag),
    st.builds(nn.Embedding, width, width, padding_idx=st.none() | st.just(0)),
    st.builds(nn.MaxPool2d, st.integers(1, 3), stride=st.none() | st.integers(1, 3), ceil_mode=flag),
    st.builds(nn.AdaptiveAvgPool2d, width | st.tuples(st.none(), width)),
    st.builds(nn.Dropout, st.floats(0, 1), inplace=flag),
    st.builds(nn.LeakyReLU, st.floats(0, 1)),
    st.builds(nn.GELU, st.sampled_from(["none", "tanh"])),
    st.builds(nn.Flatten, st.integers(1, 2)),
    st.builds(nn.PReLU, width),
    st.builds(nn.ReLU),
)
TREES = st.recursive(
    st.lists(LAYERS, max_size=5).map(lambda layers: nn.Sequential(*layers)),
    lambda inner: st.lists(inner | LAYERS, max_size=4).map(lambda layers: nn.Sequential(*layers)),
    max_leaves=4,
)


@settings(max_examples=40, deadline=None)
@given(TREES, st.booleans())
def test_sequential_trees_round_trip_through_json(module: nn.Module, double: bool) -> None:
    module = module.double() if double else module
    again = rebuild_model(stored(module), "run")
    assert repr(again) == repr(module)
    assert shapes(again) == shapes(module)


@settings(max_examples=30, deadline=None)
@given(LAYERS)
def test_a_single_layer_round_trips(layer: nn.Module) -> None:
    assert repr(rebuild_model(stored(layer), "run")) == repr(layer)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(*[layer for _ in range(7) for layer in (nn.Linear(3, 3), nn.Tanh())]),  # "10" sorts before "2"
        nn.Sequential(OrderedDict(z=nn.Linear(3, 4), b=nn.ReLU(), a=nn.Linear(4, 3))),
        nn.Sequential(nn.Linear(3, 3), relu := nn.ReLU(), nn.Linear(3, 3), relu, nn.Linear(3, 3)),
    ],
    ids=["many layers", "names", "one activation used twice"],
)
def test_the_order_of_the_layers_is_kept(module: nn.Sequential) -> None:
    again = rebuild_model(stored(module), "run")
    again.load_state_dict(module.state_dict())
    x = torch.linspace(-2, 2, 12).reshape(4, 3)
    assert torch.equal(again(x), module(x))


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    return module


def used_twice() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer)


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3))
    module[0].register_forward_hook(lambda *_: None)
    return module


def patched() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3))
    module[0].forward = lambda x: x
    return module


@pytest.mark.parametrize(
    "make",
    [
        NormedMlp,
        lambda: nn.Sequential(nn.Linear(2, 2), Plain()),
        lambda: OwnLinear(2, 2),
        lambda: nn.Sequential(nn.GRU(2, 3)),
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.Sequential(nn.Linear(np.int64(3), 3)),
        tied,
        used_twice,
        hooked,
        patched,
    ],
    ids=[
        "class",
        "class inside",
        "subclass",
        "gru",
        "attention",
        "numpy argument",
        "tied",
        "used twice",
        "hook",
        "patch",
    ],
)
def test_what_is_not_surely_the_same_has_no_layers(make: Callable[[], nn.Module]) -> None:
    about = describe_model(make())
    assert about.keys() == {"class", "dtype", "text"}


class TestBuiltIn:
    def test_by_its_spec(self) -> None:
        module = models.build("resnet20", classes=4, input_shape=(1, 8, 8), norm="group").double()
        about = stored(module)
        assert about["spec"]["name"] == "resnet20"
        assert shapes(rebuild_model(about, "run")) == shapes(module)

    def test_one_that_was_changed_is_no_longer_built_in(self) -> None:
        module = models.build("mlp", classes=4, input_shape=(6,))
        module.head = nn.Linear(64, 9)
        about = stored(module)
        assert "spec" not in about
        assert shapes(rebuild_model(about, "run")) == shapes(module)


class TestClasses:
    def test_one_that_needs_no_arguments(self) -> None:
        assert isinstance(rebuild_model(stored(Plain()), "run"), Plain)
        assert isinstance(rebuild_model(stored(NoInit()), "run"), NoInit)

    @pytest.mark.parametrize("module", [Precise(), Precise().double()])
    def test_types_are_kept(self, module: nn.Module) -> None:
        assert shapes(rebuild_model(stored(module), "run")) == shapes(module)

    @pytest.mark.parametrize("module", [Needy(3), Plain(width=5), Plain(dropout=0.5)])
    def test_one_that_was_given_arguments_is_asked_for(self, module: nn.Module) -> None:
        name = type(module).__name__
        with pytest.raises(InputError) as caught:
            rebuild_model(stored(module), "runs/mine")
        assert str(caught.value) == (
            f"runs/mine holds weights of your class {name}: pass one, as in load('runs/mine', model={name}(...))"
        )

    def test_one_that_is_not_a_module(self) -> None:
        for name in ("pathlib:Path", "os:system", "builtins:print", "nowhere:Net", "torch.nn", ""):
            with pytest.raises(InputError, match="holds weights of your class"):
                rebuild_model({"class": name, "dtype": "float32", "text": ""}, "run")


class TestNothingIsImportedOrCalled:
    @pytest.fixture
    def intruder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        """The name of a module that could be imported, but is not."""
        source = "from torch import nn\nclass Net(nn.Module): pass\n"
        (tmp_path / "intruder_of_rebuild.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        return "intruder_of_rebuild"

    def spec(self, name: str, **options: Any) -> dict[str, Any]:
        spec = {"name": name, "classes": 2, "input_shape": [4], "options": options}
        return {"class": name, "dtype": "float32", "spec": spec}

    def test_by_class(self, intruder: str) -> None:
        with pytest.raises(InputError):
            rebuild_model({"class": f"{intruder}:Net", "dtype": "float32", "text": ""}, "run")
        assert intruder not in sys.modules

    def test_by_spec(self, intruder: str) -> None:
        with pytest.raises(InputError) as caught:
            rebuild_model(self.spec(f"{intruder}:Net", hidden=3), "run")
        assert intruder not in sys.modules
        call = f"models.build('{intruder}:Net', classes=2, input_shape=(4,), hidden=3)"
        assert str(caught.value) == f"run names code of yours: pass its model, as in load(..., model={call})"

    def test_a_function_that_is_there_is_not_called(self, tmp_path: Path) -> None:
        with pytest.raises(InputError):
            rebuild_model(self.spec("os:mkdir", path=str(tmp_path / "made")), "run")
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("name", ["functional", "Parameter", "modules.linear.Linear", "__builtins__", "os"])
    def test_layers_are_layers_of_torch(self, name: str) -> None:
        about = {"class": "x:y", "dtype": "float32", "layers": {"class": name, "arguments": {}}}
        with pytest.raises(InputError, match=r"is not a layer of torch\.nn"):
            rebuild_model(about, "run")


def test_describing_and_rebuilding_leave_the_random_state_alone() -> None:
    modules = [nn.Sequential(nn.Linear(3, 3)), models.build("mlp"), Plain()]
    before = torch.get_rng_state()
    for module in modules:
        rebuild_model(stored(module), "run")
    assert torch.equal(torch.get_rng_state(), before)


def test_with_frozen() -> None:
    module = Plain()
    frozen = with_frozen(module, ["layer.weight", "not a parameter"])
    assert [p.requires_grad for p in frozen.parameters()] == [False, True]
    assert [p.requires_grad for p in module.parameters()] == [True, True]
    assert with_frozen(frozen, ["layer.weight"]) is frozen
    assert [p.requires_grad for p in with_frozen(frozen, []).parameters()] == [True, True]
