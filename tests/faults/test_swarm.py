"""Members, sources and trackers of swarms that die, and swarms that are cut in two."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt import AiockptError, Auth, Swarm
from aiockpt.local.server_process import ServerProcess
from aiockpt.swarm.relay import Relay
from aiockpt.testing import Drip, assert_same
from tests.support.commandline import start_aiockpt
from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.servers import settle, tracker_of
from tests.support.transports import (
    CHUNK,
    Transport,
    chunked,
    proxied,
    through,
    told,
    transport,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

COUNT = 64
STATE = chunked(COUNT)
RATE = 400_000  # bytes per second of each connection to the source


@asynccontextmanager
async def swarming(
    count: int, *, rate: int = RATE, process: bool = False, **options: Any
) -> AsyncIterator[tuple[Transport, list[Transport], str]]:
    """Give a sender with slow connections, receivers that join, and the metadata."""
    options = {"swarm": True, "same_host": False, **options}
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        members = [await enter(transport(**options)) for _ in range(count)]
        sender = await enter(transport(process=process))
        await sender.send_checkpoint(step=1, state_dict=STATE)
        proxy = await enter(proxied(sender, otherwise=Drip(rate, burst=8192)))
        yield sender, members, through(proxy, sender)


def relayed(members: list[Transport]) -> int:
    """Return how many bytes the members have sent."""
    return sum(each.statistics().bytes_sent for each in members)


def fetching(members: list[Transport], url: str) -> list[asyncio.Task[Any]]:
    """Begin to receive with all of them."""
    return [
        asyncio.create_task(each.recv_checkpoint(metadata=url, step=1))
        for each in members
    ]


@proves("fault 57", "invariant 1")
async def test_a_third_of_the_members_is_killed(record: Record, tmp_path: Path) -> None:
    """As many others join, and all that live get every byte."""
    third = record.pick(1, 2)
    for seed in record.part_of(range(10), few=1):
        async with swarming(0) as (sender, _, url):
            files = [tmp_path / f"{seed}-{n}" for n in range(4 * third)]

            def start(file: Path, url: str = url) -> subprocess.Popen[str]:
                return start_aiockpt("fetch", url, "-q", "-o", file)

            running = [start(file) for file in files[: 3 * third]]
            least = record.chance().uniform(0.3, 0.9) * COUNT * CHUNK
            await settle(
                lambda sender=sender, least=least: (
                    sender.statistics().bytes_sent > least
                ),
                patience=60.0,
            )
            for each in running[:third]:
                each.kill()
            running += [start(file) for file in files[3 * third :]]
            for each in running:
                await asyncio.get_running_loop().run_in_executor(None, each.wait)
            errors = [each.stderr.read() if each.stderr else "" for each in running]
            for each in running:
                assert each.stderr is not None
                each.stderr.close()
            assert {each.returncode for each in running[third:]} == {0}, errors
        one, *others = (file.read_bytes() for file in files[third:])
        assert others == [one] * (3 * third - 1)
        record.ran(3 * third)


@proves("fault 58", "invariant 1")
async def test_the_tracker_is_killed(record: Record) -> None:
    """The members go on with those that they know, and find the next tracker."""
    for _ in record.part_of(range(10), few=1):
        async with swarming(3, process=True) as (sender, members, url):
            tasks = fetching(members, url)
            await settle(lambda: relayed(members) > 0)
            server = sender._front.server
            assert isinstance(server, ServerProcess)
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            for state in await asyncio.gather(*tasks):
                assert_same(state, STATE)
            record.ran(3)


def relays(members: list[Transport]) -> list[Relay]:
    """Return what the members serve of what they receive."""
    joined = [member._joined for each in members for member in each._host.members]
    return [each.relay for each in joined if each is not None]


def held(relays: list[Relay]) -> int:
    """Return how many chunks these have together."""
    return reduce(or_, (each.have for each in relays), 0).bit_count()


@proves("fault 59", "invariant 1")
@pytest.mark.parametrize("early", [False, True], ids=["after", "before"])
async def test_the_source_is_killed(record: Record, early: bool) -> None:
    """The source is killed before or after each chunk has left it once."""
    options = {"reconnect_timeout": 0.3, "stall_timeout": 3.0}
    least = COUNT // 2 if early else COUNT
    loop = asyncio.get_running_loop()
    for _ in record.part_of(range(10), few=1):
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            swarm = {"swarm": True, "same_host": False, **options}
            members = [await enter(transport(**swarm)) for _ in range(3)]
            async with (
                transport() as sender,
                proxied(sender, otherwise=Drip(RATE, burst=8192)) as proxy,
            ):
                await sender.send_checkpoint(step=1, state_dict=STATE)
                tasks = fetching(members, through(proxy, sender))
                await settle(
                    lambda members=members: held(relays(members)) >= least,
                    patience=60.0,
                )
                served = relays(members)
            died = loop.time()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            lost = COUNT - held(served)  # by now, all that anybody got is counted
            assert (lost > 0) is early
            for end in ends:
                if not early:
                    assert_same(end, STATE)
                    continue
                assert isinstance(end, AiockptError)
                said = f"no member of the swarm has {lost} of the chunks"
                assert said in end.__notes__
            if early:
                record.within("to the error", loop.time() - died, 10.0)
            record.ran(3)


@proves("fault 60", "invariant 1")
async def test_zones_that_cannot_reach_each_other(record: Record) -> None:
    """Each of them goes on by itself, with the source."""
    for _ in record.part_of(range(10), few=1):
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            sender = await enter(transport(auth=Auth(peers=["127.0.0.0/8"])))
            await sender.send_checkpoint(step=1, state_dict=STATE)
            fault = Drip(RATE, burst=8192)
            proxy = await enter(proxied(sender, otherwise=fault))
            members = [
                await enter(
                    transport(
                        host=f"127.0.0.{zone}",
                        auth=Auth(peers=["127.0.0.1", f"127.0.0.{zone}"]),
                        swarm=Swarm(zone=f"zone {zone}"),
                        same_host=False,
                    )
                )
                for zone in (2, 2, 3, 3)
            ]
            for state in await asyncio.gather(
                *fetching(members, through(proxy, sender))
            ):
                assert_same(state, STATE)
            assert relayed(members[:2]) > 0
            assert relayed(members[2:]) > 0
            sent = sender.statistics().bytes_sent / (COUNT * CHUNK)
            record.within("sent by the source", sent, 4.0, unit=" checkpoints")
            record.ran(4)


@proves("fault 61", "invariant 1")
async def test_a_member_has_a_tenth_of_the_rate(record: Record) -> None:
    """The others do not wait for it."""
    loop = asyncio.get_running_loop()
    for _ in record.part_of(range(4), few=1):
        times = []
        for rate in (RATE, RATE // 10):
            async with AsyncExitStack() as stack:
                enter = stack.enter_async_context
                sender = await enter(transport())
                await sender.send_checkpoint(step=1, state_dict=STATE)
                proxies = [
                    await enter(proxied(sender, otherwise=Drip(each, burst=8192)))
                    for each in (RATE, rate)
                ]
                fast = {"swarm": True, "same_host": False}
                members = [await enter(transport(**fast)) for _ in range(3)]
                slow = {**fast, "swarm": Swarm(rate=rate)}
                other = await enter(transport(**slow))
                late = fetching([other], through(proxies[1], sender))
                began = loop.time()
                for got in await asyncio.gather(
                    *fetching(members, through(proxies[0], sender))
                ):
                    assert_same(got, STATE)
                times.append(loop.time() - began)
                assert_same(await late[0], STATE)
        ratio = times[1] / times[0]
        record.within("the others' time", ratio, 2.0, unit=" times the usual")
        record.ran(4)


_OTHER_CLOCKS = """
import asyncio, sys, time

