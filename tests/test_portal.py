"""The loop in a thread of its own, for callers who have none."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from aiockpt._portal import Portal
from aiockpt.errors import ClosedError, TransferTimeoutError, TransportError


async def nothing() -> None:
    """Close nothing."""


@pytest.fixture
def portal() -> Iterator[Portal]:
    """Open one, and end it."""
    made = Portal("the test", at_exit=nothing)
    yield made
    made.close(nothing, wait=5)


def call(portal: Portal, function, timeout: float = 5):
    """Call it from here."""
    return portal.call(function, timeout=timeout, stop="test")


def test_what_comes_of_a_coroutine_comes_out(portal: Portal) -> None:
    """Its result or its error, from another thread."""

    async def name() -> str:
        return threading.current_thread().name

    async def fail() -> None:
        raise ZeroDivisionError

    assert call(portal, name) == "aiockpt-the test"
    with pytest.raises(ZeroDivisionError):
        call(portal, fail)


def test_a_cancel_from_within_is_an_error_of_ours(portal: Portal) -> None:
    """A caller without a loop does not know asyncio's CancelledError."""

    async def cancel() -> None:
        raise asyncio.CancelledError

    with pytest.raises(TransportError, match="cancelled"):
        call(portal, cancel)


def test_closing_ends_what_is_under_way(portal: Portal) -> None:
    """The caller is told, and the last thing is done before."""
    done: list[str] = []
    started = threading.Event()

    async def sleep() -> None:
        started.set()
        await asyncio.sleep(60)

    async def last() -> None:
        done.append("last")

    def close() -> None:
        started.wait(5)
        portal.close(last, wait=5)

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(ClosedError):
        call(portal, sleep, 60)
    closer.join()
    assert done == ["last"]
    with pytest.raises(ClosedError):
        call(portal, nothing)


def test_a_last_thing_that_fails_is_logged(
    portal: Portal, allow_error_logs: list[object]
) -> None:
    """The thread ends all the same."""

    async def fail() -> None:
        raise ZeroDivisionError

    portal.close(fail, wait=5)
    assert len(allow_error_logs) == 1
    assert not portal._thread.is_alive()


def test_a_loop_that_hangs_does_not_hang_the_caller(
    portal: Portal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that does not keep to its time is left."""
    monkeypatch.setattr("aiockpt._portal._MARGIN", 0.1)
    free = threading.Event()

    async def hang() -> None:
        free.wait(10)

    started = time.monotonic()
    with pytest.raises(TransferTimeoutError, match=r"timed out .* in test"):
        call(portal, hang, 0.1)
    assert time.monotonic() - started < 5
    free.set()


def test_an_interrupted_caller_leaves_nothing_under_way(
    portal: Portal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the waiting thread cancels the coroutine."""
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def interrupt(*_: object) -> None:
        time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr("concurrent.futures.Future.result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        call(portal, wait)
    assert cancelled.wait(5)
