"""Packets with descriptors, between processes of one host."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiockpt.runtime.ipc import arrival, is_ours, owner_of, receive

pytestmark = [pytest.mark.every_loop, pytest.mark.torch_free]

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Return two ends that are connected."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.settimeout(0)
    yield pair
    for end in pair:
        end.close()


def test_a_packet_brings_its_descriptors(ends: Ends) -> None:
    """No program that is started inherits them."""
    ours, theirs = ends
    with Path(__file__).open("rb") as file:
        socket.send_fds(theirs, [b"two"], [file.fileno(), file.fileno()])
    data, fds = receive(ours, 100, 2)
    assert data == b"two"
    assert len(fds) == 2
    for fd in fds:
        assert not os.get_inheritable(fd)
        assert os.pread(fd, 3, 0) == b'"""'
        os.close(fd)


@pytest.mark.parametrize(("length", "count"), [(101, 0), (3, 3), (3, 40), (101, 3)])
def test_what_is_cut_short_is_refused(ends: Ends, length: int, count: int) -> None:
    """And its descriptors are closed."""
    ours, theirs = ends
    with Path(__file__).open("rb") as file:
        socket.send_fds(theirs, [b"x" * length], [file.fileno()] * count)
    with pytest.raises(OSError, match="cut short"):
        receive(ours, 100, 2)


def test_nothing_yet_and_the_end(ends: Ends) -> None:
    """The one raises, the other is empty."""
    ours, theirs = ends
    with pytest.raises(BlockingIOError):
        receive(ours, 100, 1)
    theirs.close()
    assert receive(ours, 100, 1) == (b"", [])


def test_the_kernel_tells_who_is_there(ends: Ends) -> None:
    """This process, at both ends."""
    assert owner_of(ends[0]) == (os.getpid(), os.geteuid())
    assert is_ours(ends[1])


@pytest.mark.asyncio
async def test_an_arrival_wakes_the_loop(ends: Ends) -> None:
    """Once; a cancel leaves nothing on the loop."""
    ours, theirs = ends
    waiting = asyncio.ensure_future(arrival(ours))
    await asyncio.sleep(0)
    theirs.send(b"here")
    await waiting
    assert receive(ours, 100, 1) == (b"here", [])
    waiting = asyncio.ensure_future(arrival(ours))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert not asyncio.get_running_loop().remove_reader(ours)
