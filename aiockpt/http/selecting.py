"""A receive of a part: the chunks that hold what is selected, and no others.

What is selected, and what comes of it, is found out as a load of a checkpointer does
it; only the bytes come from a peer. Chunks are fetched whole, since only whole ones can
be verified.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NoReturn

from aiockpt.errors import MissingKeysError, TemplateMismatchError
from aiockpt.format.chunks import chunks_over
from aiockpt.format.manifest import Manifest, Outline
from aiockpt.http.receive import Receive, ReceiveOptions
from aiockpt.http.sources import Sources
from aiockpt.memory.arena import Arena
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.deadline import Deadline
from aiockpt.state.nodes import decoders_for
from aiockpt.state.pruning import pruned
from aiockpt.state.selection import Selection
from aiockpt.transfer.content import Content, check_memory
from aiockpt.transfer.filling import Filling
from aiockpt.transfer.held import Held
from aiockpt.transfer.landing import PlacedLanding
from aiockpt.transfer.loading import Bring
from aiockpt.transfer.wants import Wants

__all__ = ["PartReceive"]


@dataclass(frozen=True, slots=True)
class _Target:
    """Where the client's bytes go: a content's memory, or right to their places."""

    memory: memoryview
    landing: PlacedLanding | None = None

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return the memory of ``[start, stop)``."""
        own = self.memory[start:stop]
        return [own] if self.landing is None else self.landing.lay(start, stop, own)


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
            select = cache(select)  # it is asked here, and again by the filling
        self._url, self._options = url, options
        self._known = Selection(select)
        tree = pruned(manifest.tree, self._known)
        self._selection = Selection(select)
        self._landing = PlacedLanding(())
        self._early: list[int] = []
        self.content = Content(
            replace(manifest, tree=tree, header=b""),
            _by_nobody,
            limits=terms.limits,
            allow_pickle=terms.allow_pickle,
            arena=arena,
        )
        self._wants = Wants([self.content], device=None, ports=terms.ports)
        self._filling = Filling(self._selection, self._wants)
        self._result: object = None

    @property
    def touched(self) -> bool:
        """Whether the template may have been modified."""
        return self._wants.touched

    def early(self) -> list[int]:
        """Return the chunks that values are made of, before anything is planned."""
        self._early = self._chunks(self.content.value_ranges())
        self._check(self._early)
        return self._early

    def plan(self) -> list[int]:
        """Return the other chunks that are wanted; for these there is one plan.

        Raises:
            MissingKeysError: the template has keys that the checkpoint lacks.
            TemplateMismatchError: the template lacks what is selected, or differs.
        """
        filling = self._filling
        into = self._options.into
        found = self.content.assemble(decoders_for(into))
        self._result = filling.plan(into, found)
        self._check_met()
        for _, places in self._wants.places():
            self._landing = PlacedLanding(places)
        wanted = self._chunks(self._landing.ranges())
        self._check({*self._early, *wanted})
        known = {*self._early}
        return [chunk for chunk in wanted if chunk not in known]

    def target(self) -> _Target:
        """Return where the planned chunks go; the template changes from now on."""
        if not self._options.terms.direct:
            return _Target(self.content.memory)
        self._wants.begin()
        return _Target(self.content.memory, self._landing)

    def fence(self) -> None:
        """Have devices finish what they were given before their tensors change."""
        self._landing.fence()

    def finish(self) -> object:
        """Bring home what is not there yet; return the state dict."""
        memory, grid = self.content.memory, self.content.manifest.grid
        if not self._options.terms.direct:
            self._wants.begin()
            self._landing.bring(memory, 0, grid.segment_bytes)
        else:
            for chunk in self._early:  # came before anybody knew where to
                self._landing.bring(memory, *grid.range(chunk))
        self._landing.pass_on(memory)
        self._wants.finish()
        self._filling.finish()
        return self._result

    def sizes(self, chunks: Sequence[int]) -> int:
        """Return how many bytes these chunks have."""
        ranges = map(self.content.manifest.grid.range, chunks)
        return sum(stop - start for start, stop in ranges)

    def _check_met(self) -> None:
        """Raise if something is selected that is not there, or has no place."""
        unmet = self._selection.unmet()
        nowhere = {*unmet}.intersection(self._known.unmet())
        if missing := {*self._filling.missing, *nowhere}:
            raise MissingKeysError(self._url, sorted(missing))
        for path in unmet:
            raise TemplateMismatchError(path, expected="a value", actual="nothing")

    def _chunks(self, ranges: Iterable[tuple[int, int]]) -> list[int]:
        return chunks_over(self.content.manifest.grid, ranges)

    def _check(self, chunks: Iterable[int]) -> None:
        check_memory(self.sizes([*chunks]), self._options.terms.limits)


async def _plainly(bring: Bring) -> None:
    await bring()


def _by_nobody(*_: object, **__: object) -> NoReturn:
    raise AssertionError("the client fetches")


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
        early = await self._bridge.run(part.early)
        await self._bring(manifest, early, _Target(part.content.memory))
        self._stop("allocate")
        chunks = await self._bridge.run(part.plan)
        await self._bring(manifest, chunks, part.target())
        await self._supply.end(step)
        self._stop("load")
        part.fence()
        state = await self._bridge.run(part.finish)
        self._touched = part.touched
        nbytes = part.sizes([*early, *chunks])
        del part
        await self._bridge.run(self._release)
        self._tell(step, nbytes, asked, started)
        return state

    def _open(self, manifest: Manifest) -> _Part:
        name, arena = self._origin.name, self._supply.arena
        part = self._part = _Part(manifest, self._options, name, arena)
        if self._options.have is not None:
            arena, ports = part.content.arena, self._options.terms.ports
            held = Held.of(manifest, self._survey(), arena=arena, ports=ports)
            self._begin_delta(held)
        return part

    async def _bring(
        self, manifest: Manifest, chunks: Sequence[int], target: _Target
    ) -> None:
        if not chunks:
            return
        assert self._part is not None
        self._progress.expect(self._part.sizes(chunks), len(chunks))
        fetch = partial(self._fetch_part, manifest.outline, target)
        await self._fill(
            manifest.step, chunks, target if target.landing else None, fetch, _plainly
        )

    async def _fetch_part(
        self, outline: Outline, target: _Target, chunks: Sequence[int]
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
            self._bridge.post(part.content.arena.empty)
