"""From device to device: over gloo, through the host; as NCCL does, on the device."""

from __future__ import annotations

import resource
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from queue import Queue
from typing import Any, NamedTuple

import pytest
import torch

from aiockpt.testing import assert_same
from tests.support.cards import on_a_loop
from tests.support.groups import Transport, moved

DEVICE = torch.device("cuda", 0)
MIB = 1 << 20
A_WHILE = 400_000_000
"""Cycles that a device is kept busy: some 200 ms."""
_LONGEST = 5.0
"""Seconds after which an end that waits in vain fails, before the test is ended."""

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]


def state(fill: float) -> dict[str, torch.Tensor]:
    """Return tensors on the device, large and small, and some beside them."""
    return {
        "large": torch.full((1 << 20,), fill, device=DEVICE),
        "small": torch.full((3,), fill, device=DEVICE),
        "view": torch.full((64, 64), fill, device=DEVICE)[:, ::2],
        "host": torch.full((1000,), fill),
    }


class TestOnTheDevice:
    """Both ends are on one device, and it works as over NCCL."""

    @asynccontextmanager
    async def pair(self) -> AsyncIterator[tuple[Transport, Transport, Loopback]]:
        """Give a sender, a receiver, and the sender's group."""
        ours, theirs = Loopback.pair()
        device = torch.device("cuda")
        async with (
            Transport(ours, timeout=_LONGEST, device=device) as sender,
            Transport(theirs, timeout=_LONGEST, device=device) as receiver,
        ):
            yield sender, receiver, ours

    @on_a_loop
    async def test_each_tensor_arrives_where_it_was(self) -> None:
        """A tensor arrives on the device or in host memory, as it was."""
        async with self.pair() as (sender, receiver, _):
            got = await moved(sender, receiver, state(1.0))
        assert_same(got, state(1.0))
        devices = {name: tensor.device for name, tensor in state(1.0).items()}
        assert {name: tensor.device for name, tensor in got.items()} == devices

    @pytest.mark.parametrize("direct", [False, True])
    @on_a_loop
    async def test_a_template_is_filled(self, *, direct: bool) -> None:
        """Each tensor where it is."""
        into = state(0.0)
        async with self.pair() as (sender, receiver, _):
            got = await moved(sender, receiver, state(1.0), into=into, direct=direct)
        assert got["large"] is into["large"]
        assert_same(into, state(1.0))

    @on_a_loop
    async def test_small_ones_travel_together(self) -> None:
        """Coalesced on the device."""
        small = [torch.full((1000,), float(n), device=DEVICE) for n in range(500)]
        async with self.pair() as (sender, receiver, group):
            assert_same(await moved(sender, receiver, small), small)
            assert len(group.lengths) < 10

    @on_a_loop
    async def test_nothing_comes_to_the_host(self) -> None:
        """Neither end needs memory for the bytes, but for what arrives."""
        weights = {"w": torch.ones(256 * MIB, device=DEVICE)}
        async with self.pair() as (sender, receiver, _):
            await moved(sender, receiver, state(1.0))
            before = _peak_rss()
            torch.cuda.reset_peak_memory_stats(DEVICE)
            held = torch.cuda.memory_allocated(DEVICE)
            got = await moved(sender, receiver, weights)
            assert torch.cuda.max_memory_allocated(DEVICE) - held < (1024 + 256) * MIB
            assert _peak_rss() - before < 200 * MIB
        assert got["w"].device == DEVICE
        assert (got["w"] == 1).all()

    @on_a_loop
    async def test_both_ends_wait_for_their_producers(self) -> None:
        """What was enqueued before is sent, and the template is not written to."""
        weight = torch.zeros(16 * MIB, device=DEVICE)
        into, seen = torch.zeros_like(weight), torch.ones((), device=DEVICE)
        async with self.pair() as (sender, receiver, _):
            torch.cuda._sleep(A_WHILE)
            weight.fill_(7)
            seen.copy_(into.max())
            into.fill_(5)
            await moved(sender, receiver, {"w": weight}, into={"w": into}, direct=True)
            weight.fill_(9)
        assert seen.item() == 0
        assert into.unique().tolist() == [7]

    @on_a_loop
    async def test_what_arrived_may_be_used_on_any_stream(self) -> None:
        """It is there when the receive returns."""
        async with self.pair() as (sender, receiver, _):
            got: Any = await moved(sender, receiver, state(3.0))
            with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
                assert got["large"].sum().item() == 3 << 20


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class _Sent(NamedTuple):
    tensor: torch.Tensor
    ready: torch.cuda.Event
    done: Queue[torch.cuda.Event]


class Loopback:
    """One rank's end of a group of two in one process, which copies on the device.

    It stands for a communicator: messages have an order and no tags, ``wait`` lets the
    current stream wait, and what is sent must not change before.
    """

    def __init__(self, out: Queue[_Sent], into: Queue[_Sent]) -> None:
        self._out, self._into = out, into
        self._last: _Receiving | None = None
        self.lengths: list[int] = []

    @classmethod
    def pair(cls) -> tuple[Loopback, Loopback]:
        """Return both ends."""
        one: Queue[_Sent] = Queue()
        other: Queue[_Sent] = Queue()
        return cls(one, other), cls(other, one)

    def size(self) -> int:
        """Return how many ranks there are."""
        return 2

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Offer a tensor, as it will be when the current stream is here."""
        (tensor,) = tensors
        assert tensor.is_cuda
        self.lengths.append(tensor.nbytes)
        sent = _Sent(tensor, _here(), Queue())
        self._out.put(sent)
        return _Sending(sent)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Ask for the next one."""
        (tensor,) = tensors
        assert tensor.is_cuda
        self._last = _Receiving(tensor, _here(), self._into, self._last)
        return self._last


class _Sending:
    def __init__(self, sent: _Sent) -> None:
        self._sent = sent

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert timeout is None, "NCCL would abort at its end"
        torch.cuda.current_stream().wait_event(self._sent.done.get(timeout=_LONGEST))
        return True


class _Receiving:
    def __init__(
        self,
        tensor: torch.Tensor,
        ready: torch.cuda.Event,
        queue: Queue[_Sent],
        before: _Receiving | None,
    ) -> None:
        self._tensor, self._ready, self._queue = tensor, ready, queue
        self._before = before
        self._lock = threading.Lock()
        self._moved = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert timeout is None, "NCCL would abort at its end"
        with self._lock:
            if not self._moved:
                if self._before is not None:
                    self._before.wait()
                self._before = None
                self._move()
        return True

    def _move(self) -> None:
        sent = self._queue.get(timeout=_LONGEST)
        assert sent.tensor.nbytes == self._tensor.nbytes
        stream = torch.cuda.current_stream()
        for event in (sent.ready, self._ready):
            stream.wait_event(event)
        self._tensor.copy_(sent.tensor)
        sent.done.put(_here())
        self._moved = True


def _here() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.current_stream().record_event()
    return event
