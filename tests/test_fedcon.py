"""FedCon: FedAvg without a contrast, a gradient against plain autograd, and models that it cannot take."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import metabayfl as mb
from federations import federation, network
from metabayfl.features import last_dense, watch
from metabayfl.likelihood import Categorical
from metabayfl.methods import FedAvg, FedCon
from metabayfl.methods.fedcon import Contrastive
from metabayfl.optim import PointLoss
from metabayfl.task import Task
from metabayfl.types import Context, Params
from test_fedphp import classes, gradient, moved
from test_local import same


def smooth() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def contrastive(task: Task, start: Params, previous: Params, contrast: float = 1.0) -> Contrastive:
    return Contrastive(task, start, previous, contrast, 0.5, last_dense("fedcon", task.module))


@pytest.mark.parametrize("batchnorm", ["average", "local"])
@pytest.mark.parametrize(("contrast", "rounds"), [(0.0, 3), (5.0, 1)], ids=["no contrast", "first round"])
def test_it_is_fedavg_bit_for_bit(contrast: float, rounds: int, batchnorm: str) -> None:
    methods = FedCon(contrast=contrast, epochs=1, batchnorm=batchnorm), FedAvg(epochs=1, batchnorm=batchnorm)
    runs = [mb.federate(network(), federation(), method, rounds=rounds) for method in methods]
    assert all(same(runs[0].model(client), runs[1].model(client)) for client in range(3))


def test_a_contrast_acts_from_the_second_round_on() -> None:
    runs = [
        mb.federate(network(), federation(), method, rounds=2)
        for method in (FedCon(epochs=1, contrast=5.0), FedAvg(epochs=1))
    ]
    assert not same(runs[0].model(0), runs[1].model(0))
    assert not FedCon(contrast=0.0).needs


class TestGradient:
    def test_against_autograd(self) -> None:
        """Of three separate modules, written down as in the paper."""
        data, task = classes(), Task(smooth(), Categorical(3))
        received, previous, here = (moved(task.initial(), seed) for seed in (1, 2, 3))
        objective = contrastive(task, received, previous, 0.7)
        objective.weights.copy_(here["mu"])
        found = gradient(objective, data)

        local, fixed, last = (task.export(model["mu"]) for model in (here, received, previous))
        z, z_fixed, z_last = (module[:2](data.x) for module in (local, fixed, last))
        positive, negative = ((nn.functional.cosine_similarity(z, o.detach()) / 0.5).exp() for o in (z_fixed, z_last))
        loss = (
            nn.functional.cross_entropy(local(data.x), data.y) - 0.7 * (positive / (positive + negative)).log().mean()
        )
        loss.backward()
        torch.testing.assert_close(found, torch.cat([p.grad.flatten() for p in local.parameters()]))

    def test_without_a_difference_there_is_no_contrast(self) -> None:
        data, task = classes(), Task(smooth(), Categorical(3))
        start = task.initial()
        objective = contrastive(task, start, start)
        torch.testing.assert_close(gradient(objective, data), gradient(PointLoss(task, start), data))
        assert objective.metrics()["contrast"] == pytest.approx(math.log(2))

    def test_training_goes_to_the_received_features(self) -> None:
        """From a place between, with the contrast alone all but deciding."""
        data, task = classes(), Task(smooth(), Categorical(3))
        received, previous = (moved(task.initial(), seed) for seed in (1, 2))
        objective = contrastive(task, received, previous, 1000.0)
        objective.weights.copy_((received["mu"] + previous["mu"]) / 2)
        objective(data.x, data.y)
        before = objective.last_contrast
        for _ in range(20):
            objective.weights.sub_(objective.groups[0].gradient, alpha=1e-5)
            objective(data.x, data.y)
        assert objective.last_contrast < before


class Twice(nn.Module):
    """Calls its last dense layer as often as it is told."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls, self.first, self.last = calls, nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.calls):
            x = self.last(x)
        return x


class TestFeatures:
    def test_they_go_into_the_last_layer(self) -> None:
        """Also of more samples than are evaluated at once; and no hook stays behind."""
        task, x = Task(smooth(), Categorical(3)), torch.randn(1100, 4, dtype=torch.float64)
        start = task.initial()
        layer = last_dense("fedcon", task.module)
        seen = watch(layer, lambda x: task.consult(start, x), x)
        torch.testing.assert_close(seen.features, copy.deepcopy(task.module)[:2](x).detach())
        assert not layer._forward_pre_hooks

    def test_a_last_layer_that_is_not_dense_is_refused(self) -> None:
        module = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten())
        with pytest.raises(mb.InputError, match=r"fedcon looks at what goes into the last dense layer, .* is Conv2d: "):
            FedCon().init_server(Context(Task(module, Categorical(3))))

    @pytest.mark.parametrize("calls", [0, 2])
    def test_a_layer_that_is_not_called_once_is_refused(self, calls: int) -> None:
        task, data = Task(Twice(calls).double(), Categorical(3)), classes()
        with pytest.raises(mb.InputError, match="must be called once for each sample"):
            contrastive(task, task.initial(), task.initial())(data.x, data.y)
