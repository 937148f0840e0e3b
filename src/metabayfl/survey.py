"""Who holds what: the data of a config as plain counts, a table for people, and pictures."""

import csv
import io
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Column, Table

from metabayfl import pictures
from metabayfl.config import RunConfig
from metabayfl.data import Builder
from metabayfl.data.sources import Source, load
from metabayfl.tensorfile import write_bytes

MOST_ROWS = 40
TARGET_BINS = 8
SAMPLES, SAMPLE_CLIENTS = 6, 3
COLUMNS = ("client", "samples", "train", "d_n", "test", "classes", "largest class", "entropy")


@dataclass(frozen=True)
class Survey:
    """Counts of all clients; `train` includes d_n, the samples by which choices are made."""

    title: str
    clients: tuple[str, ...]
    classes: tuple[str, ...]
    counts: np.ndarray
    """Samples of each client (rows) and class (columns), as they are labelled; for regression, bins of the target."""
    train: np.ndarray
    select: np.ndarray
    test: np.ndarray

    def rows(self) -> list[dict[str, Any]]:
        """One row for each client; the entropy of its classes is in bits."""
        shares = self.counts / self.counts.sum(axis=1, keepdims=True)
        entropies = -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(axis=1)
        numbers = (self.counts.sum(axis=1), self.train, self.select, self.test, (self.counts > 0).sum(axis=1))
        columns = [self.clients, *(values.tolist() for values in numbers)]
        columns += [shares.max(axis=1).round(4).tolist(), np.abs(entropies).round(4).tolist()]
        return [dict(zip(COLUMNS, row, strict=True)) for row in zip(*columns, strict=True)]


def survey(builder: Builder) -> Survey:
    """Count what each client of a config holds."""
    source, data = builder.source, builder.config.data
    names, edges = _kinds(source)
    counts, sizes = [], []
    for number in range(len(builder.holdings.clients)):
        client = builder.client(number)
        labels = np.concatenate([client.y.numpy(), client.test_y.numpy()])
        kinds = labels if edges is None else np.digitize(labels.reshape(len(labels), -1)[:, 0], edges)
        counts.append(np.bincount(kinds, minlength=len(names)))
        sizes.append((len(client.y), client.select_size, len(client.test_y)))
    train, select, test = np.array(sizes).T
    named = data.partition == "by-column" and data.partition_file is None
    clients = source.client_names if named else tuple(map(str, range(len(counts))))
    title = f"{data.name}, {_how(builder.config)}, {len(counts)} clients, seed {builder.seed}"
    return Survey(title, clients, names, np.array(counts), train, select, test)


def _kinds(source: Source) -> tuple[tuple[str, ...], np.ndarray | None]:
    """Return the names of the classes; for regression those of bins of the target, and the edges between them."""
    if source.classes is not None:
        return source.class_names or tuple(map(str, range(source.classes))), None
    target = source.y.reshape(len(source.y), -1)[:, 0]
    edges = np.linspace(float(target.min()), float(target.max()), TARGET_BINS + 1)
    return tuple(f"{low:.3g} to {high:.3g}" for low, high in pairwise(edges)), edges[1:-1]


def _how(config: RunConfig) -> str:
    data = config.data
    if data.partition_file is not None:
        return f"partition of {Path(data.partition_file).name}"
    return f"{data.partition} {data.alpha:g}" if data.partition.startswith("dirichlet") else data.partition


def survey_table(found: Survey) -> Table:
    """Show the clients to a person; of many the first, and how much is left out."""
    rows = found.rows()
    sizes = found.counts.sum(axis=1)
    caption = f"samples of a client: {sizes.min()} to {sizes.max()}, median {np.median(sizes):g}, {sizes.sum()} in all"
    if len(rows) > MOST_ROWS:
        caption = f"the first {MOST_ROWS} of {len(rows)} clients, the others are in clients.csv; {caption}"
    columns = [Column(name, justify="left" if name == "client" else "right") for name in COLUMNS]
    table = Table(*columns, title=found.title, caption=caption, caption_justify="left")
    for row in rows[:MOST_ROWS]:
        shown = row | {"largest class": f"{row['largest class']:.0%}", "entropy": f"{row['entropy']:.2f} bits"}
        table.add_row(*map(str, shown.values()))
    return table


def as_csv(found: Survey) -> str:
    """Return one line for each client, with a column of counts for each class."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS, *(f"class {name}" for name in found.classes)])
    for row, counts in zip(found.rows(), found.counts.tolist(), strict=True):
        writer.writerow([*row.values(), *counts])
    return text.getvalue()


def write_pictures(found: Survey, builder: Builder, out: Path) -> list[Path]:
    """Draw who holds what, and images before and after corruption; also all counts as CSV."""
    out.mkdir(parents=True, exist_ok=True)
    write_bytes(out / "clients.csv", as_csv(found).encode())
    sizes = (found.train, found.select, found.test)
    figure = pictures.holdings_figure(found.title, found.counts, sizes, found.clients, found.classes)
    written = pictures.save(figure, out / "clients")
    if len(builder.source.input_shape) == 3:
        written += pictures.save(pictures.samples_figure(_samples(builder, found.classes)), out / "samples")
    return [out / "clients.csv", *written]


def _samples(builder: Builder, classes: tuple[str, ...]) -> list[pictures.Samples]:
    """Take a few training images of a few clients as they were and as the clients have them."""
    shown = []
    for number in range(min(SAMPLE_CLIENTS, len(builder.holdings.clients))):
        rows, _ = builder.rows(number)
        before, given = builder.source.x[rows], builder.source.given_y[rows]
        after, labels = builder.corruption.train(before, given, number, builder.seed)
        texts = [_label_text(*pair, classes) for pair in zip(builder.source.y[rows], labels, strict=True)]
        variance = builder.corruption.variances[number]
        noise = f" (noise of variance {variance:g})" if variance else ""
        shown.append(pictures.Samples(f"client {number}", noise, before[:SAMPLES], after[:SAMPLES], texts[:SAMPLES]))
    return shown


def _label_text(true: Any, given: Any, classes: tuple[str, ...]) -> str:
    if not isinstance(true, np.integer):
        return f"{np.ravel(given)[0]:.3g}"
    return classes[given] if true == given else f"{classes[given]}\n(is {classes[true]})"


def inspect(config: RunConfig, out: Path) -> tuple[Survey, list[Path]]:
    """Count and draw what the clients of a config hold."""
    builder = Builder(config, load(config.data))
    found = survey(builder)
    return found, write_pictures(found, builder, out)
