"""Admit so many response bodies at a time; who reads slowly makes way for the others.

A request that finds no place free waits. The hosts that wait take turns, and the
requests of one host are served in order of arrival. While requests have waited for a
second, or were turned away, and few bodies end by themselves, some are ended: the
slowest ones of the hosts that have more than their share of the places. A body that
would soon end by itself is left alone, once and until then: when many honest receivers
share a line, all of them are slow, and to end some would help nobody. A host that has
its share can only take the place of a body of its own. So a host loses no place that is
within its share, and behind a reverse proxy, where all receivers are one host, the
slowest body of all ends.

A receiver whose body was ended asks again, from the last byte that came.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from typing import Final, Protocol, TypeAlias

from aiockpt.http.problems import PeerBusy

_MOST_WAITING: Final = 4096  # requests,
_MOST_OF_HOST: Final = 256  # and of one host
_LOOK: Final = 1.0  # seconds between two looks, while requests wait
_TURN: Final = 3.0  # seconds that a body has in any case,
_SOON: Final = 20.0  # and once again, if it will end within so many seconds
_PART: Final = 16  # one in so many places becomes free from one look to the next
_RETRY_AFTER: Final = 1.0  # seconds
_PER_ROUND: Final = 16  # requests that begin in one round of the loop

_Waiter: TypeAlias = "asyncio.Future[None]"


class _Body(Protocol):
    @property
    def acknowledged(self) -> int:
        """How many bytes have arrived."""

    @property
    def left(self) -> int:
        """How many bytes have not been sent."""

    def interrupt(self) -> None:
        """End it soon, so that the receiver asks again."""


@dataclass(slots=True, eq=False)
class _AdmittedBody:
    """A place that a body has, and the pace at which its bytes arrived lately.

    ``due`` is when it is to have ended; it was promised by the pace, which may fall.
    """

    host: str
    body: _Body
    began: float
    looked: float
    arrived: int = 0
    rate: float = 0.0
    due: float = inf
    is_ended: bool = False

    def is_long(self, now: float) -> bool:
        """Return whether it has had its turn, and will go on for long."""
        ends_soon = self.body.left <= self.rate * _SOON and now < self.due
        return now - self.began >= _TURN and not ends_soon

    def look(self, now: float) -> None:
        """Measure the pace since the last look."""
        seconds, arrived = now - self.looked, self.body.acknowledged
        if seconds > 0:
            self.rate = (arrived - self.arrived) / seconds
            self.looked, self.arrived = now, arrived
        if self.body.left <= self.rate * _SOON:
            self.due = min(self.due, now + _SOON)


class Admission:
    """The places for bodies.

    Args:
        most: How many there are.
    """

    def __init__(self, most: int) -> None:
        self._most = self._free = most
        self._places: dict[_AdmittedBody, None] = {}
        self._held = Counter[str]()  # by host
        # The host whose turn it is comes first.
        self._queues = OrderedDict[str, OrderedDict[_Waiter, float]]()
        self._refused = Counter[str]()  # by host, since the last look
        self._freed = 0  # places, by bodies that ended by themselves since then
        self._timer: asyncio.TimerHandle | None = None
        self.waiting = 0

    @asynccontextmanager
    async def take(self, host: str, body: _Body, *, wait: float) -> AsyncIterator[None]:
        """Hold a place during the block, which ends soon if ``body`` is interrupted.

        Args:
            host: Who asks, as `network_of` names it.
            body: What it asks for.
            wait: Seconds for which it waits.

        Raises:
            PeerBusy: no place was free in time, or too many requests wait.
        """
        await self._enter(host, wait)
        now = asyncio.get_running_loop().time()
        place = _AdmittedBody(host, body, now, now)
        self._places[place] = None
        self._held[host] += 1
        try:
            yield
        finally:
            del self._places[place]
            self._held[host] -= 1
            if not self._held[host]:
                del self._held[host]
            self._freed += not place.is_ended
            self._put_back()

    # ------------------------------------------------------------------ waiting

    async def _enter(self, host: str, wait: float) -> None:
        if self._free:
            self._free -= 1
            return
        ahead = len(self._queues.get(host, ()))
        if wait <= 0 or ahead >= _MOST_OF_HOST or self.waiting >= _MOST_WAITING:
            raise self._refusal(host)
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._queues.setdefault(host, OrderedDict())[waiter] = loop.time()
        self.waiting += 1
        self._look_later()
        try:
            async with asyncio.timeout(wait):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():
                self._put_back()  # it was let in, and does not come
            else:
                self._leave(host, waiter)
            if isinstance(error, TimeoutError):
                raise self._refusal(host) from None
            raise

    def _leave(self, host: str, waiter: _Waiter) -> None:
        queue = self._queues.get(host)
        if queue is not None and waiter in queue:
            del queue[waiter]
            self.waiting -= 1
            if not queue:
                del self._queues[host]

    def _put_back(self) -> None:
        """Give a place to the request whose turn it is."""
        while self._queues:
            host, queue = next(iter(self._queues.items()))
            self._queues.move_to_end(host)
            waiter = next(iter(queue))
            self._leave(host, waiter)
            if not waiter.done():  # its client may have left
                waiter.set_result(None)
                return
        self._free += 1

    def _refusal(self, host: str) -> PeerBusy:
        self._refused[host] += 1
        self._look_later()
        return PeerBusy(retry_after=_RETRY_AFTER)

    # ------------------------------------------------------- ending the slowest

    def _look_later(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_LOOK, self._look)

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        short, self._refused = self._refused, Counter()
        for host, queue in self._queues.items():
            short[host] += sum(now - since >= _LOOK / 2 for since in queue.values())
        short = +short  # without those that lack nothing
        for place in self._places:
            place.look(now)
        count = max(self._most // _PART, 1) - self._freed
        self._freed = 0
        if not self._free and short:
            self._end_slowest(short, count, now)
        if short or self.waiting:
            self._look_later()

    def _end_slowest(self, short: Counter[str], count: int, now: float) -> None:
        """End up to ``count`` bodies, for hosts that are short of places."""
        share = self._most / len({*self._held, *short})
        held = self._held.copy()
        slowest = sorted(
            (each for each in self._places if each.is_long(now)),
            key=lambda each: each.rate,
        )
        # Hosts that have little are helped first; each one gets one at a time.
        turns = deque(sorted(short, key=held.__getitem__))
        while turns and count > 0:
            host = turns.popleft()
            is_owed = held[host] < share
            ended = next(
                (
                    each
                    for each in slowest
                    if (held[each.host] > share if is_owed else each.host == host)
                ),
                None,
            )
            if ended is None:
                continue
            slowest.remove(ended)
            ended.is_ended = True
            ended.body.interrupt()
            held[ended.host] -= 1
            held[host] += 1
            short[host] -= 1
            count -= 1
            if short[host]:
                turns.append(host)


class Rounds:
    """Spreads requests over the rounds of the event loop, in order of arrival.

    Thousands of requests can arrive in one round. Each costs a fraction of a
    millisecond, and everything else on the loop would wait for the sum.
    """

    def __init__(self) -> None:
        self._begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def begin(self) -> None:
        """Return in this round if it has room, or else in a later one."""
        loop = asyncio.get_running_loop()
        if not self._begun:
            loop.call_soon(self._next, loop)
        if self._begun < _PER_ROUND:
            self._begun += 1
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._begun = 0
        while self._waiting and self._begun < _PER_ROUND:
            waiter = self._waiting.popleft()
            if not waiter.done():  # its client may have left
                waiter.set_result(None)
                self._begun += 1
        if self._begun:
            loop.call_soon(self._next, loop)
