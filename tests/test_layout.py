import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from metabayfl.layout import Layout, Slot
from metabayfl.likelihood import Categorical
from metabayfl.options import InputError
from metabayfl.task import Task
from strangers import STRANGERS, Cnn, meet

shapes = st.lists(st.lists(st.integers(1, 4), max_size=4), min_size=1, max_size=5)


def layout_of(*sizes: list[int]) -> Layout:
    """Four-dimensional tensors are convolution weights."""
    return Layout.of((f"t{i}", torch.Size(shape), len(shape) == 4) for i, shape in enumerate(sizes))


@given(shapes)
@settings(deadline=None, max_examples=50)
def test_slots_cover_the_vector_without_overlap(sizes: list[list[int]]) -> None:
    layout = layout_of(*sizes)
    flat = torch.zeros(layout.size)
    for number, slot in enumerate(layout.slots):
        slot.view(flat).add_(number + 1)
    counts = [slot.shape.numel() for slot in layout.slots]
    assert flat.tolist() == [float(number + 1) for number, count in enumerate(counts) for _ in range(count)]


@given(shapes)
@settings(deadline=None, max_examples=50)
def test_unflatten_and_flatten_undo_each_other(sizes: list[list[int]]) -> None:
    layout = layout_of(*sizes)
    flat = torch.arange(float(layout.size), dtype=torch.float64)
    named = layout.unflatten(flat)
    assert [tensor.shape for tensor in named.values()] == [slot.shape for slot in layout.slots]
    assert all(tensor.is_contiguous() for tensor in named.values())
    again = layout.flatten(named)
    assert again.dtype == flat.dtype
    assert torch.equal(again, flat)


def test_channels_last_order() -> None:
    slot = Slot("weight", torch.Size([1, 2, 1, 3]), start=1, channels_last=True)
    view = slot.view(torch.arange(8.0))
    assert view.tolist() == [[[[1.0, 3.0, 5.0]], [[2.0, 4.0, 6.0]]]]
    assert view.is_contiguous(memory_format=torch.channels_last)


def test_unflatten_copies_and_covers_a_beginning() -> None:
    layout = layout_of([2], [3], [2, 2, 2, 2])
    beginning = torch.arange(5.0)
    named = layout.unflatten(beginning)
    assert list(named) == ["t0", "t1"]
    beginning.zero_()
    assert named["t1"].tolist() == [2.0, 3.0, 4.0]
    assert torch.equal(layout.flatten(named), torch.arange(5.0))


def test_nothing_is_a_layout_too() -> None:
    empty = layout_of()
    assert empty.size == 0
    assert empty.unflatten(torch.empty(0)) == {}
    assert len(empty.flatten({})) == 0


def test_missing_and_unknown_tensors_are_refused() -> None:
    layout = layout_of([2], [3], [4])
    with pytest.raises(InputError, match="missing or unknown: t1, t2"):
        layout.flatten({"t0": torch.zeros(2), "t2": torch.zeros(4)})
    with pytest.raises(InputError, match="missing or unknown: t3"):
        layout.flatten({f"t{i}": torch.zeros(i + 2) for i in range(4)})


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_vector_by_name_is_the_state_of_the_module(kind: type[nn.Module]) -> None:
    module, _, _ = meet(kind)
    task = Task(module, Categorical(3), bayesian="all")
    state = module.state_dict()
    named = task.layout.unflatten(task.initial()["mu"])
    assert named.keys() == {name for name, p in module.named_parameters() if p.requires_grad}
    for name, tensor in named.items():
        assert torch.equal(tensor, state[name])
        assert tensor.stride() == state[name].stride()
    for name, parameter in task.module.named_parameters():
        channels_last = parameter.ndim == 4 and parameter.requires_grad
        assert parameter.is_contiguous(memory_format=torch.channels_last) or not channels_last, name


@pytest.mark.parametrize("batchnorm", ["average", "local"])
def test_a_model_by_name_and_back(batchnorm: str) -> None:
    task = Task(meet(Cnn)[0], Categorical(3), bayesian="all", batchnorm=batchnorm)  # type: ignore[arg-type]
    model = task.initial() | {"rho": torch.arange(float(task.bayesian_size))}
    for part in (model, task.split(model)[0]):
        again = task.from_named(task.named(part))
        assert again.keys() == part.keys()
        assert all(torch.equal(again[name], part[name]) for name in part)
    assert task.named(model)["rho.mix.weight"].shape == (5, 4, 2, 2)
    assert ("buffers.bn.running_var" in task.named(task.split(model)[0])) == (batchnorm == "average")
