"""The loop in a thread of its own, for callers who have none."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from aiockpt.errors import ClosedError, TransferTimeoutError, TransportError
from aiockpt.runtime.sync_facade import SyncFacade
from tests.support.proofs import proves


async def nothing() -> None:
    """Close nothing."""


@pytest.fixture
def facade() -> Iterator[SyncFacade]:
    """Open one, and end it."""
    made = SyncFacade("the test", at_exit=nothing)
    yield made
    made.close(nothing, wait=5)


def call(facade: SyncFacade, function, timeout: float = 5):
    """Call it from here."""
    return facade.call(function, timeout=timeout, phase="test")


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        (asyncio.CancelledError(), pytest.raises(TransportError, match="cancelled")),
        (TimeoutError("of a socket"), pytest.raises(TimeoutError, match="of a socket")),
    ],
    ids=["cancel", "timeout"],
)
def test_what_asyncio_raises_is_not_taken_for_the_calls_own(
    facade, inside, outside
) -> None:
    """A caller without a loop does not know asyncio's CancelledError."""

    async def fail() -> None:
        raise inside

    with outside:
        call(facade, fail)


def test_closing_ends_what_is_under_way(facade) -> None:
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
        facade.close(last, wait=5)

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(ClosedError):
        call(facade, sleep, 60)
    closer.join()
    assert done == ["last"]
    with pytest.raises(ClosedError):
        call(facade, nothing)


@proves("cell torchft.HTTPTransport.shutdown: error")
def test_a_last_thing_that_fails_is_logged(facade, allow_error_logs) -> None:
    """The thread ends although the last coroutine has failed."""

    async def fail() -> None:
        raise ZeroDivisionError

    facade.close(fail, wait=5)
    assert len(allow_error_logs) == 1
    assert not facade._thread.is_alive()


def test_a_loop_that_hangs_does_not_hang_the_caller(facade, monkeypatch) -> None:
    """A call that does not keep to its time is left."""
    monkeypatch.setattr("aiockpt.runtime.sync_facade._ABANDON_AFTER_S", 0.1)
    free = threading.Event()

    async def hang() -> None:
        free.wait(60)

    with pytest.raises(TransferTimeoutError, match=r"timed out .* in test"):
        call(facade, hang, 0.1)
    assert not free.is_set()
    free.set()


@proves("cell torchft.PGTransport, every call: cancel")
def test_an_interrupted_caller_leaves_nothing_under_way(facade, monkeypatch) -> None:
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
        call(facade, wait)
    assert cancelled.wait(5)


def test_an_error_does_not_keep_what_the_call_was_given(facade) -> None:
    """A state dict that could not be sent is gone with the error."""

    class Model:
        pass

    def fail_with(model: Model) -> None:
        async def fail() -> None:
            raise ZeroDivisionError(repr(model))

        call(facade, fail)

    model = Model()
    gone = weakref.ref(model)
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError) as caught:
            fail_with(model)
        del caught, model
        assert gone() is None
    finally:
        gc.enable()


def test_a_signal_s_handler_may_close_in_the_middle_of_a_call(
    facade, monkeypatch
) -> None:
    """It runs in the thread that calls, between any two of its steps."""
    schedule = asyncio.run_coroutine_threadsafe
    before = signal.signal(signal.SIGUSR1, lambda *_: facade.close(nothing, wait=0.2))

    def interrupted(*args: object) -> object:
        signal.raise_signal(signal.SIGUSR1)
        return schedule(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    try:
        with pytest.raises(ClosedError):
            call(facade, nothing)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("later", [False, True])
def test_a_loop_that_something_ends_is_closed(facade, later, allow_error_logs) -> None:
    """Calls say so at once, and closing is no error."""

    async def exit_() -> None:
        raise SystemExit

    async def end_loop() -> None:
        ended.append(asyncio.ensure_future(exit_()))
        await asyncio.sleep(60)

    ended: list[asyncio.Future[None]] = []
    with pytest.raises(ClosedError):
        call(facade, end_loop)
    assert isinstance(ended[0].exception(), SystemExit)
    if later:
        facade._thread.join()
    with pytest.raises(ClosedError):
        call(facade, nothing)
    facade.close(nothing, wait=5)
    assert not facade._thread.is_alive()
    assert len(allow_error_logs) == 1
