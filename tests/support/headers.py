"""The entries of a header, made from rows."""

from __future__ import annotations

from typing import TypeAlias

from aiockpt.format.entries import Entries, place

__all__ = ["Row", "entries_of"]

Row: TypeAlias = tuple[str, str, tuple[int, ...], int]
"""An entry's name, code, shape and bytes."""


def entries_of(*rows: Row) -> Entries:
    """Return the entries of these rows, one after the other, whatever they say."""
    if not rows:
        return Entries()
    names, codes, shapes, sizes = zip(*rows, strict=True)
    return place(names, codes, shapes, sizes, [1] * len(rows))[1]
