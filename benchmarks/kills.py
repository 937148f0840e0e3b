"""Kill -9 processes of a Flower deployment at random moments and see what is lost: bits are those of the local engine.

python benchmarks/kills.py --kills 20 --seed 0 --out benchmarks/kills.json
"""

import argparse
import json
import random
import signal
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from metabayfl.config import RunConfig
from metabayfl.engine.flower.carrier import Waits
from metabayfl.engine.flower.deployment import MARK, Deployment, DeploymentError
from metabayfl.engine.flower.operate import bring_up, follow, submit
from metabayfl.engine.flower.processes import Process, marked, send
from metabayfl.experiment import Experiment, is_finished
from metabayfl.store import RunDirectory

VICTIMS = ("node0", "node1", "node2", "superlink", "superexec", "flwr-serverapp", "flwr-clientapp")
WAITS = Waits(join_seconds=300, reply_seconds=1200, rejoin_seconds=300)
RUN_SECONDS = 1200.0


@dataclass
class Kill:
    """One kill, and when it came."""

    victim: str
    run: int
    after_round: int


@dataclass
class Outcome:
    """What came of all kills."""

    seed: int
    kills: list[Kill] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)


def config(method: str = "bayfl", rounds: int = 4) -> RunConfig:
    """Small digits for three clients."""
    values: dict[str, Any] = {"method": {"name": method, "epochs": 1}, "model": {"hidden": [8]}, "rounds": rounds}
    return RunConfig(**values, data={"clients": 3, "fraction": 0.2, "unlabelled": 20}, eval={"every": 2, "samples": 2})


def find(deployment: Deployment, victim: str) -> Process | None:
    """Return a living process of the deployment by its role or the name of its program."""
    if victim in deployment.processes:
        return deployment.processes[victim] if deployment.is_alive(victim) else None
    for process in marked(f"{MARK}={deployment.token}"):
        if victim.encode() in Path("/proc", str(process.pid), "cmdline").read_bytes():
            return process
    return None


def rounds_done(out: Path) -> int:
    """Count the published rounds of a run."""
    return max((event["round"] for event in RunDirectory(out).events() if event["event"] == "round"), default=0)


def carry_out(deployment: Deployment, plan: RunConfig, out: Path) -> int:
    """Carry out a run to its end, however often its server app dies; returns how often it was submitted."""
    for attempt in range(1, 100):
        begun = (out / "run.json").exists()
        number, report = submit(deployment, plan, out, own=None, resume=begun, waits=WAITS)
        try:
            follow(deployment, number, out, report, lambda event: None)
        except DeploymentError as error:
            print(f"run {out.name}, attempt {attempt}: {error}", flush=True)
            bring_up(deployment)
        if is_finished(out):
            return attempt
    raise DeploymentError(f"{out} does not come to an end")


def torment(deployment: Deployment, out: Path, number: int, outcome: Outcome, wanted: int, rng: random.Random) -> None:
    """Kill something now and then while a run goes on, and mend it a little later."""
    while not is_finished(out) and len(outcome.kills) < wanted:
        time.sleep(rng.uniform(5, 40))
        victim = rng.choice(VICTIMS)
        process = find(deployment, victim)
        if process is None or not (out / "run.json").exists() or is_finished(out):
            continue
        outcome.kills.append(Kill(victim, number, rounds_done(out)))
        print(f"kill {len(outcome.kills)}: {victim}, run {number} after round {rounds_done(out)}", flush=True)
        send(process, signal.SIGKILL)
        time.sleep(rng.uniform(0, 10))
        bring_up(deployment)


def torture(where: Path, kills: int, seed: int, rounds: int = 4) -> Outcome:
    """Carry out runs under random kills until there were enough of them; look at what each run leaves."""
    rng, outcome = random.Random(seed), Outcome(seed)  # noqa: S311 (a schedule of kills)
    plan = config(rounds=rounds)
    Experiment.of(plan).run(where / "local", 1)
    deployment = Deployment.create(where / "deployment", nodes=3, tls=False, keys=False)
    try:
        bring_up(deployment)
        while len(outcome.kills) < kills:
            number = len(outcome.runs) + 1
            out = where / f"run{number}"
            killer = threading.Thread(target=torment, args=(deployment, out, number, outcome, kills, rng), daemon=True)
            killer.start()
            attempts = carry_out(deployment, plan, out)
            killer.join()
            outcome.runs.append(verdict(out, where / "local", attempts))
            print(outcome.runs[-1], flush=True)
    finally:
        deployment.end()
    return outcome


def verdict(out: Path, local: Path, attempts: int) -> dict[str, Any]:
    """Say whether a run lost anything: an update of a client, a round, or a bit."""
    events = list(RunDirectory(out).events())
    updates = [event["updates"] for event in events if event["event"] == "round"]
    same = (out / "model.safetensors").read_bytes() == (local / "model.safetensors").read_bytes()
    return {"submitted": attempts, "updates": updates, "same_bits": same}


def main() -> None:
    """Write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="metabayfl-kills-") as where:
        outcome = torture(Path(where), options.kills, options.seed)
    options.out.write_text(json.dumps(asdict(outcome), indent=1) + "\n")
    raise SystemExit(0 if all(run["same_bits"] for run in outcome.runs) else 1)


if __name__ == "__main__":
    main()
