"""Memory that goes without a copy: what arrives, and when its owner may reuse it."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from aiockpt.http import pages as module
from aiockpt.http import sending
from aiockpt.http.bodies import FileBody
from aiockpt.http.pages import Holds, Pages
from aiockpt.http.pumps import Pumps
from aiockpt.http.sending import Outcome, Sending
from aiockpt.http.unread import Link
from aiockpt.memory import Arena
from aiockpt.wire.http import CHUNKS, VERIFIES_HEADER
from serving import Peer, settle

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.torch_free,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives its pages"),
]

VERIFIES = {VERIFIES_HEADER: CHUNKS}
MIB = 1 << 20


class Snapshot:
    """A servable whose owner overwrites the memory as soon as it may be reused."""

    def __init__(self, nbytes: int, *, shared: bool) -> None:
        self.arena = Arena(nbytes, shared=shared)
        noise = os.urandom(MIB + 1)  # so that no page is like another
        data = (noise * (nbytes // len(noise) + 1))[:nbytes]
        self.arena.buffer[:nbytes] = data
        self.data = data
        self.manifest = SimpleNamespace(header=b"head")
        self.live = False
        self.references = 1

    def views(self, start: int, stop: int) -> list[memoryview]:
        return [view.toreadonly() for view in self.arena.buffers(start, stop)]

    def acquire(self) -> None:
        assert self.references
        self.references += 1

    def release(self) -> None:
        self.references -= 1
        if not self.references and not self.arena.spent:
            self.arena.buffer[:] = bytes(len(self.arena.buffer))

    @property
    def reused(self) -> bool:
        """Whether it has been overwritten."""
        return self.arena.buffer[: len(self.data)] != self.data


class Stage:
    """A server that sends all of one snapshot for each request, and then lets go."""

    def __init__(self, snapshot: Snapshot, begin: int, stall_timeout: float) -> None:
        self.snapshot, self.begin = snapshot, begin
        self.stall_timeout = stall_timeout
        self.holds, self.pumps = Holds(), Pumps("test-serve")
        self.sendings: list[Sending] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.pages: list[Pages | None] = []
        self.port = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        header = len(self.snapshot.manifest.header)
        size = len(self.snapshot.data)
        body: Any = FileBody(self.snapshot, header + self.begin, header + size)  # type: ignore[arg-type]
        way = self.holds.way(body, request.headers)
        made = Sending(
            request.transport,  # type: ignore[arg-type]
            stall_timeout=self.stall_timeout,
            pumps=self.pumps,
            pages=lambda sock: self.noted(way(sock)),
        )
        self.sendings.append(made)
        self.tasks.append(asyncio.current_task())  # type: ignore[arg-type]
        response = web.StreamResponse(headers={"Content-Length": str(body.nbytes)})
        self.snapshot.acquire()
        try:
            await made.run(request, response, body)
        finally:
            self.snapshot.release()
        return response

    def noted(self, pages: Pages | None) -> Pages | None:
        self.pages.append(pages)
        return pages

    @property
    def outcome(self) -> Outcome | None:
        return self.sendings[-1].outcome if self.sendings else None

    @property
    def used(self) -> bool:
        """Whether pages went out."""
        return any(pages is not None and pages._used for pages in self.pages)


@pytest.fixture(params=["private", "shared"])
def kind(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Memory with huge pages where there are some, or that of an anonymous file."""
    # The kernel has room for the smallest bodies below, which are worth a thread, too.
    monkeypatch.setattr(sending, "WORTH", MIB // 2)
    return str(request.param)


@asynccontextmanager
async def staged(
    kind: str,
    nbytes: int = 8 * MIB,
    *,
    begin: int = 0,
    stall_timeout: float = 30.0,
) -> AsyncIterator[tuple[Stage, Peer]]:
    """Run a server and connect to it; its owner has let go of the snapshot already."""
    snapshot = Snapshot(nbytes, shared=kind == "shared")
    stage = Stage(snapshot, begin, stall_timeout)
    app = web.Application()
    app.router.add_get("/", stage.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0))
    stage.port = listening.getsockname()[1]
    await web.SockSite(runner, listening).start()
    try:
        with closing(stage.holds), closing(stage.pumps), closing(snapshot.arena):
            async with Peer(stage.port) as peer:
                yield stage, peer
            await runner.cleanup()
    finally:
        await runner.cleanup()


async def owner_lets_go(stage: Stage) -> None:
    """Let go as a trainer does who retracts what is still being read."""
    await settle(lambda: stage.snapshot.references > 1)
    stage.snapshot.release()


