"""One table between errors and statuses: what the server says, the client raises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import (
    AiockptError,
    AuthenticationError,
    CheckpointChangedError,
    ClosedError,
    LocalProtocolError,
    PeerFailedError,
    PeerUnreachableError,
    RemoteProtocolError,
    StepNotFoundError,
)
from aiockpt.http.problems import (
    HostNotAllowed,
    PeerBusy,
    Problem,
    from_problem,
    parse_retry_after,
    to_problem,
)
from aiockpt.http.protocol import RangeNotSatisfiable
from tests.support.proofs import proves

pytestmark = pytest.mark.torch_free

URL = "http://h:1/checkpoint/"


def answer(problem: Problem, **request: Any) -> AiockptError:
    """Return what a client makes of a problem."""
    return from_problem(
        problem.status, problem.headers, problem.body, url=URL, **request
    )


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (StepNotFoundError(5, serving=None), 404, StepNotFoundError),
        (StepNotFoundError(5, serving=4), 404, StepNotFoundError),
        (StepNotFoundError(5, serving=6), 410, StepNotFoundError),
        (StepNotFoundError(None), 404, StepNotFoundError),
        (CheckpointChangedError(expected="a", actual="b"), 412, CheckpointChangedError),
        (AuthenticationError("/checkpoint/5/full"), 401, AuthenticationError),
        (PeerFailedError(None, "no memory"), 424, PeerFailedError),
        (RangeNotSatisfiable("bytes=9-", 5), 416, RemoteProtocolError),
        (HostNotAllowed("evil.example"), 421, HostNotAllowed),
        (RemoteProtocolError("no such resource"), 400, RemoteProtocolError),
        (PeerBusy(retry_after=2), 503, PeerBusy),
        (ClosedError("the server"), 503, PeerUnreachableError),
        (LocalProtocolError("a bug"), 500, RemoteProtocolError),
        (ZeroDivisionError("secret"), 500, RemoteProtocolError),
    ],
    ids=repr,
)
def test_an_error_has_a_status_and_comes_back(
    error: Exception, status: int, kind: type[AiockptError]
) -> None:
    """RFC 9457 carries it; the client gets its own meaning, with the peer's name."""
    problem = to_problem(error)
    document = json.loads(problem.body)
    assert problem.status == document["status"] == status
    assert problem.headers["Content-Type"] == "application/problem+json"
    assert document["type"].startswith("tag:aiockpt,2025:")
    assert document["title"]
    assert b"secret" not in problem.body
    came = answer(problem)
    assert isinstance(came, kind)
    assert URL in f"{came} {getattr(came, 'url', '')}"


def test_the_sender_s_reason_travels() -> None:
    """The client says it in the same words; whoever else says 424 is a stranger."""
    error = answer(to_problem(PeerFailedError(None, "it has\nno memory")))
    assert isinstance(error, PeerFailedError)
    assert (error.rank, error.reason, error.url) == (None, "it has no memory", URL)
    stranger = from_problem(424, {}, b"<html>", url=URL)
    assert isinstance(stranger, RemoteProtocolError)


@pytest.mark.parametrize("serving", [None, 4, 6])
def test_a_missing_step_comes_back(serving: int | None) -> None:
    """The error has the step that is served instead."""
    error = answer(to_problem(StepNotFoundError(5, serving=serving)), step=5)
    assert isinstance(error, StepNotFoundError)
    assert (error.step, error.serving, error.url) == (5, serving, URL)


def test_a_replaced_checkpoint_comes_back() -> None:
    """The error has the snapshot that the client had, and the current one."""
    error = answer(
        to_problem(CheckpointChangedError(expected="x", actual="new")),
        snapshot_id="mine",
    )
    assert isinstance(error, CheckpointChangedError)
    assert (error.expected, error.actual, error.url) == ("mine", "new", URL)


def test_a_sender_that_has_shut_down_gives_no_sign_of_life() -> None:
    """Its application may go on answering for ever."""
    error = answer(to_problem(ClosedError("the server")))
    assert isinstance(error, PeerUnreachableError)
    assert "shut down" in str(error)


