"""How fast mini-batches come: bytes picked out, turned into numbers and normalised, against what the ConvNet consumes.

10,000 CIFAR-sized images as bytes, batch 32, one thread. The ratio is samples per second of the iterator over samples
per second of a FedAvg step, in CPU seconds taken in turns.

Usage: python benchmarks/batches.py [--turns 5]
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from itertools import islice

import torch
from torch import Tensor

import metabayfl as mb
from metabayfl.data.augment import crop_and_flip
from metabayfl.engine.process import keep_heap
from metabayfl.inputs import Scaling
from metabayfl.likelihood import Categorical
from metabayfl.optim import PointLoss, make_optimiser
from metabayfl.task import Task
from metabayfl.types import TrainData

LIMIT = 20.0
IMAGES, STEPS = 10_000, 40
CIFAR = Scaling((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
Batches = Iterable[tuple[Tensor, Tensor]]


def timed(consume: Callable[[Batches], None], data: TrainData) -> float:
    """CPU seconds for some mini-batches."""
    batches = islice(data.batches(1, torch.Generator().manual_seed(1)), STEPS)
    started = time.process_time()
    consume(batches)
    return time.process_time() - started


def main() -> int:
    """Measure and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_heap()
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(256, (IMAGES, 3, 32, 32), dtype=torch.uint8, generator=rng)
    y = torch.randint(10, (IMAGES,), generator=rng)
    plain, augmented = TrainData(x, y, x[:0], y[:0]), TrainData(x, y, x[:0], y[:0], augment=crop_and_flip)
    task = Task(mb.models.build("convnet"), Categorical(10), scaling=CIFAR)
    loss = PointLoss(task, task.initial())
    optimiser = make_optimiser("adam", loss.groups)

    def prepare(batches: Batches) -> None:
        for inputs, _ in batches:
            task.prepare(inputs)

    def train(batches: Batches) -> None:
        for inputs, labels in batches:
            loss(inputs, labels)
            optimiser.step(1e-3)

    found: dict[str, list[float]] = {}
    for _ in range(options.turns):
        training = timed(train, plain)
        for name, data in (("plain", plain), ("cropped and flipped", augmented)):
            found.setdefault(name, []).append(training / timed(prepare, data))
    ratios = {name: statistics.median(values) for name, values in found.items()}
    for name, ratio in ratios.items():
        judged = f"(limit {LIMIT:g}) {'ok' if ratio >= LIMIT else 'MISSED'}" if name == "plain" else ""
        print(f"{name:20} {ratio:5.1f}x of what the ConvNet consumes {judged}")
    return 0 if ratios["plain"] >= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
