"""``aiockpt top``: what a sender does now, and how far the members of its swarm are."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial
from itertools import chain, islice
from typing import Annotated

import msgspec

from aiockpt.cli.arguments import UsageError
from aiockpt.cli.peer import open_peer
from aiockpt.cli.text import (
    MAX_CELL,
    clipped,
    format_bytes,
    format_table,
    printable,
)
from aiockpt.errors import RemoteProtocolError
from aiockpt.http.client import CheckpointClient, Request
from aiockpt.http.protocol import Origin

__all__ = ["run"]

_PAUSE = 1.0
_LONGEST = 1 << 20  # bytes of an answer
_BAR = 20
_HEADS = ("MEMBER", "ADDRESS", "ZONE", "HAS", "", "RECEIVES", "COMPLAINTS")
_COUNTS = ("readers", "waiting", "requests", "refused")
_CLEAR = "\x1b[H\x1b[2J"
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _ShownStep(msgspec.Struct):
    step: int
    snapshot_id: str
    total_bytes: _Count


class _ShownMember(msgspec.Struct):
    id: str
    url: str
    zone: str
    have: _Count
    complaints: _Count


class _ShownSwarm(msgspec.Struct):
    chunks: _Count
    given: _Count
    members: list[_ShownMember]
    more: _Count = 0


class _Status(msgspec.Struct):
    readers: _Count
    waiting: _Count
    bytes_sent: _Count
    requests: _Count
    refused: _Count
    swarm: _ShownSwarm | None


class _ShownStatus(msgspec.Struct):
    serving: _ShownStep | None
    status: _Status


_decode = msgspec.json.Decoder(_ShownStatus).decode


def run(arguments: argparse.Namespace) -> int:
    """Show the status once, or in a terminal until interrupted."""
    if arguments.url.step is not None:
        raise UsageError(f"the URL names step {arguments.url.step}; leave it out")
    asyncio.run(_watch(arguments, lives=sys.stdout.isatty()))
    return 0


async def _watch(arguments: argparse.Namespace, *, lives: bool) -> None:
    async with (
        open_peer([arguments.url], arguments) as peer,
        aclosing(peer.client()) as client,
    ):
        now = asyncio.get_running_loop().time
        origin = peer.origins[0]
        before, asked = None, now()
        while True:
            patience = client.patience()
            retries = client.retries(origin, None, patience, peer.deadline.note)
            found = await retries.run(partial(_ask, client, origin))
            seconds, asked = now() - asked, now()
            title = printable(f"aiockpt  {origin.base_url}")
            lines = chain([title], _lines(found, before, seconds))
            if not lives:
                for line in lines:
                    print(line)
                return
            columns, rows = os.get_terminal_size(sys.stdout.fileno())
            fitting = islice(lines, max((rows or 99) - 1, 0))
            shown = [line[: columns or None] for line in fitting]
            print(_CLEAR + "\n".join(shown), flush=True)
            before = found
            await client.pause(_PAUSE)


async def _ask(client: CheckpointClient, origin: Origin) -> _ShownStatus:
    """Return the status of a sender.

    Raises:
        RemoteProtocolError: it has none; older senders do not.
    """
    request = Request(origin=origin, path="", headers={"Accept": "application/json"})
    async with client.request(request) as answer:
        body = await answer.read(_LONGEST, "its status")
    try:
        return _decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        detail = f"{origin.base_url} does not show its status: {error}"
        raise RemoteProtocolError(detail) from None


def _lines(
    found: _ShownStatus, before: _ShownStatus | None, seconds: float
) -> Iterator[str]:
    """Yield the lines that show a status; rates are those since the one before."""
    serving, status, swarm = found.serving, found.status, found.status.swarm
    sending = ""
    if before is not None:
        sending = f" ({_rate(status.bytes_sent - before.status.bytes_sent, seconds)})"
    what = "nothing is served now"
    if serving is not None:
        size = format_bytes(serving.total_bytes)
        what = f"step {serving.step}  {size}  {clipped(serving.snapshot_id, MAX_CELL)}"
    counts = {name: getattr(status, name) for name in _COUNTS}
    counts["sent"] = format_bytes(status.bytes_sent) + sending
    yield what
    yield "  ".join(f"{name} {count}" for name, count in counts.items())
    if serving is None or swarm is None:
        return
    count = len(swarm.members) + swarm.more
    given = f"{swarm.given} of {swarm.chunks} chunks given"
    yield f"members {count}  {given}"
    if not swarm.members:
        return
    known = _known(before) if _of(before) == serving.snapshot_id else {}
    size_of_chunk = serving.total_bytes / max(swarm.chunks, 1)

    def row(each: _ShownMember) -> tuple[str, ...]:
        share = min(each.have / max(swarm.chunks, 1), 1.0)
        old = known.get(each.id)
        rate = "" if old is None else _rate((each.have - old) * size_of_chunk, seconds)
        has = _bar(share), f"{math.floor(100 * share)}%"
        return (each.id, each.url, each.zone, *has, rate, str(each.complaints))

    yield ""
    yield from format_table(_HEADS, map(row, swarm.members), right=(4, 5, 6))
    if swarm.more:
        yield f"and {swarm.more} more"


def _known(before: _ShownStatus | None) -> dict[str, int]:
    swarm = before.status.swarm if before is not None else None
    return {} if swarm is None else {each.id: each.have for each in swarm.members}


def _of(before: _ShownStatus | None) -> str | None:
    serving = before.serving if before is not None else None
    return None if serving is None else serving.snapshot_id


def _rate(count: float, seconds: float) -> str:
    return f"{format_bytes(max(count, 0) / max(seconds, 1e-3))}/s"


def _bar(share: float) -> str:
    filled = math.floor(share * _BAR)
    return f"[{'#' * filled}{'-' * (_BAR - filled)}]"
