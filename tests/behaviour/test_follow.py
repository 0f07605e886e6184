"""Steps as a peer publishes them, and receivers that follow them.

The trainer goes on, restarts or is away; connections break; calls are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import (
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from itertools import chain, cycle, repeat
from random import Random
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file

from aiockpt import (
    AuthenticationError,
    StepNotFoundError,
    TemplateMismatchError,
    TransferEvent,
    add_hook,
    join_metadata,
)
from aiockpt.errors import (
    ClosedError,
    LocalProtocolError,
    PeerUnreachableError,
    RemoteProtocolError,
    TransferTimeoutError,
    TransportError,
)
from aiockpt.testing import (
    Answer,
    CutAfter,
    Drip,
    FaultProxy,
    Refuse,
    StallAfter,
)
from tests.support.commandline import aiockpt_command
from tests.support.ports import free_port
from tests.support.proofs import proves
from tests.support.servers import running, settle
from tests.support.transports import (
    MIB,
    TOKEN,
    check,
    pair,
    port_of,
    proxied,
    publish,
    receive,
    soon,
    state_of,
    through,
    transport,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_blocking")]

SLOW = Drip(MIB, burst=64 << 10)


@contextmanager
def events(stop):
    """Give the events of one kind, as they come."""
    found: list[TransferEvent] = []

    def note(event):
        if event.stop == stop:
            found.append(event)

    remove = add_hook(note)
    try:
        yield found
    finally:
        remove()


async def nothing(steps, seconds=0.1):
    """Wait in vain for a while."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await anext(steps)


async def waiting_for(iterator, sender):
    """Ask for the next one; return once the sender has the request."""
    waiting = asyncio.ensure_future(soon(iterator))
    await settle(lambda: sender.statistics().waiting == 1)
    return waiting


@asynccontextmanager
async def restarted(before):
    """Shut a sender down, and give another one in its place."""
    port = port_of(before)
    await before.shutdown(wait=False)
    async with transport(token=TOKEN, port=port) as after:
        yield after


@asynccontextmanager
async def known(**options):
    """Give a sender and a receiver that were given the same token."""
    async with (
        transport(token=TOKEN, port=free_port(), **options) as sender,
        transport(token=TOKEN, **options) as receiver,
    ):
        yield sender, receiver


