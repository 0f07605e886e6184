"""Snapshots that processes of one host take as memory, and all that may go wrong."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import socket
import struct
import sys
import threading
from asyncio.subprocess import PIPE, create_subprocess_exec
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from aiohttp import ClientSession, web

import aiockpt.http
from aiockpt import Limits, TransferEvent, add_hook
from aiockpt.errors import LimitExceededError, StagingError, UnavailableError
from aiockpt.format.chunks import ChunkHasher
from aiockpt.http.protocol import OFFER_HEADER, PROBE_HEADER, parse_metadata
from aiockpt.local import attach as attaching
from aiockpt.local import lender
from aiockpt.local.attach import (
    AttachReply,
    AttachRequest,
    Offer,
    format_offer,
    parse_offer,
)
from aiockpt.memory.arena import CAN_LEND, LEND_SEALS
from aiockpt.runtime import ipc
from aiockpt.runtime.ipc import arrival
from aiockpt.runtime.ipc import receive as packet_of
from aiockpt.runtime.same_host import format_probe, identity
from aiockpt.testing import assert_same
from tests.support.proofs import proves
from tests.support.servers import Peer, running, settle
from tests.support.shortages import exhausted_fds
from tests.support.transports import (
    MIB,
    Halfway,
    Transport,
    in_the_middle,
    port_of,
    receive,
    transport,
    weights,
)

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(not CAN_LEND, reason="memory is lent on Linux only"),
]

MEMORY, HTTP = "shared memory", "HTTP"
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another")


class Events(list[TransferEvent]):
    """What happens."""

    @property
    def came_by(self) -> str:
        """How the last receive got its bytes."""
        return [each for each in self if each.stop == "recv"][-1].medium


@pytest.fixture
def events():
    """Return what happens."""
    found = Events()
    remove = add_hook(found.append)
    yield found
    remove()


@asynccontextmanager
async def lending_pair(**options):
    """Make a sender that lends, and a receiver that takes what is lent."""
    async with (
        transport(same_host=True, **options) as sender,
        transport(**options) as receiver,
    ):
        yield sender, receiver


@asynccontextmanager
async def lending(**options):
    """Make a sender that lends step 1."""
    async with transport(same_host=True, **options) as sender:
        await sender.send_checkpoint([1], 1, weights(1.0))
        yield sender


def mixed():
    """Return a state with all kinds of leaves."""
    tied = torch.arange(40_000, dtype=torch.float64)
    return {
        "tied": tied,
        "again": tied[10:20],
        "small": {n: torch.full((n + 1,), float(n)) for n in range(300)},
        "bytes": bytes(range(256)) * 300,
        "half": torch.ones(3, 5, dtype=torch.bfloat16).t(),
        "empty": torch.empty(0),
        "values": [1, None, "text"],
    }


def like(state):
    """Return tensors to receive into."""
    return {key: torch.zeros_like(value) for key, value in state.items()}


class TestShare:
    """With ``share=True``, the receiver gets the sender's own pages."""

    @proves("cell HTTPTransport.recv_checkpoint, share=True: success")
    @pytest.mark.parametrize("verify", [False, True])
    async def test_it_is_the_same_state(self, verify, events):
        """Every leaf arrives, and no byte of data goes over HTTP."""
        async with lending_pair() as (sender, receiver):
            state = mixed()
            await sender.send_checkpoint([1], 1, state)
            got = await receive(sender, receiver, share=True, verify_shared=verify)
            assert_same(got, state)
            assert events.came_by == MEMORY
            await settle(lambda: not sender.statistics().readers)  # it has hung up
            now = sender.statistics()
            assert (now.lent, now.requests) == (1, 1)  # the manifest
            part = await receive(sender, receiver, share=True, select=["half"])
            assert_same(part, {"half": state["half"]})
            assert events.came_by == MEMORY

    @proves("cell HTTPTransport.recv_checkpoint, share=True: success")
    @proves("threat T3")
    async def test_later_sends_do_not_change_it(self):
        """The sender's own state dict may change, and be sent again and again."""
        async with lending_pair() as (sender, receiver):
            state = weights(1.0)
            await sender.send_checkpoint([1], 1, state)
            held = await receive(sender, receiver, share=True)
            for step in range(2, 6):
                state["w0"].fill_(float(step))
                await sender.send_checkpoint([1], step, state)
                assert_same(held, weights(1.0))
            await sender.disallow_checkpoint()
            assert_same(held, weights(1.0))
        assert_same(held, weights(1.0))

    @proves("threat T3")
    async def test_a_log_that_fails_does_not_change_it(self):
        """The memory was lent by then, so it must not be reused."""

        class Full(logging.Handler):
            def emit(self, record):
                if "LEND" in record.getMessage():
                    raise OSError("no space left")

        log, full = logging.getLogger("aiockpt.audit"), Full()
        before = log.level
        async with lending_pair() as (sender, receiver):
            await sender.send_checkpoint([1], 1, weights(1.0))
            log.addHandler(full)
            log.setLevel(logging.INFO)
            try:
                metadata = sender.metadata()
                held = await receiver.recv_checkpoint(0, metadata, 1, 1.0, share=True)
            finally:
                log.removeHandler(full)
                log.setLevel(before)
            await asyncio.sleep(1.0)  # its lease has ended
            for step in range(2, 6):
                await sender.send_checkpoint([1], step, weights(float(step)))
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
        async with transport(**sends) as sender, transport(**receives) as receiver:
            state = weights(2.0)
            await sender.send_checkpoint([1], 1, state)
            got = await receive(sender, receiver, share=True)
            assert_same(got, state)
            assert events.came_by == HTTP
            if not receives:
                assert "not shared: the sender offers no memory" in events[-1].detail
            got["w0"].zero_()
            assert float(state["w0"][0]) == 2.0

    async def test_there_must_be_memory_that_may_be_taken(self, events):
        """A template is refused, whose memory it would not be; a limit holds."""
        async with lending() as sender, transport() as receiver:
            with pytest.raises(ValueError, match="into"):
                await receive(sender, receiver, share=True, into={})
            async with transport(limits=Limits(max_bytes=1000)) as limited:
                with pytest.raises(LimitExceededError):
                    await receive(sender, limited, share=True)
            await sender.send_checkpoint([1], 2, {"a": 1})
            assert await receive(sender, receiver, 2, share=True) == {"a": 1}
            assert events.came_by == HTTP


