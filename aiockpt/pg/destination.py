"""Where a checkpoint goes: tensors of its own, or those of a template.

Both kinds give the memory that the segment is received into, and afterwards the state
dict. Whatever the peer can make fail happens in ``assemble``, before the first byte of
a template is written (unless ``direct`` has let them in already).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, Protocol

import torch

from aiockpt._bridge import Bridge
from aiockpt._copy import CopyPlan, InPlace
from aiockpt._device import Event, PortFor, completed
from aiockpt._groups import Backing
from aiockpt.errors import LimitExceededError
from aiockpt.memory import Arena, available_memory
from aiockpt.rebuild import assemble, parts_over, tensors_over
from aiockpt.template import Match
from aiockpt.wire.limits import Limits, enforce
from aiockpt.wire.manifest import Manifest

__all__ = ["Destination", "Fresh", "InTemplate"]

# A receiver with less to spare would take the host down with it.
_SHARE_OF_MEMORY: Final = 0.9

# Tensors per call into torch, which keeps the interpreter lock for all of them.
_SLICE: Final = 1000


class Destination(Protocol):
    """Somewhere to receive into."""

    @property
    def memory(self) -> Arena | InPlace:
        """The data segment."""

    @property
    def touched(self) -> bool:
        """Whether a template may have been modified."""

    async def build(self) -> None:
        """Make what needs no bytes, while these arrive."""

    async def assemble(self) -> object:
        """Return the state dict, whose bytes have been verified."""

    async def load(self) -> None:
        """Bring to a template what is not there yet."""


class Fresh:
    """Tensors over an arena of their own."""

    touched = False

    def __init__(
        self, manifest: Manifest, bridge: Bridge, *, limits: Limits, allow_pickle: bool
    ) -> None:
        self._manifest = manifest
        self._bridge = bridge
        self._assemble = partial(
            assemble, manifest, limits=limits, allow_pickle=allow_pickle
        )
        self._tensors: list[torch.Tensor] = []
        self.memory = _allocate(manifest, manifest.segment_bytes, limits)

    async def build(self) -> None:
        """Make the tensors."""
        self._tensors = await self._bridge.run(
            tensors_over, self._manifest, self.memory.buffer
        )

    async def assemble(self) -> object:
        """Put them into the tree."""
        return await self._bridge.run(self._assemble, self._tensors)

    async def load(self) -> None:
        """Do nothing: everything is in its place."""


class InTemplate:
    """The tensors of a template, at the end or (``direct``) from the beginning.

    Args:
        manifest: Of what comes.
        match: Where it goes.
        direct: Let bytes into the template as they arrive.
    """

    def __init__(
        self,
        manifest: Manifest,
        match: Match,
        bridge: Bridge,
        *,
        direct: bool,
        ports: PortFor,
        limits: Limits,
        allow_pickle: bool,
    ) -> None:
        self._manifest = manifest
        self._match = match
        self._bridge = bridge
        self._direct = direct
        self._assemble = partial(
            assemble, manifest, limits=limits, allow_pickle=allow_pickle
        )
        offsets = [entry.data_offsets for entry in manifest.entries]
        used = manifest.segment_bytes
        if direct:
            used -= sum(_at_home(ports, backing) for backing in match.backings)
        self._arena = _allocate(manifest, used, limits)
        self._copies = CopyPlan(
            match.backings,
            [start for start, _ in offsets],
            [stop - start for start, stop in offsets],
            arena=self._arena,
            port_for=ports,
        )
        self.memory: Arena | InPlace = self._arena
        if direct:
            self.memory = self._copies.in_place()
        self.touched = False

    async def build(self) -> None:
        """Say that bytes are on their way."""
        self.touched = self._direct and bool(self._match.tensors)

    async def assemble(self) -> object:
        """Put the template's tensors, and the peer's values, into the tree."""
        return await self._bridge.run(self._put_together)

    async def load(self) -> None:
        """Bring to the template what is still in the arena, all of it or nothing.

        Once begun it goes on to its end, also if cancelled (on a device, in the
        background), so that a template is never half filled.
        """
        fences = self._copies.fences()
        try:
            for event in await self._bridge.run(self._load, fences):
                await completed(event)
        except BaseException:
            self._bridge.post(self._copies.drain)  # keeps the memory until it is idle
            raise
        await self._bridge.run(self._arena.close)

    def _put_together(self) -> object:
        manifest, match = self._manifest, self._match
        buffer = self._arena.buffer
        values = parts_over(manifest, buffer, parts=match.parts, blobs=match.blobs)
        found = {**match.tensors, **values}
        unused = torch.empty(0)  # a number that the tree does not mention
        numbers = range(manifest.tensor_count)
        return self._assemble([found.get(number, unused) for number in numbers])

    def _load(self, fences: dict[torch.device, Event]) -> list[Event]:
        _mark_changed(self._match.tensors.values())
        self.touched = True
        events = self._copies.load_parts(fences)
        grid = self._manifest.grid
        for chunk in range(len(grid)):
            start, stop = grid.range(chunk)
            if not self._direct:
                self._copies.load_host(start, stop)
            events += self._copies.load_device(start, stop, fences)
        return events


def _allocate(manifest: Manifest, nbytes: int, limits: Limits) -> Arena:
    """Return an arena for the segment, of which ``nbytes`` are going to be used."""
    available = available_memory()
    limit = limits.max_bytes
    if limit is None:
        limit = int(available * _SHARE_OF_MEMORY)
    enforce("the checkpoint's size", nbytes, limit)
    size = manifest.segment_bytes
    try:
        return Arena(size)
    except (OSError, OverflowError, MemoryError, ValueError) as error:
        what = "the checkpoint's size, for which there is no memory,"
        raise LimitExceededError(what, limit=available, actual=size) from error


def _at_home(ports: PortFor, backing: Backing) -> int:
    """Return how many bytes of an entry need no arena in a direct receive."""
    host = not backing.parts and ports(backing.tensor.device) is None
    return backing.nbytes if host else 0


def _mark_changed(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd that the memory changes behind its back."""
    counted: Sequence[torch.Tensor] = [t for t in tensors if not t.is_inference()]
    for start in range(0, len(counted), _SLICE):
        torch.autograd.graph.increment_version(counted[start : start + _SLICE])