days, shift, real = 86_400 * float(sys.argv[1]), float(sys.argv[2]), time.time
time.time = lambda: real() + days
asyncio.BaseEventLoop.time = lambda self: time.monotonic() + shift
from aiockpt.cli import main

sys.exit(main(sys.argv[3:]))
"""


@proves("fault 62", "invariant 1")
async def test_clocks_do_not_matter(record: Record, tmp_path: Path) -> None:
    """Neither the time of day nor the time since the start is the same anywhere."""
    chance = record.chance()
    for seed in record.part_of(range(10), few=1):
        async with swarming(0) as (sender, _, url):
            files = [tmp_path / f"{seed}-{n}" for n in range(record.pick(2, 4))]
            days = chance.sample(range(-9000, 9000), len(files))
            running = [
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-c",
                    _OTHER_CLOCKS,
                    *map(str, (day, 1000 * day + 10_000_000)),
                    *("fetch", url, "-q", "-o", str(file)),
                )
                for day, file in zip(days, files, strict=True)
            ]
            codes = [await each.wait() for each in running]
            sent = sender.statistics().bytes_sent / (COUNT * CHUNK)
        assert codes == [0] * len(files)
        one, *others = (file.read_bytes() for file in files)
        assert others == [one] * (len(files) - 1)
        record.within("sent by the source", sent, 3.0, unit=" checkpoints")
        record.ran(len(files))


@proves("fault 70", "invariant 1")
async def test_the_owner_of_a_lingering_member_changes_its_tensors(
    record: Record,
) -> None:
    """The members that read from it get the right bytes, and blame nobody."""
    chance = record.chance()
    for _ in record.part_of(range(20), few=1):
        async with told() as events, swarming(2, swarm=Swarm(linger=60)) as found:
            sender, members, url = found
            states = await asyncio.gather(*fetching(members, url))
            async with transport(swarm=Swarm(linger=0), same_host=False) as late:
                before = relayed(members)
                task = fetching([late], url)[0]
                few = chance.uniform(0.05, 0.7) * COUNT * CHUNK
                await settle(
                    lambda before=before, few=few, members=members: (
                        relayed(members) - before > few
                    ),
                    patience=60,
                )
                assert not task.done()
                for state in states:
                    for tensor in state.values():
                        if isinstance(tensor, torch.Tensor):
                            tensor.fill_(-1.0)
                assert_same(await task, STATE)
            accused = tracker_of(sender._front.server).statistics()
            assert not any(each.complaints for each in accused)
            assert not any("digest" in each.detail for each in events)
            record.ran()
