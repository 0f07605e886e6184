"""Checkpoints in the memory of a device, for a group that moves it (NCCL).

Bytes on the device are never copied to the host, at either end. They are sent from the
state dict's own memory (small tensors together), received into device memory, and
digested on the device. Bytes in host memory are copied to the device, message by
message.

All work is enqueued on side streams, after the work that the caller's stream had at the
time of the call. A wait for an operation of the group delays a stream, not a thread.
Threads poll an event after it until the deadline. (``Work.wait`` with a timeout would
block, and would abort the communicator when the timeout passes.) So messages have their
own stream, and digests and loads begin only after the messages have arrived.

A chunk's digest on a device: the chunk is zero-padded to rows of 256 KiB. Each row, as
signed 32-bit little-endian words ``w``, is folded with two rows of 64-bit keys ``k`` to
``sum(w[i] * k[i])`` modulo 2**64. The digest is the XXH3 hash of the chunk's folded
rows, of 16 bytes each; `aiockpt.memory.multilinear` folds them. Multilinear hashing is
universal: two rows that differ have the same sum for one row of keys in 2**33 at most
(Lemire and Kaser, *Strongly universal string hashing is fast*, 2014), and there are
two. The arithmetic is exact and the sum does not depend on the order, so every device
gets the same digest. Like XXH3, it detects faults and does not prevent forgery.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from mmap import mmap
from typing import Final, TypeAlias

import torch

from aiockpt.errors import LimitExceededError, ProcessGroupError, RemoteProtocolError
from aiockpt.format.chunks import (
    DEVICE_ALGORITHM,
    ChunkGrid,
    check_chunk_bytes,
    digest,
)
from aiockpt.format.entries import Entries
from aiockpt.format.header import LENGTH_BYTES, decode_header, header_length
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import ForeignHeader, Manifest
from aiockpt.memory.arena import Arena, Memory
from aiockpt.memory.copies import (
    Backing,
    Backings,
    CopyPlan,
    once,
    part_pairs,
    raw_bytes,
)
from aiockpt.memory.device import (
    Event,
    Fences,
    Marks,
    Pair,
    Port,
    PortFor,
    checked,
    completed,
    port_for,
)
from aiockpt.memory.multilinear import fold, keys
from aiockpt.pg.messages import (
    Digests,
    GroupLike,
    HostIncoming,
    Incoming,
    Message,
    OnChunk,
    Parcel,
    Pending,
    RankChannel,
    gathered,
    packed,
)
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.tasks import run_all
from aiockpt.state.flatten import describe
from aiockpt.state.load_plan import Matching
from aiockpt.transfer.remarks import Remarks
from aiockpt.transfer.stager import failing_stage, manifest_of

_CHUNKS_AT_ONCE: Final = 2
_MIN_PAUSE_S: Final = 50e-6
_MAX_PAUSE_S: Final = 1e-3


# -------------------------------------------------------------------------- digests


class _DeviceDigests:
    """Computes a segment's digests on the device, after all of it has moved.

    Only the folded rows of a chunk are copied to the host. The digests are computed
    once. A sender computes them before it sends, so the receiver notices any later
    change of the state.
    """

    def __init__(
        self,
        device: Device,
        bridge: Bridge,
        segment: MixedSegment,
        grid: ChunkGrid,
        on_chunk: OnChunk | None = None,
    ) -> None:
        self._device, self._bridge = device, bridge
        self._segment, self._grid = segment, grid
        self._on_chunk = on_chunk
        self._digests: list[str] = []

    def add(self, start: int, data: torch.Tensor) -> None:
        """Do nothing, because the device digests much faster than bytes arrive."""

    async def digits(self) -> bytearray:
        """Return all digests, joined."""
        if not self._digests:
            found, chunks = [""] * len(self._grid), iter(range(len(self._grid)))

            async def worker() -> None:
                for chunk in chunks:
                    start, stop = self._grid.range(chunk)
                    found[chunk] = await self._digest(start, stop)
                    if self._on_chunk is not None:
                        self._on_chunk(stop - start)

            await run_all([worker] * _CHUNKS_AT_ONCE)
            self._digests = found
        return bytearray("".join(self._digests).encode())

    async def _digest(self, start: int, stop: int) -> str:
        fold = partial(self._device.fold, self._segment, start, stop)
        rows, arrived, event = await self._bridge.run(fold)
        await completed(event)
        del rows  # device memory, needed until the copy has ended
        return digest([ctypes.string_at(arrived.data_ptr(), arrived.nbytes)])


# --------------------------------------------------- the device and a segment on it


class Device:
    """A device with two ports, and so two side streams.

    Messages wait for a peer on the stream of ``line``, which nothing else must use.
    """

    def __init__(self, device: torch.device, port: Port, line: Port) -> None:
        self.device = device
        self.port = port
        self.line = line
        self._keys: torch.Tensor | None = None

    def event(self, made: Fences) -> Event:
        """Return the caller's mark of this device; without one, mark it here.

        Raises:
            Exception: the device has failed, with this error.
        """
        found = made.get(self.device)
        return self.port.fence() if found is None else checked(found)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is on the device."""
        return tensor.device == self.device

    def owned(self, backings: Backings) -> list[int]:
        """Return the entries whose tensors are on the device."""
        return [e for e, tensor in enumerate(backings.tensors) if self.owns(tensor)]

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory on the device.

        Raises:
            LimitExceededError: the device has too little free memory.
        """
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            what = f"a part of the checkpoint, for which {self.device} has no memory,"
            free, _ = torch.get_device_module(self.device).mem_get_info(self.device)
            raise LimitExceededError(
                what, limit=free, actual=nbytes, detail="free memory on the device"
            ) from error

    def fold(
        self, segment: MixedSegment, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor, Event]:
        """Begin to fold a chunk on the side stream; for a thread.

        Return the rows on the device, the host memory that they are copied to, and the
        event of the copy's end. The rows must live until the event.
        """
        pinned = self.device.type == "cuda"  # a pageable copy would block the thread
        with self.port.aside():
            if self._keys is None:
                self._keys = keys(self.device)
            rows = fold(segment.take(start, stop), self._keys)
            arrived = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=pinned)
            event = self.port.copy([(arrived, rows)], after=self.port.mark())
        return rows, arrived, event

    def homes(self, entries: Entries, numbers: Iterable[int]) -> Homes:
        """Return new memory on the device for the messages of some entries."""
        starts, stops = entries.starts, entries.stops
        homes = {n: self.allocate(stops[n] - starts[n]) for n in numbers}
        # Earlier work of this thread's stream may still use the memory.
        with self.line.aside(self.line.fence()):
            return homes


Homes: TypeAlias = dict[int, torch.Tensor]
"""Device memory by entry number; the other entries are in host memory."""


def in_state(backings: Backings, entries: Entries, own: Iterable[int]) -> Homes:
    """Return the state's memory of the entries that need no element-wise copy."""
    homes: Homes = {}
    for entry in own:
        backing = backings[entry]
        nbytes = entries.stops[entry] - entries.starts[entry]
        if not backing.parts and backing.nbytes == nbytes:
            homes[entry] = _raw(backing)
    return homes


