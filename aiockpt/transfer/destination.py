"""The destination of a receive: memory for the data segment, and the load from it.

`Matching` of `aiockpt.state.load_plan` decides what to receive, and into which memory.
Everything that a peer can cause to fail happens before `Destination.load`. Only
`load` writes to a template (unless ``direct`` has let bytes into it already).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from aiockpt.errors import LocalProtocolError
from aiockpt.format.chunks import ChunkGrid, chunks_over
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import Arena, ArenaPool, Loan, Memory, lend
from aiockpt.memory.copies import (
    Backings,
    CopyPlan,
    mark_changed,
    write_counts,
)
from aiockpt.memory.device import (
    Event,
    Fences,
    Marks,
    PortFor,
    completed,
    keep_until,
)
from aiockpt.runtime.bridge import Bridge, share_out
from aiockpt.runtime.switching import python_is_busy, switching_often
from aiockpt.runtime.system import allocating
from aiockpt.runtime.tasks import beside
from aiockpt.state.load_plan import Matching, Template
from aiockpt.state.match import NEAR, RECEIVE
from aiockpt.state.rebuild import OnDevice
from aiockpt.state.segment import Segment, check_memory
from aiockpt.transfer.source import Patch, Prepare

# Page-locked memory is allocated as a whole: at least so much of it must be used.
_USED: Final = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The bounds of a receive, and whether bytes go directly into a template.

    ``warm`` is a pool of memory to reuse. ``later`` says that a template is filled some
    time after the receive, by a caller who waits for the copy. ``ahead`` says that the
    thread that brings the bytes must not touch new pages, because gloo has only one
    thread. ``marks`` are of the caller's device work: nothing is copied to or from a
    device before it.
    """

    limits: Limits
    allow_pickle: bool
    direct: bool
    ports: PortFor
    warm: ArenaPool | None = None
    later: bool = False
    ahead: bool = False
    marks: Marks = Marks()  # noqa: RUF009 - frozen


class Share(Protocol):
    """The entries of a checkpoint that a device receives by itself."""

    @property
    def on_device(self) -> OnDevice:
        """Their bytes on the device."""

    def beside(self, memory: Memory) -> Memory:
        """Return the whole data segment; ``memory`` has the host's entries."""

    def begin(self, marks: Marks) -> None:
        """Make the device's receives wait for the caller's work."""

    def fences(self, made: Fences) -> Fences:
        """Return an event for the copies on the device; see `CopyPlan.fences`."""

    def load(self, fences: Fences) -> list[Event]:
        """Copy the bytes that arrived elsewhere into a template; for a thread."""

    def drain(self) -> None:
        """Block until nothing is in flight."""


def destination_of(
    manifest: Manifest,
    template: Template | None,
    terms: Terms,
    bridge: Bridge,
    arena: Arena | None = None,
) -> Destination:
    """Return the destination of a whole checkpoint; for a thread.

    Without a template, the destination keeps no reference to ``manifest``. ``arena`` is
    memory that has the data segment already; None takes new memory.

    Raises:
        TemplateMismatchError: the template does not fit.
        LimitExceededError: the checkpoint needs more memory than is allowed or free.
        RemoteProtocolError: torch has no such tensor.
        DeviceMeshError: this process has no mesh for a distributed tensor.
    """
    segment, rule = matched(manifest, template, terms)
    return everything(segment, rule, terms, bridge, arena=arena)


def matched(
    manifest: Manifest, template: Template | None, terms: Terms
) -> tuple[Segment, Matching]:
    """Return the data segment, without memory yet, and what is taken of it."""
    with allocating("a checkpoint", manifest.segment_bytes):
        segment = Segment(manifest, arena=Arena(0))
    rule = Matching(
        [segment],
        RECEIVE if template is None or template.contents is not None else NEAR,
        limits=terms.limits,
        allow_pickle=terms.allow_pickle,
        template=template,
    )
    return segment, rule


