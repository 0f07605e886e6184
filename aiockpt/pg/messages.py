"""Moves a checkpoint between two ranks as messages, and digests them.

This module handles host memory, and `device` handles the memory of a device. Each has
a `Medium`.

Both ends derive the same messages from the manifest. A large entry travels by itself,
in pieces, so that either end can use the tensor's own memory. Small adjacent entries
travel together, through one copy if their memory is not contiguous. The size of a
message is bounded, so a copy is small.

The thread that moves a message also digests it, while its bytes are in the cache.
Reading them later would cost twice as much.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from mmap import mmap
from typing import Any, Final, NamedTuple, Protocol

import torch

from aiockpt.errors import IntegrityError, ProcessGroupError
from aiockpt.format.chunks import ALGORITHM, ChunkGrid, ChunkHasher, digits_of
from aiockpt.format.header import decode_header
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import ForeignHeader, Manifest
from aiockpt.memory.arena import Memory, view_of_address
from aiockpt.memory.device import Marks, PortFor
from aiockpt.runtime.bridge import Bridge
from aiockpt.state.load_plan import Matching
from aiockpt.transfer.source import DeviceEntries
from aiockpt.transfer.stager import Stager, StagerOptions

_STAGING_THREADS: Final = 2

LARGE_BYTES: Final = 256 << 10
TOGETHER_BYTES: Final = 1 << 20
MESSAGE_BYTES: Final = 16 << 20
"""For host memory: each message wakes both ends, and its digest needs the cache."""

COPIES: Final = 8
"""How many copied messages may be under way at either end."""

COPIED_BYTES: Final = COPIES * TOGETHER_BYTES
"""How many bytes of copies may be under way before no further one is made."""

# A shared group may use small tags for other purposes.
_FORWARD: Final = 0x61696F00  # from a sender to a receiver
_BACKWARD: Final = 0x61696F01
_LAST: Final = 2  # added for the last frame of a conversation

_WAIT_FRACTION: Final = 32
"""A wait takes 1/32 of the messages that are under way."""

_MAX_WAIT_S: Final = 365 * 86400.0
"""Gloo overflows with an infinite timeout."""


# ---------------------------------------------------------------- process groups


class Pending(Protocol):
    """An operation under way: ``torch.distributed.Work``, or torchft's."""

    def wait(self, timeout: timedelta = ..., /) -> bool:
        """Block until it has ended; raise when it failed."""


