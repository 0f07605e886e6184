"""What a shelf lets be read before it is published, and until when."""

from __future__ import annotations

import asyncio

import pytest

from aiockpt._frontier import Frontier
from aiockpt.errors import (
    CheckpointChangedError,
    PeerFailedError,
    StepNotFoundError,
)
from aiockpt.http.failing import Failure
from aiockpt.http.published import Published
from aiockpt.http.shelf import Shelf
from aiockpt.http.unsealed import Unsealed
from serving import Memory

pytestmark = [pytest.mark.asyncio, pytest.mark.torch_free]


class Staged(Memory):
    """Memory that is filled, as far as its frontier says."""

    def __init__(self, step: int = 1) -> None:
        super().__init__(step=step)
        self.frontier = Frontier()


async def announced(shelf: Shelf, step: int = 1) -> tuple[Staged, Unsealed]:
    """Announce something; return it as its readers get it."""
    staged = Staged(step)
    shelf.announce(staged)
    found = await shelf.wait_for_early(step, wait=0)
    assert isinstance(found, Unsealed)
    return staged, found


async def read(shelf: Shelf, published: Published) -> None:
    """Read something for a moment."""
    async with shelf.reading(published, evict=lambda: None):
        pass


def failure(*, receivers: int = 0) -> Failure:
    """Return why something does not come."""
    return Failure.of(OSError("broken"), step=1, receivers=receivers)


async def test_what_is_announced_is_found_by_who_accepts_it_only() -> None:
    """Under its step, and under its tag."""
    shelf = Shelf()
    _, early = await announced(shelf)
    assert shelf.early.find(early.tag) is early
    assert shelf.early.find("unsealed-") is None
    with pytest.raises(StepNotFoundError):
        await shelf.wait_for(1, wait=0)
    with pytest.raises(StepNotFoundError):
        await shelf.wait_for_early(2, wait=0)
    assert repr(early) == "<Unsealed step=1 <Frontier 0>>"
    await shelf.close()


async def test_who_waits_is_told_of_an_announcement() -> None:
    """At once."""
    shelf = Shelf()
    waiting = asyncio.create_task(shelf.wait_for_early(1, wait=3600))
    await asyncio.sleep(0)
    await announced(shelf)
    assert isinstance(await waiting, Unsealed)
    await shelf.close()


async def test_it_is_there_as_far_as_it_is_staged() -> None:
    """Whoever waits for more is woken by the frontier."""
    shelf = Shelf()
    staged, early = await announced(shelf)
    staged.frontier.advance(10)
    assert (early.has(10), early.has(11)) == (True, False)
    assert not await early.wait_until(lambda: early.has(11), wait=0)
    waiting = asyncio.create_task(early.wait_until(lambda: early.has(11), wait=3600))
    await asyncio.sleep(0)
    staged.frontier.advance(11)
    assert await waiting
    await shelf.close()


async def test_a_publication_seals_it() -> None:
    """Both are the same memory then, and are there together."""
    shelf = Shelf()
    staged, early = await announced(shelf)
    sealed = Memory(step=1)
    await shelf.publish(sealed, grace=0)
    assert early.sealed is shelf.latest
    assert await shelf.wait_for_early(1, wait=0) is shelf.latest
    await read(shelf, early.published)
    assert (staged.references, sealed.references) == (1, 1)
    await shelf.retract(grace=0)
    assert (staged.references, sealed.references) == (0, 0)
    with pytest.raises(CheckpointChangedError):
        await read(shelf, early.published)
    with pytest.raises(StepNotFoundError):
        await early.wait_until(lambda: True, wait=0)


async def test_the_next_publication_takes_it_away() -> None:
    """And not the next announcement."""
    shelf = Shelf()
    staged, early = await announced(shelf)
    await shelf.publish(Memory(step=1), grace=0)
    other, later = await announced(shelf, 2)
    await read(shelf, early.published)
    assert shelf.early.find(early.tag) is early
    await shelf.publish(Memory(step=2), grace=0)
    assert (staged.references, other.references) == (0, 1)
    assert later.sealed is shelf.latest
    await shelf.close()
    assert other.references == 0


async def test_its_readers_finish_when_it_is_superseded() -> None:
    """Like those of any snapshot; a retraction waits for them."""
    shelf = Shelf()
    staged, early = await announced(shelf)
    inside, go = asyncio.Event(), asyncio.Event()

    async def reader() -> None:
        async with shelf.reading(early.published, evict=go.set):
            inside.set()
            await go.wait()

    reading = asyncio.create_task(reader())
    await inside.wait()
    assert shelf.statistics().readers == 1
    retracting = asyncio.create_task(shelf.retract(grace=3600))
    await asyncio.sleep(0)
    assert staged.references == 1
    go.set()
    await asyncio.gather(reading, retracting)
    assert staged.references == 0


async def test_a_failure_is_told_under_the_tag() -> None:
    """Until the next attempt; what is served stays."""
    shelf = Shelf()
    await shelf.publish(Memory(step=0), grace=0)
    staged, early = await announced(shelf)
    waiting = asyncio.create_task(early.wait_until(lambda: False, wait=3600))
    await asyncio.sleep(0)
    shelf.lose(failure())
    assert staged.references == 0
    with pytest.raises(PeerFailedError, match="broken"):
        await waiting
    with pytest.raises(PeerFailedError, match="broken"):
        await early.wait_until(lambda: True, wait=0)
    assert (await shelf.wait_for_early(0, wait=0)) is shelf.latest
    await announced(shelf)
    assert shelf.early.find(early.tag) is None
    await shelf.close()


async def test_who_reads_it_is_not_to_be_told_again() -> None:
    """A receiver of the next attempt may be early."""
    shelf = Shelf()
    _, early = await announced(shelf)
    early.receivers = 2
    told = failure(receivers=3)
    shelf.lose(told)
    assert told.left == 1
    shelf.lose(told)  # there is nothing any more
    assert told.left == 1
    await shelf.close()


async def test_a_withdrawal_takes_it_away() -> None:
    """And what is served."""
    shelf = Shelf()
    staged, early = await announced(shelf)
    waiting = asyncio.create_task(early.wait_until(lambda: False, wait=3600))
    await asyncio.sleep(0)
    await shelf.retract(grace=0)
    assert staged.references == 0
    assert shelf.early.pending() is None
    with pytest.raises(StepNotFoundError):
        await waiting
