"""Named tensors as one flat vector and back."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from metabayfl.options import InputError


@dataclass(frozen=True)
class Slot:
    """The place of one named tensor in a flat vector; `channels_last` stores a convolution as [out, h, w, in]."""

    name: str
    shape: torch.Size
    start: int
    channels_last: bool = False

    @property
    def stop(self) -> int:
        """The end of the slot."""
        return self.start + self.shape.numel()

    def view(self, flat: Tensor) -> Tensor:
        """Return the tensor as a view of the vector, in its usual shape."""
        piece = flat[self.start : self.stop]
        if not self.channels_last:
            return piece.view(self.shape)
        out, into, height, width = self.shape
        return piece.view(out, height, width, into).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Layout:
    """The order of named tensors in a flat vector."""

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, torch.Size, bool]]) -> "Layout":
        """Lay tensors out one after the other."""
        slots: list[Slot] = []
        for name, shape, channels_last in tensors:
            slots.append(Slot(name, shape, slots[-1].stop if slots else 0, channels_last))
        return cls(tuple(slots))

    @property
    def size(self) -> int:
        """How many numbers the vector holds."""
        return self.slots[-1].stop if self.slots else 0

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Copy out the named tensors that a vector (or its beginning) covers, in the usual memory order."""
        covered = [slot for slot in self.slots if slot.stop <= len(flat)]
        return {slot.name: slot.view(flat).clone(memory_format=torch.contiguous_format) for slot in covered}

    def flatten(self, tensors: dict[str, Tensor]) -> Tensor:
        """Undo `unflatten`; a tensor that is missing or does not belong here is refused."""
        slots = self.slots[: len(tensors)]
        if strange := {slot.name for slot in slots} ^ tensors.keys():
            raise InputError(f"these tensors are missing or unknown: {', '.join(sorted(strange))}")
        dtype = next((tensor.dtype for tensor in tensors.values()), None)
        flat = torch.empty(slots[-1].stop if slots else 0, dtype=dtype)
        for slot in slots:
            slot.view(flat).copy_(tensors[slot.name])
        return flat
