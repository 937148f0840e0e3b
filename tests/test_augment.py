"""Crops and flips of images."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from metabayfl.data.augment import MARGIN, crop_and_flip
from metabayfl.types import TrainData


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(seed=st.integers(0, 999))
def test_each_result_is_a_window_of_the_padded_image_or_of_its_mirror(seed: int) -> None:
    images = torch.randint(1, 256, (3, 2, 16, 18), dtype=torch.uint8, generator=generator(seed))
    padded = torch.nn.functional.pad(images, (MARGIN,) * 4)
    for image, result in zip(padded, crop_and_flip(images, generator(seed)), strict=True):
        windows = image.unfold(1, 16, 1).unfold(2, 18, 1).permute(1, 2, 0, 3, 4).flatten(0, 1)
        assert any(torch.equal(result, window) or torch.equal(result, window.flip(2)) for window in windows)


def test_all_moves_and_both_directions_occur() -> None:
    image = torch.zeros(2000, 1, 16, 16)
    image[:, 0, 8, 4] = 1
    places = {tuple(place) for place in crop_and_flip(image, generator(0)).nonzero()[:, 2:].tolist()}
    assert {row for row, _ in places} == set(range(4, 13))
    assert {column for _, column in places} == {*range(0, 9), *range(7, 16)}


def test_batches_are_augmented_and_keyed() -> None:
    images, labels = torch.rand(10, 3, 16, 16), torch.arange(10)
    data = TrainData(images, labels, images[:0], labels[:0], batch_size=4, augment=crop_and_flip)
    plain = TrainData(images, labels, images[:0], labels[:0], batch_size=4)
    one, same = (list(data.batches(2, generator(3))) for _ in range(2))
    assert all(
        torch.equal(a, b) for left, right in zip(one, same, strict=True) for a, b in zip(left, right, strict=True)
    )
    assert sorted(torch.cat([y for _, y in one]).tolist()) == sorted([*range(10)] * 2)
    assert not torch.equal(one[0][0], next(plain.batches(1, generator(3)))[0])
