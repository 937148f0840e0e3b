"""What choosing a rate costs: a client's Meta-BayFL rounds against its FedAvg rounds with the same final steps.

5 local epochs, 3 candidates, batch 32, one thread, three rounds (rates are tried in one of them); d_n is 20 % of the
training part and held out for both. Methods take turns, and a ratio is the median over the turns of CPU seconds against
CPU seconds.

Usage: python benchmarks/selection.py [--turns 5] [--samples 640,6400] [--models convnet,resnet20]
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace

import torch

import metabayfl as mb
from metabayfl.engine.process import keep_heap
from metabayfl.likelihood import Categorical
from metabayfl.methods.base import Method, make_task
from metabayfl.types import Context, Params, TrainData

LIMIT = 1.25
EPOCHS, CLASSES, ROUNDS = 5, 10, 3
METHODS: dict[str, Method] = {
    "fedavg": mb.FedAvg(epochs=EPOCHS, optimiser="sgd"),
    "bayfl": mb.BayFL(epochs=EPOCHS),
    "meta-bayfl": mb.MetaBayFL(epochs=EPOCHS, rates=(1e-4, 1e-3, 1e-2)),
}


def client_data(samples: int) -> TrainData:
    """Return images and labels, so many for training and a quarter as many in d_n."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(256, (samples + samples // 4, 3, 32, 32), dtype=torch.uint8, generator=rng)
    y = torch.randint(CLASSES, (len(x),), generator=rng)
    return TrainData(x[:samples], y[:samples], x[samples:], y[samples:])


def seconds_of(method: Method, ctx: Context, data: TrainData) -> float:
    """CPU seconds of a client's fits in three rounds; a guard that allows everything lets all rates be tried."""
    down = method.init_server(ctx)
    down |= {"guard": torch.ones(1, dtype=torch.float64)} if "guard" in down else {}
    state: Params = {}
    started = time.process_time()
    for round_ in range(ROUNDS):
        state = method.fit(down, state, data, replace(ctx, round=round_, rounds=ROUNDS)).state
    return time.process_time() - started


def ratios(model: str, samples: int, turns: int) -> dict[str, float]:
    """Median ratio of each method's seconds to FedAvg's in the same turn."""
    data, module = client_data(samples), mb.models.build(model)
    contexts = {
        name: Context(make_task(method, module, Categorical(CLASSES)), client=0, clients={0: samples})
        for name, method in METHODS.items()
    }
    found: dict[str, list[float]] = {}
    for _ in range(turns):
        seconds = {name: seconds_of(method, contexts[name], data) for name, method in METHODS.items()}
        for name, value in seconds.items():
            found.setdefault(name, []).append(value / seconds["fedavg"])
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> int:
    """Measure and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--samples", default="640,6400")
    parser.add_argument("--models", default="convnet,resnet20")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_heap()
    good = True
    for model in options.models.split(","):
        for samples in map(int, options.samples.split(",")):
            found = ratios(model, samples, options.turns)
            verdict = found["meta-bayfl"] <= LIMIT
            good = good and verdict
            text = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in found.items())
            print(f"{model:9} {samples:5} samples: {text} (limit {LIMIT}) {'ok' if verdict else 'MISSED'}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
