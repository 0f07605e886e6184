"""What a peer's payload may make a decoder read and allocate.

A tensor of a few bytes can be a view of 2**59 elements, and a tree can name one tensor
a million times. Decoders of sparse and quantized tensors and of arrays look at every
element, and some copy them, so what they are given is counted first: elements that
travelled, each a few times over at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

__all__ = ["Allowance", "TooMuchError", "exactly", "sizes"]

_T = TypeVar("_T")

# A tied sparse tensor is read wherever it stands; nothing that is copied is ever tied.
_TIES = 16


class TooMuchError(ValueError):
    """A payload stands for more bytes than travelled."""


class Allowance:
    """What all decoders of one tree may read together.

    Args:
        travelled: Bytes that the peer sent. Copies must not exceed them; what is only
            read may be read 16 times over.
    """

    def __init__(self, travelled: int) -> None:
        self._left = _TIES * travelled

    def __repr__(self) -> str:
        return f"<Allowance bytes={self._left // _TIES}>"

    def spend(self, payload: Sequence[object], *, copied: int | None) -> None:
        """Count what is in a payload, of which the item ``copied`` will be copied.

        Raises:
            TooMuchError: a tensor has more elements than its memory holds, or the
                decoders have read more than travelled.
        """
        for index, item in enumerate(payload):
            self._left -= _held_bytes(item) * (_TIES if index == copied else 1)
        if self._left < 0:
            raise TooMuchError("the same bytes are used again and again")


def _held_bytes(item: object) -> int:
    if isinstance(item, bytes):
        return len(item)
    if not isinstance(item, torch.Tensor):
        return 0
    if item.layout is not torch.strided or item.is_quantized:
        raise TooMuchError("one of its parts is no plain tensor")
    nbytes = item.numel() * item.itemsize
    if nbytes > item.untyped_storage().nbytes():
        raise TooMuchError(f"a part of {nbytes} bytes repeats a few that travelled")
    return nbytes


def exactly(expected: type[_T], value: object) -> _T:
    """Return a value of exactly this type: others read alike and never end."""
    if type(value) is not expected:
        raise TypeError(f"a {type(value).__name__} instead of a {expected.__name__}")
    return value


def sizes(value: object) -> tuple[int, ...]:
    """Return a tuple of sizes."""
    found = exactly(tuple, value)
    if any(exactly(int, size) < 0 for size in found):
        raise ValueError("a negative size")
    return found
