"""Events reach hooks and the log, progress its callback; neither disturbs a thing."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest

from aiockpt.events import Meter, Progress, TransferEvent, add_hook, emit

pytestmark = pytest.mark.torch_free


@pytest.fixture
def heard() -> Iterator[list[TransferEvent]]:
    """Collect every event of the test."""
    events: list[TransferEvent] = []
    remove = add_hook(events.append)
    yield events
    remove()


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (TransferEvent(stop="recv"), "recv"),
        (TransferEvent(stop="drop", detail="gone"), "drop: gone"),
        (
            TransferEvent(
                stop="recv",
                step=0,
                peer="http://h:1",
                nbytes=3_000_000_000,
                reused=5,
                seconds=1.5,
                medium="shared memory",
                detail="ok",
            ),
            (
                "recv step=0 peer=http://h:1 bytes=3000000000 reused=5 seconds=1.500 "
                "medium='shared memory' GB/s=2.00: ok"
            ),
        ),
    ],
    ids=["least", "detail", "all"],
)
def test_an_event_is_one_line_of_the_log(
    caplog: pytest.LogCaptureFixture, event: TransferEvent, line: str
) -> None:
    """At its level, with what is known of it."""
    caplog.set_level(logging.DEBUG, "aiockpt")
    emit(event)
    assert str(event) == line
    assert caplog.record_tuples == [("aiockpt", logging.DEBUG, line)]


def test_a_hook_hears_every_event_until_it_is_removed(
    heard: list[TransferEvent],
) -> None:
    """Whatever the level; removing it twice is fine."""
    more: list[TransferEvent] = []
    remove = add_hook(more.append)
    first = TransferEvent(stop="stage")
    emit(first)
    remove()
    remove()
    second = TransferEvent(stop="serve", level=logging.INFO)
    emit(second)
    assert (heard, more) == ([first, second], [first])


def test_a_hook_may_remove_itself(heard: list[TransferEvent]) -> None:
    """The hooks behind it still hear of the event."""
    once: list[object] = []
    remove = add_hook(lambda event: once.append(remove()))
    after: list[TransferEvent] = []
    remove_after = add_hook(after.append)
    for _ in range(2):
        emit(TransferEvent(stop="stage"))
    remove_after()
    assert (len(once), len(after), len(heard)) == (1, 2, 2)


@pytest.mark.allow_error_logs
def test_a_hook_that_raises_disturbs_nothing(
    heard: list[TransferEvent], caplog: pytest.LogCaptureFixture
) -> None:
    """The others hear of the event, and the log of the error."""

    def broken(event: TransferEvent) -> None:
        raise ValueError("mine")

    removes = [add_hook(broken), add_hook(heard.append)]
    emit(TransferEvent(stop="stage"))
    for remove in removes:
        remove()
    assert len(heard) == 2
    assert "mine" in str(caplog.records[-1].exc_info)


def test_a_meter_adds_up() -> None:
    """Totals may grow; what was there already counts as done, but not for the rate."""
    told: list[Progress] = []
    meter = Meter(told.append)
    meter.at("allocate")
    meter.expect(10**9, 4)
    meter.expect(90, 1)
    meter.reuse(10**9, 1)
    meter.at("fetch_chunk")
    time.sleep(0.02)
    meter.add(40, 2)
    meter.add(50, 2)
    assert [each.stop for each in told] == ["allocate"] * 2 + ["fetch_chunk"] * 3
    assert told[0] == Progress(stop="allocate")
    last = told[-1]
    assert last.bytes_done == last.bytes_total == 10**9 + 90
    assert last.bytes_reused == 10**9
    assert (last.chunks_done, last.chunks_total) == (5, 5)
    assert told[1].rate == 0
    assert 0.1 < last.rate <= 90 / 0.02, "since the first chunk was requested"


@pytest.mark.allow_error_logs
def test_a_progress_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """It is somebody else's code, and must not end a transfer."""

    def broken(progress: Progress) -> None:
        raise ValueError("mine")

    Meter(broken).at("load")
    assert "mine" in str(caplog.records[-1].exc_info)
    Meter(None).add(1, 1)
