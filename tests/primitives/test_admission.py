"""Places for bodies: who comes next, and whose body ends while others wait."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aiockpt.http import admission as module
from aiockpt.http.admission import Admission
from aiockpt.http.problems import PeerBusy
from tests.support.proofs import proves

pytestmark = [pytest.mark.asyncio, pytest.mark.torch_free]

A, B, C = "10.0.0.1", "10.0.0.2", "2001:db8::/64"


class Body:
    """A body of so many bytes per look, which ends when it is told to."""

    def __init__(self, rate: int = 0, left: int = 1 << 40) -> None:
        self.rate, self.left, self._looks = rate, left, 0
        self.ended = asyncio.Event()

    @property
    def acknowledged(self) -> int:
        """How many bytes have arrived."""
        self._looks += 1
        return self.rate * self._looks

    def interrupt(self) -> None:
        """End the body."""
        self.ended.set()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let looks come soon, and bodies be old enough at once."""
    monkeypatch.setattr(module, "_LOOK_INTERVAL_S", 0.05)
    monkeypatch.setattr(module, "_TURN_S", 0.0)


@asynccontextmanager
async def holding(places: Admission, *bodies: tuple[str, Body]) -> AsyncIterator[None]:
    """Let bodies have places until they are ended, or the block is left."""
    inside = asyncio.Semaphore(0)

    async def hold(host: str, body: Body) -> None:
        async with places.take(host, body, wait=0):
            inside.release()
            await body.ended.wait()

    tasks = [asyncio.create_task(hold(*each)) for each in bodies]
    for _ in tasks:
        await inside.acquire()
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_hosts_take_turns() -> None:
    """One host's requests are served in order; others need not wait for all of them."""
    places, came = Admission(1), []

    async def come(host: str, name: str) -> None:
        async with places.take(host, Body(), wait=60):
            came.append(name)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group, holding(places, (A, Body())):
        for host, name in [(A, "a1"), (A, "a2"), (A, "a3"), (B, "b1"), (B, "b2")]:
            group.create_task(come(host, name))
        await asyncio.sleep(0)
        assert places.waiting == 5
    assert came == ["a1", "b1", "a2", "b2", "a3"]
    assert places.waiting == 0


@pytest.mark.usefixtures("quick")
@proves("threat D23")
async def test_nobody_is_ended_while_there_is_a_place() -> None:
    """No body is ended while there is a place, however slow it is."""
    places, slow = Admission(2), Body(0)
    async with holding(places, (A, slow)):
        for _ in range(4):
            async with places.take(B, Body(), wait=1):
                await asyncio.sleep(0.05)
        assert not slow.ended.is_set()


@pytest.mark.usefixtures("quick")
@proves("threat D23")
async def test_a_body_that_ends_soon_is_left_alone() -> None:
    """The slowest body goes on if it is nearly complete."""
    places, soon, long = Admission(2), Body(100, left=100), Body(1000)
    async with (
        asyncio.timeout(30),
        holding(places, (A, soon), (A, long)),
        places.take(A, Body(), wait=30),
    ):
        assert long.ended.is_set()
        assert not soon.ended.is_set()


@pytest.mark.usefixtures("quick")
@proves("threat D23")
async def test_a_body_is_spared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads ever more slowly always seems to be about to end."""
    monkeypatch.setattr(module, "_SOON_S", 0.2)
    places, fading = Admission(1), Body(1000, left=1)
    async with (
        asyncio.timeout(30),
        holding(places, (A, fading)),
        places.take(B, Body(), wait=30),
    ):
        assert fading.ended.is_set()


@pytest.mark.usefixtures("quick")
@proves("threat D23")
async def test_nobody_is_ended_while_places_become_free() -> None:
    """A crowd of honest receivers is served in turns."""
    places, slow = Admission(2), Body(0)

    async def come() -> None:
        async with places.take(B, Body(), wait=60):
            await asyncio.sleep(0.005)

    async with holding(places, (A, slow)):
        await asyncio.gather(*(come() for _ in range(100)))
        assert not slow.ended.is_set()


@pytest.mark.usefixtures("quick")
@proves("threat D23")
@pytest.mark.parametrize("host", [A, C])
async def test_a_host_keeps_its_share(host: str) -> None:
    """Whoever has more than that makes way, and a greedy host only for itself."""
    places, fair = Admission(4), Body(0)
    greedy = [Body(1000), Body(2000), Body(3000)]
    async with (
        asyncio.timeout(30),
        holding(places, (B, fair), *((A, body) for body in greedy)),
        places.take(host, Body(), wait=30),
    ):
        assert [body.ended.is_set() for body in greedy] == [True, False, False]
        assert not fair.ended.is_set()


@pytest.mark.usefixtures("quick")
@proves("threat D23")
async def test_who_is_turned_away_counts_as_one_who_waits() -> None:
    """A client that does not wait comes again."""
    places, slow = Admission(1), Body(0)
    async with holding(places, (A, slow)), asyncio.timeout(30):
        while not slow.ended.is_set():
            with pytest.raises(PeerBusy) as refused:
                async with places.take(B, Body(), wait=0):
                    pass
            assert refused.value.retry_after == 1
            await asyncio.sleep(0.01)


@proves("threat D23")
async def test_a_bounded_number_of_requests_waits() -> None:
    """One host leaves room for the others."""
    places = Admission(1)

    async def come(host: str) -> bool:
        try:
            async with places.take(host, Body(), wait=60):
                return True
        except PeerBusy:
            return False

    async with asyncio.TaskGroup() as group, holding(places, (A, Body())):
        many = [group.create_task(come(A)) for _ in range(260)]
        other = group.create_task(come(B))
        await asyncio.sleep(0)
    assert [task.result() for task in many].count(False) == 4
    assert other.result()


@pytest.mark.usefixtures("quick")
async def test_places_are_neither_lost_nor_doubled() -> None:
    """The count is right whoever is cancelled, ended or refused, at any time."""
    places, chance, inside = Admission(3), random.Random(5), 0

    async def come() -> None:
        nonlocal inside
        body = Body(chance.randrange(9))
        try:
            wait = chance.choice([0, 0.01, 5])
            async with places.take(chance.choice([A, B, C]), body, wait=wait):
                inside += 1
                try:
                    assert inside <= 3
                    async with asyncio.timeout(chance.uniform(0, 0.05)):
                        await body.ended.wait()
                finally:
                    inside -= 1
        except (PeerBusy, TimeoutError):
            pass

    tasks = []
    for _ in range(300):
        tasks.append(asyncio.create_task(come()))
        if chance.random() < 0.3:
            chance.choice(tasks).cancel()
        await asyncio.sleep(chance.choice([0, 0, 0.002]))
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [each for each in found if isinstance(each, Exception)]
    assert (inside, places.waiting) == (0, 0)
    async with holding(places, (A, Body()), (A, Body()), (A, Body())):
        with pytest.raises(PeerBusy):
            async with places.take(B, Body(), wait=0):
                pass