@pytest.mark.parametrize("begin", [0, 1, 4095, MIB + 5])
async def test_a_body_arrives_whole(kind: str, begin: int) -> None:
    """From any byte on, and again over the same connection."""
    async with staged(kind, 9 * MIB + 123, begin=begin) as (stage, peer):
        for _ in range(3):
            answer = await peer.ask("/", **VERIFIES)
            assert answer.body == stage.snapshot.data[begin:]
        assert stage.used
        await settle(lambda: stage.snapshot.references == 1)
        assert not stage.snapshot.arena.spent
        assert len(stage.holds) == 0


async def test_who_does_not_say_that_it_verifies_gets_copies(kind: str) -> None:
    """A tool that compares no digests must never see memory that changes."""
    async with staged(kind) as (stage, peer):
        assert (await peer.ask("/")).body == stage.snapshot.data
        assert (await peer.ask("/", **{VERIFIES_HEADER: "no"})).body
        assert not stage.used


async def test_the_header_is_copied(kind: str) -> None:
    """It does not lie in the arena."""
    async with staged(kind, begin=-4) as (stage, peer):
        answer = await peer.ask("/", **VERIFIES)
        assert answer.body == b"head" + stage.snapshot.data
        assert stage.pages == [None]


async def test_a_few_bytes_are_copied(kind: str) -> None:
    """They are not worth a thread."""
    async with staged(kind, 100_000) as (stage, peer):
        assert (await peer.ask("/", **VERIFIES)).body == stage.snapshot.data
        assert stage.pages == []


async def test_what_no_arena_holds_is_copied(kind: str) -> None:
    """A trainer changes its own memory, which is nobody's to spend."""
    async with staged(kind) as (stage, peer):
        arena, stage.snapshot.arena = stage.snapshot.arena, None  # type: ignore[assignment]
        stage.snapshot.views = arena.buffers  # type: ignore[method-assign]
        assert (await peer.ask("/", **VERIFIES)).body == stage.snapshot.data
        assert stage.pages == [None]
        stage.snapshot.arena = arena


async def test_memory_stays_until_the_peer_has_read_it(kind: str) -> None:
    """The response has ended, the owner has let go, and the rest is still right."""
    async with staged(kind, MIB) as (stage, peer):
        await peer.request("/", **VERIFIES)
        await owner_lets_go(stage)
        await settle(lambda: stage.outcome is Outcome.SENT)
        await settle(stage.tasks[0].done)
        assert stage.used
        assert not stage.snapshot.reused
        assert (await peer.answer()).body == stage.snapshot.data
        await settle(lambda: stage.snapshot.reused)
        assert not stage.snapshot.arena.spent


