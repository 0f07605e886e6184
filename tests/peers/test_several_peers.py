"""Several peers hold the same checkpoint: it comes from all of them, whoever fails."""

from __future__ import annotations

import asyncio

import pytest

from aiockpt.errors import (
    AuthenticationError,
    CheckpointChangedError,
    ClosedError,
    PeerUnreachableError,
)
from aiockpt.http.protocol import Origin
from aiockpt.testing import CutAfter, Drip, StallAfter
from tests.support.proofs import proves
from tests.support.rangepeer import (
    CHUNK,
    FAR,
    STEP,
    Fetch,
    Late,
    Lies,
    behind,
    checkpoint,
    describe,
    noise,
    receiver,
    replicas,
    source,
)
from tests.support.rangepeer import serving as peer

pytestmark = [
    pytest.mark.usefixtures("no_blocking"),
    pytest.mark.asyncio,
    pytest.mark.torch_free,
    pytest.mark.timeout(120),
]

CLOSED = Origin("http://127.0.0.1:9/checkpoint/", "token")


class TestOneFails:
    """The others bring what it does not."""

    @pytest.mark.parametrize("nbytes", [0, CHUNK + CHUNK // 2])
    async def test_stalled(self, nbytes: int) -> None:
        """The planner takes its run away long before the stall timeout."""
        held = checkpoint()
        async with (
            replicas(held, held) as sites,
            behind(sites[0], StallAfter(nbytes)) as proxy,
            receiver(stall_timeout=FAR) as client,
        ):
            fetch = Fetch(client, [source(proxy), source(sites[1])])
            await fetch.run()
        fetch.check(held)
        told = any("too slow" in event.detail for event in fetch.events)
        assert told if nbytes else not fetch.given[0]

    @pytest.mark.parametrize(
        ("kind", "reason"),
        [
            ("closed", "cannot reach"),
            ("lying", "has digest"),
            ("gone on", "being served is step 8"),
            ("of another token", "refused the token"),
        ],
    )
    async def test_it_is_dropped(self, kind: str, reason: str) -> None:
        """The peer is dropped at its first answer, of which almost nothing counts."""
        held = checkpoint()
        async with (
            replicas(held, held, checkpoint(step=8)) as sites,
            behind(sites[0], Lies()) as proxy,
            receiver() as client,
        ):
            bad = {
                "closed": CLOSED,
                "lying": source(proxy),
                "gone on": source(sites[2]),
                "of another token": source(sites[2], "wrong"),
            }[kind]
            fetch = Fetch(client, [source(sites[0]), bad, source(sites[1])])
            await fetch.run()
        fetch.check(held)
        assert fetch.given[1] < 4 * CHUNK
        # What nobody answers may end only when everything has come.
        assert kind == "closed" or [*fetch.dropped()] == [1]
        why = fetch.dropped().get(1, reason)
        assert reason in why
        assert "wrong" not in why

    @pytest.mark.parametrize("at", range(3))
    async def test_another_snapshot(self, at: int) -> None:
        """The first manifest decides; two snapshots are never mixed."""
        held, other = checkpoint(), checkpoint(fill=1)
        all_held = [held, held, held]
        all_held[at] = other
        async with replicas(*all_held) as sites, receiver() as client:
            fetch = Fetch(client, [source(site) for site in sites])
            content = await fetch.run()
        chosen = held if content == held.data else other
        fetch.check(chosen)
        wrong = {n for n, each in enumerate(all_held) if each is not chosen}
        assert not any(fetch.given[n] for n in wrong)
        # A peer that answers when everything has come is not always heard.
        assert {*fetch.dropped()} <= wrong
        assert all("another snapshot" in why for why in fetch.dropped().values())


async def test_a_slow_source_gives_less() -> None:
    """Each is asked for as much as it brings."""
    held = checkpoint()
    async with (
        replicas(held, held) as sites,
        behind(sites[0], Drip(1e6, burst=1 << 13)) as slow,
        behind(sites[1], Drip(20e6, burst=1 << 15)) as fast,
        receiver() as client,
    ):
        fetch = Fetch(client, [source(slow), source(fast)])
        await fetch.run()
    fetch.check(held)
    assert 2 * fetch.given[0] < fetch.given[1]


async def test_a_source_that_is_late_joins_in() -> None:
    """It publishes the step when the others are sending it."""
    held = checkpoint()
    async with (
        replicas(held, checkpoint(step=1)) as sites,
        behind(sites[0], Drip(1e6, burst=1 << 13)) as slow,
        receiver() as client,
    ):
        fetch = Fetch(client, [source(slow), source(sites[1])])
        running = asyncio.create_task(fetch.run())
        await fetch.under_way.wait()
        await sites[1].store.publish(held, grace=0)
        await running
    fetch.check(held)
    assert all(fetch.given)


async def test_credentials_go_to_their_own_origin_only() -> None:
    """Each source has its own."""
    segment = noise(8 * CHUNK)
    async with (
        peer(segment, chunk_bytes=CHUNK) as one,
        peer(segment, chunk_bytes=CHUNK) as other,
        receiver() as client,
    ):
        assert one.manifest == describe(segment, chunk_bytes=CHUNK)
        fetch = Fetch(client, [one.source("first"), other.source("second")])
        assert await fetch.run() == segment
    shown = [
        {headers.get("Authorization") for _, headers in each.requests}
        for each in (one, other)
    ]
    assert shown == [{"Bearer first"}, {"Bearer second"}]


class TestAllFail:
    """One error says why, and its notes say why of the others."""

    async def test_what_a_peer_says_tells_most(self) -> None:
        """More than that another one is not there."""
        async with replicas(checkpoint()) as sites, receiver() as client:
            fetch = Fetch(client, [CLOSED, source(sites[0], "wrong")])
            with pytest.raises(AuthenticationError) as caught:
                await fetch.run()
        (note,) = caught.value.__notes__
        assert CLOSED.base_url in note
        assert "cannot reach" in note

    async def test_nobody_is_there(self) -> None:
        """The first one is named."""
        other = Origin("http://127.0.0.1:10/checkpoint/")
        async with receiver() as client:
            with pytest.raises(PeerUnreachableError) as caught:
                await Fetch(client, [CLOSED, other]).run()
            assert caught.value.url == CLOSED.base_url
            assert other.base_url in caught.value.__notes__[0]
            with pytest.raises(PeerUnreachableError):
                await Fetch(client, [CLOSED, other]).peers.latest()

    @proves("cell HTTPTransport.recv_checkpoint, metadata=[...]: error")
    async def test_killed_one_after_the_other(self) -> None:
        """The peers die in the middle of the receive, one after the other."""
        held = checkpoint()
        async with (
            replicas(held, held) as sites,
            behind(sites[0], CutAfter(4 * CHUNK)) as one,
            behind(sites[1], CutAfter(6 * CHUNK)) as other,
            receiver() as client,
        ):
            fetch = Fetch(client, [source(one), source(other)])
            running = asyncio.create_task(fetch.run())
            await fetch.under_way.wait()
            await one.aclose()
            await other.aclose()
            with pytest.raises(PeerUnreachableError) as caught:
                await running
        assert len(caught.value.__notes__) == 1
        assert {*fetch.dropped()} == {0, 1}
        told = {e.peer: e.nbytes for e in fetch.events if e.stop == "drop"}
        assert [told[url] for url in fetch.urls] == fetch.given
        assert sum(fetch.given) == fetch.target.chunks * CHUNK > 0

    async def test_the_only_one_is_left_with_another_snapshot(self) -> None:
        """Two snapshots are never mixed: it is an error, and a new receive works."""
        held, other = checkpoint(fill=1), checkpoint(fill=2)
        async with (
            replicas(held, other) as sites,
            behind(sites[0], CutAfter(4 * CHUNK)) as proxy,
            behind(sites[1], Late(0.5)) as late,
            receiver() as client,
        ):
            sources = [source(proxy), source(late)]
            fetch = Fetch(client, sources)
            running = asyncio.create_task(fetch.run())
            await fetch.under_way.wait()
            await proxy.aclose()
            with pytest.raises(CheckpointChangedError):
                await running
            again = Fetch(client, sources)
            await again.run()
        again.check(other)


async def test_a_client_that_is_closed_ends_it_at_once() -> None:
    """No source is blamed for it."""
    held = checkpoint()
    async with (
        replicas(held, held) as sites,
        behind(sites[0], Drip(1e6, burst=1 << 13)) as one,
        behind(sites[1], Drip(1e6, burst=1 << 13)) as other,
        receiver(reconnect_timeout=FAR) as client,
    ):
        fetch = Fetch(client, [source(one), source(other)])
        running = asyncio.create_task(fetch.run())
        await fetch.under_way.wait()
        await client.aclose()
        with pytest.raises(ClosedError):
            await running
    assert fetch.dropped() == {}


async def test_the_newest_step_that_is_served_is_the_latest() -> None:
    """A source that serves nothing, or an older step, is not waited for."""
    held, later = checkpoint(), checkpoint(step=STEP + 1)
    async with replicas(held, held, later) as sites, receiver() as client:
        sources = [source(site) for site in sites]
        for chosen in ([0, 1, 2], [2, 0], [0, 2]):
            fetch = Fetch(client, [sources[number] for number in chosen])
            assert (await fetch.peers.latest()).step == STEP + 1
        fetch = Fetch(client, [CLOSED, sources[0]])
        assert (await fetch.peers.latest()).step == STEP


async def test_many_sources_share_the_connections() -> None:
    """Each has one then."""
    held = checkpoint()
    async with replicas(*[held] * 20) as sites, receiver() as client:
        fetch = Fetch(client, [source(site) for site in sites])
        await fetch.run()
        assert max(len(site.connections) for site in sites) <= 2
    fetch.check(held)