class TestSteps:
    """`transport.steps` yields the numbers of new steps."""

    @proves("cell HTTPTransport.steps: success")
    async def test_every_step_that_is_awaited_is_given(self):
        """Each step comes once, in order; missed ones are skipped."""
        async with pair() as (sender, receiver):
            steps = receiver.steps(sender.metadata())
            for step in (1, 2, 3, 5):
                waiting = await waiting_for(steps, sender)
                await publish(sender, step)
                assert await waiting == step
            for step in (6, 7):
                await publish(sender, step)
            assert await soon(steps) == 7
            await nothing(steps)
            await publish(sender, 8)
            with pytest.raises(StepNotFoundError):
                await receive(sender, receiver, 7)
            assert await soon(steps) == 8
            assert await soon(receiver.steps(sender.metadata())) == 8  # another place

    @pytest.mark.parametrize("after", [7, 6])
    async def test_after_says_what_is_known(self, after):
        """The iterator gives only steps later than ``after``."""
        async with pair() as (sender, receiver):
            await publish(sender, 7)
            steps = receiver.steps(sender.metadata(), after)
            assert repr(steps) == f"<Steps of {sender.address()} after={after}>"
            if after == 7:
                await nothing(steps)
                await publish(sender, 8)
            assert await soon(steps) == max(7, after + 1)

    async def test_it_may_begin_before_the_peer_serves(self):
        """Nothing is given while nothing is served, nor while it is retracted."""
        async with transport() as receiver:
            sender = transport()  # its address is known, and nobody answers
            steps = receiver.steps(sender.metadata())
            first = asyncio.ensure_future(soon(steps))
            await asyncio.sleep(0.05)
            async with sender:
                await publish(sender, 1)
                assert await first == 1
                waiting = await waiting_for(steps, sender)
                for step in (2, 3):
                    await sender.disallow_checkpoint()
                    await publish(sender, step)
                assert await waiting in (2, 3)

    @proves("cell HTTPTransport.steps: timeout", "cell HTTPTransport.steps: cancel")
    async def test_a_deadline_or_a_cancel_loses_no_step(self):
        """After a cancel at any moment, each step was given or is still to come."""
        async with pair() as (sender, receiver):
            steps = receiver.steps(sender.metadata())
            for step in range(1, 4):
                await nothing(steps, 0.02)
                await publish(sender, step)
                assert await soon(steps) == step
            for turns in range(40):
                steps = receiver.steps(sender.metadata())
                task = asyncio.ensure_future(anext(steps))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
                given = await soon(steps) if task.cancelled() else task.result()
                assert given == 3
            await settle(lambda: sender.statistics().waiting == 0)
            async with asyncio.timeout(60):
                await receiver.shutdown()

    @pytest.mark.parametrize(
        "fault",
        [Refuse(), CutAfter(0), CutAfter(40), CutAfter(40, reset=True)],
        ids=repr,
    )
    async def test_a_broken_connection_is_made_again(self, fault):
        """A few of them in a row are no news."""
        async with (
            pair() as (sender, receiver),
            proxied(sender, faults=[fault] * 3) as proxy,
        ):
            steps = receiver.steps(through(proxy, sender))
            await publish(sender, 1)
            assert await soon(steps) == 1
            assert proxy.statistics().connections > 3

    @proves(
        "cell HTTPTransport.steps: error",
        "cell HTTPTransport.steps: the other one dies",
    )
    async def test_a_silent_peer_can_be_given_up(self):
        """The iterator raises after ``reconnect_timeout``, and may be used again."""
        async with pair() as (sender, receiver):
            async with proxied(sender) as proxy:
                metadata = through(proxy, sender)
            steps = receiver.steps(metadata, reconnect_timeout=0.1)
            for _ in range(2):
                with pytest.raises(PeerUnreachableError):
                    await soon(steps)
            await publish(sender, 1)
            back = FaultProxy("127.0.0.1", port_of(sender))
            back.port = proxy.port
            async with back:
                assert await soon(steps) == 1

    @pytest.mark.parametrize(
        ("answer", "kind", "options"),
        [
            (b"502 Bad Gateway", TransportError, {"reconnect_timeout": 0.2}),
            (b"503 X\r\nRetry-After: 30", TransportError, {"reconnect_timeout": 0.2}),
            (b"404 Not Found", RemoteProtocolError, {}),
            (b"204 No Content", RemoteProtocolError, {}),
        ],
    )
    async def test_what_is_not_the_sender_ends_the_wait(self, answer, kind, options):
        """A proxy may answer for a sender that is gone, another server for ever."""
        said = Answer(b"HTTP/1.1 " + answer + b"\r\nContent-Length: 0\r\n\r\n")
        async with pair() as (sender, receiver), proxied(sender, otherwise=said) as by:
            for after in (None, 3):
                steps = receiver.steps(through(by, sender), after=after, **options)
                with pytest.raises(kind, match="answered HTTP"):
                    await soon(steps)

    async def test_shutdown_ends_the_wait(self):
        """A shutdown also ends the pause before the next attempt."""
        later = Answer(
            b"HTTP/1.1 503 Later\r\nRetry-After: 30\r\nContent-Length: 0\r\n\r\n"
        )
        async with transport() as sender, proxied(sender, otherwise=later) as proxy:
            receiver = transport()
            steps = receiver.steps(sender.metadata())
            metadata = through(proxy, sender)
            calls = [
                await waiting_for(steps, sender),
                asyncio.ensure_future(anext(receiver.steps(metadata))),
                asyncio.ensure_future(receiver.recv_checkpoint(0, metadata, 1)),
            ]
            await settle(lambda: proxy.statistics().bytes_down >= 2 * len(later.data))
            async with asyncio.timeout(20):
                await receiver.shutdown()
                for call in calls:
                    with pytest.raises(ClosedError):
                        await call
            with pytest.raises(ClosedError):
                await anext(steps)
            with pytest.raises(ClosedError):
                receiver.steps(sender.metadata())

    async def test_two_tasks_may_not_share_an_iterator(self):
        """They would be given the same step, or an older one after a newer."""
        async with pair() as (sender, receiver):
            steps = receiver.steps(sender.metadata())
            first = await waiting_for(steps, sender)
            with pytest.raises(LocalProtocolError, match="two tasks"):
                await anext(steps)
            for step in (1, 2):
                await publish(sender, step)
                assert await (first if step == 1 else soon(steps)) == step

    @pytest.mark.parametrize("step", [7, 2**63])
    async def test_a_server_of_an_earlier_version_is_polled_slowly(self, step):
        """It answers at once, with what it has; a step that is none is its error."""
        asked, app = list[str](), web.Application()

        async def answer(request):
            asked.append(request.path_qs)
            headers = {"Aiockpt-Step": f"{step}", "ETag": f'"{"0" * 32}"'}
            return web.json_response({}, headers=headers)

        app.router.add_get("/{any:.*}", answer)
        async with running(app) as host, transport() as receiver:
            steps = receiver.steps(f"{host.url}/checkpoint/")
            if step > 7:
                with pytest.raises(RemoteProtocolError, match="names no step"):
                    await soon(steps)
                return
            assert await soon(steps) == 7
            await nothing(steps, 0.5)
        assert asked[:2] == ["/checkpoint/latest", "/checkpoint/latest?after=7"]
        assert len(asked) < 25

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [(("ftp://h/",), LocalProtocolError), (("http://h/", -1), ValueError),
         (("http://h/", 2**63), ValueError), (("http://h/", 1.5), TypeError)],
    )  # fmt: skip
    async def test_misuse_is_told_at_once(self, arguments: Any, error):
        """The call raises, before anything is awaited."""
        async with transport() as receiver:
            with pytest.raises(error):
                receiver.steps(*arguments)
            with pytest.raises(ValueError, match="timeout"):
                receiver.steps("http://h/", reconnect_timeout=-1)


