"""Random crops and flips of a mini-batch of images."""

import torch
from torch import Tensor
from torch.nn.functional import pad

MARGIN = 4
SMALLEST_SIDE = 16


def crop_and_flip(images: Tensor, rng: torch.Generator) -> Tensor:
    """Move each image by up to 4 pixels in each direction, black outside, and mirror every second one, at random."""
    count, channels, height, width = images.shape
    moved = torch.randint(2 * MARGIN + 1, (count, 2), generator=rng)
    mirrored = torch.randint(2, (count, 1), generator=rng).bool()
    columns = torch.arange(width).expand(count, width)
    columns = torch.where(mirrored, columns.flip(1), columns) + moved[:, 1:]
    rows = torch.arange(height) + moved[:, :1]
    padded = pad(images, (MARGIN,) * 4)
    places = (rows[:, None, :, None], columns[:, None, None, :])
    return padded[torch.arange(count)[:, None, None, None], torch.arange(channels)[None, :, None, None], *places]