class TestChanged:
    """A sender that writes to what it has lent."""

    @proves("threat T3")
    @pytest.mark.parametrize("how", ["verified", "prepared", "direct", "fresh"])
    async def test_what_was_compared_is_what_is_used(self, how, events):
        """Nobody can change bytes between the comparison and their use."""
        state = weights(1.0)
        async with lending_pair() as (sender, receiver):
            await sender.send_checkpoint([1], 1, state)

            def scribble(progress):
                if progress.stop in ("rebuild", "load"):
                    arena_of(sender).buffer[:MIB] = bytes(MIB)

            if how == "prepared":
                metadata, into = sender.metadata(), like(state)
                prepared = await receiver.prepare(
                    metadata, 1, into=into, progress=scribble
                )
                got = await prepared.apply_async()
            else:
                options: dict[str, dict[str, Any]] = {
                    "verified": {"into": like(state), "verify_shared": True},
                    "direct": {"into": like(state), "direct": True},
                    "fresh": {},
                }
                got = await receive(sender, receiver, progress=scribble, **options[how])
            assert events.came_by == MEMORY
            assert float(arena_of(sender).buffer[0]) == 0  # it has changed
            assert_same(got, state)


class TestCopy:
    """Everything else is copied out of the lent memory, and verified."""

    @pytest.mark.parametrize("how", ["fresh", "into", "direct", "part", "part into"])
    async def test_every_way_of_receiving(self, how, events):
        """It gives what HTTP would, in memory of its own."""
        state = {**weights(4.0, count=5), "n": torch.arange(70_000)}
        template = like(state)
        options: dict[str, Any] = {
            "fresh": {},
            "into": {"into": template},
            "direct": {"into": template, "direct": True},
            "part": {"select": ["w1", "n"]},
            "part into": {"select": ["w1", "n"], "into": template},
        }[how]
        async with lending_pair() as (sender, receiver):
            await sender.send_checkpoint([1], 1, state)
            seen = Halfway()
            got = await receive(sender, receiver, progress=seen, **options)
            assert events.came_by == MEMORY
            wanted = ["w1", "n"] if "part" in how else [*state]
            for key in wanted:
                assert_same(got[key], state[key])
                assert "into" not in options or got[key] is template[key]
            assert sender.statistics().requests == 1
            last = seen.seen[-1]
            assert last.chunks_done == last.chunks_total > 1

    @pytest.mark.parametrize("direct", [None, False, True])
    async def test_the_memory_is_given_back(self, direct):
        """A later send is staged into it."""
        arenas = set()
        async with lending_pair() as (sender, receiver):
            for step in range(1, 6):
                state = weights(float(step))
                await sender.send_checkpoint([1], step, state)
                arenas.add(id(sender._store.published.arena))
                options: dict[str, Any] = {}
                if direct is not None:
                    options["into"] = like(state)
                got = await receive(
                    sender, receiver, step, direct=bool(direct), **options
                )
                assert_same(got, state)
                assert not sender._store.published.arena.spent
        assert len(arenas) <= 3

    @pytest.mark.parametrize("into", [False, True])
    @pytest.mark.parametrize("what", ["retraction", "shutdown", "cancel"])
    async def test_one_under_way_gets_the_grace(self, what, into):
        """It reads to its end even after it; a cancel leaves nothing, not even open."""
        state = weights(2.0, mib=8)
        async with lending_pair(grace=0.1) as (sender, receiver):
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


