"""``aiockpt fetch``: a peer's checkpoint into a file, resumed and verified."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aiockpt.cli.options import (
    Commands,
    add_client_options,
    add_overwrite_option,
    address,
    size,
    step,
)
from aiockpt.cli.text import ProgressBar, format_bytes
from aiockpt.errors import AiockptError
from aiockpt.events import Progress
from aiockpt.format.manifest import Manifest
from aiockpt.http.protocol import Lease
from aiockpt.runtime.lifetime import Deadline
from aiockpt.storage.partfile import PartFile, check_target

if TYPE_CHECKING:
    from aiockpt.cli.remote import Peer
    from aiockpt.http.sources import Sources

__all__ = ["configure", "run"]


def configure(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "fetch",
        help="fetch a checkpoint into a file",
        description="Fetch a checkpoint into a safetensors file. Every chunk is "
        "verified; FILE appears in one step, when all of it is on the disk. What "
        "a failed fetch has verified stays in FILE.part, where the next one goes on.",
    )
    parser.add_argument(
        "urls",
        metavar="URL",
        nargs="+",
        type=address,
        help="what the sender's metadata() says; .../checkpoint/100 names a step. Of "
        "several that hold the same checkpoint each gives a part",
    )
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, required=True)
    add_overwrite_option(parser)
    parser.add_argument(
        "--step", type=step, metavar="N", help="the step to fetch (what is served now)"
    )
    parser.add_argument(
        "--max-size",
        type=size,
        metavar="SIZE",
        help="refuse a larger checkpoint before a byte of it is fetched: 10GiB, 500MB "
        "(as large as the disk holds)",
    )
    add_client_options(parser)
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="report nothing but errors"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Fetch; the bar and the summary go to stderr."""
    bar = ProgressBar(sys.stderr, quiet=arguments.quiet)
    try:
        summary = asyncio.run(_download(arguments, bar))
    except (AiockptError, OSError, KeyboardInterrupt) as error:
        part = Path(f"{arguments.output.resolve()}.part")
        if bar.chunks_done and part.exists():
            error.add_note(
                f"what was verified is in {part}: run the same command again to go on "
                "from there"
            )
        raise
    finally:
        bar.close()
    bar.note(summary)
    return 0


async def _download(arguments: argparse.Namespace, bar: ProgressBar) -> str:
    """Fetch what the arguments name; return the sentence that says how it went.

    If cancelled, what was verified stays in the part file.
    """
    from aiockpt.cli.remote import peer_of  # needs aiohttp

    target = check_target(arguments.output, replace=arguments.overwrite)
    async with (
        Deadline(arguments.timeout, stop="fetch_manifest") as deadline,
        peer_of(arguments, Lease.begin(deadline.when)) as peer,
    ):

        async def fetch(step: int) -> str:
            job = _Download(peer, target, arguments.overwrite, bar, deadline)
            return await job.run(
                step, wait=arguments.wait, reconnect=arguments.reconnect
            )

        bar(Progress(stop="fetch_manifest"))
        return await peer.receive(fetch, deadline, wait=arguments.wait)


@dataclass(slots=True)
class _Download:
    peer: Peer
    target: Path
    replace: bool
    bar: ProgressBar
    deadline: Deadline
    state: Progress = field(default=Progress(stop="fetch_manifest"))
    started: float = field(default_factory=time.monotonic)
    fetching_since: float = 0.0
    fetched: int = 0

    async def run(self, step: int, *, wait: float, reconnect: float) -> str:
        self._at("fetch_manifest")
        manifest, origin = await self.peer.find(step, self.deadline, wait=wait)
        self._at(
            "allocate",
            bytes_total=manifest.segment_bytes,
            chunks_total=len(manifest.grid),
        )
        part = await self.peer.bridge.run(PartFile.open, self.target, manifest)
        try:
            origin = await self._fill(part, manifest, origin, reconnect)
            self._at("write")
            await self.peer.bridge.run(partial(part.commit, replace=self.replace))
        except BaseException:
            if not part.candidates and not self.state.chunks_done:
                part.discard()  # it holds nothing that another fetch could use
            raise
        finally:
            part.close()
        return self._summary(manifest, origin)

    async def _fill(
        self, part: PartFile, manifest: Manifest, origin: Sources, reconnect: float
    ) -> Sources:
        from aiockpt.http.sources import keeping
        from aiockpt.transfer.source import PlainTarget

        async with aclosing(self.peer.client(reconnect=reconnect)) as client:
            origin = origin.through(client)
            planning = self._plan(part, manifest)
            missing = await keeping(origin, manifest.step, planning)
            self.fetching_since = time.monotonic()
            self._at("fetch_chunk")
            await origin.fetch_chunks(
                manifest.outline, PlainTarget(part), missing, on_progress=self._count
            )
            await origin.end_lease(manifest.step)
        return origin

    async def _plan(self, part: PartFile, manifest: Manifest) -> list[int]:
        """Return the chunks that an earlier fetch has not left in the part file."""
        self._at("plan")
        missing = []
        for chunk in range(len(manifest.grid)):
            known = chunk in part.candidates
            if known and await self.peer.bridge.run(part.holds, chunk):
                start, stop = manifest.grid.range(chunk)
                self._advance(stop - start, 1)
            else:
                missing.append(chunk)
        return missing

    def _at(self, stop: str, **facts: int) -> None:
        self.deadline.stop = stop
        self.state = replace(self.state, stop=stop, **facts)
        self.bar(self.state)

    def _count(self, nbytes: int, chunks: int) -> None:
        self.fetched += nbytes
        elapsed = max(time.monotonic() - self.fetching_since, 1e-6)
        self.state = replace(self.state, rate=max(self.fetched, 0) / elapsed)
        self._advance(nbytes, chunks)

    def _advance(self, nbytes: int, chunks: int) -> None:
        self.state = replace(
            self.state,
            bytes_done=self.state.bytes_done + nbytes,
            chunks_done=self.state.chunks_done + chunks,
        )
        self.bar(self.state)

    def _summary(self, manifest: Manifest, origin: Sources) -> str:
        elapsed = time.monotonic() - self.started
        kept = manifest.segment_bytes - self.fetched
        resumed = f" ({format_bytes(kept)} were there already)" if kept else ""
        arrived = f"{format_bytes(self.fetched)}{resumed}"
        given = "".join(
            f"\n{format_bytes(nbytes)} of it from {url}"
            for url, nbytes in origin.given().items()
        )
        return (
            f"{self.target}: step {manifest.step}, snapshot {manifest.snapshot_id}\n"
            f"{arrived} at {format_bytes(self.state.rate)}/s, verified; on the disk "
            f"after {elapsed:.2f} s{given}"
        )
