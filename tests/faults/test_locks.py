"""Cancels anywhere in the reader-writer lock."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import uvloop
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.support.lockmodel import LockMachine, Storm
from tests.support.matrix import Record
from tests.support.proofs import proves

pytestmark = [pytest.mark.torch_free, pytest.mark.timeout(900)]


@proves("fault 24")
@pytest.mark.asyncio
async def test_no_schedule_of_cancels_strands_anybody(record: Record) -> None:
    """Seeded schedules of cancels and failures end with a free lock."""
    outcomes: Counter[str] = Counter()
    for seed in range(record.pick(1_500, 50_000)):
        storm = Storm(seed)
        await storm.rage()
        storm.check()
        outcomes["cancelled"] += sum(task.cancelled() for task in storm.tasks)
        outcomes["finished"] += sum(not task.cancelled() for task in storm.tasks)
        outcomes["evicted"] += storm.evicted
        record.ran()
    # The schedules are worth something: all of this happened often.
    assert min(outcomes.values()) > record.pick(200, 500), outcomes


@proves("fault 24")
@pytest.mark.parametrize(
    "new_loop",
    [
        pytest.param(asyncio.new_event_loop, id="asyncio"),
        pytest.param(uvloop.new_event_loop, id="uvloop", marks=pytest.mark.nightly),
    ],
)
def test_the_lock_follows_its_rules(record: Record, new_loop) -> None:
    """Any sequence of acquires, releases and cancels agrees with a model."""
    machine = type("Machine", (LockMachine,), {"new_loop": staticmethod(new_loop)})
    count = record.pick(25, 1_000)
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=count, stateful_step_count=40, deadline=None),
    )
    record.ran(count)
