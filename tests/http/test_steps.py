"""``transport.steps``: what a peer publishes, as it comes, through whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from aiockpt import AuthenticationError, StepNotFoundError
from aiockpt.errors import (
    ClosedError,
    LocalProtocolError,
    PeerUnreachableError,
    RemoteProtocolError,
    TransferStalledError,
)
from aiockpt.http import manifests
from aiockpt.testing import Answer, CutAfter, FaultProxy, Refuse, StallAfter
from tests.support.applications import running
from tests.support.proofs import proves
from tests.support.serving import settle
from tests.support.transports import (
    Transport,
    in_the_middle,
    pair,
    port_of,
    proxied,
    receive,
    through,
    transport,
    weights,
)

pytestmark = pytest.mark.asyncio

STATE = {"n": 1}


async def publish(sender: Transport, step: int) -> None:
    """Offer a step."""
    await sender.send_checkpoint([], step, STATE)


async def soon(steps: AsyncIterator[int]) -> int:
    """Return the next step, which must not take long."""
    async with asyncio.timeout(15):
        return await anext(steps)


async def nothing(steps: AsyncIterator[int]) -> None:
    """Wait in vain for a while."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await anext(steps)


@proves("cell HTTPTransport.steps: success")
async def test_every_step_that_is_awaited_is_given():
    """In the order of their publication, each once."""
    async with pair() as (sender, receiver):
        found = []

        async def follow() -> None:
            async for step in receiver.steps(sender.metadata()):
                found.append(step)
                if step == 5:
                    return

        following = asyncio.create_task(follow())
        for step in (1, 2, 3, 5):
            await publish(sender, step)
            await settle(lambda step=step: step in found)
        await following
    assert found == [1, 2, 3, 5]


async def test_what_was_missed_is_skipped():
    """Only the newest can be fetched, so only the newest is given."""
    async with pair() as (sender, receiver):
        steps = receiver.steps(sender.metadata())
        for step in (1, 2, 3):
            await publish(sender, step)
        assert await soon(steps) == 3
        for step in (4, 5):
            await publish(sender, step)
        assert await soon(steps) == 5
        await nothing(steps)


@pytest.mark.parametrize("after", [0, 7, 6])
async def test_after_says_what_is_known(after):
    """Nothing up to it is given."""
    async with pair() as (sender, receiver):
        await publish(sender, 7)
        steps = receiver.steps(sender.metadata(), after)
        if after == 7:
            await nothing(steps)
            await publish(sender, 8)
        assert await soon(steps) == max(7, after + 1)


async def test_it_may_begin_before_the_peer_serves():
    """A worker may be there before the trainer."""
    async with transport() as receiver:
        sender = transport()  # its address is known, and nobody answers
        steps = receiver.steps(sender.metadata())
        first = asyncio.ensure_future(anext(steps))
        await asyncio.sleep(0.05)
        async with sender:
            await publish(sender, 1)
            assert await first == 1


async def test_a_retraction_is_waited_out():
    """Nothing is given while nothing is served; what comes then is."""
    async with pair() as (sender, receiver):
        steps = receiver.steps(sender.metadata())
        await publish(sender, 1)
        assert await soon(steps) == 1
        waiting = asyncio.ensure_future(anext(steps))
        await settle(lambda: sender.statistics().waiting == 1)
        for step in (2, 3):
            await sender.disallow_checkpoint()
            await publish(sender, step)
        assert await waiting in (2, 3)


async def test_a_step_that_is_gone_is_followed_by_another():
    """A receive of it says so at once, and the next one is there."""
    async with pair() as (sender, receiver):
        steps = receiver.steps(sender.metadata())
        await publish(sender, 1)
        step = await soon(steps)
        await publish(sender, 2)
        with pytest.raises(StepNotFoundError):
            await receive(sender, receiver, step)
        step = await soon(steps)
        assert await receive(sender, receiver, step) == STATE


@proves("cell HTTPTransport.steps: timeout")
async def test_a_deadline_or_a_cancel_loses_no_step():
    """The iterator goes on where it was."""
    async with pair() as (sender, receiver):
        steps = receiver.steps(sender.metadata())
        for step in range(1, 4):
            await nothing(steps)
            cancelled = asyncio.ensure_future(anext(steps))
            await asyncio.sleep(0.01 * step)
            cancelled.cancel()
            await asyncio.wait({cancelled})
            assert cancelled.cancelled()
            await publish(sender, step)
            assert await soon(steps) == step
        await settle(lambda: sender.statistics().waiting == 0)


@proves("cell HTTPTransport.steps: cancel")
async def test_a_cancel_at_any_moment_loses_no_step():
    """Wherever it was: a step is given, or it is still to come."""
    async with pair() as (sender, receiver):
        await publish(sender, 1)
        for turns in range(40):
            steps = receiver.steps(sender.metadata())
            task = asyncio.ensure_future(anext(steps))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            if task.cancelled():
                assert await soon(steps) == 1
            else:
                assert task.result() == 1


