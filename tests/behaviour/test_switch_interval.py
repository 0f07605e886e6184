"""The switch interval of the process while tensors are copied, read and written."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import aiockpt
from tests.support.transports import pair, transport

PROGRAMS = 0.0041  # seconds; not the interpreter's own, and not exact in binary
SHORT = 0.0005


@pytest.fixture(autouse=True)
def changes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Set another interval; return those that are set from now on."""
    before, change, found = (
        sys.getswitchinterval(),
        sys.setswitchinterval,
        list[float](),
    )

    def noted(seconds: float) -> None:
        found.append(seconds)
        change(seconds)

    change(PROGRAMS + 5e-7)  # it is rounded down
    monkeypatch.setattr(sys, "setswitchinterval", noted)
    yield found
    change(before + 5e-7)  # it is rounded down


def now() -> float:
    """Return the interval in whole microseconds."""
    return round(sys.getswitchinterval(), 6)


@contextmanager
def busy_python() -> Iterator[None]:
    """Have another thread compute in pure Python until the block ends."""
    ended = False

    def compute() -> None:
        while not ended:
            pass

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        ended = True
        thread.join()


def state() -> dict[str, torch.Tensor]:
    """Return 8 MiB of tensors."""
    return {str(number): torch.full((1 << 18,), 1.0 * number) for number in range(8)}


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
async def test_saves_and_sends_shorten_it(
    verb: str, tmp_path: Path, changes: list[float]
) -> None:
    """The interval is short until training may go on, and not longer."""
    await WRITES[verb](tmp_path / "1")
    assert SHORT in changes
    assert now() == PROGRAMS


@pytest.mark.asyncio
async def test_loads_shorten_it(tmp_path: Path) -> None:
    """The interval is short while a load reads, even if it fails."""
    await save_at_once(tmp_path / "1")
    seen = set[float]()
    aiockpt.load(tmp_path / "1", on_bytes=lambda _: seen.add(now()))
    assert seen == {SHORT}
    assert now() == PROGRAMS

    def fail(_: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        aiockpt.load(tmp_path / "1", on_bytes=fail)
    assert now() == PROGRAMS


@pytest.mark.asyncio
async def test_receives_and_applies_shorten_it(changes: list[float]) -> None:
    """A receive beside busy Python and its apply shorten it, and restore it between.

    The receive finds out whether Python is busy, in which it may err now and then.
    """
    seen = set[float]()
    async with pair() as (sender, receiver), asyncio.timeout(60):
        await sender.send_checkpoint(step=1, state_dict=state())
        while SHORT not in seen:
            with busy_python():
                prepared = await receiver.prepare(
                    sender.metadata(),
                    1,
                    into=state(),
                    progress=lambda _: seen.add(now()),
                )
            assert now() == PROGRAMS
        changes.clear()
        await prepared.apply_async()
        assert SHORT in changes
        assert now() == PROGRAMS
