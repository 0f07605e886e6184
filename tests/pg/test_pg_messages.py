"""Messages: how a segment is cut, and that every byte finds its place."""

from __future__ import annotations

import time
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.format.chunks import ChunkGrid
from aiockpt.pg.messages import (
    COPIED_BYTES,
    COPIES,
    LARGE_BYTES,
    MESSAGE_BYTES,
    TOGETHER_BYTES,
    Channel,
    HostDigests,
    HostIncoming,
    gathered,
    plan_messages,
)

KIB = 1 << 10


def ranges(sizes: list[int]) -> list[tuple[int, int]]:
    """Return where entries of these sizes lie."""
    return list(pairwise(accumulate(sizes, initial=0)))


@given(st.lists(st.sampled_from([0, 1, 4 * KIB, 300 * KIB, 3000 * KIB, 40 << 20])))
def test_messages_tile_the_segment(sizes: list[int]) -> None:
    """In order, bounded, none of them empty."""
    messages = plan_messages(ranges(sizes), MESSAGE_BYTES)
    assert [start for start, _ in messages][1:] == [stop for _, stop in messages][:-1]
    assert sum(stop - start for start, stop in messages) == sum(sizes)
    assert all(0 < stop - start <= MESSAGE_BYTES for start, stop in messages)


def test_a_large_entry_travels_by_itself() -> None:
    """So that either end can use the memory of the tensor."""
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


def test_small_entries_travel_together() -> None:
    """100,000 tensors of 4 KiB are 200 messages."""
    messages = plan_messages(ranges([4 * KIB] * 100_000), MESSAGE_BYTES)
    assert len(messages) == -(-100_000 * 4 * KIB // TOGETHER_BYTES)


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


@pytest.mark.parametrize(("start", "stop"), [(0, 60), (0, 10), (3, 9), (5, 35)])
def test_bytes_find_their_place(start: int, stop: int) -> None:
    """Whether a message is one run of memory here or there, or several."""
    ours, theirs = Pieces([10, 20, 30]), Pieces([60])
    theirs.entries[0][:] = range(60)
    for source, target in ((theirs, ours), (ours, Pieces([60]))):
        landings = HostIncoming(target)
        landings.expect(start, stop)[0].copy_(gathered(source, start, stop)[0])
        landings.settle(start)
        assert b"".join(target.buffers(start, stop)) == bytes(range(start, stop))


def test_one_run_of_memory_is_not_copied() -> None:
    """What is received is where it belongs, and what is sent is the tensor's own."""
    pieces = Pieces([10, 20])
    HostIncoming(pieces).expect(10, 30)[0].fill_(7)
    assert pieces.entries[1] == bytes([7] * 20)
    sent, copied = gathered(pieces, 10, 30)
    assert not copied
    pieces.entries[1][0] = 1
    assert sent[0] == 1
    assert sent.dtype is torch.uint8


def test_memory_beside_the_places_is_used_again() -> None:
    """However many small tensors there are."""
    landings = HostIncoming(Pieces([10] * 20))
    first = landings.expect(160, 180)[0].data_ptr()
    landings.settle(160)
    assert landings.expect(160, 180)[0].data_ptr() == first


class Counting:
    """A group that counts how many messages are under way at once."""

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
    """By their number and by their bytes, at either end."""
    group, pieces = Counting(), Pieces([entry] * 4 * most)
    size = 4 * most * entry
    messages = [(at, at + message) for at in range(0, size, message)]
    channel = Channel(group, 1, sending=sending)
    move = channel.send_segment if sending else channel.receive_segment
    move(time.monotonic() + 60, pieces, messages, HostDigests(ChunkGrid(size, 1 << 20)))
    assert group.most == most