class GroupLike(Protocol):
    """The used interface of a process group: torch's, a backend, or torchft's."""

    def size(self) -> int:
        """Return the number of ranks."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Any:
        """Begin to send a tensor; return the operation."""

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Any:
        """Begin to receive into a tensor; return the operation."""


_kept: weakref.WeakKeyDictionary[Any, list[object]] = weakref.WeakKeyDictionary()


def rank_in(group: GroupLike) -> int | None:
    """Return this process's rank; None if the group does not know it.

    A group of torchft inherits ``rank`` from torch, which returns 0 on every rank.
    """
    inner = _innermost(group)
    definer = next((each for each in type(inner).__mro__ if "size" in vars(each)), None)
    if definer is None or "rank" not in vars(definer):
        return None
    rank: int = inner.rank()
    return rank


def _keep_with(group: GroupLike, messages: object) -> None:
    """Keep messages without a waiter alive as long as the group.

    Gloo drops a message when its ``Work`` is freed, even one that it has announced.
    """
    with suppress(TypeError):  # a group that no weak reference can be made to
        _kept.setdefault(_innermost(group), []).append(messages)


def _innermost(group: Any) -> Any:
    """Return the group inside a wrapper of torchft."""
    while (parent := getattr(group, "parent", None)) is not None:
        group = parent
    return group


# ------------------------------------------------------- cutting a data segment


def messages_of(manifest: Manifest, longest: int) -> list[tuple[int, int]]:
    """Return the ranges of the segment that travel, in order."""
    entries = manifest.entries
    return plan_messages(zip(entries.starts, entries.stops, strict=True), longest)


def plan_messages(
    entries: Iterable[tuple[int, int]], longest: int
) -> list[tuple[int, int]]:
    """Return the ranges of the segment that travel, from those of the entries.

    ``longest`` bounds a message that is part of a large entry.
    """
    messages: list[tuple[int, int]] = []
    first = last = 0
    for start, stop in entries:
        large = stop - start >= LARGE_BYTES
        if large or stop - first > TOGETHER_BYTES:
            if first < start:
                messages.append((first, start))
            first = start
        if large:
            pieces = range(start, stop, longest)
            messages += [(at, min(at + longest, stop)) for at in pieces]
            first = stop
        last = stop
    if first < last:
        messages.append((first, last))
    return messages


# ------------------------------------------------------ the memory of a message


class Incoming(Protocol):
    """The memory that messages are received into."""

    def expect(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        """Return a tensor to receive these bytes of the segment into.

        The number is the size of its temporary buffer, or 0 for the final memory.
        """

    def store(self, start: int) -> None:
        """Copy an arrived message from its buffer, if it has one."""


def gathered(memory: Memory, start: int, stop: int) -> tuple[torch.Tensor, int]:
    """Return bytes of the segment, and how many of them are a copy.

    Contiguous bytes are not copied.
    """
    views = memory.buffers(start, stop)
    if len(views) == 1:
        return torch.frombuffer(views[0], dtype=torch.uint8), 0
    copy = bytearray().join(views)
    return torch.frombuffer(copy, dtype=torch.uint8), len(copy)


class HostIncoming:
    """Receives into the segment's own memory, or into a buffer for scattered bytes.

    Buffers of the usual size are reused.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._spare: list[bytearray] = []
        self._buffered: dict[int, tuple[bytearray, int]] = {}

    def expect(self, start: int, stop: int) -> tuple[torch.Tensor, int]:
        """Return a tensor to receive these bytes of the segment into."""
        views, nbytes = self._memory.buffers(start, stop), stop - start
        if len(views) == 1:
            return torch.frombuffer(views[0], dtype=torch.uint8), 0
        if nbytes > TOGETHER_BYTES or not self._spare:
            block = bytearray(max(nbytes, TOGETHER_BYTES))
        else:
            block = self._spare.pop()
        self._buffered[start] = block, stop
        return torch.frombuffer(block, dtype=torch.uint8, count=nbytes), nbytes

    def store(self, start: int) -> None:
        """Copy a buffer that has been filled to its places."""
        if start not in self._buffered:
            return
        block, stop = self._buffered.pop(start)
        arrived, at = memoryview(block), 0
        # Asked again, because a template may have got other memory meanwhile.
        for view in self._memory.buffers(start, stop):
            view[:] = arrived[at : at + len(view)]
            at += len(view)
        if len(block) == TOGETHER_BYTES:
            self._spare.append(block)


# ------------------------------------------------------------------------ digests

OnChunk = Callable[[int], object]
"""Called with the size of each chunk that has arrived; in any thread."""


class Digests(Protocol):
    """Computes the digests of a segment's chunks while its messages move."""

    def add(self, start: int, data: torch.Tensor) -> None:
        """Digest the bytes from ``start`` on, which is where an earlier call ended."""

    async def digits(self) -> bytearray:
        """Return all digests, joined, when everything has moved."""


class HostDigests:
    """Computes the digests of a segment in host memory.

    Several threads may add the same bytes, each in order. The first one counts.
    ``changed`` tells at the end whether a sender's tensors have changed meanwhile. If
    so, the digests match nothing.
    """

    def __init__(
        self,
        grid: ChunkGrid,
        on_chunk: OnChunk | None = None,
        changed: Callable[[], bool] | None = None,
    ) -> None:
        self._grid = grid
        self._changed = changed
        self._on_chunk = on_chunk
        self._lock = threading.Lock()
        self._hasher = ChunkHasher(grid)
        self._digests: list[str] = []

    def add(self, start: int, data: torch.Tensor) -> None:
        """Digest the bytes from ``start`` on, which is where an earlier call ended."""
        with self._lock:
            if start < self._hasher.position:
                return
            assert start == self._hasher.position
            view = view_of_address(data.data_ptr(), data.nbytes, data)
            hashed = self._hasher.update(start, view)
            self._digests += [each.digest for each in hashed]
            complete = len(self._digests) == len(self._grid)
            if complete and self._changed is not None and self._changed():
                self._digests = [self._grid.unsealed] * len(self._grid)
            if self._on_chunk is not None:
                for each in hashed:
                    first, stop = self._grid.range(each.chunk)
                    self._on_chunk(stop - first)

    async def digits(self) -> bytearray:
        """Return all digests, joined."""
        assert len(self._digests) == len(self._grid)
        return bytearray("".join(self._digests).encode())


