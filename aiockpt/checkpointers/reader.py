"""Load a rank's state dict, or a part of it, from a directory, a file or a peer."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from typing import Any, Literal, Never

import torch

from aiockpt.checkpointers.base import LoadStatistics, template_of
from aiockpt.checkpointers.config import RankInfo
from aiockpt.checkpointers.ranks import RankLookup, is_initialized
from aiockpt.checkpointers.sources import Found, Reading, is_url, open_sources
from aiockpt.errors import (
    AiockptError,
    DeviceMeshError,
    MissingKeysError,
    StateDictError,
    TemplateMismatchError,
)
from aiockpt.events import TransferEvent, emit
from aiockpt.format.limits import FILE_LIMITS, Limits
from aiockpt.memory.copies import mark_changed
from aiockpt.memory.device import Marks, PortFor, completed, port_for
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.switching import switching_often
from aiockpt.state.flatten import Wanted
from aiockpt.state.load_plan import Matching, Template
from aiockpt.state.match import LAX, LOAD
from aiockpt.state.reshard import (
    Claim,
    Policy,
    RankValues,
    United,
    check_rank_values,
    unite,
)
from aiockpt.state.segment import check_memory
from aiockpt.state.selection import Select, listed
from aiockpt.state.trees import has_distributed
from aiockpt.storage.boxes import BoxSource, LoadedSource, compare
from aiockpt.storage.directory import StrPath
from aiockpt.storage.placement import PlannedPlacement
from aiockpt.storage.read import (
    FileSource,
    LoadSource,
    OnBytes,
    Verify,
    check_verify,
    read_segment,
)
from aiockpt.transport import refuse_unknown, whole_number

logger = logging.getLogger("aiockpt")

MapLocation = Any
"""A device, its name, a dict of these, or a function, as in ``torch.load``."""

_SHOWN_KEYS = 10


class CheckpointReader:
    """Reads one rank's share of a checkpoint.

    Args:
        rank_info: The rank whose file it reads. None: the rank in
            ``torch.distributed``, looked up at each load.
        limits: The largest sizes that it accepts. By default the memory is the limit.
        allow_pickle: Accept leaves that were saved as pickles, which run code.
        ports: Returns the port of a device; tests pass a fake one.

    Attributes:
        loads: The loads that have ended.
    """

    ports: PortFor = staticmethod(port_for)
    loads = LoadStatistics()

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
        self._counting = threading.Lock()
        self.ports = ports

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
        full: bool = False,
        rank_values: RankValues = "error",
        **own: Never,
    ) -> tuple[Any, list[str]]:
        """Return the state dict, and the requested keys that the checkpoint lacks.

        Args:
            path: One of: a checkpoint's directory, or its address in an object store,
                such as ``s3://bucket/run/step-100``; a safetensors file of any tool, or
                a directory of such files; a file of ``torch.save``; a directory of
                ``torch.distributed.checkpoint`` or of torch's experimental
                checkpointer; the URL of a peer, such as
                ``http://host:port/checkpoint/100``, or its ``metadata()``.
            state_dict: Another name of ``into``.
            into: A template; only its keys are read. Its tensors are filled in place.
                Its dicts and lists get the other values after everything is read. The
                template is returned (a new tuple for a tuple). None as a value accepts
                any value.
            map_location: The device of tensors that have no place in the template.
                A tensor that is also a part of a registered leaf stays on the CPU.
            strict: Raise if a key of the template, or a path of ``select``, is missing,
                before a tensor is read; or if a container is empty in the template and
                full in the checkpoint. Otherwise a warning names them, and the
                container stays empty. Other keys that only the checkpoint has are left
                out silently.
            select: The dotted paths to read, each with everything below it; or a
                function that is called with each path and returns a bool.
            verify: ``full``: compare the digest of every chunk that is read. ``none``:
                compare no digest.
            mmap: Return tensors over a private mapping of the file. The file is read
                when they are used, and must not be truncated meanwhile.
            on_bytes: Called from any thread with the number of bytes that were read.
                These are whole chunks. If another number of ranks loads, values that
                must agree may be read once to be compared, and once to be loaded.
                An exception in it ends the load. With a peer, 0 means that the peer is
                silent, and a negative number that a chunk was wrong.
            rank: Read the file of this rank alone. A distributed tensor becomes the
                local tensor that the rank had, or a list of them, unless the template
                has one on the same mesh.
            full: Load full tensors where the template has no place for distributed
                ones, although this process has a process group. Without a group, this
                is the default.
            rank_values: What to do with a value, or a tensor that is not distributed,
                if another number of ranks loads the checkpoint and the ranks saved
                different ones, such as the states of random number generators.
                ``error``: raise `RankValuesError`. ``keep``: the template keeps its
                own. A number: take the value of that rank. If as many ranks load as
                saved, each takes its own. A value that only another rank's file has is
                taken from there, if the template or ``select`` asks for it.
            own: Refused here. A subclass may take more keywords, and may pass all of
                them on.

        Raises:
            CheckpointNotFoundError: there is no complete checkpoint at ``path``.
            WorldSizeMismatchError: more ranks wrote it, as files of torch, which cannot
                be put together.
            RankValuesError: another number of ranks loads it, and the ranks saved
                different values. The template is unchanged.
            DeviceMeshError: the template has no place for a distributed tensor, and
                this process has no equal mesh; see ``full``.
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
        rank, rank_values = _choices(rank, rank_values, full=full)
        info = self._ranks.info()
        reading = Reading(
            rank=info.global_rank if rank is None else rank,
            world_size=info.global_world_size if rank is None else None,
            rank_values=rank_values,
            limits=self._limits,
            allow_pickle=self._allow_pickle,
            verify=check_verify(verify),
            mmap=mmap,
            on_bytes=on_bytes,
        )
        device = device_of(map_location)
        if is_url(path):
            if full or rank_values != "error":
                raise ValueError(
                    "full= and rank_values= are for files: a peer sends what one rank "
                    "has; leave them out, or load the directory of all ranks"
                )
            from aiockpt.checkpointers.peer import load_from_peer
            from aiockpt.transfer.options import ReceiveOptions

            began = time.monotonic()
            options = ReceiveOptions(
                limits=self._limits,
                allow_pickle=self._allow_pickle,
                into=state_dict,
                direct=True,
                select=select,
                keys=state_dict is not None,
                strict=strict,
                device=device,
                ports=self.ports,
                marks=Marks.of(self.ports),
            )
            received = load_from_peer(os.fspath(path), options, on_bytes)
            name, _, _ = os.fspath(path).partition("#")  # without the token of a URL
            self._tell(_event_of(name, began))
            return received.state_dict, _reported(received.missing, name)
        template, began = None, time.monotonic()
        if state_dict is not None:
            template = Template(state_dict, limits=self._limits)
        with (
            _noting(template) as modified,
            switching_often(),
            open_sources(path, reading) as found,
        ):
            policy = Policy(
                own=found.own,
                is_foreign=found.is_foreign,
                rank_values=rank_values,
                distributed=_kept(rank, full=full),
                prefer=info.global_rank,
                select=cache(select) if callable(select) else select,
                name=os.fspath(path),
            )
            matched = partial(
                Matching,
                rule=LOAD if strict else LAX,
                limits=self._limits,
                allow_pickle=self._allow_pickle,
                select=policy.select,
                template=template,
                device=device,
                name=policy.name,
            )
            first, is_alone = found.sources[0], len(found.sources) == 1
            everything = template is None and select is None and device is None
            if everything and is_alone and isinstance(first, LoadedSource):
                self._tell(_event_of(policy.name, began))
                return first.values, []
            sources, part = _fitted(found, template, policy, matched, reading)
            if everything and len(sources) == 1:
                state = _whole(sources[0], part, reading)
            else:
                state = _part(sources, part, reading, self.ports, modified)
            self._tell(_event_of(policy.name, began, sources))
            return state, _reported(part.missing, policy.name)

    def _tell(self, event: TransferEvent) -> None:
        """Count a load, and emit its event."""
        with self._counting:
            self.loads = self.loads.after(event)
        emit(event)


