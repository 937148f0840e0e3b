"""What the engine itself costs: seconds per client and round outside the hooks, and the server's memory.

Usage: python benchmarks/engine.py [--json FILE]
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import metabayfl as mb
from metabayfl.store import RunDirectory
from metabayfl.types import Context, Fit, Params, Received, TrainData

SAMPLES, FEATURES, CLASSES, ROUNDS = 20, 8, 4, 2
OVERHEAD_LIMIT_MS, MEMORY_LIMIT_MB = 2.0, 50.0
hook_seconds = 0.0


class TimedFedAvg(mb.FedAvg):
    """FedAvg that adds up the time spent inside its hooks."""

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        """Take part in a round."""
        started = time.perf_counter()
        fit = super().fit(down, state, data, ctx)
        _count(started)
        return fit

    def aggregate(self, server: Params, updates: Sequence[Received], ctx: Context) -> Params:
        """Return the next state of the server."""
        started = time.perf_counter()
        result = super().aggregate(server, updates, ctx)
        _count(started)
        return result


def _count(started: float) -> None:
    global hook_seconds  # noqa: PLW0603
    hook_seconds += time.perf_counter() - started


def federation(clients: int) -> mb.Federation:
    """Return clients of 20 samples each."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((clients, SAMPLES, FEATURES), dtype=np.float32)
    y = rng.integers(CLASSES, size=(clients, SAMPLES))
    return mb.Federation.from_arrays([(x[n], y[n]) for n in range(clients)], classes=CLASSES)


def model() -> torch.nn.Module:
    """Return an MLP."""
    return mb.models.build("mlp", classes=CLASSES, input_shape=(FEATURES,), hidden=[64])


def overhead_ms(clients: int) -> float:
    """Milliseconds per client and round outside the hooks, in one process."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "run")
        mb.federate(model(), federation(clients), TimedFedAvg(epochs=1), rounds=ROUNDS, out=out, eval={"every": ROUNDS})
        rounds = [event for event in RunDirectory(out).events() if event["event"] == "round"]
    wall = float(sum(event["train_seconds"] for event in rounds))
    return (wall - hook_seconds) / (clients * ROUNDS) * 1e3


def server_peak_mb(clients: int, workers: int) -> dict[str, float]:
    """Run in a process of its own and ask for its peak memory."""
    command = [sys.executable, __file__, "--child", str(clients), "--workers", str(workers)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    found: dict[str, float] = json.loads(answer.stdout)
    return found


def child(clients: int, workers: int) -> None:
    """One run; prints the peak memory of this process, which is the server."""
    fed = federation(clients)
    started = time.perf_counter()
    mb.federate(model(), fed, mb.FedAvg(epochs=1), rounds=ROUNDS, workers=workers, eval={"every": ROUNDS})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"peak_mb": peak, "seconds": time.perf_counter() - started}))


def main() -> int:
    """Measure and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.workers)
        return 0
    overhead = overhead_ms(1000)
    small, large = server_peak_mb(100, 2), server_peak_mb(10_000, 2)
    growth = large["peak_mb"] - small["peak_mb"]
    results: dict[str, Any] = {"overhead_ms": overhead, "memory_growth_mb": growth, "small": small, "large": large}
    print(f"1,000 clients: {overhead:.2f} ms per client and round outside the hooks (limit {OVERHEAD_LIMIT_MS})")
    print(f"10,000 clients: {large['seconds']:.0f} s for {ROUNDS} rounds with 2 workers")
    print(f"server's peak memory: {small['peak_mb']:.0f} MB with 100 clients, {large['peak_mb']:.0f} MB with 10,000:")
    print(f"it grows by {growth:.0f} MB (limit {MEMORY_LIMIT_MB:.0f}; their data alone have {data_mb(10_000):.0f} MB)")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0 if overhead <= OVERHEAD_LIMIT_MS and growth <= MEMORY_LIMIT_MB else 1


def data_mb(clients: int) -> float:
    """Megabytes of inputs and labels."""
    return clients * SAMPLES * (FEATURES * 4 + 8) / 1e6


if __name__ == "__main__":
    sys.exit(main())
