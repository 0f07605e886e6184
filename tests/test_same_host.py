"""Snapshots that processes of one host take as memory, and all that may go wrong."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from aiohttp import ClientSession, web

import aiockpt.http
from aiockpt import AuthenticationError, Limits
from aiockpt.errors import LimitExceededError
from aiockpt.events import TransferEvent, add_hook
from aiockpt.http import lender, shared_memory
from aiockpt.http.protocol import parse_metadata
from aiockpt.http.shared_memory import (
    OFFER_HEADER,
    PROBE_HEADER,
    Ask,
    Lent,
    Offer,
    format_offer,
    format_probe,
    identity,
    parse_offer,
)
from aiockpt.memory.arena import CAN_LEND, LENT_SEALS
from aiockpt.runtime.ipc import arrival
from aiockpt.runtime.ipc import receive as packet_of
from aiockpt.testing import assert_same
from tests.support import neighbour
from tests.support.applications import running
from tests.support.proofs import proves
from tests.support.transports import (
    MIB,
    Halfway,
    Transport,
    in_the_middle,
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


@pytest.fixture
def events() -> Iterator[list[TransferEvent]]:
    """Return what happens."""
    found: list[TransferEvent] = []
    remove = add_hook(found.append)
    yield found
    remove()


def came_by(events: list[TransferEvent]) -> str:
    """Return how the last receive got its bytes."""
    return [each for each in events if each.stop == "recv"][-1].medium


@asynccontextmanager
async def lending_pair(**options: Any) -> AsyncIterator[tuple[Transport, Transport]]:
    """Make a sender that lends, and a receiver that takes what is lent."""
    async with (
        transport(same_host=True, **options) as sender,
        transport(**options) as receiver,
    ):
        yield sender, receiver


def mixed() -> dict[str, Any]:
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


def like(state: Any) -> Any:
    """Return tensors to receive into."""
    return {key: torch.zeros_like(value) for key, value in state.items()}


class TestShare:
    """``share=True``: the sender's own pages."""

    @proves("cell HTTPTransport.recv_checkpoint, share=True: success")
    @pytest.mark.parametrize("verify", [False, True])
    async def test_it_is_the_same_state(self, verify: bool, events: Any) -> None:
        """Of whatever leaves it is made; no byte of data went over HTTP."""
        async with lending_pair() as (sender, receiver):
            state = mixed()
            await sender.send_checkpoint([1], 1, state)
            got = await receive(sender, receiver, share=True, verify_shared=verify)
            assert_same(got, state)
            assert came_by(events) == MEMORY
            now = sender.statistics()
            assert (now.lent, now.readers) == (1, 0)
            assert now.requests == 1  # the manifest

    @proves("cell HTTPTransport.recv_checkpoint, share=True: success")
    @proves("threat T3")
    async def test_later_sends_do_not_change_it(self) -> None:
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

    @proves("cell HTTPTransport.recv_checkpoint, share=True: success")
    async def test_what_is_written_is_the_receivers_alone(self) -> None:
        """The sender's snapshot, and what others share of it, stay."""
        async with lending_pair() as (sender, receiver):
            await sender.send_checkpoint([1], 1, weights(1.0))
            first = await receive(sender, receiver, share=True)
            second = await receive(sender, receiver, share=True)
            first["w0"].fill_(5.0)
            second["w0"][:3] = 7.0
            assert float(first["w0"].min()) == 5.0
            assert second["w0"][:4].tolist() == [7.0, 7.0, 7.0, 1.0]
            assert_same(await receive(sender, receiver), weights(1.0))
            assert_same(await receive(sender, receiver, share=True), weights(1.0))
            assert sender.statistics().lent == 4

    async def test_a_part(self, events: Any) -> None:
        """Selected values lie in the sender's memory, too."""
        async with lending_pair() as (sender, receiver):
            await sender.send_checkpoint([1], 1, weights(3.0, count=4))
            got = await receive(sender, receiver, share=True, select=["w1"])
            assert_same(got, {"w1": torch.full((MIB // 16,), 3.0)})
            assert came_by(events) == MEMORY

    async def test_where_nothing_is_lent_it_comes_over_http(self, events: Any) -> None:
        """From who does not lend, or has not copied the state dict."""
        for options in (
            {},
            {"same_host": False},
            {"same_host": True, "zero_copy": True},
        ):
            async with transport(**options) as sender, transport() as receiver:
                state = weights(2.0)
                await sender.send_checkpoint([1], 1, state)
                got = await receive(sender, receiver, share=True)
                assert_same(got, state)
                assert came_by(events) == HTTP
                assert "not shared: the sender offers no memory" in events[-1].detail
                got["w0"].zero_()
                assert float(state["w0"][0]) == 2.0

    async def test_it_has_no_template(self) -> None:
        """Whose memory it would not be."""
        async with lending_pair() as (sender, receiver):
            with pytest.raises(ValueError, match="into"):
                await receive(sender, receiver, share=True, into={})

    async def test_nothing_is_not_lent(self, events: Any) -> None:
        """A state dict without tensors has no memory."""
        async with lending_pair() as (sender, receiver):
            await sender.send_checkpoint([1], 1, {"a": 1})
            assert await receive(sender, receiver, share=True) == {"a": 1}
            assert came_by(events) == HTTP

    async def test_the_limit_holds(self) -> None:
        """Though nothing is allocated."""
        async with (
            transport(same_host=True) as sender,
            transport(limits=Limits(max_bytes=1000)) as receiver,
        ):
            await sender.send_checkpoint([1], 1, weights())
            with pytest.raises(LimitExceededError):
                await receive(sender, receiver, share=True)


class TestCopy:
    """Everything else is copied out of the lent memory, and verified."""

    @pytest.mark.parametrize("how", ["fresh", "into", "direct", "part", "part into"])
    async def test_every_way_of_receiving(self, how: str, events: Any) -> None:
        """Gives what HTTP would, in memory of its own."""
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
            got = await receive(sender, receiver, **options)
            assert came_by(events) == MEMORY
            wanted = ["w1", "n"] if "part" in how else [*state]
            assert_same(
                {key: got[key] for key in wanted}, {k: state[k] for k in wanted}
            )
            if "into" in options:
                assert all(got[key] is template[key] for key in wanted)
            assert sender.statistics().requests == 1

    @pytest.mark.parametrize("options", [{}, {"into": 1}, {"into": 1, "direct": True}])
    async def test_the_memory_is_given_back(self, options: Any) -> None:
        """A later send is staged into it."""
        used: list[int] = []
        async with lending_pair() as (sender, receiver):
            for step in range(1, 6):
                state = weights(float(step))
                await sender.send_checkpoint([1], step, state)
                if "into" in options:
                    options = {**options, "into": like(state)}
                assert_same(await receive(sender, receiver, step, **options), state)
                used += [each for each in memfds() if each not in used]
        assert len(used) <= 3

    async def test_progress_is_told(self) -> None:
        """Chunk by chunk."""
        async with lending_pair() as (sender, receiver):
            await sender.send_checkpoint([1], 1, weights())
            seen = Halfway()
            await receive(sender, receiver, progress=seen)
            assert seen.seen[-1].bytes_done == MIB
            assert seen.seen[-1].chunks_done == seen.seen[-1].chunks_total == 16

    async def test_a_retraction_does_not_wait_for_it(self, events: Any) -> None:
        """What was lent may be read to its end."""
        async with lending_pair(grace=30.0) as (sender, receiver):
            await sender.send_checkpoint([1], 1, weights(2.0, mib=8))
            task, _ = await in_the_middle(
                lambda halfway: receive(sender, receiver, progress=halfway),
                sender.disallow_checkpoint,
            )
            assert_same(await task, weights(2.0, mib=8))
            assert came_by(events) == MEMORY

    async def test_a_shutdown_does_not_wait_for_it(self) -> None:
        """Nor for who holds on to it."""
        async with transport() as receiver:
            sender = transport(same_host=True, grace=30.0)
            await sender.send_checkpoint([1], 1, weights(2.0, mib=8))
            task, _ = await in_the_middle(
                lambda halfway: receive(sender, receiver, progress=halfway),
                sender.shutdown,
            )
            assert_same(await task, weights(2.0, mib=8))

    @pytest.mark.parametrize("into", [False, True])
    async def test_a_cancelled_receive_leaves_nothing(self, into: bool) -> None:
        """Neither a descriptor nor a mapping; and the sender goes on."""
        async with lending_pair() as (sender, receiver):
            await sender.send_checkpoint([1], 1, weights(2.0, mib=8))
            template = like(weights(mib=8)) if into else None

            def begin(halfway: Halfway) -> Any:
                return receive(sender, receiver, progress=halfway, into=template)

            task, _ = await in_the_middle(begin, partial(asyncio.sleep, 0))
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            assert_same(await receive(sender, receiver), weights(2.0, mib=8))


def memfds() -> list[int]:
    """Return the inodes of the arenas of this process."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(link).startswith("/memfd:aiockpt"):
                found.add(link.stat().st_ino)
    return sorted(found)


def bearer(sender: Transport) -> dict[str, str]:
    """Return the header that a sender asks for."""
    return {"Authorization": f"Bearer {parse_metadata(sender.metadata()).token}"}


async def offered(sender: Transport, **headers: str) -> str | None:
    """Return what a request for the manifest is offered."""
    url = f"{sender.address()}1/metadata"
    async with (
        ClientSession(headers={**bearer(sender), **headers}) as session,
        session.get(url) as answer,
    ):
        await answer.read()
        return answer.headers.get(OFFER_HEADER)


def probe() -> str:
    """Return a probe of this host."""
    here = identity()
    assert here is not None
    return format_probe(here, os.urandom(16))


class Guest:
    """Somebody at a sender's socket."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(0)
        self.sock.connect(address)

    async def ask(self, said: bytes) -> bytes:
        """Say something; return the answer, and close what came with it."""
        with suppress(BrokenPipeError):
            self.sock.send(said)
        async with asyncio.timeout(20):
            data, fds = await borrowed_packet(self.sock)
        for fd in fds:
            os.close(fd)
        return data


async def borrowed_packet(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next packet."""
    await arrival(sock)
    with suppress(ConnectionResetError):
        return packet_of(sock, 4096, 4)
    return b"", []


class TestWho:
    """Who is lent anything."""

    async def test_only_this_host_is_offered_anything(self) -> None:
        """Who asks for nothing, or from elsewhere, is not told of it."""
        async with transport(same_host=True) as sender:
            await sender.send_checkpoint([1], 1, weights())
            elsewhere = format_probe(b"e" * 32, bytes(16))
            assert await offered(sender) is None
            assert await offered(sender, **{PROBE_HEADER: elsewhere}) is None
            assert await offered(sender, **{PROBE_HEADER: "nonsense"}) is None
            assert not sender.statistics().lent
            assert await offered(sender, **{PROBE_HEADER: probe()})

    async def test_wrong_credentials_get_no_offer(self) -> None:
        """The request is refused as ever."""
        async with (
            transport(same_host=True, token="right") as sender,
            transport(token="wrong") as receiver,
        ):
            await sender.send_checkpoint([1], 1, weights())
            with pytest.raises(AuthenticationError):
                await receive(sender, receiver, share=True)
            assert sender.statistics().lent == 0

    @proves("threat S5")
    async def test_a_ticket_is_good_once(self) -> None:
        """And nothing else opens the socket."""
        async with transport(same_host=True) as sender:
            await sender.send_checkpoint([1], 1, weights())
            given = parse_offer(await offered(sender, **{PROBE_HEADER: probe()}))
            assert given is not None
            good = msgspec.json.encode(Ask(given.ticket, keep=False))
            bad = msgspec.json.encode(Ask("0" * 32, keep=False))
            answers = []
            for said in (bad, b"{}", b"nonsense", b"", b"x" * 5000, good, good):
                guest = Guest(given.address)
                answers.append(await guest.ask(said))
                guest.sock.close()
            assert [bool(answer) for answer in answers] == [
                *[False] * 5,
                True,
                False,
            ]

    async def test_a_ticket_is_for_its_checkpoint(self) -> None:
        """What was replaced or retracted is not lent any more."""
        async with transport(same_host=True) as sender:
            for end in ("replaced", "retracted"):
                await sender.send_checkpoint([1], 1, weights())
                given = parse_offer(await offered(sender, **{PROBE_HEADER: probe()}))
                assert given is not None
                if end == "replaced":
                    await sender.send_checkpoint([1], 2, weights(2.0))
                else:
                    await sender.disallow_checkpoint()
                guest = Guest(given.address)
                said = msgspec.json.encode(Ask(given.ticket, keep=True))
                assert await guest.ask(said) == b""
                guest.sock.close()

    async def test_guests_that_say_nothing_are_let_go(self, monkeypatch) -> None:
        """They cost a descriptor for a moment, and never more than there may be."""
        monkeypatch.setattr(lender, "_TICKET_TIMEOUT", 0.2)
        async with transport(same_host=True, readers=2) as sender:
            await sender.send_checkpoint([1], 1, weights())
            given = parse_offer(await offered(sender, **{PROBE_HEADER: probe()}))
            assert given is not None
            guests = [Guest(given.address) for _ in range(3)]
            for guest in guests:
                async with asyncio.timeout(20):
                    assert await borrowed_packet(guest.sock) == (b"", [])
                guest.sock.close()

    async def test_old_tickets_are_forgotten(self, monkeypatch) -> None:
        """By age and by number."""
        monkeypatch.setattr(lender, "_TICKETS", 2)
        async with transport(same_host=True) as sender:
            await sender.send_checkpoint([1], 1, weights())
            given = [
                parse_offer(await offered(sender, **{PROBE_HEADER: probe()}))
                for _ in range(3)
            ]
            answers = []
            for each in given:
                assert each is not None
                guest = Guest(each.address)
                said = msgspec.json.encode(Ask(each.ticket, keep=False))
                answers.append(bool(await guest.ask(said)))
                guest.sock.close()
            assert answers == [False, True, True]

    async def test_the_audit_tells_of_it(self, caplog) -> None:
        """With the name that was granted."""
        caplog.set_level("INFO", logger="aiockpt.audit")
        async with lending_pair() as (sender, receiver):
            await sender.send_checkpoint([1], 1, weights())
            metadata = sender.grant("rank-3", step=1)
            await receiver.recv_checkpoint(0, metadata, 1, share=True)
        (line,) = (text for text in caplog.messages if "LEND" in text)
        assert f"peer=pid:{os.getpid()} receiver=rank-3" in line
        assert f"step=1 status=200 bytes={MIB} lent" in line

    async def test_a_receiver_may_decline(self, events: Any) -> None:
        """``same_host=False`` takes nothing."""
        async with (
            transport(same_host=True) as sender,
            transport(same_host=False) as receiver,
        ):
            await sender.send_checkpoint([1], 1, weights())
            assert_same(await receive(sender, receiver, share=True), weights())
            assert came_by(events) == HTTP


def memory(content: bytes, seals: int = LENT_SEALS) -> int:
    """Return memory with a content and seals."""
    fd = os.memfd_create("forged", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    import fcntl

    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def pipe() -> int:
    """Return an end of a pipe."""
    ours, theirs = os.pipe()
    os.close(theirs)
    return ours


ONES = b"\x00\x00\x80\x3f" * (MIB // 4)
ZEROS = bytes(MIB)
FORGED: dict[str, Callable[[], list[int]]] = {
    "nothing": list,
    "a pipe": lambda: [pipe()],
    "a device": lambda: [os.open("/dev/zero", os.O_RDWR)],
    "a file": lambda: [os.open(__file__, os.O_RDONLY)],
    "short": lambda: [memory(ONES[:-1])],
    "without seals": lambda: [memory(ONES, 0)],
    "that may shrink": lambda: [memory(ONES, LENT_SEALS & ~2)],
    "that may be written": lambda: [memory(ONES, LENT_SEALS & ~16)],
    "that is too many": lambda: [memory(ONES), memory(ONES)],
}


@asynccontextmanager
async def forger(
    answer: Callable[[Any], bytes | None], fds: Callable[[], list[int]]
) -> AsyncIterator[str]:
    """Listen where an offer leads, and answer; yield the offer."""
    offer = Offer(os.urandom(16).hex(), "0" * 32)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.settimeout(0)
    listener.bind(offer.address)
    listener.listen()
    guests: list[socket.socket] = []
    loop = asyncio.get_running_loop()

    def accept() -> None:
        guest, _ = listener.accept()
        guests.append(guest)
        said = answer(guest)
        handed = fds()
        with suppress(OSError):
            if said is not None:
                socket.send_fds(guest, [said], handed)
        for fd in handed:
            os.close(fd)

    loop.add_reader(listener, accept)
    try:
        yield format_offer(offer)
    finally:
        loop.remove_reader(listener)
        for each in (listener, *guests):
            each.close()


class TestForged:
    """A server that offers what it should not: the bytes come over HTTP."""

    @staticmethod
    async def received(monkeypatch: Any, offer: str, **options: Any) -> Any:
        """Receive from a sender with a forged offer."""

        async def forge(*_: Any) -> str:
            return offer

        monkeypatch.setattr(lender.Lender, "offer", forge)
        async with lending_pair() as (sender, receiver):
            await sender.send_checkpoint([1], 1, weights(1.0))
            return await receive(sender, receiver, **options)

    @staticmethod
    def lent(monkeypatch: Any, sent: list[str]) -> Callable[[Any], bytes]:
        """Return an answer that names the snapshot that is received."""
        whole = shared_memory.attach

        async def noting(offer: str, outline: Any, *, keep: bool) -> Any:
            sent.append(outline.snapshot_id)
            return await whole(offer, outline, keep=keep)

        monkeypatch.setattr("aiockpt.http.source.attach", noting)
        return lambda _: msgspec.json.encode(Lent(sent[0], MIB))

    @proves("threat T3")
    @pytest.mark.parametrize("share", [False, True])
    @pytest.mark.parametrize("kind", FORGED)
    async def test_what_is_no_sealed_memory(
        self, kind: str, share: bool, monkeypatch: Any, events: Any
    ) -> None:
        """It is neither mapped nor read, and not kept open."""
        answer = self.lent(monkeypatch, [])
        async with forger(answer, FORGED[kind]) as offer:
            got = await self.received(monkeypatch, offer, share=share)
        assert_same(got, weights(1.0))
        assert came_by(events) == HTTP
        assert any("not shared: " in event.detail for event in events)

    @proves("threat T3", "invariant 1")
    @pytest.mark.parametrize(
        "options",
        [{}, {"share": True, "verify_shared": True}, {"into": 1}, {"select": ["w0"]}],
    )
    async def test_other_contents_are_not_taken(
        self, options: Any, monkeypatch: Any, events: Any
    ) -> None:
        """Chunks whose digests differ come over HTTP."""
        if "into" in options:
            options = {"into": like(weights())}
        content = ONES[: MIB // 2] + ZEROS[MIB // 2 :]
        answer = self.lent(monkeypatch, [])
        async with forger(answer, lambda: [memory(content)]) as offer:
            got = await self.received(monkeypatch, offer, **options)
        assert_same(got, weights(1.0))
        assert "8 chunks of the shared memory were bad" in str(events)

    @pytest.mark.parametrize(
        "said",
        [
            b"nonsense",
            b"[]",
            msgspec.json.encode(Lent("another", MIB)),
            b"x" * 5000,
        ],
    )
    async def test_other_answers(self, said: bytes, monkeypatch: Any) -> None:
        """Nonsense, another snapshot, too much."""
        async with forger(lambda _: said, lambda: [memory(ONES)]) as offer:
            got = await self.received(monkeypatch, offer, share=True)
        assert_same(got, weights(1.0))

    async def test_nobody_and_silence(self, monkeypatch: Any) -> None:
        """Who is not there, or says nothing, is not waited for."""
        monkeypatch.setattr(shared_memory, "_ANSWER", 0.2)
        nobody = format_offer(Offer("0" * 32, "0" * 32))
        assert_same(await self.received(monkeypatch, nobody, share=True), weights(1.0))
        assert_same(
            await self.received(monkeypatch, "../etc/passwd", share=True), weights(1.0)
        )
        async with forger(lambda _: None, list) as offer:
            got = await self.received(monkeypatch, offer, share=True)
        assert_same(got, weights(1.0))

    @proves("threat I2")
    async def test_another_users_process(self, monkeypatch: Any) -> None:
        """Whoever listens there gets no ticket, if it is not this user's."""
        monkeypatch.setattr(shared_memory, "is_ours", lambda _: False)
        heard: list[bytes] = []

        def hear(guest: socket.socket) -> None:
            guest.settimeout(0)
            with suppress(BlockingIOError):
                heard.append(guest.recv(100))

        async with forger(hear, list) as offer:
            got = await self.received(monkeypatch, offer, share=True)
        assert_same(got, weights(1.0))
        assert heard in ([], [b""])


class Other:
    """A process of `neighbour`."""

    def __init__(self, process: Process) -> None:
        self.process = process

    async def call(self, do: str, **arguments: Any) -> Any:
        """Have it do something."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = json.dumps({"do": do, **arguments})
        self.process.stdin.write(line.encode() + b"\n")
        answer = await self.process.stdout.readline()
        assert answer, "the process has ended"
        return json.loads(answer)


@asynccontextmanager
async def another() -> AsyncIterator[Other]:
    """Start a process, and end it."""
    script = Path(neighbour.__file__)
    process = await create_subprocess_exec(
        *(sys.executable, str(script)),
        stdin=PIPE,
        stdout=PIPE,
    )
    try:
        yield Other(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.timeout(120)
class TestProcesses:
    """Two processes."""

    async def test_they_hold_apart_what_they_share(self) -> None:
        """Each may write, send again, and be killed."""
        async with transport(same_host=True) as sender, another() as other:
            for step, share in ((1, False), (4, True)):
                await sender.send_checkpoint([1], step, weights(1.0, mib=4))
                ask = {"metadata": sender.metadata(), "step": step, "share": share}
                medium, _, seen = await other.call("receive", **ask)
                assert (medium, seen) == (MEMORY, [1.0, 1.0])
                for later in range(step + 1, step + 3):
                    await sender.send_checkpoint([1], later, weights(5.0, mib=4))
                assert await other.call("look") == [1.0, 1.0]
            await sender.send_checkpoint([1], 7, weights(7.0, mib=4))
            async with transport() as receiver:
                await other.call("receive", metadata=sender.metadata(), step=7, share=1)
                state = await receive(sender, receiver, 7, share=True)
                await other.call("write", fill=9.0)
                assert_same(state, weights(7.0, mib=4))
                other.process.kill()
                await other.process.wait()
                assert_same(state, weights(7.0, mib=4))
            await sender.send_checkpoint([1], 8, weights(8.0, mib=4))

    @proves("cell HTTPTransport.recv_checkpoint, share=True: the other one dies")
    async def test_the_senders_death_does_not_matter(self) -> None:
        """Nor that of its memory: it lives as long as somebody maps it."""
        async with transport() as receiver:
            async with another() as other:
                metadata = await other.call("send", step=1, fill=3.0, mib=4)
                held = await receiver.recv_checkpoint(0, metadata, 1, share=True)
            expected = {"w0": torch.full((MIB,), 3.0)}
            assert_same(held, expected)
            held["w0"][0] = 1.0
            assert float(held["w0"][1]) == 3.0

    @proves("threat S5")
    @needs_root
    async def test_another_user_gets_it_over_http(self) -> None:
        """In either direction: the kernel tells whose process it is."""
        async with transport(same_host=True) as sender, another() as other:
            await sender.send_checkpoint([1], 1, weights(1.0))
            await other.call("become", user=NOBODY)
            ask = {"metadata": sender.metadata(), "step": 1, "share": True}
            medium, detail, seen = await other.call("receive", **ask)
            assert (medium, seen) == (HTTP, [1.0, 1.0])
            assert "another user's" in detail
            metadata = await other.call("send", step=1, fill=3.0, mib=1)
            async with transport() as receiver:
                await receiver.recv_checkpoint(0, metadata, 1, share=True)
            assert sender.statistics().lent == 0

    @proves("threat S5")
    @needs_root
    @pytest.mark.parametrize("pretend", [False, True])
    async def test_another_network_gets_it_over_http(
        self, pretend: bool, events: Any
    ) -> None:
        """As containers have one; even if it took itself for this host."""
        async with another() as other, transport() as receiver:
            if not await other.call("move", pretend=pretend):
                pytest.skip("root may not change networks here")
            metadata = await other.call("send", step=1, fill=3.0, mib=1)
            got = await receiver.recv_checkpoint(0, metadata, 1, share=True)
            assert_same(got, {"w0": torch.full((MIB // 4,), 3.0)})
            assert came_by(events) == HTTP
            refused = "Connection refused" in events[-1].detail
            assert refused is pretend


async def test_it_works_from_within_an_application(events: Any) -> None:
    """The socket is there as long as the transport is."""
    sender = Transport(same_host=True, advertise="http://127.0.0.1/w/")
    app = web.Application()
    aiockpt.http.setup(app, sender, prefix="/w")
    async with running(app) as host, transport() as receiver:
        await sender.send_checkpoint([1], 1, weights(6.0))
        metadata = sender.metadata().replace("127.0.0.1", f"127.0.0.1:{host.port}")
        held = await receiver.recv_checkpoint(0, metadata, 1, share=True)
        assert came_by(events) == MEMORY
    assert_same(held, weights(6.0))
