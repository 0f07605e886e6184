"""Hostile peers: senders of dangerous checkpoints, floods of answers, and attackers.

A sender wants a receiver to run something: there is one for each way that was tried.
A flood is of informational answers (HTTP 1xx).

Attackers take up a server's connections, in a process of their own: ``python hostile.py
PORT TOKEN COUNT`` connects as often as that, says "ready", and goes on until it is
killed. A third of them says nothing, a third asks for step 1 and reads a byte a second,
and a third asks a byte a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import os
import pickle
import random
import socket
import sys
import threading
import time
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from aiockpt.format.chunks import digest
from aiockpt.format.header import build_manifest
from tests.support.headers import entries_of, header_of, parts_of
from tests.support.rangepeer import RangePeer, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from aiockpt.format.manifest import Manifest


SEGMENT = bytes(range(250)) * 4
STEP = 7


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@dataclass(frozen=True)
class Payload:
    """A command that leaves a mark, in the forms in which programs run it."""

    mark: str

    @property
    def command(self) -> str:
        return f"touch {self.mark}"

    @property
    def pickled(self) -> bytes:
        return pickle.dumps(Evil(self.command))

    @property
    def torch_file(self) -> bytes:
        """What ``torch.save`` writes, around a pickle."""
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", self.pickled)
            archive.writestr("archive/version", "3\n")
        return file.getvalue()


def manifest_with(tree: Any, segment: bytes = SEGMENT) -> Manifest:
    """Return a manifest that is right, but for what its tree says."""
    return build_manifest(
        step=STEP,
        chunk_bytes=64 << 10,
        entries=entries_of(("weight", "U8", (len(segment),), len(segment))),
        tree=tree,
        digests=[digest([segment])],
    )


GOOD = manifest_with(["dict", ["weight"], [["tensor", 0]]])


def trees(payload: Payload) -> dict[str, Any]:
    """Return trees that ask for code."""
    blob = ["blob", 0]
    inline = ["bytes", "gASVAAAAAAAAAIwFcG9zaXiUjAZzeXN0ZW2Uk5Qu"]
    ext = {
        name: ["ext", name, ["tuple", [payload.command]]]
        for name in (
            *("os.system", "posix.system", "subprocess.Popen", "builtins.eval"),
            *("builtins.exec", "builtins.__import__", "importlib.import_module"),
            *("torch.load", "torch.ops.load_library", "pickle.loads", "this"),
            *("aiockpt.cli", "collections.deque", "numpy.load", "ctypes.CDLL"),
        )
    }
    return ext | {
        "a pickle in the segment": ["ext", "pickle", blob],
        "a pickle in the tree": ["ext", "pickle", inline],
        "a tag that is no text": [["ext", "pickle", blob], 1],
        "a factory that is imported": [
            *("defaultdict", [], []), ["ext", "os.system", None],
        ],
        "a factory of another kind": ["defaultdict", [], [], "os.system"],
        "objects of numpy": [
            *("ext", "numpy.ndarray"), ["tuple", ["|O", ["tuple", [125]], blob]],
        ],
        "a scalar object of numpy": [
            *("ext", "numpy.scalar"), ["tuple", ["|O", blob]],
        ],
        "a device that loads a backend": ["ext", "torch.device", "privateuseone:0"],
        "a dtype by a path": ["ext", "torch.dtype", "serialization.load"],
        "a mesh that is none": [
            *("ext", "torch.DTensor"), ["tuple", [["tensor", 0], "os.system", []]],
        ],
    }  # fmt: skip


def headers(payload: Payload) -> dict[str, bytes]:
    """Return what is sent in place of a header."""
    manifest, entries = parts_of(bytes(GOOD.header))
    big = {"w": {"dtype": "U8", "shape": [1 << 62], "data_offsets": [0, 1 << 62]}}
    twice = dict.fromkeys(("a", "b"), entries["weight"])
    names = {"../../mark": entries["weight"]}
    foreign = msgspec.json.encode(entries)
    changes: dict[str, dict[str, Any]] = {
        "more entries than there are": {"entries": 1 << 40},
        "a chunk of nothing": {"chunk_bytes": 0},
        "digests without an end": {"digests": "ab" * 100_000},
        "a view outside": {"views": [[0, "uint8", [1 << 40], [1], 0, 0]]},
        "another version": {"version": 2},
        "a step of another type": {"step": "7; touch"},
        "another step": {"step": 8},
    }
    return {
        "a pickle": payload.pickled,
        "a pickle with a length": len(payload.pickled).to_bytes(8, "little")
        + payload.pickled,
        "a torch file": payload.torch_file,
        "nothing": b"",
        "a length of 2^62": (1 << 62).to_bytes(8, "little") + bytes(100),
        "a length of 200 MiB": (200 << 20).to_bytes(8, "little") + bytes(100),
        "a terabyte": header_of(manifest, big),
        "two that overlap": header_of(manifest | {"entries": 2}, twice),
        "a name with dots": header_of(manifest, names),
        "another tool's": len(foreign).to_bytes(8, "little") + foreign,
        "a deep tree": header_of(manifest | {"tree": nested(2000)}, entries),
        **{
            name: header_of(manifest | change, entries)
            for name, change in changes.items()
        },
    }


def nested(depth: int) -> msgspec.Raw:
    """Return lists in lists."""
    return msgspec.Raw(b'["list",[' * depth + b"0" + b"]]" * depth)


def answers(payload: Payload) -> dict[str, Callable[[], web.Response]]:
    """Return answers that are no checkpoint, or say one thing and do another."""
    good = {"ETag": f'"{GOOD.snapshot_id}"', "Aiockpt-Step": "7"}
    body = bytes(GOOD.header)

    def redirect(status: int, where: str) -> Callable[[], web.Response]:
        return lambda: web.Response(status=status, headers={"Location": where})

    def sent(content: bytes, **fields: str) -> Callable[[], web.Response]:
        named = {name.replace("_", "-"): value for name, value in fields.items()}
        return lambda: web.Response(body=content, headers=good | named)

    def problem(status: int) -> Callable[[], web.Response]:
        told = {"detail": payload.command, "type": "py/object:os.system", "serving": 7}
        return lambda: web.json_response(
            told, status=status, content_type="application/problem+json"
        )

    elsewhere = {
        "to a file": "file:///etc/passwd",
        "to the metadata service": "http://169.254.169.254/latest/meta-data/",
        "to another port": "http://127.0.0.1:9/checkpoint/7/metadata",
        "to a script": "javascript:alert(1)",
        "to itself": "/checkpoint/7/metadata",
    }
    return {
        **{f"a redirect {how}": redirect(302, to) for how, to in elsewhere.items()},
        **{f"a {code}": redirect(code, elsewhere["to a file"]) for code in (301, 308)},
        **{f"a problem of {code}": problem(code) for code in (400, 401, 418, 500)},
        "a bomb": sent(gzip.compress(bytes(50 << 20)), Content_Encoding="gzip"),
        "an unknown coding": sent(body, Content_Encoding="aiockpt-pickle"),
        "a pickle by its type": sent(
            payload.pickled, Content_Type="application/pickle"
        ),
        "a file to save": sent(
            payload.pickled, Content_Disposition="attachment; filename=../../mark"
        ),
        "a cookie and a link": sent(
            body[:-64], Set_Cookie="a=b", Link="<file:///etc/passwd>; rel=preload"
        ),
    }


def ranges(payload: Payload) -> dict[str, Callable[[], web.Response]]:
    """Return answers to a request for a range, after a good manifest."""
    etag = {"ETag": f'"{GOOD.snapshot_id}"', "Aiockpt-Step": "7"}

    def sent(content: bytes, said: str, status: int = 206) -> Callable[[], Any]:
        fields = etag | {"Content-Range": said}
        return lambda: web.Response(status=status, body=content, headers=fields)

    size = len(GOOD.header) + len(SEGMENT)
    start = len(GOOD.header)
    return {
        "a pickle for a chunk": sent(
            payload.pickled.ljust(1000, b"."), f"bytes {start}-{size - 1}/{size}"
        ),
        "another range": sent(bytes(1000), f"bytes 0-999/{size}"),
        "a longer file": sent(bytes(1000), f"bytes {start}-{size - 1}/{1 << 62}"),
        "more than was asked for": sent(
            bytes(100_000), f"bytes {start}-{start + 99_999}/{size}"
        ),
        "a range of text": sent(bytes(1000), "bytes __import__('os')"),
        "the whole": sent(bytes(1000), "", 200),
    }


@asynccontextmanager
async def senders(payload: Payload) -> AsyncIterator[dict[str, RangePeer]]:
    """Serve each attack on a port of its own; ``good`` is none."""
    async with AsyncExitStack() as stack:

        async def serve(manifest: Manifest, meddle: Any = None) -> RangePeer:
            peer = await stack.enter_async_context(serving(SEGMENT, meddle=meddle))
            peer.manifest = manifest
            return peer

        peers = {"good": await serve(GOOD)}
        padded = payload.pickled.ljust(1000, b".")
        for name, tree in trees(payload).items():
            peer = await serve(_unchecked(tree, padded))
            peer.segment = padded
            peers[f"tree: {name}"] = peer
        for name, header in headers(payload).items():
            forged = replace(GOOD, header=header)
            peers[f"header: {name}"] = await serve(forged)
        for name, answer in answers(payload).items():
            peers[f"answer: {name}"] = await serve(GOOD, _instead(answer))
        for name, answer in ranges(payload).items():
            peers[f"range: {name}"] = await serve(GOOD, _instead(answer, of="Range"))
        yield peers


def _unchecked(tree: Any, segment: bytes) -> Manifest:
    manifest, entries = parts_of(bytes(manifest_with(None, segment).header))
    header = header_of(manifest | {"tree": tree}, entries)
    found = manifest_with(None, segment)
    name = header[8:][len(b'{"__metadata__":{"aiockpt.snapshot":"') :][:32].decode()
    return replace(found, header=header, header_bytes=len(header), snapshot_id=name)


def _instead(answer: Callable[[], web.Response], *, of: str = "") -> Any:
    async def meddle(_: RangePeer, request: web.Request) -> web.Response | None:
        return answer() if not of or of in request.headers else None

    return meddle


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

    def flood(sock: socket.socket) -> None:
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

    with socket.create_server(("127.0.0.1", 0)) as server:
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
    """Measure for how long the loop stands still, while this process computes."""
    found = [0.0]

    async def watch() -> None:
        while True:
            clocks = (time.monotonic, time.process_time)
            before = [clock() for clock in clocks]
            await asyncio.sleep(0.005)
            passed = [
                clock() - each for clock, each in zip(clocks, before, strict=True)
            ]
            found[0] = max(found[0], min(passed) - 0.005)

    task = asyncio.create_task(watch())
    yield found
    task.cancel()


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


async def attack_until_killed(port: int, token: str, count: int) -> None:
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
    asyncio.run(attack_until_killed(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
