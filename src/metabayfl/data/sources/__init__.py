"""Where samples come from: a name table of sources, each read from files that lie here already."""

from collections.abc import Callable, Mapping
from pathlib import Path

from metabayfl.config import DataOptions
from metabayfl.data.sources.arrays import npz
from metabayfl.data.sources.cifar import cifar10, cifar100
from metabayfl.data.sources.digits import digits
from metabayfl.data.sources.files import data_folder
from metabayfl.data.sources.human_labels import with_human_labels
from metabayfl.data.sources.idx import fashion_mnist, mnist
from metabayfl.data.sources.images import images
from metabayfl.data.sources.source import Source, tell
from metabayfl.data.sources.table import table
from metabayfl.data.sources.tiny_imagenet import tiny_imagenet
from metabayfl.options import InputError

__all__ = ["SOURCES", "Source", "data_folder", "load"]

SOURCES: Mapping[str, Callable[[DataOptions, Path | None], Source]] = {
    "digits": digits,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "tiny-imagenet": tiny_imagenet,
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "npz": npz,
    "images": images,
    "table": table,
}
OPTIONS = {
    "path": {"npz", "images", "table"},
    "label": {"table", "nodes"},
    "client_column": {"table"},
    "columns": {"table", "nodes"},
    "classes": {"nodes"},
    "regression": {"table", "nodes"},
    "standardise": {"table"},
    "common_test": {"npz", "images", "table"},
    "resize": {"tiny-imagenet", "images", "nodes"},
    "grey": {"images", "nodes"},
    "labels": {"cifar10"},
    "verify": {"cifar10", "cifar100", "mnist", "fashion-mnist"},
}


def load(options: DataOptions, folder: Path | None = None) -> Source:
    """Read a dataset by name, from the folder or from the one that METABAYFL_DATA names."""
    if options.name == "nodes":
        raise InputError("data.name = 'nodes': the data lie on other machines, and `metabayfl flower run` goes to them")
    if options.name not in SOURCES:
        raise InputError(f"unknown data.name = {options.name!r}; accepted: {', '.join(SOURCES)}")
    _check_options(options)
    home = data_folder() if folder is None else folder
    source = SOURCES[options.name](options, home)
    tell(source.note)
    for what, count in (("training", len(source.y)), ("test", len(source.test_y))):
        if not count:
            raise InputError(f"data.name = {options.name!r}: there are no {what} samples")
    return source if options.labels == "clean" else with_human_labels(source, options.labels, home)


def _check_options(options: DataOptions) -> None:
    """Refuse options that the source would ignore."""
    for field, users in OPTIONS.items():
        value = getattr(options, field)
        if options.name in users or value == DataOptions.model_fields[field].default:
            continue
        if field == "verify":
            raise InputError(f"data.verify: no official checksums are known for data.name = {options.name!r}")
        raise InputError(
            f"data.{field} = {value!r} is not used by data.name = {options.name!r}, but by {', '.join(sorted(users))}"
        )
