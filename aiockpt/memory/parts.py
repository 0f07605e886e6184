"""Tensors that move element by element, since their bytes are no run of an entry's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from aiockpt.memory.backings import Part
from aiockpt.memory.device import Pair

__all__ = ["once", "part_pairs"]

# Torch has dtypes that it cannot copy, and a word has no nan that a copy could change.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _physical(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as they lie in memory, as words that torch can copy."""
    tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.conj()
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)  # noqa: SLF001 - torch has no public way
    return tensor.view(_WORDS.get(tensor.itemsize, tensor.dtype))


def part_pairs(parts: Iterable[Part], place: torch.Tensor) -> Iterator[Pair]:
    """Yield each part's elements in the entry's bytes, and where the state has them."""
    for part in parts:
        tensor = _physical(part.tensor)
        there = place.view(tensor.dtype)
        first = int(there.storage_offset()) + part.offset
        yield there.as_strided(tensor.shape, part.stride, first), tensor


def once(destination: torch.Tensor, source: torch.Tensor) -> Pair:
    """Leave out the repetitions of expanded dimensions, which cannot be written."""
    for dim, stride in enumerate(destination.stride()):
        if not stride:
            destination, source = (
                destination.narrow(dim, 0, 1),
                source.narrow(dim, 0, 1),
            )
    return destination, source
