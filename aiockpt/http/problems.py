"""The one table between errors and HTTP statuses, used by server and client alike.

Bodies are problem documents (RFC 9457): ``type`` is ``tag:aiockpt,2025:<kind>``, and
the facts of the error are members beside it. What a peer wrote is shortened and
stripped of control characters before it becomes part of a message.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from operator import attrgetter
from typing import Final

import msgspec

from aiockpt.errors import (
    AiockptError,
    AuthenticationError,
    CheckpointChangedError,
    ClosedError,
    PeerFailedError,
    PeerUnreachableError,
    RemoteProtocolError,
    StepNotFoundError,
    TransportError,
)
from aiockpt.http.protocol import (
    RangeNotSatisfiable,
    format_etag,
    format_unsatisfied_range,
)

PROBLEM_TYPE = "application/problem+json"
_TAG = "tag:aiockpt,2025:"
_CLOSING = "closing"
_MAX_BODY = 64 * 1024
_MAX_DETAIL = 300
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


class HostNotAllowed(RemoteProtocolError):  # noqa: N818 (a request's fault: HTTP 421)
    """The request's ``Host`` is none of the names that the server answers to."""


class RefusedError(AiockptError):
    """A refusal that HTTP has a status for and the error tree has no class for."""

    def __init__(
        self, status: HTTPStatus, detail: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = dict(headers or {})


class PeerBusy(TransportError):  # noqa: N818 (not a failure: come back later)
    """The peer admits no more readers now; ``retry_after`` is its advice in seconds.

    ``proxy`` is the status of an answer that is not the sender's. A proxy that cannot
    reach the sender gives such answers, so they are no sign of the sender's life.
    """

    def __init__(
        self,
        url: str = "",
        *,
        retry_after: float | None = None,
        proxy: int | None = None,
    ) -> None:
        super().__init__()
        self.url = url
        self.retry_after = retry_after
        self.proxy = proxy

    def __str__(self) -> str:
        if self.proxy is not None:
            return (
                f"{self.url} answered HTTP {self.proxy}, and not as a sender does: a "
                "proxy is there, which may not reach the sender; is the sender running?"
            )
        when = "" if self.retry_after is None else f" in {self.retry_after:.3g} s"
        return f"{self.url or 'the server'} is busy; try again{when}"


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as an HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class _Row:
    error: type[Exception]
    status: int
    kind: str
    title: str
    facts: tuple[str, ...] = ()
    detail: Callable[[Exception], str] = str


_TABLE = (
    _Row(HostNotAllowed, 421, "misdirected", "Not the host that was asked for"),
    _Row(
        StepNotFoundError,
        404,
        "step-not-found",
        "This step is not published",
        ("step", "serving"),
    ),
    _Row(
        CheckpointChangedError,
        412,
        "checkpoint-changed",
        "The checkpoint was replaced",
        ("expected", "actual"),
    ),
    _Row(PeerFailedError, 424, "sender-failed", "The sender gave up", ("reason",)),
    _Row(
        AuthenticationError,
        401,
        "authentication",
        "Wrong or no token",
        detail=attrgetter("detail"),
    ),
    _Row(RangeNotSatisfiable, 416, "range", "Range not satisfiable", ("size",)),
    _Row(PeerBusy, 503, "busy", "Too many readers", ("retry_after",)),
    _Row(ClosedError, 503, _CLOSING, "The server is shutting down"),
    _Row(RemoteProtocolError, 400, "bad-request", "The request makes no sense"),
)
_INTERNAL = _Row(Exception, 500, "internal", "Internal error")


def to_problem(error: Exception) -> Problem:
    """Return the response that tells a client about ``error``.

    An error that is not in the table becomes a 500 without any detail: it may hold
    what is none of the client's business.
    """
    if isinstance(error, RefusedError):
        document: dict[str, object] = {
            "type": "about:blank",
            "title": error.status.phrase,
            "status": error.status.value,
            "detail": error.detail,
        }
        headers = {**_headers_of(error), **error.headers}
        return Problem(error.status.value, headers, msgspec.json.encode(document))
    row = next((row for row in _TABLE if isinstance(error, row.error)), _INTERNAL)
    status = 410 if _is_superseded(error) else row.status
    document = {"type": f"{_TAG}{row.kind}", "title": row.title, "status": status}
    if row is not _INTERNAL:
        document["detail"] = row.detail(error)
    document |= {fact: getattr(error, fact) for fact in row.facts}
    return Problem(status, _headers_of(error), msgspec.json.encode(document))


def _is_superseded(error: Exception) -> bool:
    return (
        isinstance(error, StepNotFoundError)
        and error.step is not None
        and error.serving is not None
        and error.step < error.serving
    )


def _headers_of(error: Exception) -> dict[str, str]:
    headers = {"Content-Type": PROBLEM_TYPE, "Cache-Control": "no-store"}
    match error:
        case CheckpointChangedError() if error.actual is not None:
            headers["ETag"] = format_etag(error.actual)
        case AuthenticationError():
            headers["WWW-Authenticate"] = "Bearer"
        case RangeNotSatisfiable():
            headers["Content-Range"] = format_unsatisfied_range(error.size)
        case PeerBusy() if error.retry_after is not None:
            headers["Retry-After"] = str(math.ceil(error.retry_after))
    return headers


class _Document(msgspec.Struct):
    """The members that a client looks at; a wrong type makes the body foreign."""

    type: str = ""
    detail: str = ""
    title: str = ""
    reason: str = ""
    serving: int | None = None
    expected: str | int | None = None
    actual: str | int | None = None


_DOCUMENT: Final = msgspec.json.Decoder(_Document)


@dataclass(frozen=True, slots=True)
class _ErrorResponse:
    status: int
    url: str
    step: int | None
    snapshot_id: str | None
    retry_after: float | None
    document: _Document

    @property
    def ours(self) -> bool:
        """Whether a sender gave it: a proxy's error has another type, or none."""
        return self.document.type.startswith(_TAG)

    @property
    def detail(self) -> str:
        return _printable(self.document.detail or self.document.title)


def from_problem(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    url: str,
    step: int | None = None,
    snapshot_id: str | None = None,
) -> AiockptError:
    """Return (not raise) the error that a response with an error status stands for.

    ``step`` and ``snapshot_id`` are what the request asked for. The body is
    untrusted and may be of any size and kind; an unknown status is a
    `RemoteProtocolError`.
    """
    document = _parse(body)
    retry_after = parse_retry_after(headers.get("Retry-After"))
    answer = _ErrorResponse(status, url, step, snapshot_id, retry_after, document)
    return _BUILDERS.get(status, _unexpected)(answer)


def _parse(body: bytes) -> _Document:
    try:
        return _DOCUMENT.decode(body[:_MAX_BODY])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _Document()


def _printable(text: str) -> str:
    return _CONTROL.sub(" ", text[:_MAX_DETAIL]).strip()


def _step_not_found(answer: _ErrorResponse) -> AiockptError:
    if not answer.ours:
        return _unexpected(answer)
    serving = answer.document.serving
    return StepNotFoundError(answer.step, serving=serving, url=answer.url)


def _changed(answer: _ErrorResponse) -> AiockptError:
    expected, actual = answer.document.expected, answer.document.actual
    if answer.snapshot_id is None and not (answer.ours and isinstance(expected, str)):
        return _unexpected(answer)  # no snapshot was asked for
    return CheckpointChangedError(
        expected=answer.snapshot_id or _printable(str(expected)),
        actual=_printable(actual) if isinstance(actual, str) else None,
        url=answer.url,
    )


def _sender_failed(answer: _ErrorResponse) -> AiockptError:
    if not answer.ours:
        return _unexpected(answer)
    reason = _printable(answer.document.reason) or answer.detail
    return PeerFailedError(None, reason, url=answer.url)


def _refused(answer: _ErrorResponse) -> AiockptError:
    told = _printable(answer.document.detail) if answer.ours else ""
    why = f"HTTP {answer.status}" + (f", {told}" if told else "")
    return AuthenticationError(answer.url, why, by_sender=answer.ours)


def _busy(answer: _ErrorResponse) -> AiockptError:
    if answer.document.type == _TAG + _CLOSING:  # no sign of life: it does not return
        return PeerUnreachableError(answer.url, "its transport has shut down")
    proxy = None if answer.ours else answer.status
    return PeerBusy(answer.url, retry_after=answer.retry_after, proxy=proxy)


def _bad_range(answer: _ErrorResponse) -> AiockptError:
    why = f": {answer.detail}" if answer.detail else ""
    return RemoteProtocolError(
        f"{answer.url} has no range of what its manifest describes (HTTP 416){why}"
    )


def _misdirected(answer: _ErrorResponse) -> AiockptError:
    return HostNotAllowed(f"{answer.url} refuses this host name: {answer.detail}")


def _unexpected(answer: _ErrorResponse) -> AiockptError:
    why = f" ({answer.detail})" if answer.detail else ""
    hint = "" if answer.ours else "; is that an aiockpt server?"
    if 300 <= answer.status < 400:
        hint = "; redirects are not followed"
    return RemoteProtocolError(f"{answer.url} answered HTTP {answer.status}{why}{hint}")


_BUILDERS: dict[int, Callable[[_ErrorResponse], AiockptError]] = {
    401: _refused,
    403: _refused,
    404: _step_not_found,
    410: _step_not_found,
    412: _changed,
    416: _bad_range,
    421: _misdirected,
    424: _sender_failed,
    429: _busy,
    # A reverse proxy says 502 or 504 while the server behind it restarts.
    502: _busy,
    503: _busy,
    504: _busy,
}


def parse_retry_after(value: str | None) -> float | None:
    """Return the seconds of ``Retry-After``; None if absent, odd, or a date."""
    match = re.fullmatch(r"[0-9]{1,9}", (value or "").strip())
    return None if match is None else float(match[0])
