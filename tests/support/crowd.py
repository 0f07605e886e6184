"""Many readers of one checkpoint, in a process of their own.

``python crowd.py PORT TOKEN COUNT`` connects as often as that, shows the token on each
connection, says "ready", and waits for a line. Then everybody asks for the whole of
step 1 at once, over the connection that it has, and asks again when it is told to come
back. The last line is JSON: how many got it ``whole``, how often one was ``refused``
(503, with a time to come back), and what was ``wrong``.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections import Counter

LIMIT = 100.0
PIECE = 1 << 20
BUFFER = 1 << 18


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(port: int, token: str) -> Ends:
    """Return a connection that has shown the token: a sender keeps few others."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    few = writer.get_extra_info("socket")  # or the kernel takes a whole answer at once
    few.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    ask = (
        f"HEAD /checkpoint/1/full HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}"
    )
    writer.write(f"{ask}\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def read_whole(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    token: str,
    full: asyncio.Event,
) -> str:
    """Ask once, and read the answer once others are refused; return what came."""
    ask = f"GET /checkpoint/1/full HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}"
    writer.write(f"{ask}\r\n\r\n".encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    left = int(fields["content-length"])
    status = head[0].split()[1]
    if status == "503":
        full.set()
    await full.wait()
    while left:
        piece = await reader.read(min(left, PIECE))
        if not piece:
            return "cut off"
        left -= len(piece)
    if status == "503" and fields.get("retry-after") == "1":
        return "refused"
    return "whole" if status == "200" else head[0]


async def one_of_them(
    ends: Ends, token: str, seen: Counter[str], full: asyncio.Event
) -> None:
    """Ask until it is there."""
    outcome = "refused"
    while outcome == "refused":
        try:
            outcome = await read_whole(*ends, token, full)
        except (OSError, EOFError) as error:
            outcome = repr(error)
        seen[outcome] += 1
        if outcome == "refused":
            await asyncio.sleep(1)
    ends[1].close()


async def main(port: int, token: str, count: int) -> None:
    """Connect, wait for the word, and read."""
    ends = [await connect(port, token) for _ in range(count)]
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    seen: Counter[str] = Counter()
    full = asyncio.Event()
    async with asyncio.timeout(LIMIT):
        await asyncio.gather(*(one_of_them(each, token, seen, full) for each in ends))
    whole, refused = seen.pop("whole", 0), seen.pop("refused", 0)
    print(json.dumps({"whole": whole, "refused": refused, "wrong": seen}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
