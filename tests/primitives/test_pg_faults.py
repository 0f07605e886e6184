"""Failures inside of a PGTransport, which no caller and no peer can bring about."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiockpt import Limits
from aiockpt.errors import (
    LimitExceededError,
    PeerFailedError,
    ProcessGroupError,
    StagingError,
)
from aiockpt.memory.arena import Arena
from aiockpt.pg.conversation import ControlMessage, Kind
from aiockpt.pg.messages import RankChannel
from aiockpt.testing import assert_same
from tests.support.groups import both, moved, transports
from tests.support.transports import weights

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.usefixtures("no_blocking", "only_waits_left"),
]

PROMPT = 20.0


@pytest.mark.parametrize("fault", ["staging", "header"])
async def test_a_failure_that_nobody_has_thought_of_is_told(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """No memory to stage in, or for a header; the group is well afterwards."""
    encode = ControlMessage.encode

    def fail(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    def lie(frame: ControlMessage) -> bytearray:
        offer = frame.kind is Kind.OFFER
        return encode(ControlMessage(frame.kind, frame.step, 2**62) if offer else frame)

    async with transports(limits=Limits(max_header_bytes=2**63)) as (sender, receiver):
        with monkeypatch.context() as patch:
            if fault == "staging":
                patch.setattr(Arena, "__init__", fail)
            else:
                patch.setattr(ControlMessage, "encode", lie)
            sent, got = await both(sender, receiver, weights())
        if fault == "staging":
            assert isinstance(sent, StagingError)
            assert isinstance(got, PeerFailedError)
            assert "Cannot allocate" in got.reason
        else:
            assert isinstance(got, LimitExceededError)
            assert isinstance(sent, PeerFailedError)
        assert_same(await moved(sender, receiver, weights()), weights())


async def test_a_first_word_that_fails_is_known_to_both_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer may have heard it, and may wait for the next one."""
    send = RankChannel.send

    def fail(channel: RankChannel, *arguments: Any) -> None:
        send(channel, *arguments)
        raise ProcessGroupError("on purpose", rank=channel.rank)

    async with transports() as (sender, receiver):
        sending = asyncio.create_task(sender.send_checkpoint([1], 1, weights()))
        async with asyncio.timeout(PROMPT):
            with monkeypatch.context() as patched:
                patched.setattr(RankChannel, "send", fail)
                with pytest.raises(ProcessGroupError):
                    await receiver.recv_checkpoint(0, "", 1)
            with pytest.raises(ProcessGroupError):
                await sending
