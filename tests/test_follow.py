"""Followers of a trainer that goes on, restarts, or is away; and slow ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import chain, cycle, repeat

import pytest
import torch
from safetensors.torch import load_file

from aiockpt import AuthenticationError, TemplateMismatchError, TransferEvent
from aiockpt.errors import ClosedError, TransferTimeoutError
from aiockpt.events import add_hook
from aiockpt.testing import CutAfter, StallAfter
from aiockpt.testing.faults import Drip
from aiockpt.transfer.reuse import Delta
from tests.support.commandline import aiockpt_command
from tests.support.followers import (
    MIB,
    TOKEN,
    Trainer,
    attempts,
    check,
    publish,
    soon,
    state_of,
)
from tests.support.proofs import proves
from tests.support.serving import settle
from tests.support.transports import (
    Transport,
    pair,
    port_of,
    proxied,
    through,
    transport,
)

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def events(stop: str) -> AsyncIterator[list[TransferEvent]]:
    """Give the events of one kind, as they come."""
    found: list[TransferEvent] = []

    def note(event: TransferEvent) -> None:
        if event.stop == stop:
            found.append(event)

    remove = add_hook(note)
    try:
        yield found
    finally:
        remove()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("server", ["loop", "process"])
async def test_a_slow_receive_ends_while_the_trainer_goes_on(server):
    """Each takes as long as two publications, and three of four end."""
    async with (
        transport(server=server) as sender,
        proxied(sender, otherwise=Drip(MIB, burst=64 << 10)) as proxy,
    ):
        trainer, metadata = Trainer(sender, mib=2), through(proxy, sender)
        await trainer.measure(metadata)
        async with trainer.training():
            assert await attempts(sender, metadata, 8) >= 6


@pytest.mark.timeout(120)
async def test_three_slow_followers_get_through():
    """They begin at different times; half of the receives end, and nobody starves."""
    async with (
        transport() as sender,
        proxied(sender, otherwise=Drip(MIB, burst=64 << 10)) as proxy,
    ):
        trainer, metadata = Trainer(sender, mib=2), through(proxy, sender)
        await trainer.measure(metadata)

        async def follow(number: int) -> int:
            await asyncio.sleep(1.4 * trainer.every * number)
            return await attempts(sender, metadata, 6)

        kept = set[int]()

        async def watch() -> None:
            while True:
                kept.add(sender.statistics().superseded)
                await asyncio.sleep(0.01)

        watching = asyncio.create_task(watch())
        async with trainer.training():
            done = await asyncio.gather(*map(follow, range(3)))
        watching.cancel()
        await asyncio.wait({watching})
        assert min(done) >= 2, done
        assert sum(done) >= 9, done
        # A snapshot whose readers were just cut takes a moment to go.
        assert max(kept) <= 2


@proves("cell HTTPTransport.follow: success")
async def test_each_newer_step_is_received():
    """Without a template, and with one, whose tensors are filled."""
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


async def test_options_of_a_receive_are_those_of_a_follower():
    """A part of it; only what has changed; and the step to begin after."""
    async with pair() as (sender, receiver):
        await publish(sender, 1)
        metadata = sender.metadata()
        async with aclosing(receiver.follow(metadata, select=["step"])) as follower:
            assert await soon(follower) == (1, {"step": 1})
        template = {**state_of(1), "step": 0}
        async with (
            events("recv") as found,
            aclosing(receiver.follow(metadata, into=template, have=True)) as follower,
        ):
            await soon(follower)
        assert found[0].nbytes < found[0].reused == 1 << 20
        async with aclosing(receiver.follow(metadata, after=1)) as follower:
            waiting = asyncio.ensure_future(anext(follower))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await publish(sender, 2)
            assert (await waiting)[0] == 2


@proves("cell HTTPTransport.follow: success")
async def test_no_step_twice_and_none_that_is_torn():
    """Whatever the trainer does meanwhile, steps rise and states are whole."""
    async with pair() as (sender, receiver), Trainer(sender, mib=4).training():
        seen: list[int] = []
        async with aclosing(receiver.follow(sender.metadata())) as follower:
            while len(seen) < 10:
                step, state = await soon(follower)
                check(step, state)
                seen.append(step)
        assert seen == sorted({*seen})


async def test_a_superseded_receive_goes_on_to_the_newest():
    """A sender that keeps nothing replaces the step: the next one is received."""
    async with (
        transport(keep_superseded=0) as sender,
        transport() as receiver,
        proxied(sender, otherwise=Drip(MIB, burst=64 << 10)) as proxy,
    ):
        await publish(sender, 1, mib=8)
        async with (
            events("retry") as retries,
            aclosing(receiver.follow(through(proxy, sender))) as follower,
        ):
            first = asyncio.ensure_future(soon(follower))
            await settle(lambda: proxy.statistics().bytes_down > MIB)
            await publish(sender, 2)
            step, state = await first
            check(step, state)
            assert step == 2
        assert retries


async def test_a_receive_without_a_step_gets_what_is_served_now():
    """It waits for a first step, and goes on to the newest when that is replaced."""
    async with (
        transport(keep_superseded=0) as sender,
        transport() as receiver,
        proxied(sender, otherwise=Drip(MIB, burst=64 << 10)) as proxy,
    ):
        metadata = through(proxy, sender)
        first = asyncio.ensure_future(receiver.recv_checkpoint(0, metadata))
        await asyncio.sleep(0.1)
        assert not first.done()
        await publish(sender, 1, mib=8)
        await settle(lambda: proxy.statistics().bytes_down > MIB)
        await publish(sender, 2)
        check(2, await first)
        template = state_of(0)
        await receiver.recv_checkpoint(0, [sender.metadata(), metadata], into=template)
        assert torch.equal(template["w"], state_of(2)["w"])
        await sender.disallow_checkpoint()
        with pytest.raises(TransferTimeoutError):
            await receiver.recv_checkpoint(0, metadata, timeout=0.3)


@pytest.mark.parametrize("keep", [0, 1])
async def test_a_fetch_of_the_command_line_gets_what_is_served_now(tmp_path, keep):
    """It ends with a whole step although the trainer replaces steps meanwhile."""
    async with (
        transport(keep_superseded=keep) as sender,
        proxied(sender, otherwise=Drip(MIB, burst=64 << 10)) as proxy,
    ):
        await publish(sender, 1, mib=8)
        file = tmp_path / "copy.safetensors"
        command = aiockpt_command("fetch", through(proxy, sender), "-o", file)
        fetching = await asyncio.create_subprocess_exec(
            *command, stderr=asyncio.subprocess.PIPE
        )
        await settle(lambda: proxy.statistics().bytes_down > MIB)
        await publish(sender, 2)
        _, told = await fetching.communicate()
        assert fetching.returncode == 0, told
        assert f"step {1 if keep else 2}, snapshot".encode() in told
        low, high = load_file(file)["w"].aminmax()
        assert low == high == (1 if keep else 2)


@proves("cell HTTPTransport.follow: the other one dies")
async def test_a_sender_that_is_away_is_waited_for():
    """Connections break in the middle of a receive, and nobody answers for a while."""
    async with (
        transport(token=TOKEN) as sender,
        transport(token=TOKEN, reconnect_timeout=0.2, stall_timeout=0.5) as receiver,
        proxied(sender, faults=[CutAfter(1 << 19)] * 6) as proxy,
    ):
        await publish(sender, 1, mib=4)
        async with aclosing(receiver.follow(through(proxy, sender))) as follower:
            check(*await soon(follower))
            waiting = asyncio.ensure_future(soon(follower))
            proxy.refuse()
            await proxy.cut_all()
            await asyncio.sleep(0.5)
            await publish(sender, 2)
            await proxy.listen()
            check(*await waiting)


async def test_a_sender_that_dies_after_its_last_byte_fails_nothing():
    """It never answers that the receive has ended, which is no news to the receiver."""
    async with pair() as (sender, receiver):
        await publish(sender, 1)

        async def relay(down: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
            up, to = await asyncio.open_connection("127.0.0.1", port_of(sender))

            async def ask() -> None:
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
            check(1, await receiver.recv_checkpoint(0, metadata, 1, timeout=0.9))
            await receiver.shutdown()
            await sender.shutdown()


@pytest.mark.parametrize("select", [None, ["w"]])
async def test_a_receive_that_compares_for_long_keeps_its_snapshot(monkeypatch, select):
    """It asks for nothing meanwhile, for longer than the sender's stall timeout."""
    plan = Delta.plan

    async def compare(self: Delta, chunks: Sequence[int]) -> list[int]:
        await asyncio.sleep(1.5)
        return await plan(self, chunks)

    monkeypatch.setattr(Delta, "plan", compare)
    async with pair(stall_timeout=0.6) as (sender, receiver):
        await publish(sender, 1)
        metadata, template = sender.metadata(), state_of(0)
        receiving = asyncio.ensure_future(
            receiver.recv_checkpoint(
                0, metadata, 1, into=template, have=True, select=select
            )
        )
        await settle(lambda: sender.statistics().requests)
        await publish(sender, 2)
        assert (await receiving)["w"].eq(1.0).all()
        await settle(lambda: not sender.statistics().superseded)


