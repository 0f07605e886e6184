"""The bridge to threads: results, cancellation, closing, and what it keeps alive."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import threading
import time
import traceback
import weakref
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING

import anyio
import pytest
import uvloop

from aiockpt.errors import ClosedError
from aiockpt.format.limits import (
    IS_CANCELLED,
    WorkCancelledError,
    raise_if_cancelled,
)
from aiockpt.runtime.bridge import (
    Bridge,
    BridgeStatistics,
    run_interruptibly,
    share_out,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.every_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOOPS = pytest.mark.parametrize(
    "new_loop",
    [asyncio.new_event_loop, uvloop.new_event_loop],
    ids=["asyncio", "uvloop"],
)
LONG = 30.0  # a thread that nobody releases fails its test instead of hanging it


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something holds, which a thread is about to bring about."""
    async with asyncio.timeout(LONG):
        while not condition():  # noqa: ASYNC110 - any condition, without an event
            await asyncio.sleep(0.001)


async def turns(count: int = 20) -> None:
    """Let the loop go round, so that all happens that needs no thread."""
    for _ in range(count):
        await asyncio.sleep(0)


def names() -> list[str]:
    """The names of the threads that the bridges of the tests have started."""
    return [t.name for t in threading.enumerate() if t.name.startswith("bridge")]


class Blocker:
    """A function that blocks its thread until it is released, then ends as told."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.result: object = "result"
        self.ended = False
        self._begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._go = threading.Event()

    def __call__(self) -> object:
        self._loop.call_soon_threadsafe(self._begun.set)
        assert self._go.wait(LONG)
        self.ended = True
        if self.error is not None:
            raise self.error
        return self.result

    async def begun(self) -> None:
        """Wait until a thread has taken the call; the loop stays live meanwhile."""
        async with asyncio.timeout(LONG):
            await self._begun.wait()

    def release(self) -> None:
        self._go.set()


@pytest.fixture
def bridge() -> Iterator[Bridge]:
    """Give a bridge with one thread."""
    bridge = Bridge(threads=1, name="bridge")
    yield bridge
    bridge.close()


async def start(bridge: Bridge, blocker: Blocker) -> asyncio.Task[object]:
    """Run ``blocker`` and wait until its thread has taken it."""
    task = asyncio.create_task(bridge.run(blocker))
    await blocker.begun()
    return task


class TroubleError(Exception):
    """What goes wrong in a thread."""


class Marker:
    """An object whose end can be seen."""


@pytest.mark.asyncio
class TestRun:
    """A function goes into a thread, and its result comes back."""

    async def test_a_function_runs_in_a_thread_with_the_context_of_the_caller(self):
        """The bridge starts as many threads as needed, with a copy of the context."""
        bridge = Bridge(threads=3, name="bridge")
        variable = ContextVar("variable", default="unset")
        variable.set("caller's")
        assert names() == []

        def swap(barrier: threading.Barrier) -> str:
            seen = variable.get()
            variable.set("thread's")
            barrier.wait()
            return f"{seen}, {threading.current_thread().name}"

        for count in (1, 3):
            meeting = threading.Barrier(count, timeout=LONG)
            calls = [bridge.run(swap, meeting) for _ in range(2 * count)]
            for result in await asyncio.gather(*calls):
                assert result.startswith("caller's, bridge")
            assert len(names()) <= count
        assert len(names()) == 3
        assert variable.get() == "caller's"
        bridge.close()
        bridge.close()
        assert names() == []
        with pytest.raises(ClosedError, match="bridge is closed"):
            await bridge.run(int)

    async def test_an_exception_arrives_with_its_traceback(self, bridge):
        """The same object, with the frames of the thread in its traceback."""
        error = KeyError("no such thing")

        def fail_deep_inside() -> None:
            raise error

        with pytest.raises(KeyError) as caught:
            await bridge.run(fail_deep_inside)
        assert caught.value is error
        frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        assert "fail_deep_inside" in frames
        assert await bridge.run(int) == 0


@pytest.mark.asyncio
class TestCancellation:
    """A cancelled call ends with its thread, and its cancel is raised."""

    async def test_repeated_cancels_are_absorbed(self, bridge):
        """The task ends when the thread has ended, after any number of cancels."""
        blocker = Blocker()
        task = await start(bridge, blocker)
        for i in range(5):
            task.cancel(f"cancel {i}")
            await turns(i)
            assert not task.done()
        blocker.release()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert blocker.ended
        assert task.cancelling() == 5

    @pytest.mark.parametrize("error", [None, OSError("in the thread")])
    async def test_a_cancel_in_the_moment_of_the_end_wins(self, bridge, error):
        """The thread has ended, the task has not gone on, and is cancelled."""
        blocker = Blocker(error)
        task = await start(bridge, blocker)
        blocker.release()
        while bridge.statistics().running:
            pass  # the loop gets no turn before the cancel
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as cancel:
            await task
        assert cancel.value.__cause__ is error

    async def test_an_error_behind_a_cancel_is_kept(self, bridge, caplog):
        """The cancel is raised from it, and it is logged for whoever looks."""
        caplog.set_level(logging.DEBUG, "aiockpt")
        error = OSError("in the thread")
        blocker = Blocker(error)
        task = await start(bridge, blocker)
        task.cancel()
        await turns()
        blocker.release()
        with pytest.raises(asyncio.CancelledError) as cancel:
            await task
        assert cancel.value.__cause__ is error
        assert "OSError: in the thread" in caplog.text

    async def test_a_queued_call_that_is_cancelled_is_never_made(self, bridge):
        """It ends at once, though every thread is busy."""
        first, second = Blocker(), Blocker()
        running = await start(bridge, first)
        queued = asyncio.create_task(bridge.run(second))
        await turns()
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued
        assert bridge.statistics() == BridgeStatistics(1, 1, 0, 0)
        first.release()
        await running
        assert await bridge.run(int) == 0  # the thread has passed the cancelled call
        assert not second.ended


class CountingTask(asyncio.Task):
    """A task that counts how often it was cancelled."""

    cancels = 0

    def cancel(self, msg: object | None = None) -> bool:
        self.cancels += 1
        return super().cancel(msg)


@pytest.mark.asyncio
class TestUnderAnyio:
    """Cancel scopes cancel level by level: again on every turn of the loop."""

    async def test_the_loop_sleeps_while_a_cancelled_scope_waits(self, bridge):
        """The scope does not spin until the thread has ended; then it is over."""
        blocker = Blocker()
        scope = anyio.CancelScope()

        async def call() -> object:
            with scope:
                await bridge.run(blocker)
            return "after the scope"

        task = CountingTask(call(), loop=asyncio.get_running_loop())
        await blocker.begun()
        scope.cancel()
        await turns(200)
        assert not task.done()
        assert task.cancels <= 3
        blocker.release()
        assert await task == "after the scope"
        assert blocker.ended
        assert scope.cancelled_caught

    async def test_a_cancel_behind_a_scopes_is_not_lost(self, bridge):
        """The scope swallows its own cancel, so the task's own one is raised."""
        blocker = Blocker()
        scope = anyio.CancelScope()

        async def call() -> None:
            with scope:
                await bridge.run(blocker)

        task = asyncio.create_task(call())
        await blocker.begun()
        scope.cancel()
        await turns()
        task.cancel("the task's own")
        await turns()
        blocker.release()
        with pytest.raises(asyncio.CancelledError, match="the task's own"):
            await task
        assert blocker.ended


