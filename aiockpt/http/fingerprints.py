"""Receiver: asks peers for the fingerprint of what they serve.

A sender computes it when somebody asks first, which takes about as long as a load. So
a receiver asks in pieces, as for a step that is not there yet, and holds a lease until
it has the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from aiockpt.errors import (
    Advice,
    AiockptError,
    StepNotFoundError,
    TransportError,
    UnavailableError,
    advice,
)
from aiockpt.format.fingerprint import Fingerprint
from aiockpt.format.manifest import Manifest
from aiockpt.http import protocol as http
from aiockpt.http.client import CheckpointClient, Request
from aiockpt.http.manifests import until_served
from aiockpt.http.peers import (
    Peer,
    Peers,
    add_others,
    answers,
    manifests_of,
    tell_of_loss,
)
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
    A plain tensor that differs on that rank alone then goes unnoticed. So is a sender
    that still lacks the step after the wait of `manifests_of`. If the others do not
    suffice, it is waited for. If cancelled, nothing is left behind.

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
    try:
        if len(senders) == 1:  # nobody can take its place
            for peer in senders[0].all:
                peer.error = None  # that of an earlier step
            found = await _fetch(senders[0], step)
        else:
            found = await _fetch_sum(senders, step)
    finally:
        await run_all(peers.let_go for peers in senders)
    there = (peers for peers in senders if peers.holders())
    await run_all(partial(peers.end_lease, step) for peers in there)
    return found


async def _fetch_sum(senders: Sequence[Peers], step: int) -> Fingerprint:
    """Return the sum of the fingerprints of those senders that are there.

    Leases keep the step at all of them until the last one has answered.
    """
    bridge = senders[0].client.bridge  # many records take seconds
    limits = senders[0].client.options.limits
    found: dict[int, Fingerprint] = {}
    manifests: list[Manifest] = []
    lost: dict[int, AiockptError] = {}
    late: set[int] = set()

    async def fetch(number: int) -> None:
        try:
            found[number] = await _fetch(senders[number], step)
        except TransportError as error:
            if Advice.LATER not in advice(error):  # it answers that it has none
                raise
            lost[number] = error
            tell_of_loss(senders[number], step, error)

    while True:
        asked = {number: senders[number] for number in late or range(len(senders))}
        there, lacking = await manifests_of(asked, step, awaited=late)
        lost = {**lost, **lacking}
        await run_all(partial(fetch, number) for number in there)
        manifests += [
            answer.manifest for number, answer in there.items() if number in found
        ]
        total = await bridge.run(partial(Fingerprint.total, [*found.values()]))
        if not lost:
            return total
        work = partial(ranks_of_meshes, manifests, limits=limits)
        if total.is_whole and lost.keys() <= await bridge.run(work):
            return total
        late = {at for at, e in lost.items() if isinstance(e, StepNotFoundError)}
        if not late:
            first = next(iter(lost.values()))
            add_others(first, lost.values())
            raise first
        for number in late:  # the others do not suffice
            del lost[number]


async def _fetch(peers: Peers, step: int) -> Fingerprint:
    """Return the first answer of a sender's replicas, once one serves the step."""
    client = peers.client

    async def fetch(peer: Peer) -> Fingerprint:
        origin = peer.origin
        ask = partial(_ask, client, origin, step)
        asking = until_served(
            client, origin, step, ask, deadline=peers.deadline, on_retry=peers.on_retry
        )
        return await poll(asking, pause=client.pause)

    found = await answers(peers.left(), fetch, step=step)
    for peer in peers.left():
        peer.has_checkpoint = True  # it may have taken note of the lease
    return next(iter(found.values()))


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
