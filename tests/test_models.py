import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from metabayfl.models import NAMES, build
from metabayfl.types import InputError


class Tiny(nn.Module):
    def __init__(self, classes: int, width: int = 3) -> None:
        super().__init__()
        self.fc = nn.Linear(width, classes)


def takes_everything(**options: object) -> nn.Module:
    module = nn.Identity()
    module.seen = options  # type: ignore[assignment]
    return module


def takes_nothing() -> nn.Module:
    return nn.Identity()


def not_a_module(classes: int) -> int:
    return classes


def needs_more(classes: int, depth: int) -> nn.Module:
    return nn.Linear(classes, depth)


NUMBER = 5


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def of_type(module: nn.Module, kind: type[nn.Module]) -> list[str]:
    return [name for name, layer in module.named_modules() if isinstance(layer, kind)]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("linear", 30_730),
        ("mlp", 3072 * 64 + 64 + 64 * 10 + 10),
        ("convnet", 122_570),
        ("resnet20", 269_722),
        ("resnet32", 464_154),
        ("resnet44", 658_586),
        ("resnet56", 853_018),
    ],
)
def test_parameter_counts_and_output(name: str, parameters: int) -> None:
    module = build(name)
    assert count(module) == parameters
    assert module(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_names_are_the_built_ins() -> None:
    assert NAMES == ("linear", "mlp", "convnet", "resnet20", "resnet32", "resnet44", "resnet56")


@pytest.mark.parametrize("name", ["linear", "mlp"])
@pytest.mark.parametrize("shape", [(5,), (1, 8, 8), (2, 3)])
def test_flattening_nets_take_any_shape(name: str, shape: tuple[int, ...]) -> None:
    assert build(name, classes=3, input_shape=shape)(torch.randn(4, *shape)).shape == (4, 3)


@pytest.mark.parametrize("name", ["convnet", "resnet20"])
@pytest.mark.parametrize("shape", [(1, 18, 18), (1, 28, 28), (3, 33, 19), (4, 64, 32)])
def test_image_nets_take_other_sizes_and_channels(name: str, shape: tuple[int, ...]) -> None:
    assert build(name, classes=7, input_shape=shape)(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 9, 11)])
def test_resnet_takes_small_images(shape: tuple[int, ...]) -> None:
    assert build("resnet20", input_shape=shape)(torch.randn(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "shape", "least"),
    [("convnet", (1, 8, 8), 18), ("convnet", (3, 32, 17), 18), ("resnet20", (1, 7, 8), 8), ("resnet20", (64,), 8)],
)
def test_images_that_do_not_fit_are_refused(name: str, shape: tuple[int, ...], least: int) -> None:
    with pytest.raises(InputError, match=rf"{shape[-1]},?\).*at least {least}"):
        build(name, input_shape=shape)


def test_convnet_without_padding_needs_18() -> None:
    net = build("convnet", input_shape=(1, 18, 18))
    assert isinstance(net, nn.Sequential)
    features = net[: list(dict(net.named_children())).index("flatten")]
    assert features(torch.randn(1, 1, 18, 18)).shape == (1, 64, 1, 1)
    with pytest.raises(RuntimeError):
        features(torch.randn(1, 1, 17, 17))


def test_group_norm_has_no_buffers_and_as_many_parameters() -> None:
    module = build("resnet20", norm="group")
    assert count(module) == 269_722
    assert not list(module.buffers())
    assert len(of_type(module, nn.GroupNorm)) == 19
    assert all(layer.num_groups == 8 for layer in module.modules() if isinstance(layer, nn.GroupNorm))
    assert module(torch.randn(1, 3, 8, 8)).shape == (1, 10)


def test_shortcut_subsamples_and_pads_on_both_sides() -> None:
    block = build("resnet20").get_submodule("stage2.0")
    nn.init.zeros_(block.get_parameter("norm2.weight"))
    x = torch.rand(2, 16, 6, 6)
    out = block(x)
    torch.testing.assert_close(out[:, 8:24], x[:, :, ::2, ::2])
    assert out[:, :8].abs().sum() == 0 == out[:, 24:].abs().sum()


def test_resnet_convolutions_are_kaiming_normal() -> None:
    torch.manual_seed(0)
    weight = build("resnet20").get_parameter("stage3.2.conv2.weight")
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (64 * 9)), rel=0.02)


@pytest.mark.parametrize(
    ("name", "options", "places"),
    [
        ("mlp", {"hidden": [5, 4]}, ["dropout1", "dropout2"]),
        ("convnet", {}, ["dropout1", "dropout2"]),
        ("resnet20", {}, ["dropout1", "dropout2", "dropout3", "dropout4"]),
    ],
)
def test_dropout_is_there_only_if_positive(name: str, options: dict[str, object], places: list[str]) -> None:
    plain, dropping = build(name, **options), build(name, dropout=0.3, **options)
    assert of_type(plain, nn.Dropout) == []
    assert of_type(dropping, nn.Dropout) == places
    assert all(layer.p == 0.3 for layer in dropping.modules() if isinstance(layer, nn.Dropout))
    assert plain.state_dict().keys() == dropping.state_dict().keys()


