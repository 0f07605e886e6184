"""No exception that leaves a receive carries the token, with captured locals or not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

import aiockpt
from aiockpt import HTTPTransport
from aiockpt.http.protocol import parse_joined, parse_metadata
from tests.support.proofs import proves
from tests.support.transports import grouped, transport

SECRET = "s3cret-0f-the-sender"
HERE = Path(__file__).parents[1]

Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

STEP = b"Aiockpt-Step: 1\r\n"


pytestmark = pytest.mark.usefixtures("plain_environment")


class Lines(logging.Handler):
    """Everything that any logger was given, formatted and unformatted."""

    def __init__(self) -> None:
        super().__init__(level=logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.getMessage()} {vars(record)!r}")
        if record.exc_info and record.exc_info[1]:
            self.lines += everything(record.exc_info[1])


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Collect every log record, at every level."""
    handler, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler.lines
    root.setLevel(level)
    root.removeHandler(handler)


def chain(error: BaseException) -> list[BaseException]:
    """Return an exception and all that it refers to as an exception."""
    found: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or any(each is known for known in found):
            continue
        found.append(each)
        left += [each.__cause__, each.__context__]
        left += getattr(each, "exceptions", ())
        held = [*vars(each).values(), *each.args]
        left += [value for value in held if isinstance(value, BaseException)]
    return found


def everything(error: BaseException) -> list[str]:
    """Return all that a program could print of an exception."""
    texts = []
    for each in chain(error):
        texts += [repr(each), str(each), repr(each.args)]
        texts += [f"{name} = {value!r}" for name, value in vars(each).items()]
        texts += getattr(each, "__notes__", [])
        for frame, _ in traceback.walk_tb(each.__traceback__):
            code = frame.f_code
            if Path(code.co_filename).is_relative_to(HERE):
                continue  # the test itself knows the secret
            for name, value in frame.f_locals.items():
                with contextlib.suppress(Exception):  # an object that is half made
                    texts.append(
                        f"{code.co_filename}:{code.co_qualname} {name} = {value!r}"
                    )
    return texts


def check(error: BaseException, *more: str) -> None:
    """Fail if the secret stands anywhere in the chain of an exception."""
    texts = [*everything(error), *more]
    assert len(texts) > 3
    for text in texts:
        at = text.find(SECRET)
        assert at < 0, (
            f"{type(error).__name__}: {text[:200]} ... {text[at - 200 : at + 60]}"
        )


@asynccontextmanager
async def peer(behaviour: Behaviour, **options: Any) -> AsyncIterator[int]:
    """Listen, and treat every connection as ``behaviour`` does; give the port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # uvloop raises RuntimeError where the client has left.
        with contextlib.suppress(OSError, EOFError, RuntimeError):
            await behaviour(reader, writer)
        with contextlib.suppress(RuntimeError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, **options)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


def answering(content: bytes, *, again: bool = True) -> Behaviour:
    """Send this to every request, or to one and close the connection."""

    async def answer(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        more = True
        while more:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(content)
            await writer.drain()
            more = again

    return answer


async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reset the connection in the middle of an answer."""
    await reader.readuntil(b"\r\n\r\n")
    writer.transport.abort()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Say nothing."""
    await reader.read()


async def informs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Say for ever that the answer will come."""
    await reader.readuntil(b"\r\n\r\n")
    while True:
        writer.write(b"HTTP/1.1 102 Processing\r\n\r\n" * 100)
        await writer.drain()
        await asyncio.sleep(0.001)


