"""Ports that a test chooses, because somebody else has to know them first."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress

# Below the ports that a system gives to connections, and to those that bind port 0. A
# port of those may be taken again between the choice and its use.
_CHOSEN = range(20_000, 32_000)


def free_port() -> int:
    """Return a port of the loopback interface that nobody uses."""
    while True:
        port = secrets.choice(_CHOSEN)
        with suppress(OSError), socket.socket() as bound:
            bound.bind(("127.0.0.1", port))
            return port
