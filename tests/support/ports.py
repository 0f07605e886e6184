"""Ports that a test chooses, because somebody else has to know them first."""

from __future__ import annotations

import errno
import secrets
import socket

# The system gives ports above these to connections, and to who binds port 0. So another
# process might take such a port before the test does.
_CHOSEN = range(20_000, 32_000)


def free_port() -> int:
    """Return a port of the loopback interface that nobody uses."""
    while True:
        port = secrets.choice(_CHOSEN)
        with socket.socket() as bound:
            try:
                bound.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
