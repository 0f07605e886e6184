"""What a forked child must not keep open: listening sockets and connections.

A child that keeps them, such as the worker of a data loader, would keep the port alive
after its parent's death: a peer that connects would not be refused, and one that is
reading would not be cut off, but both would hang.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from socket import socket
from typing import Protocol

__all__ = ["Connected", "close_in_forks", "cut_off_in_forks"]


class Connected(Protocol):
    """Something with connections whose sockets others own."""

    def descriptors(self) -> list[int]:
        """Return the descriptors of those that are open."""


_sockets: weakref.WeakSet[socket] = weakref.WeakSet()
_connected: weakref.WeakSet[Connected] = weakref.WeakSet()


def close_in_forks(sockets: Iterable[socket]) -> None:
    """Have these sockets closed in every child that is forked from now on."""
    _sockets.update(sockets)


def cut_off_in_forks(connected: Connected) -> None:
    """Have a forked child let go of the connections that are open at that moment."""
    _connected.add(connected)


def _let_go() -> None:
    # A loop, which a child has too and never runs, would close the descriptors a second
    # time, when they may be somebody else's; and uvloop keeps a socket from closing.
    # So they are made to point nowhere.
    found = [sock.fileno() for sock in tuple(_sockets)]
    for connected in tuple(_connected):
        found += connected.descriptors()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in found:
        if descriptor >= 0:
            with suppress(OSError):
                os.dup2(nowhere, descriptor, inheritable=False)
    os.close(nowhere)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
