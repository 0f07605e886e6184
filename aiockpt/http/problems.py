"""The one table between errors and HTTP statuses, used by server and client alike.

Bodies are problem documents (RFC 9457): ``type`` is ``tag:aiockpt,2025:<kind>``, and
the facts of the error are members beside it. What a peer wrote is shortened and
stripped of control characters before it becomes part of a message.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, NamedTuple

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

PROBLEM_TYPE: Final = "application/problem+json"
_TAG: Final = "tag:aiockpt,2025:"
_CLOSING: Final = "closing"
_MAX_BODY_BYTES: Final = 64 * 1024
_MAX_DETAIL_CHARACTERS: Final = 300
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


class HostNotAllowed(RemoteProtocolError):  # noqa: N818 (a request's fault: HTTP 421)
    """The request's ``Host`` is none of the names that the server answers to."""


class UnknownResourceError(RemoteProtocolError):
    """The peer does not know the resource, perhaps because its version is older."""


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
        if self.proxy == HTTPStatus.TOO_MANY_REQUESTS:
            return (
                f"{self.url} answered HTTP {self.proxy}, and not as a sender does: a "
                "proxy in front of the sender limits requests"
            )
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


class _Row(NamedTuple):
    """How a response tells an error: status, kind, title, and attributes of it."""

    error: type[Exception]
    status: int
    kind: str
    title: str
    facts: tuple[str, ...] = ()


_TABLE: Final = (
    _Row(HostNotAllowed, 421, "misdirected", "Not the host that was asked for"),
    _Row(
        StepNotFoundError,
        404,  # 410 if the step was superseded
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
    _Row(AuthenticationError, 401, "authentication", "Wrong or no token", ("detail",)),
    _Row(RangeNotSatisfiable, 416, "range", "Range not satisfiable", ("size",)),
    _Row(PeerBusy, 503, "busy", "Too many readers", ("retry_after",)),
    _Row(ClosedError, 503, _CLOSING, "The server is shutting down"),
    _Row(RemoteProtocolError, 400, "bad-request", "The request makes no sense"),
)


def to_problem(error: Exception) -> Problem:
    """Return the response that tells a client about ``error``.

    An error that is not in the table becomes a 500 without any detail: it may hold
    what is none of the client's business.
    """
    headers = {"Content-Type": PROBLEM_TYPE, "Cache-Control": "no-store"}
    if isinstance(error, RefusedError):
        status = error.status.value
        document: dict[str, object] = {
            "type": "about:blank",
            "title": error.status.phrase,
            "status": status,
            "detail": error.detail,
        }
        headers |= error.headers
    elif row := next((row for row in _TABLE if isinstance(error, row.error)), None):
        status = 410 if _is_superseded(error) else row.status
        document = {
            "type": f"{_TAG}{row.kind}",
            "title": row.title,
            "status": status,
            "detail": str(error),
        }
        document |= {fact: getattr(error, fact) for fact in row.facts}
        headers |= _headers_of(error)
    else:
        status = 500
        kind, title = f"{_TAG}internal", "Internal error"
        document = {"type": kind, "title": title, "status": status}
    return Problem(status, headers, msgspec.json.encode(document))


def _is_superseded(error: Exception) -> bool:
    return (
        isinstance(error, StepNotFoundError)
        and error.step is not None
        and error.serving is not None
        and error.step < error.serving
    )


def _headers_of(error: Exception) -> dict[str, str]:
    """Return the headers that HTTP asks for with the error's status."""
    match error:
        case CheckpointChangedError(actual=str(actual)):
            return {"ETag": format_etag(actual)}
        case AuthenticationError():
            return {"WWW-Authenticate": "Bearer"}
        case RangeNotSatisfiable():
            return {"Content-Range": format_unsatisfied_range(error.size)}
        case PeerBusy(retry_after=float() | int() as seconds):
            return {"Retry-After": str(math.ceil(seconds))}
    return {}


class _Document(msgspec.Struct):
    """The members that a client looks at; a wrong type makes the body foreign."""

    type: str = ""
    detail: str = ""
    title: str = ""
    reason: str = ""
    serving: int | None = None
    expected: str | int | None = None
    actual: str | int | None = None

    @property
    def is_ours(self) -> bool:
        """Whether a sender gave it: a proxy's error has another type, or none."""
        return self.type.startswith(_TAG)


_DOCUMENT: Final = msgspec.json.Decoder(_Document)


def from_problem(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    url: str,
    step: int | None = None,
    snapshot_id: str | None = None,
    may_be_unknown: bool = False,
) -> AiockptError:
    """Return (not raise) the error that a response with an error status stands for.

    ``step`` and ``snapshot_id`` are what the request asked for. With
    ``may_be_unknown``, older peers do not know the resource. The body is
    untrusted and may be of any size and kind; an unknown status is a
    `RemoteProtocolError`.
    """
    said = _parse(body)
    detail = _printable(said.detail or said.title)
    match status:
        case 401 | 403:
            told = _printable(said.detail) if said.is_ours else ""
            why = f"HTTP {status}, {told}" if told else f"HTTP {status}"
            return AuthenticationError(url, why, by_sender=said.is_ours)
        case 404 | 410 if said.is_ours:
            return StepNotFoundError(step, serving=said.serving, url=url)
        case 412 if snapshot_id or (said.is_ours and isinstance(said.expected, str)):
            actual = _printable(said.actual) if isinstance(said.actual, str) else None
            expected = snapshot_id or _printable(str(said.expected))
            return CheckpointChangedError(expected=expected, actual=actual, url=url)
        case 424 if said.is_ours:
            return PeerFailedError(None, _printable(said.reason) or detail, url=url)
        case 429 | 502 | 503 | 504:
            # A reverse proxy says 502 or 504 while the server behind it restarts.
            if said.type == _TAG + _CLOSING:  # no sign of life: it does not return
                return PeerUnreachableError(url, "its transport has shut down")
            retry_after = parse_retry_after(headers.get("Retry-After"))
            proxy = None if said.is_ours else status
            return PeerBusy(url, retry_after=retry_after, proxy=proxy)
    error = _unexpected(status, url, detail, is_ours=said.is_ours)
    is_unknown = may_be_unknown and status == HTTPStatus.NOT_FOUND
    return UnknownResourceError(f"{error}") if is_unknown else error


def _unexpected(
    status: int, url: str, detail: str, *, is_ours: bool
) -> RemoteProtocolError:
    """Return the error for an answer that no sender gives to this client."""
    if status == HTTPStatus.MISDIRECTED_REQUEST:
        return HostNotAllowed(f"{url} refuses this host name: {detail}")
    if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        why = f": {detail}" if detail else ""
        return RemoteProtocolError(
            f"{url} has no range of what its manifest describes (HTTP 416){why}"
        )
    hint = "" if is_ours else "; is that an aiockpt server?"
    if 300 <= status < 400:
        hint = "; redirects are not followed"
    why = f" ({detail})" if detail else ""
    return RemoteProtocolError(f"{url} answered HTTP {status}{why}{hint}")


def _parse(body: bytes) -> _Document:
    try:
        return _DOCUMENT.decode(body[:_MAX_BODY_BYTES])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _Document()


def _printable(text: str) -> str:
    return _CONTROL.sub(" ", text[:_MAX_DETAIL_CHARACTERS]).strip()


def parse_retry_after(value: str | None) -> float | None:
    """Return the seconds of ``Retry-After``; None if absent, odd, or a date."""
    match = re.fullmatch(r"[0-9]{1,9}", (value or "").strip())
    return None if match is None else float(match[0])