# ------------------------------------------------------------------- the end of a loan


def mapped_bytes():
    """Return how many bytes of memory that can be lent this process has mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:aiockpt" in line:
            start, stop = (int(each, 16) for each in line.split()[0].split("-"))
            total += stop - start
    return total


@asynccontextmanager
async def hung(sender, *, keep, step=1):
    """Have a process that was lent a step and then says nothing; yield its memory."""
    offer = await offered(sender, step=step)
    sock = guest_at(offer)
    fds: list[int] = []
    try:
        sock.send(msgspec.json.encode(AttachRequest(offer.ticket, keep)))
        await arrival(sock)
        said, fds = packet_of(sock, 4096, 1)
        assert msgspec.json.decode(said, type=AttachReply).nbytes
        yield sock, fds[0]
    finally:
        sock.close()
        for fd in fds:
            os.close(fd)


def first_of(fd):
    """Return the first number that is in lent memory."""
    return torch.frombuffer(bytearray(os.pread(fd, 4, 0)), dtype=torch.float32).item()


@pytest.mark.parametrize("keep", [False, True])
class TestHung:
    """A process that was lent memory and hangs is a reader with a deadline."""

    @proves("threat D22")
    async def test_it_is_counted_and_let_go(self, keep, events):
        """The sender gives up after the stall timeout; what is mapped stays valid."""
        async with (
            lending(stall_timeout=0.5) as sender,
            hung(sender, keep=keep) as (_, fd),
        ):
            assert sender.statistics().readers == 1
            await sender.send_checkpoint([1], 2, weights(2.0))
            assert sender.statistics().superseded == 1
            await settle(lambda: sender.statistics().superseded == 0)
            [ended] = [each for each in events if each.stop == "evict"]
            assert ended.detail == "the loan has ended"
            assert (ended.step, ended.peer) == (1, f"pid:{os.getpid()}")
            for step in range(3, 7):
                await sender.send_checkpoint([1], step, weights(float(step)))
            assert (first_of(fd) == 1.0) is keep

    @proves("threat D22")
    async def test_a_superseded_snapshot_is_kept_for_some_only(self, keep):
        """``keep_superseded`` bounds what hung processes hold, however many."""
        async with lending(keep_superseded=1) as sender, AsyncExitStack() as stack:
            most = 0
            for step in range(1, 7):
                await sender.send_checkpoint([1], step, weights(float(step)))
                await stack.enter_async_context(hung(sender, keep=keep, step=step))
                await settle(lambda: sender.statistics().superseded <= 1)
                most = max(most, mapped_bytes())
            assert most <= 5 * MIB

    @proves("threat D22")
    @pytest.mark.parametrize("what", ["retraction", "shutdown"])
    async def test_a_retraction_ends_it_after_the_grace(self, keep, what):
        """The memory goes back to the system, or to the next send."""
        async with (
            lending(grace=0.2) as sender,
            hung(sender, keep=keep) as (sock, fd),
        ):
            if what == "retraction":
                await sender.disallow_checkpoint()
                assert sender.statistics().readers == 0
                assert sender.statistics().evicted == 1
            else:
                await sender.shutdown()
            await settle(lambda: not mapped_bytes())
            await arrival(sock)
            assert packet_of(sock, 4096, 1) == (b"", [])  # the end
            assert first_of(fd) == 1.0


class TestEnded:
    """A receiver whose loan has ended meanwhile."""

    @proves("threat D22", "invariant 1")
    @pytest.mark.parametrize("end", ["superseded", "retracted"])
    @pytest.mark.parametrize("how", ["copy", "direct", "into", "share", "part"])
    async def test_it_gets_its_checkpoint_or_an_error(self, how, end, monkeypatch):
        """Never bytes of the checkpoint that is staged into the memory."""
        state: dict[str, Any] = {**weights(2.0, mib=8), "n": torch.arange(70_000)}
        template = {key: torch.full_like(value, 7) for key, value in state.items()}
        options: dict[str, dict[str, Any]] = {
            "copy": {},
            "direct": {"into": template, "direct": True},
            "into": {"into": template},
            "share": {"share": True, "verify_shared": True},
            "part": {"select": ["w0"]},
        }
        async with lending_pair(grace=0.0, keep_superseded=0) as (sender, receiver):
            await sender.send_checkpoint([1], 1, state)
            await sender.send_checkpoint([1], 2, state)
            arena, used = arena_of(sender), set()

            async def act():
                if end == "retracted":
                    await sender.disallow_checkpoint()
                other = {**weights(5.0, mib=8), "n": torch.zeros(70_000).long()}
                for step in (3, 4, 5):
                    await sender.send_checkpoint([1], step, other)
                    used.add(arena_of(sender))

            with held_up(monkeypatch) as reached:
                task = asyncio.create_task(receive(sender, receiver, 2, **options[how]))
                await reached.wait()
                await act()
            await asyncio.wait({task})
            if how in ("into", "share"):
                assert arena not in used
            elif end == "superseded":  # what was retracted goes back to the system
                assert arena in used
                assert isinstance(task.exception(), UnavailableError)
            if task.exception() is None:
                got = task.result()
                assert_same(got, {key: state[key] for key in got})
            else:
                assert isinstance(task.exception(), UnavailableError)


@contextmanager
def held_up(monkeypatch):
    """Have receives wait in the middle of what is lent, until the block ends."""
    loop, reached, go_on = (
        asyncio.get_running_loop(),
        asyncio.Event(),
        threading.Event(),
    )

    class Waiting(ChunkHasher):
        def update(self, start, *views):
            if start >= 4 * MIB:
                loop.call_soon_threadsafe(reached.set)
                go_on.wait(30)
            return super().update(start, *views)

    with monkeypatch.context() as patch:
        patch.setattr("aiockpt.http.source.ChunkHasher", Waiting)
        try:
            yield reached
        finally:
            go_on.set()


def arena_of(sender):
    """Return the memory of what a sender serves."""
    return sender._store.published.arena


# -------------------------------------------------------------------------- who is lent


async def offered(sender, probe="", step=1):
    """Return what a request for the manifest is offered, with a probe of this host."""
    here = identity()
    assert here is not None
    token = parse_metadata(sender.metadata()).token
    headers = {"Authorization": f"Bearer {token}"}
    if probe is not None:
        headers[PROBE_HEADER] = probe or format_probe(here, os.urandom(16))
    async with (
        ClientSession(headers=headers) as session,
        session.get(f"{sender.address()}{step}/metadata") as answer,
    ):
        await answer.read()
        return parse_offer(answer.headers.get(OFFER_HEADER))


def guest_at(offer):
    """Connect to a sender's socket."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(0)
    sock.connect(offer.address)
    return sock