async def mirrors(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer with the request: in a header, and in the body of an error page."""
    request = await reader.readuntil(b"\r\n\r\n")
    token = request.partition(b"Authorization: ")[2].partition(b"\r\n")[0]
    head = b"HTTP/1.1 500 no\r\nX-You-Said: %s\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % (token, len(request)) + request)
    await writer.drain()
    await reader.read()


def ok(header: bytes, body: bytes, status: bytes = b"200 OK") -> bytes:
    """Return an answer."""
    length = b"Content-Length: %d\r\n" % len(body)
    return b"HTTP/1.1 %s\r\n%s%s\r\n%s" % (status, length, header, body)


FAULTS: dict[str, Behaviour] = {
    "no HTTP": answering(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
    "a bad status line": answering(b"HTTP/1.1 abc what\r\n\r\n"),
    "a bad header": answering(b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n"),
    "two lengths": answering(
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"
    ),
    "a header that is too long": answering(ok(b"X: " + b"x" * 70_000 + b"\r\n", b"")),
    "closed": answering(b"", again=False),
    "half of a status line": answering(b"HTTP/1.1 2", again=False),
    "reset": reset,
    "a truncated manifest": answering(ok(STEP, b"x" * 100)[:-50], again=False),
    "chunks that are none": answering(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n" + STEP + b"\r\nzz\r\n"
    ),
    "a manifest of nonsense": answering(ok(STEP, b"\x40" + bytes(7) + b"{" * 64)),
    "another step": answering(ok(b"Aiockpt-Step: 7\r\n", b"x" * 100)),
    "no step": answering(ok(b"", b"x" * 100)),
    "a huge manifest": answering(
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n" + STEP + b"\r\n"
    ),
    "an encoded manifest": answering(ok(STEP + b"Content-Encoding: gzip\r\n", b"x")),
    "201": answering(ok(b"", b"", b"201 Created")),
    "a redirect": answering(
        ok(b"Location: http://127.0.0.1:1/\r\n", b"", b"302 Found")
    ),
    "401": answering(ok(b"", b"", b"401 Unauthorized")),
    "404": answering(ok(b"", b"<html>", b"404 Not Found")),
    "412": answering(ok(b"", b"", b"412 Precondition Failed")),
    "416": answering(ok(b"", b"", b"416 Range Not Satisfiable")),
    "421": answering(ok(b"", b"", b"421 Misdirected Request")),
    "500 that mirrors the request": mirrors,
    "503": answering(ok(b"", b"", b"503 Service Unavailable")),
    "silence": silent,
    "a flood of 1xx": informs,
}
OF_EACH_KIND = ("no HTTP", "closed", "401", "silence")


@proves("threat I1")
@pytest.mark.asyncio
@pytest.mark.parametrize("fault", FAULTS)
async def test_no_fault_of_a_peer_puts_the_token_into_an_exception(
    fault: str, logged: list[str]
) -> None:
    """The token is in the metadata or in an option, with one attempt or several."""
    asyncio.get_running_loop().set_debug(True)
    async with peer(FAULTS[fault]) as port:
        url = f"http://127.0.0.1:{port}/checkpoint/"
        forms: list[tuple[Any, dict[str, str]]] = [
            (f"{url}#{SECRET}", {}),
            ([f"{url}#{SECRET}", f"http://127.0.0.1:1/#{SECRET}"], {}),
            (url, {"token": SECRET}),
            (f"{url}#{SECRET}|http://127.0.0.1:1/#{SECRET}", {}),
        ]
        for metadata, options in forms if fault in OF_EACH_KIND else forms[:2]:
            async with transport(
                reconnect_timeout=0, stall_timeout=0.3, **options
            ) as receiver:
                with pytest.raises(aiockpt.AiockptError) as caught:
                    await receiver.recv_checkpoint(0, metadata, 1, timeout=1)
            check(caught.value, *logged)
    asyncio.get_running_loop().set_debug(False)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "metadata",
    [
        f"http://127.0.0.1:1/checkpoint/#{SECRET}",
        f"http://nowhere.invalid/checkpoint/#{SECRET}",
        f"http://169.254.169.254/checkpoint/#{SECRET}",
        f"ftp://127.0.0.1/checkpoint/#{SECRET}",
        f"http://127.0.0.1:99999/#{SECRET}",
        f"http://127.0.0.1/#{SECRET}\n",
        f"http://127.0.0.1/#{SECRET}é",
        f"http://127.0.0.1/?a=b#{SECRET}",
        f"http:///#{SECRET}",
        f"http://127.0.0.1:1/checkpoint/#{SECRET}|http://127.0.0.1:2/#{SECRET}-b",
        f"http://127.0.0.1:1/checkpoint/#{SECRET}|ftp://127.0.0.1:2/#{SECRET}-b",
    ],
)
async def test_metadata_that_leads_nowhere_is_not_shown(
    metadata: str, logged: list[str]
) -> None:
    """Neither where it is parsed, nor where the address is looked up."""
    async with transport(reconnect_timeout=0) as receiver:
        with pytest.raises(aiockpt.AiockptError) as caught:
            await receiver.recv_checkpoint(0, metadata, 1, timeout=5)
        check(caught.value, *logged)
        with pytest.raises(aiockpt.AiockptError) as caught:
            async with asyncio.timeout(5):
                await anext(receiver.steps(metadata, reconnect_timeout=0))
        check(caught.value, *logged)


GOOD = f"http://a:1/checkpoint/#{SECRET}"


@pytest.mark.parametrize(
    "metadata",
    [
        [GOOD, f"ftp://b:1/#{SECRET}-b"],
        [GOOD, GOOD],
        [GOOD, f"{GOOD}|http://b:1/#{SECRET}-b"],
        [GOOD, f"http://b:1/#{SECRET}?"],
        [GOOD, None],
    ],
)
def test_metadata_that_cannot_be_joined_is_not_shown(metadata: Any) -> None:
    """Neither the list, nor a string, nor a part of one is in a frame or a message."""
    with pytest.raises((aiockpt.AiockptError, TypeError)) as caught:
        aiockpt.join_metadata(metadata)
    check(caught.value, "1", "2", "3")


@pytest.mark.parametrize(
    "rest",
    [
        f"|ftp://b:1/#{SECRET}-b",
        f"|{GOOD}",
        f"|http://b:1/#{SECRET}-b?",
        f"|{SECRET}",
        f"|http://b:1/#{SECRET}#",
        f"|http://b:1/#{SECRET}" * 4096,
    ],
)
def test_joined_metadata_that_is_refused_is_not_shown(rest: str) -> None:
    """No token of any sender is in a frame or a message, nor in those of a repr."""
    with pytest.raises(aiockpt.AiockptError) as caught:
        parse_joined(GOOD + rest)
    check(caught.value, "1", "2", "3")
    with pytest.raises(aiockpt.AiockptError) as caught:
        parse_metadata(GOOD + rest)
    check(caught.value, "1", "2", "3")


@pytest.mark.asyncio
async def test_a_refused_name_is_not_shown_with_the_request() -> None:
    """The resolver raises within the HTTP client, whose frames have the headers."""
    async with transport(peers=["10.0.0.0/8"], reconnect_timeout=0) as receiver:
        url = f"http://localhost:1/checkpoint/#{SECRET}"
        with pytest.raises(aiockpt.errors.LocalProtocolError) as caught:
            await receiver.recv_checkpoint(0, url, 1, timeout=5)
        check(caught.value)


@pytest.mark.asyncio
@pytest.mark.parametrize("after", ["a deadline", "a cancel", "shutdown"])
async def test_an_end_from_without_shows_no_token(after: str) -> None:
    """The error that ends a wait passes through each frame that waits."""
    async with peer(silent) as port:
        url = f"http://127.0.0.1:{port}/checkpoint/#{SECRET}"
        receiver = transport(reconnect_timeout=0)
        limit = 0.3 if after == "a deadline" else 20
        task = asyncio.create_task(receiver.recv_checkpoint(0, url, 1, timeout=limit))
        await asyncio.sleep(0.2)
        if after == "a cancel":
            task.cancel()
        elif after == "shutdown":
            await receiver.shutdown()
        with pytest.raises((aiockpt.AiockptError, asyncio.CancelledError)) as caught:
            await task
        check(caught.value)
        await receiver.shutdown()
        with pytest.raises(aiockpt.errors.ClosedError) as closed:
            await receiver.recv_checkpoint(0, url, 1)
        check(closed.value)


@pytest.mark.asyncio
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_ends_that_disagree_about_tls_show_no_token(scheme: str) -> None:
    """HTTPS to a plain port, plain HTTP to a TLS port, an unknown authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    for options in ({"ssl": context}, {}):
        async with (
            peer(answering(b"HTTP/1.1 200 OK\r\n\r\n"), **options) as port,
            transport(reconnect_timeout=0, stall_timeout=0.5) as receiver,
        ):
            url = f"{scheme}://127.0.0.1:{port}/checkpoint/#{SECRET}"
            with pytest.raises(aiockpt.AiockptError) as caught:
                await receiver.recv_checkpoint(0, url, 1, timeout=5)
            check(caught.value)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "options",
    [
        {"token": SECRET, "timeout": -1},
        {"token": SECRET, "insecure": True},
        {"token": SECRET, "stall_timeout": 0},
        {"token": SECRET, "readers": 0},
        {"token": SECRET, "server": "elsewhere"},
        {"token": SECRET, "limits": 7},
        {"token": f"{SECRET} and a blank"},
    ],
)
async def test_a_constructor_that_fails_shows_no_token(options: dict[str, Any]) -> None:
    """Any other argument may be wrong."""
    with pytest.raises((ValueError, TypeError, aiockpt.AiockptError)) as caught:
        HTTPTransport(**{"timeout": 5, **grouped(**options)})
    check(caught.value)