@proves("cell HTTPTransport.follow: timeout")
async def test_a_receive_that_is_late_is_begun_again():
    """Its deadline has passed: the log says so, and the step is received then."""
    async with (
        pair() as (sender, receiver),
        proxied(sender, faults=[StallAfter(64 << 10)] * 4) as proxy,
        events("retry") as retries,
    ):
        await publish(sender, 1)
        follower = receiver.follow(through(proxy, sender), timeout=1.0)
        async with aclosing(follower):
            check(*await soon(follower))
        assert [event.level for event in retries][-1] == logging.WARNING
        assert "timed out" in retries[-1].detail


@proves("cell HTTPTransport.follow: the other one dies")
@pytest.mark.parametrize("first", [90, 103, 102])
async def test_a_restarted_sender_is_followed(first, caplog):
    """From whatever step it goes on with, and no step comes twice."""
    before = transport(token=TOKEN)
    async with before, transport(token=TOKEN) as receiver:
        await publish(before, 102)
        port, metadata = port_of(before), before.metadata()
        follower = receiver.follow(metadata)
        async with aclosing(follower), events("restart") as restarts:
            assert (await soon(follower))[0] == 102
            await before.shutdown(wait=False)
            async with transport(token=TOKEN, port=port) as after:
                waiting = asyncio.ensure_future(soon(follower))
                await publish(after, first)
                if first == 102:
                    await asyncio.sleep(0.5)
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


