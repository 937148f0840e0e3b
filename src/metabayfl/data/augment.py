"""Random crops and flips of a mini-batch of images."""

import torch
from torch import Tensor
from torch.nn.functional import pad

MARGIN = 4
SMALLEST_SIDE = 16


def crop_and_flip(images: Tensor, rng: torch.Generator) -> Tensor:
    """Move each image by up to 4 pixels in each direction, black outside, and mirror every second one, at random."""
    count, _, height, width = images.shape
    down, right = torch.randint(2 * MARGIN + 1, (2, count), generator=rng)
    mirrored = torch.randint(2, (count,), generator=rng).bool()
    windows = pad(images, (MARGIN,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    moved = windows[torch.arange(count), :, down, right]
    moved[mirrored] = moved[mirrored].flip(3)
    return moved
