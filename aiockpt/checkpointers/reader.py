"""Load a rank's state dict, or a part of it, from a directory, a file or a peer."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Never

import torch

from aiockpt.checkpointers.base import template_of
from aiockpt.checkpointers.config import RankInfo
from aiockpt.checkpointers.ranks import RankLookup
from aiockpt.checkpointers.sources import Found, Reading, is_url, open_sources
from aiockpt.errors import AiockptError, MissingKeysError, StateDictError
from aiockpt.format.limits import FILE_LIMITS, Limits
from aiockpt.memory.copies import mark_changed
from aiockpt.memory.device import Marks, PortFor, completed, port_for
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.switching import switching_often
from aiockpt.state.load_plan import Matching, Ranges, Template, state_over
from aiockpt.state.match import LAX, LOAD
from aiockpt.state.segment import Segment, check_memory
from aiockpt.state.selection import Select, listed
from aiockpt.storage.directory import StrPath
from aiockpt.storage.placement import Placement, PlannedPlacement, VerifyOnly
from aiockpt.storage.read import FileSource, OnBytes, Verify, check_verify
from aiockpt.transport import refuse_unknown, whole_number

__all__ = ["CheckpointReader", "MapLocation", "load", "own_read"]

logger = logging.getLogger("aiockpt")

MapLocation = Any
"""A device, its name, a dict of these, or a function, as in ``torch.load``."""

_SHOWN = 10


class CheckpointReader:
    """Reads one rank's share of a checkpoint.

    Args:
        rank_info: The rank whose file it reads. None: the rank in
            ``torch.distributed``, looked up at each load.
        limits: The largest sizes that it accepts. By default the memory is the limit.
        allow_pickle: Accept leaves that were saved as pickles, which run code.
        ports: Returns the port of a device; tests pass a fake one.
    """

    ports: PortFor = staticmethod(port_for)

    def __init__(
        self,
        rank_info: RankInfo | None = None,
        *,
        limits: Limits = FILE_LIMITS,
        allow_pickle: bool = False,
        ports: PortFor = port_for,
    ) -> None:
        self._ranks = RankLookup(rank_info, None)
        self._limits = limits
        self._allow_pickle = allow_pickle
        self.ports = ports

    def __repr__(self) -> str:
        rank = self._ranks.info()
        return f"<CheckpointReader rank={rank.global_rank}/{rank.global_world_size}>"

    def read(
        self,
        path: StrPath,
        state_dict: Any = None,
        *,
        map_location: MapLocation = None,
        strict: bool = False,
        into: Any = None,
        select: Select | None = None,
        verify: Verify = "full",
        mmap: bool = False,
        on_bytes: OnBytes | None = None,
        rank: int | None = None,
        **own: Never,
    ) -> tuple[Any, list[str]]:
        """Return the state dict, and the requested keys that the checkpoint lacks.

        Args:
            path: One of: a checkpoint's directory; a safetensors file of any tool, or a
                directory of such files; a file of ``torch.save``; a directory with the
                files of torch's experimental checkpointer; the URL of a peer, such as
                ``http://host:port/checkpoint/100``, or its ``metadata()``.
            state_dict: Another name of ``into``.
            into: A template; only its keys are read. Its tensors are filled in place.
                Its dicts and lists get the other values after everything is read. The
                template is returned (a new tuple for a tuple). None as a value accepts
                any value.
            map_location: The device of tensors that have no place in the template.
                A tensor that is also a part of a registered leaf stays on the CPU.
            strict: Raise before any tensor is read if a key of the template, or a path
                of ``select``, is missing; or if a container is empty in the template
                and full in the checkpoint. Otherwise a warning names them, and the
                container stays empty. Keys that only the checkpoint has never count.
            select: The dotted paths to read, each with everything below it; or a
                function that is called with each path and returns a bool.
            verify: ``full``: compare the digest of every chunk that is read. ``none``:
                compare no digest.
            mmap: Return tensors over a private mapping of the file. The file is read
                when they are used, and must not be truncated meanwhile.
            on_bytes: Called from any thread with the number of bytes that were read.
                An exception in it ends the load. With a peer, 0 means that the peer is
                silent, and a negative number that a chunk was wrong.
            rank: The rank whose part to read, whatever the number of ranks. By default
                this rank; then as many ranks must load the checkpoint as wrote it.
            own: Refused here. A subclass may take more keywords, and may pass all of
                them on.

        Raises:
            CheckpointNotFoundError: there is no complete checkpoint at ``path``.
            WorldSizeMismatchError: another number of ranks wrote it, and ``rank`` was
                not given.
            StorageError: the checkpoint cannot be read.
            TransferTimeoutError: a peer sent nothing new for 60 seconds.
            IntegrityError: a chunk has a wrong digest. A note says whether tensors of
                the template may hold bytes of it.
            StateDictError: ``map_location`` names no device of this host.
            TemplateMismatchError: a value of the template has another type, shape or
                dtype; or, with ``strict``, the template has no place for a selected
                value. The template is unchanged.
            MissingKeysError: every key of the template is missing; or, with
                ``strict``, one of them. The template is unchanged.
        """
        if type(self).read is CheckpointReader.read:
            refuse_unknown(CheckpointReader.read, own)
        state_dict, select = template_of(state_dict, into), listed(select)
        if rank is not None:
            rank = whole_number(rank, "rank")
        info = self._ranks.info()
        reading = Reading(
            rank=info.global_rank if rank is None else rank,
            world_size=info.global_world_size if rank is None else None,
            limits=self._limits,
            allow_pickle=self._allow_pickle,
            verify=check_verify(verify),
            mmap=mmap,
            on_bytes=on_bytes,
        )
        device = device_of(map_location)
        if is_url(path):
            from aiockpt.checkpointers.peer import load_from_peer
            from aiockpt.transfer.destination import Terms
            from aiockpt.transfer.receive import ReceiveOptions

            options = ReceiveOptions(
                into=state_dict,
                select=select,
                keys=state_dict is not None,
                strict=strict,
                device=device,
                terms=Terms(
                    limits=self._limits,
                    allow_pickle=self._allow_pickle,
                    direct=True,
                    ports=self.ports,
                    marks=Marks.of(self.ports),
                ),
            )
            received = load_from_peer(os.fspath(path), options, on_bytes)
            name, _, _ = os.fspath(path).partition("#")  # without the token of a URL
            return received.state_dict, _reported(received.missing, name)
        with switching_often(), open_sources(path, reading) as found:
            if state_dict is None and select is None and device is None:
                return _whole(found, reading), []
            segments = found.segments
            if not found.sources:
                segments = [Segment.of(found.values, limits=self._limits)]
            into = state_dict is not None
            part = Matching(
                segments,
                LOAD if strict else LAX,
                limits=self._limits,
                allow_pickle=self._allow_pickle,
                select=select,
                template=Template(state_dict, limits=self._limits) if into else None,
                device=device,
                name=os.fspath(path),
            )
            state = _part(found, part, reading, self.ports, into=into)
            return state, _reported(part.missing, os.fspath(path))


def own_read(reader: CheckpointReader) -> list[Callable[..., object]]:
    """Return the reader's ``read`` if it is the user's own; it gets more keywords."""
    is_ours = getattr(type(reader), "read", None) is CheckpointReader.read
    return [] if is_ours else [reader.read]


def _whole(found: Found, how: Reading) -> object:
    """Read everything into new memory."""
    if not found.sources:
        return found.values
    for source in found.sources:
        segment = source.segment
        size = segment.manifest.segment_bytes
        ranges = [(0, size)] if size else []
        if segment.is_there:
            _verify(source, ranges, how)
        elif ranges:
            check_memory(ranges, how.limits)
            placement = Placement(segment, ranges)
            source.read(placement, verify=how.verify, on_bytes=how.on_bytes)
    return state_over(found.segments, limits=how.limits, allow_pickle=how.allow_pickle)


def _part(
    found: Found, part: Matching, how: Reading, ports: PortFor, *, into: bool
) -> object:
    """Read the requested values into the template, or into new memory."""
    touched = False
    try:
        # A file of torch is read already: it has a segment, but is no source to read.
        for source, ranges in zip(found.sources, part.value_ranges(), strict=False):
            if ranges and source.segment.is_there:
                _verify(source, ranges, how)
            elif ranges:
                values = Placement(source.segment, ranges)
                source.read(values, verify=how.verify, on_bytes=how.on_bytes)
        plans = part.plans()
        pairs = [*zip(found.sources, plans, strict=False)]
        read = (plan.ranges for each, plan in pairs if not each.segment.is_there)
        check_memory(chain.from_iterable(read), how.limits)
        touched = bool(part.changed())
        mark_changed(part.changed())
        for source, plan in pairs:
            if not plan.ranges:
                continue
            placement = PlannedPlacement(source.segment, plan, ports)
            if source.segment.is_there:
                _verify(source, plan.ranges, how)
                part.check()
                placement.load()
            else:
                source.read(placement, verify=how.verify, on_bytes=how.on_bytes)
        part.finish()
    except AiockptError as error:
        if into:
            done = "was modified" if touched else "was not modified"
            error.add_note(f"the template {done}")
        raise
    return part.assemble()


def _reported(missing: Sequence[str], name: str) -> list[str]:
    if missing:
        shown = ", ".join(missing[:_SHOWN])
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        logger.warning("%s is missing keys: %s%s", name, shown, more)
    return [*missing]


def _verify(source: FileSource, ranges: Ranges, how: Reading) -> None:
    """Compare the digests of mapped bytes."""
    segment = source.segment
    if how.verify != "none" and segment.manifest.digests:
        placement = VerifyOnly(segment, ranges)
        source.read(placement, verify=how.verify, on_bytes=how.on_bytes)


def device_of(map_location: MapLocation) -> torch.device | None:
    """Return the device that a ``map_location`` gives for tensors of host memory.

    A checkpoint does not say on which device a tensor was.

    Raises:
        StateDictError: ``map_location`` names no device of this host.
    """
    asked = map_location
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu")
    elif isinstance(map_location, Callable):  # type: ignore[arg-type]
        probe = torch.empty(1, dtype=torch.uint8).untyped_storage()
        mapped = map_location(probe, "cpu")
        map_location = None if mapped is None else getattr(mapped, "device", mapped)
    if map_location is None:
        return None
    try:
        device = torch.device(map_location)
        if device.type == "cpu":
            return None
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, ValueError, AssertionError, ImportError) as error:
        why = str(error).strip().partition("\n")[0]
        raise StateDictError(
            f"map_location={asked!r} names no device of this host ({why}): name "
            "another one, or leave it out to load into host memory"
        ) from error
    return device


class _CalledOffError(Exception):
    """Ends the load from within; only this module catches it."""


class _Switch:
    """Passes on how many bytes were read, until the load is cancelled."""

    def __init__(self, report: Callable[[int], None] | None) -> None:
        self.off = False
        self._report = report

    def __call__(self, nbytes: int) -> None:
        if self.off:
            raise _CalledOffError
        if self._report is not None:
            self._report(nbytes)


async def load(
    bridge: Bridge,
    reader: CheckpointReader,
    path: Any,
    state_dict: Any,
    *,
    strict: bool,
    on_bytes: Callable[[int], None] | None = None,
    **options: Any,
) -> Any:
    """Run the reader in a thread, and return its result.

    The thread has other current streams, so this first waits for the work that the
    caller's streams have when this begins to run. If cancelled, this waits until the
    thread has ended, which is soon. Nothing writes to the caller's tensors afterwards.
    """
    await completed(*Marks.of_caller(reader.ports).events.values())
    switch = _Switch(on_bytes)
    read = partial(
        reader.read, path, state_dict, strict=strict, on_bytes=switch, **options
    )
    loop = asyncio.get_running_loop()
    reading = loop.create_task(bridge.run(read))
    try:
        await asyncio.wait({reading})
    except asyncio.CancelledError:
        switch.off = True
        await _outlast(reading)
        raise
    loaded, missing = reading.result()
    if strict and missing:  # a reader of one's own may leave that to us
        raise MissingKeysError(str(path), missing)
    return loaded


async def _outlast(reading: asyncio.Task[Any]) -> None:
    while not reading.done():
        try:
            await asyncio.wait({reading})
        except asyncio.CancelledError:
            continue  # the first one is raised in the end
    if not reading.cancelled():
        reading.exception()  # it counts as seen
