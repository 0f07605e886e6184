"""Admit a number of response bodies at a time; the slowest ones make way for others.

A request that finds no free slot waits. The hosts that wait take turns, and the
requests of one host are served in order of arrival.

If requests have waited for a second, or were turned away, and few bodies have ended by
themselves, the server ends some bodies. These are the slowest ones of the hosts that
have more than an equal part of the slots. A host that has its part can only take the
slot of a body of its own. So behind a reverse proxy, where all receivers are one host,
the slowest body of all ends.

A body that would soon end by itself is left alone, once and until then. When many
honest receivers use one line, all of them are slow, and to end some would help nobody.
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

_MAX_WAITING: Final = 4096  # requests
_MAX_WAITING_OF_HOST: Final = 256  # requests
_LOOK_INTERVAL_S: Final = 1.0  # while requests wait
_TURN_S: Final = 3.0  # for which a body has its slot in any case
_SOON_S: Final = 20.0  # a body that ends within them is left alone, once
_SLOTS_PER_FREED: Final = 16  # one in so many becomes free at each look
_RETRY_AFTER_S: Final = 1.0
_BEGUN_PER_ROUND: Final = 16  # requests in one round of the loop

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
    """A slot that a body has, and how fast its bytes arrived lately.

    Attributes:
        host: Who asked for it.
        body: What is sent.
        began: When it got the slot, in loop time.
        looked: When it was looked at last.
        arrived: Bytes that had arrived by then.
        rate: Bytes per second before that.
        due: When it has to have ended, since its rate once promised that.
        is_ended: Whether it was ended for another one.
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
        """Return whether the body has had its turn, and will go on for long."""
        ends_soon = self.body.left <= self.rate * _SOON_S and now < self.due
        return now - self.began >= _TURN_S and not ends_soon

    def look(self, now: float) -> None:
        """Measure the rate since the last look."""
        seconds, arrived = now - self.looked, self.body.acknowledged
        if seconds > 0:
            self.rate = (arrived - self.arrived) / seconds
            self.looked, self.arrived = now, arrived
        if self.body.left <= self.rate * _SOON_S:
            self.due = min(self.due, now + _SOON_S)


class Admission:
    """The slots for bodies.

    Args:
        most: How many there are.
    """

    def __init__(self, most: int) -> None:
        self._most = self._free = most
        self._bodies: dict[_AdmittedBody, None] = {}
        # The host whose turn it is comes first.
        self._queues = OrderedDict[str, OrderedDict[_Waiter, float]]()
        self._refused = Counter[str]()  # by host, since the last look
        self._freed = 0  # slots, by bodies that ended by themselves since then
        self._timer: asyncio.TimerHandle | None = None
        self.waiting = 0

    @asynccontextmanager
    async def take(self, host: str, body: _Body, *, wait: float) -> AsyncIterator[None]:
        """Hold a slot during the block, which ends soon if ``body`` is interrupted.

        Args:
            host: Who asks, as `network_of` names it.
            body: What it asks for.
            wait: Seconds for which it waits.

        Raises:
            PeerBusy: no slot was free in time, or too many requests wait.
        """
        await self._enter(host, wait)
        now = asyncio.get_running_loop().time()
        slot = _AdmittedBody(host, body, now, now)
        self._bodies[slot] = None
        try:
            yield
        finally:
            del self._bodies[slot]
            self._freed += not slot.is_ended
            self._put_back()

    # ------------------------------------------------------------------ waiting

    async def _enter(self, host: str, wait: float) -> None:
        if self._free:
            self._free -= 1
            return
        ahead = len(self._queues.get(host, ()))
        if wait <= 0 or ahead >= _MAX_WAITING_OF_HOST or self.waiting >= _MAX_WAITING:
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
        """Give a slot to the request whose turn it is."""
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
        return PeerBusy(retry_after=_RETRY_AFTER_S)

    # ------------------------------------------------------- ending the slowest

    def _look_later(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_LOOK_INTERVAL_S, self._look)

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        short, self._refused = self._refused, Counter()
        for host, queue in self._queues.items():
            waited = (now - since for since in queue.values())
            short[host] += sum(each >= _LOOK_INTERVAL_S / 2 for each in waited)
        short = +short  # without those that lack nothing
        for slot in self._bodies:
            slot.look(now)
        count = max(self._most // _SLOTS_PER_FREED, 1) - self._freed
        self._freed = 0
        if not self._free and short:
            self._end_slowest(short, count, now)
        if short or self.waiting:
            self._look_later()

    def _end_slowest(self, short: Counter[str], count: int, now: float) -> None:
        """End up to ``count`` bodies, for hosts that are short of slots."""
        held = Counter(each.host for each in self._bodies)  # slots, by host
        part = self._most / len({*held, *short})
        slowest = sorted(
            (each for each in self._bodies if each.is_long(now)),
            key=lambda each: each.rate,
        )
        # Hosts that have little are helped first; each one gets one at a time.
        turns = deque(sorted(short, key=held.__getitem__))
        while turns and count > 0:
            host = turns.popleft()
            is_owed = held[host] < part
            ended = next(
                (
                    each
                    for each in slowest
                    if (held[each.host] > part if is_owed else each.host == host)
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
        if self._begun < _BEGUN_PER_ROUND:
            self._begun += 1
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._begun = 0
        while self._waiting and self._begun < _BEGUN_PER_ROUND:
            waiter = self._waiting.popleft()
            if not waiter.done():  # its client may have left
                waiter.set_result(None)
                self._begun += 1
        if self._begun:
            loop.call_soon(self._next, loop)
