"""The digest of bytes that are on a device, without bringing them to the host.

A chunk is zero-padded to rows of 256 KiB. Each row, as signed 32-bit little-endian
words ``w``, is folded with two rows of 64-bit keys ``k`` to ``sum(w[i] * k[i])`` modulo
2**64. The chunk's digest is the XXH3 hash of its folded rows, of 16 bytes each.

Multilinear hashing is universal: two rows that differ have the same sum for one row of
keys in 2**33 at most (Lemire and Kaser, *Strongly universal string hashing is fast*,
2014), and there are two. The arithmetic is exact and the sum has no order, so every
device finds the same. Like XXH3 it detects faults; it does not prevent forgery.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from hashlib import shake_128
from typing import Final

import torch

from aiockpt.format.chunks import digest
from aiockpt.memory.device import Event

__all__ = ["Folded", "fold", "keys"]

_WORDS: Final = 1 << 16
_ROW: Final = 4 * _WORDS
_AT_ONCE: Final = 16 * _ROW
"""Bytes whose words are widened at once, which takes five times as much memory."""


@dataclass(frozen=True, slots=True)
class Folded:
    """The rows of a chunk on their way to the host, where they are once ``event`` is.

    ``rows`` are those on the device: they must live until then.
    """

    rows: torch.Tensor
    arrived: torch.Tensor
    event: Event

    def digest(self) -> str:
        """Return the chunk's digest."""
        return digest([ctypes.string_at(self.arrived.data_ptr(), self.arrived.nbytes)])


def keys(device: torch.device) -> torch.Tensor:
    """Return the keys, ``[2, words]``; the same everywhere."""
    stream = shake_128(b"aiockpt").digest(2 * 8 * _WORDS)
    return torch.frombuffer(bytearray(stream), dtype=torch.int64).view(2, -1).to(device)


def fold(data: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the folded rows of bytes, ``[rows, 2]``, on their device."""
    folded = []
    for start in range(0, data.numel(), _AT_ONCE):
        words = _rows(data[start : start + _AT_ONCE]).to(torch.int64)
        folded.append(torch.stack([(words * key).sum(1) for key in keys], 1))
    return torch.cat(folded)


def _rows(data: torch.Tensor) -> torch.Tensor:
    size = data.numel()
    if size % _ROW or data.storage_offset() % 4 or data.data_ptr() % 4:
        padded = data.new_zeros(size + -size % _ROW)
        padded[:size] = data
        data = padded
    return data.view(torch.int32).view(-1, _WORDS)
