"""Several HTTP senders as the source of one receive: each has a shard of the state.

Every rank of a job publishes what it holds. `JoinedSource` asks all of them for their
manifests, and finds out what this receiver needs of each. To `receive`, the result is
one checkpoint, which has this receiver's tensors already. Whole chunks are fetched,
because digests cover chunks.

The path of the bytes: `JoinedSource.read` plans which boxes of which sender's tensors
go where, as a load of files does (`aiockpt.storage.boxes`). A `Download` for each
sender fetches the chunks with these boxes. Bytes that are contiguous on both sides go
straight to the receive's destination. All others arrive in an arena of their sender,
and are copied from there at the end.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from math import inf
from types import TracebackType
from typing import Final, Literal, NamedTuple

from aiockpt.errors import (
    Advice,
    AiockptError,
    LocalProtocolError,
    MissingKeysError,
    RemoteProtocolError,
    StateDictError,
    StepNotFoundError,
    StorageError,
    TemplateMismatchError,
    TransportError,
    advice,
)
from aiockpt.events import TransferEvent, emit
from aiockpt.format.chunks import ChunkGrid, chunks_over
from aiockpt.format.limits import enforce
from aiockpt.format.manifest import Manifest, Outline
from aiockpt.http.download import Download
from aiockpt.http.peers import Peers, add_others, manifests_of, name_of, tell_of_loss
from aiockpt.http.range_fetcher import fetch_unverified
from aiockpt.http.shards import Jobs, ReceiveMemory, SenderShard, ShardRead
from aiockpt.memory.arena import Arena
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Deadline
from aiockpt.runtime.tasks import run_all
from aiockpt.state.distributed import group_rank
from aiockpt.state.flatten import Wanted, wanted
from aiockpt.state.joined import JoinedCheckpoint, join, ranks_of_meshes
from aiockpt.state.load_plan import Ranges
from aiockpt.state.mesh import merged
from aiockpt.state.reshard import (
    Claim,
    Policy,
    RankValues,
    United,
    check_rank_values,
    unite,
)
from aiockpt.state.segment import check_memory
from aiockpt.storage.boxes import (
    Assembly,
    compare,
    moves_of,
    ranges_to_compare,
)
from aiockpt.transfer.options import ReceiveOptions
from aiockpt.transfer.receive import Received, receive, was_modified
from aiockpt.transfer.reuse import Reuse
from aiockpt.transfer.source import (
    ChunkDestination,
    OnProgress,
    PlainDestination,
    Source,
)
from aiockpt.transport import require_type

_MAX_COMPARED_BYTES: Final = 256 << 20
_MERGED_GAP_BYTES: Final = 256 << 10  # to fetch it costs less than a request
_MAX_REPLICAS: Final = 64  # of a chunk that are asked
_SMALL_READ_BYTES: Final = 64 << 20  # of values, whose chunks are needed again


class RankOptions(NamedTuple):
    """What a receiver takes where the ranks of the senders differ.

    Attributes:
        rank_values: Which value it takes of those that differ by rank.
        full: Whether it receives full tensors where it has no place for distributed
            ones, although it has a process group.
    """

    rank_values: RankValues = "error"
    full: bool = False

    @classmethod
    def of(cls, rank_values: RankValues, *, full: bool) -> RankOptions:
        """Return the options of a caller.

        Raises:
            TypeError, ValueError: one has no such value.
        """
        require_type(bool, full=full)
        return cls(check_rank_values(rank_values), full)

    def policy(
        self, senders: int, answered: Sequence[int], options: ReceiveOptions, name: str
    ) -> Policy:
        """Return what this process takes from those of the senders that answered.

        Raises:
            ValueError: ``rank_values`` is the number of none.
        """
        group, select = group_rank(), options.select
        rank, ranks = group or (0, 1)
        distributed: Literal["full", "mesh"] = "mesh"
        if self.full or group is None:
            distributed = "full"
        has_own = ranks == senders and rank in answered
        chosen = self.rank_values
        if isinstance(chosen, int):
            if chosen not in answered:
                raise ValueError(
                    f"rank_values={chosen} is none of the senders 0 to {senders - 1}"
                )
            chosen = answered.index(chosen)
        return Policy(
            own=answered.index(rank) if has_own else None,
            rank_values=chosen,
            distributed=distributed,
            prefer=rank,
            select=select,
            name=name,
        )


async def receive_joined(
    senders: Sequence[Peers],
    step: int,
    options: ReceiveOptions,
    ranks: RankOptions,
    bridge: Bridge,
    deadline: Deadline,
) -> Received:
    """Receive a step from senders of shards.

    A sender that causes a `TransportError` is lost. Then the receive starts again
    without it, and keeps nothing of the first attempt. It succeeds as long as the
    others have all elements, as with a mesh that replicates.

    A sender that lacks the step for a reconnect timeout after the others got it is left
    out, too. If the others do not suffice, the receive starts again, and waits for it;
    of several such senders, for the first one that gets the step.

    Args:
        senders: The senders, in the order of their ranks, each with its replicas.
        step, options, bridge, deadline: As in `receive`.
        ranks: What is taken where the ranks differ.

    Raises:
        AiockptError: see `receive`. If elements are missing, the error is that of a
            lost sender, with those of the others as its notes.
    """
    if callable(options.select):  # both `unite` and the matcher ask for each path
        options = replace(options, select=cache(options.select))
    lost: dict[int, AiockptError] = {}
    awaited: set[int] = set()
    touched = False
    while True:
        before = {*lost}
        source = JoinedSource(senders, bridge, options, ranks, lost, awaited)
        try:
            return await receive(
                source, step, options, bridge, deadline, touched=touched
            )
        except (TransportError, StepNotFoundError, StateDictError) as error:
            touched |= was_modified(error)
            late = {at for at, e in lost.items() if isinstance(e, StepNotFoundError)}
            if isinstance(error, TransportError) and lost.keys() - before - late:
                continue  # without the sender that is lost since
            if late and (isinstance(error, StateDictError) or error in lost.values()):
                # The others do not suffice.
                for number in late:
                    del lost[number]
                awaited = late
                continue
            if lost and isinstance(error, TemplateMismatchError | MissingKeysError):
                first = next(iter(lost.values()))
                add_others(first, lost.values())
                raise first from error
            if error in lost.values():
                add_others(error, lost.values())
            raise


class JoinedSource(Source):
    """One checkpoint of several senders of shards.

    Args:
        senders: The senders, in the order of their ranks, each with its replicas.
        bridge: The threads that run what blocks.
        options: The options of the receive.
        ranks: What is taken where the ranks differ.
        lost: The senders that are not asked any more, by number. More are added.
        awaited: The senders of which one is needed; see `manifests_of`.

    Attributes:
        name: The addresses of the senders; see `name_of`.
        medium: How the bytes travel.
        remark: How many senders gave them.
    """

    medium = "HTTP"

    def __init__(
        self,
        senders: Sequence[Peers],
        bridge: Bridge,
        options: ReceiveOptions,
        ranks: RankOptions,
        lost: dict[int, AiockptError],
        awaited: Collection[int],
    ) -> None:
        self.name = name_of(senders)
        self.remark = f"from {len(senders)} senders of shards"
        self._senders, self._bridge, self._options = senders, bridge, options
        self._ranks, self._lost, self._awaited = ranks, lost, awaited
        self._step: int | None = None  # of which the manifests have come
        self._shards: Sequence[SenderShard] = ()
        self._holders: dict[tuple[ChunkGrid, int, str], list[SenderShard]] = {}
        self._joined: JoinedCheckpoint | None = None
        self._reuse: Reuse | None = None

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Tell the senders of a failure, unless they are lost; free the memory."""
        await self._let_go()
        try:
            if error is not None:
                for peers in self._senders:
                    peers.explain(error)
            if isinstance(error, asyncio.CancelledError):  # perhaps by the deadline
                add_others(error, self._lost.values())
            told = isinstance(error, AiockptError) and Advice.LOST not in advice(error)
            if told and self._step is not None:
                await self.end(self._step)
        finally:
            self._bridge.post(self.give_back)

    async def manifest(self, step: int) -> Manifest:
        """Return the manifest of what this receiver needs of all senders.

        Raises:
            RankValuesError, TemplateMismatchError, DeviceMeshError: see `unite`.
            RemoteProtocolError: the senders lack elements of a tensor, or do not fit
                each other.
            AiockptError: what a sender answered.
        """
        asked = {
            number: peers
            for number, peers in enumerate(self._senders)
            if number not in self._lost
        }
        answers, lost = await manifests_of(asked, step, awaited=self._awaited)
        self._lost |= lost
        if not answers:
            raise next(iter(self._lost.values()))
        self._step, answered = step, sorted(answers)
        for number, error in self._lost.items():
            if number == self._ranks.rank_values:
                raise error
        self._shards = [
            SenderShard(each, self._senders[each], answers[each].manifest)
            for each in answered
        ]
        await self._bridge.run(self._note_holders)
        manifests = [shard.segment.manifest for shard in self._shards]
        into, limits = self._options.into, self._options.limits
        own = None
        if into is not None:
            own = await self._bridge.run(partial(wanted, into, limits=limits))
        count = len(self._senders)
        policy = self._ranks.policy(count, answered, self._options, self.name)
        united = await self._united(manifests, own, policy)
        if self._lost:
            await self._bridge.run(self._check_lost, manifests)
        join_all = partial(join, united, manifests, step=step, limits=limits)
        self._joined = await self._bridge.run(join_all)
        return self._joined.manifest

    def takes(self, reuse: Reuse) -> bool:
        """Return True: `read` lays out what the receiver has as the senders do."""
        self._reuse = reuse
        return True

    async def read(
        self,
        outline: Outline,
        destination: ChunkDestination,
        chunks: Sequence[int],
        on_progress: OnProgress,
    ) -> None:
        """Fetch what the chunks of the joined checkpoint consist of, and verify it.

        Raises:
            AiockptError: see `Download`. The error names the sender.
        """
        ranges = merged(map(outline.grid.range, chunks))
        nbytes = sum(stop - start for start, stop in ranges)
        reading = await self._bridge.run(self._plan, ranges, destination)
        parts = reading.parts
        fetched = sum(part.size_of(part.wanted) for part in parts)
        progress = _ScaledProgress(on_progress, nbytes, fetched)

        def reused(nbytes: int) -> None:
            if self._reuse is not None:
                self._reuse.on_reuse(progress.take(nbytes), 0)

        if self._reuse is not None:
            await self._find_held(self._reuse, parts)
            reused(sum(part.size_of(part.held) for part in parts))
        if nbytes <= _SMALL_READ_BYTES and self._reuse is None:
            # As of plain values: the chunks stay in the arenas for the next read.
            missing = [part.missing() for part in parts]
            await self._fetch_to_arenas(missing, progress.add)
        await self._fetch([part.jobs(reused) for part in parts], progress.add)
        await run_all(partial(self._bridge.run, part.finish) for part in parts)
        await self._bridge.run(reading.assembly.finish)
        for chunk in chunks:
            destination.complete(chunk)
        progress.finish(len(chunks))

    async def end(self, step: int) -> None:
        """Tell the senders that all bytes have come."""
        await self._let_go()
        left = [p for at, p in enumerate(self._senders) if at not in self._lost]
        await run_all(partial(peers.end_lease, step) for peers in left)

    def give_back(self) -> None:
        """Free the memory of what did not go straight. For threads. Idempotent."""
        shards, self._shards, self._joined = self._shards, (), None
        self._holders.clear()
        for shard in shards:
            shard.segment.arena.empty()

    # ------------------------------------------------------------- the manifest

    def _note_holders(self) -> None:
        """Note which senders have which chunks: those of equal shards have the same."""
        for shard in self._shards:
            outline = shard.outline
            for chunk, digest in enumerate(outline.digests):
                key = outline.grid, chunk, digest
                self._holders.setdefault(key, []).append(shard)

    async def _united(
        self, manifests: Sequence[Manifest], own: Wanted | None, policy: Policy
    ) -> United:
        """Unite the trees of the senders, and compare the values that must agree."""
        limits, known = self._options.limits, dict[Claim, bool]()
        while True:
            work = partial(unite, manifests, own, policy, limits=limits, known=known)
            try:
                united = await self._bridge.run(work)
            except StorageError as error:
                if self._lost:
                    raise next(iter(self._lost.values())) from error
                raise RemoteProtocolError(f"the senders at {error}") from error
            if united.claims.keys() <= known.keys():
                return united
            look = partial(
                ranges_to_compare, united, self._shards, known, limits=limits
            )
            ranges = await self._bridge.run(look)
            enforce(
                "the size of what the senders must agree on",
                sum(stop - start for some in ranges for start, stop in some),
                _MAX_COMPARED_BYTES,
                remedy="pass rank_values= to say whose values count",
            )
            await self._fetch_compared(ranges)
            work_out = partial(
                compare, united, self._shards, known, limits=limits, verify="none"
            )
            known |= await self._bridge.run(work_out)

    async def _fetch_compared(self, ranges: Sequence[Ranges]) -> None:
        """Fetch what is compared: whole chunks, unless that is much more.

        Without their chunks the bytes are not verified. A wrong one makes values
        differ. No value is made of it, because that one is fetched with its chunk.
        """
        pairs = [*zip(self._shards, ranges, strict=True)]
        chunks = [chunks_over(shard.outline.grid, some) for shard, some in pairs]
        sizes = (
            shard.outline.grid.size(chunk)
            for shard, some in zip(self._shards, chunks, strict=True)
            for chunk in some
        )
        limits = self._options.limits
        if sum(sizes) <= min(_SMALL_READ_BYTES, limits.max_bytes or inf):
            await self._fetch_to_arenas(chunks, lambda _, __: None)
            return
        turns = asyncio.Semaphore(self._senders[0].client.options.connections)

        async def fetch(shard: SenderShard, reach: tuple[int, int]) -> None:
            peers, outline = shard.peers, shard.outline
            client, peer = peers.client, peers.holders()[0]
            arena = shard.segment.arena
            ask = partial(fetch_unverified, client, peer, outline, reach, arena)
            retries = client.retries(peer.origin, outline.step, peers.on_retry)
            async with turns:
                try:
                    await retries.run(ask)
                except TransportError as error:
                    self._lose(shard, error)
                    raise

        check_memory((reach for some in ranges for reach in some), limits)
        await run_all(
            partial(fetch, shard, reach)
            for shard, some in pairs
            for reach in merged(some, _MERGED_GAP_BYTES)
        )

    def _check_lost(self, manifests: Sequence[Manifest]) -> None:
        """Check that the others know all that a lost sender had.

        A template or a list of paths says what is needed. Otherwise, the ranks of a
        mesh have the same tensors, so a rank of it is there for each lost one.

        Raises:
            AiockptError: the error of a sender that may have had something else.
        """
        is_alone = len(manifests) == 1  # values that differ by rank would go unnoticed
        select = self._options.select
        if self._options.into is not None or not (select is None or callable(select)):
            known = {*self._lost}
        else:
            known = ranks_of_meshes(manifests, limits=self._options.limits)
        for number, error in self._lost.items():
            if is_alone or number not in known:
                raise error

    # ---------------------------------------------------------------- the bytes

    def _plan(self, ranges: Ranges, destination: ChunkDestination) -> _JoinedRead:
        """Plan what comes from each sender for some ranges. For a thread."""
        joined, shards = self._joined, self._shards
        assert joined is not None
        size = joined.manifest.segment_bytes
        assembly = Assembly(Arena(size), ReceiveMemory(destination))
        moves = moves_of(joined.pieces, joined.copies, ranges, len(shards))
        parts = []
        for shard, some in zip(shards, moves, strict=True):
            part = ShardRead(shard, some, assembly, destination, self._bridge)
            check_memory(part.indirect, self._options.limits)
            parts.append(part)
        return _JoinedRead(assembly, parts)

    async def _find_held(self, reuse: Reuse, parts: Sequence[ShardRead]) -> None:
        """Find the chunks that the receiver has; they need not be fetched."""
        held = await reuse.staged()

        async def find(part: ShardRead) -> None:
            try:
                await self._bridge.run(part.find_held, held)
            except LocalProtocolError:  # a tensor of theirs got other memory meanwhile
                return

        await run_all([partial(find, part) for part in parts])

    async def _fetch_to_arenas(
        self, chunks: Sequence[Sequence[int]], on_progress: OnProgress
    ) -> None:
        """Fetch chunks of each shard to its arena, unless it has them."""
        pairs = [*zip(self._shards, chunks, strict=True)]
        missing = [
            [c for c in some if c not in shard.in_arena] for shard, some in pairs
        ]
        homes = [PlainDestination(shard.segment.arena) for shard in self._shards]
        jobs = [[each] for each in zip(homes, missing, strict=True)]
        await self._fetch(jobs, on_progress)
        for shard, some in zip(self._shards, missing, strict=True):
            shard.in_arena.update(some)

    async def _fetch(self, jobs: Sequence[Jobs], on_progress: OnProgress) -> None:
        """Fetch chunks of all shards at once, over a bounded number of connections.

        Args:
            jobs: The chunks of each shard, and where they go.
            on_progress: Gets newly arrived bytes.
        """
        busy = [
            (shard, some)
            for shard, some in zip(self._shards, jobs, strict=True)
            if any(chunks for _, chunks in some)
        ]
        most = self._senders[0].client.options.connections
        turns = asyncio.Semaphore(most)

        async def fetch(shard: SenderShard, some: Jobs) -> None:
            async with turns:
                for destination, chunks in some:
                    for peers, part in self._with_replicas(shard, destination, chunks):
                        began = time.monotonic()
                        download = Download(
                            peers,
                            shard.outline,
                            destination,
                            part,
                            on_progress,
                            connections=max(most // len(busy), 1),
                        )
                        try:
                            await download.run()
                        except TransportError as error:
                            self._lose(shard, error)
                            raise
                        if len(peers.all) == 1:  # `Download` tells it of several
                            _tell(shard, began)

        await run_all([partial(fetch, *each) for each in busy])

    def _with_replicas(
        self, shard: SenderShard, destination: ChunkDestination, chunks: Sequence[int]
    ) -> Iterator[tuple[Peers, Sequence[int]]]:
        """Yield chunks, and who has them: of equal shards, all their senders."""
        outline, replicas = shard.outline, list[tuple[Peers, Outline]]()
        common = Counter[SenderShard]()
        for chunk in chunks if destination.patch is None else ():
            key = outline.grid, chunk, outline.digests[chunk]
            common.update(islice(self._holders[key], _MAX_REPLICAS))
        shared = {*chunks}
        for other, count in common.items():
            if other is not shard and 2 * count > len(chunks):
                theirs = other.outline
                shared &= {c for c in chunks if theirs.digests[c] == outline.digests[c]}
                replicas.append((other.peers, theirs))
        if not replicas:
            shared.clear()
        parts = (
            (shard.peers.beside(replicas), [c for c in chunks if c in shared]),
            (shard.peers, [c for c in chunks if c not in shared]),
        )
        yield from (part for part in parts if part[1])

    # -------------------------------------------------------------- the senders

    def _lose(self, shard: SenderShard, error: TransportError) -> None:
        """Note that a sender is lost."""
        self._lost[shard.number] = error
        tell_of_loss(shard.peers, shard.outline.step, error)

    async def _let_go(self) -> None:
        """Stop renewing the leases."""
        await run_all(peers.let_go for peers in self._senders)


def _tell(shard: SenderShard, began: float) -> None:
    """Tell how much came from a sender."""
    (peer,) = shard.peers.all
    emit(
        TransferEvent(
            stop="fetch_chunk",
            step=shard.outline.step,
            peer=peer.origin.base_url,
            nbytes=peer.given,
            seconds=time.monotonic() - began,
        )
    )


class _JoinedRead(NamedTuple):
    """What one `JoinedSource.read` reads.

    Attributes:
        assembly: The memory of the joined checkpoint.
        parts: What comes from each sender.
    """

    assembly: Assembly
    parts: Sequence[ShardRead]


class _ScaledProgress:
    """Reports the bytes of the senders' chunks as those of the joined checkpoint.

    Whole chunks are fetched, so more bytes may come than are needed.

    Args:
        report: Gets the bytes.
        nbytes: The bytes of the joined checkpoint.
        fetched: The bytes to fetch.
    """

    def __init__(self, report: OnProgress, nbytes: int, fetched: int) -> None:
        self._report, self._nbytes = report, nbytes
        self._fetched, self._come, self._told = fetched, 0, 0

    def add(self, nbytes: int, chunks: int) -> None:
        """Report bytes that have arrived; negative ones were discarded."""
        del chunks
        self._report(self.take(nbytes), 0)

    def take(self, nbytes: int) -> int:
        """Return bytes of the senders as bytes of the joined checkpoint."""
        self._come += nbytes
        told = self._nbytes * self._come // max(self._fetched, 1)
        found, self._told = told - self._told, told
        return found

    def finish(self, chunks: int) -> None:
        """Report that everything has come."""
        self._report(self._nbytes - self._told, chunks)
