"""Fetches a range of a peer's checkpoint straight into the receiver's memory.

If the receiver holds the bytes of a base that the peer knows, it asks for deltas
instead. Memory is prepared a little ahead of the bytes that come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from http import HTTPStatus

from aiohttp import hdrs

from aiockpt.errors import (
    CheckpointChangedError,
    RemoteProtocolError,
    StepNotFoundError,
)
from aiockpt.format.manifest import Outline
from aiockpt.http import protocol as http
from aiockpt.http.body_reader import BodySink
from aiockpt.http.chunk_run import ChunkRun
from aiockpt.http.client import CheckedResponse, CheckpointClient, Request
from aiockpt.http.peers import Peer
from aiockpt.http.planner import Assignment
from aiockpt.http.protocol import Origin
from aiockpt.memory.arena import Memory
from aiockpt.runtime.system import failing_here
from aiockpt.runtime.tasks import Notifier, beside
from aiockpt.transfer.deltas import HEAD_BYTES, split
from aiockpt.transfer.source import ChunkDestination, OnProgress, Prepare

_AHEAD_BYTES = 64 << 20  # of memory that all requests together prepare ahead
_PREPARED_BYTES = 8 << 20  # at a time: whole strides of the arena
_UNPREPARED_BYTES = 1 << 20  # of a range, which come before a thread has mapped them
_LOOK_S = 0.02  # between two looks at how much has come
_MAX_DELTA_RANGE_BYTES = 64 << 20
_MAX_EXTRA_FAILURES = 3  # of deltas, beyond those that succeeded


class RangeFetcher:
    """Fetches ranges of one checkpoint, for the assignments of runs.

    Args:
        client: Sends the requests.
        outline: The outline of the checkpoint.
        destination: Where the bytes go.
        on_progress: Gets newly arrived bytes.

    Attributes:
        destination: Where the bytes go. The download deletes it at its end.
    """

    def __init__(
        self,
        client: CheckpointClient,
        outline: Outline,
        destination: ChunkDestination,
        on_progress: OnProgress,
    ) -> None:
        self.destination = destination
        self._client, self._outline = client, outline
        self._on_progress = on_progress
        self._patched = self._unpatched = 0
        self._plain: set[int] = set()  # chunks whose delta did not fit the held bytes

    @property
    def can_patch(self) -> bool:
        """Whether the receiver can apply deltas.

        If more of them have failed than succeeded, it does not hold their base.
        """
        is_vain = self._unpatched > self._patched + _MAX_EXTRA_FAILURES
        return self.destination.patch is not None and not is_vain

    async def fetch(
        self, assignment: Assignment, hear: Callable[[CheckedResponse], None]
    ) -> None:
        """Request the next bytes of a run, and receive them into the destination.

        Args:
            assignment: The run, and the peer.
            hear: Gets the answer before its body is read.

        Raises:
            AiockptError: what is wrong with the peer or with its answer.
        """
        run, peer, liveness = assignment.run, assignment.peer, assignment.liveness
        start, stop, base = self._reach(run, peer)
        outline, origin = peer.outline or self._outline, peer.origin
        wanted = {} if base is None else http.format_delta(base)
        # A peer that has just come back may not have published again yet. In a swarm,
        # a peer may have to serve others first.
        wait = liveness.stall_timeout / 2 if assignment.may_wait else 0.0
        if not (peer.member or peer.invitation):
            wait = min(wait, liveness.reconnect_timeout, origin.step_wait)
        plain = _request(origin, outline, start, stop)
        request = replace(
            plain,
            headers={
                **plain.headers,
                "Prefer": http.format_prefer_wait(wait),
                **wanted,
            },
            may_be_delta=base is not None,
            may_be_empty=bool(peer.member),
            chunk=run.chunk,
        )
        is_delta = False

        def count(new: int) -> None:
            liveness.heard(_now())
            if not is_delta:  # `_patch` counts those bytes
                self._on_progress(new, 0)

        async with self._client.request(request, count) as answer:
            hear(answer)
            if answer.status == HTTPStatus.NO_CONTENT:
                # It has begun to receive the step anew, or never had the chunk.
                raise StepNotFoundError(outline.step, url=request.url)
            _check_range(answer, outline, start, stop)
            if is_delta := answer.status == HTTPStatus.IM_USED:
                deltas = await _read_deltas(answer, stop - start, base)
                await self._patch(run, deltas, range(start, stop), answer)
                return
            _check_length(answer, stop - start)
            memory = self.destination.memory
            sink = BodySink(memory.buffers, start, stop, run, check=memory.check)
            prepare = self.destination.prepare
            if prepare is None or sink.size < _UNPREPARED_BYTES:
                await answer.read_into(sink)
                return
            read = Notifier()
            async with beside(partial(self._keep_ready, prepare, sink, start, read)):
                await answer.read_into(sink)
                read.notify()

    def _reach(self, run: ChunkRun, peer: Peer) -> tuple[int, int, str | None]:
        """Return the range to request, and the base of the deltas to ask for.

        The base is None if only the bytes will do. An answer with deltas takes memory,
        so a request covers only a part of a long run.
        """
        start, stop = run.begin_request()
        if peer.delta_base is None or not self.can_patch:
            return start, stop, None
        grid, chunk = self._outline.grid, run.chunk
        assert chunk is not None
        first, last = grid.range(chunk)
        if start != first or chunk in self._plain:
            return start, last, None
        most = max(_MAX_DELTA_RANGE_BYTES // grid.chunk_bytes, 1) * grid.chunk_bytes
        stop = min(stop, start + most)
        plain = (grid.range(each)[0] for each in self._plain)
        ends = [stop, *(each for each in plain if start < each < stop)]
        return start, min(ends), peer.delta_base

    async def _patch(
        self, run: ChunkRun, deltas: memoryview, reach: range, answer: CheckedResponse
    ) -> None:
        """Apply deltas to the held chunks, until the first wrong digest."""
        size = self._outline.grid.chunk_bytes
        chunks = range(reach.start // size, -(-reach.stop // size))
        patch = self.destination.patch
        assert patch is not None
        with answer.blamed():
            parts = split(deltas, len(chunks))
        for chunk, (kind, body) in zip(chunks, parts, strict=True):
            try:
                with answer.blamed():
                    right = await patch(self.destination.memory, chunk, kind, body)
            except asyncio.CancelledError:
                self._plain.add(chunk)  # the bytes that a delta needs may have changed
                raise
            if not right:
                self._unpatched += 1
                self._plain.add(chunk)
                return
            self._patched += 1
            come = min(HEAD_BYTES + len(body), self._outline.grid.size(chunk))
            self._on_progress(come, 0)
            run.mark_patched()

    async def _keep_ready(
        self, prepare: Prepare, sink: BodySink, start: int, read: Notifier
    ) -> None:
        """Prepare memory from ``start`` on, a little ahead of what ``sink`` gets.

        It prepares no more than that: a peer that claims gigabytes and sends nothing
        takes no memory. It ends when all memory is prepared, or when ``read`` says that
        all bytes have come.
        """
        at, stop = start, start + sink.size
        ahead = max(_AHEAD_BYTES // self._client.options.connections, _PREPARED_BYTES)
        while at < stop and sink.remaining:
            if at - start - sink.filled >= ahead:
                await read.wait(_LOOK_S)
                continue
            end = min(at - at % _PREPARED_BYTES + _PREPARED_BYTES, stop)
            with failing_here("preparing memory"):  # not the fault of the peer
                at = await self._client.bridge.run(prepare, at, end)


async def fetch_unverified(
    client: CheckpointClient,
    peer: Peer,
    outline: Outline,
    reach: tuple[int, int],
    memory: Memory,
) -> None:
    """Receive a range without its chunks, so that no digest is compared.

    Raises:
        AiockptError: what is wrong with the peer or with its answer.
    """
    start, stop = reach
    async with client.request(_request(peer.origin, outline, start, stop)) as answer:
        _check_range(answer, outline, start, stop)
        _check_length(answer, stop - start)
        await answer.read_into(BodySink(memory.buffers, start, stop))


def _request(origin: Origin, outline: Outline, start: int, stop: int) -> Request:
    """Return a request for ``[start, stop)`` of the data segment."""
    head = outline.header_bytes
    resource = http.Resource(http.ResourceKind.FULL, outline.step)
    return Request(
        origin=origin,
        path=http.format_resource(resource),
        headers={
            hdrs.RANGE: http.format_range(head + start, head + stop),
            hdrs.IF_MATCH: http.format_etag(outline.snapshot_id),
        },
        status=HTTPStatus.PARTIAL_CONTENT,
        step=outline.step,
        snapshot_id=outline.snapshot_id,
    )


async def _read_deltas(
    answer: CheckedResponse, most: int, base: str | None
) -> memoryview:
    """Return the body of a 226 answer, of at most ``most`` bytes, for its ``base``."""
    request = answer.request
    named = http.parse_etag(answer.headers.get(http.DELTA_BASE_HEADER))
    if named != base or answer.headers.get("IM", "").strip().lower() != http.DELTA:
        raise RemoteProtocolError(
            f"{request.url} answered with a delta that was not requested: the headers "
            f"IM and Delta-Base must be {http.DELTA} and {http.format_etag(str(base))}"
        )
    return await answer.read(most, "deltas")


def _check_range(
    answer: CheckedResponse, outline: Outline, start: int, stop: int
) -> None:
    """Raise unless an answer covers ``[start, stop)`` of the data segment."""
    request, size, head = answer.request, outline.total_bytes, outline.header_bytes
    start, stop = head + start, head + stop
    # The headers are no variable: a peer may repeat the request's token in them.
    tag = http.parse_etag(answer.headers.get(hdrs.ETAG))
    if tag is not None and tag != request.snapshot_id:
        raise CheckpointChangedError(
            expected=request.snapshot_id or "", actual=tag, url=request.url
        )
    with answer.blamed():
        given = http.parse_content_range(answer.headers.get(hdrs.CONTENT_RANGE))
    if given != (start, stop, size):
        raise RemoteProtocolError(
            f"{request.url} sent bytes {given[0]} to {given[1]} of {given[2]} "
            f"where {start} to {stop} of {size} were asked for"
        )


def _check_length(answer: CheckedResponse, nbytes: int) -> None:
    if (length := answer.length()) != nbytes:
        raise RemoteProtocolError(
            f"{answer.request.url} sent Content-Length {length} for a range of "
            f"{nbytes} bytes"
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
