"""Who holds which sample: pure functions from labels to one sorted index array per client."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from metabayfl.types import InputError

Labels = npt.NDArray[np.integer[Any]]
Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LARGEST_ALPHA = 1e12
SAMPLES_PER_MINOR = 400


def split(name: str, labels: Labels, clients: int, rng: np.random.Generator, **options: Any) -> list[Indices]:
    """Partition by name; the options are the keyword arguments of the function in PARTITIONS."""
    if name not in PARTITIONS:
        raise InputError(f"partition {name!r} is unknown; accepted: {', '.join(PARTITIONS)}")
    known = inspect.signature(PARTITIONS[name]).parameters.values()
    accepted = {item.name: item.default for item in known if item.kind is item.KEYWORD_ONLY}
    for option, value in options.items():
        if option not in accepted:
            listed = ", ".join(accepted) or "none"
            raise InputError(f"partition {name!r}: unknown option {option} = {value!r}; accepted: {listed}")
    for option, default in accepted.items():
        if default is inspect.Parameter.empty and option not in options:
            raise InputError(f"partition {name!r} needs the option {option}")
    return PARTITIONS[name](labels, clients, rng, **options)


def iid(labels: Labels, clients: int, rng: np.random.Generator) -> list[Indices]:
    """Deal a random permutation; sizes differ by at most one."""
    _check(labels, clients)
    return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


def dirichlet(
    labels: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: float,
    min_size: int = 2,
    balance: bool = False,
    retries: int = 1000,
) -> list[Indices]:
    """For each class, share its samples by one draw of Dir(alpha) over the clients; sizes differ.

    Draws again until every client has `min_size` samples, at most `retries` times.
    With `balance`, a client that already holds its fair share gets nothing of the next class.
    """
    _check(labels, clients)
    _check_alpha(alpha)
    _check_min_size(min_size, clients, len(labels))
    _check_whole("retries", retries, 1)
    if not isinstance(balance, bool):
        raise InputError(f"balance = {balance!r}: accepted: true, false")
    sizes = np.unique(labels, return_counts=True)[1]
    reached = 0
    for _ in range(retries):
        shares = rng.dirichlet(np.full(clients, alpha), size=len(sizes))
        counts = _balanced_counts(shares, sizes) if balance else _floor_counts(shares, sizes)
        smallest = int(counts.sum(axis=0).min())
        if smallest >= min_size:
            return _deal(_class_pools(labels, rng), counts)
        reached = max(reached, smallest)
    raise InputError(
        f"dirichlet: in {retries} draws with alpha = {alpha} over {clients} clients the smallest client got at most "
        f"{reached} samples, min_size is {min_size}; raise alpha or retries, lower min_size or use fewer clients"
    )


def dirichlet_hsu(
    labels: Labels, clients: int, rng: np.random.Generator, *, alpha: float, min_size: int = 2
) -> list[Indices]:
    """Clients of equal size (±1), each with a class mix drawn from Dir(alpha · class marginal) (Hsu et al. 2019).

    Clients draw one after the other without replacement; where a class runs out, the mix of the others is renormalised.
    """
    _check(labels, clients)
    _check_alpha(alpha)
    _check_min_size(min_size, clients, len(labels))
    left = np.unique(labels, return_counts=True)[1]
    concentration = np.maximum(alpha * left / left.sum(), np.finfo(float).tiny)
    counts = np.zeros((len(left), clients), dtype=np.int64)
    for client, part in enumerate(np.array_split(np.empty(len(labels)), clients)):
        counts[:, client] = _draw_without_replacement(len(part), rng.dirichlet(concentration), left, rng)
        left = left - counts[:, client]
    return _deal(_class_pools(labels, rng), counts)


def shards(labels: Labels, clients: int, rng: np.random.Generator, *, per_client: int = 2) -> list[Indices]:
    """Cut the samples, sorted by label, into equal shards (±1) and give each client `per_client` random ones."""
    _check(labels, clients)
    _check_whole("per_client", per_client, 1)
    total = clients * per_client
    if total > len(labels):
        raise InputError(
            f"shards: {clients} clients x per_client = {per_client} need {total} samples, got {len(labels)}"
        )
    pieces = np.array_split(np.concatenate(_class_pools(labels, rng)), total)
    hands = rng.permutation(total).reshape(clients, per_client)
    return [np.sort(np.concatenate([pieces[piece] for piece in hand])) for hand in hands]


def step(labels: Labels, clients: int, rng: np.random.Generator, *, majors: int | None = None) -> list[Indices]:
    """Each client gets many samples of its `majors` classes (default: one fifth of the classes) and few of the others.

    Every class is major for the same number of clients. The only partition that may be incomplete: what is left of a
    class after dividing it with whole numbers is assigned to nobody. 10 clients on 10 classes x 4000: 1960 and 10.
    """
    _check(labels, clients)
    classes, sizes = np.unique(labels, return_counts=True)
    chosen = max(1, round(len(classes) / 5)) if majors is None else majors
    _check_whole("majors", chosen, 1)
    is_major = _assign_majors(len(classes), clients, chosen, rng)
    counts = np.empty((len(classes), clients), dtype=np.int64)
    for row, mask, label, size in zip(counts, is_major, classes.tolist(), sizes.tolist(), strict=True):
        many, few = _step_counts(label, size, int(mask.sum()), clients)
        row[:] = np.where(mask, many, few)
    return _deal(_class_pools(labels, rng), counts)


def by_column(values: npt.ArrayLike) -> list[Indices]:
    """One client per distinct value (a hospital, a writer), in the sorted order of the values."""
    column = np.asarray(values)
    if column.ndim != 1 or not len(column):
        raise InputError(f"by_column: values have shape {column.shape}; give one value per sample")
    if any(value is None or (isinstance(value, float) and math.isnan(value)) for value in column.tolist()):
        raise InputError("by_column: a value is missing (None or NaN); give each sample the name of its client")
    try:
        _, owner, sizes = np.unique(column, return_inverse=True, return_counts=True)
    except TypeError:
        kinds = sorted({type(value).__name__ for value in column.tolist()})
        raise InputError(f"by_column: values mix {', '.join(kinds)}; give values of one type") from None
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(sizes)[:-1])


def _class_pools(labels: Labels, rng: np.random.Generator) -> list[Indices]:
    """Return the indices of each class in random order."""
    return [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]


def _deal(pools: Sequence[Indices], counts: npt.NDArray[np.int64]) -> list[Indices]:
    """Give client n the next counts[c, n] samples of each class c."""
    hands = [np.split(pool, np.cumsum(row)) for pool, row in zip(pools, counts, strict=True)]
    return [np.sort(np.concatenate([hand[client] for hand in hands])) for client in range(counts.shape[1])]


def _floor_counts(shares: Floats, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Cut each class at the floor of its cumulative shares, so that every sample is assigned exactly once."""
    edges = np.cumsum(shares, axis=1)
    whole = np.floor(edges / edges[:, -1:] * sizes[:, None]).astype(np.int64)
    return np.diff(whole, axis=1, prepend=0)


