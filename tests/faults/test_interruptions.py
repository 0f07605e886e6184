"""A cancel, and a failure, at every suspension point of every public coroutine."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt import AiockptError
from aiockpt.testing import Interruption, assert_same, interruptions
from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.transports import Transport, pair, receive, transport, weights

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(900)]

Call = Callable[[], Coroutine[Any, Any, Any]]

PLACES = ("process", "thread")


def state(fill: float = 1.0) -> dict[str, Any]:
    """Return several chunks."""
    return weights(fill, mib=0.5, count=3)


def on_purpose() -> OSError:
    """Return what every await may raise."""
    return OSError(5, "on purpose")


class Verbs:
    """Every public coroutine of an HTTPTransport that can be called again."""

    def __init__(self, sender: Transport, receiver: Transport) -> None:
        self.sender, self.receiver = sender, receiver

    def _receive(self, **options: Any) -> Coroutine[Any, Any, Any]:
        return receive(self.sender, self.receiver, **options)

    async def send(self) -> None:
        await self.sender.send_checkpoint([], 1, state())

    async def allow(self) -> None:
        await self.sender.allow_checkpoint(1)
        await self.sender.allow_checkpoint(2)

    async def disallow(self) -> None:
        await self.sender.disallow_checkpoint()

    async def recv(self) -> None:
        assert_same(await self._receive(), state())

    async def recv_into(self) -> None:
        into = state(0.0)
        await self._receive(into=into)
        assert_same(into, state())

    async def recv_direct(self) -> None:
        into = state(0.0)
        await self._receive(into=into, direct=True)
        assert_same(into, state())

    async def recv_select(self) -> None:
        assert_same(await self._receive(select=["w1"]), {"w1": state()["w1"]})

    async def steps(self) -> None:
        assert await anext(self.receiver.steps(self.sender.metadata())) == 1


VERBS = [name for name in vars(Verbs) if not name.startswith("_")]


def judged(struck: Interruption[Any], seen: Counter[str], record: Record) -> None:
    """Check how a call ended, and count it."""
    assert not struck.cancelled or struck.reached, str(struck)
    assert struck.error is None or isinstance(struck.error, AiockptError), str(struck)
    assert struck.reached or struck.returned, str(struck)
    seen["cancelled" if struck.cancelled else "other"] += 1
    record.ran(struck.reached)


async def offered(sender: Transport) -> None:
    """Offer step 1, whatever is offered."""
    await sender.send_checkpoint([], 1, state())


@proves("fault 25", "invariant 8")
@pytest.mark.parametrize("verb", VERBS)
async def test_a_cancel_anywhere_leaves_a_transport_usable(
    record: Record, verb: str
) -> None:
    """Cancelled, or finished; what comes next is what it would have been."""
    seen: Counter[str] = Counter()
    for _ in range(record.pick(1, 10)):
        async with pair() as (sender, receiver):
            await offered(sender)
            call = getattr(Verbs(sender, receiver), verb)
            async for struck in interruptions(call, every=record.pick(2, 1)):
                judged(struck, seen, record)
                assert struck.cancelled or struck.returned, str(struck)
                await offered(sender)
                if not record.exhaustive and struck.at % 4:
                    continue
                assert_same(await receive(sender, receiver), state())
    assert seen["cancelled"] or verb == "disallow"


@proves("fault 25")
async def test_a_cancelled_shutdown_goes_on(record: Record) -> None:
    """The shutdown leaves nothing, wherever it was cancelled."""
    seen: Counter[str] = Counter()
    peers: list[Transport] = []

    async def life() -> None:
        peers.append(transport())
        await offered(peers[-1])
        assert_same(await receive(peers[-1], peers[-1]), state())
        await peers[-1].shutdown()

    for _ in range(record.pick(1, 10)):
        async for struck in interruptions(life, every=record.pick(3, 1)):
            judged(struck, seen, record)
            await peers.pop().shutdown()
    assert seen["cancelled"]


@proves("fault 26")
@pytest.mark.parametrize("verb", VERBS)
async def test_a_failure_anywhere_is_a_typed_error(record: Record, verb: str) -> None:
    """A failed connection is replaced, and any other failure has a type."""
    seen: Counter[str] = Counter()
    for _ in range(record.pick(1, 3)):
        async with pair() as (sender, receiver):
            await offered(sender)
            call = getattr(Verbs(sender, receiver), verb)
            async for struck in interruptions(
                call, error=on_purpose, every=record.pick(2, 1)
            ):
                judged(struck, seen, record)
                await offered(sender)
                if not record.exhaustive and struck.at % 4:
                    continue
                assert_same(await receive(sender, receiver), state())


@asynccontextmanager
async def checkpointer(where: str) -> AsyncIterator[Any]:
    """Make one, and close it."""
    config = aiockpt.CheckpointerConfig(use_process=where == "process")
    async with aiockpt.make_async_checkpointer(config) as made:
        yield made


def still_there(place: Path, count: int) -> None:
    """Check every checkpoint that was made."""
    for number in range(count):
        path = place / f"step-{number}"
        if path.exists():
            with aiockpt.make_sync_checkpointer() as made:
                assert_same(made.load(path), state(number))


@proves("fault 25")
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("verb", ["save", "load"])
async def test_a_cancel_anywhere_leaves_a_checkpointer_usable(
    tmp_path: Path, record: Record, where: str, verb: str
) -> None:
    """A save is there wholly, or not at all; a load can be made again."""
    seen: Counter[str] = Counter()
    async with checkpointer(where) as made:
        count = await interrupted_saves(made, tmp_path, verb, seen, record)
        await (await made.save(state(), tmp_path / "last")).written()
        assert_same(await made.load(tmp_path / "last"), state())
    still_there(tmp_path, count)
    assert seen["cancelled"]


@proves("fault 26")
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("verb", ["save", "load"])
@pytest.mark.allow_error_logs  # of saves that fail and nobody waits for
async def test_a_failure_anywhere_is_a_checkpointers_typed_error(
    tmp_path: Path, record: Record, where: str, verb: str
) -> None:
    """The next one works."""
    seen: Counter[str] = Counter()
    made = aiockpt.make_async_checkpointer(
        aiockpt.CheckpointerConfig(use_process=where == "process")
    )
    try:
        count = await interrupted_saves(
            made, tmp_path, verb, seen, record, error=on_purpose
        )
        await (await made.save(state(), tmp_path / "last")).written()
        assert_same(await made.load(tmp_path / "last"), state())
    finally:
        failures = await made.close()
    assert all(isinstance(failure, AiockptError) for failure in failures)
    still_there(tmp_path, count)


async def interrupted_saves(
    made: Any,
    place: Path,
    verb: str,
    seen: Counter[str],
    record: Record,
    error: Callable[[], BaseException] | None = None,
) -> int:
    """Interrupt saves, or loads, everywhere; return how many there were."""
    count = 0

    async def save() -> None:
        nonlocal count
        count += 1
        path = place / f"step-{count - 1}"
        await (await made.save(state(count - 1), path)).written()

    async def load() -> None:
        try:
            assert_same(await made.load(place / "first"), state())
        except OSError as raised:  # what a reader of one's own raises is its own
            if error is None or str(raised) != str(error()):
                raise

    await (await made.save(state(), place / "first")).written()
    for _ in range(record.pick(1, 5)):
        async for struck in interruptions(
            save if verb == "save" else load, error=error
        ):
            judged(struck, seen, record)
    return count
