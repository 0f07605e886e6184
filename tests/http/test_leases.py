"""A receive that has begun can end: leases on superseded snapshots, over plain HTTP.

A raw socket plays the receiver, so the promises are those of the wire format.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from tests.support.proofs import proves
from tests.support.serving import TOKEN, Answer, Peer, settle
from tests.support.transports import Transport, port_of, transport

pytestmark = pytest.mark.asyncio

NBYTES = 4 << 20
ONE, TWO, THREE = (f"{digit:032x}" for digit in (1, 2, 3))

PLACES = ["loop", "process"]


def lease(name: str, ttl: float = 60.0) -> dict[str, Any]:
    """Return the header that names a receive."""
    return {"Aiockpt_Lease": f"{name}; ttl={ttl:g}"}


async def publish(sender: Transport, step: int) -> None:
    """Publish a state of one tensor, every byte of which is ``step``."""
    state = {"w": torch.full((NBYTES,), step, dtype=torch.uint8)}
    await sender.send_checkpoint([], step, state)


@asynccontextmanager
async def sending(**options: Any) -> AsyncIterator[Transport]:
    """Give a sender that has published step 1."""
    async with transport(token=TOKEN, **options) as sender:
        await publish(sender, 1)
        yield sender


async def manifest(sender: Transport, step: int, **headers: str) -> Answer:
    """Ask for a manifest over a connection of its own."""
    async with Peer(port_of(sender)) as peer:
        return await peer.ask(f"/checkpoint/{step}/metadata", **headers)


async def tail(sender: Transport, step: int, **headers: str) -> Answer:
    """Ask for the last kilobyte of a step over a connection of its own."""
    async with Peer(port_of(sender)) as peer:
        return await peer.ask(
            f"/checkpoint/{step}/full", Range="bytes=-1024", **headers
        )


async def holds(sender: Transport, step: int, **headers: str) -> bool:
    """Tell whether a range of a step is served, and is of that step."""
    answer = await tail(sender, step, **headers)
    if answer.status == 206:
        assert answer.body == bytes([step]) * 1024
        return True
    assert answer.status == 410, answer
    return False


@pytest.mark.parametrize("server", PLACES)
async def test_a_lease_keeps_what_a_receive_began_with(server):
    """Its ranges are served after two publications; nobody else's are."""
    async with sending(process=server == "process") as sender:
        first = await manifest(sender, 1, **lease(ONE))
        await publish(sender, 2)
        await publish(sender, 3)
        etag = first.headers["ETag"]
        assert await holds(sender, 1, If_Match=etag, **lease(ONE))
        assert not await holds(sender, 1, If_Match=etag)
        assert not await holds(sender, 1, If_Match=etag, **lease(TWO))
        assert await holds(sender, 3)
        again = await manifest(sender, 1, **lease(ONE))
        assert (again.status, again.body) == (200, first.body)


@proves("threat D10")
@pytest.mark.parametrize("server", PLACES)
async def test_the_snapshot_that_was_read_longest_stays(server):
    """One is kept; receives of the others are told to begin anew, with the newest."""
    async with sending(process=server == "process") as sender:
        await manifest(sender, 1, **lease(ONE))
        await publish(sender, 2)
        await manifest(sender, 2, **lease(TWO))
        await publish(sender, 3)  # 1 and 2 are leased, and one may stay
        assert await holds(sender, 1, **lease(ONE))
        assert not await holds(sender, 2, **lease(TWO))
        await manifest(sender, 3, **lease(TWO))
        await ended(sender, ONE)
        await publish(sender, 4)
        assert await holds(sender, 3, **lease(TWO))
        assert not await holds(sender, 1, **lease(ONE))


async def test_more_can_be_kept():
    """As many as the sender is told; none if it is told so."""
    async with sending(keep_superseded=2) as sender:
        for step, name in enumerate((ONE, TWO, THREE), 1):
            await manifest(sender, step, **lease(name))
            await publish(sender, step + 1)
        assert await holds(sender, 1, **lease(ONE))
        assert await holds(sender, 2, **lease(TWO))
        assert not await holds(sender, 3, **lease(THREE))
    async with sending(keep_superseded=0) as sender:
        await manifest(sender, 1, **lease(ONE))
        await publish(sender, 2)
        assert not await holds(sender, 1, **lease(ONE))


async def test_a_lease_is_one_receives():
    """It moves to the snapshot that was asked for last."""
    async with sending() as sender:
        await manifest(sender, 1, **lease(ONE))
        await publish(sender, 2)
        await manifest(sender, 2, **lease(ONE))
        await settle(lambda: sender.statistics().superseded == 0)
        assert not await holds(sender, 1, **lease(ONE))


