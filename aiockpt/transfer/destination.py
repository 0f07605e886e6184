"""Where a checkpoint goes: memory for its data segment, and the way on from there.

A `Rule` of `aiockpt.state.load_plan` says what is wanted, and where. Whatever a peer
can make fail happens before `Destination.load`, which writes the first byte of a
template (unless ``direct`` has let bytes into it already).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from aiockpt.format.chunks import ChunkGrid, chunks_over
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import Arena, ArenaPool, Loan, Memory, lend
from aiockpt.memory.copies import Backings, CopyPlan, Fences, mark_changed
from aiockpt.memory.device import Event, PortFor, completed, keep_until
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.tasks import beside
from aiockpt.state.load_plan import EverythingNew, IntoTemplate, Rule, Selected
from aiockpt.state.rebuild import Frame, OnDevice, check_meshes
from aiockpt.state.segment import Segment, check_memory
from aiockpt.state.template import Match, Template
from aiockpt.transfer.source import Prepare

__all__ = [
    "Destination",
    "Share",
    "Terms",
    "destination_of",
    "into_template",
    "new_tensors",
    "selected",
]

# Page-locked memory is there as a whole: at least so much of it has to be of use.
_USED: Final = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a receive accepts, and whether bytes go straight into a template.

    ``warm`` lends the memory that it needs, if some is kept. ``ahead`` says that
    the thread that brings the bytes must not touch new pages: gloo has only one.
    """

    limits: Limits
    allow_pickle: bool
    direct: bool
    ports: PortFor
    warm: ArenaPool | None = None
    ahead: bool = False


class Share(Protocol):
    """The entries of a checkpoint that a device receives by itself."""

    @property
    def on_device(self) -> OnDevice:
        """Their bytes on the device."""

    def beside(self, memory: Memory) -> Memory:
        """Return the data segment, whose other entries are in ``memory``."""

    def begin(self) -> None:
        """Let the device's receives wait for what has been enqueued until now."""

    def fences(self) -> Fences:
        """Mark what has been enqueued on the device until now."""

    def load(self, fences: Fences) -> list[Event]:
        """Copy what has arrived beside a template into it; for a thread."""

    def drain(self) -> None:
        """Block until nothing is in flight."""


def destination_of(
    manifest: Manifest,
    template: Template | None,
    terms: Terms,
    bridge: Bridge,
    arena: Arena | None = None,
) -> Destination:
    """Return where a whole checkpoint goes; for a thread.

    Without a template nothing refers to ``manifest`` afterwards. ``arena`` is memory
    that has the data segment already; None takes new memory.

    Raises:
        TemplateMismatchError: the template does not fit.
        LimitExceededError: there is no memory for it.
        RemoteProtocolError: torch has no such tensor.
        DeviceMeshError: a distributed tensor has no place in this process.
    """
    if template is None:
        return new_tensors(manifest, terms, bridge, arena=arena)
    return into_template(manifest, template.match(manifest), terms, bridge, arena=arena)


def new_tensors(
    manifest: Manifest,
    terms: Terms,
    bridge: Bridge,
    *,
    share: Share | None = None,
    arena: Arena | None = None,
) -> Destination:
    """Return tensors over an arena, but for a device's share; see `destination_of`."""
    check_meshes(Frame.of(manifest), limits=terms.limits)
    on_device = None if share is None else share.on_device
    used = manifest.segment_bytes - _nbytes_of(on_device)
    loan = Loan(arena) if arena else _allocate(manifest, used, terms)
    rule = EverythingNew(
        manifest,
        loan.buffer,
        limits=terms.limits,
        allow_pickle=terms.allow_pickle,
        on_device=on_device,
    )
    return Destination(
        manifest.grid, rule, loan, terms, bridge, owns=arena is None, share=share
    )


def into_template(
    manifest: Manifest,
    match: Match,
    terms: Terms,
    bridge: Bridge,
    *,
    share: Share | None = None,
    arena: Arena | None = None,
) -> Destination:
    """Return the tensors of a template; see `destination_of`.

    ``match`` has nothing for the entries of a device's share.
    """
    on_device = None if share is None else share.on_device
    used = manifest.segment_bytes - _nbytes_of(on_device)
    if terms.direct:
        used -= _nbytes_in_place(match.backings, terms.ports)
    loan = Loan(arena) if arena else _allocate(manifest, used, terms)
    rule = IntoTemplate(
        manifest,
        match,
        loan.buffer,
        limits=terms.limits,
        allow_pickle=terms.allow_pickle,
        on_device=on_device,
    )
    pinned = terms.warm is not None and used >= _USED * manifest.segment_bytes
    return Destination(
        manifest.grid,
        rule,
        loan,
        terms,
        bridge,
        owns=arena is None,
        pinned=pinned,
        share=share,
    )


