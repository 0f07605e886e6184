"""The data segment of a checkpoint, as tensors over memory for its bytes.

The tensors exist as soon as the manifest is known. They lie over an arena, whose pages
cost nothing before they are filled, or over a mapping of the file. So a load can choose
among the values first, and then read only the bytes of the chosen ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace

from aiockpt.format.limits import Limits, enforce
from aiockpt.format.manifest import Manifest
from aiockpt.format.paths import Node
from aiockpt.format.references import mentions
from aiockpt.memory.arena import Arena
from aiockpt.runtime.system import FREE_MEMORY, allocating, spare_memory
from aiockpt.state.nodes import Decoders
from aiockpt.state.pairing import is_filled
from aiockpt.state.rebuild import Frame, assemble, tensors_over

__all__ = ["Segment", "check_memory"]


class Segment:
    """One data segment, and the values that are made of it.

    Args:
        manifest: Describes the checkpoint.
        limits: Bound the tree.
        allow_pickle: Accept leaves that only pickle can encode.
        arena: The memory; None: a new arena.
        is_there: Whether the memory holds the bytes already.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        limits: Limits,
        allow_pickle: bool,
        arena: Arena | None = None,
        is_there: bool = False,
    ) -> None:
        if arena is None:
            with allocating("a checkpoint", manifest.segment_bytes):
                arena = Arena(manifest.segment_bytes)
        self.manifest, self.arena, self.is_there = manifest, arena, is_there
        self._limits, self._allow_pickle = limits, allow_pickle
        self._tensors = tensors_over(manifest, arena.buffer)

    def __repr__(self) -> str:
        return f"<Segment {self.manifest}>"

    def offset_of(self, address: int) -> int | None:
        """Return the segment offset of an address; None if it is outside."""
        offset = address - self.arena.address
        return offset if 0 <= offset < self.manifest.segment_bytes else None

    def entry_at(self, offset: int) -> int:
        """Return the entry that contains the byte at ``offset``."""
        return bisect_right(self.manifest.entries.starts, offset) - 1

    def value_ranges(self, tree: Node) -> list[tuple[int, int]]:
        """Return the byte ranges that the tree's non-tensor values are made of."""
        entries, views = self.manifest.entries, self.manifest.views
        found = {
            number if number < len(entries) else views[number - len(entries)].storage
            for mention in mentions(tree)
            if not is_filled(mention)
            for number in mention.numbers
            if 0 <= number < self.manifest.tensor_count
        }
        return [
            (entries.starts[entry], entries.stops[entry]) for entry in sorted(found)
        ]

    def assemble(self, tree: Node, nodes: Decoders | None = None) -> object:
        """Return the state dict of a tree; its memory may not be filled yet.

        ``nodes`` decode the types of a template; see `decoders_for`.

        Raises:
            RemoteProtocolError: the tree has a leaf type that this process has not
                registered.
        """
        return assemble(
            replace(Frame.of(self.manifest), tree=tree),
            self._tensors,
            limits=self._limits,
            allow_pickle=self._allow_pickle,
            nodes=nodes,
        )


def check_memory(ranges: Iterable[tuple[int, int]], limits: Limits) -> None:
    """Check that the host has memory for these ranges.

    Raises:
        LimitExceededError: it has too little.
    """
    nbytes = sum(stop - start for start, stop in ranges)
    what = "the size of what is to be loaded"
    if limits.max_bytes is None:
        enforce(what, nbytes, spare_memory(), remedy=FREE_MEMORY)
    enforce(what, nbytes, limits.max_bytes, "max_bytes")
