"""Tasks of one call: what they return and raise, and threads that share many items."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import pytest

from aiockpt.runtime import tasks as _tasks
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.tasks import Over, beside, map_in_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.every_loop,
    pytest.mark.torch_free,
]

LONG = 30.0  # a thread that nobody releases fails its test instead of hanging it


@pytest.fixture
def bridge() -> Iterator[Bridge]:
    """Give a bridge with two threads."""
    bridge = Bridge(threads=2, name="sweeping")
    yield bridge
    bridge.close()


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """End each turn with its first item."""
    monkeypatch.setattr(_tasks, "TURN_S", 0.0)


@pytest.fixture
def long_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """End no turn but for want of items."""
    monkeypatch.setattr(_tasks, "TURN_S", LONG)


def ignore(*_: object) -> None:
    """Listen to nothing."""


def until(over: Over) -> None:
    """Return when that is so; fail if it takes too long."""
    late = time.monotonic() + LONG
    while not over():
        assert time.monotonic() < late
        time.sleep(0.001)


class Reports:
    """What the loop was told, and that it was the loop's thread that was told."""

    def __init__(self) -> None:
        self.found: dict[int, int] = {}
        self._thread = threading.get_ident()

    def __call__(self, item: int, result: int) -> None:
        """Note the result of an item."""
        assert threading.get_ident() == self._thread
        assert item not in self.found, "reported twice"
        self.found[item] = result


class TestResults:
    """Every item has its one call, and its one report."""

    @pytest.mark.parametrize("turn", [0.0, 0.001, LONG])
    @pytest.mark.parametrize("count", [0, 1, 2, 1000])
    async def test_all_are_reported_before_it_returns(
        self,
        bridge: Bridge,
        monkeypatch: pytest.MonkeyPatch,
        turn: float,
        count: int,
    ) -> None:
        """All items of a turn are reported, however many it has."""
        monkeypatch.setattr(_tasks, "TURN_S", turn)
        reports = Reports()
        await map_in_threads(bridge, 2, lambda item, _: 2 * item, range(count), reports)
        assert reports.found == {item: 2 * item for item in range(count)}

    @pytest.mark.usefixtures("short_turns")
    async def test_what_is_done_is_reported_while_the_rest_goes_on(
        self, bridge: Bridge
    ) -> None:
        """The items are reported after each turn."""
        heard = threading.Event()

        def work(item: int, _: Over) -> None:
            assert not item or heard.wait(LONG)

        def report(item: int, _: None) -> None:
            if not item:
                heard.set()

        await map_in_threads(bridge, 1, work, range(2), report)


class TestTurns:
    """The threads are shared by all work of the bridge."""

    @pytest.mark.usefixtures("long_turns")
    async def test_who_waits_for_a_thread_has_it_after_an_item(self) -> None:
        """The other caller waits for one item, not for the turn."""
        bridge = Bridge(threads=1, name="sweeping")
        begun, called = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def work(item: int, _: Over) -> None:
            if item:
                assert called.is_set()
            else:
                loop.call_soon_threadsafe(begun.set)
                until(lambda: bridge.statistics().waiting > 0)

        async def call() -> None:
            await begun.wait()
            await bridge.run(called.set)

        try:
            async with asyncio.timeout(LONG), asyncio.TaskGroup() as tasks:
                tasks.create_task(call())
                tasks.create_task(map_in_threads(bridge, 1, work, range(10), ignore))
        finally:
            bridge.close()


class TestEnds:
    """A failure, or a cancel, ends the rest."""

    @pytest.mark.usefixtures("long_turns")
    async def test_a_failure_comes_out_alone_and_ends_the_rest(
        self, bridge: Bridge
    ) -> None:
        """What another thread has begun is over then, and ends before that."""
        begun: list[int] = []
        both = threading.Barrier(2, timeout=LONG)

        def work(item: int, over: Over) -> None:
            begun.append(item)
            both.wait()
            if not item:
                raise OSError("no such chunk")
            until(over)

        with pytest.raises(OSError, match="no such chunk"):
            await map_in_threads(bridge, 2, work, range(100), ignore)
        assert sorted(begun) == [0, 1]
        assert bridge.statistics().running == 0

    @pytest.mark.usefixtures("long_turns")
    async def test_a_cancel_waits_for_what_is_under_way(self, bridge: Bridge) -> None:
        """It is over at once, and nothing begins or is reported afterwards."""
        begun, go = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()
        calls, ended = 0, 0
        reports = Reports()

        def work(item: int, over: Over) -> int:
            nonlocal calls, ended
            calls += 1
            assert not over()
            if calls == 2:
                loop.call_soon_threadsafe(begun.set)
            until(over)
            assert go.wait(LONG)
            ended += 1
            return item

        task = asyncio.create_task(map_in_threads(bridge, 2, work, range(100), reports))
        async with asyncio.timeout(LONG):
            await begun.wait()
        task.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (calls, ended, reports.found) == (2, 2, {})


async def _wait() -> None:
    await asyncio.sleep(LONG)


class TestTogether:
    """Jobs that run at once in one call."""

    async def test_a_failure_of_the_block_ends_what_runs_beside(self) -> None:
        """The block and what runs beside it have ended then."""
        ended: list[bool] = []

        async def job() -> None:
            try:
                await _wait()
            finally:
                ended.append(True)

        async def block() -> None:
            async with beside(job):
                await asyncio.sleep(0)
                raise KeyError

        with pytest.raises(KeyError):
            await block()
        assert ended == [True]
