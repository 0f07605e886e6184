"""Cancels anywhere in the reader-writer lock."""

from __future__ import annotations

import asyncio

import pytest
import uvloop
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.support.lockmodel import LockMachine
from tests.support.matrix import Record
from tests.support.proofs import proves

pytestmark = [pytest.mark.torch_free, pytest.mark.timeout(900)]


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
    count = record.pick(40, 1_000)
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=count, stateful_step_count=40, deadline=None),
    )
    record.ran(count)