async def ended(sender: Transport, name: str) -> None:
    """Say that a receive has ended."""
    async with Peer(port_of(sender)) as peer:
        path = "/checkpoint/1/metadata"
        answer = await peer.ask(path, method="HEAD", **lease(name, ttl=0))
        assert answer.status == 204


@pytest.mark.parametrize("server", PLACES)
async def test_a_receive_that_has_ended_keeps_nothing(server):
    """The memory goes as soon as the receiver says so."""
    async with sending(process=server == "process") as sender:
        await manifest(sender, 1, **lease(ONE))
        await publish(sender, 2)
        await settle(lambda: sender.statistics().superseded == 1)
        await ended(sender, ONE)
        await settle(lambda: sender.statistics().superseded == 0)
        assert not await holds(sender, 1, **lease(ONE))


async def test_nothing_is_kept_for_nobody():
    """A snapshot without leases and readers goes with its successor."""
    async with sending() as sender:
        await manifest(sender, 1, **lease(ONE))
        await ended(sender, ONE)
        await tail(sender, 1)
        await publish(sender, 2)
        assert sender.statistics().superseded == 0


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("1/full", {"If_Match": f'"{ONE}"'}, 412),
        ("1/full", {"Range": "bytes=999999999-"}, 416),
        ("1/9999", {}, 404),
    ],
)
async def test_a_request_that_fails_takes_no_lease(path, headers, status):
    """Its receive has begun with another snapshot, or asks for nothing."""
    async with sending() as sender:
        async with Peer(port_of(sender)) as peer:
            answer = await peer.ask(f"/checkpoint/{path}", **headers, **lease(ONE))
            assert answer.status == status
        await publish(sender, 2)
        assert sender.statistics().superseded == 0


async def test_what_makes_room_without_requests_goes_at_once():
    """It is forgotten with its leases, not with the next request."""
    async with sending() as sender:
        await manifest(sender, 1, **lease(ONE))
        await publish(sender, 2)
        await manifest(sender, 2, **lease(TWO))
        await publish(sender, 3)
        assert sender.statistics().superseded == 1


async def test_a_lease_ends_with_its_deadline():
    """It is named in the request; requests after it get nothing."""
    async with sending() as sender:
        await manifest(sender, 1, **lease(ONE, ttl=0.5))
        await publish(sender, 2)
        assert sender.statistics().superseded == 1
        await settle(lambda: sender.statistics().superseded == 0)
        assert not await holds(sender, 1, **lease(ONE))


async def test_a_lease_ends_with_a_stall():
    """A receive that asks for nothing during the stall timeout is given up."""
    async with sending(stall_timeout=0.5) as sender:
        await manifest(sender, 1, **lease(ONE))
        await publish(sender, 2)
        assert sender.statistics().superseded == 1
        await settle(lambda: sender.statistics().superseded == 0)
        assert not await holds(sender, 1, **lease(ONE))


async def test_each_request_renews_the_lease():
    """A receive that goes on asking keeps its snapshot for longer than a stall."""
    async with sending(stall_timeout=1.0) as sender:
        loop = asyncio.get_running_loop()
        await manifest(sender, 1, **lease(ONE))
        await publish(sender, 2)
        until = loop.time() + 2.5
        while loop.time() < until:
            assert await holds(sender, 1, **lease(ONE))
            await asyncio.sleep(0.1)


async def test_requests_in_flight_count_as_well():
    """A plain download reads on to its end, unless another has read for longer."""
    async with sending() as sender, Peer(port_of(sender), receive_buffer=1) as curl:
        await curl.request("/checkpoint/1/full")
        head = await curl.head()
        await publish(sender, 2)
        await manifest(sender, 2, **lease(TWO))
        await publish(sender, 3)
        assert not await holds(sender, 2, **lease(TWO))
        body = await curl.read_some(int(head.headers["Content-Length"]))
        assert body[-NBYTES:] == bytes([1]) * NBYTES
        await settle(lambda: sender.statistics().superseded == 0)


async def test_those_who_make_room_are_cut():
    """A snapshot that is not kept goes at once, not when its readers have ended."""
    async with sending() as sender, Peer(port_of(sender), receive_buffer=1) as late:
        await manifest(sender, 1, **lease(ONE))
        await publish(sender, 2)
        await late.request("/checkpoint/2/full", **lease(TWO))
        await late.head()
        await publish(sender, 3)
        await settle(lambda: sender.statistics().superseded == 1)
        assert sender.statistics().evicted == 1
        assert len(await late.read_all()) < NBYTES
        assert await holds(sender, 1, **lease(ONE))


