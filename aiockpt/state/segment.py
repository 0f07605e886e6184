"""The data segment of a checkpoint, as tensors over memory for its bytes.

The tensors exist as soon as the manifest is known: over an arena whose pages cost
nothing before they are filled, or over a mapping of the file. So a load chooses among
values what it wants, and then only that is read.
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
from aiockpt.runtime.system import allocating, spare_memory
from aiockpt.state.nodes import Decoders
from aiockpt.state.pairing import is_filled
from aiockpt.state.rebuild import Frame, assemble, tensors_over

__all__ = ["Segment", "check_memory"]


class Segment:
    """One data segment, and the values that are made of it.

    Args:
        manifest: What it holds.
        limits: Bound the tree.
        allow_pickle: Accept leaves that only pickle carries.
        arena: Its memory; None: a new arena.
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
        """Return where an address is in the segment; None if it is elsewhere."""
        offset = address - self.arena.address
        return offset if 0 <= offset < self.manifest.segment_bytes else None

    def entry_at(self, offset: int) -> int:
        """Return the entry that has a byte."""
        return bisect_right(self.manifest.entries.starts, offset) - 1

    def value_ranges(self, tree: Node) -> list[tuple[int, int]]:
        """Return the bytes that a tree's values other than tensors are made of."""
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
        """Return what a tree is over the memory, filled or not.

        ``nodes`` are those of a template; see `decoders_for`.

        Raises:
            RemoteProtocolError: its tree has what this process has not registered.
        """
        return assemble(
            replace(Frame.of(self.manifest), tree=tree),
            self._tensors,
            limits=self._limits,
            allow_pickle=self._allow_pickle,
            nodes=nodes,
        )


def check_memory(ranges: Iterable[tuple[int, int]], limits: Limits) -> None:
    """Refuse to load more than there is memory for.

    Raises:
        LimitExceededError: there is less.
    """
    limit = spare_memory() if limits.max_bytes is None else limits.max_bytes
    nbytes = sum(stop - start for start, stop in ranges)
    enforce("the size of what is to be loaded", nbytes, limit)
