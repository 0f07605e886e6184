"""One receive, stop by stop, from a peer's manifest to a state dict."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from aiockpt._bridge import Bridge
from aiockpt._copy import CopyPlan, InPlace
from aiockpt._deadline import Deadline
from aiockpt._device import Event, PortFor, completed
from aiockpt._tasks import together
from aiockpt.errors import AiockptError
from aiockpt.http.client import CheckpointClient
from aiockpt.memory import Arena, available_memory
from aiockpt.observe import Progress, TransferEvent, call_guarded, emit
from aiockpt.rebuild import assemble, tensors_over
from aiockpt.template import Match, Template
from aiockpt.wire.http import Source
from aiockpt.wire.limits import Limits, enforce
from aiockpt.wire.manifest import Manifest

__all__ = ["Receive", "ReceiveOptions"]

# A receiver with less to spare would take the host down with it.
_SHARE_OF_MEMORY = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveOptions:
    """What one receive needs to know beside whom to ask."""

    into: object | None
    direct: bool
    progress: Callable[[Progress], None] | None
    limits: Limits
    allow_pickle: bool
    ports: PortFor


class Receive:
    """One call of ``recv_checkpoint``."""

    def __init__(
        self,
        client: CheckpointClient,
        bridge: Bridge,
        options: ReceiveOptions,
        deadline: Deadline,
    ) -> None:
        self._client = client
        self._bridge = bridge
        self._options = options
        self._deadline = deadline
        self._progress = _Meter(options.progress)
        self._touched = False

    async def run(self, source: Source, step: int) -> object:
        """Return the state dict.

        If it fails or is cancelled, a template is untouched unless ``direct`` lets
        bytes into it as they arrive.
        """
        started = time.monotonic()
        template = await self._template()
        self._stop("fetch_manifest")
        manifest = await self._client.fetch_manifest(
            source, step, deadline=self._deadline.when, on_retry=self._remember
        )
        self._progress.expect(manifest)
        state = await self._fill(source, manifest, template)
        emit(
            TransferEvent(
                stop="recv",
                step=step,
                peer=source.base_url,
                nbytes=manifest.segment_bytes,
                seconds=time.monotonic() - started,
                level=logging.INFO,
            )
        )
        return state

    def annotate(self, error: AiockptError) -> None:
        """Say in the error what a receive that wrote in place leaves behind."""
        if self._options.direct and self._options.into is not None:
            done = "was modified" if self._touched else "was not modified"
            error.add_note(f"the template {done}")

    async def _template(self) -> Template | None:
        if self._options.into is None:
            return None
        self._stop("allocate")
        return await self._bridge.run(
            lambda: Template(
                self._options.into,
                limits=self._options.limits,
                allow_pickle=self._options.allow_pickle,
            )
        )

    async def _fill(
        self, source: Source, manifest: Manifest, template: Template | None
    ) -> object:
        self._stop("allocate")
        match: Match | None = None
        if template is not None:
            match = await self._bridge.run(template.match, manifest)
        if not self._options.direct or match is None:
            limit = self._options.limits.max_bytes
            if limit is None:
                limit = int(await self._bridge.run(available_memory) * _SHARE_OF_MEMORY)
            enforce("the checkpoint's size", manifest.segment_bytes, limit)
        arena = Arena(manifest.segment_bytes)
        if match is None:
            tensors = await self._fetch_and_build(source, manifest, arena)
            return await self._rebuild(manifest, tensors)
        return await self._fill_template(source, manifest, match, arena)

    async def _fetch_and_build(
        self, source: Source, manifest: Manifest, arena: Arena
    ) -> Mapping[int, torch.Tensor]:
        """Make the tensors while their bytes arrive."""
        tensors: list[torch.Tensor] = []

        async def build() -> None:
            tensors.extend(await self._bridge.run(tensors_over, manifest, arena.buffer))

        await together([partial(self._fetch, source, manifest, arena), build])
        return dict(enumerate(tensors))

    async def _fill_template(
        self, source: Source, manifest: Manifest, match: Match, arena: Arena
    ) -> object:
        plan = await self._bridge.run(self._plan, manifest, match, arena)
        if self._options.direct:
            memory = await self._bridge.run(plan.in_place)
            self._touched = bool(manifest.segment_bytes)
            await self._fetch(source, manifest, memory)
        else:
            await self._fetch(source, manifest, arena)
        self._stop("load")
        await self._load(manifest, plan)
        del plan
        tensors = match.tensors
        await self._bridge.run(_mark_changed, tensors.values())
        if len(tensors) < manifest.tensor_count:
            over = await self._bridge.run(tensors_over, manifest, arena.buffer)
            tensors = {**dict(enumerate(over)), **tensors}
        await self._bridge.run(arena.close)
        return await self._rebuild(manifest, tensors)

    def _plan(self, manifest: Manifest, match: Match, arena: Arena) -> CopyPlan:
        offsets = [entry.data_offsets for entry in manifest.entries]
        return CopyPlan(
            match.backings,
            [start for start, _ in offsets],
            [stop - start for start, stop in offsets],
            arena=arena,
            port_for=self._options.ports,
        )

    async def _fetch(
        self, source: Source, manifest: Manifest, target: Arena | InPlace
    ) -> None:
        self._stop("fetch_chunk")
        await self._client.fetch_chunks(
            source,
            manifest,
            target,
            range(len(manifest.grid)),
            on_progress=self._progress.add,
            on_retry=self._remember,
        )

    async def _load(self, manifest: Manifest, plan: CopyPlan) -> None:
        """Bring to the template what is still in the arena only, all of it or nothing.

        Once begun it goes on to its end, also if cancelled (on a device, in the
        background), so that a template is never half filled.
        """
        fences = plan.fences()

        def load() -> list[Event]:
            events = plan.load_parts(fences)
            for chunk in range(len(manifest.grid)):
                start, stop = manifest.grid.range(chunk)
                if not self._options.direct:
                    plan.load_host(start, stop)
                events += plan.load_device(start, stop, fences)
            return events

        try:
            for event in await self._bridge.run(load):
                await completed(event)
        except BaseException:
            self._bridge.post(plan.drain)  # keeps the memory until nobody reads it
            raise

    async def _rebuild(
        self, manifest: Manifest, tensors: Mapping[int, torch.Tensor]
    ) -> object:
        self._stop("rebuild")
        ordered = [tensors[number] for number in range(manifest.tensor_count)]
        return await self._bridge.run(
            lambda: assemble(
                manifest,
                ordered,
                limits=self._options.limits,
                allow_pickle=self._options.allow_pickle,
            )
        )

    def _remember(self, error: AiockptError) -> None:
        self._deadline.last_error = str(error)

    def _stop(self, name: str) -> None:
        self._deadline.stop = name
        self._progress.at(name)


def _mark_changed(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd that the memory has changed behind its back."""
    counted = [tensor for tensor in tensors if not tensor.is_inference()]
    torch.autograd.graph.increment_version(counted)


class _Meter:
    """Counts bytes and chunks for the caller's ``progress``."""

    def __init__(self, report: Callable[[Progress], None] | None) -> None:
        self._report = report
        self._state = Progress(stop="fetch_manifest")
        self._started = 0.0

    def expect(self, manifest: Manifest) -> None:
        self._state = replace(
            self._state,
            bytes_total=manifest.segment_bytes,
            chunks_total=len(manifest.grid),
        )

    def at(self, stop: str) -> None:
        if stop == "fetch_chunk":
            self._started = time.monotonic()
        self._tell(replace(self._state, stop=stop))

    def add(self, nbytes: int, chunks: int) -> None:
        done = self._state.bytes_done + nbytes
        elapsed = max(time.monotonic() - self._started, 1e-6)
        self._tell(
            replace(
                self._state,
                bytes_done=done,
                chunks_done=self._state.chunks_done + chunks,
                rate=done / elapsed,
            )
        )

    def _tell(self, state: Progress) -> None:
        self._state = state
        if self._report is not None:
            call_guarded(self._report, state)
