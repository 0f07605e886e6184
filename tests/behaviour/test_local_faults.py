"""What this host or its caller does wrong is not blamed on the peer, nor misnamed."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import NoReturn

import pytest

from aiockpt import Progress, TransferEvent, add_hook
from aiockpt.errors import RemoteProtocolError, StagingError
from aiockpt.testing import Answer, assert_same
from tests.support.faultpeers import TOKEN, noise, sender
from tests.support.proofs import proves
from tests.support.shortages import exhausted_fds
from tests.support.transports import (
    MIB,
    Events,
    pair,
    proxied,
    receive,
    through,
    transport,
    weights,
)

pytestmark = pytest.mark.asyncio


async def test_no_descriptor_is_left(events: Events) -> None:
    """The error names the limit and the remedy, and no attempt is repeated."""
    async with transport() as sender, transport(reconnect_timeout=20) as receiver:
        await sender.send_checkpoint([], 1, weights())
        with exhausted_fds(left=0), pytest.raises(StagingError) as caught:
            await receive(sender, receiver, timeout=20)
        assert_same(await receive(sender, receiver), weights())
    assert "ulimit -n" in str(caught.value)
    assert os.strerror(errno.EMFILE) in str(caught.value)
    assert not [each for each in events if each.stop == "retry"]


@proves("threat D5")
async def test_fewer_descriptors_are_fewer_connections(events: Events) -> None:
    """One connection suffices, and the others wait without a storm of attempts."""
    async with (
        sender(mib=32) as peer,
        transport(token=TOKEN, connections=8) as receiver,
    ):
        with exhausted_fds(left=2):
            got = await receiver.recv_checkpoint(0, peer.url, 1)
        assert_same(got, noise(32))
    assert len([each for each in events if each.stop == "retry"]) < 500


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Give what lets no thread start from now on, as the kernel would."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    return lambda: monkeypatch.setattr(threading, "_start_new_thread", refuse)


@pytest.mark.parametrize("verb", ["send", "recv"])
async def test_no_thread_can_be_started(
    verb: str, no_threads: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transport is not closed, and works again once there are threads."""
    async with pair() as (sender, receiver):
        if verb == "recv":
            await sender.send_checkpoint([], 1, weights())
        no_threads()
        calls = {
            "send": lambda: sender.send_checkpoint([], 1, weights()),
            "recv": lambda: receive(sender, receiver, into=weights(0.0)),
        }
        with pytest.raises(StagingError, match=r"thread.*ulimit -u"):
            await calls[verb]()
        monkeypatch.undo()
        await sender.send_checkpoint([], 1, weights())
        assert_same(await receive(sender, receiver), weights())


async def test_a_range_that_a_peer_denies_is_its_fault() -> None:
    """It has sent a manifest in which the range lies."""
    answer = b"HTTP/1.1 416 no\r\nContent-Length: 0\r\n\r\n"
    async with (
        pair(state=weights(), reconnect_timeout=0) as (sender, receiver),
        proxied(sender, otherwise=Answer(answer)) as proxy,
    ):
        with pytest.raises(RemoteProtocolError, match="range"):
            await receiver.recv_checkpoint(0, through(proxy, sender), 1, timeout=5)


class MineError(OSError):
    """An error of the caller's own, of a kind that networks and files raise."""


@pytest.mark.parametrize(
    "kind", [MineError, ValueError, ConnectionResetError, KeyError]
)
async def test_an_error_of_select_is_the_callers(kind: type[Exception]) -> None:
    """The receive raises it unchanged, and the transport stays usable."""
    error = kind("mine")

    def fail(path: str) -> NoReturn:
        raise error

    async with pair(state=weights()) as (sender, receiver):
        with pytest.raises(kind) as caught:
            await receive(sender, receiver, select=fail)
        assert caught.value is error
        assert sender.statistics().requests == 1
        assert_same(await receive(sender, receiver), weights())


@pytest.mark.allow_error_logs
async def test_an_error_of_progress_or_of_a_hook_breaks_no_connection() -> None:
    """It is logged: what watches a transfer does not end it."""

    def fail(_: Progress | TransferEvent) -> NoReturn:
        raise BrokenPipeError(errno.EPIPE, "mine")

    async with pair(state=weights(mib=4)) as (sender, receiver):
        remove = add_hook(fail)
        try:
            got = await receive(sender, receiver, progress=fail)
        finally:
            remove()
        assert_same(got, weights(mib=4))
        statistics = sender.statistics()
    assert statistics.bytes_sent < 5 * MIB