async def test_two_iterators_know_nothing_of_each_other():
    """Each has its own place."""
    async with pair() as (sender, receiver):
        one, other = (receiver.steps(sender.metadata()) for _ in range(2))
        await publish(sender, 1)
        assert await soon(one) == 1
        await publish(sender, 2)
        assert [await soon(one), await soon(other)] == [2, 2]


@pytest.mark.parametrize(
    "fault",
    [Refuse(), CutAfter(0), CutAfter(40), CutAfter(40, reset=True), StallAfter(40)],
    ids=repr,
)
async def test_a_broken_connection_is_made_again(fault, monkeypatch):
    """A few of them in a row are no news."""
    monkeypatch.setattr(manifests, "_POLL", 0.2)
    async with (
        pair(stall_timeout=0.5) as (sender, receiver),
        proxied(sender, faults=[fault] * 3) as proxy,
    ):
        steps = receiver.steps(through(proxy, sender))
        await publish(sender, 1)
        assert await soon(steps) == 1
        assert proxy.statistics().connections > 3


async def test_a_connection_that_breaks_during_the_wait_is_made_again():
    """What was published meanwhile is given."""
    async with pair() as (sender, receiver), proxied(sender) as proxy:
        steps = receiver.steps(through(proxy, sender))
        waiting = asyncio.ensure_future(anext(steps))
        await settle(lambda: sender.statistics().waiting == 1)
        proxy.refuse()
        await proxy.cut_all()
        await publish(sender, 1)
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await proxy.listen()
        assert await waiting == 1


@proves("cell HTTPTransport.steps: the other one dies")
async def test_a_peer_that_starts_again_is_found_again():
    """At the same address, with a token that both know."""
    async with transport(token="secret") as receiver:
        async with transport(token="secret") as first:
            steps = receiver.steps(first.metadata())
            await publish(first, 1)
            assert await soon(steps) == 1
            port = port_of(first)
            waiting = asyncio.ensure_future(anext(steps))
            await settle(lambda: first.statistics().waiting == 1)
        await asyncio.sleep(0.1)
        async with transport(token="secret", port=port) as second:
            await publish(second, 1)  # it began again at what is known
            await settle(lambda: second.statistics().waiting == 1, patience=30)
            await publish(second, 2)
            assert await waiting == 2


async def test_a_peer_with_another_token_is_an_error():
    """Its new metadata must be handed over; trying again would not help."""
    async with transport() as receiver:
        async with transport() as first:
            metadata, port = first.metadata(), port_of(first)
        async with transport(port=port) as second:
            await publish(second, 1)
            steps = receiver.steps(metadata)
            for _ in range(2):  # it stays what it is
                with pytest.raises(AuthenticationError):
                    await soon(steps)
            assert await soon(receiver.steps(second.metadata())) == 1


@proves(
    "cell HTTPTransport.steps: error", "cell HTTPTransport.steps: the other one dies"
)
async def test_a_silent_peer_can_be_given_up():
    """After ``reconnect_timeout``; the iterator may be used again."""
    async with transport() as sender, transport() as receiver:
        async with proxied(sender) as proxy:
            metadata = through(proxy, sender)
        steps = receiver.steps(metadata, reconnect_timeout=0.2)
        for _ in range(2):
            with pytest.raises(PeerUnreachableError):
                await soon(steps)
        await publish(sender, 1)
        back = FaultProxy("127.0.0.1", port_of(sender))
        back.port = proxy.port
        async with back:
            assert await soon(steps) == 1


async def test_a_peer_that_hangs_is_given_up(monkeypatch):
    """It may be silent for as long as it was asked to wait, and the stall timeout."""
    monkeypatch.setattr(manifests, "_POLL", 0.1)
    async with (
        pair(stall_timeout=0.2) as (sender, receiver),
        proxied(sender, otherwise=StallAfter(0)) as proxy,
    ):
        steps = receiver.steps(through(proxy, sender), reconnect_timeout=0)
        with pytest.raises(TransferStalledError):
            await soon(steps)


