"""sweep: threads that go from item to item, and what the loop hears of it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from aiockpt import _sweep
from aiockpt._bridge import Bridge
from aiockpt._inline import Inline
from aiockpt._sweep import sweep

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.asyncio, pytest.mark.torch_free]

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
    monkeypatch.setattr(_sweep, "_TURN", 0.0)


@pytest.fixture
def long_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """End no turn but for want of items."""
    monkeypatch.setattr(_sweep, "_TURN", LONG)


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
        """However many items a turn has."""
        monkeypatch.setattr(_sweep, "_TURN", turn)
        reports = Reports()
        await sweep(bridge, 2, lambda item: 2 * item, range(count), reports)
        assert reports.found == {item: 2 * item for item in range(count)}

    async def test_threads_work_at_once(self, bridge: Bridge) -> None:
        """So many as were asked for."""
        both = threading.Barrier(2, timeout=LONG)
        reports = Reports()
        await sweep(bridge, 2, lambda _: both.wait(), range(2), reports)
        assert sorted(reports.found.values()) == [0, 1]

    async def test_items_are_begun_in_their_order(self, bridge: Bridge) -> None:
        """Who reads behind them waits for the first ones first."""
        begun: list[int] = []
        await sweep(bridge, 1, begun.append, range(100), lambda *_: None)
        assert begun == [*range(100)]

    @pytest.mark.usefixtures("long_turns")
    async def test_it_needs_no_threads(self) -> None:
        """Where calls are made in place, the first worker makes all of them."""
        reports = Reports()
        await sweep(Inline(), 2, abs, [-1, -2], reports)
        assert reports.found == {-1: 1, -2: 2}

    @pytest.mark.parametrize("turns", ["short_turns", "long_turns"])
    async def test_what_is_done_is_reported_while_the_rest_goes_on(
        self, bridge: Bridge, request: pytest.FixtureRequest, turns: str
    ) -> None:
        """After each turn, or as soon as an item is there, if that is wanted."""
        request.getfixturevalue(turns)
        heard = threading.Event()

        def work(item: int) -> None:
            assert not item or heard.wait(LONG)

        def report(item: int, _: None) -> None:
            if not item:
                heard.set()

        at_once = turns == "long_turns"
        await sweep(bridge, 1, work, range(2), report, at_once=at_once)


class TestTurns:
    """Threads belong to everybody."""

    @pytest.mark.usefixtures("short_turns")
    async def test_others_get_their_calls_in_between(self) -> None:
        """A sweep that would not end without them."""
        bridge = Bridge(threads=1, name="sweeping")
        called = threading.Event()
        count = 0

        def work(_: int) -> None:
            nonlocal count
            count += 1
            assert count < 1000 or called.is_set()

        async def call() -> None:
            await bridge.run(called.set)

        try:
            async with asyncio.TaskGroup() as tasks:
                items = range(2000)
                tasks.create_task(sweep(bridge, 1, work, items, lambda *_: None))
                tasks.create_task(call())
        finally:
            bridge.close()
        assert count == 2000


class TestEnds:
    """A failure, or a cancel, ends the rest."""

    @pytest.mark.usefixtures("short_turns")
    async def test_a_failure_comes_out_alone_and_ends_the_rest(
        self, bridge: Bridge
    ) -> None:
        """After it, each other thread ends the turn that it is in."""
        begun: list[int] = []

        def work(item: int) -> None:
            begun.append(item)
            if item == 3:
                raise OSError("no such chunk")

        with pytest.raises(OSError, match="no such chunk"):
            await sweep(bridge, 2, work, range(10_000), lambda *_: None)
        assert len(begun) < 10_000
        assert bridge.statistics().running == 0

    @pytest.mark.usefixtures("short_turns")
    async def test_a_cancel_waits_for_what_is_under_way(self, bridge: Bridge) -> None:
        """And nothing begins or is reported afterwards."""
        begun, go = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()
        calls, ended = 0, 0
        reports = Reports()

        def work(item: int) -> int:
            nonlocal calls, ended
            calls += 1
            if calls == 2:
                loop.call_soon_threadsafe(begun.set)
            assert go.wait(LONG)
            ended += 1
            return item

        task = asyncio.create_task(sweep(bridge, 2, work, range(100), reports))
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

    async def test_a_failing_report_is_raised(self, bridge: Bridge) -> None:
        """It is the caller's own code."""

        def report(item: int, _: int) -> None:
            raise LookupError(item)

        with pytest.raises(LookupError):
            await sweep(bridge, 2, abs, range(10), report)
