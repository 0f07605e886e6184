"""Whoever can connect takes no more of the process's descriptors than it can spare."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from aiockpt.http.extension import ServiceExtension
from aiockpt.http.server import CheckpointServer
from aiockpt.http.store import Store
from tests.support import torn
from tests.support.commandline import start_aiockpt
from tests.support.proofs import proves
from tests.support.servers import TOKEN, Memory, Peer, Site, config, serving, settle
from tests.support.shortages import exhausted_fds

pytestmark = [pytest.mark.asyncio, pytest.mark.torch_free, pytest.mark.every_loop]

LATEST: Final = "/checkpoint/latest"
LIMIT: Final = 400  # a quarter may be connections without a token
MANY: Final = 40


@contextmanager
def limited(most: int) -> Iterator[None]:
    """Let this process have at most so many descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@proves("threat R2")
async def test_readers_that_stall_are_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The others are events of a lower level."""
    caplog.set_level(logging.INFO, "aiockpt")
    served = serving(Memory(8 << 20), stall_timeout=0.3, send_buffer=4096)
    async with served as site, AsyncExitStack() as stack:
        for each in await connected(stack, site.port, 4):
            await each.request("/checkpoint/7/full")

        def levels() -> list[int]:
            said = [each for each in caplog.records if each.name == "aiockpt"]
            return sorted(each.levelno for each in said)

        await settle(lambda: len(levels()) == 4)
    assert levels() == [*[logging.INFO] * 3, logging.WARNING]


class Broken(Memory):
    """Its bytes cannot be had, by a fault of ours."""

    def views(self, start: int, stop: int) -> list[memoryview]:
        raise ZeroDivisionError


@proves("threat R2")
@pytest.mark.allow_error_logs
async def test_a_fault_that_each_request_meets_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each request gets an answer."""
    async with serving(Broken()) as site, AsyncExitStack() as stack:
        for each in await connected(stack, site.port, 4):
            assert (await each.ask("/checkpoint/7/full")).status == 500
    (record,) = caplog.records
    assert "ZeroDivisionError" in str(record.exc_info)


class Vanishing(Memory):
    """Its bytes cannot be had, by a fault of ours, and the reader has left by then."""

    site: Site

    def views(self, start: int, stop: int) -> list[memoryview]:
        for each in self.site.connections:
            each.transport.abort()
        raise RuntimeError("a fault of ours")