@contextmanager
def _noting(template: Template | None) -> Iterator[list[bool]]:
    """Note in an error whether the template was modified.

    The block appends to the list before it modifies the template.
    """
    modified: list[bool] = []
    try:
        yield modified
    except AiockptError as error:
        if template is not None:
            done = "was modified" if modified else "was not modified"
            error.add_note(f"the template {done}")
        raise


def options_of(**options: object) -> dict[str, Any]:
    """Return the options that are not the defaults, of which an own reader may know."""
    defaults: Any = CheckpointReader.read.__kwdefaults__
    return {name: at for name, at in options.items() if at != defaults[name]}


def own_read(reader: CheckpointReader) -> list[Callable[..., object]]:
    """Return the reader's ``read`` if it is the user's own; it gets more keywords."""
    is_ours = getattr(type(reader), "read", None) is CheckpointReader.read
    return [] if is_ours else [reader.read]


def _event_of(
    name: str, began: float, sources: Sequence[LoadSource] = ()
) -> TransferEvent:
    """Return the event of a load."""
    files = [each for each in sources if isinstance(each, FileSource)]
    return TransferEvent(
        stop="load",
        nbytes=sum(each.bytes_read for each in files),
        needed=sum(each.bytes_needed for each in files),
        files=sum(bool(each.bytes_read) for each in files),
        ranges=sum(each.ranges_read for each in files),
        seconds=time.monotonic() - began,
        detail=name,
        level=logging.INFO,
    )