async def answer_to(sock, said=None):
    """Say something, if anything; return the answer, and close what came with it."""
    fds: list[int] = []
    data = b""
    with sock, suppress(BrokenPipeError, ConnectionResetError):
        if said is not None:
            sock.send(said)
        async with asyncio.timeout(20):
            await arrival(sock)
            data, fds = packet_of(sock, 4096, 4)
    for fd in fds:
        os.close(fd)
    return data


async def redeem(offer, keep=False):
    """Return what a ticket is answered."""
    said = msgspec.json.encode(AttachRequest(offer.ticket, keep=keep))
    return await answer_to(guest_at(offer), said)


class TestShortage:
    """A sender or a receiver without descriptors, or without a thread."""

    async def test_a_receiver_takes_http(self, events, monkeypatch):
        """It has a connection already, and needs no more descriptors for that."""

        async def short(offer, outline, *, keep):
            with exhausted_fds():
                return await attaching.attach(offer, outline, keep=keep)

        monkeypatch.setattr("aiockpt.http_transport.attach", short)
        async with lending_pair() as (sender, receiver):
            await sender.send_checkpoint([1], 1, weights(1.0))
            assert_same(await receive(sender, receiver), weights(1.0))
        assert events.came_by == HTTP
        assert "not shared: [Errno 24]" in str(events)

    async def test_a_manifest_comes_without_an_offer(self, caplog, monkeypatch):
        """The receiver takes the bytes over HTTP; the log says why, once."""
        async with lending() as sender, Peer(port_of(sender), token=None) as peer:
            here, token = identity(), parse_metadata(sender.metadata()).token
            assert here is not None
            # It reads files; another one took the last descriptor after that.
            monkeypatch.setattr(lender, "identity", lambda: here)

            async def ask():
                probe = {PROBE_HEADER: format_probe(here, os.urandom(16))}
                secret = {"Authorization": f"Bearer {token}"}
                answer = await peer.ask("/checkpoint/1/metadata", **probe, **secret)
                assert answer.status == 200
                return parse_offer(answer.headers.get(OFFER_HEADER))

            with exhausted_fds():
                assert [await ask(), await ask()] == [None, None]
            (record,) = caplog.records
            assert "nothing is lent" in record.getMessage()
            with guest_at(await ask()):  # it listens
                pass

    async def test_processes_that_wait_are_told_of_once(self, caplog):
        """It tries each second whether a descriptor is left."""
        async with lending() as sender:
            offer = await offered(sender)
            ask = msgspec.json.encode(AttachRequest(offer.ticket, keep=False))
            with guest_at(offer) as late, exhausted_fds():
                await asyncio.sleep(1.2)  # two tries
                late.send(ask)
            await asyncio.sleep(0)
            (record,) = caplog.records
            assert "a process of this host has to wait" in record.getMessage()


