"""What a round costs: our engine against a minimal hand-written loop and against the usual DataLoader loop.

20 equal clients, ConvNet, FedAvg, one local epoch. Each variant runs in a process of its own; variants take turns.

Usage: python benchmarks/round.py [--turns 5] [--busy] [--json FILE]
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import metabayfl as mb

CLIENTS, SAMPLES, BATCH, ROUNDS = 20, 160, 32, 2
LIMITS = {"pool / two processes": 0.9, "one worker / minimal loop": 1.05, "DataLoader loop / two workers": 2.5}


def client_data() -> list[tuple[Tensor, Tensor]]:
    """Return images and labels of each client."""
    rng = torch.Generator().manual_seed(0)
    return [
        (torch.rand(SAMPLES, 3, 32, 32, generator=rng), torch.randint(10, (SAMPLES,), generator=rng))
        for _ in range(CLIENTS)
    ]


def ours(workers: int) -> float:
    """Seconds per round of our engine, after a first round that warms everything up."""
    fed = mb.Federation.from_arrays(client_data(), client_data()[0], test_fraction=0, select_fraction=0, classes=10)
    method, model = mb.FedAvg(epochs=1), mb.models.build("convnet")
    seconds: list[float] = []

    def observe(event: dict[str, float | str]) -> None:
        if event["event"] == "round":
            seconds.append(float(event["train_seconds"]))

    options = {"eval": {"every": ROUNDS + 1, "subset": 32}, "keep_personal": False}
    mb.federate(model, fed, method, rounds=ROUNDS + 1, workers=workers, observe=observe, **options)  # type: ignore[arg-type]
    return statistics.fmean(seconds[1:])


def minimal() -> float:
    """Seconds per round of the least code that does the same passes: one thread, channels last, fused Adam."""
    torch.set_num_threads(1)
    data = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in client_data()]
    model = mb.models.build("convnet")
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)

    def train(local: nn.Module, x: Tensor, y: Tensor) -> None:
        optimiser = torch.optim.Adam(local.parameters(), fused=True)
        for rows in torch.split(torch.randperm(len(x)), BATCH):
            optimiser.zero_grad()
            cross_entropy(local(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()

    return timed_rounds(model, lambda local, n: train(local, *data[n]))


def dataloader() -> float:
    """Seconds per round of the usual loop: DataLoader, default threads, default Adam."""
    data = [DataLoader(TensorDataset(x, y), BATCH, shuffle=True) for x, y in client_data()]

    def train(local: nn.Module, client: int) -> None:
        optimiser = torch.optim.Adam(local.parameters())
        for x, y in data[client]:
            optimiser.zero_grad()
            cross_entropy(local(x), y).backward()  # type: ignore[no-untyped-call]
            optimiser.step()

    return timed_rounds(mb.models.build("convnet"), train)


def timed_rounds(model: nn.Module, train: Callable[[nn.Module, int], None]) -> float:
    """Seconds per round of training all clients one after the other and averaging, after a warm-up round."""
    started = 0.0
    for number in range(ROUNDS + 1):
        if number == 1:
            started = time.perf_counter()
        sums: dict[str, Tensor] = {}
        for client in range(CLIENTS):
            local = copy.deepcopy(model)
            train(local, client)
            for name, tensor in local.state_dict().items():
                sums[name] = sums.get(name, 0) + tensor / CLIENTS
        model.load_state_dict(sums)
    return (time.perf_counter() - started) / ROUNDS


VARIANTS: dict[str, Callable[[], float]] = {
    "one worker": lambda: ours(1),
    "two workers": lambda: ours(2),
    "minimal loop": minimal,
    "DataLoader loop": dataloader,
}


def start(variant: str) -> "subprocess.Popen[str]":
    """Start a variant in a process of its own, with the default number of threads."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    command = [sys.executable, __file__, "--child", variant]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)  # noqa: S603


def seconds_of(process: "subprocess.Popen[str]") -> float:
    """Wait for a variant and read its seconds per round."""
    answer, _ = process.communicate()
    return float(answer)


@contextmanager
def other_work(busy: bool) -> Iterator[None]:
    """Keep one core busy with another program, as on a machine that somebody uses."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        yield
    finally:
        if process:
            process.kill()
            process.wait()


def measure(turns: int) -> dict[str, float]:
    """Median seconds per round of each variant; variants take turns so that all see the same machine."""
    seconds: dict[str, list[float]] = {}
    for _ in range(turns):
        for variant in VARIANTS:
            seconds.setdefault(variant, []).append(seconds_of(start(variant)))
        pair = [start("one worker"), start("one worker")]
        seconds.setdefault("two processes", []).append(statistics.fmean([seconds_of(process) for process in pair]))
    return {variant: statistics.median(values) for variant, values in seconds.items()}


def main() -> int:
    """Measure and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="with another program that keeps one core busy")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(VARIANTS[options.child]())
        return 0
    with other_work(options.busy):
        seconds = measure(options.turns)
    ratios = {
        "pool / two processes": seconds["two processes"] / 2 / seconds["two workers"],
        "one worker / minimal loop": seconds["one worker"] / seconds["minimal loop"],
        "DataLoader loop / two workers": seconds["DataLoader loop"] / seconds["two workers"],
    }
    good = {
        name: ratio <= LIMITS[name] if "minimal" in name else ratio >= LIMITS[name] for name, ratio in ratios.items()
    }
    for variant, value in seconds.items():
        print(f"{variant:16} {value:6.2f} s per round")
    for name, ratio in ratios.items():
        print(f"{name:30} {ratio:5.2f} (limit {LIMITS[name]}) {'ok' if good[name] else 'MISSED'}")
    if options.json:
        options.json.write_text(json.dumps({"seconds": seconds, "ratios": ratios}, indent=2) + "\n", encoding="utf-8")
    return 0 if all(good.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