async def test_another_server_is_an_error():
    """After three such answers in a row."""
    wrong = Answer(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno")
    async with (
        pair() as (sender, receiver),
        proxied(sender, otherwise=wrong) as proxy,
    ):
        steps = receiver.steps(through(proxy, sender))
        with pytest.raises(RemoteProtocolError, match="is that an aiockpt server"):
            await soon(steps)
        assert proxy.statistics().connections == 3


async def test_shutdown_ends_the_wait():
    """Of one's own transport; it does not wait for the iterator."""
    async with transport() as sender:
        receiver = transport()
        steps = receiver.steps(sender.metadata())
        waiting = asyncio.ensure_future(anext(steps))
        await settle(lambda: sender.statistics().waiting == 1)
        async with asyncio.timeout(5):
            await receiver.shutdown()
            with pytest.raises(ClosedError):
                await waiting
        with pytest.raises(ClosedError):
            await anext(steps)
        with pytest.raises(ClosedError):
            receiver.steps(sender.metadata())


async def test_shutdown_ends_the_pause_before_the_next_attempt():
    """However long the peer, or what stands before it, asks to stay away."""
    later = Answer(
        b"HTTP/1.1 503 Later\r\nRetry-After: 30\r\nContent-Length: 0\r\n\r\n"
    )
    async with transport() as sender, proxied(sender, otherwise=later) as proxy:
        receiver = transport()
        metadata = through(proxy, sender)
        calls = [
            asyncio.ensure_future(anext(receiver.steps(metadata))),
            asyncio.ensure_future(receiver.recv_checkpoint(0, metadata, 1)),
        ]
        await settle(lambda: proxy.statistics().connections == 2)
        await asyncio.wait(calls, timeout=0.2)
        async with asyncio.timeout(4):
            await receiver.shutdown()
            for call in calls:
                with pytest.raises(ClosedError):
                    await call


async def test_two_tasks_may_not_share_an_iterator():
    """They would be given the same step, or an older one after a newer."""
    async with pair() as (sender, receiver):
        steps = receiver.steps(sender.metadata())
        first = asyncio.ensure_future(anext(steps))
        await settle(lambda: sender.statistics().waiting == 1)
        with pytest.raises(LocalProtocolError, match="two tasks"):
            await anext(steps)
        await publish(sender, 1)
        assert await first == 1
        await publish(sender, 2)
        assert await soon(steps) == 2


@proves("cell HTTPTransport.steps: cancel")
async def test_an_iterator_that_nobody_asks_holds_nothing():
    """It may be dropped: no task waits, and the shutdown is quick."""
    async with pair() as (sender, receiver):
        steps = receiver.steps(sender.metadata())
        await publish(sender, 1)
        assert await soon(steps) == 1
        assert sender.statistics().waiting == 0
        async with asyncio.timeout(5):
            await receiver.shutdown()


async def test_it_does_not_disturb_a_receive():
    """Both go on at once, over one transport."""
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, weights(mib=32))
        steps = receiver.steps(sender.metadata(), 1)

        async def act() -> None:
            await nothing(steps)

        task, _ = await in_the_middle(
            lambda halfway: receive(sender, receiver, progress=halfway), act
        )
        await task


@asynccontextmanager
async def another(**headers: str) -> AsyncIterator[tuple[str, list[str]]]:
    """Serve an answer to every request; give the address and what was asked."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path_qs)
        return web.json_response({}, headers=headers)

    app = web.Application()
    app.router.add_get("/{any:.*}", answer)
    async with running(app) as host:
        yield f"{host.url}/checkpoint/", asked


async def test_a_server_that_knows_no_after_is_polled_slowly():
    """One of an earlier version answers at once with what it has, which is no news."""
    headers = {"Aiockpt-Step": "7", "ETag": f'"{"0" * 32}"'}
    async with another(**headers) as (url, asked), transport() as receiver:
        steps = receiver.steps(url)
        assert await soon(steps) == 7
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await anext(steps)
    assert asked[:2] == ["/checkpoint/latest", "/checkpoint/latest?after=7"]
    assert len(asked) < 50


@pytest.mark.parametrize("step", [2**63, 10**19 - 1])
async def test_a_step_that_nobody_can_receive_is_the_peers_error(step: int):
    """And no mistake of the loop that would go on with it."""
    headers = {"Aiockpt-Step": f"{step}", "ETag": f'"{"0" * 32}"'}
    async with another(**headers) as (url, _), transport() as receiver:
        with pytest.raises(RemoteProtocolError, match="names no step"):
            await soon(receiver.steps(url))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("ftp://h/",), LocalProtocolError),
        (("http://h/", -1), ValueError),
        (("http://h/", 2**63), ValueError),
        (("http://h/", 1.5), TypeError),
    ],
)
async def test_misuse_is_told_at_once(arguments: Any, error: type[Exception]):
    """And not where the steps are awaited."""
    async with transport() as receiver:
        with pytest.raises(error):
            receiver.steps(*arguments)
        with pytest.raises(ValueError, match="timeout"):
            receiver.steps("http://h/", reconnect_timeout=-1)


async def test_its_repr_shows_no_secret():
    """It says where it is."""
    async with pair() as (sender, receiver):
        steps = receiver.steps(sender.metadata(), 3)
        assert repr(steps) == f"<Steps of {sender.address()} after=3>"