class TestWho:
    """The sender lends memory only to processes that may have it."""

    async def test_only_this_host_is_offered_anything(self):
        """Others are not told of it: without a probe, or with that of another host."""
        async with lending() as sender:
            for probe in (None, format_probe(b"e" * 32, bytes(16)), "nonsense"):
                assert await offered(sender, probe) is None
            assert not sender.statistics().lent
            assert await offered(sender)

    async def test_a_sender_without_descriptors_says_so_once(self, caplog):
        """The sender tries each second, and the guest waits and gets its memory."""
        guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        guest.settimeout(0)
        async with lending() as sender:
            offer = await offered(sender)
            with exhausted_fds(), caplog.at_level(logging.WARNING):
                guest.connect(offer.address)
                await settle(lambda: caplog.records)
                await asyncio.sleep(1.2)  # another try
            said = msgspec.json.encode(AttachRequest(offer.ticket, keep=False))
            assert await answer_to(guest, said)
        (record,) = caplog.records
        assert "has to wait" in record.getMessage()

    @proves("threat S5")
    async def test_nothing_but_a_ticket_opens_the_socket(self):
        """A ticket of another sender, one that was changed, and nonsense do not."""
        async with lending() as sender, lending() as another_one:
            offer = await offered(sender)
            last = "A" if offer.ticket[-5] != "A" else "B"
            changed = offer.ticket[:-5] + last + offer.ticket[-4:]
            others = (await offered(another_one)).ticket
            for ticket in ("0" * 32, "", "%", "é", others, changed, offer.ticket[:40]):
                said = msgspec.json.encode(AttachRequest(ticket, keep=False))
                assert await answer_to(guest_at(offer), said) == b""
            for said in (b"{}", b"nonsense", b"", b"x" * 5000):
                assert await answer_to(guest_at(offer), said) == b""
            assert await redeem(offer)

    @pytest.mark.parametrize("end", ["replaced", "retracted", "old"])
    async def test_a_ticket_is_for_its_checkpoint(self, end, monkeypatch):
        """An old ticket does not open what was replaced or retracted."""
        if end == "old":
            monkeypatch.setattr(lender, "_TICKET_LIFETIME_S", -1.0)
        async with lending() as sender:
            offer = await offered(sender)
            if end == "replaced":
                await sender.send_checkpoint([1], 2, weights(2.0))
            elif end == "retracted":
                await sender.disallow_checkpoint()
            assert await redeem(offer, keep=True) == b""

    async def test_guests_that_say_nothing_are_let_go(self, monkeypatch):
        """They cost a descriptor for a moment, and never more than there may be."""
        monkeypatch.setattr(lender, "_TICKET_TIMEOUT_S", 0.1)
        async with lending(readers=2) as sender:
            offer = await offered(sender)
            for guest in [guest_at(offer) for _ in range(3)]:
                assert await answer_to(guest) == b""

    async def test_the_audit_tells_of_it(self, caplog):
        """The audit names the receiver that was granted the memory."""
        caplog.set_level("INFO", logger="aiockpt.audit")
        async with lending() as sender, transport() as receiver:
            metadata = sender.grant("rank-3", step=1)
            await receiver.recv_checkpoint(0, metadata, 1, share=True)
        (line,) = (text for text in caplog.messages if "LEND" in text)
        assert f"peer=pid:{os.getpid()} receiver=rank-3" in line
        assert f"step=1 status=200 bytes={MIB} lent" in line


