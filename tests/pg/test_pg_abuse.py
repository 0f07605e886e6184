"""PGTransport where callers, or peers, do what they should not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiockpt import IntegrityError, Limits
from aiockpt.errors import (
    LimitExceededError,
    LocalProtocolError,
    PeerFailedError,
    ProcessGroupError,
    StagingError,
)
from aiockpt.format.chunks import ChunkGrid
from aiockpt.memory.arena import Arena
from aiockpt.pg.conversation import Frame, Kind
from aiockpt.pg.messages import MESSAGE_BYTES, Channel, HostDigests
from aiockpt.testing import assert_same
from tests.support.groups import both, moved, transports
from tests.support.transports import weights


@pytest.mark.asyncio
@pytest.mark.parametrize("wrong", ["5", 5.0, None])
async def test_a_step_that_is_no_integer_is_refused(wrong: Any) -> None:
    """At once: it was once looked for among all the integers there are."""
    async with transports() as (sender, receiver):
        with pytest.raises(TypeError):
            await sender.send_checkpoint([1], wrong, {})
        with pytest.raises(TypeError):
            await receiver.recv_checkpoint(0, "", wrong)
        assert await moved(sender, receiver, {}) == {}


@pytest.mark.asyncio
async def test_what_counts_as_an_integer_is_a_step() -> None:
    """A bool, or a tensor with one, as training loops have."""
    async with transports() as (sender, receiver):
        for step in (True, torch.tensor(10**12)):
            await moved(sender, receiver, {}, step)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_a_part_is_refused() -> None:
    """At once: nothing is said to the sender, whom another call still finds."""
    async with transports() as (sender, receiver):
        with pytest.raises(LocalProtocolError, match="HTTPTransport"):
            await receiver.recv_checkpoint(0, sender.metadata(), 1, select=["w0"])
        assert_same(await moved(sender, receiver, weights()), weights())


@pytest.mark.asyncio
@pytest.mark.parametrize("timeout", [float("inf"), 1e18])
async def test_a_timeout_may_be_endless(timeout: float) -> None:
    """Gloo counts in integers, which end."""
    async with transports(timeout=timeout) as (sender, receiver):
        assert_same(await moved(sender, receiver, weights()), weights())


@pytest.mark.asyncio
async def test_a_state_that_changes_between_two_messages_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was sent is old then, what comes is new, and either matches its digest."""
    state = {name: torch.zeros(MESSAGE_BYTES // 4) for name in "abcd"}
    monkeypatch.setattr(Channel, "sent_ahead", 1)
    take = Channel._take

    def change_and_take(
        channel: Channel, memory: Any, start: int, stop: int
    ) -> tuple[torch.Tensor, int]:
        if start == 2 * MESSAGE_BYTES:
            for tensor in state.values():
                tensor.add_(1)
        return take(channel, memory, start, stop)

    monkeypatch.setattr(Channel, "_take", change_and_take)
    async with transports() as (sender, receiver):
        into = {name: torch.zeros(MESSAGE_BYTES // 4) for name in "abcd"}
        sent, got = await both(sender, receiver, state, into=into)
        assert isinstance(got, IntegrityError)
        assert isinstance(sent, PeerFailedError)
        assert not any(tensor.any() for tensor in into.values())
        monkeypatch.undo()
        assert_same(await moved(sender, receiver, state), state)


@pytest.mark.asyncio
async def test_any_failure_to_stage_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that nobody has thought of: receivers do not wait for their deadline."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(Arena, "__init__", fail)
    async with transports() as (sender, receiver):
        sent, got = await both(sender, receiver, weights())
        assert isinstance(sent, StagingError)
        assert isinstance(got, PeerFailedError)
        assert "Cannot allocate" in got.reason


@pytest.mark.asyncio
async def test_a_header_without_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sender hears of it, and the group is well."""
    encode = Frame.encode

    def lie(frame: Frame) -> bytearray:
        if frame.kind is Kind.OFFER:
            frame = Frame(frame.kind, frame.step, 2**62)
        return encode(frame)

    async with transports(limits=Limits(max_header_bytes=2**63)) as (sender, receiver):
        monkeypatch.setattr(Frame, "encode", lie)
        sent, got = await both(sender, receiver, weights())
        assert isinstance(got, LimitExceededError)
        assert isinstance(sent, PeerFailedError)
        monkeypatch.undo()
        assert_same(await moved(sender, receiver, weights()), weights())


class Late:
    """A group whose operations end after the call that began them was given up."""

    def __init__(self) -> None:
        self.channel = Channel(self, 0, sending=False)

    def size(self) -> int:
        """Return how many ranks there are."""
        return 2

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Do nothing."""
        raise AssertionError

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Begin."""
        return self

    def wait(self, *_: Any) -> bool:
        """End, later."""
        self.channel.abandon()
        return True


class Halves:
    """Memory in two pieces."""

    def __init__(self) -> None:
        self.pieces = [bytearray(b"old."), bytearray(b"old.")]

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return both."""
        return [memoryview(piece) for piece in self.pieces]


def test_a_thread_left_behind_writes_and_tells_nothing() -> None:
    """The caller has its template back, and has been told how that is."""
    told: list[int] = []
    memory, digests = Halves(), HostDigests(ChunkGrid(8, 8), told.append)
    with pytest.raises(ProcessGroupError, match="given up"):
        Late().channel.receive_segment(0.0, memory, [(0, 8)], digests)
    assert memory.pieces == [b"old.", b"old."]
    assert told == []
