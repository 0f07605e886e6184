"""A receive of a part: the chunks that hold what is selected, and no others.

What is selected, and what comes of it, is found out as a load of a checkpointer does
it; only the bytes come from a peer. Chunks are fetched whole, since only whole ones can
be verified.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, partial

from aiockpt.errors import MissingKeysError, TemplateMismatchError
from aiockpt.format.chunks import chunks_over
from aiockpt.format.manifest import Manifest, Outline
from aiockpt.http.receive import Receive, ReceiveOptions
from aiockpt.http.sources import Sources
from aiockpt.memory.arena import Arena, Memory
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.deadline import Deadline
from aiockpt.state.pruning import pruned
from aiockpt.state.selection import Selection
from aiockpt.transfer.held import Held
from aiockpt.transfer.loading import Bring
from aiockpt.transfer.partial import PartialLoad
from aiockpt.transfer.segment import Segment, check_memory

__all__ = ["PartReceive"]


class _Part:
    """What is wanted of a checkpoint, and the memory that it comes to; for threads."""

    def __init__(
        self,
        manifest: Manifest,
        options: ReceiveOptions,
        url: str,
        arena: Arena | None,
    ) -> None:
        select, terms = options.select, options.terms
        if callable(select):
            select = cache(select)  # it is asked here, and again by the load
        self._url, self._options = url, options
        self._known = Selection(select)
        tree = pruned(manifest.tree, self._known)
        self._selection = Selection(select)
        self._values: list[int] = []
        self.segment = Segment(
            replace(manifest, tree=tree, header=b""),
            limits=terms.limits,
            allow_pickle=terms.allow_pickle,
            arena=arena,
        )
        self._load = PartialLoad(
            [self.segment],
            selection=self._selection,
            template=options.into,
            device=None,
            ports=terms.ports,
        )

    @property
    def touched(self) -> bool:
        """Whether the template may have been modified."""
        return self._load.touched

    def values(self) -> list[int]:
        """Return the chunks that values are made of, before anything is planned."""
        self._values = self._chunks(self.segment.value_ranges())
        self._check(self._values)
        return self._values

    def plan(self) -> list[int]:
        """Return the other chunks that are wanted.

        Raises:
            MissingKeysError: the template has keys that the checkpoint lacks.
            TemplateMismatchError: the template lacks what is selected, or differs.
        """
        self._load.plan()
        self._check_met()
        (landing,) = self._load.place()
        wanted = self._chunks(landing.ranges)
        self._check({*self._values, *wanted})
        known = {*self._values}
        return [chunk for chunk in wanted if chunk not in known]

    def target(self) -> Memory:
        """Return where the planned chunks go; the template changes from now on."""
        if not self._options.terms.direct:
            return self.segment.arena
        self._load.begin()
        return self._load.landings[0].memory

    def fence(self) -> None:
        """Have devices finish what they were given before their tensors change."""
        self._load.landings[0].fence()

    def finish(self) -> object:
        """Bring home what is not there yet; return the state dict."""
        landing, grid = self._load.landings[0], self.segment.manifest.grid
        if not self._options.terms.direct:
            self._load.begin()
            landing.load(landing.ranges, host=True)
        else:
            # Values came before anybody knew what else of their chunks is wanted.
            landing.load([grid.range(chunk) for chunk in self._values], host=True)
            landing.load(landing.ranges, host=False)
        return self._load.finish()

    def sizes(self, chunks: Sequence[int]) -> int:
        """Return how many bytes these chunks have."""
        ranges = map(self.segment.manifest.grid.range, chunks)
        return sum(stop - start for start, stop in ranges)

    def _check_met(self) -> None:
        """Raise if something is selected that is not there, or has no place."""
        unmet = self._selection.unmet()
        nowhere = {*unmet}.intersection(self._known.unmet())
        if missing := {*self._load.missing, *nowhere}:
            raise MissingKeysError(self._url, sorted(missing))
        for path in unmet:
            raise TemplateMismatchError(path, expected="a value", actual="nothing")

    def _chunks(self, ranges: Iterable[tuple[int, int]]) -> list[int]:
        return chunks_over(self.segment.manifest.grid, ranges)

    def _check(self, chunks: Iterable[int]) -> None:
        ranges = map(self.segment.manifest.grid.range, chunks)
        check_memory(ranges, self._options.terms.limits)


async def _plainly(bring: Bring) -> None:
    await bring()


class PartReceive(Receive):
    """One call of ``recv_checkpoint`` with ``select``."""

    def __init__(
        self,
        origin: Sources,
        bridge: Bridge,
        options: ReceiveOptions,
        deadline: Deadline,
    ) -> None:
        super().__init__(origin, bridge, options, deadline)
        self._part: _Part | None = None

    async def _run(self, step: int) -> object:
        asked = time.monotonic()
        manifest = await self._ask(step)
        started = time.monotonic()
        await self._borrow(manifest.outline, most=None)  # a part may be less
        part = await self._bridge.run(self._open, manifest)
        values = await self._bridge.run(part.values)
        await self._bring(manifest, values, part.segment.arena)
        self._stop("allocate")
        chunks = await self._bridge.run(part.plan)
        await self._bring(manifest, chunks, part.target())
        await self._supply.end(step)
        self._stop("load")
        part.fence()
        state = await self._bridge.run(part.finish)
        self._touched = part.touched
        nbytes = part.sizes([*values, *chunks])
        del part
        await self._bridge.run(self._release)
        self._tell(step, nbytes, asked, started)
        return state

    def _open(self, manifest: Manifest) -> _Part:
        name, arena = self._origin.name, self._supply.arena
        part = self._part = _Part(manifest, self._options, name, arena)
        if self._options.have is not None:
            arena, ports = part.segment.arena, self._options.terms.ports
            held = Held.of(manifest, self._survey(), arena=arena, ports=ports)
            self._begin_delta(held)
        return part

    async def _bring(
        self, manifest: Manifest, chunks: Sequence[int], target: Memory
    ) -> None:
        if not chunks:
            return
        assert self._part is not None
        self._progress.expect(self._part.sizes(chunks), len(chunks))
        fetch = partial(self._fetch_part, manifest.outline, target)
        arena = self._part.segment.arena
        straight = None if target is arena else target
        await self._fill(manifest.step, chunks, straight, fetch, _plainly)

    async def _fetch_part(
        self, outline: Outline, target: Memory, chunks: Sequence[int]
    ) -> None:
        await self._supply.bring(
            outline, target, chunks, on_progress=self._progress.add
        )

    def _release(self) -> None:
        """Unmap what was received beside the selection, where no loop waits for it."""
        super()._release()
        self._part = None

    def _abandon(self, error: BaseException) -> None:
        """Take note of what was done to the template; let go of the memory."""
        part, self._part = self._part, None
        if part is None:
            return
        self._touched = part.touched
        # Views of the memory are in frames of the traceback, so it is not unmapped.
        # Where a loop has dropped this coroutine, threads go on.
        if self._supply.arena is None and not isinstance(error, GeneratorExit):
            self._bridge.post(part.segment.arena.empty)
