"""Asks a peer what it serves now, or to say when it serves something newer."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from http import HTTPStatus

from aiohttp import ClientResponse

from aiockpt.errors import RemoteProtocolError
from aiockpt.format.entries import INT64_MAX
from aiockpt.http.exchange import Port
from aiockpt.http.protocol import (
    INCARNATION_HEADER,
    STEP_HEADER,
    Source,
    check_incarnation,
    format_latest,
    format_prefer_wait,
    parse_etag,
)
from aiockpt.http.translating import Exchange

__all__ = ["LatestInfo", "ask_incarnation", "ask_latest", "check_step"]


@dataclass(frozen=True, slots=True)
class LatestInfo:
    """What a peer serves now.

    ``incarnation`` is the id of the sender's current start; None from a peer that has
    none. It says nothing about the content, so it does not count in a comparison.
    """

    step: int
    snapshot_id: str
    incarnation: str | None = field(default=None, compare=False)


async def ask_latest(
    port: Port,
    source: Source,
    after: int | None = None,
    *,
    known: str | None = None,
    wait: float = 0.0,
) -> LatestInfo | None:
    """Return what a peer serves, if that is newer than ``after``; else None.

    The peer is asked to wait for it, up to ``wait`` seconds. A sender whose
    incarnation is not ``known`` has started again: whatever it serves is news.

    Raises:
        StepNotFoundError: it serves nothing; only without ``after``.
    """
    headers = {"Prefer": format_prefer_wait(wait)} if wait else {}
    if known is not None:
        headers[INCARNATION_HEADER] = known
    exchange = Exchange(
        source=source,
        path=format_latest(after),
        headers=headers,
        status=HTTPStatus.OK,
        allowance=wait,
        may_be_empty=after is not None,
    )
    async with port.open(exchange, _ignore) as (answer, _):
        if answer.status == HTTPStatus.NO_CONTENT:
            return None
        step = _step_of(answer, exchange)
        snapshot_id = parse_etag(answer.headers.get("ETag"))
        incarnation = check_incarnation(answer.headers.get(INCARNATION_HEADER))
    if snapshot_id is None:
        raise RemoteProtocolError(f"{exchange.url} does not name its snapshot")
    restarted = None not in (known, incarnation) and known != incarnation
    # A server that does not know ``after`` answers with what it has.
    if after is not None and step <= after and not restarted:
        return None
    return LatestInfo(step, snapshot_id, incarnation)


async def ask_incarnation(port: Port, source: Source) -> str | None:
    """Return the id of a peer's current start at once; None from one that has none."""
    exchange = Exchange(
        source=source,
        path=format_latest(INT64_MAX),  # nothing is newer, so nothing is waited for
        headers={"Prefer": format_prefer_wait(0)},
        status=HTTPStatus.OK,
        may_be_empty=True,
    )
    async with port.open(exchange, _ignore) as (answer, _):
        return check_incarnation(answer.headers.get(INCARNATION_HEADER))


def check_step(answer: ClientResponse, exchange: Exchange) -> None:
    """Raise unless an answer is about the step that was asked for."""
    step = _step_of(answer, exchange)
    if step != exchange.step:
        raise RemoteProtocolError(f"{exchange.url} sends step {step}")


def _step_of(answer: ClientResponse, exchange: Exchange) -> int:
    text = answer.headers.get(STEP_HEADER, "")
    known = re.fullmatch(r"0|[1-9][0-9]{0,18}", text)
    if known is None or int(text) > INT64_MAX:
        raise RemoteProtocolError(
            f"{exchange.url} names no step in its answer; is that an aiockpt server?"
        )
    return int(text)


def _ignore(_: int) -> None:
    pass
