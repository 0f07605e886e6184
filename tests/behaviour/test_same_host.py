"""Snapshots that processes of one host take as memory of the sender."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import sys
from asyncio.subprocess import PIPE, create_subprocess_exec
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

import aiockpt.http
from aiockpt import Limits
from aiockpt.errors import LimitExceededError
from aiockpt.testing import assert_same
from tests.support.memory import arenas
from tests.support.proofs import proves
from tests.support.servers import running, settle
from tests.support.transports import (
    MIB,
    Halfway,
    came_by,
    in_the_middle,
    lending,
    lending_pair,
    like,
    receive,
    told,
    transport,
    weights,
)

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is lent on Linux only"),
]

MEMORY, HTTP = "shared memory", "HTTP"
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another")


class TestShare:
    """With ``share=True``, the receiver gets the sender's own pages."""

    @proves("cell HTTPTransport.recv_checkpoint, share=True: success")
    @pytest.mark.parametrize("verify", [False, True])
    async def test_it_is_the_same_state(self, verify):
        """Every leaf arrives, and no byte of data goes over HTTP."""
        tied = torch.arange(40_000, dtype=torch.float64)
        state = {
            "tied": tied,
            "again": tied[10:20],
            "small": {n: torch.full((n + 1,), float(n)) for n in range(300)},
            "bytes": bytes(range(256)) * 300,
            "half": torch.ones(3, 5, dtype=torch.bfloat16).t(),
            "empty": torch.empty(0),
            "values": [1, None, "text"],
        }
        async with lending_pair() as (sender, receiver, events):
            await sender.send_checkpoint([1], 1, state)
            got = await receive(sender, receiver, share=True, verify_shared=verify)
            assert_same(got, state)
            assert came_by(events) == MEMORY
            await settle(lambda: not sender.statistics().readers)  # it has hung up
            now = sender.statistics()
            assert (now.lent, now.requests) == (1, 1)  # the manifest
            part = await receive(sender, receiver, share=True, select=["half"])
            assert_same(part, {"half": state["half"]})
            assert came_by(events) == MEMORY

    @proves("cell HTTPTransport.recv_checkpoint, share=True: success")
    @proves("threat T3")
    @pytest.mark.parametrize("log", ["works", "fails"])
    async def test_later_sends_do_not_change_it(self, log):
        """The sender's own state dict may change, and be sent again and again.

        The memory was lent also where the audit log could not tell of it.
        """

        class Full(logging.Handler):
            def emit(self, record):
                if log == "fails" and "LEND" in record.getMessage():
                    raise OSError("no space left")

        audit, full = logging.getLogger("aiockpt.audit"), Full()
        before = audit.level
        async with lending_pair() as (sender, receiver, _):
            state = weights(1.0)
            await sender.send_checkpoint([1], 1, state)
            audit.addHandler(full)
            audit.setLevel(logging.INFO)
            try:
                lease = 4.0 if log == "fails" else 20.0
                held = await receive(sender, receiver, timeout=lease, share=True)
            finally:
                audit.removeHandler(full)
                audit.setLevel(before)
            if log == "fails":
                await asyncio.sleep(4.0)  # its lease has ended
            for step in range(2, 6):
                state["w0"].fill_(float(step))
                await sender.send_checkpoint([1], step, state)
                assert_same(held, weights(1.0))
            await sender.disallow_checkpoint()
            assert_same(held, weights(1.0))
        assert_same(held, weights(1.0))

    @proves("cell HTTPTransport.recv_checkpoint, share=True: success")
    async def test_what_is_written_is_the_receivers_alone(self):
        """The sender's snapshot, and what others share of it, stay."""
        async with lending() as sender, transport() as receiver:
            first = await receive(sender, receiver, share=True)
            second = await receive(sender, receiver, share=True)
            first["w0"].fill_(5.0)
            second["w0"][:3] = 7.0
            assert float(first["w0"].min()) == 5.0
            assert second["w0"][:4].tolist() == [7.0, 7.0, 7.0, 1.0]
            assert_same(await receive(sender, receiver), weights(1.0))
            assert_same(await receive(sender, receiver, share=True), weights(1.0))
            assert sender.statistics().lent == 4

    @pytest.mark.parametrize(
        ("sends", "receives"),
        [
            ({}, {}),
            ({"same_host": False}, {}),
            ({"same_host": True, "zero_copy": True}, {}),
            ({"same_host": True}, {"same_host": False}),
        ],
    )
    async def test_where_nothing_is_lent_it_comes_over_http(
        self, sends, receives, events
    ):
        """One end does not want to, or the sender has not copied the state dict."""
        async with (
            transport(**sends) as sender,
            transport(**receives) as receiver,
        ):
            state = weights(2.0)
            await sender.send_checkpoint([1], 1, state)
            got = await receive(sender, receiver, share=True)
            assert_same(got, state)
            assert came_by(events) == HTTP
            if not receives:
                assert "not shared: the sender offers no memory" in events[-1].detail
            got["w0"].zero_()
            assert float(state["w0"][0]) == 2.0

    async def test_there_must_be_memory_that_may_be_taken(self):
        """A template is refused, whose memory it would not be; a limit holds."""
        async with lending_pair() as (sender, receiver, events):
            await sender.send_checkpoint([1], 1, weights(1.0))
            with pytest.raises(ValueError, match="into"):
                await receive(sender, receiver, share=True, into={})
            async with transport(limits=Limits(max_bytes=1000)) as limited:
                with pytest.raises(LimitExceededError):
                    await receive(sender, limited, share=True)
            await sender.send_checkpoint([1], 2, {"a": 1})
            assert await receive(sender, receiver, 2, share=True) == {"a": 1}
            assert came_by(events) == HTTP