@pytest.mark.asyncio
class TestClosing:
    """After close there is no thread, and no call is left waiting."""

    async def test_queued_calls_fail_and_running_ones_end(self, bridge):
        """Without ``wait``, `close` returns while a call still runs."""
        blocker = Blocker()
        running = await start(bridge, blocker)
        queued, both = (asyncio.create_task(bridge.run(int)) for _ in range(2))
        await turns()
        bridge.close(wait=False)
        both.cancel()  # a cancel is never lost
        with pytest.raises(ClosedError):
            await queued
        with pytest.raises(asyncio.CancelledError):
            await both
        assert not running.done()
        blocker.release()
        assert await running == "result"

    async def test_close_waits_for_a_thread_that_works(self):
        """What the thread does is done when close returns."""
        bridge, other = (Bridge(threads=1, name=f"bridge-{i}") for i in range(2))
        blocker = Blocker()
        running = await start(bridge, blocker)
        closing = asyncio.create_task(other.run(bridge.close))
        await turns()
        assert not closing.done()
        blocker.release()
        await closing
        assert blocker.ended
        assert await running == "result"
        other.close()


@pytest.mark.asyncio
class TestPost:
    """Work that nobody waits for, such as giving memory back."""

    @pytest.mark.parametrize("wait", [True, False])
    async def test_close_loses_no_posted_work(self, bridge, wait):
        """The threads do it before they end; afterwards a thread of its own does."""
        done: list[int] = []
        blocker = Blocker()
        running = await start(bridge, blocker)
        bridge.post(done.append, 1)
        if wait:
            blocker.release()
        bridge.close(wait=wait)
        blocker.release()
        await running
        await bridge.aclose(timeout=LONG)
        assert done == [1]
        threads: list[threading.Thread] = []
        bridge.post(lambda: threads.append(threading.current_thread()))
        await until(lambda: bool(threads))
        assert threads != [threading.current_thread()]

    async def test_a_failure_of_posted_work_is_logged(self, bridge, allow_error_logs):
        """Nobody else would hear of it; the thread goes on."""
        bridge.post(lambda: 1 / 0)
        assert await bridge.run(int) == 0
        bridge.close()
        bridge.post(lambda: 1 / 0)
        await until(lambda: len(allow_error_logs) == 2)
        kinds = [record.exc_info[0] for record in allow_error_logs]
        assert kinds == [ZeroDivisionError] * 2


