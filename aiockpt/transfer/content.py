"""A checkpoint whose bytes are not here yet, as tensors over memory for them.

The tensors exist as soon as the header is known: over an arena whose pages cost nothing
before they are filled, or over a mapping of the file. So what is wanted can be chosen
among values, and then only that is read.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from ctypes import addressof, c_char
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

from aiockpt.errors import StorageError
from aiockpt.format.dtypes import CODE_BITS, CODES
from aiockpt.format.limits import Limits, enforce
from aiockpt.format.manifest import ForeignHeader, Manifest
from aiockpt.format.paths import Node
from aiockpt.format.references import mentions
from aiockpt.memory.arena import Arena
from aiockpt.runtime.available import spare_memory
from aiockpt.runtime.host_limits import allocating
from aiockpt.state.nodes import Decoders
from aiockpt.state.places import is_filled
from aiockpt.state.rebuild import Frame, assemble, tensors_over
from aiockpt.storage.checkpoint_file import header_of, named
from aiockpt.storage.rangefile import Filed, Landing, OnBytes, Verify, read_ranges
from aiockpt.transfer.landing import Place, PlacedLanding

__all__ = ["Content", "Fetch", "content_of_file", "manifest_of_file"]


class Fetch(Protocol):
    """Brings bytes of a data segment to where they belong."""

    def __call__(
        self, landing: Landing, *, verify: Verify, on_bytes: OnBytes | None
    ) -> None:
        """Bring what ``landing`` wants."""


Memory: TypeAlias = Arena | mmap.mmap


class Content:
    """One data segment, and the values that are made of it.

    Args:
        manifest: What it holds; a foreign header as `manifest_of_file` adopts it.
        fetch: Brings its bytes.
        mapping: The whole file in memory; None: an arena that ``fetch`` fills.
        arena: That arena; None: a new one.

    Attributes:
        arena: The memory of a content that has no mapping.
    """

    arena: Arena

    def __init__(
        self,
        manifest: Manifest,
        fetch: Fetch,
        *,
        limits: Limits,
        allow_pickle: bool,
        mapping: mmap.mmap | None = None,
        arena: Arena | None = None,
    ) -> None:
        self.manifest, self.fetch = manifest, fetch
        self.mapped = mapping is not None
        self._limits, self._allow_pickle = limits, allow_pickle
        self._read: list[tuple[int, int]] = []
        if mapping is not None:
            base = manifest.header_bytes
            self.memory = memoryview(mapping)[base:]
            self.address = addressof(c_char.from_buffer(mapping)) + base
            self._tensors = tensors_over(manifest, mapping, base=base)
        else:
            self.arena = arena = arena or _arena(manifest.segment_bytes)
            self.memory, self.address = arena.buffer, arena.address
            self._tensors = tensors_over(manifest, arena.buffer)

    def __repr__(self) -> str:
        return f"<Content {self.manifest}>"

    def offset_of(self, address: int) -> int | None:
        """Return where an address of the memory is in the segment; None elsewhere."""
        offset = address - self.address
        return offset if 0 <= offset < self.manifest.segment_bytes else None

    def place(self, start: int, stop: int) -> Place:
        """Return the place of a range in its own memory."""
        return Place(start, stop, self.memory[start:stop])

    def read_values(self, *, verify: Verify, on_bytes: OnBytes | None) -> None:
        """Read what values other than tensors are made of, before they are made."""
        places = [self.place(*each) for each in self.value_ranges()]
        if not self.mapped and places:
            self.fetch(PlacedLanding(places), verify=verify, on_bytes=on_bytes)

    def read_whole(self, *, verify: Verify, on_bytes: OnBytes | None) -> None:
        """Read everything; of a mapping, only compare the digests."""
        size = self.manifest.segment_bytes
        whole = PlacedLanding([self.place(0, size)] if size else [])
        if not self.mapped:
            check_memory(size, self._limits)
            self.fetch(whole, verify=verify, on_bytes=on_bytes)
        else:
            self.verify_ranges(whole.ranges(), verify=verify, on_bytes=on_bytes)

    def verify_ranges(
        self,
        ranges: Iterable[tuple[int, int]],
        *,
        verify: Verify,
        on_bytes: OnBytes | None,
    ) -> None:
        """Compare the digests of what is mapped already."""
        if verify != "none" and self.manifest.digests:
            self.fetch(_Nowhere(ranges), verify=verify, on_bytes=on_bytes)

    def assemble(self, nodes: Decoders | None = None) -> object:
        """Return the state dict over the memory, filled or not.

        ``nodes`` are those of a template; see `decoders_for`.

        Raises:
            RemoteProtocolError: its tree has what this process has not registered.
        """
        return assemble(
            Frame.of(self.manifest),
            self._tensors,
            limits=self._limits,
            allow_pickle=self._allow_pickle,
            nodes=nodes,
        )

    def value_ranges(self) -> list[tuple[int, int]]:
        """Return what values other than tensors are made of."""
        entries, views = self.manifest.entries, self.manifest.views
        found = {
            number if number < len(entries) else views[number - len(entries)].storage
            for mention in mentions(self.manifest.tree)
            if not is_filled(mention)
            for number in mention.numbers
            if 0 <= number < self.manifest.tensor_count
        }
        return [
            (entries.starts[entry], entries.stops[entry]) for entry in sorted(found)
        ]


class _Nowhere(PlacedLanding):
    """Ranges that are read to be verified, and forgotten."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        super().__init__(())
        self._ranges = [*ranges]

    def ranges(self) -> list[tuple[int, int]]:
        """Return the ranges."""
        return self._ranges