def _balanced_counts(shares: Floats, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    counts = np.zeros(shares.shape, dtype=np.int64)
    for row in range(len(sizes)):
        below = counts.sum(axis=0) < sizes.sum() / shares.shape[1]
        kept = np.where(below, shares[row], 0.0)
        weights = kept if kept.sum() > 0 else below.astype(np.float64)
        counts[row] = _floor_counts(weights[None], sizes[row : row + 1])[0]
    return counts


def _draw_without_replacement(
    size: int, mix: Floats, left: npt.NDArray[np.int64], rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Draw class counts from the mix; each pass ends the draw or exhausts a class, so there are few passes."""
    taken = np.zeros_like(left)
    while size > taken.sum():
        open_classes = np.flatnonzero(left > taken)
        weights = mix[open_classes]
        if weights.sum() <= 0:
            weights = (left - taken)[open_classes].astype(np.float64)
        drawn = rng.multinomial(size - taken.sum(), weights / weights.sum())
        taken[open_classes] += np.minimum(drawn, (left - taken)[open_classes])
    return taken


def _assign_majors(classes: int, clients: int, majors: int, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Draw a [classes, clients] mask with `majors` per client and equally many clients per class."""
    if majors > classes:
        raise InputError(f"step: majors = {majors}, but there are {classes} classes; give at most {classes}")
    period = classes // math.gcd(classes, majors)
    if clients % period:
        nearest = max(1, round(clients / period)) * period
        raise InputError(
            f"step: {clients} clients with {majors} major classes each cannot cover {classes} classes equally often; "
            f"the nearest valid number of clients is {nearest} (a multiple of {period})"
        )
    mask = np.zeros((classes, clients), dtype=np.bool_)
    for client in rng.permutation(clients):
        # The classes that were major least often so far, ties at random: so no two ever differ by more than one.
        mask[np.lexsort((rng.random(classes), mask.sum(axis=1)))[:majors], client] = True
    return mask


def _step_counts(label: int, size: int, holders: int, clients: int) -> tuple[int, int]:
    few = max(1, size // SAMPLES_PER_MINOR) if holders < clients else 0
    many = (size - few * (clients - holders)) // holders
    if many <= few:
        raise InputError(
            f"step: class {label} has {size} samples, but {holders} major clients with more than {few} each and "
            f"{clients - holders} minor clients with {few} each need {few * clients + holders}; use fewer clients"
        )
    return many, few


def _check(labels: Labels, clients: int) -> None:
    if not isinstance(labels, np.ndarray) or labels.ndim != 1 or labels.dtype.kind not in "iu":
        found = f"{labels.dtype} of shape {labels.shape}" if isinstance(labels, np.ndarray) else type(labels).__name__
        raise InputError(f"labels are {found}; give a one-dimensional array of whole numbers")
    _check_whole("clients", clients, 1)
    if clients > len(labels):
        raise InputError(
            f"clients = {clients}, but there are {len(labels)} samples; give at most one client per sample"
        )


def _check_whole(what: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{what} = {value!r}: give a whole number of at least {least}")


def _check_alpha(alpha: object) -> None:
    if isinstance(alpha, bool) or not isinstance(alpha, Real) or not 0 < float(alpha) <= LARGEST_ALPHA:
        raise InputError(f"alpha = {alpha!r}: give a number above 0 and at most {LARGEST_ALPHA:g}")


def _check_min_size(min_size: int, clients: int, samples: int) -> None:
    _check_whole("min_size", min_size, 0)
    if min_size * clients > samples:
        raise InputError(
            f"min_size = {min_size} for {clients} clients needs {min_size * clients} samples, got {samples}"
        )


PARTITIONS: Mapping[str, Callable[..., list[Indices]]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "dirichlet-hsu": dirichlet_hsu,
    "shards": shards,
    "step": step,
}