@pytest.mark.allow_error_logs
async def test_a_fault_is_told_though_the_reader_has_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is not mistaken for a write to a connection that has ended."""
    memory = Vanishing()
    async with serving(memory) as memory.site, memory.site.peer() as peer:
        await peer.request("/checkpoint/7/full")
        await settle(lambda: bool(caplog.records))
    (record,) = caplog.records
    assert "a fault of ours" in str(record.exc_info)


def limit_of(pid: int) -> int:
    """Return how many descriptors a process may have."""
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]


def is_ended(peer: Peer) -> bool:
    """Return whether the server has ended a connection that got no answer."""
    try:
        return peer._socket.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


async def connected(stack: AsyncExitStack, port: int, count: int) -> list[Peer]:
    """Return so many connections."""
    return [await stack.enter_async_context(Peer(port)) for _ in range(count)]


@proves("threat D20")
async def test_connections_without_a_token_make_way() -> None:
    """The oldest ones go first; a receiver that is known keeps its connection."""
    with limited(LIMIT):
        async with serving(Memory()) as site, AsyncExitStack() as stack:
            (known,) = await connected(stack, site.port, 1)
            assert (await known.ask(LATEST)).status == 200
            silent = await connected(stack, site.port, LIMIT // 4 + 5)
            (late,) = await connected(stack, site.port, 1)
            async with asyncio.timeout(30):
                assert (await late.ask(LATEST)).status == 200
            ended = [is_ended(peer) for peer in silent]
            assert ended == sorted(ended, reverse=True)
            assert 5 <= sum(ended) <= 7
            assert (await known.ask(LATEST)).status == 200


@proves("threat D20")
@pytest.mark.parametrize("token", [None, "another"])
async def test_who_was_refused_makes_way_at_once(token: str | None) -> None:
    """A connection that asks again and again without the token does not stay."""
    with limited(LIMIT):
        async with serving(Memory()) as site, AsyncExitStack() as stack:
            refused = [
                await stack.enter_async_context(Peer(site.port, token=token))
                for _ in range(LIMIT // 4)
            ]
            for peer in refused:
                assert (await peer.ask(LATEST)).status == 401
            await connected(stack, site.port, MANY)
            await settle(lambda: sum(map(is_ended, refused)) >= MANY)


@proves("threat D20")
async def test_receivers_that_come_at_once_are_all_served() -> None:
    """More of them than may be without a token: each shows its token first."""
    with limited(LIMIT):
        async with serving(Memory()) as site, AsyncExitStack() as stack:
            peers = await connected(stack, site.port, LIMIT // 4 + 20)
            for peer in peers:
                await peer.request(LATEST)
            async with asyncio.timeout(30):
                answers = [await peer.answer() for peer in peers]
            assert {each.status for each in answers} == {200}


@proves("threat D20")
async def test_an_application_that_needs_many_files_gets_them() -> None:
    """Receivers that are idle make way; a few are served in any case."""
    with limited(LIMIT), ExitStack() as files:
        async with serving(Memory()) as site, AsyncExitStack() as stack:
            peers = await connected(stack, site.port, MANY)
            for peer in peers:
                assert (await peer.ask(LATEST)).status == 200
            while (fd := os.dup(0)) < LIMIT - LIMIT // 4:
                files.callback(os.close, fd)
            os.close(fd)
            await asyncio.sleep(0.6)  # they have been idle for long enough
            more = await connected(stack, site.port, 8)
            for peer in more:
                assert (await peer.ask(LATEST)).status == 200
            ended = [is_ended(peer) for peer in peers]
            assert ended == sorted(ended, reverse=True)
            assert any(ended)
            assert not all(ended)


@proves("threat D20")
async def test_one_host_cannot_keep_the_others_out() -> None:
    """Connections in use make way for a host that has fewer; the oldest ones first."""
    news, many = f"{LATEST}?after=999", {"Prefer": "wait=60"}
    with limited(LIMIT), ExitStack() as files:
        async with serving(Memory()) as site, AsyncExitStack() as stack:

            def peer(host: str) -> Peer:
                return Peer(site.port, host=host)

            polls = [
                await stack.enter_async_context(peer("127.0.0.2")) for _ in range(MANY)
            ]
            for poll in polls:
                await poll.request(news, **many)
            await settle(lambda: site.server.statistics().waiting == MANY)
            while (fd := os.dup(0)) < LIMIT - LIMIT // 4:
                files.callback(os.close, fd)
            os.close(fd)
            for host in ("127.0.0.3", "127.0.0.4"):
                other = await stack.enter_async_context(peer(host))
                async with asyncio.timeout(30):
                    assert (await other.ask(LATEST)).status == 200
                await other.request(news, **many)
                await settle(lambda: site.server.statistics().waiting >= MANY)
            assert [is_ended(poll) for poll in polls] == [True] * 2 + [False] * 38
            own = await stack.enter_async_context(peer("127.0.0.2"))
            async with asyncio.timeout(30):
                assert await own.read(1) == b""
            assert sum(map(is_ended, polls)) == 2


class Guarded(socket.socket):
    """A listening socket behind a firewall that refuses one connection."""

    refused = False

    def accept(self) -> tuple[socket.socket, object]:
        """Fail once, as a system call may."""
        if not self.refused:
            self.refused = True
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return super().accept()


async def test_a_refused_connection_is_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log has no traceback, and the next connection is accepted."""
    server = CheckpointServer(config(), Store(), ServiceExtension())
    with Guarded() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        await server.start([listening])
        async with Peer(listening.getsockname()[1]) as peer, asyncio.timeout(30):
            assert (await peer.ask(LATEST)).status == 404
        await server.stop()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "Operation not permitted" in record.getMessage()


@proves("threat D20")
async def test_a_server_without_descriptors_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It goes on by itself when there are some; what it sends meanwhile arrives."""
    async with serving(Memory()) as site, AsyncExitStack() as stack:
        (known,) = await connected(stack, site.port, 1)
        assert (await known.ask(LATEST)).status == 200
        late = [stack.enter_context(socket.socket()) for _ in range(20)]
        with exhausted_fds(), caplog.at_level(logging.WARNING):
            for each in late:
                each.connect(("127.0.0.1", site.port))
            await settle(lambda: caplog.records)
            assert (await known.ask(LATEST)).status == 200
            await asyncio.sleep(0.6)  # two more tries
        (record,) = caplog.records
        assert "few descriptors are left" in record.getMessage()
        assert "ulimit -n" in record.getMessage()
        loop = asyncio.get_running_loop()
        request = f"GET {LATEST} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        request += f"Authorization: Bearer {TOKEN}\r\n\r\n"
        async with asyncio.timeout(30):
            for each in late:
                each.settimeout(0)
                await loop.sock_sendall(each, request.encode())
                assert (await loop.sock_recv(each, 100)).startswith(b"HTTP/1.1 200")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has prlimit")
@pytest.mark.parametrize("name", ["follow", "serve"])
async def test_only_processes_of_ours_raise_their_limit(
    tmp_path: Path, name: str
) -> None:
    """A command does; a transport in the caller's process does not."""
    torn.write(tmp_path, 2)  # saves a checkpoint
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = min(hard, 65_536)
    if raised <= LIMIT:
        pytest.skip("the hard limit is too low")
    with limited(LIMIT):
        async with serving(Memory()) as site, Peer(site.port) as peer:
            assert (await peer.ask(LATEST)).status == 200
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (LIMIT, hard)
        file = tmp_path / "last" / "checkpoint_0.safetensors"
        follows = name == "follow"
        words: list[object] = [site.url, "-o", tmp_path] if follows else [file]
        command = start_aiockpt(name, *words, stdout=subprocess.DEVNULL)
    try:
        await settle(lambda: limit_of(command.pid) == raised)
    finally:
        command.kill()
        command.communicate()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
