"""Where a checkpoint goes: into tensors of its own, or into those of a template.

Either kind has the memory that the data segment is received into, and gives the state
dict afterwards. Whatever a peer can make fail happens in ``assemble``, before the first
byte of a template is written (unless ``direct`` has let them in already).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import torch

from aiockpt.format.chunks import ChunkGrid, chunks_over
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import Arena, ArenaPool, Loan, Memory, lend
from aiockpt.memory.copies import Backings, CopyPlan, Fences, mark_changed
from aiockpt.memory.device import Event, PortFor, completed, keep_until
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.tasks import beside
from aiockpt.state.nodes import Decoders
from aiockpt.state.rebuild import (
    Away,
    Frame,
    assemble,
    check_meshes,
    parts_over,
    tensors_over,
)
from aiockpt.state.template import Match, Template

__all__ = [
    "Destination",
    "Fresh",
    "InTemplate",
    "Terms",
    "destination_of",
]

_NOTHING: Final[Away] = {}

# Page-locked memory is there as a whole: at least so much of it has to be of use.
_USED: Final = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a receive accepts, and whether bytes go straight into a template.

    ``warm`` lends the memory that it needs, if some is kept. ``ahead`` says that who
    brings the bytes has no time to touch new pages.
    """

    limits: Limits
    allow_pickle: bool
    direct: bool
    ports: PortFor
    warm: ArenaPool | None = None
    ahead: bool = False


class Destination(Protocol):
    """Somewhere to receive into.

    Attributes:
        values: The chunks that must be there before `plan` is called.
    """

    values: Sequence[int]

    @property
    def memory(self) -> Memory:
        """The data segment."""

    @property
    def arena(self) -> Arena:
        """Where the data segment is, as far as it is in no template's memory."""

    @property
    def touched(self) -> bool:
        """Whether a template may have been modified."""

    @property
    def is_early(self) -> bool:
        """Whether something of it goes to a device while other chunks travel."""

    def plan(self) -> Sequence[int]:
        """Return the other chunks that are wanted; for a thread."""

    def begin(self) -> None:
        """Say that bytes are on their way, outside of `receiving`."""

    def receiving(self) -> AbstractAsyncContextManager[None]:
        """Begin; load early what `complete` is told of in the block."""

    async def prepare(self, start: int, stop: int) -> None:
        """Have the memory of ``[start, stop)`` ready for its bytes."""

    def complete(self, chunk: int) -> None:
        """Take note, in `receiving`, that a chunk is verified; on the loop."""

    async def assemble(self) -> object:
        """Return the state dict, all of whose bytes have been verified."""

    async def load(self) -> None:
        """Bring to a template what is not there yet."""

    def abandon(self) -> None:
        """Keep the memory as long as something is copied from it, and no longer.

        For who goes no further, once all that was called here has ended or failed.
        """

    def discard(self, *, late: bool) -> None:
        """Free the memory after `abandon`: tracebacks may keep this for a while.

        For who knows that nobody writes to it any more. A device that still copies to
        it (``late``) needs its addresses, but not what is there.
        """


def destination_of(
    manifest: Manifest,
    template: Template | None,
    terms: Terms,
    bridge: Bridge,
    arena: Arena | None = None,
) -> Destination:
    """Return where the checkpoint goes; for a thread.

    Without a template nothing refers to ``manifest`` afterwards. ``arena`` is memory
    that has the data segment already; None takes new memory.

    Raises:
        TemplateMismatchError: the template does not fit.
        LimitExceededError: there is no memory for it.
        RemoteProtocolError: torch has no such tensor.
        DeviceMeshError: a distributed tensor has no place in this process.
    """
    if template is None:
        check_meshes(Frame.of(manifest), limits=terms.limits)
        return Fresh(manifest, terms, bridge, arena=arena)
    match = template.match(manifest)
    return InTemplate(manifest, match, terms, bridge, arena=arena)


