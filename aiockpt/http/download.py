"""Downloads chunks from one peer, or from several that hold the same checkpoint.

The `Planner` decides which run of chunks is requested from whom, and which request is
stopped because others can bring its run sooner. `Download` does what it says, and tells
it what happened. A peer that is wrong or gone is dropped; the download succeeds as long
as one is left.

Peers may be added meanwhile: a `ReceiveExtension` is how a swarm takes part.

The path of a run: `Download.run` -> `_act` (do what `Planner.next` says) -> `_fetch`
(retry) -> `RangeFetcher.fetch` (one range, straight into the destination).

The way back of a chunk: `BodySink.report` (on the loop, also for a thread that reads)
-> `ChunkRun.verify_stored` -> `Download._verified`, which `_act` gave to the run with
`assign` -> the planner, the destination and the extension.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from math import inf

import anyio
from anyio.abc import TaskGroup

from aiockpt.errors import Advice, AiockptError, TransportError, advice
from aiockpt.events import TransferEvent, emit
from aiockpt.format.manifest import Manifest, Outline
from aiockpt.http.chunk_run import ChunkRun
from aiockpt.http.client import CheckedResponse
from aiockpt.http.peers import Peer, Peers, verdict
from aiockpt.http.planner import Assignment, Dismiss, Planner, Rest, Stop
from aiockpt.http.problems import PeerBusy
from aiockpt.http.range_fetcher import RangeFetcher
from aiockpt.http.retry import HostLimitError, Retries
from aiockpt.runtime.system import of_caller
from aiockpt.runtime.tasks import Notifier, task_group
from aiockpt.transfer.source import ChunkDestination, OnProgress


class ReceiveExtension:
    """What takes part in a receive besides its peers: here, nothing.

    A swarm replaces this: it serves what is received, and adds members to a download.

    The order of the calls, most of which `HttpSource` and `Download` make:

    1. `receives`, once the manifest has come.
    2. For each download: `reads_into`, then `begin` (in `Download.__init__`). During
       `Download.run`: `gather` once, and `hear`, `verified` and `drop` any number of
       times. `explain` if the download fails. `aiockpt fetch` calls `verified` before
       `begin`, for the chunks that it already has.
    3. `leave` when all bytes have come, unless `can_linger`.
    4. At the end: `linger` after a success, if `can_linger`, else `leave`.

    A swarm is joined in `begin`, if the manifest came with an invitation, or else in
    `hear`, with the first answer that has one.
    """

    @property
    def can_linger(self) -> bool:
        """Whether `linger` may be called: the caller of the receive gets the memory."""
        return False

    def receives(self, manifest: Manifest, headers: Mapping[str, str]) -> None:
        """Learn what is received; ``headers`` authenticate the manifest."""

    def reads_into(self, destination: ChunkDestination) -> None:
        """Learn where the chunks go that are verified from now on."""

    def begin(self, download: Download) -> None:
        """Take part in a download, which begins now."""

    async def gather(self) -> None:
        """Add members to the download until this is cancelled, at its end."""

    def hear(self, peer: Peer, answer: CheckedResponse) -> None:
        """Learn from the head of an answer to a request for chunks."""

    def verified(self, chunk: int) -> None:
        """Learn that a chunk has come."""

    def drop(self, peer: Peer, error: AiockptError) -> None:
        """Learn that a peer is asked no more."""

    def explain(self, error: AiockptError) -> None:
        """Add to the error of a download that fails what nobody has."""

    async def linger(self) -> None:
        """Go on for a while without the receive. If cancelled, end at once."""

    async def leave(self, goodbye_s: float = 0.0) -> None:
        """End: once this returns, nothing reads the memory. Idempotent.

        It waits for at most ``goodbye_s`` seconds until the source knows it.
        """


class Download:
    """One download of chunks; each chunk is verified as it arrives.

    Args:
        peers: The peers to ask. A peer of which it is not known whether it has the
            checkpoint is asked for its manifest first.
        outline: The outline of the checkpoint.
        destination: Where the bytes go. Its memory is prepared a little ahead.
        chunks: The numbers of the chunks.
        on_progress: Gets newly arrived bytes and newly verified chunks.
        extension: Takes part in the download.
        connections: How many connections to use; None: as many as the client's options
            say.

    Attributes:
        planner: Decides what to do.
        sources: The peers at the beginning of the download.
        outline: The outline of the checkpoint.
        news: Is notified when the planner has to decide anew.

    Raises:
        LocalProtocolError: the checkpoint has no such chunk.
    """

    def __init__(
        self,
        peers: Peers,
        outline: Outline,
        destination: ChunkDestination,
        chunks: Iterable[int],
        on_progress: OnProgress,
        extension: ReceiveExtension | None = None,
        *,
        connections: int | None = None,
    ) -> None:
        if len(peers.all) == 1:  # nobody gives up the only one
            peers.all[0].error = None
        self._peers, self.sources, self.outline = peers, peers.left(), outline
        self.client = peers.client
        self._on_progress = of_caller(on_progress)
        self._ranges = RangeFetcher(
            self.client, outline, destination, self._on_progress
        )
        self.news = Notifier()
        self._scopes: dict[Assignment, anyio.CancelScope] = {}
        self._side_scopes = set[anyio.CancelScope]()
        most = connections or self.client.options.connections
        self.planner = Planner(outline, chunks, connections=most, now=_now())
        self.planner.has_deltas = self._ranges.can_patch
        for peer in self.sources:
            self.add(peer)
        self._extension = extension or ReceiveExtension()
        self._extension.begin(self)

    async def run(self) -> None:
        """Download the chunks; once only.

        If cancelled, nothing is written to the destination any more, any part of it may
        have been, and no connection is left.

        Raises:
            IntegrityError: a range had three wrong answers; of several peers, one is
                dropped at its first.
            CheckpointChangedError: the peer replaced the snapshot.
            StepNotFoundError: the peer retracted it.
            PeerUnreachableError, TransferStalledError, TransferInterruptedError: the
                peer was silent for the reconnect timeout.
            AuthenticationError, RemoteProtocolError: what the peer answered.
        """
        if self.planner.is_done():
            return
        if not self.sources:
            raise verdict(self._peers.all)
        began = _now()
        try:
            async with task_group() as tasks:
                for peer in self.sources:
                    if not peer.has_checkpoint:
                        tasks.start_soon(
                            self._until_done, partial(self._ask_manifest, peer)
                        )
                tasks.start_soon(self._until_done, self._extension.gather)
                while not self.planner.is_done():
                    await self.news.wait(self._act(tasks))
                for scope in self._side_scopes:
                    scope.cancel()
        finally:
            for run in self.planner.unfinished:  # the beginnings of chunks do not count
                self._lower_progress(run.assign(None))
            # Tracebacks of requests that were cancelled keep this object, which must
            # not keep the memory.
            del self._ranges.destination
            self._extension = ReceiveExtension()
        assert not self.planner.unfinished, "a chunk was left out"
        self._tell_who_gave(_now() - began)

    # ---------------------------------------------------------------- for others

    def add(self, peer: Peer, reconnect_timeout: float | None = None) -> None:
        """Ask a peer for chunks, too, once it is known to have the checkpoint."""
        peer.given, liveness = 0, self.client.liveness(reconnect_timeout)
        liveness.connected = True
        self.planner.add(peer, liveness)

    def drop(self, peer: Peer, error: AiockptError) -> None:
        """Ask a peer no more.

        Raises:
            AiockptError: it was the last one.
        """
        if peer.error is not None:
            return  # another of its requests has failed before
        is_last = self.planner.is_last(peer)
        stopped = self.planner.drop(peer)
        if is_last and self.sources == [peer]:
            peer.error = error  # it gets no event, because the error is raised
            raise self._failure(error)
        peer.drop(error, self.outline.step)
        self._extension.drop(peer, error)
        if is_last:
            raise self._failure(verdict(self.sources))
        for each in stopped:
            self._scopes[each].cancel()
        self.news.notify()

    # ------------------------------------------------------------------- the loop

    def _act(self, tasks: TaskGroup) -> float | None:
        """Do what the planner says; return the seconds until it should be asked again.

        None: not before something has happened.
        """
        planner = self.planner
        while True:
            match planner.next(now := _now()):
                case Assignment() as mine:
                    verified = partial(self._verified, mine.peer)
                    self._lower_progress(mine.run.assign(mine.peer, verified))
                    planner.began(mine, now)
                    self._scopes[mine] = anyio.CancelScope()
                    tasks.start_soon(self._fetch, mine)
                case Stop(victim, why):
                    self._tell_of_stop(victim, why)
                    self._scopes[victim].cancel()
                case Dismiss(peer):
                    why = f"{peer.origin.base_url} is much slower than other members"
                    self.drop(peer, TransportError(why))
                case Rest(until):
                    if planner.is_stuck(now, self.client.stall_timeout):
                        raise self._failure(verdict(self.sources))
                    return until - now if until < inf else None

    async def _until_done(self, job: Callable[[], Awaitable[None]]) -> None:
        """Await ``job()``, but only until everything has come."""
        # The traceback of a cancel is in a cycle with its task: if it passed a request
        # for chunks, the memory of the download would stay until the collector runs.
        with anyio.CancelScope() as scope:
            self._side_scopes.add(scope)
            try:
                await job()
            finally:
                self._side_scopes.discard(scope)

    async def _ask_manifest(self, peer: Peer) -> None:
        """Ask whether a peer holds the checkpoint."""
        try:
            found = await self._peers.ask_manifest(peer, self.outline.step)
            peer.require(self.outline, found.manifest.outline)
            peer.delta_base = found.delta_base
        except AiockptError as error:
            if Advice.OURS in advice(error):
                raise
            self.drop(peer, error)
        self.news.notify()

    async def _fetch(self, mine: Assignment) -> None:
        """Fetch the rest of a run; the planner wants again what does not come."""
        peer, run, was_refused = mine.peer, mine.run, False
        retries = self.client.retries(
            peer.origin, self.outline.step, self._peers.on_retry, mine.liveness
        )
        began = mine.began
        try:
            with self._scopes[mine]:
                while run.unverified:
                    try:
                        if run.chunk is not None:
                            await self._ranges.fetch(mine, partial(self._hear, mine))
                        if run.chunk is None:
                            self._want_bad_again(run, peer)
                        continue
                    except AiockptError as error:
                        delay = self._delay_after(error, mine, retries, started=began)
                        if delay is None:
                            raise
                    await self.client.pause(delay)
                    began = _now()
        except AiockptError as error:
            was_refused = _is_refusal(error, peer)
            if not was_refused:
                if advice(error) & (Advice.OURS | Advice.MISUSE):
                    raise  # not the peer's fault
                self.drop(peer, error)
        finally:
            del self._scopes[mine]
            self.planner.has_deltas = self._ranges.can_patch
            self._lower_progress(
                self.planner.ended(mine, _now(), was_refused=was_refused)
            )
        self.news.notify()

    def _delay_after(
        self, error: AiockptError, failed: Assignment, retries: Retries, started: float
    ) -> float | None:
        """Return the seconds until the next attempt at a run; None to give it back."""
        now = _now()
        if _is_refusal(error, failed.peer) or not self.planner.broke(failed, now):
            return None
        delay = retries.delay_after(error, started=started, now=now)
        failed.due = now + (delay or 0.0)
        return delay

    def _want_bad_again(self, run: ChunkRun, peer: Peer) -> None:
        """Want the bad chunks of a run again; raise what is wrong with the first."""
        if (settled := run.want_bad_again()) is not None:
            lost, error = settled
            error.url = peer.origin.base_url
            self._lower_progress(lost)
            raise error

    def _hear(self, mine: Assignment, answer: CheckedResponse) -> None:
        """Learn that a peer answers."""
        mine.is_answered = True
        self._extension.hear(mine.peer, answer)

    def _verified(self, peer: Peer, chunk: int) -> None:
        peer.given += self.outline.grid.size(chunk)
        self.planner.verified(_now())
        self._on_progress(0, 1)
        self._ranges.destination.complete(chunk)
        self._extension.verified(chunk)

    def _lower_progress(self, nbytes: int) -> None:
        """Subtract bytes that have to come once more from the progress."""
        if nbytes:
            self._on_progress(-nbytes, 0)

    def _failure(self, error: AiockptError) -> AiockptError:
        """Return the error of the last source, with what others know of it."""
        self._extension.explain(error)
        return error

    # --------------------------------------------------------------------- events

    def _tell_of_stop(self, victim: Assignment, why: str) -> None:
        emit(
            TransferEvent(
                stop="retry",
                step=self.outline.step,
                peer=victim.peer.origin.base_url,
                detail=f"too slow with chunk {victim.run.chunk}; {why}",
            )
        )

    def _tell_who_gave(self, seconds: float) -> None:
        """Tell how much came from each peer, unless all of it came from one."""
        given = self._peers.given()
        for each in self.planner.peers:  # one that failed may have been added twice
            if each not in self.sources:
                url = each.origin.base_url
                given[url] = given.get(url, 0) + each.given
        for url, nbytes in given.items():
            emit(
                TransferEvent(
                    stop="fetch_chunk",
                    step=self.outline.step,
                    peer=url,
                    nbytes=nbytes,
                    seconds=seconds,
                    level=logging.INFO,
                )
            )


def _is_refusal(error: AiockptError, peer: Peer) -> bool:
    """Return whether a member cannot be asked now: it is busy, or this host is."""
    return bool(peer.member) and isinstance(error, PeerBusy | HostLimitError)


def _now() -> float:
    return asyncio.get_running_loop().time()
