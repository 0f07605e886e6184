"""The switch interval of the process while tensors are copied, read and written."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.runtime.switching import python_is_busy, switching_often
from tests.support.transports import pair, transport

PROGRAMS = 0.0041  # seconds; not the interpreter's own, and not exact in binary
SHORT = 0.0005


@pytest.fixture(autouse=True)
def _interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(PROGRAMS + 5e-7)  # it is rounded down
    yield
    sys.setswitchinterval(before + 5e-7)  # it is rounded down


def now() -> float:
    """Return the interval in whole microseconds."""
    return round(sys.getswitchinterval(), 6)


@contextmanager
def watched() -> Iterator[set[float]]:
    """Collect the intervals that another thread sees until the block ends."""
    seen, ended = set[float](), threading.Event()

    def watch() -> None:
        while not ended.is_set():
            seen.add(now())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def state() -> dict[str, torch.Tensor]:
    """Return 32 MiB of tensors."""
    return {str(number): torch.full((1 << 18,), 1.0 * number) for number in range(32)}


async def save_in_background(place: Path) -> None:
    """Save by another process."""
    async with aiockpt.make_async_checkpointer() as saver:
        handle = await saver.save(state(), place)
        await handle.written()


async def save_at_once(place: Path) -> None:
    """Save in this thread."""
    with aiockpt.make_sync_checkpointer() as saver:
        saver.save(state(), place)


async def send(_: Path) -> None:
    """Stage and publish."""
    async with transport() as sender:
        await sender.send_checkpoint(step=1, state_dict=state())


WRITES: dict[str, Callable[[Path], Coroutine[None, None, None]]] = {
    "background save": save_in_background,
    "save": save_at_once,
    "send": send,
}


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", WRITES)
async def test_saves_and_sends_shorten_it(verb: str, tmp_path: Path) -> None:
    """The interval is short until training may go on, and not longer."""
    seen = set[float]()
    for attempt in range(20):  # a busy host may not run the watching thread meanwhile
        with watched() as during:
            await WRITES[verb](tmp_path / str(attempt))
        assert now() == PROGRAMS
        seen |= during
        if SHORT in seen:
            break
    assert SHORT in seen


@pytest.mark.asyncio
async def test_loads_shorten_it(tmp_path: Path) -> None:
    """The interval is short while a load reads."""
    await save_at_once(tmp_path / "1")
    seen = set[float]()
    aiockpt.load(tmp_path / "1", on_bytes=lambda _: seen.add(now()))
    assert seen == {SHORT}
    assert now() == PROGRAMS


@pytest.mark.asyncio
async def test_failed_loads_restore_it(tmp_path: Path) -> None:
    """An exception of the caller ends the load, and the short interval."""

    def fail(_: int) -> None:
        raise ZeroDivisionError

    await save_at_once(tmp_path / "1")
    with pytest.raises(ZeroDivisionError):
        aiockpt.load(tmp_path / "1", on_bytes=fail)
    assert now() == PROGRAMS


async def receive_and_apply() -> tuple[set[float], set[float]]:
    """Return the intervals that were seen during a receive, and during its apply."""
    async with pair() as (sender, receiver):
        await sender.send_checkpoint(step=1, state_dict=state())
        with watched() as received:
            prepared = await receiver.prepare(sender.metadata(), 1, into=state())
        assert now() == PROGRAMS
        with watched() as applied:
            await prepared.apply_async()
        assert now() == PROGRAMS
    return received, applied


@pytest.mark.asyncio
async def test_receives_and_applies_shorten_it() -> None:
    """A receive and its apply shorten the interval, and restore it between.

    Both take milliseconds, in which a busy host may not run the watching thread at all.
    """
    while_received, while_applied = set[float](), set[float]()
    for _ in range(20):
        received, applied = await receive_and_apply()
        while_received |= received
        while_applied |= applied
        if SHORT in while_received & while_applied:
            break
    assert SHORT in while_received
    assert SHORT in while_applied


def test_it_stays_beside_no_python() -> None:
    """A busy host can make an idle interpreter look busy, but not each time."""
    assert not all(python_is_busy() for _ in range(200))
    assert now() == PROGRAMS


def test_the_last_of_overlapping_blocks_restores_it() -> None:
    """Saves, loads and transfers may overlap, and the last one restores it."""
    first, second = switching_often(), switching_often()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert now() == SHORT
    second.__exit__(None, None, None)
    assert now() == PROGRAMS


def test_an_interval_that_the_program_has_set_meanwhile_stays() -> None:
    """No block overwrites an interval that the program has set."""
    with switching_often():
        sys.setswitchinterval(0.002)
        with switching_often():
            assert now() == 0.002
    assert now() == 0.002


def test_a_shorter_interval_of_the_program_stays() -> None:
    """A block does not lengthen the program's shorter interval."""
    sys.setswitchinterval(0.0002)
    with switching_often():
        assert now() == 0.0002
    assert now() == 0.0002


def test_a_forked_child_has_the_interval_of_the_program() -> None:
    """No thread of the parent goes on there."""
    with switching_often():
        child = os.fork()
        if not child:
            os._exit(now() != PROGRAMS)
        _, status = os.waitpid(child, 0)
        assert now() == SHORT
    assert os.waitstatus_to_exitcode(status) == 0
