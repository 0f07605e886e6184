"""Asks a peer for a manifest, for what it serves now, or for something newer.

The receiver uses a manifest only after every check. One loop, `poll`, waits for what a
peer does not serve yet.
"""

from __future__ import annotations

import asyncio
import mmap
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import NamedTuple, TypeAlias, TypeVar

from aiohttp import hdrs

from aiockpt.errors import RemoteProtocolError, StepNotFoundError
from aiockpt.format.entries import INT64_MAX
from aiockpt.format.header import LENGTH_BYTES, decode_header
from aiockpt.format.limits import enforce
from aiockpt.format.manifest import Manifest
from aiockpt.http import protocol as http
from aiockpt.http.body_reader import BodySink
from aiockpt.http.client import CheckedResponse, CheckpointClient, Line, Request
from aiockpt.http.protocol import Origin
from aiockpt.http.retry import Liveness, OnRetry, poll
from aiockpt.http.tokens import MAC_HEADER, check_manifest_mac
from aiockpt.runtime.secrets import Token
from aiockpt.runtime.system import collector_paused

V = TypeVar("V")

OnAnswer: TypeAlias = Callable[[Mapping[str, str]], None]
"""A function that gets the headers of an answer before its manifest has come."""

_ANSWER_S = 0.5  # seconds that the answer to a request may take once it is decided
_SMALL_HEADER_BYTES = 1 << 20


class ManifestAnswer(NamedTuple):
    """A manifest, and the memory of this host that came with it.

    Attributes:
        offer: Where the sender lends the memory of the checkpoint; None if nowhere.
        delta_base: The snapshot that the sender keeps as the base of deltas, or None.
        invitation: The token for the members of the sender's swarm, if there are some.
        line: The connection that brought it, if known.
        headers: What authenticates the manifest, if anything.
    """

    manifest: Manifest
    offer: str | None
    delta_base: str | None
    invitation: Token | None
    line: Line | None
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LatestInfo:
    """What a peer serves now.

    ``incarnation`` is the id of the sender's current start; None from a peer that has
    none. It says nothing about the content, so it does not count in a comparison.
    """

    step: int
    snapshot_id: str
    incarnation: str | None = field(default=None, compare=False)


async def fetch_manifest(
    client: CheckpointClient,
    origin: Origin,
    step: int,
    *,
    deadline: float,
    on_retry: OnRetry | None = None,
    probe: str | None = None,
    on_answer: OnAnswer | None = None,
) -> ManifestAnswer:
    """Return the manifest of ``step``, waiting until the peer publishes it.

    It waits for ``origin.step_wait`` seconds. If cancelled, nothing is left behind.

    Args:
        deadline: In loop time; the peer is told how long the receiver can wait.
        on_retry: Called with each error that is followed by another attempt.
        probe: Asks the sender to lend its memory, if it is on this host.
        on_answer: See `OnAnswer`.

    Raises:
        StepNotFoundError: a newer step has taken its place, or it did not come.
        PeerUnreachableError, TransferStalledError, TransferInterruptedError: the
            peer was silent for the reconnect timeout.
        AuthenticationError, RemoteProtocolError, LimitExceededError,
            IntegrityError, ForgedManifestError: what the peer answered.
    """
    ask = partial(_ask_manifest, client, origin, step, probe, on_answer)
    asking = until_served(
        client, origin, step, ask, deadline=deadline, on_retry=on_retry
    )
    return await poll(asking, pause=client.pause)


def until_served(
    client: CheckpointClient,
    origin: Origin,
    step: int,
    ask: Callable[[float, Liveness], Awaitable[V | None]],
    *,
    deadline: float,
    on_retry: OnRetry | None,
) -> Callable[[], Awaitable[V | None]]:
    """Return the function with which `poll` waits until a peer serves ``step``.

    The function returns None if the peer does not serve the step yet. It raises
    `StepNotFoundError` if a newer step has taken its place, or once
    ``origin.step_wait`` seconds are over.

    Args:
        ask: Sends one request. It gets the seconds for which the peer may wait, and
            what is known of the peer's silence.
        deadline: In loop time; the peer is told how long this side can wait.
        on_retry: Called with each error that is followed by another attempt.
    """
    until = _now() + origin.step_wait
    last = min(deadline, until)

    async def asking() -> V | None:
        retries = client.retries(origin, step, on_retry)

        def attempt() -> Awaitable[V | None]:
            # Longer waits are asked for in pieces: a connection that is dead meanwhile
            # goes unnoticed for the wait and the stall timeout.
            wait = min(longest_wait(last), client.stall_timeout)
            return ask(wait, retries.liveness)

        try:
            return await retries.run(attempt)
        except StepNotFoundError as error:
            is_past = error.serving is not None and error.serving > step
            if is_past or _now() >= until:
                raise
            retries.on_retry(error)
            return None

    return asking


def longest_wait(deadline: float) -> float:
    """Return for how many seconds a peer may wait, so that it answers in time.

    The answer should be here before the deadline, because it says what is served.
    """
    left = max(deadline - _now(), 0.0)
    return left - min(left / 4, _ANSWER_S)


