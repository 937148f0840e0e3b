"""What a run will cost its clients, estimated before training from real messages and small real fits."""

import re
import tomllib
from importlib import resources
from pathlib import Path
from statistics import fmean

from rich.table import Column, Table
from rich.text import Text
from torch import nn

from metabayfl.api import check_job
from metabayfl.config import RunConfig
from metabayfl.engine import plan
from metabayfl.engine.plan import Job
from metabayfl.engine.process import one_thread
from metabayfl.experiment import Experiment
from metabayfl.methods import create, table
from metabayfl.methods.base import NotNegative, Positive
from metabayfl.options import InputError, Options
from metabayfl.probe import Probe
from metabayfl.types import Diverged

UNITS = {"kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9, "ms": 1e-3, "s": 1.0}
NOTES = """the rest per round and client (mean), but round s: until the slowest client is done
FLOP: only matrix products and convolutions, so that small networks take longer (docs/cost.md)"""
COLUMNS = ("kB down", "kB up", "MFLOP", "compute s", "network s", "round s", "memory MB", "run MB", "run h")


class Device(Options):
    """A client's hardware, as far as costs depend on it."""

    name: str
    sustained_gflops_per_second: Positive
    """Rate at which one client trains, in 10⁹ floating-point operations per second."""
    memory_gb: Positive
    """Memory in 10⁹ bytes."""
    note: str
    """How the numbers came about."""


class Link(Options):
    """The connection of a client to the server."""

    bits_per_second: Positive
    latency_seconds: NotNegative

    def seconds(self, sent_bytes: float) -> float:
        """Time of one message each way that have so many bytes together."""
        return 2 * self.latency_seconds + 8 * sent_bytes / self.bits_per_second


class MethodCost(Options):
    """Estimated costs of a method; per round and participating client unless the name says otherwise."""

    method: str
    bytes_down: int
    bytes_up: int
    flops: int
    """Matrix products and convolutions."""
    compute_seconds: float
    communication_seconds: float
    round_seconds: float
    """Until the slowest participant is done; the mean over the rounds."""
    peak_memory_bytes: int
    """Tensors and data of the largest client; neither Python nor the libraries."""
    fits_in_memory: bool
    run_megabytes: float
    """All clients, both ways, all rounds."""
    run_hours: float


class Estimate(Options):
    """What each method would cost, and why some cannot work with the config."""

    device: Device
    link: Link
    rounds: int
    clients: int
    clients_per_round: int
    methods: list[MethodCost]
    refused: dict[str, str]


def parse_link(text: str) -> Link:
    """Read a link such as 10Mbit/50ms."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(kbit|Mbit|Gbit)/([0-9]+(?:\.[0-9]+)?)(ms|s)", text)
    if found is None or float(found[1]) == 0:
        accepted = "bandwidth above 0 in kbit, Mbit or Gbit (per second) / latency in ms or s, such as 10Mbit/50ms"
        raise InputError(f"--link {text!r}: accepted is {accepted}")
    return Link(bits_per_second=float(found[1]) * UNITS[found[2]], latency_seconds=float(found[3]) * UNITS[found[4]])


def read_device(name: str) -> Device:
    """Read a profile: one of ours by name, or a file."""
    ours = resources.files("metabayfl") / "devices"
    names = sorted(item.name.removesuffix(".toml") for item in ours.iterdir())
    if name not in names and not name.endswith(".toml"):
        raise InputError(f"--device {name!r}: accepted are {', '.join(names)}, or a file whose name ends in .toml")
    source = ours / f"{name}.toml" if name in names else Path(name)
    try:
        return Device(**tomllib.loads(source.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"--device {name}: {error.strerror}") from None
    except ValueError as error:  # no text, no TOML, or not a profile
        raise InputError(f"--device {name}: {error}") from None


def estimate(config: RunConfig, device: Device, link: Link) -> Estimate:
    """Estimate the costs of every registered method on a config's data, model and plan."""
    experiment = Experiment.of(config)
    rows, refused = [], {}
    for name in sorted(table()):
        try:
            rows.append(estimate_job(make_job(name, experiment), experiment.model, device, link))
        except InputError as error:
            refused[name] = str(error)
        except Diverged as error:
            raise Diverged(f"{name}: {error}") from error
    if not rows:
        raise InputError(next(iter(refused.values())))
    everybody = len(experiment.federation)
    counts = {"rounds": config.rounds, "clients": everybody, "clients_per_round": config.clients_per_round or everybody}
    return Estimate(device=device, link=link, **counts, methods=rows, refused=refused)


def make_job(name: str, experiment: Experiment) -> Job:
    """Put a method in the place of the config's own, with those of its fields that it has."""
    wishes = {key: value for key, value in experiment.config.method.items() if key in table()[name].model_fields}
    method = create({"name": name, **wishes})
    job = plan.make_job(method, experiment.model, experiment.federation, experiment.config.plan())
    check_job(job)
    return job


@one_thread()
def estimate_job(job: Job, model: nn.Module, device: Device, link: Link) -> MethodCost:
    """Estimate the costs of one method; the model is the one that its task was made of."""
    probe = Probe(job)
    down = [probe.bytes_down(client) for client in job.train_sizes]
    up, flops = probe.bytes_up(), probe.flops()
    compute = [count / (device.sustained_gflops_per_second * 1e9) for count in flops]
    network = [link.seconds(size + up) if job.method.exchanges else 0.0 for size in down]
    invited = [job.participants(round_) for round_ in range(job.plan.rounds)]
    run_seconds = sum(max(compute[client] + network[client] for client in clients) for clients in invited)
    memory = probe.peak_memory_bytes(model)
    return MethodCost(
        method=job.method.name,
        bytes_down=round(fmean(down)),
        bytes_up=up,
        flops=round(fmean(flops)),
        compute_seconds=fmean(compute),
        communication_seconds=fmean(network),
        round_seconds=run_seconds / job.plan.rounds,
        peak_memory_bytes=memory,
        fits_in_memory=memory <= device.memory_gb * 1e9,
        run_megabytes=sum(down[client] + up for clients in invited for client in clients) / 1e6,
        run_hours=run_seconds / 3600,
    )


def estimate_table(found: Estimate) -> Table:
    """Show an estimate to a person."""
    device = f"{found.device.name} at a stated {found.device.sustained_gflops_per_second:g} GFLOP/s"
    network = f"{found.link.bits_per_second / 1e6:g} Mbit/s, {found.link.latency_seconds * 1e3:g} ms"
    notes = [f"{found.rounds} rounds, {found.clients_per_round} of {found.clients} clients in each; run: all of them"]
    notes += [NOTES, *(f"{name}: {reason}" for name, reason in found.refused.items())]
    title = f"ESTIMATE before training: {device}, {network}"
    columns = [Column(name, justify="right") for name in COLUMNS]
    rows = Table("method", *columns, title=title, caption=Text("\n".join(notes)), caption_justify="left")
    for row in found.methods:
        rows.add_row(row.method, *_cells(row))
    for name in found.refused:
        rows.add_row(name, "see below")
    return rows


def _cells(row: MethodCost) -> list[str]:
    sizes = [f"{row.bytes_down / 1e3:,.1f}", f"{row.bytes_up / 1e3:,.1f}", f"{row.flops / 1e6:,.1f}"]
    times = [f"{value:.3g}" for value in (row.compute_seconds, row.communication_seconds, row.round_seconds)]
    memory = f"{row.peak_memory_bytes / 1e6:.3g}" + ("" if row.fits_in_memory else " (too much)")
    return [*sizes, *times, memory, f"{row.run_megabytes:,.2f}", f"{row.run_hours:.3g}"]
