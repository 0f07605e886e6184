"""A receive that has begun can end: leases on superseded snapshots, over plain HTTP.

A raw socket plays the receiver, so the promises are those of the wire format.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from aiockpt import register_leaf
from tests.support.proofs import proves
from tests.support.servers import TOKEN, Peer, settle
from tests.support.transports import arenas, port_of, transport

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_blocking")]

NBYTES = 4 << 20
ONE, TWO, THREE = (f"{digit:032x}" for digit in (1, 2, 3))

everywhere = pytest.mark.parametrize("process", [False, True], ids=["loop", "process"])


def lease(name, ttl=60.0):
    """Return the header that names a receive."""
    return {"Aiockpt_Lease": f"{name}; ttl={ttl:g}"}


class Sender:
    """A sender whose steps are tensors of one number, and requests to it."""

    def __init__(self, made):
        self.made = made

    @property
    def superseded(self):
        """How many snapshots are kept beside the newest one."""
        return self.made.statistics().superseded

    async def publish(self, step):
        """Publish a state of one tensor, every byte of which is ``step``."""
        state = {"w": torch.full((NBYTES,), step, dtype=torch.uint8)}
        await self.made.send_checkpoint([], step, state)

    def slow_reader(self):
        """Return a connection that takes little before it is read from."""
        return Peer(port_of(self.made), receive_buffer=1)

    async def ask(self, path, **options):
        """Ask over a connection of its own."""
        async with Peer(port_of(self.made)) as peer:
            return await peer.ask(f"/checkpoint/{path}", **options)

    async def begin(self, step, name, ttl=60.0):
        """Begin a receive: ask for its manifest."""
        return await self.ask(f"{step}/metadata", **lease(name, ttl))

    async def end(self, name):
        """Say that a receive has ended."""
        answer = await self.ask("1/metadata", method="HEAD", **lease(name, 0))
        assert answer.status == 204

    async def holds(self, step, name="", **headers):
        """Tell whether the last kilobyte of a step is served, and is of that step."""
        headers |= lease(name) if name else {}
        answer = await self.ask(f"{step}/full", Range="bytes=-1024", **headers)
        if answer.status == 206:
            assert answer.body == bytes([step]) * 1024
            return True
        assert answer.status == 410, answer
        return False

    async def forgets(self, step, name):
        """Wait until no superseded snapshot is kept; ask for one of them."""
        await settle(lambda: self.superseded == 0)
        assert not await self.holds(step, name)


@asynccontextmanager
async def sending(**options):
    """Give a sender that has published step 1."""
    async with transport(token=TOKEN, **options) as made:
        sender = Sender(made)
        await sender.publish(1)
        yield sender


@everywhere
async def test_a_lease_keeps_what_a_receive_began_with(process):
    """Its ranges are served until it says that it has ended; to nobody else."""
    async with sending(process=process) as sender:
        first = await sender.begin(1, ONE)
        await sender.publish(2)
        await sender.publish(3)
        etag = first.headers["ETag"]
        assert await sender.holds(1, ONE, If_Match=etag)
        assert not await sender.holds(1, If_Match=etag)
        assert not await sender.holds(1, TWO, If_Match=etag)
        assert await sender.holds(3)
        again = await sender.begin(1, ONE)
        assert (again.status, again.body) == (200, first.body)
        await settle(lambda: sender.superseded == 1)
        await sender.end(ONE)
        await sender.forgets(1, ONE)


@proves("threat D10")
@everywhere
async def test_the_snapshot_that_was_read_longest_stays(process):
    """One is kept; receives of the others begin again with the newest."""
    async with sending(process=process) as sender:
        await sender.begin(1, ONE)
        await sender.publish(2)
        await sender.begin(2, TWO)
        await sender.publish(3)  # 1 and 2 are leased, and one may stay
        await settle(lambda: sender.superseded == 1)
        assert await sender.holds(1, ONE)
        assert not await sender.holds(2, TWO)
        await sender.begin(3, TWO)
        await sender.end(ONE)
        await sender.publish(4)
        assert await sender.holds(3, TWO)
        assert not await sender.holds(1, ONE)


@pytest.mark.parametrize("count", [0, 2])
async def test_another_number_can_be_kept(count):
    """The sender says how many."""
    async with sending(keep_superseded=count) as sender:
        for step, name in enumerate((ONE, TWO, THREE), 1):
            await sender.begin(step, name)
            await sender.publish(step + 1)
        held = [await sender.holds(n, f"{n:032x}") for n in (1, 2, 3)]
        assert held == [n <= count for n in (1, 2, 3)]


async def test_a_lease_is_one_receives():
    """It moves to the snapshot that was asked for last."""
    async with sending() as sender:
        await sender.begin(1, ONE)
        await sender.publish(2)
        await sender.begin(2, ONE)
        await sender.forgets(1, ONE)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("1/full", {"If_Match": f'"{ONE}"'}, 412),
        ("1/full", {"Range": "bytes=999999999-"}, 416),
        ("1/9999", {}, 404),
        ("1/full", {"Range": "bytes=-1024"}, 206),
    ],
)
async def test_nothing_is_kept_for_nobody(path, headers, status):
    """A request that fails takes no lease; nor does one that has ended."""
    async with sending() as sender:
        answer = await sender.ask(path, **headers, **lease(ONE))
        assert answer.status == status
        if status == 206:
            await sender.end(ONE)
        await sender.publish(2)
        assert sender.superseded == 0


@pytest.mark.parametrize(
    ("ttl", "options"), [(0.2, {}), (60.0, {"stall_timeout": 0.2})]
)
async def test_a_lease_ends_with_its_deadline_or_with_a_stall(ttl, options):
    """Requests after that get nothing."""
    async with sending(**options) as sender:
        await sender.begin(1, ONE, ttl)
        await sender.publish(2)
        await sender.forgets(1, ONE)


@pytest.mark.parametrize(
    ("ttl", "options"),
    [(60.0, {"stall_timeout": 3.0}), (3.0, {})],
    ids=["a stall", "a deadline"],
)
async def test_each_request_renews_the_lease(ttl, options):
    """A receive that goes on asking keeps its snapshot beyond a stall or deadline."""
    async with sending(**options) as sender:
        await sender.begin(1, ONE, ttl)
        await sender.publish(2)
        begun = time.monotonic()
        while time.monotonic() < begun + 3.5:
            await asyncio.sleep(0.1)
            assert (await sender.begin(1, ONE, ttl)).status == 200


async def test_what_is_kept_takes_the_memory_of_one_snapshot():
    """Any number of receives keeps one snapshot, until the last of them ends."""
    async with sending() as sender:
        await sender.publish(2)
        await sender.publish(3)
        alone = arenas()
        await sender.begin(3, ONE)
        for step, name in enumerate((TWO, THREE) * 3, 4):
            await sender.publish(step)
            await sender.begin(step, name)
            assert arenas() <= alone + 1
        assert await sender.holds(3, ONE)
        for name in (ONE, TWO, THREE):
            await sender.end(name)
        for step in (10, 11):
            await sender.publish(step)
        assert arenas() <= alone


async def test_requests_in_flight_count_as_well():
    """A plain download reads on to its end, unless another has read for longer."""
    async with sending() as sender, sender.slow_reader() as curl:
        await curl.request("/checkpoint/1/full")
        head = await curl.head()
        await sender.publish(2)
        await sender.begin(2, TWO)
        await sender.publish(3)
        assert not await sender.holds(2, TWO)
        body = await curl.read_some(int(head.headers["Content-Length"]))
        assert body[-NBYTES:] == bytes([1]) * NBYTES
        await settle(lambda: sender.superseded == 0)


async def test_readers_of_what_is_not_kept_are_cut():
    """The snapshot goes at once, not when its readers have ended."""
    async with sending() as sender, sender.slow_reader() as late:
        await sender.begin(1, ONE)
        await sender.publish(2)
        await late.request("/checkpoint/2/full", **lease(TWO))
        await late.head()
        await sender.publish(3)
        await settle(lambda: sender.superseded == 1)
        assert sender.made.statistics().evicted == 1
        assert len(await late.read_all()) < NBYTES
        assert await sender.holds(1, ONE)


@proves("threat D10")
@everywhere
async def test_a_retraction_ends_all_leases(process):
    """Nothing is left to read when it returns, of any snapshot."""
    async with sending(process=process, grace=0.2) as sender:
        await sender.begin(1, ONE)
        await sender.publish(2)
        await sender.begin(2, TWO)
        await sender.made.disallow_checkpoint()
        await settle(lambda: sender.superseded == 0)
        for step, name in ((1, ONE), (2, TWO)):
            answer = await sender.ask(f"{step}/full", Prefer="wait=0", **lease(name))
            assert answer.status in (404, 503), answer


async def test_a_malformed_lease_is_refused():
    """The answer quotes it, and nothing is kept."""
    async with sending() as sender:
        for value in ("", "x", ONE, f"{ONE}; ttl=-1", f"{ONE}; ttl=nan",
                      f"{ONE[1:]}; ttl=1"):  # fmt: skip
            answer = await sender.ask("1/metadata", Aiockpt_Lease=value)
            assert answer.status == 400
            assert b"Aiockpt-Lease" in answer.body


async def test_every_answer_names_the_start_of_its_sender():
    """The name stays for as long as the sender lives; another sender has another."""
    async with sending() as sender, sending() as other:
        found = set()
        for which in (sender, other):
            for path in ("latest", "1/metadata", "1/full", "latest?after=5", "9/x"):
                answer = await which.ask(path, Prefer="wait=0")
                found.add((which, answer.headers["Aiockpt-Incarnation"]))
        assert len(found) == len({incarnation for _, incarnation in found}) == 2


class Slow:
    """A value that a receiver takes long to make."""


def take_long(_: object = None) -> Slow:
    """Take longer than the sender waits for a silent receive."""
    time.sleep(2.5)
    return Slow()


register_leaf(Slow, tag="tests.SlowLeaf", encode=lambda _: b"slow", decode=take_long)


@pytest.mark.parametrize(
    ("what", "process"), [("a function that selects", True), ("a leaf", False)]
)
async def test_a_lease_holds_while_the_receiver_computes(what, process):
    """The receiver's own stall timeout is much longer, so the sender says its own."""
    state: dict[str, Any] = {"w": torch.ones(NBYTES, dtype=torch.uint8)}
    state["v"] = torch.ones(2)
    options: dict[str, Any] = {"select": lambda path: path != "v" or bool(take_long())}
    if what == "a leaf":
        state["leaf"], options = Slow(), {"select": ["w", "leaf"]}
    async with (
        transport(stall_timeout=1.0, process=process) as sender,
        transport() as receiver,
    ):
        await sender.send_checkpoint([], 1, state)
        arrived = asyncio.Event()

        def see(progress):
            if progress.stop == "allocate":
                arrived.set()

        task = asyncio.create_task(
            receiver.recv_checkpoint(0, sender.metadata(), 1, progress=see, **options)
        )
        await arrived.wait()
        await sender.send_checkpoint([], 2, {"w": torch.zeros(2)})
        got = await task
        assert bool((got["w"] == 1).all())
        await settle(lambda: sender.statistics().superseded == 0)
