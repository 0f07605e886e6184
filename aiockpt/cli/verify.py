"""``aiockpt verify``: every chunk of a checkpoint, by its digest."""

from __future__ import annotations

import argparse
import asyncio
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from aiockpt.cli.arguments import UsageError
from aiockpt.cli.paths import checkpoint_or_file
from aiockpt.cli.text import counted, format_bytes
from aiockpt.errors import AiockptError, IntegrityError, StepNotFoundError
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.format.manifest import ForeignHeader, Manifest
from aiockpt.http.protocol import Address, Origin
from aiockpt.runtime.words import printable
from aiockpt.storage.checkpoint_file import verify_chunks
from aiockpt.storage.directory import expanded
from aiockpt.storage.interface import storage_at

if TYPE_CHECKING:
    from aiockpt.cli.peer import SenderClient
    from aiockpt.http.peers import Peers

_MAX_CHUNKS_SHOWN = 10
_WINDOW_BYTES = 256 << 20  # of a peer's checkpoint, in memory at a time
_LATE_S = 2.0  # that a sender may publish a step later than the others
_MAX_TRIES = 20  # to find a step that all senders keep


def run(arguments: argparse.Namespace) -> int:
    """Verify everything, also after the first damage."""
    what: Path | list[Address] = arguments.checkpoint
    if isinstance(what, list):
        return asyncio.run(_verify_served(what, arguments))
    if arguments.step is not None:
        raise UsageError("--step is for URLs: a file holds one step")
    found = checkpoint_or_file(what)
    if isinstance(found, Path):
        return _verify(found)
    codes = [
        _verify(found.path / (file.key or name), expected=file.snapshot)
        for name, file in sorted(found.files.items())
    ]
    return max(codes)


def _verify(path: Path, *, expected: str | None = None) -> int:
    """Verify one file; ``expected`` is the snapshot that it must be."""
    name = expanded(path)
    with storage_at(path).open() as file:
        header = file.header(limits=FILE_LIMITS)
        if isinstance(header, ForeignHeader):
            wrong = "well formed, but it has no digests to verify"
        elif expected not in (None, header.snapshot_id):
            wrong = f"it is snapshot {header.snapshot_id}, the marker names {expected}"
        elif not (wrong := _describe(verify_chunks(file, header), header)):
            print(_intact(name, header))
            return 0
    _complain(f"{name}: {wrong}")
    return 1


def _complain(what: str) -> None:
    print(f"aiockpt: error: {printable(what)}", file=sys.stderr)


def _intact(name: str, manifest: Manifest) -> str:
    return (
        f"{printable(name)}: {counted(len(manifest.grid), 'chunk')} of "
        f"{format_bytes(manifest.chunk_bytes)} and the header are intact; "
        f"step {manifest.step}, snapshot {manifest.snapshot_id}"
    )


def _describe(damage: Iterator[IntegrityError], manifest: Manifest) -> str:
    """Name the damaged chunks, and what the first one should have been; "" if none."""
    if (first := next(damage, None)) is None:
        return ""
    others = [error.chunk for error in islice(damage, _MAX_CHUNKS_SHOWN)]
    more = sum(1 for _ in damage)
    start, stop = manifest.grid.range(first.chunk or 0)
    base = manifest.header_bytes
    text = (
        f"chunk {first.chunk} of {len(manifest.grid)} (bytes {base + start} to "
        f"{base + stop}) has digest {first.actual}, expected {first.expected}"
    )
    if others:
        named = ", ".join(map(str, others)) + (", ..." if more else "")
        text += f"; {len(others) + more} more are damaged: {named}"
    return text


# ---------------------------------------------------------------------------- a peer


class _Window:
    """Memory for some of the chunks, which is used again for those after them."""

    def __init__(self, nbytes: int) -> None:
        self.start = 0
        self._memory = memoryview(mmap.mmap(-1, max(nbytes, 1)))

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return where the bytes ``[start, stop)`` of the data segment go."""
        return [self._memory[start - self.start : stop - self.start]]

    def check(self, start: int, stop: int) -> None:
        """Do nothing: a view keeps the memory."""


async def _verify_served(
    addresses: Sequence[Address], arguments: argparse.Namespace
) -> int:
    """Verify one step of all these senders; return the exit code.

    If cancelled, nothing is left behind.
    """
    from aiockpt.cli.peer import open_peer  # needs aiohttp, and a file does not

    async with open_peer(addresses, arguments) as peer:
        return await peer.receive(partial(_verify_step, peer))


async def _verify_step(peer: SenderClient, step: int) -> int:
    """Verify a step of one sender after the other; all of them keep it meanwhile.

    If several senders replace it before all keep it, a newer one is verified instead.

    Raises:
        StepNotFoundError: the only sender has replaced it by a newer one.
        AiockptError: what is wrong, if there is only one sender.
    """
    errors: dict[Origin, AiockptError] = {}
    is_alone = len(peer.origins) == 1
    for left in reversed(range(_MAX_TRIES)):
        async with AsyncExitStack() as stack:
            kept = await _keep(peer, step, errors, stack)
            newer = {
                origin: error.serving
                for origin, error in errors.items()
                if isinstance(error, StepNotFoundError)
                and error.serving is not None
                and error.serving > step
            }
            if newer and left and peer.step is None and not is_alone:
                step = max(newer.values())
                for origin in newer:
                    del errors[origin]
                continue
            peer.deadline.phase = "fetch_chunk"
            for origin in peer.origins:
                try:
                    if origin in errors:
                        raise errors[origin]
                    manifest, peers = kept[origin]
                    await _read_all(manifest, peers)
                    print(_intact(origin.base_url, manifest), flush=True)
                except AiockptError as error:
                    if is_alone:
                        raise
                    _complain(f"{origin.base_url}: {error}")
                    errors[origin] = error
            break
    return int(bool(errors))


async def _keep(
    peer: SenderClient,
    step: int,
    errors: dict[Origin, AiockptError],
    stack: AsyncExitStack,
) -> dict[Origin, tuple[Manifest, Peers]]:
    """Ask all senders at once to keep a step until the end of ``stack``.

    Those with an error are not asked, and those that do not keep it get one.
    """
    from aiockpt.runtime.tasks import run_all  # needs anyio, and a file does not

    kept: dict[Origin, tuple[Manifest, Peers]] = {}
    late = _LATE_S if len(peer.origins) > 1 and peer.step is None else 0.0

    async def ask(origin: Origin) -> None:
        try:
            one = replace(peer, origins=[origin])
            found = await one.find(step, keep=True, late=late)
            reading = await stack.enter_async_context(one.reading(found))
            kept[origin] = found.manifest, reading.peers
        except AiockptError as error:
            errors[origin] = error

    await run_all([partial(ask, each) for each in peer.origins if each not in errors])
    return kept


async def _read_all(manifest: Manifest, peers: Peers) -> None:
    """Receive every chunk, which verifies it, and keep none.

    Raises:
        IntegrityError: a chunk came three times with a wrong digest.
    """
    from aiockpt.http.download import Download
    from aiockpt.transfer.source import PlainDestination

    count = len(manifest.grid)
    many = max(_WINDOW_BYTES // manifest.chunk_bytes, 1)
    window = _Window(min(many * manifest.chunk_bytes, manifest.segment_bytes))
    target = PlainDestination(window)
    for first in range(0, count, many):
        chunks = range(first, min(first + many, count))
        window.start = manifest.grid.range(first)[0]
        await Download(peers, manifest.outline, target, chunks, lambda *_: None).run()
