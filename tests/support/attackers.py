"""Attackers who take up a server's connections, in a process of their own.

``python attackers.py PORT TOKEN COUNT`` connects as often as that, says "ready", and
goes on until it is killed. A third of them says nothing, a third asks for
step 1 and reads a byte a second, and a third asks a byte a second.
"""

from __future__ import annotations

import asyncio
import random
import socket
import sys

SETTLING = 2.0  # what they are owed at first fills their buffers


async def attack(sock: socket.socket, kind: int, port: int, ask: bytes) -> None:
    """Be one of them, for ever."""
    loop, chance = asyncio.get_running_loop(), random.Random(29)
    await loop.sock_connect(sock, ("127.0.0.1", port))
    if kind == 1:
        await loop.sock_sendall(sock, ask + b"\r\n")
    elif kind == 2:
        await loop.sock_sendall(sock, ask)
    while True:
        await asyncio.sleep(chance.uniform(0.5, 1.5))
        if kind == 1:
            await loop.sock_recv(sock, 1)
        elif kind == 2:
            await loop.sock_sendall(sock, b"X")


async def main(port: int, token: str, count: int) -> None:
    """Attack until killed."""
    ask = b"GET /checkpoint/1/full HTTP/1.1\r\nHost: x\r\n"
    ask += f"Authorization: Bearer {token}\r\n".encode()
    tasks = []
    for number in range(count):
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        tasks.append(asyncio.create_task(attack(sock, number % 3, port, ask)))
    await asyncio.sleep(SETTLING)
    print("ready", flush=True)
    # One that is turned away has ended; the others go on.
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