def test_a_replaced_checkpoint_has_its_id_if_none_was_asked_for() -> None:
    """The sender names the one that it was about to send."""
    error = answer(to_problem(CheckpointChangedError(expected="x", actual="new")))
    assert isinstance(error, CheckpointChangedError)
    assert (error.expected, error.actual) == ("x", "new")


PAGE, THERE = b"<html>Not Found</html>", {"Location": "http://evil"}
EMPTY = {"Content-Type": "application/problem+json"}  # which a gateway may write, too


@pytest.mark.parametrize(
    ("status", "headers", "body", "kind", "text"),
    [
        *[
            (status, headers, body, AuthenticationError, "login of its own")
            for status in (401, 403)
            for headers, body in (({}, PAGE), ({}, b""), (EMPTY, b""))
        ],
        (404, EMPTY, b"", RemoteProtocolError, "is that an aiockpt server?"),
        (412, {}, b"", RemoteProtocolError, "is that an aiockpt server?"),
        (503, EMPTY | {"Retry-After": "7"}, b"", PeerBusy, "not as a sender does"),
        (
            429,
            {"Retry-After": "7"},
            b"",
            PeerBusy,
            "in front of the sender limits requests",
        ),
        (404, {}, b"", RemoteProtocolError, "is that an aiockpt server?"),
        (404, {}, PAGE, RemoteProtocolError, "is that an aiockpt server?"),
        (302, THERE, b"", RemoteProtocolError, "redirects are not followed"),
        *[
            (status, {"Retry-After": "7"}, body, PeerBusy, f"answered HTTP {status}")
            for status in (429, 502, 503, 504)
            for body in (PAGE, b"")
        ],
    ],
)
def test_what_a_proxy_or_a_stranger_answers(
    status: int, headers: Any, body: bytes, kind: type[AiockptError], text: str
) -> None:
    """A page is no step, a login no wrong token, and a server that restarts is busy."""
    error = from_problem(status, headers, body, url=URL, step=5)
    assert isinstance(error, kind)
    assert text in str(error)
    assert not isinstance(error, PeerBusy) or error.retry_after == 7


@pytest.mark.parametrize(
    "body",
    [
        *(b"[" * 100_000, b'{"type":"tag:aiockpt,2025:x","serving":"six"}'),
        *(b'{"type":5}', b"\xff\xfe", b'"text"', b"{" + b" " * 1_000_000 + b"}"),
    ],
    ids=lambda body: repr(body[:20]),
)
def test_an_odd_body_is_only_a_body(body: bytes) -> None:
    """The status still means what it means."""
    changed = from_problem(412, {}, body, url=URL, snapshot_id="mine")
    assert isinstance(changed, CheckpointChangedError)
    assert isinstance(from_problem(418, {}, body, url=URL), RemoteProtocolError)


@proves("threat R2")
def test_what_a_peer_wrote_is_harmless_in_a_log() -> None:
    """No line breaks, no escape sequences, no novels."""
    detail = "a\n2026-01-01 CRITICAL all is lost\x1b[31m\u2028" + "b" * 10_000
    error = from_problem(400, {}, json.dumps({"detail": detail}).encode(), url=URL)
    assert len(str(error)) < 500
    assert str(error).isprintable()


@given(st.integers(100, 599), st.binary(max_size=50), st.text(max_size=10))
def test_any_answer_is_a_typed_error(status: int, body: bytes, after: str) -> None:
    """Nothing that a server says is raised as anything else."""
    error = from_problem(status, {"Retry-After": after}, body, url=URL)
    assert isinstance(error, AiockptError)
    assert str(error)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120.0), (" 0 ", 0.0), (None, None), ("", None), ("-1", None),
        ("1.5", None), ("inf", None), ("9" * 10, None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", None),
    ],
)  # fmt: skip
def test_retry_after(value: str | None, seconds: float | None) -> None:
    """Only seconds count, since the peer's clock is not known."""
    assert parse_retry_after(value) == seconds
