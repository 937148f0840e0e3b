"""Time one training step, plain and Bayesian, ours and others'; exit 1 if our Bayesian step exceeds its bound."""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from metabayfl import models
from metabayfl.engine.process import keep_heap
from metabayfl.gaussian import Elbo, Prior, initial
from metabayfl.inspection import Bayesian
from metabayfl.likelihood import Categorical
from metabayfl.optim import Adam, Objective, PointLoss
from metabayfl.task import Task

Step = Callable[[Tensor, Tensor], object]
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Net(NamedTuple):
    """The largest ratio that our Bayesian step may have, and the steps of one turn (turns of similar length)."""

    bound: float
    steps: int


class Turns(NamedTuple):
    """What each turn of a variant took, per step."""

    seconds: list[float]
    faults: list[float]


NETS = {"convnet": Net(1.15, steps=5), "resnet20": Net(1.05, steps=1)}
PLAIN = ("plain, fused Adam", "plain, foreach Adam")
JUDGED = "ours, Bayesian all"
BATCH, WARM_UP = 32, 3
RATE, SIGMA, PRIOR_SIGMA, KL_SCALE = 1e-4, 0.02, 0.1, 1e-5


def plain(module: nn.Module, *, fused: bool) -> Step:
    """Return the step that anybody would write, in the faster memory format."""
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return _autograd_step(module, lambda net, x, y: cross_entropy(net(x), y), fused=fused)


def point(module: nn.Module) -> Step:
    """Return the step of FedAvg."""
    task = Task(module, Categorical(10))
    return _our_step(PointLoss(task, task.initial()))


def bayesian(module: nn.Module, layers: Bayesian) -> Step:
    """Return the step of BayFL, with its KL."""
    task = Task(module, Categorical(10), bayesian=layers)
    noise = torch.Generator().manual_seed(0)
    return _our_step(Elbo(task, initial(task, SIGMA), Prior(0.0, PRIOR_SIGMA), KL_SCALE, noise))


def bayesian_torch(module: nn.Module) -> Step | None:
    """Return a step of bayesian-torch, reparameterised."""
    try:
        from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss
    except ImportError:
        return None
    options = {"prior_mu": 0.0, "prior_sigma": PRIOR_SIGMA, "posterior_mu_init": 0.0, "posterior_rho_init": -4.0}
    dnn_to_bnn(module, options | {"type": "Reparameterization", "moped_enable": False})
    return _autograd_step(module, lambda net, x, y: cross_entropy(net(x), y) + KL_SCALE * get_kl_loss(net))


def torchbnn(module: nn.Module) -> Step | None:
    """Return a step of torchbnn."""
    try:
        from torchbnn import BayesConv2d, BayesLinear, BKLLoss
    except ImportError:
        return None
    _swap(module, nn.Conv2d, lambda old: BayesConv2d(0.0, PRIOR_SIGMA, **_convolution(old)))
    _swap(module, nn.Linear, lambda old: BayesLinear(0.0, PRIOR_SIGMA, old.in_features, old.out_features))
    kl = BKLLoss(reduction="sum")
    return _autograd_step(module, lambda net, x, y: cross_entropy(net(x), y) + KL_SCALE * kl(net).sum())


def blitz(module: nn.Module) -> Step | None:
    """Return a step of blitz."""
    try:
        from blitz.losses import kl_divergence_from_nn as kl
        from blitz.modules import BayesianConv2d, BayesianLinear
    except ImportError:
        return None
    _swap(module, nn.Conv2d, lambda old: BayesianConv2d(**_convolution(old)))
    _swap(module, nn.Linear, lambda old: BayesianLinear(old.in_features, old.out_features))
    return _autograd_step(module, lambda net, x, y: cross_entropy(net(x), y) + KL_SCALE * kl(net))


def ivon(module: nn.Module) -> Step | None:
    """Return a step of the variational optimiser ivon-opt."""
    try:
        from ivon import IVON
    except ImportError:
        return None
    optimiser = IVON(module.parameters(), lr=RATE, ess=1 / KL_SCALE)

    def step(x: Tensor, y: Tensor) -> None:
        with optimiser.sampled_params(train=True):
            optimiser.zero_grad()
            cross_entropy(module(_channels_last(x)), y).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


VARIANTS: dict[str, Callable[[nn.Module], Step | None]] = {
    PLAIN[0]: lambda module: plain(module, fused=True),
    PLAIN[1]: lambda module: plain(module, fused=False),
    "ours, FedAvg": point,
    JUDGED: lambda module: bayesian(module, "all"),
    "ours, Bayesian dense": lambda module: bayesian(module, "dense"),
    "bayesian-torch": bayesian_torch,
    "torchbnn": torchbnn,
    "blitz": blitz,
    "ivon-opt": ivon,
}


