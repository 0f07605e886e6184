"""Peers that send informational answers (HTTP 1xx) for ever, and what that does."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from socket import create_server, socket

CONTINUE = b"HTTP/1.1 102 Processing\r\n\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\n" + b"Link: </a>\r\n" * 20 + b"\r\n"


@contextmanager
def flooding(piece: bytes, *, pause: float = 0.0, asked: bool = True) -> Iterator[int]:
    """Send a piece again and again over every connection, from threads; give the port.

    Args:
        piece: What is sent.
        pause: Seconds between two of them.
        asked: Wait for the request first.
    """
    over = threading.Event()
    threads: list[threading.Thread] = []

    def flood(sock: socket) -> None:
        with sock, contextlib.suppress(OSError):
            sock.settimeout(0.2)
            if asked:
                sock.recv(65536)
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    sock.sendall(piece)
                time.sleep(pause)

    def accept() -> None:
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                sock, _ = server.accept()
                thread = threading.Thread(target=flood, args=(sock,))
                threads.append(thread)
                thread.start()

    with create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        threads.append(threading.Thread(target=accept))
        threads[0].start()
        try:
            yield server.getsockname()[1]
        finally:
            over.set()
            for thread in threads:
                thread.join()


@asynccontextmanager
async def stalls() -> AsyncIterator[list[float]]:
    """Measure for how long the loop stands still."""
    found = [0.0]

    async def watch() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            found[0] = max(found[0], time.monotonic() - before - 0.005)

    task = asyncio.create_task(watch())
    yield found
    task.cancel()