def loads_of(reader: object) -> LoadStatistics:
    """Return the loads of a reader; a user's own may count none."""
    found = getattr(reader, "loads", None)
    return found if isinstance(found, LoadStatistics) else LoadStatistics()


def tell_if_own(reader: object, path: StrPath, began: float) -> None:
    """Emit the event of a load by a reader of the user's own; ours tells it itself."""
    if not isinstance(reader, CheckpointReader):
        name, _, _ = os.fspath(path).partition("#")  # without the token of a URL
        emit(_event_of(name, began))


def _choices(
    rank: int | None, rank_values: RankValues, *, full: bool
) -> tuple[int | None, RankValues]:
    """Return the options of a load about ranks.

    Raises:
        TypeError, ValueError: one has no such value, or two contradict each other.
    """
    if rank is not None:
        rank = whole_number(rank, "rank")
        if full:
            raise ValueError("rank= reads one rank's part: leave it out, or full=True")
        if rank_values != "error":
            raise ValueError("rank= reads one rank's values: leave out rank_values=")
    return rank, check_rank_values(rank_values)


def _kept(rank: int | None, *, full: bool) -> Literal["full", "local", "mesh"]:
    """Return what a distributed tensor becomes that the template lacks."""
    if rank is not None:
        return "local"
    return "full" if full or not is_initialized() else "mesh"


def _fitted(
    found: Found,
    template: Template | None,
    policy: Policy,
    matched: Callable[..., Matching],
    how: Reading,
) -> tuple[Sequence[LoadSource], Matching]:
    """Return the sources that are read, and what is taken of them.

    Where as many ranks load as saved, this rank's file alone is tried first. On another
    mesh, the files of all ranks are united.
    """
    if len(found.sources) == 1:
        (source,) = found.sources
        has_mesh = _has_mesh(source)
        may_unite = found.rest is not None or found.is_foreign or has_mesh
        may_unite = may_unite or bool(template and template.wanted.wholes)
        if not has_mesh or policy.distributed == "mesh":
            try:
                part = matched([source.segment])
                if not (part.missing and (found.rest or found.is_foreign)):
                    return found.sources, part
            except (TemplateMismatchError, MissingKeysError, DeviceMeshError):
                if not may_unite:
                    raise
    sources = found.every()
    wanted = None if template is None else template.wanted
    first, early = _first_union(sources, wanted, policy, how), None
    if first.claims:  # their bytes are read; a key that is missing is found before
        try:
            early = _matched(first, sources, policy, matched, how)
        except MissingKeysError:
            raise
        except StateDictError:
            pass  # a value that differs by rank may stay as it is
    united, are_equal = _united(first, sources, wanted, policy, how)
    if early is not None and are_equal:
        return early
    return _matched(united, sources, policy, matched, how)


def _matched(
    united: United,
    sources: Sequence[LoadSource],
    policy: Policy,
    matched: Callable[..., Matching],
    how: Reading,
) -> tuple[Sequence[LoadSource], Matching]:
    """Return the sources with the one of new pieces, and what is taken of them."""
    if united.pieces:
        pairs = zip(united.paths, united.pieces, strict=True)
        made = [path for path, piece in pairs if piece.start < piece.stop]
        if how.mmap and made:
            raise StateDictError(
                f"{made[0]} is put together from parts of files, which mmap=True "
                "cannot do: leave it out"
            )
        sources = [*sources, BoxSource(united, sources, limits=how.limits)]
    segments = [source.segment for source in sources]
    try:
        return sources, matched(segments, tree=united.tree)
    except DeviceMeshError as error:
        if policy.distributed == "mesh":  # else the tensor is a part of another value
            error.detail += "; or pass full=True to load full tensors"
        raise


