"""The demo's receiving process: two receives, the second through a cut connection."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiockpt.cli.demo_state import STEP, fingerprints
from aiockpt.cli.progress import ProgressBar
from aiockpt.cli.text import format_bytes
from aiockpt.errors import StateDictError, WorkerError
from aiockpt.events import Progress, TransferEvent, add_hook
from aiockpt.http.options import Server
from aiockpt.http.transport import HTTPTransport
from aiockpt.testing.faults import Fault, FaultProxy, Pipe

__all__ = ["receive_twice"]

_LONGEST_OFFER = 1 << 26


@dataclass(frozen=True, slots=True)
class _Offer:
    """What the sending process says."""

    metadata: str
    staged_in: float
    fingerprints: dict[str, str]


@dataclass(slots=True)
class _Received:
    """How a receive went."""

    state: object
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.nbytes / self.seconds / 1e9
        return f"{format_bytes(self.nbytes)} in {self.seconds:.2f} s ({rate:.2f} GB/s)"


async def receive_twice(model: Path, size: int) -> int:
    """Receive, cut, resume, compare; return the exit code.

    Args:
        model: The model's file.
        size: The bytes of its tensors.
    """
    async with _sender(model) as offer:
        count = len(offer.fingerprints)
        print(f"sender    another process; staged in {offer.staged_in:.2f} s")
        plain = await _receive(offer.metadata)
        print(
            f"state     {format_bytes(plain.nbytes)}, {plain.nbytes / size:.1f} times "
            "the model: each parameter, and the two moments that AdamW keeps of it"
        )
        print(f"received  {plain}, undisturbed")
        wrong = _differences(plain.state, offer)
        plain.state = None
        wrong |= await _receive_cut(offer, plain.nbytes)
    if wrong:
        print(f"WRONG     {len(wrong)} of {count} values differ: {sorted(wrong)[:5]}")
        return 1
    print(f"verified  both times, all {count} tensors and values are the sender's")
    return 0


async def _receive_cut(offer: _Offer, nbytes: int) -> set[str]:
    """Receive through connections that end half way; return what differs then."""
    cutter = _Cutter(nbytes // 2)
    target = urlsplit(offer.metadata)
    retries: list[TransferEvent] = []
    remove = add_hook(lambda event: retries.append(event) if _is_retry(event) else None)
    try:
        host, port = target.hostname or "", target.port or 0
        async with FaultProxy(host, port, otherwise=cutter) as proxy:
            cutter.cut_all = proxy.cut_all
            received = await _receive(proxy.url(f"{target.path}#{target.fragment}"))
            await asyncio.gather(*cutter.tasks)
    finally:
        remove()
    print(
        f"resumed   {received}, all connections cut after "
        f"{format_bytes(cutter.cut_at)}, {len(retries)} requests made again"
    )
    return _differences(received.state, offer)


def _is_retry(event: TransferEvent) -> bool:
    return event.stop == "retry"


@dataclass(slots=True)
class _Cutter(Fault):
    """Ends all connections of a proxy once half of the bytes have come through it."""

    half: int
    cut_all: Callable[[], Coroutine[Any, Any, None]] | None = None
    passed: int = 0
    cut_at: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        """Send it; whoever sends the last byte of the half goes no further."""
        await pipe.send(data)
        self.passed += len(data)
        if self.cut_all and not self.cut_at and self.passed >= self.half:
            self.cut_at = self.passed
            self.tasks.append(asyncio.create_task(self.cut_all()))
            await pipe.stall()


async def _receive(metadata: str) -> _Received:
    bar = ProgressBar(sys.stderr)
    last = Progress(stop="")

    def progress(now: Progress) -> None:
        nonlocal last
        last = now
        bar(now)

    async with HTTPTransport[object](server=Server(host="127.0.0.1")) as transport:
        started = time.monotonic()
        try:
            state = await transport.recv_checkpoint(
                0, metadata, STEP, progress=progress
            )
        finally:
            bar.close()
        elapsed = time.monotonic() - started
    return _Received(state, last.bytes_total, elapsed)


def _differences(state: object, offer: _Offer) -> set[str]:
    """Return the paths whose fingerprints are not those of the sender."""
    found = set(fingerprints(state)) ^ set(offer.fingerprints.items())
    return {path for path, _ in found}


@asynccontextmanager
async def _sender(model: Path) -> AsyncIterator[_Offer]:
    """Give the offer of a new process, which ends with the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "aiockpt.cli.demo_sender",
        str(model),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LONGEST_OFFER,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = await process.stdout.readline()
        if not said:
            raise WorkerError("the sending process died", exitcode=process.returncode)
        offer = json.loads(said)
        if "error" in offer:
            raise StateDictError(offer["error"])
        yield _Offer(**offer)
    finally:
        process.stdin.close()
        await process.wait()