def _raw(backing: Backing) -> torch.Tensor:
    first = backing.address - backing.tensor.untyped_storage().data_ptr()
    return raw_bytes(backing.tensor, first, backing.nbytes)


def pairs(backings: Backings, homes: Homes, numbers: Iterable[int]) -> Iterator[Pair]:
    """Yield pairs of the elements in the homes of entries, and in the state."""
    for number in numbers:
        backing, home = backings[number], homes[number]
        if backing.parts:
            yield from part_pairs(backing.parts, home)
        elif backing.nbytes:
            yield home[: backing.nbytes], _raw(backing)


class MixedSegment:
    """A data segment of which some entries are on a device, and the rest on the host.

    It is the `Incoming` of a channel whose messages are on a device. All of its work
    with device memory is enqueued on the current stream.

    Attributes:
        after: The event that must have completed before anything is received into it.
    """

    def __init__(
        self,
        device: torch.device,
        host: Memory,
        entries: Entries,
        homes: Homes,
        *,
        after: Event | None = None,
    ) -> None:
        self.device, self.after = device, after
        self._host = host
        own = sorted(number for number, home in homes.items() if home.numel())
        self._starts = [entries.starts[number] for number in own]
        self._homes = [homes[number] for number in own]
        self._buffered: dict[int, torch.Tensor] = {}

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return a range in host memory."""
        return self._host.buffers(start, stop)

    def check(self, start: int, stop: int) -> None:
        """Check a range in host memory."""
        self._host.check(start, stop)

    def spans(
        self, start: int, stop: int
    ) -> Iterator[tuple[int, int, torch.Tensor | None]]:
        """Yield the parts of a range; None for a part in host memory."""
        at = max(bisect_right(self._starts, start) - 1, 0)
        while start < stop:
            first = last = stop
            if at < len(self._homes):
                first = min(self._starts[at], stop)
                last = min(first + self._homes[at].numel(), stop)
            if start < first:
                yield start, first, None
            begin = max(start, first)
            if begin < last:
                yield begin, last, self._homes[at][begin - first : last - first]
            start, at = max(start, last), at + 1

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Return a range as bytes on the device: the memory itself, or a copy."""
        found = [
            gathered(self._host, first, last)[0].to(self.device, copy=True)
            if data is None
            else data
            for first, last, data in self.spans(start, stop)
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    def expect(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        """Return the device memory of a range, or a buffer if it is not contiguous.

        Buffers are not counted, because they are few and short.
        """
        _, last, data = next(self.spans(start, stop))
        if data is None or last < stop:
            data = self._buffered[start] = self.buffer(stop - start)
        return data, 0

    def store(self, start: int) -> None:
        """Copy a filled buffer to its final memory."""
        if start not in self._buffered:
            return
        arrived = self._buffered.pop(start)
        homes, sources = [], []
        for first, last, data in self.spans(start, start + arrived.numel()):
            source = arrived[first - start : last - start]
            if data is None:
                incoming = HostIncoming(self._host)
                incoming.expect(first, last)[0].copy_(source)
                incoming.store(first)
            else:
                homes.append(data)
                sources.append(source)
        if homes:
            torch._foreach_copy_(homes, sources)

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return temporary memory for a message."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)


# -------------------------------------------------------------------------- staging


class _DeviceStaging:
    """One staging in progress."""

    def __init__(
        self, state_dict: object, device: Device, *, limits: Limits, allow_pickle: bool
    ) -> None:
        found = describe(state_dict, limits=limits, allow_pickle=allow_pickle)
        self.description, self._device = found, device
        self.own = device.owned(found.backings)
        self.arena = Arena(found.entries.nbytes, staging=True)
        rest = _without(found.backings, self.own)
        self.plan = CopyPlan(rest, found.entries, arena=self.arena, port_for=port_for)

    def begin(self, after: Event, fences: Fences) -> tuple[MixedSegment, list[Event]]:
        """Enqueue all copies; return the segment and the events of their ends."""
        device, backings = self._device, self.description.backings
        entries = self.description.entries
        homes = in_state(backings, entries, self.own)
        rest = [entry for entry in self.own if entry not in homes]
        with device.port.aside(after):
            for entry in rest:
                nbytes = entries.stops[entry] - entries.starts[entry]
                homes[entry] = device.allocate(nbytes).zero_()
            for home, state in pairs(backings, homes, rest):
                to, source = once(home, state)
                to.copy_(source, non_blocking=True)
        events = [device.port.mark(), *self.plan.stage_parts(fences)]
        events += self.plan.stage_device(0, entries.nbytes, fences)
        host = self.plan.in_place()
        return MixedSegment(device.device, host, entries, homes), events

    def abandon(self) -> None:
        """Close the arena after all copies to it have ended."""
        self._device.port.synchronize()
        self.plan.drain()
        self.arena.close()


def _without(backings: Backings, entries: Iterable[int]) -> Backings:
    """Return the backings with zero bytes for those entries."""
    order = array("q", range(len(backings)))
    for entry in entries:
        order[entry] = -1
    return backings.taken(order)


def encode_placement(count: int, own: Iterable[int]) -> bytes:
    """Return one bit for each of ``count`` entries, set if it is on the device."""
    bits = bytearray((count + 7) // 8)
    for entry in own:
        bits[entry // 8] |= 1 << entry % 8
    return bytes(bits)


def decode_placement(data: bytes | bytearray | memoryview, count: int) -> list[int]:
    """Return the numbers of the entries that are on the device.

    Raises:
        RemoteProtocolError: there is not one bit for each entry.
    """
    if len(data) != (count + 7) // 8:
        raise RemoteProtocolError(
            f"the offer's placement of {count} tensors has {len(data)} bytes, not one "
            "bit for each tensor"
        )
    return [entry for entry in range(count) if data[entry // 8] >> entry % 8 & 1]


# ------------------------------------------------------------------------ receiving


class _ReceivedEntries:
    """The entries of a checkpoint that this device receives, as a `DeviceEntries`.

    Args:
        device: The device.
        entries: The entries of the segment.
        homes: The device memory of each of its entries.
        backings: A template's memory, if there is one.
        copied: The entries that are copied from their homes to the template.
    """

    def __init__(
        self,
        device: Device,
        entries: Entries,
        homes: Homes,
        backings: Backings | None = None,
        copied: Sequence[int] = (),
    ) -> None:
        self._device, self._entries, self.homes = device, entries, homes
        self._backings, self._copied = backings, copied

    def joined(self, memory: Memory, marks: Marks) -> Memory:
        device, homes = self._device, self.homes
        after = device.event(marks.events)
        return MixedSegment(device.device, memory, self._entries, homes, after=after)

    def load(self, marks: Marks) -> list[Event]:
        if self._backings is None:
            return []
        found = pairs(self._backings, self.homes, self._copied)
        copies = (once(state, home) for home, state in found)
        after = self._device.event(marks.events)
        return [self._device.port.copy(copies, after=after)]

    def drain(self) -> None:
        self._device.port.synchronize()


# ------------------------------------------------------------------------- messages


class DeviceChannel(RankChannel):
    """A `RankChannel` whose messages are on a device, and on its side stream."""

    tagged = False
    message_bytes = 4 << 20
    sent_ahead = window = 16  # of them, where a message is no tensor's own memory

    def __init__(
        self, group: GroupLike, rank: int, device: Device, *, sending: bool
    ) -> None:
        super().__init__(group, rank, sending=sending)
        self._device = device
        # After a failure nobody waits for these messages, but their memory must stay
        # allocated, because the device may still read it or write to it.
        self._under_way: dict[int, Message] = {}

    def _stream(self, memory: Memory | None = None) -> AbstractContextManager[object]:
        after = None if memory is None else _on_device(memory).after
        return self._device.line.aside(after)

    def _take(self, memory: Memory, start: int, stop: int) -> tuple[torch.Tensor, int]:
        return _on_device(memory).take(start, stop), 0

    def _incoming(self, memory: Memory) -> Incoming:
        return _on_device(memory)

    def _outgoing(self, here: torch.Tensor) -> torch.Tensor:
        return here.to(self._device.device, copy=True)

    def _buffer(self, here: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(here, device=self._device.device)

    def _post_send(self, tensor: torch.Tensor, tag: int = 0) -> Message:
        return self._kept(super()._post_send(tensor, tag))

    def _post_receive(self, tensor: torch.Tensor, tag: int = 0) -> Message:
        return self._kept(super()._post_receive(tensor, tag))

    def _kept(self, message: Message) -> Message:
        self._under_way[id(message)] = message
        return message

    def _wait(self, message: Message, until: float) -> None:
        super()._wait(message, until)
        del self._under_way[id(message)]

    def _ended(self, work: Pending, until: float) -> bool:
        # With a timeout NCCL's wait blocks, and aborts the communicator at its end.
        # Without one only the side stream waits.
        ended = work.wait()
        self._finish(until)
        return ended

    def _finish(self, until: float) -> None:
        event = self._device.line.mark()
        pause = _MIN_PAUSE_S
        while not event.query():
            self._check()
            if time.monotonic() >= until:
                raise ProcessGroupError("the wait for it timed out", rank=self.rank)
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_S)


def _on_device(memory: Memory) -> MixedSegment:
    if not isinstance(memory, MixedSegment):
        raise TypeError(f"{memory} is not on the device")
    return memory


# ----------------------------------------------------------------------- the medium


class DeviceMedium:
    """The memory of a device, whose communicator has an order instead of tags.

    So both ends hold one conversation at a time.
    """

    message_bytes = DeviceChannel.message_bytes

    def __init__(
        self,
        device: Device,
        bridge: Bridge,
        *,
        chunk_bytes: int,
        allow_pickle: bool,
        limits: Limits,
    ) -> None:
        check_chunk_bytes(chunk_bytes)
        self._device, self._bridge = device, bridge
        self._chunk_bytes = chunk_bytes
        self._allow_pickle, self._limits = allow_pickle, limits
        self._remarks = Remarks(Limits(), limits)

    def mark(self, ports: PortFor) -> Marks:
        """Mark the device work of the calling thread."""
        own = self._device
        return Marks.of(lambda each: own.port if each == own.device else ports(each))

    async def stage(self, state_dict: object, *, step: int, marks: Marks) -> Parcel:
        """Return a snapshot, whose bytes on the device are the state dict's own.

        Only two kinds of tensors are copied: strided ones with gaps, on the device, and
        tensors of other devices, to the host.

        Raises:
            UnsupportedLeafError: a leaf cannot travel; nothing was copied.
            StagingError: a copy failed, or the device has no memory for it.
        """
        describe = partial(
            _DeviceStaging,
            state_dict,
            self._device,
            limits=self._limits,
            allow_pickle=self._allow_pickle,
        )
        run, marked = self._bridge.run, marks.events
        staging = await run(describe)
        try:
            with failing_stage(step):
                after = self._device.event(marked)
                fences = staging.plan.fences(marked)
                await completed(after)  # so that no thread waits for earlier work
                memory, events = await run(staging.begin, after, fences)
                await completed(*events)
                manifest = await run(self._manifest, staging, step)
                offer, messages = await run(packed, manifest, self.message_bytes)
                offer += encode_placement(len(manifest.entries), staging.own)
                digests = self.digests(memory, manifest.grid, None)
                await digests.digits()
        except BaseException:
            self._bridge.post(staging.abandon)
            raise

        release = partial(self._bridge.post, staging.arena.close)
        return Parcel(manifest, offer, memory, messages, digests, release)

    def close(self) -> None:
        """Do nothing: no memory is kept."""

    def channel(self, group: GroupLike, rank: int, *, sending: bool) -> RankChannel:
        """Return a channel whose messages are on the device."""
        return DeviceChannel(group, rank, self._device, sending=sending)

    def read(
        self, offer: mmap, limits: Limits
    ) -> tuple[Manifest | ForeignHeader, Sequence[int]]:
        """Return the manifest, and the entries on the sender's device."""
        length = header_length(offer[:LENGTH_BYTES], limits=limits)
        header, placement = memoryview(offer)[:length], memoryview(offer)[length:]
        found = decode_header(
            header, limits=limits, algorithms=[DEVICE_ALGORITHM], ours=True
        )
        return found, decode_placement(placement, len(found.entries))

    def device_entries(
        self,
        manifest: Manifest,
        placement: Sequence[int],
        rule: Matching,
        *,
        direct: bool,
    ) -> _ReceivedEntries:
        """Return the entries on the sender's device, which go to this one.

        Of a template, these are the entries of its tensors that are on this device.
        """
        device, entries, backings = self._device, manifest.entries, rule.backings
        if backings is None:
            return _ReceivedEntries(device, entries, device.homes(entries, placement))
        own = device.owned(backings)
        there = in_state(backings, entries, own) if direct else {}
        copied = [entry for entry in own if entry not in there]
        # Tensors that the template lacks get new memory, on a device like the sender's.
        new = [entry for entry in placement if not backings.sizes[entry]]
        homes = there | device.homes(entries, {*copied, *new})
        rule.backings = _without(backings, own)
        return _ReceivedEntries(device, entries, homes, backings, copied)

    def digests(
        self, memory: Memory, grid: ChunkGrid, on_chunk: OnChunk | None
    ) -> Digests:
        """Return an object that computes the digests where the bytes are."""
        segment = _on_device(memory)
        return _DeviceDigests(self._device, self._bridge, segment, grid, on_chunk)

    def _manifest(self, staging: _DeviceStaging, step: int) -> Manifest:
        found = staging.description
        grid = ChunkGrid(found.entries.nbytes, self._chunk_bytes, DEVICE_ALGORITHM)
        digests = [grid.unsealed] * len(grid)  # they are sent last
        manifest = manifest_of(found, step, grid, digests)
        self._remarks.on(manifest, found.strangers, step=step)
        return manifest