async def test_steps_notice_a_restart_as_well():
    """Whoever fetches by himself is told of the lower step."""
    before = transport(token=TOKEN)
    async with before, transport(token=TOKEN) as receiver:
        await publish(before, 102)
        steps = receiver.steps(before.metadata())
        assert await soon(steps) == 102
        port = port_of(before)
        await before.shutdown(wait=False)
        async with transport(token=TOKEN, port=port) as after:
            await publish(after, 90)
            assert await soon(steps) == 90


@proves("cell HTTPTransport.follow: error")
async def test_what_is_wrong_for_good_is_raised():
    """A template that does not fit, a wrong token, a transport that is closed."""
    async with pair(token=TOKEN) as (sender, receiver):
        await publish(sender, 1)
        misfit = {"w": torch.zeros(3), "step": 0}
        with pytest.raises(TemplateMismatchError):
            await anext(receiver.follow(sender.metadata(), into=misfit))
        async with transport(token="another") as stranger:
            with pytest.raises(AuthenticationError):
                await anext(stranger.follow(sender.metadata()))
        follower = receiver.follow(sender.metadata(), after=1)
        waiting = asyncio.ensure_future(anext(follower))
        await asyncio.sleep(0.05)
        await receiver.shutdown()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            receiver.follow(sender.metadata())


@proves("cell HTTPTransport.follow: cancel")
async def test_a_cancelled_follower_leaves_nothing_behind():
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


@pytest.mark.parametrize("serves", [True, False])
async def test_a_restart_is_noticed_before_the_first_step(serves):
    """Whoever begins after a step knows the sender's start before it gives another."""
    before = transport(token=TOKEN)
    async with before, transport(token=TOKEN) as receiver:
        if serves:
            await publish(before, 102)
        else:
            await before.start()
        port, follower = port_of(before), receiver.follow(before.metadata(), after=102)
        async with aclosing(follower):
            waiting = asyncio.ensure_future(soon(follower))
            await settle(lambda: before.statistics().waiting)
            await before.shutdown(wait=False)
            async with transport(token=TOKEN, port=port) as after:
                await publish(after, 90)
                check(*await waiting)


@asynccontextmanager
async def shared_address(
    senders: Iterable[Transport],
) -> AsyncIterator[tuple[str, list[int]]]:
    """Give an address of several senders, and the ports of those that were asked.

    Each request goes to the next of them.
    """
    ports, asked = map(port_of, senders), list[int]()

    async def relay(down: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        head = (await down.readuntil(b"\r\n\r\n"))[:-2]
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
    async with pair(token=TOKEN) as senders, transport(token=TOKEN) as receiver:
        for sender in senders:
            await publish(sender, 5)
        async with shared_address(cycle(senders)) as (url, asked):
            steps = receiver.steps(url)
            assert await soon(steps) == 5
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await anext(steps)
        assert len(asked) < 30


@pytest.mark.parametrize("follows", [True, False])
async def test_a_restart_before_the_manifest_is_noticed(follows):
    """The step that was served a moment ago is not waited for."""
    async with pair(token=TOKEN) as (before, after), transport(token=TOKEN) as receiver:
        await publish(before, 102)
        await publish(after, 90)
        async with (
            asyncio.timeout(3),
            shared_address(chain([before], repeat(after))) as (url, _),
        ):
            if follows:
                async with aclosing(receiver.follow(url)) as follower:
                    check(*await anext(follower))
            else:
                check(90, await receiver.recv_checkpoint(0, url))


async def test_a_restart_during_a_receive_is_noticed():
    """The restarted sender has another step, and the old one is not waited for."""
    before = transport(token=TOKEN)
    async with (
        before,
        transport(token=TOKEN) as receiver,
        proxied(before, otherwise=Drip(MIB, burst=64 << 10)) as proxy,
    ):
        await publish(before, 102, mib=8)
        port, follower = port_of(before), receiver.follow(through(proxy, before))
        async with aclosing(follower):
            waiting = asyncio.ensure_future(soon(follower))
            await settle(lambda: proxy.statistics().bytes_down > MIB)
            await before.shutdown(wait=False)
            async with transport(token=TOKEN, port=port) as after:
                await publish(after, 90)
                async with asyncio.timeout(4.5):  # of which receiving takes one
                    check(*await waiting)