# ------------------------------------------------------------------------ forged offers


def memory(content, seals=LEND_SEALS):
    """Return memory with a content and seals."""
    fd = os.memfd_create("forged", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def pipe():
    """Return an end of a pipe."""
    ours, theirs = os.pipe()
    os.close(theirs)
    return ours


ONES = b"\x00\x00\x80\x3f" * (MIB // 4)
FORGED = {
    "nothing": list,
    "a pipe": lambda: [pipe()],
    "a device": lambda: [os.open("/dev/zero", os.O_RDWR)],
    "a file": lambda: [os.open(__file__, os.O_RDONLY)],
    "short": lambda: [memory(ONES[:-1])],
    "without seals": lambda: [memory(ONES, 0)],
    "that may shrink": lambda: [memory(ONES, LEND_SEALS & ~2)],
    "that may be written": lambda: [memory(ONES, LEND_SEALS & ~16)],
    "that is too many": lambda: [memory(ONES), memory(ONES)],
}


class Forger:
    """A sender that offers what it should not."""

    def __init__(self, monkeypatch):
        self.offer = format_offer(Offer(os.urandom(16).hex(), "0" * 32))
        self.snapshot = ""
        self._patch = monkeypatch
        attach = attaching.attach

        async def noting(offer, outline, *, keep):
            self.snapshot = outline.snapshot_id
            return await attach(offer, outline, keep=keep)

        monkeypatch.setattr("aiockpt.http_transport.attach", noting)

    def truth(self, _):
        """Return the answer that names the snapshot that is received."""
        return msgspec.json.encode(AttachReply(self.snapshot, MIB))

    @asynccontextmanager
    async def answering(self, answer, fds=list):
        """Listen where the offer leads, and answer with descriptors."""
        offer = parse_offer(self.offer)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.settimeout(0)
        assert offer is not None
        listener.bind(offer.address)
        listener.listen()
        guests = [listener]

        def accept():
            guest, _ = listener.accept()
            guests.append(guest)
            said, handed = answer(guest), fds()
            with suppress(OSError):
                if said is not None:
                    socket.send_fds(guest, [said], handed)
            for fd in handed:
                os.close(fd)

        loop = asyncio.get_running_loop()
        loop.add_reader(listener, accept)
        try:
            yield
        finally:
            loop.remove_reader(listener)
            for each in guests:
                each.close()

    async def received(self, offer="", **options):
        """Receive from it; it makes no difference."""

        async def forge(*_):
            return offer or self.offer

        self._patch.setattr(lender.Lender, "offer", forge)
        async with lending() as sender, transport() as receiver:
            assert_same(await receive(sender, receiver, **options), weights(1.0))


@pytest.fixture
def forger(monkeypatch):
    """Return somebody who forges offers."""
    return Forger(monkeypatch)


class TestForged:
    """A server that offers what it should not: the bytes come over HTTP."""

    @proves("threat T3")
    @pytest.mark.parametrize("share", [False, True])
    @pytest.mark.parametrize("kind", FORGED)
    async def test_what_is_no_sealed_memory(self, forger, kind, share, events):
        """It is neither mapped nor read, and not kept open."""
        async with forger.answering(forger.truth, FORGED[kind]):
            await forger.received(share=share)
        assert events.came_by == HTTP
        assert any("not shared: " in event.detail for event in events)

    @proves("threat T3", "invariant 1")
    @pytest.mark.parametrize(
        "options",
        [{}, {"share": True, "verify_shared": True}, {"into": 1}, {"select": ["w0"]}],
    )
    async def test_other_contents_are_not_taken(self, forger, options, events):
        """Chunks whose digests differ come over HTTP."""
        if "into" in options:
            options = {"into": like(weights())}
        content = ONES[: MIB // 2] + bytes(MIB // 2)
        async with forger.answering(forger.truth, lambda: [memory(content)]):
            await forger.received(**options)
        assert "8 chunks of the shared memory were bad" in str(events)

    async def test_other_answers(self, forger, monkeypatch):
        """Nonsense, another snapshot, too much, silence, nobody, and a path."""
        monkeypatch.setattr(attaching, "_ANSWER_TIMEOUT_S", 0.1)
        another = msgspec.json.encode(AttachReply("another", MIB))
        for said in (b"nonsense", b"[]", another, b"x" * 5000, None):
            async with forger.answering(lambda _, said=said: said, FORGED["short"]):
                await forger.received(share=True)
        await forger.received(share=True)
        await forger.received("../etc/passwd", share=True)

    @proves("threat I2")
    async def test_another_users_process(self, forger, monkeypatch):
        """A process that listens there gets no ticket unless it is this user's."""
        monkeypatch.setattr(attaching, "is_ours", lambda _: False)
        heard = []

        def hear(guest):
            guest.settimeout(0)
            with suppress(BlockingIOError):
                heard.append(guest.recv(100))

        async with forger.answering(hear):
            await forger.received(share=True)
        assert heard in ([], [b""])

    async def test_another_users_process_without_a_thread(self, forger, monkeypatch):
        """The loop hangs up, and the bytes come over HTTP."""

        def refuse(*_):
            raise StagingError("no thread")

        monkeypatch.setattr(attaching, "is_ours", lambda _: False)
        monkeypatch.setattr(attaching, "start_daemon", refuse)
        async with forger.answering(lambda _: None):
            await forger.received(share=True)


def lingering():
    """Return a TCP connection whose closing lasts until its other end has read it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    sock.settimeout(0)
    with suppress(BlockingIOError):
        while True:
            sock.send(bytes(1 << 16))
    linger = struct.pack("ii", 1, 60)  # seconds
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    return sock, other


@pytest.fixture
def hangs_up():
    """Return what says whether a new thread is closing a stranger's socket."""
    before = {*threading.enumerate()}

    def is_closing():
        names = [each.name for each in threading.enumerate() if each not in before]
        return any(name.endswith(("-apart", "-hang-up")) for name in names)

    return is_closing


class TestUnasked:
    """Descriptors that nobody asked for, whose closing lasts as long as one likes."""

    @proves("threat D26")
    async def test_another_user_cannot_stop_a_sender(self, monkeypatch, hangs_up):
        """A thread turns it away, on kernels that let it send."""
        monkeypatch.setattr(ipc, "_SO_PASSRIGHTS", -1)
        async with lending() as sender, transport(same_host=False) as receiver:
            offer = await offered(sender)
            sock, other = lingering()
            with monkeypatch.context() as patch, other:
                patch.setattr(lender, "is_ours", lambda _: False)
                with sock, guest_at(offer) as guest:
                    socket.send_fds(guest, [b"{}"], [sock.fileno()])
                async with asyncio.timeout(20):
                    await settle(hangs_up)
                    got = await receive(sender, receiver)
                assert_same(got, weights(1.0))
                assert hangs_up()
            await settle(lambda: not hangs_up())
            assert await redeem(offer)  # it accepts again

    @proves("threat D26")
    async def test_another_user_cannot_stop_a_receiver(
        self, forger, monkeypatch, hangs_up
    ):
        """A sender's offer leads to a process that sends one as soon as it accepts."""
        monkeypatch.setattr(ipc, "_SO_PASSRIGHTS", -1)
        sock, other = lingering()

        sent = threading.Event()

        def is_ours(_):
            sent.wait(20)  # from then on, nobody else has the descriptor
            return False

        monkeypatch.setattr(attaching, "is_ours", is_ours)
        offer = parse_offer(forger.offer)
        assert offer is not None

        def accept():
            guest, _ = listener.accept()
            socket.send_fds(guest, [b"{}"], [sock.fileno()])
            sock.close()
            sent.set()
            guest.close()

        with other, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(offer.address)
            listener.listen()
            stranger = threading.Thread(target=accept)
            stranger.start()
            async with asyncio.timeout(20):
                await forger.received(share=True)
            stranger.join()
            assert hangs_up()
        await settle(lambda: not hangs_up())

    @proves("threat D26")
    async def test_the_kernel_refuses_them(self):
        """Neither a sender's guests nor the lender of another user may send any."""
        async with lending() as sender:
            offer = await offered(sender)
            with guest_at(offer) as guest:
                if not refuses_descriptors():
                    pytest.skip("needs Linux 6.16")
                with pytest.raises(PermissionError):
                    socket.send_fds(guest, [b"{}"], [0])


def refuses_descriptors():
    """Return whether this kernel can refuse descriptors."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        ipc.allow_descriptors(one, allow=False)
        try:
            socket.send_fds(other, [b"x"], [0])
        except PermissionError:
            return True
    return False


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
    async def test_another_network_gets_it_over_http(self, pretend, events):
        """A container with its own network gets no memory of this host."""
        async with another() as other, transport() as receiver:
            if not await other.call("move", pretend=pretend):
                pytest.skip("root may not change networks here")
            metadata = await other.call("send", step=1, fill=3.0, mib=1)
            got = await receiver.recv_checkpoint(0, metadata, 1, share=True)
            assert_same(got, weights(3.0))
            assert events.came_by == HTTP
            assert ("Connection refused" in events[-1].detail) is pretend


async def test_it_works_from_within_an_application(events):
    """The socket is there as long as the transport is."""
    sender = Transport(same_host=True, advertise="http://127.0.0.1/w/")
    app = web.Application()
    aiockpt.http.setup(app, sender, prefix="/w")
    async with running(app) as host, transport() as receiver:
        await sender.send_checkpoint([1], 1, weights(6.0))
        metadata = sender.metadata().replace("127.0.0.1", f"127.0.0.1:{host.port}")
        held = await receiver.recv_checkpoint(0, metadata, 1, share=True)
        assert events.came_by == MEMORY
    assert_same(held, weights(6.0))
