"""Events reach hooks and the log, progress its callback; neither disturbs a thing."""

from __future__ import annotations

import logging

import pytest

from aiockpt import Progress, TransferEvent, add_hook
from aiockpt.events import LogLimit, Meter, emit

pytestmark = pytest.mark.torch_free

EVERYTHING = TransferEvent(
    stop="recv", step=0, peer="http://h:1", nbytes=3_000_000_000, reused=5,
    seconds=1.5, medium="shared memory", detail="ok",
)  # fmt: skip
LINES = {
    "recv": TransferEvent(stop="recv"),
    "drop: gone": TransferEvent(stop="drop", detail="gone"),
    "recv step=0 peer=http://h:1 bytes=3000000000 reused=5 seconds=1.500 "
    "medium='shared memory' GB/s=2.00: ok": EVERYTHING,
}


def test_an_event_is_one_line_of_the_log(caplog) -> None:
    """The line has the event's level and its known facts."""
    caplog.set_level(logging.DEBUG, "aiockpt")
    for line, event in LINES.items():
        emit(event)
        assert str(event) == line
        assert caplog.record_tuples.pop() == ("aiockpt", logging.DEBUG, line)
        caplog.clear()


@pytest.mark.allow_error_logs
def test_a_hook_hears_every_event_until_it_is_removed(caplog) -> None:
    """One that raises is logged; one that removes itself ends; others hear on."""
    once: list[object] = []
    heard: list[TransferEvent] = []

    def broken(event: TransferEvent) -> None:
        raise ValueError("mine")

    removes = [add_hook(broken), add_hook(lambda _: once.append(removes[1]()))]
    removes.append(add_hook(heard.append))
    first = TransferEvent(stop="stage")
    second = TransferEvent(stop="serve", level=logging.INFO)
    for event in (first, second):
        emit(event)
    emit(first)
    heard.pop()
    for remove in removes * 2:
        remove()
    emit(first)
    assert (len(once), heard) == (1, [first, second])
    (record,) = caplog.records  # of three errors within a minute
    assert "mine" in str(record.exc_info)


def test_a_meter_adds_up(monkeypatch) -> None:
    """Totals may grow; what was there already counts as done, but not for the rate."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    told: list[Progress] = []
    meter = Meter(told.append)
    meter.at("allocate")
    meter.expect(10**9, 4)
    meter.expect(90, 1)
    meter.reuse(10**9, 1)
    now += 60
    meter.at("fetch_chunk")
    now += 2
    meter.add(40, 2)
    meter.add(50, 2)
    assert [each.stop for each in told] == ["allocate"] * 2 + ["fetch_chunk"] * 3
    assert told[0] == Progress(stop="allocate")
    last = told[-1]
    assert last.bytes_done == last.bytes_total == 10**9 + 90
    assert last.bytes_reused == 10**9
    assert (last.chunks_done, last.chunks_total) == (5, 5)
    assert told[1].rate == 0
    assert last.rate == 90 / 2, "since the first chunk was requested"


@pytest.mark.allow_error_logs
def test_a_progress_that_raises_is_logged(caplog) -> None:
    """It is somebody else's code, and must not end a transfer."""

    def broken(progress: Progress) -> None:
        raise ValueError("mine")

    meter = Meter(broken)
    for chunk in range(1000):
        meter.add(chunk, 1)
    (record,) = caplog.records
    assert "mine" in str(record.exc_info)
    Meter(None).add(1, 1)


def test_one_record_of_a_kind_is_logged_a_minute() -> None:
    """Whoever invents kinds takes no memory by it."""
    now = 1e6
    limit = LogLimit(lambda: now)
    assert [limit.passes(kind) for kind in ("a", "b", "a", None)] == [1, 1, 0, 1]
    now += 59
    assert not limit.passes("a")
    now += 2
    assert [limit.passes("a") for _ in range(3)] == [1, 0, 0]
    for kind in range(1000):
        assert limit.passes(kind)
    assert limit.passes("a"), "it is forgotten"
