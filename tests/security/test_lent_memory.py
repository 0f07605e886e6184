"""Memory that is lent to processes of one host, and all that may go wrong."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import struct
import threading
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

import msgspec
import pytest
import torch
from aiohttp import ClientSession

from aiockpt.errors import StagingError, UnavailableError
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
from tests.support.memory import mapped
from tests.support.proofs import proves
from tests.support.servers import Peer, settle
from tests.support.shortages import exhausted_fds
from tests.support.transports import (
    MIB,
    came_by,
    lending,
    lending_pair,
    like,
    port_of,
    receive,
    transport,
    weights,
)

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(not CAN_LEND, reason="memory is lent on Linux only"),
]


# ------------------------------------------------------------------- the end of a loan


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
            lending(stall_timeout=2.0) as sender,
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
                most = max(most, mapped())
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
            await settle(lambda: not mapped())
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
        ended = {"grace": 0.0, "keep_superseded": 0}
        async with lending_pair(**ended) as (sender, receiver, _):
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

    async def test_a_receiver_takes_http(self, monkeypatch):
        """It has a connection already, and needs no more descriptors for that."""

        async def short(offer, outline, *, keep):
            with exhausted_fds():
                return await attaching.attach(offer, outline, keep=keep)

        monkeypatch.setattr("aiockpt.http_transport.attach", short)
        async with lending_pair() as (sender, receiver, events):
            await sender.send_checkpoint([1], 1, weights(1.0))
            assert_same(await receive(sender, receiver), weights(1.0))
        assert came_by(events) == "HTTP"
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
    @pytest.mark.parametrize(
        ("kind", "share"), [*dict.fromkeys(FORGED, True).items(), ("short", False)]
    )
    async def test_what_is_no_sealed_memory(self, forger, kind, share, events):
        """It is neither mapped nor read, and not kept open."""
        async with forger.answering(forger.truth, FORGED[kind]):
            await forger.received(share=share)
        assert came_by(events) == "HTTP"
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
