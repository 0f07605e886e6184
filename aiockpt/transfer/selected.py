"""Where a selection of a checkpoint goes: tensors of its own, or a template's.

What is selected, and what comes of it, is found out as a load of a checkpointer does
it. Chunks are received whole, since only whole chunks can be verified.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache, partial

from aiockpt.errors import MissingKeysError, TemplateMismatchError
from aiockpt.format.chunks import chunks_over
from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import Arena, Memory
from aiockpt.runtime.bridge import Bridge
from aiockpt.state.selection import Select, Selection, pruned
from aiockpt.transfer.destination import Terms
from aiockpt.transfer.partial import PartialLoad
from aiockpt.transfer.placement import PlannedPlacement
from aiockpt.transfer.segment import Segment, check_memory

__all__ = ["Selected"]


class Selected:
    """A `Destination` of what is selected.

    Args:
        manifest: The checkpoint.
        select: What is wanted.
        into: A state dict to fill, which may have more or fewer keys; or None.
        terms: What is accepted.
        bridge: Where the template is filled.
        name: Whose checkpoint it is, for errors.
        arena: Memory that has the data segment already; None: a new arena.
    """

    is_early = False

    def __init__(
        self,
        manifest: Manifest,
        select: Select,
        into: object | None,
        terms: Terms,
        bridge: Bridge,
        *,
        name: str,
        arena: Arena | None = None,
    ) -> None:
        if callable(select):
            select = cache(select)  # it is asked here, and again by the load
        self._known = Selection(select)
        tree = pruned(manifest.tree, self._known)
        self._selection = Selection(select)
        self._terms, self._bridge, self._name = terms, bridge, name
        self._owns = arena is None
        self._segment = Segment(
            replace(manifest, tree=tree, header=b""),
            limits=terms.limits,
            allow_pickle=terms.allow_pickle,
            arena=arena,
        )
        self._load = PartialLoad(
            [self._segment],
            selection=self._selection,
            template=into,
            device=None,
            ports=terms.ports,
        )
        self._placement: PlannedPlacement | None = None
        self.arena = self._segment.arena
        self.memory: Memory = self.arena
        self.values: Sequence[int] = self._chunks(self._segment.value_ranges())
        self._check_memory(self.values)

    @property
    def touched(self) -> bool:
        """Whether the template may have been modified."""
        return self._load.touched

    def plan(self) -> Sequence[int]:
        """Return the chunks that are wanted beside ``values``, which must be there.

        Raises:
            MissingKeysError: the template has keys that the checkpoint lacks.
            TemplateMismatchError: the template lacks what is selected, or differs.
            LimitExceededError: there is no memory for it.
        """
        self._load.plan()
        self._check_met()
        (self._placement,) = self._load.place()
        wanted = self._chunks(self._placement.ranges)
        known = {*self.values}
        self._check_memory({*known, *wanted})
        if self._terms.direct:
            self.memory = self._placement.memory
        return [chunk for chunk in wanted if chunk not in known]

    def begin(self) -> None:
        """Say that the template changes from now on, if it does."""
        if self._terms.direct and self._placement is not None:
            self._load.begin()

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Begin; nothing is loaded early."""
        self.begin()
        yield

    async def prepare(self, start: int, stop: int) -> None:
        """Have the pages of the arena mapped; those of a template are there."""
        if not self._terms.direct:
            touch = partial(self.arena.populate, every=self._terms.ahead)
            await self._bridge.run(touch, start, stop)

    def complete(self, chunk: int) -> None:
        """Do nothing: nothing is loaded early."""

    async def assemble(self) -> object:
        """Return the state dict, which `load` completes."""
        return self._load.result

    async def load(self) -> None:
        """Bring to the template what is not there yet, and the values."""
        assert self._placement is not None
        # What devices were given before comes first.
        self._placement.fence()
        await self._bridge.run(self._finish)

    def abandon(self) -> None:
        """Do nothing: who loads waits for the devices."""

    def discard(self, *, late: bool) -> None:
        """Free the memory; views of it may live as long as a traceback."""
        del late
        if self._owns:
            self._bridge.post(self.arena.empty)

    def _finish(self) -> None:
        placement, grid = self._placement, self._segment.manifest.grid
        assert placement is not None
        if not self._terms.direct:
            self._load.begin()
            placement.load(placement.ranges, host=True)
        else:
            # Values came before anybody knew what else of their chunks is wanted.
            placement.load([grid.range(chunk) for chunk in self.values], host=True)
            placement.load(placement.ranges, host=False)
        self._load.finish()

    def _check_met(self) -> None:
        """Raise if something is selected that is not there, or has no place."""
        unmet = self._selection.unmet()
        nowhere = {*unmet}.intersection(self._known.unmet())
        if missing := {*self._load.missing, *nowhere}:
            raise MissingKeysError(self._name, sorted(missing))
        for path in unmet:
            raise TemplateMismatchError(path, expected="a value", actual="nothing")

    def _chunks(self, ranges: Iterable[tuple[int, int]]) -> list[int]:
        return chunks_over(self._segment.manifest.grid, ranges)

    def _check_memory(self, chunks: Iterable[int]) -> None:
        ranges = map(self._segment.manifest.grid.range, chunks)
        check_memory(ranges, self._terms.limits)