def compare(sent: bytearray, found: bytearray) -> None:
    """Raise ``IntegrityError`` for the first chunk whose digests differ."""
    if sent == found:
        return
    length = digits_of(ALGORITHM)  # as that of digests of a device
    for chunk, at in enumerate(range(0, len(found), length)):
        digests = (digits[at : at + length] for digits in (sent, found))
        expected, actual = (each.decode("ascii", "replace") for each in digests)
        if expected != actual:
            raise IntegrityError(expected=expected, actual=actual, chunk=chunk)


# ------------------------------------------------------------- posting and waiting


class Message(NamedTuple):
    """A message under way."""

    work: Pending
    tensor: torch.Tensor


class _Moving(NamedTuple):
    """A part of a segment under way; ``copied`` bytes of it are a copy or a buffer."""

    start: int
    message: Message
    copied: int


def _crowded(posted: Iterable[_Moving]) -> bool:
    """Say whether too many copies or buffers are under way."""
    sizes = [each.copied for each in posted if each.copied]
    return len(sizes) >= COPIES or sum(sizes) >= COPIED_BYTES


class RankChannel:
    """Messages between this rank and another one; its methods block, for threads.

    Messages keep their order, and many are under way at once. A method raises
    ``ProcessGroupError`` when an operation failed, or had not ended at ``until``, a
    moment of ``time.monotonic``. The tensors are in host memory; a subclass moves
    those of a device.
    """

    tagged = True
    """Whether messages find their receiver by tag, and conversations need no order."""

    sent_ahead = 128
    """Messages that are sent at once, so that the group always finds a next one."""

    window = 32
    """Messages that are awaited at once, so that none waits for a round trip."""

    def __init__(self, group: GroupLike, rank: int, *, sending: bool) -> None:
        self.rank = rank
        self.sending = sending
        self._group = group
        self._out, self._in = _FORWARD, _BACKWARD
        if not sending:
            self._out, self._in = _BACKWARD, _FORWARD
        self._abandoned = False

    def send(self, until: float, data: bytearray) -> None:
        """Send bytes in one message."""
        with self._stream():
            self._wait(self._post_send(self._outgoing(_tensor(data))), until)

    def receive(self, until: float, into: bytearray | mmap) -> None:
        """Receive as many bytes (one at least) as it holds, in one message."""
        with self._stream():
            here = _tensor(into)
            there = self._buffer(here)
            self._wait(self._post_receive(there), until)
            if there is not here:
                here.copy_(there)

    def send_last(self, until: float, frame: bytearray) -> None:
        """Send the last frame, for which the peer waits during the conversation."""
        self._wait(self._post_send(_tensor(frame), _LAST), until)

    def receive_last(self, until: float, nbytes: int) -> bytearray:
        """Receive the last frame; fail if the peer dies."""
        frame = bytearray(nbytes)
        self._wait(self._post_receive(_tensor(frame), _LAST), until)
        return frame

    def leave_word(self, only: bytearray, last: bytearray) -> None:
        """Send a whole conversation without waiting for the receiver.

        A receiver that comes later receives both frames. A buffer is posted for the
        receiver's own last frame.
        """
        buffer = _tensor(bytearray(len(last)))
        messages = (
            self._post_send(_tensor(only)),
            self._post_send(_tensor(last), _LAST),
            self._post_receive(buffer, _LAST),
        )
        _keep_with(self._group, messages)

    def abandon(self) -> None:
        """Prevent a thread that still waits for a message from posting another."""
        self._abandoned = True

    def give_up(self, frame: bytearray) -> object:
        """Begin to send the last frame; return the objects that must be kept alive."""
        with suppress(ProcessGroupError):
            return self._post_send(_tensor(frame), _LAST)
        return None

    def send_segment(
        self,
        until: float,
        memory: Memory,
        messages: Iterable[tuple[int, int]],
        digests: Digests,
    ) -> None:
        """Send these ranges of a segment, a message for each, and digest them."""
        with _giving_way(), self._stream():
            posted: deque[_Moving] = deque()
            for start, stop in messages:
                while len(posted) == self.sent_ahead or _crowded(posted):
                    self._oldest(posted, _WAIT_FRACTION, until)
                self._check()
                data, copied = self._take(memory, start, stop)
                digests.add(start, data)
                posted.append(_Moving(start, self._post_send(data), copied))
            self._oldest(posted, 1, until)

    def receive_segment(
        self,
        until: float,
        memory: Memory,
        messages: Iterable[tuple[int, int]],
        digests: Digests,
    ) -> None:
        """Receive these ranges; digest each message while others arrive."""
        with _giving_way(), self._stream(memory):
            incoming = self._incoming(memory)
            posted: deque[_Moving] = deque()

            def store_oldest() -> None:
                arrived = self._oldest(posted, _WAIT_FRACTION, until)
                self._check()
                for start, message, _ in arrived:
                    digests.add(start, message.tensor)
                    incoming.store(start)

            for start, stop in messages:
                while len(posted) == self.window or _crowded(posted):
                    store_oldest()
                expected, copied = incoming.expect(start, stop)
                posted.append(_Moving(start, self._post_receive(expected), copied))
            while posted:
                store_oldest()
            self._finish(until)

    def _oldest(
        self, posted: deque[_Moving], fraction: int, until: float
    ) -> list[_Moving]:
        """Wait for the oldest 1/``fraction`` of the messages, and remove them.

        This waits for the last of them first, so that the thread wakes only once.
        """
        oldest = [posted.popleft() for _ in range(-(-len(posted) // fraction))]
        for each in reversed(oldest):
            self._wait(each.message, until)
        return oldest

    def _check(self) -> None:
        if self._abandoned:
            raise ProcessGroupError("it was given up", rank=self.rank)

    def _post_send(self, tensor: torch.Tensor, tag: int = 0) -> Message:
        try:
            work = self._group.send([tensor], self.rank, self._out + tag)
        except Exception as error:
            raise self._failed(error) from error
        return Message(work, tensor)

    def _post_receive(self, tensor: torch.Tensor, tag: int = 0) -> Message:
        try:
            work = self._group.recv([tensor], self.rank, self._in + tag)
        except Exception as error:
            raise self._failed(error) from error
        return Message(work, tensor)

    def _wait(self, message: Message, until: float) -> None:
        """Block until a message has moved."""
        try:
            if not self._ended(message.work, until):
                raise ProcessGroupError("it did not end well", rank=self.rank)
        except ProcessGroupError:
            raise
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> ProcessGroupError:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return ProcessGroupError(first, rank=self.rank)

    # A device overrides the following methods.

    def _stream(self, memory: Memory | None = None) -> AbstractContextManager[object]:
        """Return the context in which messages of ``memory`` are posted."""
        return nullcontext()

    def _take(self, memory: Memory, start: int, stop: int) -> tuple[torch.Tensor, int]:
        """Return the bytes to send, and how many of them are a copy."""
        return gathered(memory, start, stop)

    def _incoming(self, memory: Memory) -> Incoming:
        return HostIncoming(memory)

    def _outgoing(self, here: torch.Tensor) -> torch.Tensor:
        """Return the bytes of ``here`` in memory of the group's device."""
        return here

    def _buffer(self, here: torch.Tensor) -> torch.Tensor:
        """Return memory of the group's device for the bytes of ``here``."""
        return here

    def _ended(self, work: Pending, until: float) -> bool:
        remaining = max(until - time.monotonic(), 0.001)  # 0 means something else
        return work.wait(timedelta(seconds=min(remaining, _MAX_WAIT_S)))

    def _finish(self, until: float) -> None:
        """Wait until all stored messages have reached their memory."""


def _tensor(data: bytearray | mmap) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


@contextmanager
def _giving_way() -> Iterator[None]:
    """Keep this thread from preempting others when it wakes.

    The group's own threads need the processor at once, or the connection idles. This
    thread's work may run a little later.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    # A sandbox may forbid it. The transfer is then slightly slower.
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


# ------------------------------------------------------------------------- the media


def packed(manifest: Manifest, longest: int) -> tuple[bytearray, list[tuple[int, int]]]:
    """Return the header and the ranges to send, for all receivers.

    For a thread: the header may be long.
    """
    return bytearray(manifest.header), messages_of(manifest, longest)


@dataclass(frozen=True, slots=True)
class Parcel:
    """A snapshot that is ready to be sent to several receivers.

    Attributes:
        manifest: The manifest of the checkpoint.
        offer: The first bytes for a receiver: the header, and a device's placement.
        memory: The data segment.
        messages: The ranges of the segment to send, in order.
        digests: Computes the digests of the chunks, or has them.
        release: Releases the memory.
    """

    manifest: Manifest
    offer: bytearray = field(repr=False)
    memory: Memory
    messages: Sequence[tuple[int, int]] = field(repr=False)
    digests: Digests
    release: Callable[[], None]


class Medium(Protocol):
    """The kind of memory of a transport: stages, moves, verifies and receives."""

    @property
    def message_bytes(self) -> int:
        """The largest message of a large entry, in bytes."""

    def mark(self, ports: PortFor) -> Marks:
        """Mark the device work of the calling thread, on its current streams."""

    async def stage(self, state_dict: object, *, step: int, marks: Marks) -> Parcel:
        """Return a snapshot; the state dict must not change until it is released.

        Whatever reads a device waits for ``marks``.

        Raises:
            UnsupportedLeafError: a leaf cannot travel; nothing was copied.
            StagingError: a copy failed.
        """

    def close(self) -> None:
        """Keep no memory from now on."""

    def channel(self, group: GroupLike, rank: int, *, sending: bool) -> RankChannel:
        """Return what moves messages between this rank and another one."""

    def read(
        self, offer: mmap, limits: Limits
    ) -> tuple[Manifest | ForeignHeader, Sequence[int]]:
        """Return the manifest, and the entries that are on the sender's device.

        See `decode_header` for errors.
        """

    def device_entries(
        self,
        manifest: Manifest,
        placement: Sequence[int],
        rule: Matching,
        *,
        direct: bool,
    ) -> DeviceEntries | None:
        """Return what a checkpoint puts on the device; see `Source.device_entries`."""

    def digests(
        self, memory: Memory, grid: ChunkGrid, on_chunk: OnChunk | None
    ) -> Digests:
        """Return the digests object of a segment that is received."""


class HostMedium:
    """Host memory, and a group that moves it by tags: gloo."""

    message_bytes = MESSAGE_BYTES

    def __init__(
        self, bridge: Bridge, *, chunk_bytes: int, allow_pickle: bool, limits: Limits
    ) -> None:
        self._bridge = bridge
        self._stager = Stager(
            bridge,
            StagerOptions(
                threads=_STAGING_THREADS,
                chunk_bytes=chunk_bytes,
                limits=limits,
                allow_pickle=allow_pickle,
                # A send returns when everything was sent, so it needs no copy.
                zero_copy=True,
                seal=False,
            ),
        )

    def mark(self, ports: PortFor) -> Marks:
        """Mark the device work of the calling thread."""
        return Marks.of(ports)

    async def stage(self, state_dict: object, *, step: int, marks: Marks) -> Parcel:
        """Return a snapshot, most of which is the state dict's own memory."""
        snapshot = await self._stager.stage(state_dict, step=step, marks=marks)
        manifest = snapshot.manifest
        try:
            pack = self._bridge.run(packed, manifest, MESSAGE_BYTES)
            offer, messages = await pack
        except BaseException:
            snapshot.release()
            raise
        digests = HostDigests(manifest.grid, changed=snapshot.changed)
        return Parcel(manifest, offer, snapshot, messages, digests, snapshot.release)

    def close(self) -> None:
        """Keep no memory from now on."""
        self._stager.close()

    def channel(self, group: GroupLike, rank: int, *, sending: bool) -> RankChannel:
        """Return what moves messages between this rank and another one."""
        return RankChannel(group, rank, sending=sending)

    def read(
        self, offer: mmap, limits: Limits
    ) -> tuple[Manifest | ForeignHeader, Sequence[int]]:
        """Return the manifest; no entry is on a device."""
        # A sender of a process group cannot choose the algorithm.
        algorithms = [ALGORITHM]
        return decode_header(offer, limits=limits, algorithms=algorithms, ours=True), ()

    def device_entries(
        self,
        manifest: Manifest,
        placement: Sequence[int],
        rule: Matching,
        *,
        direct: bool,
    ) -> None:
        """Do nothing: all bytes come to host memory."""

    def digests(
        self, memory: Memory, grid: ChunkGrid, on_chunk: OnChunk | None
    ) -> Digests:
        """Return an object that digests each message as it arrives."""
        return HostDigests(grid, on_chunk)