def scribble(progress):
    """Write to what this process lends, once a receive has compared it."""
    if progress.stop in ("rebuild", "load"):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "rw-s" in line and "/memfd:aiockpt" in line:
                ctypes.memset(int(line.partition("-")[0], 16), 0, MIB)


class TestCopy:
    """Everything else is copied out of the lent memory, and verified."""

    @pytest.mark.parametrize("how", ["fresh", "into", "direct", "part", "part into"])
    async def test_every_way_of_receiving(self, how):
        """It gives what HTTP would, in memory of its own.

        The lent memory is given back: later sends are staged into it.
        """
        used = set[str]()
        async with lending_pair() as (sender, receiver, events):
            for step in range(1, 6):
                state = {**weights(step, count=5), "n": torch.arange(70_000) + step}
                template = like(state)
                every: dict[str, dict[str, Any]] = {
                    "fresh": {},
                    "into": {"into": template},
                    "direct": {"into": template, "direct": True},
                    "part": {"select": ["w1", "n"]},
                    "part into": {"select": ["w1", "n"], "into": template},
                }
                options = every[how]
                await sender.send_checkpoint([1], step, state)
                seen = Halfway()
                got = await receive(sender, receiver, step, progress=seen, **options)
                assert came_by(events) == MEMORY
                for key in ["w1", "n"] if "part" in how else [*state]:
                    assert_same(got[key], state[key])
                    assert "into" not in options or got[key] is template[key]
                assert sender.statistics().requests == step
                last = seen.seen[-1]
                assert last.chunks_done == last.chunks_total > 1
                used |= arenas()
        assert len(used) <= 3

    @proves("threat T3")
    @pytest.mark.parametrize("how", ["verified", "prepared", "direct", "fresh"])
    async def test_what_was_compared_is_what_is_used(self, how):
        """A sender cannot change bytes between the comparison and their use."""
        state = weights(1.0)
        options: dict[str, dict[str, Any]] = {
            "verified": {"into": like(state), "verify_shared": True},
            "direct": {"into": like(state), "direct": True},
            "fresh": {},
        }
        async with lending_pair() as (sender, receiver, events):
            await sender.send_checkpoint([1], 1, state)
            if how == "prepared":
                prepared = await receiver.prepare(
                    sender.metadata(), 1, into=like(state), progress=scribble
                )
                got = await prepared.apply_async()
            else:
                got = await receive(sender, receiver, progress=scribble, **options[how])
            assert came_by(events) == MEMORY
            assert_same(got, state)
            again = await receive(sender, receiver, share=True)
            assert float(again["w0"][0]) == 0  # it has changed

    @pytest.mark.parametrize("into", [False, True])
    @pytest.mark.parametrize("what", ["retraction", "shutdown", "cancel"])
    async def test_one_under_way_gets_the_grace(self, what, into):
        """It reads to its end even after it; a cancel leaves nothing, not even open."""
        state = weights(2.0, mib=8)
        async with lending_pair(grace=0.1) as (sender, receiver, _):
            await sender.send_checkpoint([1], 1, state)
            template = like(state) if into else None

            async def act():
                if what == "retraction":
                    await sender.disallow_checkpoint()
                elif what == "shutdown":
                    await sender.shutdown()

            task, _ = await in_the_middle(
                lambda halfway: receive(
                    sender, receiver, progress=halfway, into=template
                ),
                act,
            )
            if what == "cancel":
                task.cancel()
                await asyncio.wait({task})
                assert_same(await receive(sender, receiver), state)
            else:
                assert_same(await task, state)