def _autograd_step(module: nn.Module, loss: Loss, *, fused: bool = True) -> Step:
    optimiser = torch.optim.Adam(module.parameters(), lr=RATE, fused=fused, foreach=not fused)

    def step(x: Tensor, y: Tensor) -> None:
        optimiser.zero_grad()
        loss(module, _channels_last(x), y).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _our_step(objective: Objective) -> Step:
    optimiser = Adam(objective.groups)

    def step(x: Tensor, y: Tensor) -> None:
        objective(x, y)
        optimiser.step(RATE)

    return step


def _swap(module: nn.Module, kind: type[nn.Module], make: Callable[[Any], nn.Module]) -> None:
    for name, child in module.named_children():
        if isinstance(child, kind):
            setattr(module, name, make(child))
        else:
            _swap(child, kind, make)


def _convolution(layer: nn.Conv2d) -> dict[str, Any]:
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding")
    return {name: getattr(layer, name) for name in names} | {"bias": layer.bias is not None}


def build_steps(net: str) -> Iterator[tuple[str, Step | None]]:
    """Build each variant on a fresh module with the same weights."""
    for name, make in VARIANTS.items():
        torch.manual_seed(0)
        yield name, make(models.build(net))


def take_turns(steps: dict[str, Step], count: int, repetitions: int) -> dict[str, Turns]:
    """Let the variants take turns of `count` steps, another one first each time; CPU time, as the machine is shared."""
    batches = [(torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))) for _ in range(count)]
    turns = {name: Turns([], []) for name in steps}
    names = list(steps)
    for repetition in range(-WARM_UP, repetitions):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
            for x, y in batches:
                steps[name](x, y)
            seconds = time.process_time() - start
            if repetition >= 0:
                turns[name].seconds.append(seconds / count)
                turns[name].faults.append((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / count)
    return turns


def measure(net: str, repetitions: int) -> dict[str, Any]:
    """Time all variants that can be built on one network and judge ours."""
    built = dict(build_steps(net))
    present = {name: step for name, step in built.items() if step is not None}
    turns = take_turns(present, NETS[net].steps, repetitions)
    baseline = min(PLAIN, key=lambda name: _ratio(turns[name], turns[PLAIN[0]]))
    ratios = {name: _ratio(turn, turns[baseline]) for name, turn in turns.items()}
    return {
        "milliseconds": {name: 1e3 * median(turn.seconds) for name, turn in turns.items()},
        "page_faults": {name: fmean(turn.faults) for name, turn in turns.items()},
        "ratios": ratios,
        "baseline": baseline,
        "bound": NETS[net].bound,
        "passed": ratios[JUDGED] <= NETS[net].bound,
        "not_importable": [name for name, step in built.items() if step is None],
    }


def _ratio(turns: Turns, baseline: Turns) -> float:
    """Median of the quotients within a repetition: what slows the machine slows both."""
    return median(ours / theirs for ours, theirs in zip(turns.seconds, baseline.seconds, strict=True))


def show(net: str, result: dict[str, Any]) -> None:
    """Print the table of one network."""
    print(f"\n{net}: one step, batch {BATCH}, one thread; ratio to {result['baseline']}")
    for name, value in result["milliseconds"].items():
        faults = result["page_faults"][name]
        print(f"  {name:24}{value:9.2f} ms{result['ratios'][name]:8.3f}x{faults:8.0f} page faults")
    verdict = "pass" if result["passed"] else "FAIL"
    print(f"  {verdict}: {JUDGED} {result['ratios'][JUDGED]:.3f}x, bound {result['bound']:.2f}x")
    if result["not_importable"]:
        print(f"  not importable: {', '.join(result['not_importable'])}")


def main() -> int:
    """Measure, print, write; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=60, help="turns of each variant")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error(f"--repetitions {options.repetitions}: give at least 1")
    torch.set_num_threads(1)
    keep_heap()
    results = {}
    for net in NETS:
        results[net] = measure(net, options.repetitions)
        show(net, results[net])
    if options.json:
        machine = {"torch": torch.__version__, "cpu_capability": torch.backends.cpu.get_cpu_capability()}
        run = {"batch": BATCH, "repetitions": options.repetitions, "nets": results}
        options.json.write_text(json.dumps(machine | run, indent=2) + "\n")
    return 0 if all(result["passed"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