def check_memory(nbytes: int, limits: Limits) -> None:
    """Refuse to read more than there is memory for.

    Raises:
        LimitExceededError: there is less.
    """
    limit = spare_memory() if limits.max_bytes is None else limits.max_bytes
    enforce("the size of what is to be loaded", nbytes, limit)


def _arena(nbytes: int) -> Arena:
    with allocating("a checkpoint", nbytes):
        return Arena(nbytes)


def manifest_of_file(path: Path, fd: int, *, limits: Limits) -> Manifest:
    """Return what an open safetensors file holds; another tool's has no digests.

    Raises:
        StorageError: it cannot be read, or holds a dtype that torch lacks.
        IntegrityError: the header of our file is damaged.
    """
    header = header_of(path, fd, limits=limits)
    return header if isinstance(header, Manifest) else _adopted(path, header)


def content_of_file(
    path: Path,
    fd: int,
    manifest: Manifest,
    *,
    limits: Limits,
    allow_pickle: bool,
    mapped: bool,
) -> Content:
    """Return a file as content, which is read while it is open.

    ``mapped`` is its memory, which outlives that; else a new arena is.
    """
    filed = Filed(path, fd, manifest.header_bytes, manifest.grid, manifest.digests)
    return Content(
        manifest,
        partial(read_ranges, filed),
        limits=limits,
        allow_pickle=allow_pickle,
        mapping=_mapping(path, fd) if mapped else None,
    )


def _mapping(path: Path, fd: int) -> mmap.mmap:
    with named(path):
        # Private: writing to a tensor does not change the file.
        return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)


def _adopted(path: Path, header: ForeignHeader) -> Manifest:
    for name, code in zip(header.names, header.entries.dtypes, strict=True):
        if CODE_BITS[code] % 8 or code not in CODES:
            detail = f"tensor {name} has dtype {code}, which is not supported"
            raise StorageError(str(path), detail)
    names: list[Node] = [*header.names]
    numbers: list[Node] = [*range(len(names))]
    return Manifest(
        step=0,
        snapshot_id="",
        chunk_bytes=max(header.segment_bytes, 1),
        algorithm="",
        digests=(),
        entries=header.entries,
        views=(),
        tree=["tensors", names, numbers] if names else ["dict", [], []],
        header=header.header,
        header_bytes=header.header_bytes,
    )
