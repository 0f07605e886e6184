"""What an error of aiohttp means: two tables, before the answer and in its body."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from aiockpt.errors import (
    AiockptError,
    IntegrityError,
    LocalProtocolError,
    PeerUnreachableError,
    RemoteProtocolError,
    StagingError,
    TransferInterruptedError,
    TransportError,
)
from aiockpt.http.protocol import Source
from aiockpt.runtime.host_limits import is_callers, is_hosts, refused_by_host
from aiockpt.runtime.secrets import severed

__all__ = ["Exchange", "OutOfHostError", "before_answer", "in_body", "naming"]


@dataclass(slots=True, kw_only=True)
class Exchange:
    """What one request asks for, and whom its errors name.

    ``expected`` and ``received`` count the bytes of the whole chunk or manifest:
    a resumed exchange starts with some received. With ``may_be_empty`` a 204 is as
    good an answer as ``status``.
    """

    source: Source
    path: str
    headers: Mapping[str, str]
    status: int
    method: str = "GET"
    step: int | None = None
    snapshot_id: str | None = None
    chunk: int | None = None
    allowance: float = 0.0
    mac: str | None = None
    offer: str | None = None
    may_be_empty: bool = False
    received: int = 0
    expected: int = 0

    @property
    def url(self) -> str:
        """The address, without any token."""
        return self.source.base_url + self.path


_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")  # as OpenSSL puts it


class OutOfHostError(StagingError):
    """The host has no descriptor or memory now for a request, and may have one soon."""

    @classmethod
    def of(cls, exchange: Exchange, error: BaseException) -> OutOfHostError:
        """Return what says so, with the peer that was to be asked."""
        return cls(str(refused_by_host(f"a request to {exchange.url}", error)))


Build = Callable[[Exchange, Exception], AiockptError]
Table = tuple[tuple[type[Exception], Build], ...]


def _unreachable(exchange: Exchange, error: Exception) -> AiockptError:
    return PeerUnreachableError(exchange.source.base_url, _reason(error))


def _not_trusted(exchange: Exchange, error: Exception) -> AiockptError:
    return RemoteProtocolError(
        f"{exchange.source.base_url} shows a certificate that is not trusted here "
        f"({_reason(error)}); pass an ssl_context that trusts it"
    )


def _no_tls(exchange: Exchange, error: Exception) -> AiockptError:
    reason = getattr(getattr(error, "os_error", None), "reason", "")
    if reason not in _NO_TLS:
        return _unreachable(exchange, error)
    why = "the port speaks no TLS there; if that is meant, the URL begins with http://"
    return PeerUnreachableError(exchange.source.base_url, why)


def _no_answer(exchange: Exchange, error: Exception) -> AiockptError:
    why = "it closed the connection instead of answering"
    if exchange.source.base_url.startswith("http:"):
        why += "; if it speaks TLS, the URL must begin with https://"
    return PeerUnreachableError(exchange.source.base_url, why)


def _interrupted(exchange: Exchange, error: Exception) -> AiockptError:
    return TransferInterruptedError(
        exchange.url,
        received=exchange.received,
        expected=exchange.expected,
        chunk=exchange.chunk,
    )


def _not_http(exchange: Exchange, error: Exception) -> AiockptError:
    return RemoteProtocolError(
        f"{exchange.url} does not answer in HTTP; is that an aiockpt server?"
    )


def _misused(exchange: Exchange, error: Exception) -> AiockptError:
    return LocalProtocolError(f"cannot ask {exchange.url}: {_reason(error)}")


def _other(exchange: Exchange, error: Exception) -> AiockptError:
    return TransportError(f"{exchange.url}: {_reason(error)}")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return str(error.strerror)
    return str(error) or type(error).__name__


_BEFORE_ANSWER: Table = (
    (aiohttp.ClientConnectorCertificateError, _not_trusted),
    (aiohttp.ClientConnectorSSLError, _no_tls),
    (aiohttp.ClientConnectorError, _unreachable),
    (aiohttp.ServerTimeoutError, _unreachable),
    (aiohttp.ClientConnectionError, _no_answer),
    (aiohttp.ClientResponseError, _not_http),
    (aiohttp.InvalidURL, _misused),
    (aiohttp.ClientError, _other),
    (HttpProcessingError, _not_http),
    (OSError, _unreachable),
    (ValueError, _misused),
)
_IN_BODY: Table = (
    (aiohttp.ClientPayloadError, _interrupted),
    (aiohttp.ClientConnectionError, _interrupted),
    (aiohttp.ClientError, _other),
    (HttpProcessingError, _not_http),
    (OSError, _interrupted),
)


def before_answer(exchange: Exchange, error: BaseException) -> BaseException:
    """Return what to raise for an error of aiohttp, or for a cancel, before the answer.

    It has no traceback, and no cause but the system's error: others refer to the
    headers of the request, and so to the token.
    """
    if isinstance(error, Exception) and not isinstance(error, AiockptError):
        cause = _system_error(error)
        if cause is not None and is_hosts(cause):
            shortage = OutOfHostError.of(exchange, cause)
            shortage.__cause__ = severed(cause)
            return shortage
        for kind, build in _BEFORE_ANSWER:
            if isinstance(error, kind):
                failure = build(exchange, error)
                failure.__cause__ = cause and severed(cause)
                return failure
    return severed(error)


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the error of the system that an error of aiohttp was made of."""
    while error is not None:
        if isinstance(error, OSError) and not isinstance(error, aiohttp.ClientError):
            return error
        error = getattr(error, "os_error", None) or error.__cause__
    return None


@contextmanager
def in_body(exchange: Exchange) -> Iterator[None]:
    """Raise the package's error for one of aiohttp, while an answer's body comes."""
    try:
        yield
    except AiockptError:
        raise  # some of ours are an OSError or a ValueError too
    except Exception as error:
        if is_callers(error):
            raise
        if is_hosts(error):
            raise OutOfHostError.of(exchange, error) from error
        for kind, build in _IN_BODY:
            if isinstance(error, kind):
                raise build(exchange, error) from error
        raise


@contextmanager
def naming(exchange: Exchange) -> Iterator[None]:
    """Name the peer in what the parsers of `aiockpt.format` say about its bytes."""
    try:
        yield
    except IntegrityError as error:
        error.url = exchange.url
        raise
    except RemoteProtocolError as error:
        raise RemoteProtocolError(f"{exchange.url}: {error}") from error