class Fresh:
    """Tensors over an arena of their own, made before their bytes arrive.

    Those that are ``away`` have other memory.
    """

    touched = is_early = False
    values: Sequence[int] = ()

    def __init__(
        self,
        manifest: Manifest,
        terms: Terms,
        bridge: Bridge,
        away: Away = _NOTHING,
        *,
        arena: Arena | None = None,
    ) -> None:
        self._terms, self._bridge = terms, bridge
        used = manifest.segment_bytes - _nbytes_of(away)
        self._owns = arena is None
        self._loan = Loan(arena) if arena else _allocate(manifest, used, terms)
        self.arena = self._loan.arena
        self.memory: Memory = self.arena
        self._tensors = tensors_over(manifest, self._loan.buffer, away=away)
        self._frame = Frame.of(manifest)
        self._chunks = range(len(manifest.grid))

    def plan(self) -> Sequence[int]:
        """Return every chunk."""
        return self._chunks

    def begin(self) -> None:
        """Do nothing: nobody has the tensors yet."""

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Do nothing beside the block."""
        self.begin()
        yield

    async def prepare(self, start: int, stop: int) -> None:
        """Have the pages mapped, which may take longer than their bytes."""
        touch = partial(self.arena.populate, every=self._terms.ahead)
        await self._bridge.run(touch, start, stop)

    def complete(self, chunk: int) -> None:
        """Do nothing: it is where it belongs."""

    async def assemble(self) -> object:
        """Put the tensors into the tree."""
        self._loan.finish()
        return await self._bridge.run(_put, self._frame, self._tensors, self._terms)

    async def load(self) -> None:
        """Do nothing: everything is in its place."""

    def abandon(self) -> None:
        """Do nothing: nothing is copied."""

    def discard(self, *, late: bool) -> None:
        """Let go of the tensors, and unmap what is under them."""
        gone = self._owns and not self._loan.finished
        self._tensors = []
        del self._loan
        if gone:
            self._bridge.post(
                self.arena.empty if late else self.arena.close
            )  # a view that is left prevents it


class InTemplate:
    """The tensors of a template, at the end or (``direct``) from the beginning.

    Entries that are ``away`` are somebody else's, and ``match`` has nothing for them.
    Chunks that are added to ``home`` are in the template already.
    """

    values: Sequence[int] = ()

    def __init__(
        self,
        manifest: Manifest,
        match: Match,
        terms: Terms,
        bridge: Bridge,
        *,
        away: Away = _NOTHING,
        arena: Arena | None = None,
    ) -> None:
        self._away = away
        self.match, self._terms, self._bridge = match, terms, bridge
        self._frame = Frame.of(manifest)
        self._chunks = range(len(manifest.grid))
        # Whoever has no tensors to make needs no more of the manifest.
        makes = match.parts or match.blobs or match.fresh
        self._manifest = manifest if makes else None
        entries, used = manifest.entries, manifest.segment_bytes - _nbytes_of(away)
        if terms.direct:
            used -= _at_home(match.backings, terms.ports)
        self._owns = arena is None
        self._loan = Loan(arena) if arena else _allocate(manifest, used, terms)
        self.arena = self._loan.arena
        self.copies = CopyPlan(
            match.backings,
            entries,
            arena=self.arena,
            port_for=terms.ports,
        )
        self.memory: Memory = self.arena
        if terms.direct:
            self.memory = self.copies.in_place()
        self.touched = False
        kept = terms.warm is not None and used >= _USED * manifest.segment_bytes
        self._loading = _Loading(
            self.copies,
            manifest.grid,
            bridge,
            direct=terms.direct,
            pinned=self.arena if kept else None,
        )
        self.home = self._loading.home

    def plan(self) -> Sequence[int]:
        """Return every chunk."""
        return self._chunks

    def begin(self) -> None:
        """Say that the template changes from now on, if it does."""
        self.touched = self._terms.direct and bool(self.match.tensors)

    @property
    def is_early(self) -> bool:
        """Whether devices have tensors that are received into directly."""
        return self._loading.is_early

    def complete(self, chunk: int) -> None:
        """Have devices get it."""
        if self._loading.is_early:
            self._loading.add(chunk)

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Begin; what is verified in the block goes to devices meanwhile."""
        self.begin()
        async with self._loading.early() if self._loading.is_early else nullcontext():
            yield

    async def prepare(self, start: int, stop: int) -> None:
        """Have the arena's pages mapped; those of a template are there."""
        if not self._terms.direct:
            touch = partial(self.arena.populate, every=self._terms.ahead)
            await self._bridge.run(touch, start, stop)

    async def assemble(self) -> object:
        """Return the template, once `load` has brought the peer's values into it."""
        return await self._bridge.run(self._put_together)

    async def load(self) -> None:
        """Bring to the template what is still in the arena only, all of it or nothing.

        It begins when devices have done what they were given before. Then it goes on
        to its end, also if cancelled (on a device, in the background), so that a
        template is never half filled.
        """
        fences = self._fences()
        await completed(*fences.values())
        await completed(*await self._bridge.run(self._load_all, fences))
        if self._terms.warm is None:
            if self.match.fresh:  # which keep the arena: free what they do not use
                await self._bridge.run(self.copies.discard)
            await self._bridge.run(self.arena.close)
        else:
            self._loan.finish()

    def abandon(self) -> None:
        """Have it kept by a thread that waits; say what may have changed."""
        if self.touched:
            mark_changed(self.match.changed())
        if self._loading.has_sent:
            keep_until(self._drain)

    def discard(self, *, late: bool) -> None:
        """Unmap the arena, unless a device may still copy from it."""
        gone = self._owns and not (self._loan.finished or self._loading.has_sent)
        del self._loan
        if gone:
            self._bridge.post(self.arena.empty if late else self.arena.close)

    def _put_together(self) -> object:
        tensors = self.match.tensors.beside(self._values())
        match = self.match
        state = _put(self._frame, tensors, self._terms, match.wholes, match.nodes)
        adoption = self.match.adoption
        return state if adoption is None else adoption.plan(state)

    def _values(self) -> dict[int, torch.Tensor]:
        if self._manifest is None:
            return {}
        return parts_over(
            self._manifest,
            self._loan.buffer,
            parts=self.match.parts,
            blobs=self.match.blobs,
            fresh=self.match.fresh,
            away=self._away,
        )

    def _fences(self) -> Fences:
        return self.copies.fences()

    def _drain(self) -> None:
        self.copies.drain()

    def _load_all(self, fences: Fences) -> list[Event]:
        """Fill the tensors, then put the values beside them; nothing comes between."""
        events = self._load(fences)
        if self.match.adoption is not None:
            self.match.adoption.finish()
        return events

    def _load(self, fences: Fences) -> list[Event]:
        mark_changed(self.match.changed())
        self.touched = True
        return self._loading.finish(fences)


