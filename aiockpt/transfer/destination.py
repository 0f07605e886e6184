"""The destination of a receive: memory for the data segment, and the load from it.

`Matching` of `aiockpt.state.load_plan` decides what to receive, and into which memory.
Everything that a peer can cause to fail happens before `Destination.load`. Only
`load` writes to a template (unless ``direct`` has let bytes into it already).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from aiockpt.format.chunks import ChunkGrid, chunks_over
from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import Arena, ArenaLease, Memory, lease_arena
from aiockpt.memory.copies import Backings, CopyPlan, mark_changed, write_counts
from aiockpt.memory.device import Event, Marks, PortFor, completed, keep_until
from aiockpt.runtime.bridge import Bridge, share_out
from aiockpt.runtime.switching import switching_often
from aiockpt.runtime.system import allocating
from aiockpt.runtime.tasks import beside
from aiockpt.state.load_plan import LoadPlan, Matching, Template
from aiockpt.state.match import LAX, LOAD, NEAR, RECEIVE, Rule
from aiockpt.state.segment import Segment, check_memory
from aiockpt.transfer.deltas import is_available
from aiockpt.transfer.options import ReceiveOptions
from aiockpt.transfer.reuse import Reuse
from aiockpt.transfer.source import Patch, Prepare, Source

# Page-locked memory is allocated as a whole: at least so much of it must be used.
_MIN_PINNED_USE: Final = 0.75


class Destination:
    """The memory that one checkpoint is received into, as a `ChunkDestination`.

    It is made in a thread. Of a selection, chunks are received whole, since only whole
    chunks can be verified. Without a template, no reference to ``manifest`` is kept.

    The methods are called in the order of their definition. If one fails or is
    cancelled, the caller calls `abandon`, and then `discard`.

    Args:
        source: Receives into the memory of a device, if it can.
        arena: Memory that has the data segment already; None: new memory.
        manifest: Describes the checkpoint.
        template: The state dict to fill.
        options: The options of the receive.
        bridge: Runs the threads that prepare memory and fill a template.

    Attributes:
        values: The chunks that must have arrived before `plan` is called.
        memory: The data segment.
        template_load: The copies into a template; None: nothing is copied.
        touched: Whether a template may have been modified.
        reuse: Finds chunks that the receiver has, if it holds a state dict.

    Raises:
        TemplateMismatchError, MissingKeysError: the template does not fit.
        LimitExceededError: the checkpoint needs more memory than is allowed or free.
        RemoteProtocolError: torch has no such tensor.
        DeviceMeshError: this process has no mesh for a distributed tensor.
    """

    template_load: TemplateLoad | None = None
    touched = False
    reuse: Reuse | None = None

    def __init__(
        self,
        source: Source,
        arena: Arena | None,
        manifest: Manifest,
        template: Template | None,
        options: ReceiveOptions,
        bridge: Bridge,
    ) -> None:
        self._grid, self._options, self._bridge = manifest.grid, options, bridge
        self._owns, nbytes = arena is None, manifest.segment_bytes
        with allocating("a checkpoint", nbytes):
            segment = Segment(manifest, arena=Arena(0))
        self._matching = Matching(
            [segment],
            _rule_of(options, template),
            limits=options.limits,
            allow_pickle=options.allow_pickle,
            select=options.select,
            template=template,
            device=options.device,
            name=source.name,
        )
        entries = self._device_entries = source.device_entries(
            manifest, self._matching, direct=options.direct
        )
        used, backings = nbytes, self._matching.backings
        if entries is not None:
            segment.on_device = entries.homes
            used -= sum(data.numel() for data in entries.homes.values())
        if options.direct and backings is not None:
            used -= _nbytes_in_place(backings, options.ports)
        pays = backings is not None and (options.hold or options.warm is not None)
        self._pinned = self._owns and pays and used >= _MIN_PINNED_USE * nbytes
        if arena is not None:
            self._lease = ArenaLease(arena)
        elif options.is_whole:
            most, pool = options.limits.max_bytes, options.warm
            self._lease = lease_arena(nbytes, used=used, most=most, pool=pool)
        else:  # `_check_memory` looks at the size of the selected chunks
            with allocating("a checkpoint", nbytes):
                self._lease = ArenaLease(Arena(nbytes))
        segment.arena, segment.lent = self._lease.arena, self._lease.buffer
        self.memory: Memory = self._lease.arena
        self._chunks: Sequence[int] = ()
        self.values: Sequence[int] = chunks_over(self._grid, self._matching.values)
        self._check_memory(self.values)
        if not self.values:
            self._plan()

    @property
    def arena(self) -> Arena:
        """The memory of the bytes that do not go directly into a template."""
        return self._lease.arena

    def plan(self) -> Sequence[int]:
        """Return the chunks to receive in addition to ``values``. For a thread.

        Raises:
            RemoteProtocolError: a value is malformed, or of an unregistered type.
            LimitExceededError: the checkpoint needs more memory than is allowed.
        """
        if self.values:
            self._plan()
        return self._chunks

    def _plan(self) -> None:
        plan, values = self._matching.plan(), {*self.values}
        wanted = chunks_over(self._grid, plan.ranges)
        self._chunks = [chunk for chunk in wanted if chunk not in values]
        self._check_memory([*self._chunks, *values])
        options = self._options
        if (copies := plan.copies(self.arena, options.ports)) is not None:
            self.template_load = TemplateLoad(
                plan, copies, self._grid, options, self._bridge, pinned=self._pinned
            )
            if options.direct:
                self.memory = copies.in_place()
        if self._device_entries is not None:
            self.memory = self._device_entries.joined(self.memory, options.marks)

    def _check_memory(self, chunks: Iterable[int]) -> None:
        if not self._options.is_whole:  # the size of the whole was checked before
            check_memory(map(self._grid.range, chunks), self._options.limits)

    @property
    def missing(self) -> Sequence[str]:
        """The wanted paths that the checkpoint or the template lacks."""
        return self._matching.missing

    @property
    def is_early(self) -> bool:
        """Whether some entries go to a device while other chunks are received."""
        return self.template_load is not None and self.template_load.is_early

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Receive bytes in a block; send complete entries to devices meanwhile."""
        if self._options.direct and self.template_load is not None:
            self.touched = bool(self._matching.changed())
        if self.template_load is not None and self.template_load.is_early:
            async with self.template_load.early():
                yield
        else:
            yield

    @property
    def prepare(self) -> Prepare | None:
        """A function that maps pages of the arena; None if a template has the memory.

        Mapping pages may take longer than receiving their bytes.
        """
        if self.memory is not self.arena:
            return None
        return partial(self.arena.populate, every=self._options.ahead)

    @property
    def patch(self) -> Patch | None:
        """A function that applies deltas; None if the receiver holds nothing."""
        return self.reuse.patch if self.reuse is not None and is_available() else None

    @property
    def kept(self) -> object:
        """The buffer of new tensors; None if the bytes will be copied elsewhere."""
        is_new = (
            self.template_load is None and self._device_entries is None and self._owns
        )
        return self._lease.buffer if is_new and self._options.is_whole else None

    def complete(self, chunk: int) -> None:
        """Note, in `receiving` and on the loop, that a chunk is verified."""
        if self.template_load is not None and self.template_load.is_early:
            self.template_load.add(chunk)

    async def assemble(self) -> object:
        """Return the state dict, whose bytes have all been verified.

        If it is a template, `load` must still fill it.
        """
        if self.template_load is None:
            self._lease.finish()
        return await self._bridge.run(self._assemble)

    def _assemble(self) -> object:
        if self.template_load is not None:
            self.template_load.pin()  # now, because the pages are mapped
        return self._matching.assemble()

    @property
    def nbytes_to_load(self) -> int:
        """How many bytes of chunks `load` will copy."""
        if self.template_load is None:
            return 0
        left = {*self.values, *self._chunks} - self.template_load.loaded
        return sum(stop - start for start, stop in map(self._grid.range, left))

    def writes(self) -> Sequence[int]:
        """Return how often torch has written to each tensor that `load` fills."""
        return write_counts(self._matching.changed())

    async def load(self) -> None:
        """Copy the bytes from the arena to the template, all of them or none.

        The copy begins after the devices have finished the work that the caller's
        streams have by now. From then on it runs to its end, even if cancelled (on a
        device, in the background), so that a template is never half filled.
        """
        if self.template_load is None:
            return
        options = self._options
        # With ``hold``, the caller of the receive is not the caller of the load.
        marks = Marks.of(options.ports) if options.hold else options.marks
        await completed(*marks.again())
        await completed(*await self._bridge.run(self._load))
        self._lease.finish()
        if self._is_single_use:
            await self._bridge.run(self._let_go)

    def load_now(self) -> None:
        """Do what `load` does on the calling thread, which blocks."""
        if self.template_load is None:
            return
        Marks.of(self._options.ports).wait()
        for event in self._load():
            event.synchronize()
        self._lease.finish()
        if self._is_single_use:
            self._bridge.post(self._let_go)  # it takes as long as a part of the copy

    def abandon(self) -> None:
        """Keep the memory until all copies from it have ended, and no longer.

        Called when the receive ends early, after all other calls have returned.
        """
        if self.touched:
            mark_changed(self._matching.changed())
        if self.template_load is not None and self.template_load.has_sent:
            keep_until(self._drain)

    def discard(self, *, late: bool) -> None:
        """Free the memory after `abandon`, because tracebacks may keep this object.

        The caller knows that nothing writes to the memory any more. A device that still
        copies to it (``late``) needs its addresses, but not its contents.
        """
        has_sent = self.template_load is not None and self.template_load.has_sent
        gone, arena = self._owns and not (self._lease.finished or has_sent), self.arena
        del self._lease, self._matching
        if gone:
            self._bridge.post(arena.empty)
            if not late:
                self._bridge.post(arena.close)  # an existing view prevents that

    def _drain(self) -> None:
        if self._device_entries is not None:
            self._device_entries.drain()
        if self.template_load is not None:
            self.template_load.drain()

    def _load(self) -> list[Event]:
        """Fill the tensors, then put the values into the template, without a break.

        Raises:
            LocalProtocolError: the template has changed. If that was before the copy,
                nothing was copied.
        """
        assert self.template_load is not None
        self._matching.check()
        mark_changed(self._matching.changed())
        self.touched = True
        with switching_often():
            events = self.template_load.finish(self._chunks, before=self.values)
        if self._device_entries is not None:
            events += self._device_entries.load(self._options.marks)
        ports = map(self._options.ports, self._matching.finish())
        events += [port.fence() for port in ports if port is not None]
        self.template_load.ends = events
        return events

    @property
    def _is_single_use(self) -> bool:
        """Whether the memory does not return to a pool."""
        return self._options.warm is None or not self._options.is_whole

    def _let_go(self) -> None:
        # Values may be made of the bytes that a template's tensor got, too.
        used = self._matching.uses_arena and self._owns and not self.values
        if used and self.template_load is not None:
            # Free the pages that the state dict does not use.
            self.template_load.copies.discard(self.template_load.kept)
        self.arena.close()