def everything(
    segment: Segment,
    rule: Matching,
    terms: Terms,
    bridge: Bridge,
    *,
    share: Share | None = None,
    arena: Arena | None = None,
) -> Destination:
    """Return the memory of what is `matched`; see `destination_of`.

    The backings have no memory for the entries of a device's share.
    """
    manifest = segment.manifest
    used = manifest.segment_bytes
    if share is not None:
        segment.on_device = share.on_device
        used -= _nbytes_of(share.on_device)
    if terms.direct and rule.backings is not None:
        used -= _nbytes_in_place(rule.backings, terms.ports)
    loan = Loan(arena) if arena else _allocate(manifest, used, terms)
    segment.arena, segment.lent = loan.arena, loan.buffer
    pays = rule.backings is not None and (terms.later or terms.warm is not None)
    pinned = not arena and pays and used >= _USED * manifest.segment_bytes
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
    segment: Segment, rule: Matching, terms: Terms, bridge: Bridge, *, owns: bool
) -> Destination:
    """Return the destination of a selection: new tensors, or those of a template.

    Chunks are received whole, since only whole chunks can be verified.

    Args:
        segment: The memory of the data segment.
        rule: Decides what to receive of it.
        terms: The bounds of the receive.
        bridge: Runs the threads that fill the template.
        owns: Whether to free the memory if the receive fails.
    """
    grid, loan = segment.manifest.grid, Loan(segment.arena)
    return Destination(grid, rule, loan, terms, bridge, owns=owns, bounded=terms.limits)


