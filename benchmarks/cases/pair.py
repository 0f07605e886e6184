"""A sender and a receiver, and what most cases measure between them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.measures import Candidate, Cost, Sample, Series, percentile
from benchmarks.references import TORCHFT_CHUNKS
from benchmarks.report import Row
from benchmarks.state import TOUCHED, Shape
from benchmarks.worker import Worker

__all__ = [
    "RAW_DIGESTED",
    "Pair",
    "Phases",
    "Plan",
    "rows_of_memory",
    "rows_of_ticker",
    "sample_of",
]

RAW_DIGESTED = "raw socket and digests, touched"
"""The name of sockets that digest what they receive and do nothing else."""

Phases = Generator[list[Candidate], None, None]
"""What a case yields: the candidates of one phase after the other."""

_IDLE = 0.5  # seconds
_MAX_FRESH = 5.0  # percent of the state dict
_MAX_IN_PLACE = 64.0  # MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do with every shape.

    Attributes:
        size: About how many bytes a state dict has.
        repeat: How often every candidate is measured.
        connections: How many sockets the raw copies use; the best counts.
        torchft: Whether to measure torchft, and other rivals.
    """

    size: int
    repeat: int
    connections: Sequence[int]
    torchft: bool


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
        self, sender: Worker, receiver: Worker, shape: Shape, plan: Plan
    ) -> None:
        self.sender, self.receiver = sender, receiver
        for end in (sender, receiver):
            end.call("prepare", key=shape.key, size=plan.size)

    def received(
        self,
        do: str,
        *,
        touched: bool = False,
        cold: bool = False,
        **arguments: Any,
    ) -> Sample:
        """Have the receiver do it; count what it costs both."""
        self.receiver.call("ready", touched=touched, cold=cold)
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

    def idle(self) -> Candidate:
        """Return what the tickers do while nothing else happens."""
        return Candidate(
            "idle", lambda: self.received("idle", seconds=_IDLE), empty=True
        )

    def ours(self, name: str, *, into: bool, **arguments: Any) -> Candidate:
        """Return a receive by this library of what the sender offers now."""
        metadata = self.sender.call("offer")
        return Candidate(
            name,
            lambda: self.received(
                "receive", touched=into, metadata=metadata, into=into, **arguments
            ),
            ours=True,
        )

    def raw(
        self, kind: str, connections: Sequence[int], *, digest: bool = False
    ) -> list[Candidate]:
        """Return the raw copies into memory of a kind."""
        port = self.sender.call("offer_raw")
        prefix = RAW_DIGESTED if digest else f"raw socket, {kind}"

        def run(count: int) -> Callable[[], Sample]:
            return lambda: self.received(
                "receive_raw",
                touched=kind == TOUCHED,
                port=port,
                connections=count,
                kind=kind,
                digest=digest,
            )

        return [Candidate(f"{prefix}, x{count}", run(count)) for count in connections]

    def torchft(self) -> list[Candidate]:
        """Return the receives by torchft."""

        def run(chunks: int) -> Callable[[], Sample]:
            metadata = self.sender.call("offer_torchft", num_chunks=chunks)
            return lambda: self.received(
                "receive_torchft", metadata=metadata, num_chunks=chunks
            )

        names = tuple(f"torchft, num_chunks={chunks}" for chunks in TORCHFT_CHUNKS)
        return [
            Candidate(name, run(chunks), names)
            for name, chunks in zip(names, TORCHFT_CHUNKS, strict=True)
        ]


def rows_of_memory(
    shape: Shape, found: Mapping[str, Series], rival: str
) -> Iterator[Row]:
    """Yield the receiver's peak memory beyond the state dict."""
    state = found["memory, in place"].figure("state")
    fresh = found["memory, fresh"].figure("beyond") - state
    theirs = found.get("memory, torchft")
    yield Row(
        what="peak memory beyond the state dict, fresh",
        shape=str(shape),
        value=100 * fresh / state,
        unit="%",
        reference=rival if theirs else "",
        reference_value=(
            100 * (theirs.figure("beyond") - state) / state if theirs else None
        ),
        at_most=_MAX_FRESH,
    )
    yield Row(
        what="peak memory beyond the state dict, in place",
        shape=str(shape),
        value=found["memory, in place"].figure("beyond") / 2**20,
        unit="MiB",
        at_most=_MAX_IN_PLACE,
    )


def rows_of_ticker(
    shape: Shape, found: Mapping[str, Series], at_most: float
) -> Iterator[Row]:
    """Yield the lag of the tickers during transfers, beside that of an idle loop."""
    idle = found["idle"]
    for way in ("fresh", "in place"):
        during = found[f"aiockpt, {way}"]
        for loop, lags, quiet in (
            ("serving", during.sender_lags, idle.sender_lags),
            ("receiving", during.receiver_lags, idle.receiver_lags),
        ):
            yield Row(
                what=f"ticker lag p99, {loop} loop, {way}",
                shape=str(shape),
                value=1e3 * percentile(lags, 0.99),
                unit="ms",
                reference="idle loop",
                reference_value=1e3 * percentile(quiet, 0.99),
                at_most=at_most,
            )
