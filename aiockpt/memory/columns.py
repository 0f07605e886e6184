"""Columns of numbers, as arrays for whoever looks one up, and as torch computes them.

There may be 100,000 numbers. Torch does in microseconds, without the interpreter lock,
what takes Python milliseconds with it.
"""

from __future__ import annotations

from array import array

import torch

__all__ = ["column", "numbers"]


def numbers(column: array[int]) -> torch.Tensor:
    """Return a column of 64-bit numbers as a tensor over its memory: ``int64``, [n].

    The column must not grow as long as the tensor is used.
    """
    if not column:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.frombuffer(column, dtype=torch.int64)


def column(found: torch.Tensor, typecode: str = "q") -> array[int]:
    """Return numbers as a column of their own."""
    own = array(typecode, bytes(8 * found.numel()))
    numbers(own).copy_(found)
    return own
