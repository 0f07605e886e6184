"""One receive, stop by stop, from a peer's manifest to a state dict."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from aiockpt._bridge import Bridge
from aiockpt._copy import CopyPlan, InPlace
from aiockpt._deadline import Deadline
from aiockpt._device import Event, PortFor, completed
from aiockpt._groups import Backing
from aiockpt._tasks import together
from aiockpt.errors import AiockptError, LimitExceededError
from aiockpt.http.client import CheckpointClient
from aiockpt.http.meter import Meter
from aiockpt.memory import Arena, available_memory
from aiockpt.observe import Progress, TransferEvent, emit
from aiockpt.rebuild import assemble, check_meshes, parts_over, tensors_over
from aiockpt.template import Match, Template
from aiockpt.wire.http import Source
from aiockpt.wire.limits import Limits, enforce
from aiockpt.wire.manifest import Manifest

T = TypeVar("T")

__all__ = ["Receive", "ReceiveOptions"]

# A receiver with less to spare would take the host down with it.
_SHARE_OF_MEMORY = 0.9

# Tensors per call into torch, which keeps the interpreter lock for all of them.
_SLICE = 1000


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
        self._progress = Meter(options.progress)
        self._held: list[object] = []
        self._nbytes = 0
        self._touched = False

    async def run(self, source: Source, step: int) -> object:
        """Return the state dict.

        If it fails or is cancelled, a template is as it was or holds the whole
        checkpoint, unless ``direct`` lets bytes into it as they arrive.
        """
        started = time.monotonic()
        state = await self._receive(source, step)
        await self._bridge.run(self._release)
        emit(
            TransferEvent(
                stop="recv",
                step=step,
                peer=source.base_url,
                nbytes=self._nbytes,
                seconds=time.monotonic() - started,
                level=logging.INFO,
            )
        )
        return state

    def annotate(self, error: AiockptError) -> None:
        """Say in the error what a receive into a template leaves behind."""
        if self._options.into is not None:
            done = "was modified" if self._touched else "was not modified"
            error.add_note(f"the template {done}")

    async def _receive(self, source: Source, step: int) -> object:
        template = self._hold(await self._template())
        self._stop("fetch_manifest")
        manifest = self._hold(
            await self._client.fetch_manifest(
                source, step, deadline=self._deadline.when, on_retry=self._remember
            )
        )
        self._nbytes = manifest.segment_bytes
        self._progress.expect(manifest)
        self._stop("allocate")
        if template is None:
            limits = self._options.limits
            await self._bridge.run(lambda: check_meshes(manifest, limits=limits))
            arena = await self._bridge.run(self._allocate, manifest, self._nbytes)
            return await self._fetch_and_build(source, manifest, arena)
        match = self._hold(await self._bridge.run(template.match, manifest))
        plan = self._hold(await self._bridge.run(self._plan, manifest, match))
        return await self._fill(source, manifest, match, plan)

    def _hold(self, weight: T) -> T:
        self._held.append(weight)
        return weight

    def _release(self) -> None:
        """Free what 100,000 tensors were described with, where no loop waits for it."""
        while self._held:
            self._held.pop()  # one by one, so that other threads come in between

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

    def _allocate(self, manifest: Manifest, nbytes: int) -> Arena:
        """Return an arena for the segment, of which ``nbytes`` are going to be used."""
        available = available_memory()
        limit = self._options.limits.max_bytes
        if limit is None:
            limit = int(available * _SHARE_OF_MEMORY)
        enforce("the checkpoint's size", nbytes, limit)
        size = manifest.segment_bytes
        try:
            return Arena(size)
        except (OSError, OverflowError, MemoryError, ValueError) as error:
            what = "the checkpoint's size, for which there is no memory,"
            raise LimitExceededError(what, limit=available, actual=size) from error

    async def _fetch_and_build(
        self, source: Source, manifest: Manifest, arena: Arena
    ) -> object:
        """Make the tensors while their bytes arrive."""
        tensors: list[torch.Tensor] = self._hold([])

        def build() -> None:
            tensors.extend(tensors_over(manifest, arena.buffer))

        await together(
            [
                partial(self._fetch, source, manifest, arena),
                partial(self._bridge.run, build),
            ]
        )
        self._stop("rebuild")
        return await self._bridge.run(self._rebuild, manifest, tensors)

    async def _fill(
        self, source: Source, manifest: Manifest, match: Match, plan: _Fill
    ) -> object:
        if self._options.direct:
            memory = await self._bridge.run(plan.copies.in_place)
            self._touched = bool(match.tensors)
            await self._fetch(source, manifest, memory)
        else:
            await self._fetch(source, manifest, plan.arena)
        self._stop("rebuild")
        # Whatever the peer can make fail comes before the first byte is written.
        state = await self._bridge.run(self._put_together, manifest, match, plan.arena)
        self._stop("load")
        await self._load(manifest, match, plan.copies)
        await self._bridge.run(plan.arena.close)
        return state

    def _plan(self, manifest: Manifest, match: Match) -> _Fill:
        offsets = [entry.data_offsets for entry in manifest.entries]
        sizes = [stop - start for start, stop in offsets]
        ports, used = self._options.ports, manifest.segment_bytes
        if self._options.direct:
            used -= sum(map(partial(_at_home, ports), match.backings))
        arena = self._allocate(manifest, used)
        starts = [start for start, _ in offsets]
        return _Fill(
            arena,
            CopyPlan(match.backings, starts, sizes, arena=arena, port_for=ports),
        )

    async def _fetch(
        self, source: Source, manifest: Manifest, target: Arena | InPlace
    ) -> None:
        self._stop("fetch_chunk")
        prepare = None
        if isinstance(target, Arena):
            prepare = partial(self._bridge.run, target.populate)
        await self._client.fetch_chunks(
            source,
            manifest,
            target,
            range(len(manifest.grid)),
            on_progress=self._progress.add,
            on_retry=self._remember,
            prepare=prepare,
        )

    def _put_together(self, manifest: Manifest, match: Match, arena: Arena) -> object:
        """Return the state dict: the template's tensors, and the peer's values."""
        values = parts_over(
            manifest, arena.buffer, parts=match.parts, blobs=match.blobs
        )
        found = {**match.tensors, **values}
        unused = torch.empty(0)  # a number that the tree does not mention
        numbers = range(manifest.tensor_count)
        whole = [found.get(n, unused) for n in numbers]
        return self._rebuild(manifest, whole, match.wholes)

    def _rebuild(
        self,
        manifest: Manifest,
        tensors: Sequence[torch.Tensor],
        wholes: Mapping[int, torch.Tensor] | None = None,
    ) -> object:
        return assemble(
            manifest,
            tensors,
            limits=self._options.limits,
            allow_pickle=self._options.allow_pickle,
            wholes=wholes,
        )

    async def _load(self, manifest: Manifest, match: Match, plan: CopyPlan) -> None:
        """Bring to the template what is still in the arena only, all of it or nothing.

        Once begun it goes on to its end, also if cancelled (on a device, in the
        background), so that a template is never half filled.
        """
        fences = plan.fences()

        def load() -> list[Event]:
            _mark_changed(match.changed())
            self._touched = True
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

    def _remember(self, error: AiockptError) -> None:
        self._deadline.last_error = str(error)

    def _stop(self, name: str) -> None:
        self._deadline.stop = name
        self._progress.at(name)


@dataclass(frozen=True, slots=True)
class _Fill:
    """How a template is filled, and the arena that bytes take on their way."""

    arena: Arena
    copies: CopyPlan


def _at_home(ports: PortFor, backing: Backing) -> int:
    """Return how many bytes of an entry need no arena in a direct receive."""
    host = not backing.parts and ports(backing.tensor.device) is None
    return backing.nbytes if host else 0


def _mark_changed(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd that the memory changes behind its back."""
    counted = [tensor for tensor in tensors if not tensor.is_inference()]
    for start in range(0, len(counted), _SLICE):
        torch.autograd.graph.increment_version(counted[start : start + _SLICE])