def test_a_blocking_receive_shows_no_token() -> None:
    """A call of torchft passes through a thread of its own."""
    pytest.importorskip("torchft", reason="torchft's Manager makes these transports")
    from aiockpt.torchft import HTTPTransport as BlockingTransport

    receiver = BlockingTransport[Any](
        5.0,
        server=aiockpt.Server(host="127.0.0.1"),
        receive=aiockpt.Receive(reconnect_timeout=0.0),
    )
    try:
        url = f"http://127.0.0.1:1/checkpoint/#{SECRET}"
        with pytest.raises(aiockpt.AiockptError) as caught:
            receiver.recv_checkpoint(0, url, 1, 0.5)
        check(caught.value)
    finally:
        receiver.shutdown()


def test_the_walk_would_find_a_token() -> None:
    """The walk looks at locals, attributes, notes and causes, so the tests can fail."""
    namespace: dict[str, Any] = {}
    source = (
        f"def inner(token):\n    raise OSError(1)\ndef outer():\n    inner('{SECRET}')"
    )
    exec(compile(source, "/elsewhere.py", "exec"), namespace)
    with pytest.raises(OSError, match="1") as caught:
        namespace["outer"]()
    with pytest.raises(AssertionError, match="inner token"):
        check(caught.value)
    noted = ValueError("a")
    noted.add_note(SECRET)
    caused = ValueError("b")
    caused.__context__ = noted
    with pytest.raises(AssertionError, match=SECRET):
        check(caused, "1", "2", "3")
    assert sys.exc_info() == (None, None, None)
