"""Connections to peers: aiohttp's, behind a gate for informational answers (HTTP 1xx).

aiohttp reads as many of them as a peer sends, without bound. A flood of them keeps its
parser, and so the loop, busy for as long as the peer likes.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final

import aiohttp

from aiockpt.errors import RemoteProtocolError

__all__ = ["Connector"]

_MOST: Final = 64 << 10  # bytes of informational answers to one request
_START: Final = b"HTTP/1.1 1"
_INFORMATIONAL: Final = re.compile(rb"HTTP/\d\.\d 1(?!01)\d\d")
_DECIDED: Final = len(b"HTTP/1.1 100")
_END: Final = re.compile(rb"\n\r?\n")
_BLANK: Final = re.compile(rb"[\r\n]*")


class Connector(aiohttp.TCPConnector):
    """Gives connections on which informational answers are bounded, and dropped."""

    async def connect(
        self, req: aiohttp.ClientRequest, *args: Any, **kwargs: Any
    ) -> Any:
        """Return a connection for one request; see `aiohttp.BaseConnector`.

        Raises:
            RemoteProtocolError: the peer has sent something without being asked.
        """
        connection = await super().connect(req, *args, **kwargs)
        transport, protocol = connection.transport, connection.protocol
        if transport is None or protocol is None or transport.is_closing():
            return connection  # aiohttp finds out why
        peer = str(req.url.origin())
        if protocol.should_close:
            connection.close()
            raise RemoteProtocolError(
                f"{peer} sent bytes before it was asked; is that an aiockpt server?"
            )
        transport.set_protocol(_Gate(peer, transport, protocol))
        return connection


class _Gate(asyncio.Protocol):
    """Takes the place of aiohttp's protocol until a final answer begins."""

    def __init__(
        self, peer: str, transport: asyncio.Transport, protocol: asyncio.Protocol
    ) -> None:
        self._peer, self._transport, self._protocol = peer, transport, protocol
        self._fault: RemoteProtocolError | None = None
        self._data = bytearray()
        self._dropped = self._looked = 0

    def data_received(self, data: bytes) -> None:
        if self._fault is not None:
            return
        self._data += data
        while self._drop():
            pass

    def _drop(self) -> bool:
        """Drop an informational answer from the front; say whether to go on."""
        data = self._data
        if not self._looked:
            blank = _BLANK.match(data)
            if blank is not None and not self._count(blank.end()):
                return False
            if len(data) < _DECIDED and _is_start(data):
                return False
            if _INFORMATIONAL.match(data) is None:
                self._open()
                return False
        found = _END.search(data, max(self._looked - 2, 0))
        if found is None:
            self._looked = len(data)
            if self._dropped + len(data) > _MOST:
                self._refuse()
            return False
        self._looked = 0
        return self._count(found.end()) and bool(data)

    def _count(self, nbytes: int) -> bool:
        """Drop so many bytes from the front; refuse the peer if these are too many."""
        self._dropped += nbytes
        if self._dropped > _MOST:
            self._refuse()
            return False
        del self._data[:nbytes]
        return True

    def _open(self) -> None:
        self._transport.set_protocol(self._protocol)
        self._protocol.data_received(bytes(self._data))

    def _refuse(self) -> None:
        self._fault = RemoteProtocolError(
            f"{self._peer} sent more than {_MOST} bytes of informational answers (HTTP "
            "1xx) or empty lines, and no other answer; is that an aiockpt server?"
        )
        self._data.clear()
        self._transport.abort()

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(self._fault or exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()


def _is_start(data: bytearray) -> bool:
    """Whether an informational answer may begin so."""
    return all(
        byte == known or (known in b"0123456789" and byte in b"0123456789")
        for byte, known in zip(data, _START, strict=False)
    )
