"""The manifest, which describes a checkpoint, and its JSON field by field.

A `Manifest` is validated: its tensors can be allocated, fetched and viewed without
further checks. Only its tree is still untrusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import Final

import msgspec

from aiockpt.errors import RemoteProtocolError
from aiockpt.format.chunks import ChunkGrid
from aiockpt.format.dtypes import torch_name
from aiockpt.format.entries import Bytes, Count, Entries, Shape
from aiockpt.format.paths import Node

VERSION: Final = 1

REQUIRES_GRAD: Final = 1
PARAMETER: Final = 2
CONJ: Final = 4
NEG: Final = 8
COMPACTED: Final = 16
"""The sender's view was sparse in its storage and was staged as a dense copy."""


class TensorSpec(
    msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True
):
    """A tensor inside a storage.

    ``dtype`` is torch's name of it; ``stride`` and ``offset`` count elements.
    """

    storage: Count
    dtype: str
    shape: Shape
    stride: Shape
    offset: Count
    flags: Count


class ManifestDocument(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """The manifest as it travels: ``digests`` are joined; views and tree are JSON."""

    version: int
    step: Count
    chunk_bytes: Count
    algorithm: str
    digests: str
    entries: Count
    views: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tree: msgspec.Raw


def dense_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor (as torch counts)."""
    reversed_sizes = (max(size, 1) for size in reversed(shape))
    return tuple(accumulate(reversed_sizes, mul, initial=1))[-2::-1]


@dataclass(frozen=True, slots=True)
class Outline:
    """What is needed to fetch the chunks of a checkpoint."""

    step: int
    snapshot_id: str
    grid: ChunkGrid
    digests: tuple[str, ...] = field(repr=False)
    header_bytes: int

    @property
    def total_bytes(self) -> int:
        """The length of the file."""
        return self.header_bytes + self.grid.segment_bytes


@dataclass(frozen=True, slots=True, repr=False)
class Manifest:
    """A validated manifest.

    Tensor ``i < len(entries)`` is what entry i describes by itself: dense, of its
    dtype and shape, without flags. Tensor ``len(entries) + j`` is ``views[j]``.
    ``header`` is what is served and stored: the 8 length bytes, JSON and padding,
    together ``header_bytes`` bytes. In a file the data segment follows it.
    """

    step: int
    snapshot_id: str
    chunk_bytes: int
    algorithm: str
    digests: tuple[str, ...]
    entries: Entries
    views: tuple[TensorSpec, ...]
    tree: Node
    header: Bytes
    header_bytes: int

    @property
    def names(self) -> list[str]:
        """The names of the entries."""
        return self.entries.names

    @property
    def segment_bytes(self) -> int:
        """The length of the data segment."""
        return self.entries.nbytes

    def without_header(self) -> Manifest:
        """Return a copy for readers; the header takes as much memory as the rest."""
        return replace(self, header=b"")

    @property
    def total_bytes(self) -> int:
        """The length of the file."""
        return self.header_bytes + self.segment_bytes

    @property
    def outline(self) -> Outline:
        """The part that is needed to fetch the chunks."""
        return Outline(
            self.step, self.snapshot_id, self.grid, self.digests, self.header_bytes
        )

    @property
    def tensor_count(self) -> int:
        """How many tensors the tree may refer to."""
        return len(self.entries) + len(self.views)

    @property
    def grid(self) -> ChunkGrid:
        """The chunks of the data segment."""
        return ChunkGrid(self.segment_bytes, self.chunk_bytes, self.algorithm)

    def storage_of(self, index: int) -> int:
        """Return the entry that holds tensor ``index``, which must exist."""
        count = len(self.entries)
        return index if index < count else self.views[index - count].storage

    def tensor(self, index: int) -> TensorSpec:
        """Return the description of tensor ``index``.

        Raises:
            RemoteProtocolError: there is none. Indices come from the peer's tree.
        """
        if not 0 <= index < self.tensor_count:
            raise RemoteProtocolError(f"no tensor {index} of {self.tensor_count}")
        if index >= len(self.entries):
            return self.views[index - len(self.entries)]
        entry = self.entries[index]
        stride = dense_stride(entry.shape)
        return TensorSpec(index, torch_name(entry.dtype), entry.shape, stride, 0, 0)


@dataclass(frozen=True, slots=True)
class ForeignHeader:
    """The validated header of a safetensors file that aiockpt did not write."""

    entries: Entries = field(repr=False)
    metadata: dict[str, str]
    header: Bytes = field(repr=False)

    @property
    def names(self) -> list[str]:
        """The names of the entries."""
        return self.entries.names

    @property
    def segment_bytes(self) -> int:
        """The length of the data segment."""
        return self.entries.nbytes

    @property
    def header_bytes(self) -> int:
        """The length of the header: the data segment's offset in the file."""
        return len(self.header)
