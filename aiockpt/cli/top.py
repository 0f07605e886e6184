"""``aiockpt top``: what a sender does now, and how far the members of its swarm are.

It shows what the status page shows, under the same names: see `aiockpt.http.status`.
"""

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

import msgspec

from aiockpt.cli.arguments import UsageError
from aiockpt.cli.peer import open_peer
from aiockpt.cli.text import MAX_CELL, format_bytes, format_table
from aiockpt.errors import AiockptError, RemoteProtocolError
from aiockpt.http.client import CheckpointClient, Request
from aiockpt.http.protocol import Origin
from aiockpt.http.status import ShownMember, ShownStatus
from aiockpt.runtime.tasks import run_all
from aiockpt.runtime.words import clipped, printable

_PAUSE_S = 1.0
_MAX_ANSWER_BYTES = 1 << 20
_BAR_CHARACTERS = 20
_HEADS = ("MEMBER", "ADDRESS", "ZONE", "HAS", "", "RECEIVES", "COMPLAINTS")
_CLEAR = "\x1b[H\x1b[2J"
_decode = msgspec.json.Decoder(ShownStatus).decode


def run(arguments: argparse.Namespace) -> int:
    """Show the status once, or in a terminal until interrupted."""
    if (step := arguments.senders[0].step) is not None:
        raise UsageError(f"the URL names step {step}; leave it out")
    asyncio.run(_watch(arguments, lives=sys.stdout.isatty()))
    return 0


async def _watch(arguments: argparse.Namespace, *, lives: bool) -> None:
    async with (
        open_peer(arguments.senders, arguments) as peer,
        aclosing(peer.client()) as client,
    ):
        now = asyncio.get_running_loop().time

        # One for all rounds: a sender that is away delays only the first of them.
        known = {origin: client.liveness() for origin in peer.origins}

        async def ask(origin: Origin) -> ShownStatus | AiockptError:
            retries = client.retries(origin, None, peer.deadline.note, known[origin])
            try:
                found = await retries.run(partial(_ask, client, origin))
            except AiockptError as error:
                return error
            known[origin].heard(now())
            return found

        before: list[ShownStatus | AiockptError | None] = [None] * len(peer.origins)
        asked = now()
        while True:
            found = await run_all([partial(ask, origin) for origin in peer.origins])
            if all(isinstance(each, AiockptError) for each in found):
                raise found[0]
            seconds, asked = now() - asked, now()
            lines = chain.from_iterable(
                [
                    printable(f"aiockpt  {origin.base_url}"),
                    *_lines(status, last, seconds),
                ]
                for origin, status, last in zip(
                    peer.origins, found, before, strict=True
                )
            )
            if not lives:
                for line in lines:
                    print(line)
                return
            columns, rows = os.get_terminal_size(sys.stdout.fileno())
            fitting = islice(lines, max((rows or 99) - 1, 0))
            shown = [line[: columns or None] for line in fitting]
            print(_CLEAR + "\n".join(shown), flush=True)
            before = found
            await client.pause(_PAUSE_S)


async def _ask(client: CheckpointClient, origin: Origin) -> ShownStatus:
    """Return the status of a sender.

    Raises:
        RemoteProtocolError: it has none; older senders do not.
    """
    request = Request(origin=origin, path="", headers={"Accept": "application/json"})
    async with client.request(request) as answer:
        body = await answer.read(_MAX_ANSWER_BYTES, "its status")
    try:
        return _decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        detail = f"{origin.base_url} does not show its status: {error}"
        raise RemoteProtocolError(detail) from None


def _lines(
    found: ShownStatus | AiockptError,
    before: ShownStatus | AiockptError | None,
    seconds: float,
) -> Iterator[str]:
    """Yield the lines that show a status, or why there is none.

    Rates are those since the status before.
    """
    if isinstance(found, AiockptError):
        yield printable(f"error: {found}")
        return
    if isinstance(before, AiockptError):
        before = None
    serving, status, swarm = found.serving, found.status, found.status.swarm
    if serving is None:
        yield "nothing is served now"
    else:
        yield _facts(
            step=serving.step,
            size=format_bytes(serving.total_bytes),
            snapshot=clipped(serving.snapshot_id, MAX_CELL),
        )
    counts = {"sent": format_bytes(status.bytes_sent)}
    if before is not None:
        sent = status.bytes_sent - before.status.bytes_sent
        counts["sending"] = _rate(sent, seconds)
    requests = f"{status.requests}, {status.refused} refused"
    yield _facts(
        readers=status.readers, waiting=status.waiting, **counts, requests=requests
    )
    if serving is None or swarm is None:
        return
    given = {"chunks given once": f"{swarm.given} of {swarm.chunks}"}
    yield _facts(**given, members=len(swarm.members) + swarm.more)
    if not swarm.members:
        return
    earlier: dict[str, int] = {}
    if before is not None and before.serving == serving and before.status.swarm:
        earlier = {each.id: each.have for each in before.status.swarm.members}
    bytes_per_chunk = serving.total_bytes / max(swarm.chunks, 1)

    def row(each: ShownMember) -> tuple[str, ...]:
        part, rate = min(each.have / max(swarm.chunks, 1), 1.0), ""
        if each.id in earlier:
            nbytes = (each.have - earlier[each.id]) * bytes_per_chunk
            rate = _rate(nbytes, seconds)
        filled = math.floor(part * _BAR_CHARACTERS)
        bar = f"[{'#' * filled}{'-' * (_BAR_CHARACTERS - filled)}]"
        has = bar, f"{math.floor(100 * part)}%"
        return (each.id, each.url, each.zone, *has, rate, str(each.complaints))

    yield ""
    yield from format_table(_HEADS, map(row, swarm.members), right=(4, 5, 6))
    if swarm.more:
        yield f"and {swarm.more} more"


def _facts(**facts: object) -> str:
    return "  ".join(f"{name} {value}" for name, value in facts.items())


def _rate(nbytes: float, seconds: float) -> str:
    return f"{format_bytes(max(nbytes, 0) / max(seconds, 1e-3))}/s"
