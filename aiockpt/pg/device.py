"""Checkpoints in the memory of a device, for a group that moves it (NCCL).

Bytes that are on the device never come to the host, at either end. They are sent from
the state dict's own memory, small ones together; received into device memory; and
digested where they are. What is in host memory crosses the device message by message.

All work is enqueued on side streams, behind what the caller's stream had been given
when it called. A wait for a group's operation holds up a stream, not a thread: threads
poll an event behind it until the deadline. (``Work.wait`` with a timeout would block,
and abort the communicator at its end.) So messages have a stream of their own, and
what is digested or loaded has arrived before.

A chunk's digest on a device: the chunk is zero-padded to rows of 256 KiB. Each row, as
signed 32-bit little-endian words ``w``, is folded with two rows of 64-bit keys ``k`` to
``sum(w[i] * k[i])`` modulo 2**64. The digest is the XXH3 hash of the chunk's folded
rows, of 16 bytes each. Multilinear hashing is universal: two rows that differ have the
same sum for one row of keys in 2**33 at most (Lemire and Kaser, *Strongly universal
string hashing is fast*, 2014), and there are two. The arithmetic is exact and the sum
has no order, so every device finds the same. Like XXH3 it detects faults; it does not
prevent forgery.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from hashlib import shake_128
from mmap import mmap
from typing import Final, NamedTuple, TypeAlias

import torch

from aiockpt.errors import (
    AiockptError,
    LimitExceededError,
    ProcessGroupError,
    RemoteProtocolError,
    StagingError,
)
from aiockpt.format.chunks import (
    DEVICE_ALGORITHM,
    ChunkGrid,
    check_chunk_bytes,
    digest,
)
from aiockpt.format.header import (
    LENGTH_BYTES,
    build_manifest,
    decode_header,
    header_length,
)
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import Arena, Memory
from aiockpt.memory.copies import (
    Backing,
    Backings,
    CopyPlan,
    Fences,
    once,
    part_pairs,
    raw_bytes,
)
from aiockpt.memory.device import Event, Pair, Port, completed, port_for
from aiockpt.pg.medium import Offered, Parcel, copy_header
from aiockpt.pg.messages import (
    LARGE_BYTES,
    TOGETHER_BYTES,
    Channel,
    Digests,
    Group,
    HostIncoming,
    HostOutgoing,
    Incoming,
    Message,
    OnChunk,
    Outgoing,
    Pending,
    messages_of,
)
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.tasks import run_all
from aiockpt.state.flatten import Description, describe
from aiockpt.state.template import Template
from aiockpt.transfer.destination import (
    Destination,
    Terms,
    into_template,
    new_tensors,
)

__all__ = [
    "ROW_BYTES",
    "Device",
    "DeviceChannel",
    "DeviceMedium",
    "Segment",
    "decode_placement",
    "encode_placement",
    "fold",
    "keys",
]

# What a tensor of any dtype may start at; the segment itself starts at such.
_ALIGNMENT: Final = 64

_WORDS: Final = 1 << 16
ROW_BYTES: Final = 4 * _WORDS
_AT_ONCE: Final = 16 * ROW_BYTES
"""Bytes whose words are widened at once, which takes five times as much memory."""

_CHUNKS_AT_ONCE: Final = 2
_FIRST_POLL: Final = 50e-6
_LAST_POLL: Final = 1e-3


# -------------------------------------------------------------------------- digests


@dataclass(frozen=True, slots=True)
class _Folded:
    """The rows of a chunk on their way to the host, where they are once ``event`` is.

    ``rows`` are those on the device: they must live until then.
    """

    rows: torch.Tensor
    arrived: torch.Tensor
    event: Event

    def digest(self) -> str:
        """Return the chunk's digest."""
        return digest([ctypes.string_at(self.arrived.data_ptr(), self.arrived.nbytes)])


def keys(device: torch.device) -> torch.Tensor:
    """Return the keys, ``[2, words]``; the same everywhere."""
    stream = shake_128(b"aiockpt").digest(2 * 8 * _WORDS)
    return torch.frombuffer(bytearray(stream), dtype=torch.int64).view(2, -1).to(device)


