"""The wire of a process group: frames, and the messages of a data segment."""

from __future__ import annotations

import time
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import ProcessGroupError, RemoteProtocolError
from aiockpt.format.chunks import ChunkGrid
from aiockpt.pg.conversation import FRAME_BYTES, ControlMessage, Kind
from aiockpt.pg.messages import (
    COPIED_BYTES,
    COPIES,
    LARGE_BYTES,
    MESSAGE_BYTES,
    TOGETHER_BYTES,
    HostDigests,
    HostIncoming,
    RankChannel,
    gathered,
    plan_messages,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def ranges(sizes: list[int]) -> list[tuple[int, int]]:
    """Return where entries of these sizes lie."""
    return list(pairwise(accumulate(sizes, initial=0)))


@given(st.lists(st.sampled_from([0, 1, 4096, 300 << 10, 3000 << 10, 40 << 20])))
def test_messages_tile_the_segment(sizes: list[int]) -> None:
    """The messages are in order, bounded, and never empty."""
    messages = plan_messages(ranges(sizes), MESSAGE_BYTES)
    assert [start for start, _ in messages][1:] == [stop for _, stop in messages][:-1]
    assert sum(stop - start for start, stop in messages) == sum(sizes)
    assert all(0 < stop - start <= MESSAGE_BYTES for start, stop in messages)


def test_a_large_entry_travels_by_itself() -> None:
    """Either end can then use the memory of the tensor."""
    sizes = [100, LARGE_BYTES, 100, 100, 2 * MESSAGE_BYTES + 1]
    messages = plan_messages(ranges(sizes), MESSAGE_BYTES)
    assert [stop - start for start, stop in messages] == [
        100,
        LARGE_BYTES,
        200,
        MESSAGE_BYTES,
        MESSAGE_BYTES,
        1,
    ]
    many = plan_messages(ranges([4096] * 100_000), MESSAGE_BYTES)
    assert len(many) == -(-100_000 * 4096 // TOGETHER_BYTES)


class Pieces:
    """A segment whose entries lie apart."""

    def __init__(self, sizes: list[int]) -> None:
        self.entries = [bytearray(size) for size in sizes]
        self._ranges = ranges(sizes)

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return the parts of the entries that are in a range."""
        found = []
        for entry, (first, last) in zip(self.entries, self._ranges, strict=True):
            low, high = max(start, first), min(stop, last)
            if low < high:
                found.append(memoryview(entry)[low - first : high - first])
        return found

    def check(self, start: int, stop: int) -> None:
        """Do nothing: nobody takes this memory away."""


@pytest.mark.parametrize(("start", "stop"), [(0, 60), (0, 10), (3, 9), (5, 35)])
def test_bytes_find_their_place(start: int, stop: int) -> None:
    """A message may be one run of memory, or several, at either end."""
    ours, theirs = Pieces([10, 20, 30]), Pieces([60])
    theirs.entries[0][:] = range(60)
    for source, target in ((theirs, ours), (ours, Pieces([60]))):
        incoming = HostIncoming(target)
        incoming.expect(start, stop)[0].copy_(gathered(source, start, stop)[0])
        incoming.store(start)
        assert b"".join(target.buffers(start, stop)) == bytes(range(start, stop))
    # One run of memory is sent and received where it is; other memory is used again.
    HostIncoming(ours).expect(10, 30)[0].fill_(7)
    assert ours.entries[1] == bytes([7] * 20)
    sent, copied = gathered(ours, 10, 30)
    assert (sent.dtype, bool(copied)) == (torch.uint8, False)
    ours.entries[1][0] = 1
    assert sent[0] == 1
    incoming = HostIncoming(Pieces([10] * 20))
    first = incoming.expect(160, 180)[0].data_ptr()
    incoming.store(160)
    assert incoming.expect(160, 180)[0].data_ptr() == first


class Counting:
    """A group that counts how many messages are under way at once."""

    on_wait: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.most = self._now = 0

    def size(self) -> int:
        """Return how many ranks there are."""
        return 2

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Counting:
        """Begin."""
        self._now += 1
        self.most = max(self.most, self._now)
        return self

    recv = send

    def wait(self, *_: object) -> bool:
        """End the oldest one."""
        self.on_wait()
        self._now -= 1
        return True


@pytest.mark.parametrize(
    ("entry", "message", "most"),
    [
        (10, 20, COPIES),
        # An entry that its tensor does not fill may be long.
        (COPIED_BYTES // 2, COPIED_BYTES, 1),
    ],
    ids=["many", "long"],
)
@pytest.mark.parametrize("sending", [True, False])
def test_copies_under_way_are_bounded(
    entry: int, message: int, most: int, *, sending: bool
) -> None:
    """Their number and their bytes are bounded at either end."""
    group, pieces = Counting(), Pieces([entry] * 4 * most)
    size = 4 * most * entry
    messages = [(at, at + message) for at in range(0, size, message)]
    channel = RankChannel(group, 1, sending=sending)
    move = channel.send_segment if sending else channel.receive_segment
    move(time.monotonic() + 60, pieces, messages, HostDigests(ChunkGrid(size, 1 << 20)))
    assert group.most == most


def test_a_thread_left_behind_writes_and_tells_nothing() -> None:
    """The caller has its template back, and has been told how that is."""
    told: list[int] = []
    memory, digests = Pieces([4, 4]), HostDigests(ChunkGrid(8, 8), told.append)
    group = Counting()
    channel = RankChannel(group, 0, sending=False)
    group.on_wait = channel.abandon
    with pytest.raises(ProcessGroupError, match="given up"):
        channel.receive_segment(time.monotonic() + 60, memory, [(0, 8)], digests)
    assert memory.entries == [bytes(4)] * 2
    assert told == []


@pytest.mark.parametrize("kind", Kind)
def test_a_frame_survives(kind: Kind) -> None:
    """Every kind, with all that it can say."""
    frame = ControlMessage(kind, 2**63 - 1, 123456789, "why: …")
    assert len(frame.encode()) == FRAME_BYTES
    assert ControlMessage.decode(frame.encode()) == frame


def test_a_failure_can_always_be_told() -> None:
    """A long text is cut, control characters go, and a senseless step is none."""
    text = ControlMessage.decode(
        ControlMessage(Kind.FAILED, 1, text="ä" * 5000).encode()
    ).text
    assert text.startswith("ä" * 400)
    assert len(text) < FRAME_BYTES
    lines = "first\nsecond\x1b[2J\x00"
    text = ControlMessage.decode(
        ControlMessage(Kind.FAILED, 1, text=lines).encode()
    ).text
    assert not {"\n", "\x1b"}.intersection(text)
    for step in (-5, 2**63, 10**30):
        assert (
            ControlMessage.decode(ControlMessage(Kind.FAILED, step).encode()).step == -1
        )


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, b"torchft.", "not an aiockpt.PGTransport"),
        (8, b"\x02\x00", "version 2"),
        (10, b"\x63\x00", "malformed"),
        (20, b"\xff" * 8, "malformed"),
        (28, b"\xff\xff\xff\x7f", "malformed"),
    ],
    ids=["magic", "version", "kind", "negative length", "longer than the frame"],
)
def test_nonsense_is_refused(at: int, value: bytes, words: str) -> None:
    """The error says what the peer did wrong."""
    frame = ControlMessage(Kind.OFFER, 1, 64).encode()
    frame[at : at + len(value)] = value
    with pytest.raises(RemoteProtocolError, match=words):
        ControlMessage.decode(frame)
