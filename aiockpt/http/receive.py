"""One receive, stop by stop, from a peer's manifest to a state dict."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from aiockpt._bridge import Bridge
from aiockpt._deadline import Deadline
from aiockpt._meter import Meter
from aiockpt._selection import Select
from aiockpt.destination import Destination, Terms, destination_of
from aiockpt.errors import AiockptError
from aiockpt.http.client import CheckpointClient
from aiockpt.http.supply import Sharing, Supply
from aiockpt.memory import return_freed
from aiockpt.observe import Progress, TransferEvent, emit
from aiockpt.template import Template
from aiockpt.transport import exact_step
from aiockpt.wire.foretelling import Foretold
from aiockpt.wire.http import Source
from aiockpt.wire.manifest import Manifest, Outline

__all__ = ["Receive", "ReceiveOptions"]

_MANY = 1 << 20  # bytes of a header: thousands of tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveOptions:
    """What one receive needs to know beside whom to ask."""

    into: object | None
    select: Select | None
    progress: Callable[[Progress], None] | None
    terms: Terms
    sharing: Sharing


class Receive:
    """One call of ``recv_checkpoint``."""

    def __init__(
        self,
        client: CheckpointClient,
        bridge: Bridge,
        options: ReceiveOptions,
        deadline: Deadline,
    ) -> None:
        self._supply = Supply(client, bridge, options.sharing, self._remember)
        self._bridge = bridge
        self._options = options
        self._deadline = deadline
        self._progress = Meter(options.progress)
        self._template: Template | None = None
        self._foretold: Foretold | None = None
        self._manifest: Manifest | None = None
        self._goal: Destination | None = None

    async def run(self, source: Source, step: int) -> object:
        """Return the state dict.

        If it fails or is cancelled, a template is as it was or holds the whole
        checkpoint, unless ``direct`` lets bytes into it as they arrive.
        """
        try:
            return await self._run(source, exact_step(step))
        finally:
            self._supply.close()

    async def _run(self, source: Source, step: int) -> object:
        asked = time.monotonic()
        outline = await self._find(source, step)
        started = time.monotonic()
        await self._borrow(outline, most=self._options.terms.limits.max_bytes)
        goal = await self._choose()
        await self._fetch(source, outline, goal)
        self._stop("rebuild")
        # Whatever the peer can make fail comes before the first byte is written.
        state = await goal.assemble()
        self._stop("load")
        await goal.load()
        del goal
        await self._bridge.run(self._release)
        self._tell(source, step, outline.grid.segment_bytes, asked, started)
        return state

    def annotate(self, error: AiockptError) -> None:
        """Say in the error what a receive into a template leaves behind."""
        if self._options.into is not None:
            done = "was modified" if self._has_touched() else "was not modified"
            error.add_note(f"the template {done}")

    async def _find(self, source: Source, step: int) -> Outline:
        """Look at the template, then for the checkpoint."""
        if self._options.into is not None:
            self._stop("allocate")
            self._template = await self._bridge.run(self._describe)
        manifest = await self._ask(source, step)
        self._manifest = manifest.without_header()
        outline = manifest.outline
        self._progress.expect(outline)
        return outline

    async def _ask(self, source: Source, step: int) -> Manifest:
        self._stop("fetch_manifest")
        foretold, self._foretold = self._foretold, None
        return await self._supply.ask(source, step, self._deadline.when, foretold)

    async def _borrow(self, outline: Outline, *, most: int | None) -> None:
        self._stop("allocate")
        await self._supply.open(outline, most=most)

    def _describe(self) -> Template:
        terms = self._options.terms
        template = Template(
            self._options.into, limits=terms.limits, allow_pickle=terms.allow_pickle
        )
        self._foretold = template.foretell()
        return template

    async def _choose(self) -> Destination:
        self._stop("allocate")
        self._goal = await self._bridge.run(self._make_room)
        return self._goal

    def _make_room(self) -> Destination:
        # What nobody needs any more goes before memory is at its fullest.
        manifest, self._manifest = self._manifest, None
        assert manifest is not None
        terms = self._options.terms
        template, self._template = self._template, None
        arena = self._supply.arena
        goal = destination_of(manifest, template, terms, self._bridge, arena)
        many = manifest.header_bytes > _MANY
        del manifest, template
        if many:
            return_freed()
        return goal

    async def _fetch(self, source: Source, outline: Outline, goal: Destination) -> None:
        self._stop("fetch_chunk")
        goal.begin()
        await self._supply.bring(
            source,
            outline,
            goal.memory,
            range(len(outline.grid)),
            on_progress=self._progress.add,
            prepare=goal.prepare,
        )

    def _has_touched(self) -> bool:
        return self._goal is not None and self._goal.touched

    def _tell(
        self, source: Source, step: int, nbytes: int, asked: float, started: float
    ) -> None:
        found = f"found after {started - asked:.3f} s"
        emit(
            TransferEvent(
                stop="recv",
                step=step,
                peer=source.base_url,
                nbytes=nbytes,
                seconds=time.monotonic() - started,
                detail=", ".join(filter(None, [found, self._supply.remark])),
                level=logging.INFO,
                medium=self._supply.medium,
            )
        )

    def _release(self) -> None:
        """Free what 100,000 tensors were described with, where no loop waits for it."""
        self._goal = None
        self._supply.give_back()

    def _remember(self, error: AiockptError) -> None:
        self._deadline.last_error = str(error)

    def _stop(self, name: str) -> None:
        self._deadline.stop = name
        self._progress.at(name)