class TestFollow:
    """``transport.follow``, and a receive without a step."""

    @proves("cell HTTPTransport.follow: success")
    async def test_each_newer_step_is_received(self):
        """The steps arrive without a template, or in the template's tensors."""
        async with pair() as (sender, receiver):
            for into in (None, state_of(0)):
                await publish(sender, 1)
                follower = receiver.follow(sender.metadata(), into=into)
                async with aclosing(follower):
                    assert (await soon(follower))[0] == 1
                    for step in (2, 3):
                        await publish(sender, step)
                        found, state = await soon(follower)
                        assert found == step
                        assert torch.equal(state["w"], state_of(step)["w"])
                        assert into is None or state["w"] is into["w"]

    async def test_options_of_a_receive_are_those_of_a_follower(self):
        """A part of it; only what has changed; and the step to begin after."""
        async with pair() as (sender, receiver):
            await publish(sender, 1)
            metadata = sender.metadata()
            async with aclosing(receiver.follow(metadata, select=["step"])) as follower:
                assert await soon(follower) == (1, {"step": 1})
            template = {**state_of(1), "step": 0}
            follower = receiver.follow(metadata, into=template, have=True)
            with events("recv") as found:
                async with aclosing(follower):
                    await soon(follower)
            assert found[0].nbytes < found[0].reused == 1 << 20
            async with aclosing(receiver.follow(metadata, after=1)) as follower:
                waiting = await waiting_for(follower, sender)
                await publish(sender, 2)
                assert (await waiting)[0] == 2

    @pytest.mark.parametrize("follows", [True, False])
    async def test_a_superseded_receive_goes_on_to_the_newest(self, follows):
        """A sender that keeps nothing replaces the step: the next one is received."""
        async with (
            transport(keep_superseded=0) as sender,
            transport() as receiver,
            proxied(sender, otherwise=SLOW) as proxy,
        ):
            metadata = through(proxy, sender)
            follower = receiver.follow(metadata)
            with events("retry") as retries:
                async with aclosing(follower):
                    call = (
                        soon(follower)
                        if follows
                        else receiver.recv_checkpoint(0, metadata)
                    )
                    first = asyncio.ensure_future(call)
                    await settle(lambda: sender.statistics().waiting)
                    await publish(sender, 1, mib=2)
                    await settle(lambda: proxy.statistics().bytes_down > MIB // 2)
                    await publish(sender, 2)
                    got = await first
                    check(*(got if follows else (2, got)))
            assert retries or not follows
            template, both = state_of(0), [sender.metadata(), metadata]
            await receiver.recv_checkpoint(0, both, into=template)
            check(2, {**template, "step": 2})
            await sender.disallow_checkpoint()
            with pytest.raises(TransferTimeoutError):
                await receiver.recv_checkpoint(0, metadata, timeout=0.1)

    async def test_a_fetch_of_the_command_line_gets_what_is_served_now(self, tmp_path):
        """It ends with a whole step although the trainer replaces it meanwhile."""
        async with (
            transport(keep_superseded=0) as sender,
            proxied(sender, otherwise=SLOW) as proxy,
        ):
            await publish(sender, 1, mib=4)
            file = tmp_path / "copy.safetensors"
            fetching = await asyncio.create_subprocess_exec(
                *aiockpt_command("fetch", through(proxy, sender), "-o", file),
                stderr=asyncio.subprocess.PIPE,
            )
            await settle(lambda: proxy.statistics().bytes_down > MIB // 2)
            await publish(sender, 2)
            _, told = await fetching.communicate()
            assert fetching.returncode == 0, told
            assert b"step 2, snapshot" in told
            assert load_file(file)["w"].eq(2.0).all()

    @proves("cell HTTPTransport.follow: the other one dies")
    async def test_a_sender_that_is_away_is_waited_for(self):
        """Connections break in the middle of a receive, and nobody answers then."""
        async with (
            transport(token=TOKEN) as sender,
            transport(
                token=TOKEN, reconnect_timeout=0.1, stall_timeout=0.2
            ) as receiver,
            proxied(sender, faults=[CutAfter(1 << 19)] * 6) as proxy,
        ):
            await publish(sender, 1, mib=4)
            async with aclosing(receiver.follow(through(proxy, sender))) as follower:
                check(*await soon(follower))
                waiting = asyncio.ensure_future(soon(follower))
                proxy.refuse()
                await proxy.cut_all()
                await asyncio.sleep(0.3)
                await publish(sender, 2)
                await proxy.listen()
                check(*await waiting)

    async def test_a_sender_that_dies_after_its_last_byte_fails_nothing(self):
        """It never answers that the receive has ended, which is no news."""
        async with pair() as (sender, receiver):
            await publish(sender, 1)

            async def relay(down, back):
                up, to = await asyncio.open_connection("127.0.0.1", port_of(sender))

                async def ask():
                    while data := await down.read(MIB):
                        to.write(b"" if data.startswith(b"HEAD") else data)

                asking = asyncio.create_task(ask())
                while data := await up.read(MIB):
                    back.write(data)
                await asking
                back.close()
                to.close()

            async with await asyncio.start_server(relay, "127.0.0.1") as server:
                port = server.sockets[0].getsockname()[1]
                metadata = sender.metadata().replace(str(port_of(sender)), str(port))
                check(1, await receiver.recv_checkpoint(0, metadata, 1, timeout=4))
                await receiver.shutdown()
                await sender.shutdown()

    @proves("cell HTTPTransport.follow: timeout")
    async def test_a_receive_that_is_late_is_begun_again(self):
        """Its deadline has passed: the log says so, and the step is received then."""
        async with (
            pair() as (sender, receiver),
            proxied(sender, faults=[StallAfter(64 << 10)] * 4) as proxy,
        ):
            await publish(sender, 1)
            follower = receiver.follow(through(proxy, sender), timeout=0.5)
            with events("retry") as retries:
                async with aclosing(follower):
                    check(*await soon(follower))
            assert logging.WARNING in [event.level for event in retries]
            assert "timed out" in retries[-1].detail

    @proves("cell HTTPTransport.follow: the other one dies")
    @pytest.mark.parametrize("first", [90, 103, 102])
    async def test_a_restarted_sender_is_followed(self, first, caplog):
        """The follower goes on from the sender's new step, and no step comes twice."""
        async with known() as (before, receiver):
            await publish(before, 102)
            follower = receiver.follow(before.metadata())
            async with aclosing(follower):
                assert (await soon(follower))[0] == 102
                with events("restart") as restarts:
                    async with restarted(before) as after:
                        waiting = asyncio.ensure_future(soon(follower))
                        await publish(after, first)
                        if first == 102:
                            await settle(lambda: after.statistics().waiting)
                            assert not waiting.done()
                            await publish(after, 103)
                        step, state = await waiting
                        check(step, state)
                        assert step == (103 if first == 102 else first)
                        assert [event.step for event in restarts] == [first]
                        await publish(after, step + 1)
                        check(*await soon(follower))
        told = [r for r in caplog.records if "started again" in r.getMessage()]
        assert [record.levelno for record in told] == [logging.WARNING]

    @pytest.mark.parametrize(
        ("when", "process"),
        [("waiting", True), ("waiting", False), ("later", False), ("retracted", True)],
    )
    async def test_a_sender_that_goes_back_is_followed(self, when, process):
        """A trainer may roll back to a checkpoint without a restart."""
        async with pair(process=process) as (sender, receiver):
            await publish(sender, 10)
            follower = receiver.follow(sender.metadata())
            steps = receiver.steps(sender.metadata())
            async with aclosing(follower):
                assert (await soon(follower))[0] == await soon(steps) == 10
                with events("restart") as returns:
                    if when == "waiting":
                        both = [
                            asyncio.ensure_future(soon(f)) for f in (follower, steps)
                        ]
                        await settle(lambda: sender.statistics().waiting == 2)
                        await publish(sender, 5)
                        (step, state), number = await both[0], await both[1]
                    else:
                        if when == "retracted":
                            await sender.disallow_checkpoint()
                        await publish(sender, 5)
                        step, state = await soon(follower)
                        number = await soon(steps)
                    check(step, state)
                    assert step == number == 5
                    await publish(sender, 6)
                    assert (await soon(follower))[0] == await soon(steps) == 6
            assert [each.step for each in returns] == [5, 5]
            assert "gone back" in returns[0].detail

    async def test_a_return_is_noticed_after_a_known_step(self):
        """A busy follower notices it, and one that begins after a step."""
        async with pair() as (sender, receiver):
            await publish(sender, 10)
            follower = receiver.follow(sender.metadata(), after=10)
            async with aclosing(follower):
                waiting = await waiting_for(follower, sender)
                for step in (4, 3):
                    await publish(sender, step)
                    found, state = await waiting if step == 4 else await soon(follower)
                    check(found, state)
                    assert found == step
                for step in (2, 1, 20):
                    await publish(sender, step)
                assert (await soon(follower))[0] == 20
                await nothing(follower)

    @pytest.mark.parametrize("serves", [True, False])
    async def test_a_restart_is_noticed_before_the_first_step(self, serves):
        """A follower that begins after a step knows the sender's start by then."""
        async with known() as (before, receiver):
            if serves:
                await publish(before, 102)
            else:
                await before.start()
            follower = receiver.follow(before.metadata(), after=102)
            async with aclosing(follower):
                waiting = await waiting_for(follower, before)
                async with restarted(before) as after:
                    await publish(after, 90)
                    check(*await waiting)

    async def test_a_restart_during_a_receive_is_noticed(self):
        """The restarted sender has another step, and the old one is not waited for."""
        async with (
            known() as (before, receiver),
            proxied(before, otherwise=SLOW) as proxy,
        ):
            await publish(before, 102, mib=4)
            follower = receiver.follow(through(proxy, before))
            async with aclosing(follower):
                waiting = asyncio.ensure_future(soon(follower))
                await settle(lambda: proxy.statistics().bytes_down > MIB // 2)
                async with restarted(before) as after:
                    await publish(after, 90)
                    check(*await waiting)

    @proves("cell HTTPTransport.follow: error")
    async def test_what_is_wrong_for_good_is_raised(self):
        """A template that does not fit, a wrong token, a transport that is closed."""
        async with known() as (sender, receiver):
            await publish(sender, 1)
            misfit = {"w": torch.zeros(3), "step": 0}
            with pytest.raises(TemplateMismatchError):
                await anext(receiver.follow(sender.metadata(), into=misfit))
            async with transport(token="another") as stranger:
                with pytest.raises(AuthenticationError):
                    await anext(stranger.follow(sender.metadata()))
            waiting = await waiting_for(
                receiver.follow(sender.metadata(), after=1), sender
            )
            await receiver.shutdown()
            with pytest.raises(ClosedError):
                await waiting
            with pytest.raises(ClosedError):
                receiver.follow(sender.metadata())

    @proves("cell HTTPTransport.follow: cancel")
    async def test_a_cancelled_follower_leaves_nothing_behind(self):
        """Wherever it was; another one begins anew."""
        async with pair() as (sender, receiver):
            await publish(sender, 1)
            for turns in range(0, 200, 10):
                follower = receiver.follow(sender.metadata())
                task = asyncio.ensure_future(anext(follower))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
                await follower.aclose()
            check(*await soon(receiver.follow(sender.metadata())))


class TestSeveralSenders:
    """Several senders are followed, each of which serves its own shards."""

    async def test_the_highest_step_is_given(self):
        """The others are about to publish it, also one that serves nothing yet."""
        async with trainer(3) as (senders, receiver):
            steps = steps_of(senders, receiver)
            for rank, step in ((0, 1), (1, 3), (0, 2), (2, 5), (1, 4), (1, 5)):
                await publish(senders[rank], step)
            assert await soon(steps) == 5
            await nothing(steps)
            waiting = await waiting_for(steps, senders[0])
            await publish(senders[2], 6)
            assert await waiting == 6
            await publish(senders[0], 6)
            await publish(senders[1], 6)
            await nothing(steps)
            assert (
                repr(steps) == f"<Steps of {senders[0].address()} and 2 more after=6>"
            )

    async def test_a_cancelled_wait_loses_no_step(self):
        """Whether it was cancelled before the first answer, or before the others'."""
        async with trainer(3) as (senders, receiver):
            for rank, step in enumerate((1, 3, 2)):
                await publish(senders[rank], step)
            for turns in range(0, 120, 3):
                steps = steps_of(senders, receiver)
                task = asyncio.ensure_future(anext(steps))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
                given = await soon(steps) if task.cancelled() else task.result()
                assert given == 3

    @pytest.mark.parametrize("fault", [Refuse(), StallAfter(0)], ids=repr)
    async def test_a_sender_that_is_away_does_not_hide_the_others(self, fault):
        """A replica may serve its shards; if not, the receive finds out."""
        async with (
            trainer(2) as (senders, receiver),
            proxied(senders[0], otherwise=fault) as proxy,
        ):
            steps = steps_of(senders, receiver, by={0: proxy})
            for step in (1, 2):
                await publish(senders[1], step)
                assert await soon(steps) == step

    async def test_a_sender_that_is_silent_too_long_ends_the_wait(self):
        """The error names it, as that of a single sender does."""
        async with (
            trainer(2) as (senders, receiver),
            proxied(senders[1], otherwise=Refuse()) as proxy,
        ):
            steps = steps_of(senders, receiver, by={1: proxy}, reconnect_timeout=0.1)
            with pytest.raises(TransportError, match=str(proxy.port)):
                await soon(steps)

    async def test_a_wrong_token_of_one_sender_is_raised(self):
        """No receive could succeed."""
        async with trainer(1) as (senders, receiver), transport() as stranger:
            steps = steps_of([*senders, stranger], receiver, plain=True)
            with pytest.raises(AuthenticationError):
                await soon(steps)

    async def test_one_that_starts_again_lower_is_waited_for(self, caplog):
        """The others cannot serve the lower step; a newer one is given."""
        async with trainer(2) as (senders, receiver):
            for sender in senders:
                await publish(sender, 102)
            steps = steps_of(senders, receiver)
            assert await soon(steps) == 102
            with events("restart") as restarts:
                async with restarted(senders[0]) as again:
                    await publish(again, 90)
                    await nothing(steps, 0.5)
                    waiting = asyncio.ensure_future(soon(steps))
                    await publish(again, 91)
                    await asyncio.wait({waiting}, timeout=0.5)
                    assert not waiting.done()
                    await publish(senders[1], 103)
                    assert await waiting == 103
                    name = again.address()
            assert [(each.step, each.peer) for each in restarts] == [(90, name)]
            assert (
                "waiting for them to go back, too, or for a step after 102"
                in restarts[0].detail
            )
        assert "cannot serve yet" in caplog.text

    async def test_all_that_start_again_lower_are_followed(self):
        """The highest of their steps is given, once the last of them serves one."""
        async with trainer(2) as (senders, receiver):
            for sender in senders:
                await publish(sender, 102)
            steps = steps_of(senders, receiver)
            assert await soon(steps) == 102
            with events("restart") as restarts:
                async with restarted(senders[0]) as first:
                    await publish(first, 90)
                    await nothing(steps, 0.3)
                    await publish(first, 91)
                    waiting = asyncio.ensure_future(soon(steps))
                    async with restarted(senders[1]) as second:
                        await publish(second, 90)
                        assert await waiting == 91
                        await publish(second, 91)
                        await nothing(steps, 0.3)
                        await publish(second, 92)
                        assert await soon(steps) == 92
                        names = first.address(), second.address()
            told = [(each.step, each.peer) for each in restarts]
            assert told == [(90, name) for name in names]

    @pytest.mark.parametrize("comes_back", [False, True])
    async def test_one_that_serves_nothing_does_not_hold_the_others_up(
        self, comes_back
    ):
        """All others have gone back; it is gone, or has not published again."""
        async with (
            trainer(3) as (senders, _),
            transport(token=TOKEN, reconnect_timeout=1) as receiver,
            AsyncExitStack() as stack,
        ):
            for sender in senders:
                await publish(sender, 102)
            steps = steps_of(senders, receiver)
            assert await soon(steps) == 102
            if comes_back:
                await stack.enter_async_context(restarted(senders[2]))
            else:
                await senders[2].shutdown(wait=False)
            for sender in senders[:2]:
                again = await stack.enter_async_context(restarted(sender))
                await publish(again, 90)
            await nothing(steps, 0.5)
            assert await soon(steps) == 90
            await publish(again, 91)
            assert await soon(steps) == 91

    async def test_one_that_starts_again_at_a_newer_step_is_followed(self):
        """A replaced rank has caught up with the others."""
        async with trainer(2) as (senders, receiver):
            for sender in senders:
                await publish(sender, 102)
            steps = steps_of(senders, receiver)
            assert await soon(steps) == 102
            with events("restart") as restarts:
                async with restarted(senders[0]) as again:
                    await publish(again, 103)
                    assert await soon(steps) == 103
                    await publish(senders[1], 104)
                    assert await soon(steps) == 104
            assert [each.step for each in restarts] == [103]

    async def test_one_that_is_replaced_holds_the_others_up_until_it_is_there(self):
        """Its new step is that of the others, and is received of all of them."""
        async with trainer(2) as (senders, receiver):
            for sender in senders:
                await publish(sender, 101)
            follower = receiver.follow(joined(senders))
            async with aclosing(follower):
                check(*await soon(follower))
                await publish(senders[0], 102)
                waiting = asyncio.ensure_future(soon(follower))
                async with restarted(senders[1]) as again:
                    await asyncio.wait({waiting}, timeout=0.3)
                    assert not waiting.done()
                    await publish(again, 102)
                    step, state = await waiting
                    assert step == 102
                    check(step, state)

    @pytest.mark.parametrize(
        "seed", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 9))]
    )
    async def test_the_follower_ends_where_the_senders_do(self, seed):
        """They publish, go back and start again in any order; no state is torn."""
        chance, step = Random(seed), 50
        async with trainer(3) as (senders, receiver):
            follower = receiver.follow(joined(senders))
            ports, seen = [*map(port_of, senders)], []

            async def follow():
                async for found, state in follower:
                    check(found, state)
                    seen.append(found)

            async def upset(ranks, *, restarts, publishes):
                for rank in chance.sample(ranks, len(ranks)):
                    if restarts:
                        await senders[rank].shutdown(wait=False)
                        senders[rank] = transport(token=TOKEN, port=ports[rank])
                        await senders[rank].start()
                    if publishes:
                        await publish(senders[rank], step)
                    await asyncio.sleep(chance.choice([0, 0, 0.02, 0.1]))

            following, everybody = asyncio.ensure_future(follow()), range(3)
            try:
                for _ in range(chance.randint(3, 8)):
                    alone = chance.random() < 0.3
                    step += 0 if alone else chance.randint(-5, 3)
                    await upset(
                        [chance.randrange(3)] if alone else everybody,
                        restarts=alone or chance.random() < 0.3,
                        publishes=chance.random() < 0.8,
                    )
                step += chance.choice([-20, 20])
                await upset(everybody, restarts=chance.random() < 0.5, publishes=True)
                await settle(lambda: seen[-1:] == [step] or following.done())
                assert not following.done(), following.result()
            finally:
                following.cancel()
                await asyncio.wait({following})
                for sender in senders:
                    await sender.shutdown(wait=False)

    @pytest.mark.parametrize("missed", [False, True])
    async def test_a_step_that_was_not_received_is_given_again(self, missed):
        """As that of a single sender; it may be the newest one then."""
        async with trainer(2) as (senders, receiver):
            steps, asked = steps_of(senders, receiver), []

            async def receive_once(step):
                asked.append(step)
                if len(asked) == 1:
                    if missed:
                        await publish(senders[1], 8)
                    raise StepNotFoundError(step)
                return "received"

            await publish(senders[0], 7)
            assert await steps.receive(receive_once) == (7 + missed, "received")
            assert asked == [7, 7 + missed]

    async def test_a_lower_step_that_was_not_received_is_given_again(self):
        """Also if nothing is known of the start of a sender that served no step."""
        async with trainer(2) as (senders, receiver):
            steps, asked = steps_of(senders, receiver), []

            async def receive_once(step):
                asked.append(step)
                if asked.count(step) == 1:
                    raise StepNotFoundError(step)

            await publish(senders[0], 102)
            assert await steps.receive(receive_once) == (102, None)
            async with restarted(senders[1]) as second:
                await publish(second, 90)
                async with restarted(senders[0]) as first:
                    await publish(first, 90)
                    async with asyncio.timeout(60):
                        assert await steps.receive(receive_once) == (90, None)
            assert asked == [102, 102, 90, 90]


