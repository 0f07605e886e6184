"""Bytes over plain TCP, as fast as they go: ``serve HOST``, ``fetch HOST PORT SIZE N``.

The one prints its port, the other the seconds that N streams of SIZE bytes took.
"""

from __future__ import annotations

import socket
import sys
import threading
import time


def serve(host: str) -> None:
    """Send whoever connects as much as it wants."""
    server = socket.create_server((host, 0))
    print(server.getsockname()[1], flush=True)
    while True:
        sock, _ = server.accept()
        threading.Thread(target=send, args=(sock,), daemon=True).start()


def send(sock: socket.socket) -> None:
    """Send until the other end has enough."""
    data = bytes(1 << 20)
    try:
        while True:
            sock.sendall(data)
    except OSError:
        sock.close()


def fetch(host: str, port: str, size: str, streams: str) -> None:
    """Take so much from so many connections at once."""
    threads = [
        threading.Thread(target=take, args=(host, int(port), int(size)))
        for _ in range(int(streams))
    ]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(time.monotonic() - start, flush=True)


def take(host: str, port: int, size: int) -> None:
    """Take so much from one connection."""
    buffer = bytearray(1 << 20)
    with socket.create_connection((host, port)) as sock:
        while size > 0:
            size -= sock.recv_into(buffer, min(len(buffer), size))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        fetch(*sys.argv[2:])
