"""What is measured for each shape, between one sender and one receiver."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiockpt.bench.memory import FRESH, KINDS, TOUCHED
from aiockpt.bench.process import Worker
from aiockpt.bench.rival import CHUNKS
from aiockpt.bench.rounds import Candidate, Note, take_turns
from aiockpt.bench.rows import (
    BESIDE,
    COPIED,
    COPY_DIGESTED,
    RAW_DIGESTED,
    SHARED,
)
from aiockpt.bench.shapes import Shape
from aiockpt.bench.statistics import Sample, Series
from aiockpt.bench.timed import Cost
from aiockpt.memory.arena import CAN_LEND

__all__ = ["Pair", "Plan", "idle", "measure_shape", "sample_of"]

_IDLE = 0.5
_THREADS = 2  # as many as a transport stages in


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do with every shape.

    Attributes:
        size: About how many bytes a state dict has.
        repeat: How often every candidate is measured.
        connections: How many sockets the raw copies use; the best counts.
        rival: Whether to measure torchft.
        brief: Whether to leave out what a conclusion does not need.
        seconds: How long there may be further rounds.
    """

    size: int
    repeat: int
    connections: Sequence[int]
    rival: bool
    brief: bool = False
    seconds: float = math.inf


def sample_of(sender: Cost, receiver: Cost, latencies: Sequence[float] = ()) -> Sample:
    """Return what a transfer cost both ends; its time is the receiver's."""
    return Sample(
        seconds=receiver["seconds"],
        sender_cpu=sender["cpu"],
        receiver_cpu=receiver["cpu"],
        sender_lags=sender["lags"],
        receiver_lags=receiver["lags"],
        latencies=latencies,
    )


class Pair:
    """A sender and a receiver that have been told the shape."""

    def __init__(
        self, sender: Worker, receiver: Worker, shape: Shape, size: int
    ) -> None:
        self.sender, self.receiver, self.shape = sender, receiver, shape
        sender.call("prepare", key=shape.key, size=size)
        receiver.call("prepare", key=shape.key, size=size)

    def received(
        self, do: str, *, touched: bool = False, **arguments: object
    ) -> Sample:
        """Have the receiver do it; count what it costs both."""
        self.receiver.call("ready", touched=touched)
        self.sender.call("watch")
        try:
            mine: Cost = self.receiver.call(do, **arguments)
        finally:
            theirs: Cost = self.sender.call("watched")
        return sample_of(theirs, mine)

    def sent(self, do: str, **arguments: object) -> Sample:
        """Have the sender do it, alone."""
        cost: Cost = self.sender.call(do, **arguments)
        return Sample(
            seconds=cost["seconds"], sender_cpu=cost["cpu"], sender_lags=cost["lags"]
        )

    def raw(self, kind: str, connections: Sequence[int]) -> list[Candidate]:
        """Return the raw copies into memory of a kind."""
        port = self.sender.call("offer_raw")
        return [
            Candidate(f"raw socket, {kind}, x{count}", self._raw(port, count, kind))
            for count in connections
        ]

    def raw_digested(self, connections: Sequence[int]) -> Candidate:
        """Return the raw copy with the most connections, and digests beside it."""
        port, count = self.sender.call("offer_raw"), connections[-1]
        work = self._raw(port, count, TOUCHED, digest=True)
        return Candidate(f"{RAW_DIGESTED}, x{count}", work)

    def _raw(
        self, port: int, count: int, kind: str, *, digest: bool = False
    ) -> Callable[[], Sample]:
        return lambda: self.received(
            "receive_raw",
            touched=kind == TOUCHED,
            port=port,
            connections=count,
            kind=kind,
            digest=digest,
        )

    def ours(self, name: str, *, into: bool) -> Candidate:
        """Return a receive by this library."""
        metadata = self.sender.call("offer")
        return Candidate(
            name,
            lambda: self.received(
                "receive", touched=into, metadata=metadata, into=into
            ),
        )

    def rivals(self) -> list[Candidate]:
        """Return the receives by torchft."""
        names = tuple(f"torchft, num_chunks={chunks}" for chunks in CHUNKS)
        return [
            Candidate(name, self._rival(chunks), names)
            for name, chunks in zip(names, CHUNKS, strict=True)
        ]

    def _rival(self, chunks: int) -> Callable[[], Sample]:
        metadata = self.sender.call("offer_rival", num_chunks=chunks)
        return lambda: self.received(
            "receive_rival", metadata=metadata, num_chunks=chunks
        )


def idle(pair: Pair) -> Candidate:
    """Return what the tickers do while nothing else happens."""
    return Candidate("idle", lambda: pair.received("idle", seconds=_IDLE))


def measure_shape(pair: Pair, plan: Plan, note: Note) -> dict[str, Series]:
    """Measure everything that has a time."""
    found: dict[str, Series] = {}
    until = time.monotonic() + plan.seconds
    for phase in (_receive_fresh, _receive_in_place, _same_host, _stage):
        if plan.brief and phase is _same_host:
            continue
        candidates = phase(pair, plan)
        turns = take_turns(candidates, plan.repeat, note, until=until)
        for name, samples in turns.items():
            found[name] = Series(name, pair.shape.nbytes, samples)
        pair.sender.call("retract")
    pair.receiver.call("release")
    return found


def _receive_fresh(pair: Pair, plan: Plan) -> list[Candidate]:
    return [
        idle(pair),
        *pair.raw(FRESH, plan.connections),
        pair.ours("aiockpt, fresh", into=False),
        *(pair.rivals() if plan.rival else ()),
    ]


def _receive_in_place(pair: Pair, plan: Plan) -> list[Candidate]:
    pair.receiver.call("make_template")
    return [
        *pair.raw(TOUCHED, plan.connections),
        pair.raw_digested(plan.connections),
        pair.ours("aiockpt, in place", into=True),
    ]


def _same_host(pair: Pair, _: Plan) -> list[Candidate]:
    if not CAN_LEND:
        return []
    metadata = pair.sender.call("lend")
    return [
        Candidate(BESIDE, _memcpy(pair, TOUCHED)),
        Candidate(SHARED, _borrow(pair, metadata, into=False)),
        Candidate(COPIED, _borrow(pair, metadata, into=True)),
    ]


def _borrow(pair: Pair, metadata: str, *, into: bool) -> Callable[[], Sample]:
    return lambda: pair.received("borrow", touched=True, metadata=metadata, into=into)


def _stage(pair: Pair, plan: Plan) -> list[Candidate]:
    pair.receiver.call("release")
    return [
        *(Candidate(f"memcpy, {kind}", _memcpy(pair, kind)) for kind in KINDS),
        Candidate(
            f"{COPY_DIGESTED}, x{_THREADS}",
            lambda: pair.sent("memcpy_and_digest", threads=_THREADS),
        ),
        Candidate("aiockpt, stage cold", lambda: pair.sent("stage_cold")),
        Candidate("aiockpt, stage warm", lambda: pair.sent("stage_warm")),
    ]


def _memcpy(pair: Pair, kind: str) -> Callable[[], Sample]:
    return lambda: pair.sent("memcpy", kind=kind)