@pytest.mark.asyncio
class TestMemory:
    """After the await the bridge refers to nothing that the caller owns."""

    @pytest.fixture(autouse=True)
    def without_the_collector(self) -> Iterator[None]:
        """A cycle would hold an arena until the collector comes by."""
        gc.disable()
        yield
        gc.enable()

    async def test_arguments_and_result_are_let_go(self, bridge):
        """Memory may be closed as soon as the call has returned."""
        for _ in range(100):
            argument, result = Marker(), Marker()
            alive = weakref.WeakSet([argument, result])
            await bridge.run(lambda argument, result: result, argument, result)
            del argument, result
            assert not alive

    async def test_an_error_lets_go_when_it_is_dropped(self, bridge):
        """The frames of the thread live as long as the exception, and no longer."""

        def fail(argument: Marker) -> None:
            raise TroubleError(argument.__class__)

        for _ in range(100):
            argument = Marker()
            alive = weakref.WeakSet([argument])
            try:
                await bridge.run(fail, argument)
            except TroubleError:
                del argument
                assert alive
            assert not alive

    @pytest.mark.parametrize("cancels", [1, 3])
    async def test_a_cancelled_call_lets_go(self, bridge, cancels):
        """The raised cancel holds neither the function nor its result."""
        blocker, result = Blocker(), Marker()
        alive = weakref.WeakSet([blocker, result])
        blocker.result = result
        task = await start(bridge, blocker)
        for _ in range(cancels):
            task.cancel()
            await turns()
        blocker.release()
        del blocker, result
        with pytest.raises(asyncio.CancelledError) as cancel:
            await task
        assert cancel.value.__traceback__ is not None
        assert not alive

    async def test_a_cancel_lets_go_of_itself(self, bridge):
        """What the caller's frames hold is free when the caller drops the cancel."""
        blocker = Blocker()

        async def call() -> None:
            argument = Marker()
            alive.add(argument)
            await bridge.run(lambda _: blocker(), argument)

        alive: weakref.WeakSet[Marker] = weakref.WeakSet()
        task = asyncio.create_task(call())
        await blocker.begun()
        for _ in range(3):
            task.cancel()
            await turns()
        blocker.release()
        await asyncio.wait([task])
        assert alive
        del task
        await turns()
        assert not alive


class TestLoops:
    """A bridge is bound to no loop."""

    @LOOPS
    def test_a_loop_that_closed_before_the_thread_ended_is_no_error(
        self, bridge, new_loop
    ):
        """Nobody is woken, nothing is logged, and what was queued is never called."""

        async def abandon() -> tuple[Blocker, Blocker]:
            running, queued = Blocker(), Blocker()
            calls = [bridge.run(running), bridge.run(queued)]
            for call in calls:
                call.send(None)
            await running.begun()
            for call in calls:
                call.close()
            return running, queued

        with asyncio.Runner(loop_factory=new_loop) as runner:
            running, queued = runner.run(abandon())
        running.release()
        with asyncio.Runner(loop_factory=new_loop) as runner:
            assert runner.run(bridge.run(int)) == 0  # the thread has passed both by
        assert running.ended
        assert not queued.ended