@asynccontextmanager
async def trainer(ranks):
    """Give the senders of all ranks, and a receiver, which know the same token."""
    async with AsyncExitStack() as stack:
        makes = [transport(token=TOKEN, port=free_port()) for _ in range(ranks)]
        senders = [await stack.enter_async_context(each) for each in makes]
        yield senders, await stack.enter_async_context(transport(token=TOKEN))


def joined(senders, *, by=None, plain=False):
    """Return the joined metadata of senders; those in ``by`` are behind a proxy."""
    texts = [sender.address() if plain else sender.metadata() for sender in senders]
    for rank, proxy in (by or {}).items():
        texts[rank] = through(proxy, senders[rank])
    return join_metadata(texts)


def steps_of(senders, receiver, *, by=None, plain=False, **options):
    """Return the steps of several senders."""
    return receiver.steps(joined(senders, by=by, plain=plain), **options)


@asynccontextmanager
async def shared_address(senders):
    """Give an address of several senders, and the ports of those that were asked.

    Each request goes to the next of them.
    """
    ports, asked = map(port_of, senders), list[int]()

    async def relay(down, back):
        try:
            head = (await down.readuntil(b"\r\n\r\n"))[:-2]
        except asyncio.IncompleteReadError:  # the receiver has ended
            back.close()
            return
        asked.append(next(ports))
        up, to = await asyncio.open_connection("127.0.0.1", asked[-1])
        to.write(head + b"Connection: close\r\n\r\n")
        while data := await up.read(MIB):
            back.write(data)
        back.close()
        to.close()

    async with await asyncio.start_server(relay, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/checkpoint/", asked


async def test_an_address_of_several_senders_is_not_asked_in_a_hurry():
    """Each answers as another start of the sender, with nothing new."""
    async with known() as senders, transport(token=TOKEN) as receiver:
        for sender in senders:
            await publish(sender, 5)
        async with shared_address(cycle(senders)) as (url, asked):
            steps = receiver.steps(url)
            assert await soon(steps) == 5
            await nothing(steps, 0.5)
        assert len(asked) < 15


@pytest.mark.parametrize("follows", [True, False])
async def test_a_restart_before_the_manifest_is_noticed(follows):
    """The step that was served a moment ago is not waited for."""
    async with known() as (before, after), transport(token=TOKEN) as receiver:
        await publish(before, 102)
        await publish(after, 90)
        senders = chain([before], repeat(after))
        async with asyncio.timeout(60), shared_address(senders) as (url, _):
            if follows:
                async with aclosing(receiver.follow(url)) as follower:
                    check(*await anext(follower))
            else:
                check(90, await receiver.recv_checkpoint(0, url))
