"""The store: the published checkpoint, and the superseded ones that are still read.

The store publishes at most one checkpoint. A receive takes a lease on the snapshot
that it begins with, and each of its requests reads one. A superseded snapshot stays
readable until its last reader and its last lease have ended. The store keeps at most
``keep_superseded`` such snapshots. If there would be more, it keeps those that have
been read longest, and evicts the readers of the others.

Each publication has its own reader-writer lock. The store never leaves memory that
belongs to the trainer (``live``) with a reader: before it replaces or retracts such
memory, it waits for the readers, and evicts them after the grace. A retraction is
final: a publication that began before it does not undo it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Protocol, Self

import msgspec

from aiockpt.errors import (
    CheckpointChangedError,
    ClosedError,
    LocalProtocolError,
    PeerFailedError,
    StepNotFoundError,
)
from aiockpt.format.manifest import Manifest
from aiockpt.http.options import Server
from aiockpt.http.protocol import Lease
from aiockpt.memory.arena import Lendable
from aiockpt.memory.snapshot import Snapshot
from aiockpt.runtime.deadlines import Deadlines
from aiockpt.runtime.rwlock import RWLock

logger = logging.getLogger("aiockpt")

_MAX_LEASES: Final = 4096  # of one publication; a further receive gets no lease
_CHECK_INTERVAL_S: Final = 0.5  # between two checks of all waits
_MAX_REASON_CHARACTERS: Final = 300
_FAILURE_LASTS_S: Final = 10.0  # a replica takes longer to come back


class HasViews(Protocol):
    """Has the bytes of a data segment, or of a part of it."""

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes ``[start, stop)`` of the data segment, in order."""


class Servable(HasViews, Protocol):
    """A checkpoint in memory, or a part of it, as the server sees it."""

    @property
    def manifest(self) -> Manifest:
        """The manifest, with its digests."""

    @property
    def live(self) -> bool:
        """Whether the memory belongs to the trainer, which will change it."""

    @property
    def arena(self) -> Lendable | None:
        """The memory that holds the data segment from its first byte on, if any."""

    @property
    def have(self) -> int:
        """The chunks that may be read: bit i is chunk i. Bits are only added."""

    def acquire(self) -> None:
        """Keep the memory unchanged until :meth:`release`; calls are counted."""

    def release(self) -> None:
        """Undo one :meth:`acquire`."""


class Relayed(Servable, Protocol):
    """A checkpoint with a token and an owner of its own, such as a receive has."""

    def opens(self, offered: str) -> bool:
        """Return whether a request with this token may read it."""

    def end(self) -> None:
        """Refuse every token from now on: the store serves it no more."""