def test_order_of_the_dropout_layers() -> None:
    def before(net: nn.Module, name: str) -> str:
        children = [child for child, _ in net.named_children()]
        return children[children.index(name) - 1]

    assert [before(build("convnet", dropout=0.1), place) for place in ("dropout1", "dropout2")] == ["relu3", "relu4"]
    resnet = build("resnet20", dropout=0.1)
    assert [before(resnet, place) for place in ("dropout1", "dropout2", "dropout3")] == ["stage1", "stage2", "stage3"]
    assert before(resnet, "fc") == "dropout4"
    assert before(build("mlp", dropout=0.1), "dropout1") == "relu1"


@pytest.mark.parametrize(
    "make",
    [
        lambda: build("linear", classes=3, input_shape=(4,)),
        lambda: build("mlp", input_shape=(4,), hidden=(6, 5), dropout=0.5),
        lambda: build("convnet", classes=4, input_shape=(1, 20, 20)),
        lambda: build("resnet20", norm="group", dropout=0.2),
        lambda: build(f"{__name__}:Tiny", classes=4, width=6),
    ],
)
def test_spec_rebuilds_the_module(make: Callable[[], nn.Module]) -> None:
    module = make()
    spec = json.loads(json.dumps(module.metabayfl_spec))
    assert spec == module.metabayfl_spec
    again = build(spec["name"], classes=spec["classes"], input_shape=tuple(spec["input_shape"]), **spec["options"])
    assert again.metabayfl_spec == spec
    assert repr(again) == repr(module)
    again.load_state_dict(module.state_dict())


def test_spec_content() -> None:
    assert build("mlp", classes=3, input_shape=(4, 2), hidden=(6, 5)).metabayfl_spec == {
        "name": "mlp",
        "classes": 3,
        "input_shape": [4, 2],
        "options": {"hidden": [6, 5]},
    }


def test_import_path_gets_what_it_accepts() -> None:
    assert build(f"{__name__}:Tiny", classes=4, width=6).get_parameter("fc.weight").shape == (4, 6)
    assert isinstance(build(f"{__name__}:takes_nothing"), nn.Identity)
    seen = build(f"{__name__}:takes_everything", classes=2, input_shape=(5,), depth=1).seen
    assert seen == {"classes": 2, "input_shape": (5,), "depth": 1}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet18", {}, "'resnet18' is unknown.*linear, mlp, convnet, resnet20.*module:callable"),
        ("", {}, "'' is unknown"),
        ("nowhere_to_be_found:net", {}, "cannot be imported.*nowhere_to_be_found"),
        (f"{__name__}:missing", {}, "cannot be imported.*missing"),
        (f"{__name__}:NUMBER", {}, "is a int"),
        (f"{__name__}:not_a_module", {}, "returned int.*torch.nn.Module"),
        (f"{__name__}:needs_more", {}, "missing a required argument: 'depth'"),
        (f"{__name__}:Tiny", {"depth": 2}, "unknown option depth = 2; accepted: width"),
        (f"{__name__}:Tiny", {"width": nn.ReLU}, "width = .*cannot be stored"),
        ("linear", {"dropout": 0.1}, "unknown option dropout = 0.1; accepted: none"),
        ("resnet20", {"blocks": 3}, "unknown option blocks = 3; accepted: norm, dropout"),
        ("mlp", {"hiden": [3]}, r"unknown option hiden = \[3\]; accepted: hidden, dropout"),
        ("mlp", {"hidden": [3, 0]}, "hidden = 0: give a whole number of at least 1"),
        ("mlp", {"hidden": 64}, r"hidden = 64.*\[64, 64\]"),
        ("mlp", {"hidden": []}, r"hidden = \[\]"),
        ("mlp", {"dropout": 1.0}, "dropout = 1.0.*below 1"),
        ("mlp", {"dropout": float("nan")}, "dropout = nan cannot be stored"),
        ("convnet", {"dropout": "0.1"}, "dropout = '0.1'"),
        ("resnet20", {"norm": "layer"}, "norm = 'layer': accepted: batch, group"),
        ("linear", {"classes": 0}, "classes = 0"),
        ("linear", {"classes": 2.5}, "classes = 2.5"),
        ("linear", {"input_shape": ()}, r"input_shape = \(\)"),
        ("linear", {"input_shape": (3, -1)}, "input_shape = -1"),
    ],
)
def test_bad_requests_get_one_line(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        build(name, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
