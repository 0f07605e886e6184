"""The data segment of a checkpoint: its manifest, and memory for its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch

from aiockpt.format.limits import Limits, enforce
from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import Arena
from aiockpt.runtime.system import FREE_MEMORY, allocating, spare_memory
from aiockpt.state.catalogue import in_memory
from aiockpt.state.flatten import survey


class Segment:
    """One data segment, and the memory that its bytes are read into.

    The pages of new memory cost nothing before they are filled.

    Args:
        manifest: Describes the checkpoint.
        arena: The memory; None: a new arena.
        is_there: Whether the memory holds the bytes already.

    Attributes:
        tensors: The tensors by number, if a program has made them already.
        odd: Its values that have no encoding, by the payload of `ODD`.
        on_device: The bytes of the entries that a device receives by itself.
        lent: The view through which a pool lends the arena, if one does. The pool takes
            the arena back when nothing refers to this view any more.
    """

    tensors: Sequence[torch.Tensor] | None = None
    odd: Sequence[object] = ()
    on_device: Mapping[int, torch.Tensor] = MappingProxyType({})
    lent: memoryview | None = None

    def __init__(
        self, manifest: Manifest, *, arena: Arena | None = None, is_there: bool = False
    ) -> None:
        if arena is None:
            with allocating("a checkpoint", manifest.segment_bytes):
                arena = Arena(manifest.segment_bytes)
        self.manifest, self.arena, self.is_there = manifest, arena, is_there

    @classmethod
    def of(cls, state_dict: object, *, limits: Limits) -> Segment:
        """Return the segment of a state dict, whose tensors stay where they are.

        Raises:
            LimitExceededError: it is too deep, or has too many nodes.
        """
        odd: list[object] = []
        own = survey(
            state_dict, limits=limits, allow_pickle=False, writing=False, odd=odd
        )
        found, numbers = own.described()
        manifest = in_memory(found.entries, found.views, found.tree)
        segment = cls(manifest, arena=Arena(0), is_there=True)
        segment.odd = odd
        segment.tensors = [torch.empty(0)] * manifest.tensor_count
        for number, tensor in zip(numbers, own.tensors, strict=True):
            segment.tensors[number] = tensor
        return segment

    @property
    def buffer(self) -> memoryview:
        """The memory, for tensors to lie over."""
        return self.arena.buffer if self.lent is None else self.lent


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
