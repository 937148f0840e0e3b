"""What a source of data gives, and what all kinds of sources share."""

import logging
from dataclasses import dataclass

import numpy as np

from metabayfl.options import InputError
from metabayfl.randomness import numpy_generator

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """A dataset with its common test set."""

    x: np.ndarray
    """Images of bytes [samples, channels, height, width], where b means b/255, or float32 features."""
    y: np.ndarray
    """Classes as int64, or float32 targets."""
    test_x: np.ndarray
    test_y: np.ndarray
    classes: int | None
    """None means regression."""
    class_names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    """Of each channel, for inputs in [0, 1]; empty if inputs are used as they are."""
    std: tuple[float, ...] = ()
    owners: np.ndarray | None = None
    """Client number of each training sample, where the data name clients."""
    client_names: tuple[str, ...] = ()
    note: str = ""
    """What a user should know, such as that only a part of a dataset was found."""
    human_y: np.ndarray | None = None
    """Training labels as people gave them; who holds what, and test parts, go by `y`."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return self.x.shape[1:]

    @property
    def given_y(self) -> np.ndarray:
        """Labels that clients train on."""
        return self.y if self.human_y is None else self.human_y

    @property
    def in_unit_range(self) -> bool:
        """Whether inputs lie between 0 and 1, so that noisy ones are clipped to that range."""
        return self.x.dtype == np.uint8 or bool(self.x.min() >= 0 and self.x.max() <= 1)


def hold_out(samples: int, share: float, *key: str) -> tuple[np.ndarray, np.ndarray]:
    """Split rows into training and common test set; always the same ones, whatever the seed of a run."""
    tests = round(samples * share)
    if not 0 < tests < samples:
        raise InputError(
            f"data.common_test = {share}: of {samples} samples that leaves {tests} to test and {samples - tests} to "
            "train; give a share with some of both, or data that bring a test set"
        )
    order = numpy_generator(*key).permutation(samples)
    return np.sort(order[tests:]), np.sort(order[:tests])


def moments(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of byte images, as numbers in [0, 1]."""
    values = np.arange(256) / 255
    counts = [np.bincount(images[:, channel].reshape(-1), minlength=256) for channel in range(images.shape[1])]
    mean = [float(np.average(values, weights=count)) for count in counts]
    squares = [float(np.average(values**2, weights=count)) for count in counts]
    # An image of one colour has no spread; dividing by one leaves it as it is.
    std = [float(np.sqrt(max(0.0, square - centre**2))) or 1.0 for centre, square in zip(mean, squares, strict=True)]
    return tuple(mean), tuple(std)


def subset_note(title: str, found: tuple[int, int], expected: tuple[int, int]) -> str:
    """Name the counts where an official dataset was found in part; nothing if it is whole."""
    parts = zip(found, expected, ("training", "test"), strict=True)
    short = [f"{here:,} of {whole:,} {what} images" for here, whole, what in parts if here != whole]
    return f"{title}: {', '.join(short)}" if short else ""


_told: set[str] = set()


def tell(note: str) -> None:
    """Say something about the data on standard error (or to the handlers of `logging`), once."""
    if note and note not in _told:
        _told.add(note)
        log.warning("metabayfl: %s", note)