class Destination:
    """The memory that one checkpoint is received into, and the load from it.

    The methods are called in the order of their definition. If one fails or is
    cancelled, the caller calls `abandon`, and then `discard`.

    Args:
        grid: The chunks.
        rule: Decides what to receive, and into which memory.
        loan: Memory for the data segment.
        terms: The bounds of the receive.
        bridge: Runs the threads that prepare memory and fill a template.
        owns: Whether to free the memory here.
        pinned: Whether to page-lock the memory for the devices that it is copied to.
        bounded: Bounds the received bytes; None: they were bounded with the loan.
        share: The entries that a device receives by itself.

    Attributes:
        values: The chunks that must have arrived before `place` is called.
        memory: The data segment.
        arena: The memory of the bytes that do not go directly into a template.
        backings: A template's memory for each entry, if there is a template.
        copies: The copies between the arena and that memory.
        loaded: The chunks that are in the template already, or on their way. The
            receive adds the chunks that it finds there.
        touched: Whether a template may have been modified.
        patch: Applies deltas, if the receiver holds a state dict.
    """

    backings: Backings | None = None
    copies: CopyPlan | None = None
    touched = False
    patch: Patch | None = None
    _writes: Sequence[int] = ()
    _python_is_busy = False  # whether another thread computes in Python

    def __init__(
        self,
        grid: ChunkGrid,
        rule: Matching,
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
        self._kept: Sequence[int] = ()
        self._sent: list[Event] = []  # of the copies that `_load` has enqueued
        self.values: Sequence[int] = chunks_over(grid, rule.values)
        self._check_memory(self.values)
        if not self.values:
            self._place()

    def place(self) -> Sequence[int]:
        """Return the chunks to receive in addition to ``values``. For a thread.

        Raises:
            RemoteProtocolError: a value is malformed, or of an unregistered type.
            LimitExceededError: the checkpoint needs more memory than is allowed.
        """
        if self.values:
            self._place()
        self._python_is_busy = python_is_busy()
        return self._chunks

    def _place(self) -> None:
        plan = self._rule.plan()
        values = {*self.values}
        wanted = chunks_over(self._grid, plan.ranges)
        self._chunks = [chunk for chunk in wanted if chunk not in values]
        self._check_memory([*self._chunks, *values])
        self.backings, self._kept = plan.backings, plan.kept
        self.copies = plan.copies(self.arena, self._terms.ports)
        if self.copies is not None:
            # This thread has just allocated new tensors on its own current stream.
            made = {} if plan.allocated else self._terms.marks.events
            self._fences = self.copies.fences(made)
            if self._terms.direct:
                self.memory = self.copies.in_place()
            self._loading = _Loading(
                self.copies,
                self._grid,
                self._bridge,
                self.loaded,
                direct=self._terms.direct,
                pinned=self._pinned,
                marks=self._terms.marks,
                fences=self._fences,
            )
        if self._share is not None:
            self.memory = self._share.beside(self.memory)

    def _check_memory(self, chunks: Iterable[int]) -> None:
        if self._bounded is not None:
            check_memory(map(self._grid.range, chunks), self._bounded)

    @property
    def missing(self) -> Sequence[str]:
        """The wanted paths that the checkpoint or the template lacks."""
        return self._rule.missing

    @property
    def is_early(self) -> bool:
        """Whether some entries go to a device while other chunks are received."""
        return self._loading is not None and self._loading.is_early

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Receive bytes in a block; send complete entries to devices meanwhile."""
        self.begin()
        with switching_often() if self._python_is_busy else nullcontext():
            if self._loading is not None and self._loading.is_early:
                async with self._loading.early():
                    yield
            else:
                yield

    def begin(self) -> None:
        """Note that bytes will arrive, so that a template may be modified."""
        if self._terms.direct and self._loading is not None:
            self.touched = any(True for _ in self._rule.changed())
        if self._share is not None:
            self._share.begin(self._terms.marks)

    @property
    def prepare(self) -> Prepare | None:
        """A function that maps pages of the arena; None if a template has the memory.

        Mapping pages may take longer than receiving their bytes.
        """
        if self.memory is not self.arena:
            return None
        return partial(self.arena.populate, every=self._terms.ahead)

    @property
    def kept(self) -> object:
        """The buffer of new tensors; None if the bytes will be copied elsewhere."""
        is_new = self._loading is None and self._share is None and self._owns
        return self._loan.buffer if is_new and self._bounded is None else None

    def complete(self, chunk: int) -> None:
        """Note, in `receiving` and on the loop, that a chunk is verified."""
        if self._loading is not None and self._loading.is_early:
            self._loading.add(chunk)

    async def assemble(self) -> object:
        """Return the state dict, whose bytes have all been verified.

        If it is a template, `load` must still fill it.
        """
        if self._loading is None:
            self._loan.finish()
        return await self._bridge.run(self._assemble)

    def _assemble(self) -> object:
        if self._pinned and self.copies is not None:
            self.copies.pin()  # now, because the pages are mapped
        return self._rule.assemble()

    @property
    def nbytes_to_load(self) -> int:
        """How many bytes of chunks `load` will copy."""
        if self._loading is None:
            return 0
        left = {*self.values, *self._chunks} - self.loaded
        return sum(stop - start for start, stop in map(self._grid.range, left))

    def watch_template(self) -> None:
        """Remember how often the template was written to, for `check_template`."""
        self._writes = write_counts(self._rule.changed())

    def check_template(self, what: str) -> None:
        """Check that chunks which were found in the template are still there.

        Raises:
            LocalProtocolError: torch has written to the template since then.
        """
        if self.loaded and self._writes != write_counts(self._rule.changed()):
            raise LocalProtocolError(
                f"the template was changed after {what} was compared with it: prepare "
                "the step again"
            )

    async def load(self, marks: Marks | None = None) -> None:
        """Copy the bytes from the arena to the template, all of them or none.

        The copy begins after the devices have finished the work that the caller's
        streams have by now. From then on it runs to its end, even if cancelled (on a
        device, in the background), so that a template is never half filled.

        Args:
            marks: Those of the caller; None: those of the receive.
        """
        if self._loading is None:
            return
        await completed(*(self._terms.marks if marks is None else marks).again())
        await completed(*await self._bridge.run(self._load))
        self._loan.finish()
        if self._is_single_use:
            await self._bridge.run(self._let_go)

    def mark(self) -> Marks:
        """Mark the device work of the calling thread, for `load`."""
        return Marks.of(self._terms.ports)

    def load_now(self) -> None:
        """Do what `load` does on the calling thread, which blocks."""
        if self._loading is None:
            return
        self.mark().wait()
        for event in self._load():
            event.synchronize()
        self._loan.finish()
        if self._is_single_use:
            self._bridge.post(self._let_go)  # it takes as long as a part of the copy

    def abandon(self) -> None:
        """Keep the memory until all copies from it have ended, and no longer.

        Called when the receive ends early, after all other calls have returned.
        """
        if self.touched:
            mark_changed(self._rule.changed())
        if self._has_sent:
            keep_until(self._drain)

    def discard(self, *, late: bool) -> None:
        """Free the memory after `abandon`, because tracebacks may keep this object.

        The caller knows that nothing writes to the memory any more. A device that still
        copies to it (``late``) needs its addresses, but not its contents.
        """
        gone = self._owns and not (self._loan.finished or self._has_sent)
        del self._loan, self._rule
        if gone:
            self._bridge.post(self.arena.empty)
            if not late:
                self._bridge.post(self.arena.close)  # an existing view prevents that

    @property
    def _has_sent(self) -> bool:
        """Whether devices may copy from the arena, or have done so."""
        return self._loading is not None and (
            self._loading.has_sent or bool(self._sent)
        )

    def _drain(self) -> None:
        assert self.copies is not None
        if self._share is not None:
            self._share.drain()
        self.copies.drain()
        for event in self._sent:
            event.synchronize()

    def _load(self) -> list[Event]:
        """Fill the tensors, then put the values into the template, without a break.

        Raises:
            LocalProtocolError: the template has changed. If that was before the copy,
                nothing was copied.
        """
        assert self._loading is not None
        self._rule.check()
        mark_changed(self._rule.changed())
        self.touched = True
        with switching_often():
            events = self._loading.finish(self._chunks, before=self.values)
        if self._share is not None:
            made = self._terms.marks.events
            events += self._share.load(self._share.fences(made))
        ports = map(self._terms.ports, self._rule.finish())
        events += [port.fence() for port in ports if port is not None]
        self._sent = events
        return events

    @property
    def _is_single_use(self) -> bool:
        """Whether the memory does not return to a pool."""
        return self._terms.warm is None or self._bounded is not None

    def _let_go(self) -> None:
        used = self._rule.uses_arena
        # Values may be made of the bytes that a template's tensor got, too.
        if used and self.copies is not None and self._owns and not self.values:
            self.copies.discard(self._kept)  # pages that the state dict does not use
        self.arena.close()


def _nbytes_of(on_device: OnDevice | None) -> int:
    """Return how many bytes are on the device."""
    return sum(data.numel() for data in (on_device or {}).values())


def _allocate(manifest: Manifest, nbytes: int, terms: Terms) -> Loan:
    """Return an arena for the segment, of which ``nbytes`` will be used."""
    size, most = manifest.segment_bytes, terms.limits.max_bytes
    return lend(size, used=nbytes, most=most, pool=terms.warm)


def _nbytes_in_place(backings: Backings, ports: PortFor) -> int:
    """Return how many bytes need no arena in a direct receive."""
    away = {each for each in backings.devices() if ports(each) is not None}
    if not away:
        return sum(backings.sizes)
    pairs = zip(backings.tensors, backings.sizes, strict=True)
    return sum(size for tensor, size in pairs if tensor.device not in away)


class _Loading:
    """The load of one checkpoint from its arena into a template.

    Args:
        copies: The copies from the arena to the template.
        grid: The chunks.
        bridge: Runs the threads that copy, or enqueue copies.
        loaded: The chunks that are in the template already, or on their way.
        direct: Whether host tensors have received their bytes directly.
        pinned: Whether to page-lock the arena before `early` copies from it.
        marks: Those of the caller of the receive.
        fences: The events that the copies to devices wait for.

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
        pinned: bool,
        marks: Marks,
        fences: Fences,
    ) -> None:
        self._copies, self._grid, self._bridge = copies, grid, bridge
        self._loaded, self._direct, self._pinned = loaded, direct, pinned
        self._marks, self._fences = marks, fences
        self._verified: asyncio.Queue[int | None] = asyncio.Queue()
        self.has_sent = False

    @property
    def is_early(self) -> bool:
        """Whether some entries can be loaded before everything has arrived."""
        return self._direct and bool(self._copies.ports)

    def add(self, chunk: int) -> None:
        """Note, in `early` and on the loop, that a chunk is verified."""
        self._verified.put_nowait(chunk)

    @asynccontextmanager
    async def early(self) -> AsyncIterator[None]:
        """Load the entries that `add` completes in the block; then end.

        If this is cancelled or the block fails, nothing more is enqueued. In any case,
        the caller must keep the memory until the devices are idle, if `has_sent`.
        """
        async with beside(partial(self._send_all, self._marks.again())):
            yield
            self._verified.put_nowait(None)

    def finish(self, chunks: Iterable[int], *, before: Collection[int]) -> list[Event]:
        """Load the remaining entries; return the events to wait for. For a thread.

        Args:
            chunks: The chunks that arrived according to the plan.
            before: The chunks that arrived before the plan, and so in the arena.
        """
        fences = self._fences
        self.has_sent = self.has_sent or bool(fences)
        early = {*before}
        rest = [each for each in (*before, *chunks) if each not in self._loaded]
        host = [each for each in rest if not self._direct or each in early]
        for chunk in rest:
            self._copies.load_device(*self._grid.range(chunk), fences)
        if self._copies.has_host:
            load = self._copies.load_host
            share_out(lambda chunk: load(*self._grid.range(chunk)), host)
        return [port.mark() for port in self._copies.ports.values()]

    async def _send_all(self, before: Iterable[Event]) -> None:
        await self._bridge.run(self._prepare)
        # A copy from pageable memory blocks its thread until then in any case.
        await completed(*before)
        while (chunk := await self._verified.get()) is not None:
            await self._bridge.run(self._send, chunk)

    def _prepare(self) -> None:
        if self._pinned:
            self._copies.pin()

    def _send(self, chunk: int) -> None:
        self.has_sent, fences = True, self._fences
        self._copies.load_device(*self._grid.range(chunk), fences)
        self._loaded.add(chunk)
