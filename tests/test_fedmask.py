"""FedMask: a bit is a bit on the wire, gradients pass straight through, means are over those who have a unit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import metabayfl as mb
from federations import federation, network
from metabayfl.likelihood import Categorical
from metabayfl.methods import FedMask
from metabayfl.methods.fedmask import LEVELS, Masking, MaskLoss, pack, unpack
from metabayfl.task import Task
from metabayfl.types import Context, Update


def convolutional() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def context() -> Context:
    return Context(Task(convolutional(), Categorical(3), batchnorm="local"), client=0)


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_packing_is_undone_and_takes_one_bit_each(bits: list[bool]) -> None:
    packed = pack(torch.tensor(bits))
    assert packed.dtype == torch.uint8
    assert len(packed) == -(-len(bits) // 8)
    assert unpack(packed, len(bits)).tolist() == bits


def test_the_payload_is_one_bit_per_maskable_weight() -> None:
    """And one for each unit."""
    result = mb.federate(network(), federation(), FedMask(epochs=1), rounds=1)
    checkpoint = result.directory.checkpoint()
    assert checkpoint is not None
    payload = result.directory.read_client(checkpoint.latest[0]).payload
    maskable, units = 4 * 6 + 6 * 3, 6 + 3
    assert {name: len(tensor) for name, tensor in payload.items()} == {
        "mask": -(-maskable // 8),
        "units": -(-units // 8),
    }
    assert all(tensor.dtype == torch.uint8 for tensor in payload.values())
    assert result.metrics.keys() == {"P/L"}


def test_frozen_weights_have_one_size_in_each_tensor() -> None:
    """sqrt(2 / inputs of a unit), 8 and 16 here; the signs are those of the given weights."""
    signed, given_ = (Masking(context().task, frozen) for frozen in ("signed", "given"))
    assert signed.weights.abs().unique().tolist() == pytest.approx([(2 / 16) ** 0.5, (2 / 8) ** 0.5])
    assert torch.equal(signed.weights.sign(), given_.weights.sign())
    assert torch.equal(given_.weights, context().task.initial()["mu"][given_.places])


class TestLoss:
    def loss(self) -> MaskLoss:
        masking = Masking(context().task, "signed")
        units = torch.tensor([1, 0, 1, 1, 1, 1, 1]).bool()
        mean = torch.randint(LEVELS, masking.places.shape, generator=torch.Generator().manual_seed(0))
        return MaskLoss(masking, masking.task.initial(), mean, units)

    def test_the_gradient_passes_straight_through(self) -> None:
        """dL/db by autograd on a soft mask at the same place, times sigmoid'; biases have their own."""
        loss = self.loss()
        x, y = torch.randn(5, 2, 3, 3, generator=torch.Generator().manual_seed(1)), torch.arange(5) % 3
        loss(x, y)
        bits = loss.mask().float().requires_grad_()
        masking = Masking(loss.task, "signed")
        flat = loss.trained.clone().index_put((masking.places,), masking.weights * bits)
        named = {slot.name: slot.view(flat) for slot in loss.task.layout.slots}
        outputs = torch.func.functional_call(convolutional(), named, x)
        by_bit, by_weight = torch.autograd.grad(nn.functional.cross_entropy(outputs, y), [bits, flat])
        sigmoid = torch.sigmoid(loss.scores)
        expected = by_bit * sigmoid * (1 - sigmoid) * loss.owned
        expected = by_weight.index_put((loss.places,), expected)
        torch.testing.assert_close(loss.groups[0].gradient, expected, rtol=1e-4, atol=1e-6)

    def test_a_unit_that_is_not_there_is_zero_and_stays_so(self) -> None:
        loss = self.loss()
        assert not loss.model()["mu"][loss.places][8:16].any()
        loss(torch.randn(5, 2, 3, 3), torch.arange(5) % 3)
        assert not loss.groups[0].gradient[loss.places][8:16].any()

    def test_weights_are_only_switched(self) -> None:
        """Every masked weight is 0 or what was frozen, after any training."""
        result = mb.federate(network(), federation(), FedMask(epochs=3), rounds=2)
        masking = Masking(result.task, "signed")
        for client in range(3):
            used = result.model(client)["mu"][masking.places]
            assert ((used == 0) | (used == masking.weights)).all()
            assert 0 < (used != 0).double().mean() < 1


class TestMeans:
    def updates(self, ctx: Context) -> list[Update]:
        """All have the units of the last layer; only the first two that of the first, the third none of the second."""
        masking = Masking(ctx.task, "signed")
        units = [[1, 1, 0, 0, 1, 1, 1], [1, 1, 0, 0, 1, 1, 1], [0, 1, 0, 1, 1, 1, 1]]
        bits = [torch.ones(len(masking.places)), torch.zeros(len(masking.places)), torch.ones(len(masking.places))]
        return [
            Update({"mask": pack(mask.bool()), "units": pack(torch.tensor(unit).bool())}, weight, {})
            for unit, mask, weight in zip(units, bits, (1.0, 3.0, 4.0), strict=True)
        ]

    def test_are_over_those_who_have_the_unit(self) -> None:
        ctx = context()
        server = FedMask().init_server(ctx)
        server["mean"][:] = 77
        mean = FedMask().aggregate(server, self.updates(ctx), ctx)["mean"]
        first, second, nobody, alone = mean[:32].view(4, 8)
        assert set(first.tolist()) == {round(LEVELS / 4)}
        assert set(second.tolist()) == {round(LEVELS * 5 / 8)}
        assert set(nobody.tolist()) == {77}
        assert set(alone.tolist()) == {LEVELS}

    def test_one_client_gets_its_own_mask_back(self) -> None:
        ctx = context()
        bits = torch.rand(80, generator=torch.Generator().manual_seed(0)) < 0.5
        update = Update({"mask": pack(bits), "units": pack(torch.ones(7).bool())}, 1.0, {})
        mean = FedMask().aggregate(FedMask().init_server(ctx), [update], ctx)["mean"]
        scores = MaskLoss(Masking(ctx.task, "signed"), ctx.task.initial(), mean, torch.ones(7).bool())
        assert torch.equal(scores.mask(), bits)


@pytest.mark.parametrize("keep", [0.25, 0.5])
def test_the_best_units_of_each_layer_are_kept_and_all_outputs(keep: float) -> None:
    masking = Masking(context().task, "signed")
    scores = masking.spread(torch.tensor([3.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0]))
    expected = [True, False, keep > 0.4, False, True, True, True]
    assert masking.best_units(scores, keep).tolist() == expected


def test_it_learns_by_switching_alone() -> None:
    x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] + x[:, 1] > 0).long()
    fed = mb.Federation.from_arrays([(x[:200], y[:200]), (x[200:], y[200:])])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    result = mb.federate(model, fed, FedMask(), rounds=5)
    assert result.metrics["P/L"]["accuracy"]["mean"] > 0.9
