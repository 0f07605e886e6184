"""What is bound to an event loop, to a process, and to a deadline."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from aiockpt.errors import LocalProtocolError, TransferTimeoutError
from aiockpt.runtime.lifetime import Deadline, Lifetime
from aiockpt.transport import exact_step, seconds
from tests.support.transports import transport, weights

CALLS: dict[str, Any] = {
    "start": lambda used: used.start(),
    "send": lambda used: used.send_checkpoint([], 1, weights()),
    "allow": lambda used: used.allow_checkpoint(1),
    "disallow": lambda used: used.disallow_checkpoint(),
    "recv": lambda used: used.recv_checkpoint(0, used.metadata(), 1),
    "shutdown": lambda used: used.shutdown(),
}


def test_another_event_loop_is_refused() -> None:
    """Nobody would serve there, and what belongs to the first loop would break."""
    with asyncio.Runner() as first, asyncio.Runner() as second:
        used = transport()

        async def there(call: Any) -> None:
            with pytest.raises(LocalProtocolError, match="event loop"):
                await call(used)

        first.run(used.send_checkpoint([], 1, weights()))
        for call in CALLS.values():
            second.run(there(call))
        first.run(used.shutdown())


async def bound(made: Lifetime) -> None:
    """Use it."""
    made.bind()


def test_a_forked_child_is_told_that_it_is_one() -> None:
    """The error comes before it waits for threads that are not there."""
    made, reading = Lifetime("the transport"), os.pipe()
    with asyncio.Runner() as runner:
        runner.run(bound(made))
    if (child := os.fork()) == 0:
        try:
            with asyncio.Runner() as runner:
                runner.run(bound(made))
        except LocalProtocolError as error:
            os.write(reading[1], str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(reading[1])
    with open(reading[0]) as said:
        assert "this is a forked one: make one after the fork" in said.read()


@pytest.mark.asyncio
async def test_a_deadline_that_has_ended_keeps_nothing_of_its_call() -> None:
    """Threads that go on may keep the deadline, and must not keep a template by it."""

    class Template:
        """Something large."""

    known: list[weakref.ref[Template]] = []

    async def fail(deadline: Deadline) -> None:
        template = Template()
        known.append(weakref.ref(template))
        async with deadline:
            raise ZeroDivisionError

    deadline = Deadline(60, phase="here")
    with suppress(ZeroDivisionError):
        await asyncio.create_task(fail(deadline))
    await asyncio.sleep(0)  # the loop forgets the task
    gc.collect()
    assert known[0]() is None
    assert not deadline.expired
    deadline = Deadline(0.01, phase="here")
    with pytest.raises(TransferTimeoutError):
        async with deadline:
            await asyncio.Event().wait()
    assert deadline.expired


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [(0, 0.0), (1.5, 1.5), (math.inf, math.inf), (timedelta(minutes=1), 60.0)],
)
def test_seconds_or_a_timedelta(timeout: Any, expected: float) -> None:
    """A deadline is given in seconds or as a timedelta, as in torchft."""
    assert seconds(timeout) == expected
    assert type(seconds(timeout)) is float


@pytest.mark.parametrize("timeout", [-1, -0.1, math.nan, timedelta(seconds=-1)])
def test_another_deadline_is_refused(timeout: Any) -> None:
    """A nan would never pass, or at once."""
    with pytest.raises(ValueError, match="timeout must not be negative"):
        seconds(timeout)


class Whole:
    """An integer of another library."""

    def __index__(self) -> int:
        return 5


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 0), (2**63 - 1, 2**63 - 1), (True, 1), (Whole(), 5)]
)
def test_any_integer_is_a_step(step: object, expected: int) -> None:
    """Integers of other libraries become those of Python."""
    assert exact_step(step) == expected
    assert type(exact_step(step)) is int
