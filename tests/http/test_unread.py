"""What the kernel knows of the bytes that a peer of this host has not read yet."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from aiockpt.http.unread import Link, is_reset

pytestmark = [
    pytest.mark.torch_free,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tell"),
]


def settles(link: Link | None, count: int) -> bool:
    """Say whether so much is unread, once the peer's kernel has acknowledged it."""
    assert link is not None
    until = time.monotonic() + 10.0
    while (unread := link.unread()) is not None and time.monotonic() < until:
        assert unread >= count
        if unread == count:
            return True
        time.sleep(0.01)
    return False


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


def test_what_the_own_end_still_has_counts() -> None:
    """A peer whose buffer is full has not read that either."""
    with connected() as (own, peer):
        link = Link.of(own)
        assert link is not None
        own.settimeout(0)
        sent = 0
        with suppress(BlockingIOError):
            while True:
                sent += own.send(b"x" * 100_000)
        unread = link.unread()
        assert unread is not None
        assert unread >= sent
        while sent:
            assert link.unread()
            sent -= len(peer.recv(1 << 20))
        assert settles(link, 0)


def test_a_peer_that_has_read_all_may_close() -> None:
    """So may the own end after it, as when a kept connection ends."""
    with connected() as (own, peer):
        link = Link.of(own)
        assert link is not None
        own.sendall(b"x")
        peer.recv(10)
        peer.close()
        assert settles(link, 0)
        own.close()
        assert settles(link, 0)


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


def test_a_peer_that_cuts_off_drops_the_rest() -> None:
    """The own end knows that, as long as it is there."""
    with connected() as (own, peer):
        own.sendall(b"x" * 1000)
        assert not is_reset(own)
        peer.close()
        assert is_reset(own)
    assert not is_reset(own)  # closed


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
