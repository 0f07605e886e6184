"""What the kernel knows of how far a peer of this host has read."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from aiockpt.http import unread
from aiockpt.http.unread import Link, Mark

pytestmark = [
    pytest.mark.torch_free,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tell"),
]


def soon(holds: Callable[[], bool]) -> bool:
    """Say whether it holds before long."""
    until = time.monotonic() + 10.0
    while not (true := holds()) and time.monotonic() < until:
        time.sleep(0.01)
    return true


def settles(link: Link | None, count: int) -> bool:
    """Say whether so much is unread, once the peer has received everything."""
    assert link is not None
    return soon(lambda: link.unread() == count)


def mark(sock: socket.socket) -> Mark:
    """Return the place behind what was sent until now."""
    here = Mark.here(sock)
    assert here is not None
    return here


_MPTCP = 262
V4, V6 = (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")


@contextmanager
def connected(
    family: int = socket.AF_INET, host: str = "127.0.0.1", to: str = ""
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give both ends of a connection, that of the server first."""
    dual = family == socket.AF_INET6 and host == "::"
    with closing(
        socket.create_server((host, 0), family=family, dualstack_ipv6=dual)
    ) as listener:
        port = listener.getsockname()[1]
        peer = socket.create_connection((to or host, port))
        own, _ = listener.accept()
    with own, peer:
        yield own, peer


@pytest.mark.parametrize(
    "ends",
    [(*V4, ""), (*V6, ""), (socket.AF_INET6, "::", "127.0.0.1")],
    ids=["IPv4", "IPv6", "mapped"],
)
def test_it_is_what_was_sent_and_not_read(ends: tuple[int, str, str]) -> None:
    """Whatever the addresses are."""
    with connected(*ends) as (own, peer):
        link = Link.of(own)
        assert settles(link, 0)
        own.sendall(b"x" * 10_000)
        assert settles(link, 10_000)
        peer.recv(4_000)
        assert settles(link, 6_000)
        peer.recv(100_000)
        assert settles(link, 0)


@pytest.mark.parametrize(
    "ends",
    [(*V4, ""), (*V6, ""), (socket.AF_INET6, "::", "127.0.0.1")],
    ids=["IPv4", "IPv6", "mapped"],
)
def test_a_mark_is_passed_with_the_byte_before_it(ends: tuple[int, str, str]) -> None:
    """Not earlier, and whatever comes behind it."""
    with connected(*ends) as (own, peer):
        assert soon(lambda: mark(own).passed)
        own.sendall(b"x" * 10_000)
        first = mark(own)
        own.sendall(b"x" * 10_000)
        second = mark(own)
        peer.recv(9_999, socket.MSG_WAITALL)
        assert settles(first.link, 10_001)
        assert not first.passed
        peer.recv(1)
        assert soon(lambda: first.passed)
        assert not second.passed
        peer.recv(10_000, socket.MSG_WAITALL)
        assert soon(lambda: second.passed)


