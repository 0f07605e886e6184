"""The state dicts that are moved: same bytes, cut into few or many tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import torch

from aiockpt.memory.arena import view_of_address

__all__ = [
    "MANY",
    "SHAPES",
    "Shape",
    "bytes_of",
    "cut",
    "looks_right",
    "numbered",
    "shape_of",
]

MANY = 100_000
SHAPES = ("1m", "256m", "one", "100k")
"""Tensors of 1 MiB; of 256 MiB; one tensor; 100,000 tensors of 4 KiB."""

_KIB, _MIB = 1 << 10, 1 << 20
_CHECKED = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """A state dict of ``count`` tensors of ``tensor_bytes`` bytes each."""

    key: str
    count: int
    tensor_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.count * self.tensor_bytes

    @property
    def is_large(self) -> bool:
        """Whether bytes dominate, and not the number of tensors."""
        return self.key != "100k"

    def __str__(self) -> str:
        if self.tensor_bytes < _MIB:
            return f"{self.count:,} x {self.tensor_bytes / _KIB:.4g} KiB"
        return f"{self.count:,} x {self.tensor_bytes / _MIB:.4g} MiB"


def shape_of(key: str, size: int) -> Shape:
    """Return the shape that ``key`` means for about ``size`` bytes.

    Where 100,000 tensors would be more than half of ``size``, they are fewer.
    """
    if key == "100k":
        return Shape(key, max(min(MANY, size // (8 * _KIB)), 1), 4 * _KIB)
    wanted = {"1m": _MIB, "256m": 256 * _MIB, "one": size}[key]
    each = min(wanted, size) // 8 * 8
    return Shape(key, size // each, each)


def numbered(nbytes: int) -> torch.Tensor:
    """Return touched memory whose 8-byte words count up: ``uint8``, ``[nbytes]``."""
    flat = torch.empty(nbytes, dtype=torch.uint8)
    torch.arange(nbytes // 8, out=flat[: nbytes // 8 * 8].view(torch.int64))
    return flat


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor, without numpy."""
    return view_of_address(flat.data_ptr(), flat.nbytes, flat)


def cut(flat: torch.Tensor, shape: Shape) -> dict[str, torch.Tensor]:
    """Return a state dict whose tensors lie in ``flat``, each a storage of its own."""
    buffer = bytes_of(flat)
    elements, each = shape.tensor_bytes // 4, shape.tensor_bytes
    return {
        f"layers.{i}.weight": torch.frombuffer(
            buffer, dtype=torch.float32, count=elements, offset=i * each
        )
        for i in range(shape.count)
    }


def looks_right(state: Mapping[str, torch.Tensor], shape: Shape) -> bool:
    """Whether the first and last words of some tensors are those of `numbered`."""
    words = shape.tensor_bytes // 8
    return len(state) == shape.count and all(
        _word(tensor, 0) == i * words
        and _word(tensor, words - 1) == (i + 1) * words - 1
        for i, tensor in _some(state, shape)
    )


def _some(
    state: Mapping[str, torch.Tensor], shape: Shape
) -> Iterator[tuple[int, torch.Tensor]]:
    spread = range(0, shape.count, max(shape.count // _CHECKED, 1))
    for i in chain(spread, [shape.count - 1]):
        yield i, state[f"layers.{i}.weight"]


def _word(tensor: torch.Tensor, index: int) -> int:
    return ctypes.c_int64.from_address(tensor.data_ptr() + 8 * index).value
