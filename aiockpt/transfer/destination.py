"""Where a checkpoint goes: into tensors of its own, or into those of a template.

Either kind has the memory that the data segment is received into, and gives the state
dict afterwards. Whatever a peer can make fail happens in ``assemble``, before the first
byte of a template is written (unless ``direct`` has let them in already).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from operator import sub
from typing import Final, Protocol

import torch

from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import Arena, Loan, Memory
from aiockpt.memory.copies import CopyPlan, Fences, mark_changed
from aiockpt.memory.device import Event, completed, keep_until
from aiockpt.runtime.bridge import Bridge
from aiockpt.state.rebuild import Away, Frame, check_meshes, parts_over, tensors_over
from aiockpt.state.template import Match, Template
from aiockpt.transfer.loading import Bring, Loading
from aiockpt.transfer.terms import Terms, allocate, at_home, nbytes_of, put

__all__ = ["Destination", "Fresh", "InTemplate", "Terms", "destination_of"]


_NOTHING: Final[Away] = {}

# Page-locked memory is there as a whole: at least so much of it has to be of use.
_USED: Final = 0.75


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
    def on_verified(self) -> Callable[[int], None] | None:
        """What wants to be told of verified chunks in `fill`; on the loop."""

    def plan(self) -> Sequence[int]:
        """Return the other chunks that are wanted; for a thread."""

    def begin(self) -> None:
        """Say that bytes are on their way; for who brings them without `fill`."""

    async def fill(self, bring: Bring) -> None:
        """Begin, have chunks brought, and load early what `on_verified` is told of."""

    async def prepare(self, start: int, stop: int) -> None:
        """Have the memory of ``[start, stop)`` ready for its bytes."""

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

    touched = False
    on_verified = None
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
        used = manifest.segment_bytes - nbytes_of(away)
        self._owns = arena is None
        self._loan = Loan(arena) if arena else allocate(manifest, used, terms)
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

    async def fill(self, bring: Bring) -> None:
        """Have them brought."""
        await bring()

    async def prepare(self, start: int, stop: int) -> None:
        """Have the pages mapped, which may take longer than their bytes."""
        touch = partial(self.arena.populate, every=self._terms.ahead)
        await self._bridge.run(touch, start, stop)

    async def assemble(self) -> object:
        """Put the tensors into the tree."""
        self._loan.finish()
        return await self._bridge.run(put, self._frame, self._tensors, self._terms)

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
        entries, used = manifest.entries, manifest.segment_bytes - nbytes_of(away)
        if terms.direct:
            used -= at_home(match.backings, terms.ports)
        self._owns = arena is None
        self._loan = Loan(arena) if arena else allocate(manifest, used, terms)
        self.arena = self._loan.arena
        self.copies = CopyPlan(
            match.backings,
            entries.starts,
            array("q", map(sub, entries.stops, entries.starts)),
            arena=self.arena,
            port_for=terms.ports,
        )
        self.memory: Memory = self.arena
        if terms.direct:
            self.memory = self.copies.in_place()
        self.touched = False
        kept = terms.warm is not None and used >= _USED * manifest.segment_bytes
        self._loading = Loading(
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
    def on_verified(self) -> Callable[[int], None] | None:
        """For devices whose tensors are received into directly."""
        return self._loading.add if self._loading.is_early else None

    async def fill(self, bring: Bring) -> None:
        """Have chunks brought; what is verified goes to devices meanwhile."""
        self.begin()
        if self._loading.is_early:
            await self._loading.beside(bring)
        else:
            await bring()

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
        state = put(self._frame, tensors, self._terms, match.wholes, match.nodes)
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