async def test_memory_that_is_not_read_is_spent(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner has to wait for a moment only; the peer may still read it."""
    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    async with staged(kind, MIB) as (stage, peer):
        await peer.request("/", **VERIFIES)
        await owner_lets_go(stage)
        await settle(lambda: not stage.snapshot.references)
        assert stage.outcome is Outcome.SENT
        assert stage.snapshot.arena.spent
        stage.snapshot.arena.close()
        assert (await peer.answer()).body == stage.snapshot.data


@pytest.mark.parametrize("how", ["eviction", "stall", "cancel"])
async def test_memory_is_spent_after_a_sending_that_ended_early(
    kind: str, how: str
) -> None:
    """What the peer can still read of it stays as it was."""
    patience = 0.3 if how == "stall" else 30.0
    async with staged(kind, 64 * MIB, stall_timeout=patience) as (stage, peer):
        await peer.request("/", **VERIFIES)
        await peer.head()
        await owner_lets_go(stage)
        await settle(lambda: stage.used)
        if how == "eviction":
            stage.sendings[0].evict()
        elif how == "cancel":
            stage.tasks[0].cancel()
        await settle(lambda: not stage.snapshot.references)
        assert stage.snapshot.arena.spent
        rest = await peer.read_all()
    assert 0 < len(rest) < len(stage.snapshot.data)
    assert stage.snapshot.data.startswith(rest)


async def test_a_peer_that_leaves_may_keep_what_it_has_not_read(kind: str) -> None:
    """It has dropped it, which nobody can know for certain; no error is logged."""
    async with staged(kind, 64 * MIB) as (stage, peer):
        await peer.request("/", **VERIFIES)
        await peer.head()
        await settle(lambda: stage.used)
        peer.close()
        await settle(lambda: stage.outcome is Outcome.GONE)
        await settle(lambda: stage.snapshot.references == 1)
        assert stage.snapshot.arena.spent


async def test_a_peer_may_leave_what_it_was_sent(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a receive does that is cancelled when everything lies in the kernel."""
    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    async with staged(kind, MIB) as (stage, peer):
        await peer.request("/", **VERIFIES)
        await settle(lambda: len(stage.holds) == 1)
        peer.close()
        await settle(lambda: stage.snapshot.references == 1)
        assert stage.snapshot.arena.spent


async def test_a_body_is_held_for_itself(kind: str) -> None:
    """A peer that is always sent more need not have read that, too."""
    async with staged(kind, MIB) as (stage, peer):
        await peer.request("/", **VERIFIES)
        await settle(lambda: len(stage.holds) == 1)
        await peer.request("/", **VERIFIES)
        await settle(lambda: len(stage.holds) == 2)
        for left in (1, 0):
            assert (await peer.answer()).body == stage.snapshot.data
            await settle(lambda left=left: len(stage.holds) == left)
        assert not stage.snapshot.arena.spent


async def test_without_a_descriptor_nothing_is_held(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is spent at once, and the sending is whole."""

    def refuse(_: socket.socket) -> socket.socket:
        raise OSError(24, os.strerror(24))

    monkeypatch.setattr(socket.socket, "dup", refuse)
    async with staged(kind, MIB) as (stage, peer):
        await peer.request("/", **VERIFIES)
        await settle(lambda: stage.snapshot.arena.spent)
        assert stage.outcome is Outcome.SENT
        assert (await peer.answer()).body == stage.snapshot.data


async def test_a_peer_that_has_read_all_may_leave(kind: str) -> None:
    """As a receiver does after its last chunk."""
    for _ in range(10):
        async with staged(kind, 5 * MIB) as (stage, peer):
            assert (await peer.ask("/", **VERIFIES)).body == stage.snapshot.data
            peer.close()
            await settle(lambda: stage.snapshot.references == 1)
            assert stage.used
            assert not stage.snapshot.arena.spent


async def test_closing_spends_what_is_held(kind: str) -> None:
    """Nobody is left who could see the last byte read."""
    async with staged(kind, MIB) as (stage, peer):
        await peer.request("/", **VERIFIES)
        await settle(lambda: len(stage.holds) == 1)
        stage.holds.close()
        stage.holds.close()
        assert stage.snapshot.references == 1
        assert stage.snapshot.arena.spent
        assert (await peer.answer()).body == stage.snapshot.data
        assert (await peer.ask("/", **VERIFIES)).body == stage.snapshot.data
        assert stage.pages[1] is None


async def test_what_ends_after_the_close_is_spent(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sending may end later than the service; then nothing is held."""
    monkeypatch.setattr(module, "_PATIENCE", 60.0)
    async with staged(kind, MIB) as (stage, peer):
        keep = stage.holds.keep

        def late(*what: Any) -> bool:
            stage.holds.close()
            return keep(*what)

        stage.holds.keep = late  # type: ignore[assignment]
        await peer.request("/", **VERIFIES)
        await settle(lambda: stage.snapshot.arena.spent)
        assert stage.snapshot.references == 1
        assert len(stage.holds) == 0
        assert (await peer.answer()).body == stage.snapshot.data


def no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no descriptor for a pipe."""

    def refuse(_: int) -> tuple[int, int]:
        raise OSError(24, os.strerror(24))

    monkeypatch.setattr("aiockpt.http.pages.os.pipe2", refuse)


def no_large_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a user who has as many as one may have."""

    def refuse(*_: int) -> int:
        raise PermissionError(1, os.strerror(1))

    monkeypatch.setattr("aiockpt.http.pages.fcntl.fcntl", refuse)


def no_vmsplice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in a container that forbids it."""
    refusing = SimpleNamespace(vmsplice=lambda *_: -1)
    monkeypatch.setattr(module, "_libc", refusing)


def no_splice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in one that forbids the other half."""

    def refuse(*_: int) -> int:
        raise PermissionError(1, os.strerror(1))

    monkeypatch.setattr("aiockpt.http.pages.os.splice", refuse)


def no_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be where the kernel does not tell who has read what."""
    monkeypatch.setattr(Link, "unread", lambda _: None)


def no_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be on another system."""
    monkeypatch.setattr(module, "_CAN_SPLICE", False)


@pytest.mark.parametrize(
    "lack", [no_pipe, no_large_pipe, no_vmsplice, no_splice, no_diagnosis, no_system]
)
async def test_without_the_kernels_help_it_is_copied(
    kind: str, monkeypatch: pytest.MonkeyPatch, lack: Callable[..., None]
) -> None:
    """The same bytes come, and nothing is held."""
    lack(monkeypatch)
    async with staged(kind) as (stage, peer):
        assert (await peer.ask("/", **VERIFIES)).body == stage.snapshot.data
        assert not stage.used or lack is no_splice
        await settle(lambda: stage.snapshot.references == 1)
        assert not stage.snapshot.arena.spent


async def test_where_the_interpreter_is_busy_the_rest_is_copied(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece is small, and would wait for the lock again each time."""
    pieces: list[int] = []
    send = Pages.send

    def noted(pages: Pages, start: int) -> int:
        pieces.append(send(pages, start))
        return pieces[-1]

    monkeypatch.setattr(Pages, "send", noted)
    monkeypatch.setattr(module, "_SLOW", -1.0)  # every piece is slow
    async with staged(kind, 16 * MIB) as (stage, peer):
        assert (await peer.ask("/", **VERIFIES)).body == stage.snapshot.data
    assert 0 < sum(pieces) <= 3 * MIB


async def test_what_the_loop_has_sent_is_not_sent_again(kind: str) -> None:
    """The kernel had pages of it already, which the peer had no room for."""
    snapshot = Snapshot(32 * MIB, shared=kind == "shared")
    body: Any = FileBody(snapshot, 4, 4 + len(snapshot.data))  # type: ignore[arg-type]
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        peer = socket.create_connection(listening.getsockname())
        own, _ = listening.accept()
    got = bytearray()
    with own, peer, closing(snapshot.arena), closing(Holds()) as holds:
        own.settimeout(0)
        peer.settimeout(0)
        way = holds.way(body, VERIFIES)(own)
        assert way is not None
        sent = left = 0
        for turn in range(1000):
            with suppress(BlockingIOError):
                while sent < body.nbytes:
                    sent += way.send(sent)
            left += way._pipe is not None and way._pipe._filled > 0
            with suppress(BlockingIOError):
                got += peer.recv(300_000)
            with suppress(BlockingIOError):  # as the loop does, between two turns
                sent += own.send(snapshot.data[sent : sent + 70_001 + turn])
            if len(got) == body.nbytes:
                break
        way.close(sent=sent)
    assert left
    assert got == snapshot.data


@pytest.mark.parametrize("unread", [0, 1])
async def test_a_part_that_was_read_spends_nothing(kind: str, unread: int) -> None:
    """The sending has ended early, and the peer has all that there was."""
    snapshot = Snapshot(8 * MIB, shared=kind == "shared")
    body: Any = FileBody(snapshot, 4, 4 + len(snapshot.data))  # type: ignore[arg-type]
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        peer = socket.create_connection(listening.getsockname())
        own, _ = listening.accept()
    with own, peer, closing(snapshot.arena), closing(Holds()) as holds:
        own.settimeout(0)
        peer.settimeout(0)
        way = holds.way(body, VERIFIES)(own)
        assert way is not None
        sent = left = way.send(0)
        while left > unread:
            with suppress(BlockingIOError):
                left -= len(peer.recv(left - unread))
            await asyncio.sleep(0)
        end = way._begin._replace(position=way._begin.position + sent - unread)
        await settle(lambda: end.passed)
        way.close(sent=sent)
        assert snapshot.arena.spent == bool(unread)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # fork with threads: on purpose
async def test_a_forked_child_keeps_no_pages() -> None:
    """Nor a way to them: its copy of a pipe would be read by nobody."""
    pipe = module._Pipe()
    kept = [os.readlink(f"/proc/self/fd/{end}") for end in pipe.descriptors()]
    said, say = os.pipe()
    if (child := os.fork()) == 0:
        with suppress(BaseException):
            ends = [os.readlink(f"/proc/self/fd/{end}") for end in pipe.descriptors()]
            os.write(say, b"no" if set(ends) & set(kept) else b"ok")
        os._exit(0)
    await asyncio.to_thread(os.waitpid, child, 0)
    pipe.close()
    pipe.close()
    assert os.read(said, 2) == b"ok"
    os.close(said)
    os.close(say)


async def test_the_loop_may_send_in_between(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a thread had fetched, and the loop has sent, does not come twice."""
    monkeypatch.setattr("aiockpt.http.pumps._TURN", 0.001)
    monkeypatch.setattr("aiockpt.http.pumps._PATIENCE", 0)
    monkeypatch.setattr(sending, "SLICE_BYTES", 70_001)
    async with staged(kind, 40 * MIB + 9) as (stage, peer):
        worth, turns = Sending._is_worth_a_turn, iter(range(1 << 30))
        monkeypatch.setattr(
            Sending,
            "_is_worth_a_turn",
            lambda self, body: worth(self, body) and next(turns) % 3 < 2,
        )
        for _ in range(3):
            answer = await peer.ask("/", **VERIFIES)
            assert answer.body == stage.snapshot.data
        assert stage.used