def test_what_comes_while_one_asks_is_not_taken_for_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is acknowledged then, and not yet in the queue that was looked at."""
    with connected() as (own, peer):
        own.sendall(b"x" * 1000)
        end = mark(own)
        assert settles(end.link, 1000)
        ask = unread._acknowledged

        def busy(sock: socket.socket) -> int:
            before = ask(sock)
            own.sendall(b"x" * 5000)
            assert soon(lambda: ask(sock) == before + 5000)
            return ask(sock)

        monkeypatch.setattr(unread, "_acknowledged", busy)
        assert not end.passed
        peer.recv(1000)
        assert soon(lambda: end.passed)


def test_what_the_own_end_still_has_counts() -> None:
    """A peer whose buffer is full has not read that either."""
    with connected() as (own, peer):
        own.settimeout(0)
        sent = 0
        with suppress(BlockingIOError):
            while True:
                sent += own.send(b"x" * 100_000)
        end = mark(own)
        there = end.link.unread()
        assert there is not None
        assert there < sent
        while sent:
            assert not end.passed
            sent -= len(peer.recv(1 << 20))
        assert soon(lambda: end.passed)


def test_a_peer_that_has_read_all_may_close() -> None:
    """As when a kept connection ends."""
    with connected() as (own, peer):
        own.sendall(b"x")
        end = mark(own)
        peer.recv(10)
        peer.close()
        assert soon(lambda: end.passed)


def test_a_peer_that_was_cut_off_may_still_read() -> None:
    """Nobody can tell whether it does."""
    with connected() as (own, peer):
        link = Link.of(own)
        assert link is not None
        own.sendall(b"x" * 1000)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        own.close()
        assert link.unread() is None
        assert len(peer.recv(10_000)) == 1000


@pytest.mark.parametrize("first", ["own", "peer"])
def test_a_peer_whose_connection_has_ended_may_still_read(first: str) -> None:
    """Both ends have said that they send no more; the kernel tells of neither then."""
    with connected() as (own, peer):
        own.sendall(b"x" * 1000)
        end = mark(own)
        for sock in (own, peer) if first == "own" else (peer, own):
            sock.shutdown(socket.SHUT_WR)
            time.sleep(0.05)
        assert soon(lambda: end.link.unread() is None)
        assert not end.passed
        assert len(peer.recv(10_000)) == 1000
        assert not end.passed


def test_a_peer_that_the_kernel_has_given_up_may_still_read() -> None:
    """Its own end is closed then, as it is where the peer has cut it off."""
    with connected() as (own, peer):
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 300)
        own.settimeout(0)
        with suppress(BlockingIOError):
            while True:
                own.send(b"x" * 100_000)
        end = mark(own)
        assert soon(lambda: own.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0)
        assert not end.passed
        got = 0
        with suppress(OSError):
            while count := len(peer.recv(1 << 20)):
                got += count
                assert not end.passed
        assert got > 0


def test_a_peer_that_cuts_off_is_not_known_to_drop_the_rest() -> None:
    """It does; but the own end looks the same when somebody may still read."""
    with connected() as (own, peer):
        own.sendall(b"x" * 1000)
        end = mark(own)
        peer.close()
        assert not end.passed


def test_a_closed_end_passes_no_mark() -> None:
    """And there is none to be had."""
    with connected() as (own, _):
        end = mark(own)
        own.close()
        assert not end.passed
        assert Mark.here(own) is None


def test_what_is_above_the_peers_socket_may_not_have_been_read() -> None:
    """MPTCP moves what comes into a queue of its own."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        try:
            peer = socket.socket(proto=_MPTCP)
        except OSError as error:
            pytest.skip(f"this kernel has no MPTCP: {error}")
        peer.connect(listener.getsockname())
        own, _ = listener.accept()
    with own, peer:
        own.sendall(b"x" * 1000)
        assert Mark.here(own) is None
        assert len(peer.recv(10_000)) == 1000


def test_who_listens_there_is_not_the_peer() -> None:
    """The kernel finds a listener where it finds no connection."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        peer.bind(("127.0.0.1", 0))
        other = socket.socket()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(peer.getsockname())
        peer.connect(listener.getsockname())
        own, _ = listener.accept()
    with own, peer, other:
        link = Link.of(own)
        assert link is not None
        other.listen()
        assert link.unread() == 0
        own.sendall(b"x")
        peer.close()  # unread: it is cut off, and nothing of it is left
        assert link.unread() is None


def test_only_the_internets_connections_have_a_link() -> None:
    """Those of one host by their paths have none, nor does what is not connected."""
    left, right = socket.socketpair()
    with left, right, socket.socket() as alone:
        assert Link.of(left) is None
        assert Link.of(alone) is None


def test_without_a_descriptor_it_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No error: the caller does without."""

    def refuse(*_: object) -> None:
        raise OSError(24, os.strerror(24))

    with connected() as (own, _):
        link = Link.of(own)
        assert link is not None
        monkeypatch.setattr("aiockpt.http.unread.socket.socket", refuse)
        assert link.unread() is None


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="a network namespace wants root, and unshare",
)
def test_a_peer_of_another_namespace_is_not_known() -> None:
    """It may be a container of this host, or another host: nobody can tell."""
    code = (
        "import sys; sys.path[:] = eval(sys.argv[1])\n"
        "from aiockpt.http.unread import Link\n"
        "print(Link(('127.0.0.1', int(sys.argv[2])), ('127.0.0.1', int(sys.argv[3])))"
        ".unread())"
    )
    with connected() as (own, peer):
        ports = [str(end.getsockname()[1]) for end in (own, peer)]
        python = [sys.executable, "-c", code, repr(sys.path), *ports]
        said = [
            subprocess.run(
                [*before, *python], check=True, capture_output=True, text=True
            ).stdout
            for before in ([], ["unshare", "--net"])
        ]
    assert said == ["0\n", "None\n"]
