"""What a result depends on besides its config: versions, processor, code, data."""

import hashlib
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from metabayfl._version import __version__
from metabayfl.data.federation import Federation
from metabayfl.data.sources.files import data_folder

LISTED_CLIENTS = 100
"""Clients whose labels are counted in a run directory: enough for a picture, however large the federation."""
PACKAGES = ("torch", "numpy", "safetensors", "pydantic", "scikit-learn")


def describe_environment(federation: Federation, seed: int) -> dict[str, Any]:
    """Everything that may explain a different number tomorrow."""
    return {
        "metabayfl": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: version(name) for name in PACKAGES},
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "git_commit": git_commit(Path(__file__).parent),
        "seed": seed,
        "data_hash": data_hash(federation),
        "data_folder": None if (folder := data_folder()) is None else str(folder),
    }


def git_commit(directory: Path) -> str | None:
    """Return the commit of the source, if git tracks it there; a copy inside another repository is not tracked."""
    git = shutil.which("git")
    answers = []
    for question in (["ls-files", "--error-unmatch", "__init__.py"], ["rev-parse", "HEAD"]) if git else ():
        command = [str(git), "-C", str(directory), *question]
        answers.append(subprocess.run(command, capture_output=True, text=True, check=False))  # noqa: S603 (no user input)
    found = bool(answers) and all(answer.returncode == 0 for answer in answers)
    return answers[-1].stdout.strip() if found else None


def describe_data(federation: Federation) -> dict[str, Any]:
    """Labels in the training parts (d_n included) of all clients or of some that are evenly spread; none for values."""
    everybody = len(federation)
    listed = np.unique(np.linspace(0, everybody - 1, min(everybody, LISTED_CLIENTS)).round().astype(int)).tolist()
    sizes = federation.train.sizes()
    about = {"clients": everybody, "listed": listed, "samples": sizes[listed].tolist(), "all_samples": int(sizes.sum())}
    classes = getattr(federation.likelihood, "classes", None)
    if classes is None:
        return about
    labels = (federation.train.of(client)[1] for client in listed)
    return about | {"labels": [torch.bincount(y, minlength=classes).tolist() for y in labels]}


def data_hash(federation: Federation) -> str:
    """Hash all samples and who holds them."""
    digest = hashlib.blake2b(digest_size=16)
    for rows in (federation.train, federation.local_test):
        digest.update(rows.offsets.tobytes())
        for tensor in (rows.x, rows.y):
            digest.update(_stored(tensor).contiguous().numpy().data)
    pool = [] if federation.unlabelled is None else [federation.unlabelled]
    for tensor in (federation.test_x, federation.test_y, *pool):
        digest.update(tensor.contiguous().numpy().data)
    digest.update(federation.select_sizes.tobytes() + federation.batch_sizes.tobytes())
    digest.update(repr((federation.scaling, federation.drift, federation.augment)).encode())
    return digest.hexdigest()


def _stored(samples: torch.Tensor) -> torch.Tensor:
    """Return samples, of which blank ones, that stand for those of other machines, are one row in memory."""
    return samples[:1] if len(samples) > 1 and samples.stride(0) == 0 else samples
