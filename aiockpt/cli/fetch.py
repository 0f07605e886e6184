"""``aiockpt fetch``: a peer's checkpoint into a file, resumed and verified."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aiockpt.cli.arguments import UsageError
from aiockpt.cli.peer import FoundCheckpoint, SenderClient, open_peer
from aiockpt.cli.text import ProgressBar, format_bytes
from aiockpt.errors import Advice, AiockptError, LocalProtocolError, advice
from aiockpt.events import Meter, Progress
from aiockpt.http.download import Download
from aiockpt.http.peers import by_rank
from aiockpt.runtime.words import printable
from aiockpt.storage.partfile import PartFile, check_target
from aiockpt.transfer.source import PlainDestination

if TYPE_CHECKING:  # it needs torch
    from aiockpt.state.reshard import RankValues


def run(arguments: argparse.Namespace) -> int:
    """Fetch; the bar and the summary go to stderr."""
    bar = ProgressBar(sys.stderr, quiet=arguments.quiet)
    try:
        summary = asyncio.run(_fetch(arguments, bar))
    except (AiockptError, OSError, KeyboardInterrupt) as error:
        part = f"{os.path.realpath(arguments.output)}.part"
        interrupted = isinstance(error, KeyboardInterrupt)
        if (bar.last.chunks_done or interrupted) and os.path.lexists(part):
            error.add_note(
                f"what was verified is in {part}: run the same command again to go on "
                "from there"
            )
        elif interrupted and not bar.last.chunks_done:
            error.add_note("no chunk had arrived whole, so nothing was kept")
        raise
    finally:
        bar.close()
    bar.note(summary)
    return 0


def rank_values_of(arguments: argparse.Namespace, *, is_joined: bool) -> RankValues:
    """Return which value to take of those that differ by rank.

    Raises:
        UsageError: an option is for joined metadata only.
    """
    ranks: int | None = arguments.rank_values
    if not is_joined and (ranks is not None or arguments.imports):
        raise UsageError("--rank-values and --import are for joined metadata")
    return "error" if ranks is None else ranks


async def _fetch(arguments: argparse.Namespace, bar: ProgressBar) -> str:
    target = check_target(arguments.output, replace=arguments.overwrite)
    try:
        senders = by_rank([[each.origin for each in url] for url in arguments.urls])
    except LocalProtocolError as error:
        raise UsageError(str(error)) from None
    is_joined = len(senders) > 1
    ranks = rank_values_of(arguments, is_joined=is_joined)
    addresses = [each for url in arguments.urls for each in url]
    async with open_peer(addresses, arguments) as peer:

        async def fetch(step: int) -> str:
            if not is_joined:
                found = await peer.find(step, keep=True)
                return await save(peer, found, target, bar, replace=arguments.overwrite)
            from aiockpt.cli.shards import save_joined  # needs torch

            return await save_joined(
                *(peer, senders, step, target, bar),
                overwrite=arguments.overwrite,
                rank_values=ranks,
            )

        bar(Progress(stop="fetch_manifest"))
        return await peer.receive(fetch)


async def save(
    peer: SenderClient,
    found: FoundCheckpoint,
    target: Path,
    bar: ProgressBar,
    *,
    replace: bool,
    final: Advice = Advice.NONE,
) -> str:
    """Fetch a checkpoint into a file; return the sentence that says how it went.

    If it fails or is cancelled, what was verified stays in the part file, but not
    after the errors of ``final``, after which nobody asks for the file again.
    """
    manifest, started = found.manifest, time.monotonic()

    def report(progress: Progress) -> None:
        peer.deadline.phase = progress.stop
        bar(progress)

    meter = Meter(report)
    meter.expect(manifest.segment_bytes, len(manifest.grid))
    meter.at("allocate")
    opened: list[PartFile] = []  # a cancelled call would drop what it returns

    def open_part() -> None:
        opened.append(PartFile.open(target, manifest))

    async def missing(part: PartFile) -> list[int]:
        """Return the chunks that an earlier fetch has not left in the part file."""
        meter.at("plan")
        chunks = []
        for chunk in range(len(manifest.grid)):
            known = chunk in part.candidates
            if known and await peer.bridge.run(part.holds, chunk):
                start, stop = manifest.grid.range(chunk)
                meter.reuse(stop - start, 1)
            else:
                chunks.append(chunk)
        return chunks

    try:
        await peer.bridge.run(open_part)
        (part,) = opened
        async with peer.reading(found) as (peers, extension):
            chunks = await missing(part)
            meter.at("fetch_chunk")
            outline, filled = manifest.outline, PlainDestination(part)
            extension.reads_into(filled)
            for chunk in {*range(len(manifest.grid))}.difference(chunks):
                extension.verified(chunk)
            await Download(peers, outline, filled, chunks, meter.add, extension).run()
        meter.at("write")
        await peer.bridge.run(partial(part.commit, replace=replace))
    except BaseException as error:
        for part in opened:
            is_empty = not part.candidates and not bar.last.chunks_done
            if is_empty or advice(error) & final:
                part.discard()  # no other fetch could use it
        raise
    finally:
        for part in opened:
            part.close()
    kept, elapsed = bar.last.bytes_reused, time.monotonic() - started
    arrived = format_bytes(bar.last.bytes_done - kept)
    resumed = f" ({format_bytes(kept)} were there already)" if kept else ""
    given = "".join(
        f"\n{format_bytes(nbytes)} of it from {printable(url)}"
        for url, nbytes in peers.given().items()
    )
    return (
        f"{printable(str(target))}: step {manifest.step}, "
        f"snapshot {manifest.snapshot_id}\n"
        f"{arrived}{resumed} at {format_bytes(bar.last.rate)}/s, verified; on the disk "
        f"after {elapsed:.2f} s{given}"
    )
