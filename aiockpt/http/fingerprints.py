"""Receiver: asks peers for the fingerprint of what they serve.

A sender computes it when somebody asks first, which takes about as long as a load. So
a receiver asks in pieces, as for a step that is not there yet, and holds a lease until
it has the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from aiockpt.errors import Advice, TransportError, UnavailableError, advice
from aiockpt.format.fingerprint import Fingerprint
from aiockpt.format.manifest import Manifest
from aiockpt.http import protocol as http
from aiockpt.http.client import CheckpointClient, Request
from aiockpt.http.manifests import until_served
from aiockpt.http.peers import Peer, Peers, add_others, answers
from aiockpt.http.problems import PeerBusy, UnknownResourceError
from aiockpt.http.protocol import Origin
from aiockpt.http.retry import Liveness, poll
from aiockpt.runtime.tasks import run_all
from aiockpt.state.joined import ranks_of_meshes


async def fetch_fingerprints(senders: Sequence[Peers], step: int) -> Fingerprint:
    """Return the sum of the fingerprints of several senders of a step.

    A sender that cannot be reached is left out if the others have all that it had, as
    in a receive without a template: each tensor must be complete, and the sender's rank
    must be on a mesh of theirs, because all ranks of a mesh have the same tensors.
    A plain tensor that differs on that rank alone then goes unnoticed. If cancelled,
    nothing is left behind.

    Args:
        senders: The senders, in the order of their ranks. Each of them may have
            replicas, of which the first one that answers counts.
        step: The step.

    Raises:
        StepNotFoundError: a newer step has taken its place, or it did not come.
        UnavailableError: a sender is of a version that has no fingerprints.
        FingerprintMismatchError: the senders have parts of different tensors.
        TransportError, AuthenticationError, ProtocolError: what the peers answered.
    """
    lost: dict[int, TransportError] = {}

    async def of(number: int, peers: Peers) -> Fingerprint:
        fetch = partial(_fetch, peers, step=step)
        try:
            found = await answers(peers.all, fetch, step=step)
        except TransportError as error:
            if Advice.LATER not in advice(error):  # it answers that it has none
                raise
            lost[number] = error
            return Fingerprint()
        for peer in peers.left():
            peer.has_checkpoint = True  # it may have taken note of the lease
        await peers.end_lease(step)
        return next(iter(found.values()))

    found = await run_all(partial(of, *each) for each in enumerate(senders))
    bridge = senders[0].client.bridge  # many records take seconds
    total: Fingerprint = await bridge.run(partial(Fingerprint.total, found))
    if lost:
        answered = [each for number, each in enumerate(senders) if number not in lost]
        if not total.is_whole or not {*lost} <= await _known_ranks(answered, step):
            first = next(iter(lost.values()))
            add_others(first, lost.values())
            raise first
    return total


async def _known_ranks(senders: Sequence[Peers], step: int) -> set[int]:
    """Return the ranks of all meshes on which the senders have tensors."""

    async def manifest(peers: Peers) -> Manifest:
        # Nothing else is asked for, so it needs no lease.
        origins = [replace(peer.origin, lease=None) for peer in peers.left()]
        alike = Peers.at(client, origins, peers.on_retry, deadline=peers.deadline)
        return (await alike.manifest(step)).manifest

    if not senders:
        return set()
    client = senders[0].client
    manifests = await run_all(partial(manifest, peers) for peers in senders)
    limits = client.options.limits
    return await client.bridge.run(partial(ranks_of_meshes, manifests, limits=limits))


async def _fetch(peers: Peers, peer: Peer, step: int) -> Fingerprint:
    """Return what one peer answers, waiting until it serves the step."""
    client, origin = peers.client, peer.origin
    ask = partial(_ask, client, origin, step)
    asking = until_served(
        client, origin, step, ask, deadline=peers.deadline, on_retry=peers.on_retry
    )
    return await poll(asking, pause=client.pause)


async def _ask(
    client: CheckpointClient, origin: Origin, step: int, wait: float, liveness: Liveness
) -> Fingerprint | None:
    """Return what a peer answers; None if it still computes."""
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
        async with client.request(request, lambda _: liveness.heard(_now())) as answer:
            body = await answer.read(limits.max_header_bytes, "a fingerprint")
    except PeerBusy as error:
        if error.proxy is not None:
            raise
        liveness.heard(_now())  # it computes, and waits as long as it was asked to
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