# ------------------------------------------------------------------------ two processes


class Other:
    """A process of `neighbour`."""

    def __init__(self, process):
        self.process = process

    async def call(self, do, **arguments):
        """Have it do something."""
        line = json.dumps({"do": do, **arguments})
        self.process.stdin.write(line.encode() + b"\n")
        answer = await self.process.stdout.readline()
        assert answer, "the process has ended"
        return json.loads(answer)

    async def kill(self):
        """End it."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


@asynccontextmanager
async def another():
    """Start a process, and end it."""
    command = (sys.executable, "-m", "tests.support.neighbour")
    other = Other(await create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE))
    try:
        yield other
    finally:
        await other.kill()


class TestProcesses:
    """Two real processes lend and attach memory."""

    async def test_they_hold_apart_what_they_share(self):
        """Each may write, send again, and be killed."""
        async with lending() as sender, another() as other, transport() as receiver:
            metadata = sender.metadata()
            for step, share in ((1, False), (3, True)):
                await sender.send_checkpoint([1], step, weights(1.0))
                ask = {"metadata": metadata, "step": step, "share": share}
                medium, _, seen = await other.call("receive", **ask)
                assert (medium, seen) == (MEMORY, [1.0, 1.0])
                await sender.send_checkpoint([1], step + 1, weights(5.0))
                assert await other.call("look") == [1.0, 1.0]
            await other.call("receive", metadata=metadata, step=4, share=True)
            state = await receive(sender, receiver, 4, share=True)
            await other.call("write", fill=9.0)
            assert_same(state, weights(5.0))
            await other.kill()
            assert_same(state, weights(5.0))
            await sender.send_checkpoint([1], 8, weights(8.0))

    @proves("cell HTTPTransport.recv_checkpoint, share=True: the other one dies")
    async def test_the_senders_death_does_not_matter(self):
        """Its memory lives as long as somebody maps it."""
        async with transport() as receiver:
            async with another() as other:
                metadata = await other.call("send", step=1, fill=3.0, mib=1)
                held = await receiver.recv_checkpoint(0, metadata, 1, share=True)
            assert_same(held, weights(3.0))
            held["w0"][0] = 1.0
            assert float(held["w0"][1]) == 3.0

    @proves("threat S5")
    @needs_root
    async def test_another_user_gets_it_over_http(self):
        """The kernel tells whose process it is, in both directions."""
        async with lending() as sender, another() as other, transport() as receiver:
            await other.call("become", user=NOBODY)
            ask = {"metadata": sender.metadata(), "step": 1, "share": True}
            medium, detail, seen = await other.call("receive", **ask)
            assert (medium, seen) == (HTTP, [1.0, 1.0])
            assert "another user's" in detail
            metadata = await other.call("send", step=1, fill=3.0, mib=1)
            await receiver.recv_checkpoint(0, metadata, 1, share=True)
            assert sender.statistics().lent == 0

    @proves("threat S5")
    @needs_root
    @pytest.mark.parametrize("pretend", [False, True])
    async def test_another_network_gets_it_over_http(self, pretend):
        """A container with its own network gets no memory of this host."""
        async with told() as events, another() as other, transport() as receiver:
            if not await other.call("move", pretend=pretend):
                pytest.skip("root may not change networks here")
            metadata = await other.call("send", step=1, fill=3.0, mib=1)
            got = await receiver.recv_checkpoint(0, metadata, 1, share=True)
            assert_same(got, weights(3.0))
            assert came_by(events) == HTTP
            assert ("Connection refused" in events[-1].detail) is pretend


async def test_it_works_from_within_an_application():
    """The socket is there as long as the transport is."""
    sender = transport(same_host=True, advertise="http://127.0.0.1/w/")
    app = web.Application()
    aiockpt.http.setup(app, sender, prefix="/w")
    async with told() as events, running(app) as host, transport() as receiver:
        await sender.send_checkpoint([1], 1, weights(6.0))
        metadata = sender.metadata().replace("127.0.0.1", f"127.0.0.1:{host.port}")
        held = await receiver.recv_checkpoint(0, metadata, 1, share=True)
        assert came_by(events) == MEMORY
    assert_same(held, weights(6.0))