class Statistics(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What is served now, and the counters since the start; see `TransportStatistics`.

    A store fills some fields, and what serves it fills others. ``+`` adds two records
    field by field. The step of the first one counts, and the oldest of all readers.
    """

    step: int | None = None
    readers: int = 0
    oldest_reader: float = 0.0
    superseded: int = 0
    waiting: int = 0
    requests: int = 0
    refused: int = 0
    bytes_sent: int = 0
    gone: int = 0
    stalled: int = 0
    evicted: int = 0
    lent: int = 0

    def __add__(self, other: Statistics) -> Statistics:
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in self.__struct_fields__
            if name not in ("step", "oldest_reader")
        }
        step = other.step if self.step is None else self.step
        oldest = max(self.oldest_reader, other.oldest_reader)
        return Statistics(step=step, oldest_reader=oldest, **sums)

    def counters(self) -> Statistics:
        """Return what stays true of a server that has ended."""
        return msgspec.structs.replace(
            self, step=None, readers=0, oldest_reader=0.0, superseded=0, waiting=0
        )


class Publisher(Protocol):
    """Publishes checkpoints: a `Store` of this process, or a server process.

    Attributes:
        retractions: How often :meth:`retract` was called.
    """

    retractions: int

    @property
    def published(self) -> Snapshot | None:
        """The snapshot that is published now."""

    async def publish(self, snapshot: Snapshot, *, grace: float) -> None:
        """Serve ``snapshot`` from now on, instead of what was served before.

        If cancelled, the old checkpoint is still served.

        Raises:
            ClosedError: it serves nothing any more.
            StepNotFoundError: :meth:`retract` was called meanwhile, and is final.
            WorkerError: no server process can be started.
        """

    def fail(self, failure: Failure | None) -> None:
        """Tell the receives that wait for a step that its send failed; None forgets."""

    async def retract(self, *, grace: float) -> None:
        """Serve nothing; once this returns, no byte of the old memory is read."""


@dataclass(slots=True)
class Failure:
    """Why a send of ``step`` failed, for the receivers that wait for it.

    A failure outlives a retraction, since a receiver may come late. But a receiver of
    the next attempt at the same step may come early. So the store tells only as many
    receives as there were receivers (``left``; None: any number), and only for ten
    seconds, since one of the receivers may have died. All others wait. So does a
    later receive of a receiver that was told: it belongs to the next attempt. A
    receive that was told may repeat its request, since the answer may have been lost.

    Attributes:
        told: For each receiver that was told, the lease of that receive.
    """

    step: int
    reason: str
    left: int | None
    until: float = math.inf
    told: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: BaseException, *, step: int, receivers: int) -> Self:
        """Return the failure of a send that ended with ``error``."""
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, asyncio.CancelledError):
            why = "the send was cut short by a cancel or a deadline"
        until = _now() + _FAILURE_LASTS_S
        return cls(step, why[:_MAX_REASON_CHARACTERS], receivers or None, until)

    def tell(self, step: int | None, lease: Lease | None) -> PeerFailedError | None:
        """Return the error for a receive that waits for ``step``; None: it waits on.

        A receive without a lease counts each time.
        """
        told = None if lease is None else self.told.get(lease.receiver)
        is_other = told is not None and lease is not None and told != lease.id
        if step != self.step or _now() >= self.until or is_other:
            return None
        if told is None and self.left is not None:
            if self.left == 0:
                return None
            self.left -= 1
            if lease is not None:
                self.told[lease.receiver] = lease.id
        return PeerFailedError(None, self.reason)


@dataclass(slots=True, eq=False)
class _HeldLease:
    """A lease on a publication; all times are loop times.

    Attributes:
        since: When the receive took the lease.
        until: The latest time at which the receive ends.
        silence_timeout: Seconds without a request after which the receive has stalled.
        seen: When its last request began or ended.
        requests: How many of its requests are being answered now.
    """

    id: str
    since: float
    until: float = 0.0
    silence_timeout: float = 0.0
    seen: float = 0.0
    requests: int = 0

    @property
    def expires(self) -> float:
        """When the lease ends if the receive sends no further request."""
        if self.requests:
            return self.until
        return min(self.until, self.seen + self.silence_timeout)


class Publication:
    """One checkpoint, from its publication until its last reader has gone.

    Attributes:
        servable: The checkpoint's bytes.
        is_relay: Whether its own token opens it, and no lease keeps it.
        kept: Whether the store still holds a reference, so that readers may come.
        lock: Every request holds it for reading; the store drains readers by writing.
        reads: What evicts each request that reads the memory now, and since when it
            reads. The oldest one comes first.
        deltas: The cache of `aiockpt.http.deltas`: by chunk, None for a raw chunk.
        fingerprint: Its fingerprint as JSON, or why it has none, once it was computed.
        lost: Why it cannot be served any more: its memory was a state dict's own, and
            the state dict gave it up.
    """

    def __init__(self, servable: Servable, *, is_relay: bool = False) -> None:
        servable.acquire()
        self.servable, self.is_relay, self.kept = servable, is_relay, True
        self.lock = RWLock()
        self.reads: dict[Callable[[], None], float] = {}
        self.deltas: dict[int, bytes | None] = {}
        self.fingerprint: bytes | PeerFailedError | None = None
        self.lost: PeerFailedError | None = None
        self._leases: dict[str, _HeldLease] = {}  # the oldest first
        self._ends = Deadlines[str]()  # of the leases
        self._joining = set[str]()  # the leases of receivers that can join a swarm

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self.servable.manifest.step

    @property
    def snapshot_id(self) -> str:
        """The identity of the checkpoint's content."""
        return self.servable.manifest.snapshot_id

    def has(self, chunks: range) -> bool:
        """Return whether all these chunks may be read."""
        wanted = (1 << len(chunks)) - 1
        return self.servable.have >> chunks.start & wanted == wanted

    def views(
        self, start: int, stop: int, segment: HasViews | None = None
    ) -> list[memoryview]:
        """Return the bytes ``[start, stop)`` of the file: the header, then the segment.

        A ``segment`` takes the place of the checkpoint's own.

        Raises:
            PeerFailedError: the bytes are a state dict's own, and its memory has
                changed. Nothing of the checkpoint is served from then on.
        """
        header = self.servable.manifest.header
        split = len(header)
        views = [memoryview(header)[start:stop]] if start < split else []
        if stop <= split:
            return views
        try:
            first, last = max(start - split, 0), stop - split
            return views + (segment or self.servable).views(first, last)
        except LocalProtocolError as error:
            detail = f"step {self.step} cannot be served any more: {error}"
            if self.lost is None:
                logger.warning("%s", detail)
            self.lost = PeerFailedError(None, detail)
            raise self.lost from error

    def let_go(self) -> None:
        """Give up the store's reference and end all leases. Idempotent.

        Requests that are being answered keep references of their own.
        """
        self._leases.clear()
        self._joining.clear()
        self._ends = Deadlines()
        if self.kept:
            self.kept = False
            self.servable.release()

    def take_lease(self, lease: Lease, *, silence_timeout: float) -> None:
        """Take or renew a lease, unless the publication has the most of them."""
        now = _now()
        self._forget_expired(now)
        held = self._leases.get(lease.id)
        if held is None:
            if len(self._leases) >= _MAX_LEASES:
                return
            held = self._leases[lease.id] = _HeldLease(lease.id, now)
            if lease.joins:
                self._joining.add(lease.id)
        held.until, held.seen = lease.until, now
        held.silence_timeout = max(held.silence_timeout, silence_timeout)
        self._ends.set(lease.id, held.expires)

    def end_lease(self, lease: Lease) -> None:
        """End a lease; requests that are being answered go on."""
        self._drop_lease(lease.id)
        self._ends.forget(lease.id)

    def has_lease(self, lease: Lease) -> bool:
        """Return whether this lease still holds."""
        held = self._leases.get(lease.id)
        return held is not None and held.expires > _now()

    @contextmanager
    def reading(self, lease: Lease | None, evict: Callable[[], None]) -> Iterator[None]:
        """Keep the memory unchanged during the block; the lease does not stall in it.

        ``evict`` must end the block soon.
        """
        held = None if lease is None else self._leases.get(lease.id)
        self.reads[evict] = _now()
        self._count_request(held, 1)
        self.servable.acquire()
        try:
            yield
        finally:
            self.servable.release()
            del self.reads[evict]
            self._count_request(held, -1)

    def _count_request(self, held: _HeldLease | None, more: int) -> None:
        if held is not None:
            held.requests, held.seen = held.requests + more, _now()
            if self._leases.get(held.id) is held:
                self._ends.set(held.id, held.expires)

    def has_joining(self, *, besides: Lease) -> bool:
        """Return whether another receive than this one can join a swarm."""
        self._forget_expired(_now())
        return len(self._joining) > (besides.id in self._joining)

    def read_since(self) -> float | None:
        """Return since when it has been read; None if it is not read any more."""
        self._forget_expired(_now())
        since = [held.since for held in islice(self._leases.values(), 1)]
        since += islice(self.reads.values(), 1)
        return min(since, default=None)

    def next_expiry(self) -> float:
        """Return when the next lease ends by itself; infinity without a lease."""
        return self._ends.first()

    def _forget_expired(self, now: float) -> None:
        for key in self._ends.expired(now):
            self._drop_lease(key)

    def _drop_lease(self, key: str) -> None:
        self._leases.pop(key, None)
        self._joining.discard(key)


class _Waits:
    """The requests that wait for a publication.

    Followers wait nearly always, and there may be thousands of them. So a wait wakes
    only for news. One timer makes the checks of all.
    """

    def __init__(self) -> None:
        self._closed = False
        self._checks: dict[asyncio.Future[None], Callable[[], None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def announce(self) -> None:
        """Wake each wait."""
        for waiter in self._checks:
            _wake(waiter)

    def close(self) -> None:
        """End all waits with `ClosedError`, also later ones."""
        self._closed = True
        self.announce()

    def check_open(self) -> None:
        """Raise `ClosedError` after :meth:`close`."""
        if self._closed:
            raise ClosedError("the store")

    async def news(self, deadline: float, check: Callable[[], None]) -> bool:
        """Return after news or at the deadline; return False if it has passed already.

        It also returns when the store is closed.
        """
        loop = asyncio.get_running_loop()
        if loop.time() >= deadline:
            return False
        waiter = loop.create_future()
        timer = loop.call_at(deadline, _wake, waiter)
        self._checks[waiter] = check
        if self._timer is None:
            self._timer = loop.call_later(_CHECK_INTERVAL_S, self._check)
        try:
            await waiter
        finally:
            timer.cancel()
            del self._checks[waiter]
        check()
        return True

    def _check(self) -> None:
        """End each wait whose check fails, for example because its client has left."""
        self._timer = None
        for waiter, check in self._checks.items():
            try:
                check()
            except Exception as error:  # noqa: BLE001 - the wait raises it
                if not waiter.done():
                    waiter.set_exception(error)
        if self._checks:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_CHECK_INTERVAL_S, self._check)


class Store:
    """Holds the checkpoint that is being served. Bound to the loop that uses it.

    Args:
        options: How many superseded snapshots it keeps while they are read, and whether
            it keeps the base of deltas.

    Attributes:
        latest: The publication that is served now.
        retractions: How often :meth:`retract` was called.
        withdrawals: How often a retraction took something away.
        returns: How often a lower step was published than the one before.
    """

    def __init__(self, options: Server = Server()) -> None:  # noqa: B008 - frozen
        self._options = options
        self.retractions = self.withdrawals = self.returns = 0
        self._last = -1  # the step of the last publication
        self.latest: Publication | None = None
        self._base: Publication | None = None
        self._outgoing: set[Publication] = set()
        self._relays: dict[Relayed, Publication] = {}
        self._failure: Failure | None = None
        self._waits = _Waits()
        self._expiry: asyncio.TimerHandle | None = None
        self._evicted = 0

    @property
    def published(self) -> Snapshot | None:
        """The snapshot that is published now, if it is one of this process."""
        found = None if self.latest is None else self.latest.servable
        return found if isinstance(found, Snapshot) else None

    def base_of(self, publication: Publication) -> Publication | None:
        """Return the base of deltas to a publication, or None.

        It is the previous publication, if both have the same entries and chunks.
        """
        if publication is not self.latest or self._base is None:
            return None
        ours, theirs = self._base.servable.manifest, publication.servable.manifest
        same = ours.entries == theirs.entries and ours.chunk_bytes == theirs.chunk_bytes
        return self._base if same else None

    @property
    def step(self) -> int | None:
        """The step that is published now."""
        return self.latest.step if self.latest else None

    def statistics(self) -> Statistics:
        """Return which step the store serves, and what reads its checkpoints."""
        held = [*self._publications(), *self._relays.values()]
        locks = [each.lock.statistics() for each in held]
        return Statistics(
            step=self.step,
            readers=sum(lock.readers for lock in locks),
            superseded=len(self._outgoing - {self._base}),
            oldest_reader=max((lock.oldest_reader for lock in locks), default=0.0),
            evicted=self._evicted,
        )

    # ------------------------------------------------------------- publishing

    async def publish(self, snapshot: Servable, *, grace: float) -> None:
        """Serve ``snapshot`` from now on, instead of what was served before.

        If the old memory is a snapshot, this returns at once; its readers finish, as
        far as ``keep_superseded`` allows. If it is live, this drains it first: its
        readers get ``grace`` seconds and are then evicted, and new readers wait. If
        cancelled, the store still serves the old checkpoint.

        Raises:
            ClosedError: after :meth:`close`.
            StepNotFoundError: :meth:`retract` was called meanwhile, and is final.
        """
        self._waits.check_open()
        before = self.retractions
        live = [each for each in self._publications() if each.servable.live]
        await self._drain(live, grace)
        if self.retractions != before:
            raise StepNotFoundError(snapshot.manifest.step)
        self.replace(snapshot)  # nothing is awaited between the last drain and this

    def replace(self, snapshot: Servable) -> None:
        """Serve ``snapshot`` at once; live memory must have no readers any more."""
        old, self.latest = self.latest, Publication(snapshot)
        self._failure = None
        step = self.latest.step
        self.returns, self._last = self.returns + (step < self._last), step
        self._waits.announce()
        if old is not None:
            self._outgoing.add(old)
            if self._options.keep_base:
                self._base = None if old.servable.live else old
            self._tidy()

    def fail(self, failure: Failure | None) -> None:
        """Tell the receives that wait for the step of ``failure`` that it failed.

        None forgets the last failure, as a publication does. The served checkpoint
        stays.
        """
        self._failure = failure
        self._waits.announce()

    async def retract(self, *, grace: float) -> None:
        """Serve nothing; once this returns, no byte of the old memory is read.

        All leases end. Requests that are being answered get ``grace`` seconds and are
        then evicted. Idempotent, and cheap when nothing is served. If cancelled,
        nothing is served, and readers may go on until a later retract returns.
        """
        self.retractions += 1
        if self._failure is not None and self._failure.left is None:
            self._failure = None
        old, self.latest, self._base = self.latest, None, None
        if old is not None:
            self.withdrawals += 1
            self._waits.announce()
            self._outgoing.add(old)
        for each in self._outgoing:
            if not each.servable.live:
                each.let_go()
        self._tidy()
        await self._drain(list(self._outgoing), grace)

    async def close(self) -> None:
        """Serve nothing for good: evict readers at once, end every wait."""
        self._waits.close()
        await self.retract(grace=0.0)
        for relay in tuple(self._relays):
            await self.end_relay(relay)

    # ----------------------------------------------------------------- relays

    def serve_relay(self, relay: Relayed) -> None:
        """Serve another checkpoint, too, to each request that sends its token.

        Raises:
            ClosedError: after :meth:`close`.
        """
        self._waits.check_open()
        self._relays[relay] = Publication(relay, is_relay=True)

    def relay_of(self, token: str) -> Publication | None:
        """Return the relay that a request's token opens."""
        found = (each for relay, each in self._relays.items() if relay.opens(token))
        return next(found, None)

    @asynccontextmanager
    async def unread(self, relay: Relayed) -> AsyncIterator[Publication | None]:
        """Interrupt the requests that read a relay, and admit none during the block.

        Yields the publication of the relay; None if it is not served.
        """
        publication = self._relays.get(relay)
        if publication is None:
            yield None
            return
        with await publication.lock.acquire_write(grace=0.0):
            yield publication

    async def end_relay(self, relay: Relayed) -> None:
        """Serve it no more; once this returns, no byte of it is read. Idempotent."""
        relay.end()
        async with self.unread(relay) as publication:
            if publication is not None:
                publication.let_go()
        self._relays.pop(relay, None)

    # ---------------------------------------------------------------- finding

    async def wait_for(
        self,
        step: int | None,
        *,
        wait: float,
        lease: Lease | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Publication:
        """Return the publication of ``step`` (None: any), waiting up to ``wait`` s.

        Args:
            step: A step older than the served one is refused at once.
            wait: Seconds.
            lease: Names the receive that waits, if known.
            check: Called now and then; what it raises ends the wait.

        Raises:
            StepNotFoundError: it did not come; ``serving`` says what is served.
            PeerFailedError: it will not come.
            ClosedError: the store is closed.
        """
        deadline = _now() + wait
        while True:
            self._waits.check_open()
            now = self.latest
            if now is not None and step in (None, now.step):
                return now
            if self._failure is not None and (told := self._failure.tell(step, lease)):
                raise told
            is_past = now is not None and step is not None and now.step > step
            if is_past or not await self._waits.news(deadline, check):
                raise StepNotFoundError(step, serving=self.step)

    async def wait_past(
        self, step: int, *, wait: float, check: Callable[[], None] = lambda: None
    ) -> Publication:
        """Return what is served as soon as it is newer than ``step``.

        If the sender goes back to a lower step meanwhile, that step counts as newer.
        A failed send does not end the wait, since the next send may succeed.

        Raises:
            StepNotFoundError: nothing newer came, or the served checkpoint was
                retracted meanwhile; ``serving`` says what is served.
            ClosedError: the store is closed.
        """
        before, returns = self.withdrawals, self.returns
        deadline = _now() + wait
        while True:
            self._waits.check_open()
            now = self.latest
            if now is not None and (now.step > step or self.returns != returns):
                return now
            is_gone = self.withdrawals != before
            if is_gone or not await self._waits.news(deadline, check):
                raise StepNotFoundError(None, serving=self.step)

    # ---------------------------------------------------- leases and reading

    def leased(self, lease: Lease, step: int) -> Publication | None:
        """Return the superseded publication of ``step`` on which the lease holds."""
        for each in self._outgoing:
            if each.step == step and each.has_lease(lease):
                return each
        return None

    def lease(
        self, publication: Publication, lease: Lease, *, silence_timeout: float
    ) -> None:
        """Take or renew a receive's lease; a receive has one lease at a time.

        The lease ends at ``lease.until``, or after ``silence_timeout`` seconds without
        a request, or with :meth:`end_lease` or :meth:`retract`. The longest timeout of
        a receive counts.
        """
        for each in self._publications():
            if each is not publication:
                each.end_lease(lease)
        if publication.kept:
            publication.take_lease(lease, silence_timeout=silence_timeout)
        self._tidy()

    def end_lease(self, lease: Lease) -> None:
        """Release what is kept for a receive that has ended."""
        for each in self._publications():
            each.end_lease(lease)
        self._tidy()

    @asynccontextmanager
    async def reading(
        self,
        publication: Publication,
        *,
        evict: Callable[[], None],
        lease: Lease | None = None,
    ) -> AsyncIterator[Publication]:
        """Keep a publication's memory unchanged; ``evict`` must end the block soon.

        ``lease`` belongs to the receive that reads; it does not stall meanwhile.

        Raises:
            CheckpointChangedError: the publication was replaced or retracted.
        """
        evicted = False

        def evict_and_count() -> None:
            nonlocal evicted
            self._evicted += not evicted
            evicted = True
            evict()

        try:
            with await publication.lock.acquire_read(evict=evict_and_count):
                if not publication.kept:
                    now = self.latest.snapshot_id if self.latest else None
                    raise CheckpointChangedError(
                        expected=publication.snapshot_id, actual=now
                    )
                with publication.reading(lease, evict_and_count):
                    yield publication
        finally:
            self._tidy()

    def _publications(self) -> list[Publication]:
        # The current one is the last: it is served until all others are drained.
        now = [self.latest] if self.latest else []
        return [*self._outgoing, *now]

    def _tidy(self) -> None:
        """Let go of superseded snapshots that nobody reads, or that are too many."""
        read = dict[Publication, float]()
        for each in tuple(self._outgoing):
            since = each.read_since()
            if each is self._base:
                continue
            if since is None and (not each.kept or not each.servable.live):
                each.let_go()
                self._outgoing.discard(each)
            elif since is not None and each.kept and not each.servable.live:
                read[each] = since
        for each in sorted(read, key=read.__getitem__)[self._options.keep_superseded :]:
            del read[each]
            each.let_go()
            for evict in tuple(each.reads):
                evict()
            if not each.reads:
                self._outgoing.discard(each)
        self._look_again(min((each.next_expiry() for each in read), default=math.inf))

    def _look_again(self, when: float) -> None:
        """Tidy when the next lease ends. A timer that fires too early is left alone."""
        if self._expiry is not None:
            if _now() < self._expiry.when() <= when < math.inf:
                return
            self._expiry.cancel()
            self._expiry = None
        if when < math.inf:
            self._expiry = asyncio.get_running_loop().call_at(when, self._tidy)

    async def _drain(self, publications: list[Publication], grace: float) -> None:
        deadline = _now() + grace
        for each in publications:
            left = max(deadline - _now(), 0.0)
            with await each.lock.acquire_write(grace=left):
                # Nobody reads, and no later reader will be admitted.
                each.let_go()
            self._outgoing.discard(each)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
