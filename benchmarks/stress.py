"""Does Meta-BayFL do harm? 20 random federations, each against FedAvg with Adam at 1e-3, ten rounds.

Size, number of clients, skew, local epochs and network are drawn from a seed that was fixed before anything was run.
A federation counts as harmed if the 95 % interval of the paired difference of accuracy on the common test set lies
below -2 points. Interrupted, it goes on where it was; finished runs are not repeated.

Usage: python benchmarks/stress.py --out DIR [--seeds 0,1,2] [--on test|dev] [--only 0,3,7] [--json FILE]
       with METABAYFL_DATA naming a folder that holds CIFAR-10
"""

import argparse
import json
import math
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from metabayfl.compare import collect, make_grid, run_cells
from metabayfl.config import CompareConfig
from metabayfl.statistics import paired_difference

FEDERATIONS, SEED, ROUNDS, LIMIT = 20, 1, 10, -2.0
OURS, THEIRS, MEASURE = "meta-bayfl", "fedavg", "G/G accuracy"
METHODS: dict[str, dict[str, Any]] = {THEIRS: {"optimiser": "adam", "rate": 1e-3}, OURS: {}}
DEV = {"digits": 300, "cifar10": 5000}
TRAINABLE = {"digits": 0.8 * (1397 - 300), "cifar10": 0.8 * (50_000 - 5_000)}
"""Samples that clients can train on once the dev pool and local test parts are set aside."""


@dataclass(frozen=True)
class Stress:
    """A random federation."""

    number: int
    data: str
    model: str
    samples: int
    clients: int
    alpha: float
    epochs: int

    def config(self, on: str) -> CompareConfig:
        """Return what is run."""
        return CompareConfig.model_validate(
            {
                "rounds": ROUNDS,
                "data": {
                    "name": self.data,
                    "clients": self.clients,
                    "partition": "dirichlet-hsu",
                    "alpha": self.alpha,
                    "fraction": min(1.0, self.samples / TRAINABLE[self.data]),
                    "dev": DEV[self.data],
                },
                "model": {"name": self.model},
                "method": {"epochs": self.epochs},
                "methods": METHODS,
                "select": {"held_out": True},
                "eval": {"on": on, "every": ROUNDS, "subset": 2000, "local_subset": 100},
            }
        )


def draw_all() -> list[Stress]:
    """Draw the federations; networks take turns."""
    rng, found = random.Random(SEED), []  # noqa: S311
    for number in range(FEDERATIONS):
        data, model = [("digits", "mlp"), ("cifar10", "convnet"), ("cifar10", "resnet20")][number % 3]
        most = {"mlp": TRAINABLE["digits"], "convnet": 3000, "resnet20": 1000}[model]
        samples, clients = round(_log_uniform(rng, 300, most)), round(_log_uniform(rng, 2, 50))
        alpha, epochs = round(_log_uniform(rng, 0.05, 10), 3), rng.randint(1, 3 if model == "resnet20" else 10)
        found.append(Stress(number, data, model, samples, clients, alpha, epochs))
    return found


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def measure(stress: Stress, seeds: list[int], on: str, out: Path, processes: int) -> dict[str, Any]:
    """Carry out what is missing of a federation's runs, and compare."""
    cells = make_grid(stress.config(on), list(METHODS), seeds, out)
    for cell, failure in run_cells([cell for cell in cells if not cell.finished], processes, 1):
        if failure:
            raise SystemExit(f"federation {stress.number}, {cell.label}, seed {cell.config.seed}: {failure}")
    rows = collect(cells)
    ours, theirs = (
        {row["seed"]: 100 * row[MEASURE] for row in rows if row["method"] == label} for label in (OURS, THEIRS)
    )
    difference = paired_difference(ours, theirs)
    assert difference is not None
    numbers = {"ours": _mean(ours), "theirs": _mean(theirs), "difference": difference._asdict()}
    return asdict(stress) | numbers | {"harmed": difference.high < LIMIT}


def _mean(values: dict[int, float]) -> float:
    return sum(values.values()) / len(values)


def describe(result: dict[str, Any]) -> str:
    """Return a line for a federation."""
    what = f"{result['number']:3} {result['model']:9}{result['samples']:5}{result['clients']:4}"
    what += f"{result['alpha']:8.3f}{result['epochs']:4}"
    difference = result["difference"]
    interval = f"[{difference['low']:+.1f}, {difference['high']:+.1f}]"
    score = f"{result['ours']:6.1f}{result['theirs']:6.1f} {difference['mean']:+6.1f} {interval}"
    return f"{what} {score}{'  HARMED' if result['harmed'] else ''}"


def numbers(text: str) -> list[int]:
    """Read a list of numbers."""
    return [int(part) for part in text.split(",")]


def main() -> int:
    """Measure and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--on", choices=("test", "dev"), default="test")
    parser.add_argument("--only", type=numbers, default=list(range(FEDERATIONS)))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print("  # model   samples clients alpha epochs   ours fedavg difference", flush=True)
    results = []
    for stress in draw_all():
        if stress.number in options.only:
            results.append(measure(stress, options.seeds, options.on, options.out, options.processes))
            print(describe(results[-1]), flush=True)
    harmed = [result["number"] for result in results if result["harmed"]]
    print(f"{len(harmed)} of {len(results)} federations harmed {harmed or ''}")
    if options.json:
        record = {"on": options.on, "seeds": options.seeds, "rounds": ROUNDS, "federations": results}
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 1 if harmed else 0


if __name__ == "__main__":
    sys.exit(main())
