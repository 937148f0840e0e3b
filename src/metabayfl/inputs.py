"""What is done to inputs before a module sees them."""

from typing import NamedTuple

import torch
from torch import Tensor


class Scaling(NamedTuple):
    """Mean and standard deviation of each channel of inputs in [0, 1]; the model sees (x - mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class Preparation:
    """Copies inputs as a module takes them: bytes as numbers from 0 to 1, scaled, in its type and memory format."""

    def __init__(self, dtype: torch.dtype, channels_last: bool, scaling: Scaling | None) -> None:
        self.dtype, self.channels_last = dtype, channels_last
        self.moments = None if scaling is None else [torch.tensor(values, dtype=dtype) for values in scaling]

    def __call__(self, x: Tensor) -> Tensor:
        """Return a copy; indices, such as words, stay as they are."""
        if not holds_numbers(x):
            return x.clone()
        layout = torch.channels_last if self.channels_last and x.ndim == 4 else torch.contiguous_format
        numbers = x.to(self.dtype, memory_format=layout, copy=True)
        if x.dtype == torch.uint8:
            numbers.div_(255)
        if self.moments is None:
            return numbers
        mean, std = (moment.view(-1, *(1,) * (x.ndim - 2)) for moment in self.moments)
        return numbers.sub_(mean).div_(std)


def holds_numbers(x: Tensor) -> bool:
    """Whether inputs are numbers, real or bytes that stand for numbers from 0 to 1, and not indices such as words."""
    return x.is_floating_point() or x.dtype == torch.uint8