def selected(
    segment: Segment, rule: Selected, terms: Terms, bridge: Bridge, *, owns: bool
) -> Destination:
    """Return where a selection goes: new tensors, or those of a template.

    Chunks are received whole, since only whole chunks can be verified.

    Args:
        segment: The memory of the data segment.
        rule: What is wanted of it.
        terms: What is accepted.
        bridge: Where the template is filled.
        owns: Whether the memory may be freed when the receive fails.
    """
    grid, loan = segment.manifest.grid, Loan(segment.arena)
    return Destination(grid, rule, loan, terms, bridge, owns=owns, bounded=terms.limits)


class Destination:
    """The memory that one checkpoint is received into, and what comes of it.

    The methods are called in the order in which they are here. If one fails, or is
    cancelled, `abandon` is called, and then `discard`.

    Args:
        grid: The chunks.
        rule: Says what is wanted, and where.
        loan: Memory for the data segment.
        terms: What is accepted.
        bridge: Where memory is prepared and a template is filled.
        owns: Whether the memory may be freed here.
        pinned: Whether to page-lock the memory, since it is going to be used again.
        bounded: Bound what is wanted; None: the memory was bounded when it was lent.
        share: What a device receives by itself.

    Attributes:
        values: The chunks that must be there before `place` is called.
        memory: The data segment.
        arena: Where the data segment is, as far as it is in no template's memory.
        backings: A template's memory for each entry, if there is a template.
        copies: Between the arena and that memory.
        loaded: The chunks that are in the template already, or on their way. Whoever
            finds one there adds it.
        touched: Whether a template may have been modified.
    """

    backings: Backings | None = None
    copies: CopyPlan | None = None
    touched = False

    def __init__(
        self,
        grid: ChunkGrid,
        rule: Rule,
        loan: Loan,
        terms: Terms,
        bridge: Bridge,
        *,
        owns: bool,
        pinned: bool = False,
        bounded: Limits | None = None,
        share: Share | None = None,
    ) -> None:
        self._grid, self._rule, self._loan = grid, rule, loan
        self._terms, self._bridge = terms, bridge
        self._owns, self._pinned, self._bounded = owns, pinned, bounded
        self._share = share
        self.arena = loan.arena
        self.memory: Memory = self.arena
        self.loaded: set[int] = set()
        self._chunks: Sequence[int] = ()
        self._loading: _Loading | None = None
        self.values: Sequence[int] = chunks_over(grid, rule.values)
        self._check_memory(self.values)
        if not self.values:
            self._place()

    def __repr__(self) -> str:
        return f"<Destination of {len(self._grid)} chunks by {self._rule}>"

    def place(self) -> Sequence[int]:
        """Return the chunks that are wanted beside ``values``. For a thread.

        Raises:
            StateDictError: the template does not fit what is selected; see `Selected`.
            LimitExceededError: there is no memory for it.
        """
        if self.values:
            self._place()
        return self._chunks

    def _place(self) -> None:
        plan = self._rule.plan()
        values = {*self.values}
        wanted = chunks_over(self._grid, plan.ranges)
        self._chunks = [chunk for chunk in wanted if chunk not in values]
        self._check_memory([*self._chunks, *values])
        self.backings = plan.backings
        self.copies = plan.copies(self.arena, self._terms.ports)
        if self.copies is not None:
            if self._terms.direct:
                self.memory = self.copies.in_place()
            self._loading = _Loading(
                self.copies,
                self._grid,
                self._bridge,
                self.loaded,
                direct=self._terms.direct,
                pinned=self.arena if self._pinned else None,
            )
        if self._share is not None:
            self.memory = self._share.beside(self.memory)

    def _check_memory(self, chunks: Iterable[int]) -> None:
        if self._bounded is not None:
            check_memory(map(self._grid.range, chunks), self._bounded)

    @property
    def missing(self) -> Sequence[str]:
        """What was wanted, and was not found or has no place in the template."""
        return self._rule.missing

    @property
    def is_early(self) -> bool:
        """Whether something of it goes to a device while other chunks travel."""
        return self._loading is not None and self._loading.is_early

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Let bytes in; what is complete in the block goes to devices meanwhile."""
        self.begin()
        if self._loading is not None and self._loading.is_early:
            async with self._loading.early():
                yield
        else:
            yield

    def begin(self) -> None:
        """Say that bytes are on their way: some may go into a template."""
        if self._terms.direct and self._loading is not None:
            self.touched = any(True for _ in self._rule.changed())
        if self._share is not None:
            self._share.begin()

    @property
    def prepare(self) -> Prepare | None:
        """What maps pages of the arena; None where a template has them.

        Mapping them may take longer than their bytes do.
        """
        if self.memory is not self.arena:
            return None
        return partial(self.arena.populate, every=self._terms.ahead)

    def complete(self, chunk: int) -> None:
        """Take note, in `receiving`, that a chunk is verified; on the loop."""
        if self._loading is not None and self._loading.is_early:
            self._loading.add(chunk)

    async def assemble(self) -> object:
        """Return the state dict, all of whose bytes have been verified.

        `load` brings to a template what is not there yet.
        """
        if self._loading is None:
            self._loan.finish()
        return await self._bridge.run(self._rule.assemble)

    async def load(self) -> None:
        """Bring to the template what is still in the arena only, all of it or nothing.

        It begins when devices have done what they were given before. Then it goes on
        to its end, also if cancelled (on a device, in the background), so that a
        template is never half filled.
        """
        if self._loading is None:
            return
        fences = self._fences()
        await completed(*fences.values())
        await completed(*await self._bridge.run(self._load, fences))
        self._loan.finish()
        if self._terms.warm is None or self._bounded is not None:
            await self._bridge.run(self._let_go)

    def abandon(self) -> None:
        """Keep the memory as long as something is copied from it, and no longer.

        For who goes no further, once all that was called here has ended or failed.
        """
        if self.touched:
            mark_changed(self._rule.changed())
        if self._loading is not None and self._loading.has_sent:
            keep_until(self._drain)

    def discard(self, *, late: bool) -> None:
        """Free the memory after `abandon`: tracebacks may keep this for a while.

        For who knows that nobody writes to it any more. A device that still copies to
        it (``late``) needs its addresses, but not what is there.
        """
        sent = self._loading is not None and self._loading.has_sent
        gone = self._owns and not (self._loan.finished or sent)
        del self._loan, self._rule
        if gone:
            self._bridge.post(self.arena.empty)
            if not late:
                self._bridge.post(self.arena.close)  # a view that is left prevents it

    def _fences(self) -> Fences:
        assert self.copies is not None
        more = {} if self._share is None else self._share.fences()
        return self.copies.fences() | more

    def _drain(self) -> None:
        assert self.copies is not None
        if self._share is not None:
            self._share.drain()
        self.copies.drain()

    def _load(self, fences: Fences) -> list[Event]:
        """Fill the tensors, then put the values beside them; nothing comes between."""
        assert self._loading is not None
        mark_changed(self._rule.changed())
        self.touched = True
        events = self._loading.finish(fences, self._chunks, before=self.values)
        if self._share is not None:
            events += self._share.load(fences)
        self._rule.finish()
        return events

    def _let_go(self) -> None:
        used = self._rule.uses_arena
        # Values may be made of the bytes that a template's tensor got, too.
        if used and self.copies is not None and self._owns and not self.values:
            self.copies.discard()  # what the state dict does not use
        self.arena.close()


def _nbytes_of(on_device: OnDevice | None) -> int:
    """Return how many bytes are in other memory."""
    return sum(data.numel() for data in (on_device or {}).values())


def _allocate(manifest: Manifest, nbytes: int, terms: Terms) -> Loan:
    """Return an arena for the segment, of which ``nbytes`` are going to be used."""
    size, most = manifest.segment_bytes, terms.limits.max_bytes
    return lend(size, used=nbytes, most=most, pool=terms.warm)


def _nbytes_in_place(backings: Backings, ports: PortFor) -> int:
    """Return how many bytes need no arena in a direct receive."""
    sizes, parts = backings.sizes, backings.parts
    accelerators = {each for each in backings.devices() if ports(each) is not None}
    nbytes = sum(sizes) - sum(sizes[entry] for entry in parts)
    for entry, tensor in enumerate(backings.tensors if accelerators else ()):
        if tensor.device in accelerators and entry not in parts:
            nbytes -= sizes[entry]
    return nbytes


class _Loading:
    """The way of one checkpoint from its arena to a template.

    Args:
        copies: Between the two; they outlive all copies.
        grid: The chunks.
        bridge: Where copies run, or are enqueued.
        loaded: The chunks that are in the template already, or on their way.
        direct: What has a host's memory for its own has been received there.
        pinned: Memory to page-lock, since it is going to be used again.

    Attributes:
        has_sent: Whether devices may copy from the arena, or have done so.
    """

    def __init__(
        self,
        copies: CopyPlan,
        grid: ChunkGrid,
        bridge: Bridge,
        loaded: set[int],
        *,
        direct: bool,
        pinned: Arena | None,
    ) -> None:
        self._copies, self._grid, self._bridge = copies, grid, bridge
        self._loaded, self._direct, self._pinned = loaded, direct, pinned
        self._parts: _Unfinished | None = None
        self._verified: asyncio.Queue[int | None] = asyncio.Queue()
        self.has_sent = False

    def __repr__(self) -> str:
        return f"<_Loading loaded={len(self._loaded)} of {len(self._grid)} chunks>"

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

    def finish(
        self, fences: Fences, chunks: Iterable[int], *, before: Collection[int]
    ) -> list[Event]:
        """Load what is left; return what is to be waited for. For a thread.

        Args:
            fences: What the copies to devices wait for.
            chunks: What has arrived by the plan.
            before: What has arrived before there was a plan, and so in the arena.
        """
        self.has_sent = self.has_sent or bool(fences)
        left = None if self._parts is None else self._parts.left()
        self._copies.load_parts(left, fences)
        early = {*before}
        for chunk in (*before, *chunks):
            if chunk in self._loaded:
                continue
            start, stop = self._grid.range(chunk)
            if not self._direct or chunk in early:
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
        self._loaded.add(chunk)


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