def _has_mesh(source: LoadSource) -> bool:
    """Say whether a source has parts of distributed tensors."""
    return has_distributed(source.segment.manifest.tree)


def unite_all(
    found: Found, policy: Policy, how: Reading
) -> tuple[Sequence[LoadSource], United]:
    """Return the sources of all ranks, and their trees as one, without a template.

    Raises:
        RankValuesError: the ranks saved different values.
        StorageError, IntegrityError: a file cannot be read, or is damaged.
    """
    sources = found.every()
    first = _first_union(sources, None, policy, how)
    united, _ = _united(first, sources, None, policy, how)
    return sources, united


def _first_union(
    sources: Sequence[LoadSource], wanted: Wanted | None, policy: Policy, how: Reading
) -> United:
    """Unite the trees of the sources, as if the values that may differ were equal."""
    manifests = [source.segment.manifest for source in sources]
    return unite(manifests, wanted, policy, limits=how.limits, known={})


def _united(
    united: United,
    sources: Sequence[LoadSource],
    wanted: Wanted | None,
    policy: Policy,
    how: Reading,
) -> tuple[United, bool]:
    """Compare the values that must agree, and unite the trees by what was found.

    Also return whether all of them are equal.
    """
    manifests = [source.segment.manifest for source in sources]
    known: dict[Claim, bool] = {}
    while not united.claims.keys() <= known.keys():
        known |= compare(
            united,
            sources,
            known,
            limits=how.limits,
            verify=how.verify,
            on_bytes=how.on_bytes,
        )
        united = unite(manifests, wanted, policy, limits=how.limits, known=known)
    return united, all(known.values())


def _whole(source: LoadSource, part: Matching, how: Reading) -> object:
    """Read everything into new memory."""
    segment = source.segment
    size = segment.manifest.segment_bytes
    ranges = [(0, size)] if size else []
    if not segment.is_there:
        check_memory(ranges, how.limits)
    read_segment(source, ranges, verify=how.verify, on_bytes=how.on_bytes)
    return part.decoded()


def _part(
    sources: Sequence[LoadSource],
    part: Matching,
    how: Reading,
    ports: PortFor,
    modified: list[bool],
) -> object:
    """Read the requested values into the template, or into new memory."""
    for source, ranges in zip(sources, part.value_ranges(), strict=True):
        if ranges and source.segment.tensors is None:
            read_segment(source, ranges, verify=how.verify, on_bytes=how.on_bytes)
    pairs = [
        (source, plan)
        for source, plan in zip(sources, part.plans(), strict=True)
        if plan.ranges and source.segment.tensors is None
    ]
    read = (plan.ranges for each, plan in pairs if not each.segment.is_there)
    check_memory(chain.from_iterable(read), how.limits)
    if changed := part.changed():
        modified.append(True)
        mark_changed(changed)
    for source, plan in pairs:
        planned = PlannedPlacement(source.segment, plan, ports)
        if source.segment.is_there:
            read_segment(source, plan.ranges, verify=how.verify, on_bytes=how.on_bytes)
            part.check()
            planned.load()
        else:
            source.read(planned, verify=how.verify, on_bytes=how.on_bytes)
    part.finish()
    return part.assemble()


def _reported(missing: Sequence[str], name: str) -> list[str]:
    if missing:
        shown = ", ".join(missing[:_SHOWN_KEYS])
        more = (
            f" and {len(missing) - _SHOWN_KEYS} more"
            if len(missing) > _SHOWN_KEYS
            else ""
        )
        logger.warning("%s is missing keys: %s%s", name, shown, more)
    return [*missing]


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
    """Ends the thread of a cancelled load."""


async def load_in_thread(
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
    ports = getattr(reader, "ports", port_for)  # a reader of one's own has none
    await completed(*Marks.of_caller(ports).events.values())
    called_off, began = threading.Event(), time.monotonic()

    def report(nbytes: int) -> None:
        if called_off.is_set():
            raise _CalledOffError
        if on_bytes is not None:
            on_bytes(nbytes)

    options |= {"strict": strict, "on_bytes": report}
    read = partial(reader.read, path, state_dict, **options)
    reading = asyncio.get_running_loop().create_task(bridge.run(read))
    try:
        await asyncio.wait({reading})
    except asyncio.CancelledError:
        called_off.set()
        await _outlast(reading)
        raise
    loaded, missing = reading.result()
    tell_if_own(reader, path, began)
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