def _nbytes_of(away: Away) -> int:
    """Return how many bytes are in other memory."""
    return sum(data.numel() for data in away.values())


def _allocate(manifest: Manifest, nbytes: int, terms: Terms) -> Loan:
    """Return an arena for the segment, of which ``nbytes`` are going to be used."""
    size, most = manifest.segment_bytes, terms.limits.max_bytes
    return lend(size, used=nbytes, most=most, pool=terms.warm)


def _at_home(backings: Backings, ports: PortFor) -> int:
    """Return how many bytes need no arena in a direct receive."""
    sizes, parts = backings.sizes, backings.parts
    away = {device for device in backings.devices() if ports(device) is not None}
    nbytes = sum(sizes) - sum(sizes[entry] for entry in parts)
    for entry, tensor in enumerate(backings.tensors if away else ()):
        if tensor.device in away and entry not in parts:
            nbytes -= sizes[entry]
    return nbytes


def _put(
    frame: Frame,
    tensors: Sequence[torch.Tensor],
    terms: Terms,
    wholes: Mapping[int, torch.Tensor] | None = None,
    nodes: Decoders | None = None,
) -> object:
    """Put tensors into the tree of a checkpoint; see `assemble`."""
    return assemble(
        frame,
        tensors,
        limits=terms.limits,
        allow_pickle=terms.allow_pickle,
        wholes=wholes,
        nodes=nodes,
    )