@proves("threat D10")
@pytest.mark.parametrize("server", PLACES)
async def test_a_retraction_ends_all_leases(server):
    """Nothing is left to read when it returns, of any snapshot."""
    async with sending(process=server == "process", grace=0.2) as sender:
        await manifest(sender, 1, **lease(ONE))
        await publish(sender, 2)
        await manifest(sender, 2, **lease(TWO))
        await sender.disallow_checkpoint()
        await settle(lambda: sender.statistics().superseded == 0)
        for step, name in ((1, ONE), (2, TWO)):
            answer = await tail(sender, step, Prefer="wait=0", **lease(name))
            assert answer.status in (404, 503), answer


@pytest.mark.parametrize(
    "value",
    ["", "x", f"{ONE}", f"{ONE}; ttl=-1", f"{ONE}; ttl=nan", f"{ONE[1:]}; ttl=1"],
)
async def test_a_malformed_lease_is_refused(value):
    """The answer quotes it, and nothing is kept."""
    async with sending() as sender:
        answer = await manifest(sender, 1, Aiockpt_Lease=value)
        assert answer.status == 400
        assert b"Aiockpt-Lease" in answer.body


async def test_every_answer_names_the_start_of_its_sender():
    """The same for as long as the sender lives, and another one for another sender."""
    async with sending() as sender, sending() as other:
        found = set()
        for which in (sender, other):
            async with Peer(port_of(which)) as peer:
                for path in ("latest", "1/metadata", "1/full", "latest?after=5", "9/x"):
                    answer = await peer.ask(f"/checkpoint/{path}", Prefer="wait=0")
                    found.add((which, answer.headers["Aiockpt-Incarnation"]))
        assert len(found) == 2
        assert len({incarnation for _, incarnation in found}) == 2


TRAINER = """
import asyncio, sys, threading, torch
from pathlib import Path
from aiockpt import Auth, HTTPTransport, Server

def resident(field):
    text = Path("/proc/self/status").read_text()
    return int(text.partition(field + ":")[2].split()[0]) >> 10

async def main(mib, token):
    server, auth = Server(host="127.0.0.1"), Auth(token=token)
    async with HTTPTransport(server=server, auth=auth) as sender:
        weight = torch.empty(mib << 20, dtype=torch.uint8)
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()

        def hear():
            for _ in sys.stdin:
                loop.call_soon_threadsafe(asked.set)

        threading.Thread(target=hear, daemon=True).start()
        step = 0
        while True:
            step += 1
            await sender.send_checkpoint([], step, {"w": weight.fill_(step)})
            if asked.is_set() or step == 1:
                print(sender.address(), step, resident("VmHWM"), flush=True)
                Path("/proc/self/clear_refs").write_text("5")
                asked.clear()
            await asyncio.sleep(0.1)

asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells")
async def test_what_is_kept_takes_the_memory_of_one_snapshot():
    """However many receives begin meanwhile, and only while one of them goes on."""
    mib, slack = 64, 24
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", TRAINER, str(mib), TOKEN),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    trainer, said = process.stdin, process.stdout
    assert trainer is not None
    assert said is not None

    async def peak(steps: float = 0.0) -> tuple[int, int]:
        """Return the last step, and the most MiB since this was last asked."""
        await asyncio.sleep(steps)
        trainer.write(b"\n")
        _, step, most = (await said.readline()).split()
        return int(step), int(most)

    async def ask(path: str, **headers: Any) -> Answer:
        async with Peer(port) as peer:
            return await peer.ask(f"/checkpoint/{path}", **headers)

    try:
        async with asyncio.timeout(60):
            address = (await said.readline()).split()[0].decode()
            port = urlsplit(address).port or 0
            await peak(1.0)  # its memory is there
            _, alone = await peak(1.0)
            begun = (await ask("latest/metadata", **lease(ONE))).headers["Aiockpt-Step"]
            for name in (TWO, THREE) * 3:
                await asyncio.sleep(0.2)
                await ask("latest/metadata", **lease(name))
                answer = await ask(f"{begun}/full", Range="bytes=-9", **lease(ONE))
                assert answer.status == 206
            step, followed = await peak(1.0)
            assert step > int(begun) + 3
            assert mib - slack < followed - alone < mib + slack
            for name in (ONE, TWO, THREE):
                path = f"{begun}/metadata"
                await ask(path, method="HEAD", **lease(name, ttl=0))
            await peak(1.0)
            _, after = await peak(1.0)
            assert after < alone + slack
    finally:
        process.kill()
        await process.communicate()