class TestAwaitedClosing:
    """``aclose``: the end without blocking the loop."""

    @LOOPS
    def test_posted_work_may_post(self, new_loop):
        """What gives one thing back may give back what was in it."""
        bridge = Bridge(threads=1, name="bridge-closing")
        done: list[str] = []

        def outer() -> None:
            time.sleep(0.005)
            bridge.post(done.append, "inner")

        async def close() -> None:
            for _ in range(5):
                bridge.post(outer)
            async with asyncio.timeout(5):
                await bridge.aclose(timeout=LONG)

        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(close())
        assert done == ["inner"] * 5

    @LOOPS
    def test_it_is_bounded(self, new_loop, caplog):
        """A thread that hangs is named and left; new and queued calls fail."""
        bridge = Bridge(threads=1, name="bridge-closing")

        async def close() -> None:
            running = Blocker()
            first = asyncio.create_task(bridge.run(running))
            queued = asyncio.create_task(bridge.run(int))
            await running.begun()
            await bridge.aclose(timeout=0.05)  # while the first call still runs
            for call in (queued, bridge.run(int)):
                with pytest.raises(ClosedError):
                    await call
            running.release()
            await first
            await bridge.aclose(timeout=LONG)

        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(close())
        assert "a thread still works" in caplog.text

    @LOOPS
    def test_refused_calls_leave_posted_work_alone(self, new_loop):
        """What gives memory back still runs in a thread."""
        bridge = Bridge(threads=1, name="bridge-closing")

        async def refuse() -> None:
            bridge.refuse()
            with pytest.raises(ClosedError):
                await bridge.run(int)
            done: list[int] = []
            bridge.post(lambda: done.append(threading.get_ident()))
            await bridge.aclose(timeout=LONG)
            assert done
            assert done != [threading.get_ident()]

        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(refuse())


@pytest.mark.parametrize("refused", [False, True])
def test_work_is_shared_out(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item is done once, also if the system refuses another thread."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    if refused:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    share_out(done.append, range(1000))
    assert sorted(done) == [*range(1000)]
    share_out(done.append, [])


def test_an_error_of_shared_work_comes_after_all_threads_have_ended() -> None:
    """Nothing works on when the caller has the error."""
    running: list[int] = []

    def fail(item: int) -> None:
        running.append(item)
        time.sleep(0.01)
        running.remove(item)
        if item == 3:
            raise ValueError(item)

    with pytest.raises(ValueError, match="3"):
        share_out(fail, range(100))
    assert not running


def test_an_interrupt_waits_for_shared_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """All items are done when the caller gets it."""
    join, interrupts = threading.Thread.join, [KeyboardInterrupt(), KeyboardInterrupt()]

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if interrupts:
            raise interrupts.pop()
        join(thread, timeout)

    done: list[int] = []

    def work(item: int) -> None:
        time.sleep(0.005)
        done.append(item)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        share_out(work, range(100))
    assert sorted(done) == [*range(100)]


class TestRunInterruptibly:
    """A wait that ends, although its call does not."""

    def test_its_result_and_its_error(self) -> None:
        """They are the call's own."""
        left = threading.Event()
        assert run_interruptibly("call", lambda: 3, left) == 3
        with pytest.raises(ZeroDivisionError):
            run_interruptibly("call", lambda: 1 // 0, left)
        assert not left.is_set()

    @pytest.mark.parametrize("ends", [True, False])
    def test_an_interrupt(self, *, ends: bool) -> None:
        """The call is told, and left behind if it does not end soon."""
        left, released = threading.Event(), threading.Event()
        before = threading.active_count()

        def call() -> None:
            signal.raise_signal(signal.SIGUSR1)
            while not released.wait(0.01):
                if ends:
                    raise_if_cancelled()

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        previous = signal.signal(signal.SIGUSR1, interrupt)
        began = time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt):
                run_interruptibly("call", call, left)
            assert left.is_set() is not ends
            with nullcontext() if ends else pytest.raises(WorkCancelledError):
                run_interruptibly("call", partial(time.sleep, 0.5), left)
            assert time.monotonic() - began < LONG
        finally:
            signal.signal(signal.SIGUSR1, previous)
            released.set()
        wait_until(lambda: threading.active_count() <= before, "the end of the threads")

    def test_a_cancellation_of_shared_work(self) -> None:
        """It reaches the threads that share the work."""
        left, released = threading.Event(), threading.Event()
        token = IS_CANCELLED.set(lambda: True)
        try:
            with pytest.raises(WorkCancelledError):
                share_out(
                    lambda _: run_interruptibly("call", released.wait, left), [1, 2]
                )
        finally:
            IS_CANCELLED.reset(token)
            released.set()
        assert left.is_set()