def fold(data: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the folded rows of bytes, ``[rows, 2]``, on their device."""
    folded = []
    for start in range(0, data.numel(), _AT_ONCE):
        words = _rows(data[start : start + _AT_ONCE]).to(torch.int64)
        folded.append(torch.stack([(words * key).sum(1) for key in keys], 1))
    return torch.cat(folded)


def _rows(data: torch.Tensor) -> torch.Tensor:
    size = data.numel()
    if size % ROW_BYTES or data.storage_offset() % 4 or data.data_ptr() % 4:
        padded = data.new_zeros(size + -size % ROW_BYTES)
        padded[:size] = data
        data = padded
    return data.view(torch.int32).view(-1, _WORDS)


class _KnownDigests:
    """The digests that a sender has computed before it sends."""

    def __init__(self, digests: Sequence[str]) -> None:
        self._digests = digests

    def add(self, start: int, data: torch.Tensor) -> None:
        """Do nothing."""

    async def digits(self) -> bytearray:
        """Return all digests, joined."""
        return bytearray("".join(self._digests).encode())


class _DeviceDigests:
    """Computes a receiver's digests when all of the segment is on the device."""

    def __init__(
        self,
        device: Device,
        bridge: Bridge,
        memory: Segment,
        grid: ChunkGrid,
        on_chunk: OnChunk | None,
    ) -> None:
        self._device, self._bridge = device, bridge
        self._memory, self._grid = memory, grid
        self._on_chunk = on_chunk

    def add(self, start: int, data: torch.Tensor) -> None:
        """Do nothing: the device is faster by far than what brings the bytes."""

    async def digits(self) -> bytearray:
        """Return all digests, joined."""
        found = bytearray()
        for chunk in range(len(self._grid)):
            start, stop = self._grid.range(chunk)
            digest = self._device.digest(self._memory, start, stop, self._bridge)
            found += (await digest).encode()
            if self._on_chunk is not None:
                self._on_chunk(stop - start)
        return found


# --------------------------------------------------- the device and a segment on it


class Device:
    """A device, and what is done on it.

    It has two ports, that is two side streams: messages wait for a peer on that of
    ``line``, and nothing else must wait with them.
    """

    def __init__(self, device: torch.device, port: Port, line: Port) -> None:
        self.device = device
        self.port = port
        self.line = line
        self._keys: torch.Tensor | None = None

    def __repr__(self) -> str:
        return f"<Device {self.device}>"

    def owns(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is on the device."""
        return tensor.device == self.device

    def owned(self, backings: Backings) -> list[int]:
        """Return the entries whose tensors are on the device."""
        return [e for e, tensor in enumerate(backings.tensors) if self.owns(tensor)]

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory on the device.

        Raises:
            LimitExceededError: there is none left.
        """
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            what = f"a part of the checkpoint, for which {self.device} has no memory,"
            free, _ = torch.get_device_module(self.device).mem_get_info(self.device)
            raise LimitExceededError(what, limit=free, actual=nbytes) from error

    async def digest(
        self, segment: Segment, start: int, stop: int, bridge: Bridge
    ) -> str:
        """Return the digest of a chunk; no byte of it comes to the host."""
        folded = await bridge.run(self._fold, segment, start, stop)
        await completed(folded.event)
        return folded.digest()

    def _fold(self, segment: Segment, start: int, stop: int) -> _Folded:
        pinned = self.device.type == "cuda"  # else the copy would block the thread
        with self.port.aside():
            if self._keys is None:
                self._keys = keys(self.device)
            rows = fold(segment.take(start, stop), self._keys)
            arrived = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=pinned)
            event = self.port.copy([(arrived, rows)], after=self.port.mark())
        return _Folded(rows, arrived, event)


class Home(NamedTuple):
    """Where an entry starts on the device: a byte of a tensor's storage."""

    tensor: torch.Tensor
    first: int

    def bytes(self, nbytes: int) -> torch.Tensor:
        """Return that many of its bytes."""
        return raw_bytes(self.tensor, self.first, nbytes)


Homes: TypeAlias = dict[int, Home]
"""By the number of the entry; entries that are not here are in host memory."""

Bounds: TypeAlias = "tuple[array[int], array[int]]"
"""Where entries start and stop in the segment."""


def in_state(backings: Backings, bounds: Bounds, own: Iterable[int]) -> Homes:
    """Return the homes of those entries that the state has byte by byte."""
    homes: Homes = {}
    for entry in own:
        backing = backings[entry]
        nbytes = bounds[1][entry] - bounds[0][entry]
        if not backing.parts and backing.nbytes == nbytes:
            homes[entry] = _home(backing)
    return homes


def in_blocks(
    bounds: Bounds,
    entries: Iterable[int],
    *,
    apart: Set[int],
    allocate: Callable[[int], torch.Tensor],
) -> Homes:
    """Allocate homes; an entry that is ``apart`` shares its storage with no other."""
    homes: Homes = {}
    for group in _together(bounds, entries, apart):
        start, stop = bounds[0][group[0]], bounds[1][group[-1]]
        lead = start % _ALIGNMENT if len(group) > 1 else 0
        block = allocate(lead + stop - start)
        for entry in group:
            homes[entry] = Home(block, lead + bounds[0][entry] - start)
    return homes


def _together(
    bounds: Bounds, entries: Iterable[int], apart: Set[int]
) -> Iterator[list[int]]:
    """Yield neighbours that share a block."""
    group: list[int] = []
    for entry in sorted(entries):
        start, stop = bounds[0][entry], bounds[1][entry]
        alone = entry in apart or stop - start >= LARGE_BYTES
        if group and (
            alone
            or bounds[1][group[-1]] != start
            or stop - bounds[0][group[0]] > TOGETHER_BYTES
        ):
            yield group
            group = []
        group.append(entry)
        if alone:
            yield group
            group = []
    if group:
        yield group


def _home(backing: Backing) -> Home:
    storage = backing.tensor.untyped_storage()
    return Home(backing.tensor, backing.address - storage.data_ptr())


def pairs(
    backings: Backings, bounds: Bounds, homes: Homes, entries: Iterable[int]
) -> Iterator[Pair]:
    """Yield what entries have in their homes, and where the state has it."""
    for entry in entries:
        backing = backings[entry]
        place = homes[entry].bytes(bounds[1][entry] - bounds[0][entry])
        if backing.parts:
            yield from part_pairs(backing.parts, place)
        elif backing.nbytes:
            yield place[: backing.nbytes], _home(backing).bytes(backing.nbytes)


class Segment:
    """A data segment, in spans that each lie in one run of device memory, or host's.

    It is the `Outgoing` and the `Incoming` of a channel whose messages are on a device.
    What it does with the device's memory is enqueued on the current stream.

    Attributes:
        after: What must have run before anything is received into it.
    """

    crowded = False

    def __init__(
        self,
        device: torch.device,
        host: Memory,
        bounds: Bounds,
        homes: Mapping[int, Home],
    ) -> None:
        self.device = device
        self.after: Event | None = None
        self._host = host
        self._starts, self._stops = array("q"), array("q")
        self._homes: list[Home | None] = []
        self._buffered: dict[int, tuple[int, torch.Tensor]] = {}
        for entry, (start, stop) in enumerate(zip(*bounds, strict=True)):
            if start < stop:
                self._append(start, stop, homes.get(entry))

    def _append(self, start: int, stop: int, home: Home | None) -> None:
        if self._homes and self._continues(start, home):
            self._stops[-1] = stop
            return
        self._starts.append(start)
        self._stops.append(stop)
        self._homes.append(home)

    def _continues(self, start: int, home: Home | None) -> bool:
        last = self._homes[-1]
        if home is None or last is None:
            return home is last
        run_on = last.first + start - self._starts[-1] == home.first
        return run_on and last.tensor is home.tensor

    def __repr__(self) -> str:
        return f"<Segment on {self.device} spans={len(self._homes)}>"

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return a range that lies in host memory."""
        return self._host.buffers(start, stop)

    def spans(
        self, start: int, stop: int
    ) -> Iterator[tuple[int, int, torch.Tensor | None]]:
        """Yield the parts of a range; None for the bytes of one in host memory."""
        span = bisect_right(self._starts, start) - 1
        while start < stop:
            last = min(self._stops[span], stop)
            home = self._homes[span]
            if home is None:
                yield start, last, None
            else:
                first = home.first + start - self._starts[span]
                yield start, last, raw_bytes(home.tensor, first, last - start)
            start, span = last, span + 1

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Return a range as bytes on the device: the memory itself, or a copy."""
        found = [
            HostOutgoing(self._host).take(first, last).to(self.device)
            if data is None
            else data
            for first, last, data in self.spans(start, stop)
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    def gone(self, start: int) -> None:
        """Do nothing: the memory of a copy goes with its message."""

    def expect(self, start: int, stop: int) -> torch.Tensor:
        """Return the device memory of a range, or a buffer if that is not one run."""
        first = next(self.spans(start, stop))
        if first[2] is not None and first[1] == stop:
            return first[2]
        buffer = self.buffer(stop - start)
        self._buffered[start] = stop, buffer
        return buffer

    def settle(self, start: int) -> None:
        """Copy a buffer that has been filled to its places."""
        if start not in self._buffered:
            return
        stop, arrived = self._buffered.pop(start)
        places, sources = [], []
        for first, last, data in self.spans(start, stop):
            source = arrived[first - start : last - start]
            if data is None:
                incoming = HostIncoming(self._host)
                incoming.expect(first, last).copy_(source)
                incoming.settle(first)
            else:
                places.append(data)
                sources.append(source)
        if places:
            torch._foreach_copy_(places, sources)

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return memory for a message that has no place of its own."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)


# -------------------------------------------------------------------------- staging


class _Staging:
    """One staging in progress."""

    def __init__(self, description: Description, device: Device) -> None:
        self.description, self.device = description, device
        self.bounds = description.entries.starts, description.entries.stops
        self.own = device.owned(description.backings)
        self.arena = Arena(description.entries.nbytes, staging=True)
        self.plan = CopyPlan(
            _without(description.backings, self.own),
            description.entries,
            arena=self.arena,
            port_for=port_for,
        )

    def begin(self, after: Event, fences: Fences) -> tuple[Segment, list[Event]]:
        """Enqueue all copies; return the segment and the end of those to the host."""
        backings, bounds = self.description.backings, self.bounds
        homes = in_state(backings, bounds, self.own)
        rest = [entry for entry in self.own if entry not in homes]
        with self.device.port.aside(after):
            homes |= in_blocks(bounds, rest, apart=set(), allocate=self._zeros)
            for place, source in pairs(backings, bounds, homes, rest):
                to, there = once(place, source)
                to.copy_(there, non_blocking=True)
        events = self.plan.stage_parts(fences)
        events += self.plan.stage_device(0, self.description.entries.nbytes, fences)
        host = self.plan.in_place()
        return Segment(self.device.device, host, bounds, homes), events

    def _zeros(self, nbytes: int) -> torch.Tensor:
        return self.device.allocate(nbytes).zero_()

    def abandon(self) -> None:
        """Close the arena when nothing that was left in flight writes to it."""
        self.device.port.synchronize()
        self.plan.drain()
        self.arena.close()


def _without(backings: Backings, entries: Iterable[int]) -> Backings:
    """Return them with nothing in the place of those entries."""
    order = array("q", range(len(backings)))
    for entry in entries:
        order[entry] = -1
    return backings.taken(order)


def encode_placement(count: int, own: Iterable[int]) -> bytes:
    """Return a bit for each of ``count`` entries: whether it is on the device."""
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
            f"the offer does not say which tensors are where: {len(data)} bytes for "
            f"{count} tensors"
        )
    return [entry for entry in range(count) if data[entry // 8] >> entry % 8 & 1]


# ------------------------------------------------------------------------ receiving


def _destination_of(
    manifest: Manifest,
    placement: Iterable[int],
    device: Device,
    template: Template | None,
    terms: Terms,
    bridge: Bridge,
) -> Destination:
    """Return where the checkpoint goes; for a thread.

    ``placement`` says which entries the sender has on its device. They go to this one,
    except where a template has them.
    """
    bounds = _bounds(manifest)
    if template is None:
        homes = _blocks(device, bounds, placement, _viewed(manifest))
        return new_tensors(manifest, terms, bridge, share=_Share(device, bounds, homes))
    match = template.match(manifest)
    own = device.owned(match.backings)
    there = in_state(match.backings, bounds, own) if terms.direct else {}
    copied = [entry for entry in own if entry not in there]
    # What is no tensor of the template is made anew, where the sender has it.
    values = [e for e in placement if not match.backings.tensors[e].numel()]
    viewed = _viewed(manifest) if match.fresh else set()
    made = _blocks(device, bounds, {*copied, *values}, viewed)
    share = _Share(device, bounds, there | made, match.backings, copied)
    others = replace(match, backings=_without(match.backings, own))
    return into_template(manifest, others, terms, bridge, share=share)


class _Share:
    """The entries of a checkpoint that this device receives, as a `Share`.

    Args:
        device: The device.
        bounds: Where each entry starts and ends in the segment.
        homes: Where each of its entries is received.
        backings: A template's memory, if there is one.
        copied: The entries that are copied from there to the template.
    """

    def __init__(
        self,
        device: Device,
        bounds: Bounds,
        homes: Homes,
        backings: Backings | None = None,
        copied: Sequence[int] = (),
    ) -> None:
        self._device, self._bounds, self._homes = device, bounds, homes
        self._backings, self._copied = backings, copied
        self._segment: Segment | None = None
        self.away = {
            entry: home.bytes(bounds[1][entry] - bounds[0][entry])
            for entry, home in homes.items()
        }

    def beside(self, memory: Memory) -> Memory:
        self._segment = Segment(self._device.device, memory, self._bounds, self._homes)
        return self._segment

    def begin(self) -> None:
        assert self._segment is not None
        self._segment.after = self._device.line.fence()

    def fences(self) -> Fences:
        return {self._device.device: self._device.port.fence()}

    def load(self, fences: Fences) -> list[Event]:
        if self._backings is None:
            return []
        found = pairs(self._backings, self._bounds, self._homes, self._copied)
        copies = (once(state, place) for place, state in found)
        return [self._device.port.copy(copies, after=fences[self._device.device])]

    def drain(self) -> None:
        self._device.port.synchronize()


def _bounds(manifest: Manifest) -> Bounds:
    return manifest.entries.starts, manifest.entries.stops


def _viewed(manifest: Manifest) -> set[int]:
    """Return the entries that need storages of their own, because of views."""
    return {spec.storage for spec in manifest.views}


def _blocks(
    device: Device, bounds: Bounds, entries: Iterable[int], apart: Set[int]
) -> Homes:
    homes = in_blocks(bounds, entries, apart=apart, allocate=device.allocate)
    # What this thread's stream still does with memory that was freed comes first.
    with device.line.aside(device.line.fence()):
        return homes


# ------------------------------------------------------------------------- messages


class DeviceChannel(Channel):
    """A `Channel` whose messages are on a device, and on its side stream."""

    tagged = False
    message_bytes = 4 << 20
    sent_ahead = window = 16  # of them, where a message is no tensor's own memory

    def __init__(
        self, group: Group, rank: int, device: Device, *, sending: bool
    ) -> None:
        super().__init__(group, rank, sending=sending)
        self._device = device
        # Nobody waits any more for what a failure leaves here, but its memory must not
        # become somebody else's: the device may still read it, or write to it.
        self._under_way: dict[int, Message] = {}

    def _stream(self, memory: Memory | None = None) -> AbstractContextManager[object]:
        after = None if memory is None else _on_device(memory).after
        return self._device.line.aside(after)

    def _outgoing(self, memory: Memory) -> Outgoing:
        return _on_device(memory)

    def _incoming(self, memory: Memory) -> Incoming:
        return _on_device(memory)

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
        pause = _FIRST_POLL
        while not event.query():
            self._check()
            if time.monotonic() >= until:
                raise ProcessGroupError("the wait for it timed out", rank=self.rank)
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL)


def _on_device(memory: Memory) -> Segment:
    if not isinstance(memory, Segment):
        raise TypeError(f"{memory} is not on the device")
    return memory


# ----------------------------------------------------------------------- the medium


class DeviceMedium:
    """The memory of a device, whose communicator has an order in place of tags.

    Both ends must keep it: one conversation at a time.
    """

    tagged = DeviceChannel.tagged
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

    async def stage(self, state_dict: object, *, step: int) -> Parcel:
        """Return a snapshot, whose bytes on the device are the state dict's own.

        Only what a message cannot be made of is copied: tensors whose elements lie
        apart, on the device to the device; and those of other devices, to the host.

        Raises:
            UnsupportedLeafError: a leaf cannot travel; nothing was copied.
            StagingError: a copy failed, or the device has no memory for it.
        """
        after = self._device.port.fence()
        staging = await self._bridge.run(self._describe, state_dict)
        fences = staging.plan.fences()
        try:
            await completed(after)  # so that no thread waits for what comes before
            memory, events = await self._bridge.run(staging.begin, after, fences)
            for event in events:
                await completed(event)
            digests = await self._digest(staging, memory)
            manifest = await self._bridge.run(self._manifest, staging, step, digests)
            offer = await self._bridge.run(copy_header, manifest)
            offer += encode_placement(len(staging.bounds[0]), staging.own)
            messages = await self._bridge.run(messages_of, manifest, self.message_bytes)
        except BaseException as error:
            self._bridge.post(staging.abandon)
            if isinstance(error, Exception) and not isinstance(error, AiockptError):
                raise StagingError(f"staging step {step} failed: {error}") from error
            raise

        def release() -> None:
            self._bridge.post(staging.arena.close)

        known = _KnownDigests(manifest.digests)
        return Parcel(manifest, offer, memory, messages, known, release)

    def close(self) -> None:
        """Do nothing: no memory is kept."""

    def channel(self, group: Group, rank: int, *, sending: bool) -> Channel:
        """Return one whose messages are on the device."""
        return DeviceChannel(group, rank, self._device, sending=sending)

    def read(self, offer: mmap, limits: Limits) -> Offered:
        """Return the manifest, and what is on the sender's device."""
        length = header_length(offer[:LENGTH_BYTES], limits=limits)
        header, placement = memoryview(offer)[:length], memoryview(offer)[length:]
        found = decode_header(
            header, limits=limits, algorithm=DEVICE_ALGORITHM, ours=True
        )
        return Offered(found, decode_placement(placement, len(found.entries)))

    def destination(
        self,
        manifest: Manifest,
        placement: Sequence[int],
        template: Template | None,
        terms: Terms,
    ) -> Destination:
        """Return where it goes: to this device what is on the sender's."""
        return _destination_of(
            manifest, placement, self._device, template, terms, self._bridge
        )

    def digests(
        self, memory: Memory, grid: ChunkGrid, on_chunk: OnChunk | None
    ) -> Digests:
        """Return what computes the digests where the bytes are."""
        segment = _on_device(memory)
        return _DeviceDigests(self._device, self._bridge, segment, grid, on_chunk)

    def _describe(self, state_dict: object) -> _Staging:
        limits, allow_pickle = self._limits, self._allow_pickle
        description = describe(state_dict, limits=limits, allow_pickle=allow_pickle)
        return _Staging(description, self._device)

    async def _digest(self, staging: _Staging, memory: Segment) -> list[str]:
        grid = ChunkGrid(staging.description.entries.nbytes, self._chunk_bytes)
        digests = [""] * len(grid)
        remaining = iter(range(len(grid)))

        async def worker() -> None:
            for chunk in remaining:
                start, stop = grid.range(chunk)
                digest = self._device.digest(memory, start, stop, self._bridge)
                digests[chunk] = await digest

        await run_all([worker] * _CHUNKS_AT_ONCE)
        return digests

    def _manifest(self, staging: _Staging, step: int, digests: list[str]) -> Manifest:
        description = staging.description
        return build_manifest(
            step=step,
            chunk_bytes=self._chunk_bytes,
            entries=description.entries,
            views=description.views,
            tree=description.tree,
            digests=digests,
            algorithm=DEVICE_ALGORITHM,
        )