class _Loading:
    """The way of one checkpoint from its arena to a template.

    Args:
        copies: Between the two; they outlive all copies.
        grid: The chunks.
        bridge: Where copies run, or are enqueued.
        direct: What has a host's memory for its own has been received there.
        pinned: Memory to page-lock, since it is going to be used again.

    Attributes:
        home: The chunks that are in the template already, or on their way.
        has_sent: Whether devices may copy from the arena, or have done so.
    """

    def __init__(
        self,
        copies: CopyPlan,
        grid: ChunkGrid,
        bridge: Bridge,
        *,
        direct: bool,
        pinned: Arena | None,
    ) -> None:
        self.home: set[int] = set()
        self._copies, self._grid, self._bridge = copies, grid, bridge
        self._direct, self._pinned = direct, pinned
        self._parts: _Unfinished | None = None
        self._verified: asyncio.Queue[int | None] = asyncio.Queue()
        self.has_sent = False

    def __repr__(self) -> str:
        return f"<_Loading home={len(self.home)} of {len(self._grid)} chunks>"

    @property
    def is_early(self) -> bool:
        """Whether something may go on before everything is there."""
        return self._direct and bool(self._copies.ports)

    def add(self, chunk: int) -> None:
        """Take note that a chunk is verified; on the loop, in `early`."""
        self._verified.put_nowait(chunk)

    @asynccontextmanager
    async def early(self) -> AsyncIterator[None]:
        """Send on what `add` is told of in the block; end when all of it is enqueued.

        If cancelled, or if either fails, nothing more is enqueued. Then, and
        afterwards, the memory must be kept until the devices are idle, if anything has
        been sent to them.
        """
        async with beside(partial(self._send_all, self._copies.fences())):
            yield
            self._verified.put_nowait(None)

    def finish(self, fences: Fences) -> list[Event]:
        """Load what is left; return what is to be waited for. For a thread."""
        self.has_sent = self.has_sent or bool(fences)
        left = None if self._parts is None else self._parts.left()
        self._copies.load_parts(left, fences)
        for chunk in range(len(self._grid)):
            if chunk in self.home:
                continue
            start, stop = self._grid.range(chunk)
            if not self._direct:
                self._copies.load_host(start, stop)
            self._copies.load_device(start, stop, fences)
        return [port.mark() for port in self._copies.ports.values()]

    async def _send_all(self, fences: Fences) -> None:
        await self._bridge.run(self._prepare)
        # Where memory is pageable a copy blocks its thread until then, come what may.
        await completed(*fences.values())
        while (chunk := await self._verified.get()) is not None:
            await self._bridge.run(self._send, chunk, fences)

    def _prepare(self) -> None:
        self._parts = _Unfinished(self._copies.part_ranges(), self._grid)
        if self._pinned is not None:
            for port in self._copies.ports.values():
                self._pinned.pin(port.pin)

    def _send(self, chunk: int, fences: Fences) -> None:
        self.has_sent = True
        self._copies.load_device(*self._grid.range(chunk), fences)
        assert self._parts is not None
        self._copies.load_parts(self._parts.add(chunk), fences)
        self.home.add(chunk)


class _Unfinished:
    """Entries that can be used when all of their chunks are there."""

    def __init__(self, ranges: Mapping[int, tuple[int, int]], grid: ChunkGrid) -> None:
        self._lacking: dict[int, int] = {}
        self._within: dict[int, list[int]] = defaultdict(list)
        for entry, reach in ranges.items():
            chunks = chunks_over(grid, [reach])
            self._lacking[entry] = len(chunks)
            for chunk in chunks:
                self._within[chunk].append(entry)

    def add(self, chunk: int) -> list[int]:
        """Note that a chunk is there; return which entries are, by that."""
        done = []
        for entry in self._within.pop(chunk, ()):
            self._lacking[entry] -= 1
            if not self._lacking[entry]:
                del self._lacking[entry]
                done.append(entry)
        return done

    def left(self) -> Iterable[int]:
        """Return the others."""
        return [*self._lacking]
