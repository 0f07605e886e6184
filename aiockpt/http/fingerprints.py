"""Receiver: asks peers for the fingerprint of what they serve.

A sender computes it when somebody asks first, which takes about as long as a load. So
a receiver asks in pieces, as for a step that is not there yet, and holds a lease until
it has the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from aiockpt.errors import (
    Advice,
    StepNotFoundError,
    TransportError,
    UnavailableError,
    advice,
)
from aiockpt.format.fingerprint import Fingerprint
from aiockpt.http import protocol as http
from aiockpt.http.client import CheckpointClient, Request
from aiockpt.http.peers import Peer, Peers, answers
from aiockpt.http.problems import PeerBusy, UnknownResourceError
from aiockpt.http.protocol import Origin
from aiockpt.http.retry import poll
from aiockpt.runtime.tasks import run_all

_ANSWER_S = 0.5  # seconds that the answer to a request may take once it is decided


async def fetch_fingerprints(shards: Sequence[Peers], step: int) -> Fingerprint:
    """Return the sum of the fingerprints of several senders of a step.

    A sender that cannot be reached is left out if the others have all of its shards,
    because they hold replicas of them. If cancelled, nothing is left behind.

    Args:
        shards: The senders. Each of them may have replicas, of which the first one
            that answers counts.
        step: The step.

    Raises:
        StepNotFoundError: a newer step has taken its place, or it did not come.
        UnavailableError: a sender is of a version that has no fingerprints.
        FingerprintMismatchError: the senders have parts of different tensors.
        TransportError, AuthenticationError, ProtocolError: what the peers answered.
    """
    lost: list[TransportError] = []

    async def of(peers: Peers) -> Fingerprint:
        try:
            return await of_one(peers)
        except TransportError as error:
            if Advice.LATER not in advice(error):
                raise
            lost.append(error)
            return Fingerprint()

    async def of_one(peers: Peers) -> Fingerprint:
        found = await answers(peers.all, partial(_fetch, peers, step=step), step=step)
        for peer in peers.left():
            peer.has_checkpoint = True  # it may have taken note of the lease
        await peers.end_lease(step)
        return next(iter(found.values()))

    found: list[Fingerprint] = await run_all([partial(of, peers) for peers in shards])
    bridge = shards[0].client.bridge  # many records take seconds
    total = await bridge.run(partial(Fingerprint.total, found))
    if lost and (len(lost) == len(shards) or not total.is_whole):
        for other in lost[1:]:
            lost[0].add_note(f"another sender failed, too: {other}")
        raise lost[0]
    return total


async def _fetch(peers: Peers, peer: Peer, step: int) -> Fingerprint:
    """Return what one peer answers, waiting until it serves the step."""
    client, origin = peers.client, peer.origin
    until = _now() + origin.step_wait
    last = min(peers.deadline, until)

    async def ask() -> Fingerprint | None:
        retries = client.retries(origin, step, peers.on_retry)
        heard = retries.liveness.heard
        try:
            return await retries.run(partial(_ask, client, origin, step, last, heard))
        except StepNotFoundError as error:
            is_past = error.serving is not None and error.serving > step
            if is_past or _now() >= until:
                raise
            retries.on_retry(error)
            return None

    return await poll(ask, pause=client.pause)


async def _ask(
    client: CheckpointClient,
    origin: Origin,
    step: int,
    deadline: float,
    heard: Callable[[float], None],
) -> Fingerprint | None:
    """Return what a peer answers; None if it still computes."""
    left = max(deadline - _now(), 0.0)
    wait = min(left - min(left / 4, _ANSWER_S), client.stall_timeout)
    resource = http.Resource(http.ResourceKind.FINGERPRINT, step)
    request = Request(
        origin=origin,
        path=http.format_resource(resource),
        headers={"Prefer": http.format_prefer_wait(wait)},
        step=step,
        wait=wait,
        may_be_unknown=True,
    )
    limits = client.options.limits
    try:
        async with client.request(request, lambda _: heard(_now())) as answer:
            body = await answer.read(limits.max_header_bytes, "a fingerprint")
    except PeerBusy as error:
        if error.proxy is not None:
            raise
        heard(_now())  # it computes, and waits as long as it was asked to
        return None
    except UnknownResourceError as error:
        raise UnavailableError(
            f"{origin.base_url} has no fingerprints: it runs an older version of "
            "aiockpt, or is no sender; update it"
        ) from error
    with answer.blamed():
        decode = partial(Fingerprint.from_json, bytes(body), limits=limits)
        return await client.bridge.run(decode)


def _now() -> float:
    return asyncio.get_running_loop().time()