def _rule_of(options: ReceiveOptions, template: Template | None) -> Rule:
    """Return which differences between the template and the checkpoint are errors."""
    if not options.is_whole:
        return LOAD if options.strict else LAX
    # The contents of a template are noted if the caller has passed it as ``into``.
    return RECEIVE if template is None or template.contents is not None else NEAR


def _nbytes_in_place(backings: Backings, ports: PortFor) -> int:
    """Return how many bytes need no arena in a direct receive."""
    away = {each for each in backings.devices() if ports(each) is not None}
    if not away:
        return sum(backings.sizes)
    pairs = zip(backings.tensors, backings.sizes, strict=True)
    return sum(size for tensor, size in pairs if tensor.device not in away)


class TemplateLoad:
    """The copies of one receive from its arena into a template.

    Args:
        plan: Says which bytes go where.
        copies: The copies of the plan.
        grid: The chunks.
        options: The options of the receive.
        bridge: Runs the threads that copy, or enqueue copies.
        pinned: Whether to page-lock the arena before anything is copied from it.

    Attributes:
        backings: The template's memory for each entry.
        kept: For each reach, whether its bytes stay in the arena; see `LoadPlan`.
        loaded: The chunks that are in the template already, or on their way. The
            receive adds the chunks that it finds there.
        ends: The ends of the copies that `finish` has enqueued.
    """

    def __init__(
        self,
        plan: LoadPlan,
        copies: CopyPlan,
        grid: ChunkGrid,
        options: ReceiveOptions,
        bridge: Bridge,
        *,
        pinned: bool,
    ) -> None:
        self.backings, self.kept = plan.backings, plan.kept
        self.copies, self._grid = copies, grid
        self._options, self._bridge, self._pinned = options, bridge, pinned
        # The thread that plans allocates new tensors on its own current stream.
        made = {} if plan.allocated else options.marks.events
        self._fences = copies.fences(made)
        self._verified: asyncio.Queue[int | None] = asyncio.Queue()
        self.loaded: set[int] = set()
        self._has_begun = False
        self.ends: list[Event] = []

    @property
    def is_early(self) -> bool:
        """Whether some entries can be loaded before everything has arrived."""
        return self._options.direct and bool(self.copies.ports)

    @property
    def has_sent(self) -> bool:
        """Whether devices may copy from the arena, or have done so."""
        return self._has_begun or bool(self.ends)

    def pin(self) -> None:
        """Page-lock the arena, if that pays."""
        if self._pinned:
            self.copies.pin()

    @asynccontextmanager
    async def early(self) -> AsyncIterator[None]:
        """Load the entries that `add` completes in the block; then end.

        If this is cancelled or the block fails, nothing more is enqueued. In any case,
        the caller must keep the memory until the devices are idle, if `has_sent`.
        """
        async with beside(partial(self._send_all, self._options.marks.again())):
            yield
            self._verified.put_nowait(None)

    def add(self, chunk: int) -> None:
        """Note, in `early` and on the loop, that a chunk is verified."""
        self._verified.put_nowait(chunk)

    def finish(self, chunks: Iterable[int], *, before: Collection[int]) -> list[Event]:
        """Load the remaining entries; return the events to wait for. For a thread.

        Args:
            chunks: The chunks that arrived according to the plan.
            before: The chunks that arrived before the plan, and so in the arena.
        """
        self._has_begun |= bool(self._fences)
        rest = [each for each in (*before, *chunks) if each not in self.loaded]
        for chunk in rest:
            self.copies.load_device(*self._grid.range(chunk), self._fences)
        if self.copies.has_host:
            early, load = {*before}, self.copies.load_host
            direct = self._options.direct
            host = [each for each in rest if not direct or each in early]
            share_out(lambda chunk: load(*self._grid.range(chunk)), host)
        return [port.mark() for port in self.copies.ports.values()]

    def drain(self) -> None:
        """Block until all copies have ended."""
        self.copies.drain()
        for event in self.ends:
            event.synchronize()

    async def _send_all(self, before: Iterable[Event]) -> None:
        await self._bridge.run(self.pin)
        # A copy from pageable memory blocks its thread until then in any case.
        await completed(*before)
        while (chunk := await self._verified.get()) is not None:
            await self._bridge.run(self._send, chunk)

    def _send(self, chunk: int) -> None:
        self._has_begun = True
        self.copies.load_device(*self._grid.range(chunk), self._fences)
        self.loaded.add(chunk)