async def _ask_manifest(
    client: CheckpointClient,
    origin: Origin,
    step: int,
    probe: str | None,
    on_answer: OnAnswer | None,
    wait: float,
    liveness: Liveness,
) -> ManifestAnswer:
    request = Request(
        origin=origin,
        path=http.format_resource(http.Resource(http.ResourceKind.METADATA, step)),
        headers={"Prefer": http.format_prefer_wait(wait)}
        | ({} if probe is None else {http.PROBE_HEADER: probe}),
        step=step,
        wait=wait,
    )
    async with client.request(request, lambda _: liveness.heard(_now())) as answer:
        if (given := _step_of(answer)) != step:
            raise RemoteProtocolError(f"{request.url} sends step {given}")
        if on_answer is not None:
            on_answer(answer.headers)
        size, limits = answer.length(), client.options.limits
        most = limits.max_header_bytes + LENGTH_BYTES
        enforce("the size of the header", size, most, "max_header_bytes")
        header = memory_for(size)
        view = memoryview(header)
        await answer.read_into(BodySink(lambda a, b: [view[a:b]], 0, size))

    mac = answer.headers.get(MAC_HEADER)

    def decode() -> Manifest:
        """Check who has written the header before anything is made of it."""
        auth = client.auth  # no frame has its key as a variable
        if auth.key is not None:
            check_manifest_mac(auth.key, memoryview(header), mac, url=request.url)
        with collector_paused():
            found = decode_header(header, limits=limits, ours=True)
        assert isinstance(found, Manifest)  # ours
        return found

    with answer.blamed():
        manifest = await client.bridge.run(decode)
    if manifest.step != step:
        raise RemoteProtocolError(f"{request.url} describes step {manifest.step}")
    return ManifestAnswer(
        manifest,
        offer=answer.headers.get(http.OFFER_HEADER),
        delta_base=http.parse_etag(answer.headers.get(http.DELTA_BASE_HEADER)),
        invitation=http.parse_invitation(answer.headers.get(http.SWARM_HEADER)),
        line=answer.line,
        headers={} if mac is None else {MAC_HEADER: mac},
    )


def memory_for(size: int) -> bytearray | mmap.mmap:
    """Return memory that costs nothing until bytes come: a peer may claim any size."""
    return bytearray(size) if size <= _SMALL_HEADER_BYTES else mmap.mmap(-1, size)


async def fetch_latest(
    client: CheckpointClient,
    origin: Origin,
    *,
    wait: float = 0.0,
    on_retry: OnRetry | None = None,
) -> LatestInfo:
    """Return what the peer serves at this moment, or within ``wait`` seconds.

    Raises:
        StepNotFoundError: nothing is published.
    """
    retries = client.retries(origin, None, on_retry)
    found, _ = await retries.run(partial(ask_latest, client, origin, wait=wait))
    assert found is not None, "only a request for a newer step may come back empty"
    return found


async def ask_latest(
    client: CheckpointClient,
    origin: Origin,
    after: int | None = None,
    *,
    known: str | None = None,
    wait: float = 0.0,
) -> tuple[LatestInfo | None, str | None]:
    """Return what a peer serves, if newer than ``after``, else None; and its start."""
    headers = {"Prefer": http.format_prefer_wait(wait)}
    if known is not None:
        headers[http.INCARNATION_HEADER] = known
    request = Request(
        origin=origin,
        path=http.format_latest(after),
        headers=headers,
        wait=wait,
        may_be_empty=after is not None,
    )
    async with client.request(request) as answer:
        incarnation = _incarnation_of(answer)
        if answer.status == HTTPStatus.NO_CONTENT:
            its_headers = http.INCARNATION_HEADER, http.STEP_HEADER
            if not any(name in answer.headers for name in its_headers):
                raise RemoteProtocolError(
                    f"{request.url} answered HTTP {answer.status} without a header of "
                    "a sender; is that an aiockpt server?"
                )
            return None, incarnation
        step = _step_of(answer)
        snapshot_id = http.parse_etag(answer.headers.get(hdrs.ETAG))
    if snapshot_id is None:
        raise RemoteProtocolError(f"{request.url} does not name its snapshot")
    # A server that does not know ``after`` answers with what it has.
    if after is None or step > after or has_restarted(known, incarnation):
        return LatestInfo(step, snapshot_id, incarnation), incarnation
    return None, incarnation


def _incarnation_of(answer: CheckedResponse) -> str | None:
    return http.check_incarnation(answer.headers.get(http.INCARNATION_HEADER))


def has_restarted(known: str | None, incarnation: str | None) -> bool:
    """Return whether a peer has restarted, as far as both incarnations are known."""
    return None not in (known, incarnation) and known != incarnation


def _step_of(answer: CheckedResponse) -> int:
    text = answer.headers.get(http.STEP_HEADER, "")
    known = re.fullmatch(r"0|[1-9][0-9]{0,18}", text)
    if known is None or int(text) > INT64_MAX:
        url = answer.request.url
        raise RemoteProtocolError(
            f"{url} names no step in its answer; is that an aiockpt server?"
        )
    return int(text)


def _now() -> float:
    return asyncio.get_running_loop().time()
