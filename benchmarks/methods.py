"""Seconds per pass of every method on ConvNet, against FedAvg's; exit 1 if one exceeds its bound.

A pass is one sample once through the network. A backward pass counts as two forward ones, as it computes the gradients
of the weights and of the activations; so a training step is 3 per sample, and scoring a sample, as Meta-BayFL does on
d_n, 1. Otherwise a method that scores a lot would look fast. What is left between methods is what they do besides:
sampling weights, pulls, copies, differences.

Methods take turns at one client's real round, another one first each time; CPU time, as the machine is shared.

Usage: python benchmarks/methods.py [--turns 15] [--methods a,b] [--json FILE]
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

import metabayfl as mb
from metabayfl.config import Plan
from metabayfl.engine.plan import Job, make_job
from metabayfl.engine.process import keep_heap
from metabayfl.methods import METHODS
from metabayfl.randomness import keyed_globals
from metabayfl.types import Delivered, Fit, Params

BOUND = 1.10
BASELINE = "fedavg"
CLIENTS, SAMPLES, EPOCHS, BATCH = 2, 640, 2, 32
"""A client of configs/bench_small.toml."""
BACKWARD = 2
"""Forward passes that a backward one counts as."""


class Turn(NamedTuple):
    """What one client's round took."""

    seconds: float
    passes: int


class Player:
    """A method on its own task, before its second round, so that there is a state."""

    def __init__(self, name: str) -> None:
        self.job = make_convnet_job(name)
        ctx = self.job.context(0)
        self.server = self.job.method.init_server(ctx)
        fits = [
            self.fit(client, self.job.method.init_client(self.job.context(0, client)), 0) for client in self.clients
        ]
        updates = [Delivered(client, *fit.update) for client, fit in zip(self.clients, fits, strict=True)]
        self.server = self.job.method.aggregate(self.server, updates, ctx)
        self.state = fits[0].state

    @property
    def clients(self) -> list[int]:
        """Who takes part."""
        return self.job.participants(0)

    def fit(self, client: int, state: Params, round_: int) -> Fit:
        """Let a client take part in a round."""
        ctx = self.job.context(round_, client)
        with keyed_globals(round_, client):
            down = self.job.method.broadcast(self.server, ctx)
            return self.job.method.fit(down, state, self.job.train_data(client, round_), ctx)

    def turn(self) -> Turn:
        """Time the first client's second round."""
        task = self.job.task
        task.forward_passes = task.backward_passes = 0
        started = time.process_time()
        self.fit(0, self.state, 1)
        return Turn(time.process_time() - started, task.forward_passes + BACKWARD * task.backward_passes)


def make_convnet_job(name: str) -> Job:
    """Join a method at its default options with ConvNet and images of noise."""
    rng = torch.Generator().manual_seed(0)
    samples = SAMPLES // CLIENTS if METHODS[name].pools else SAMPLES
    pairs = [
        (torch.rand(samples, 3, 32, 32, generator=rng), torch.randint(10, (samples,), generator=rng))
        for _ in range(CLIENTS)
    ]
    pool = torch.rand(BATCH, 3, 32, 32, generator=rng)
    federation = mb.Federation.from_arrays(
        pairs, pairs[0], test_fraction=0, batch_size=BATCH, classes=10, unlabelled=pool
    )
    module = mb.models.build("convnet", dropout=0.2)
    return make_job(METHODS[name](epochs=EPOCHS), module, federation, Plan(rounds=2))


def measure(names: Sequence[str], turns: int) -> dict[str, list[Turn]]:
    """Let the methods take turns; the first turn of each warms up."""
    players = {name: Player(name) for name in names}
    found: dict[str, list[Turn]] = {name: [] for name in names}
    for number in range(-1, turns):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            turn = players[name].turn()
            if number >= 0:
                found[name].append(turn)
    return found


def ratio(ours: Sequence[Turn], baseline: Sequence[Turn]) -> float:
    """Median of the quotients of seconds per pass within a turn: what slows the machine slows both."""
    return median(
        (a.seconds / a.passes) / (b.seconds / b.passes) for a, b in zip(ours, baseline, strict=True)
    )  # fmt: skip


def main() -> int:
    """Measure, print, write; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--methods", default=",".join(METHODS), help="names, comma-separated (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_heap()
    names = [BASELINE, *(name for name in options.methods.split(",") if name != BASELINE)]
    found = measure(names, options.turns)
    ratios = {name: ratio(turns, found[BASELINE]) for name, turns in found.items()}
    print(
        f"ConvNet, one thread, {SAMPLES} samples, {EPOCHS} epochs, batch {BATCH}; passes, seconds of a client's round"
    )
    for name, turns in found.items():
        seconds = median(turn.seconds for turn in turns)
        verdict = "" if ratios[name] <= BOUND else "  ABOVE THE BOUND"
        print(f"  {name:20}{turns[0].passes:8}{seconds:9.3f} s{ratios[name]:8.3f}x per pass{verdict}")
    good = all(value <= BOUND for value in ratios.values())
    print(f"{'pass' if good else 'FAIL'}: seconds per pass, bound {BOUND:.2f}x of {BASELINE}")
    if options.json:
        numbers = {name: {"ratio": ratios[name], "turns": [turn._asdict() for turn in found[name]]} for name in names}
        options.json.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
