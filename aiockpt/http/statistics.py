"""What there is to see of a transport, in one record."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from aiockpt.http.handlers import ServerStatistics
from aiockpt.http.offering import Offers
from aiockpt.runtime.bridge import Bridge, BridgeStatistics

__all__ = ["Serves", "TransportStatistics", "survey"]


class Serves(Protocol):
    """An endpoint, as far as it counts."""

    @property
    def store(self) -> Offers:
        """What it serves from."""

    def statistics(self) -> ServerStatistics:
        """Return what it counts."""

    @property
    def lent(self) -> int:
        """How often a checkpoint was lent to a process of this host."""


class TransportStatistics(NamedTuple):
    """A moment of a transport; what it counts, it counts from its beginning.

    Attributes:
        step: The step that is offered; None for none.
        readers: Bodies that are being sent, of any checkpoint.
        oldest_reader: For how many seconds the longest of them has been.
        superseded: Checkpoints that are no longer offered, and are still being read.
        waiting: Requests that wait for a step.
        requests: Requests that came.
        refused: Those that were answered with an error.
        bytes_sent: Bytes of bodies that were sent.
        gone: Bodies whose client left, or whose connection broke.
        stalled: Bodies that were given up since nothing moved.
        evicted: Readers that were cut when their grace was over.
        lent: Checkpoints that processes of this host took as memory.
        threads: The calls in the threads that stage, verify and load.
    """

    step: int | None
    readers: int
    oldest_reader: float
    superseded: int
    waiting: int
    requests: int
    refused: int
    bytes_sent: int
    gone: int
    stalled: int
    evicted: int
    lent: int
    threads: BridgeStatistics


def survey(endpoint: Serves, bridge: Bridge) -> TransportStatistics:
    """Return what a transport's parts count."""
    store, served = endpoint.store.statistics(), endpoint.statistics()
    return TransportStatistics(
        step=store.step,
        readers=store.readers,
        oldest_reader=store.oldest_reader,
        superseded=store.superseded,
        waiting=served.waiting,
        requests=served.requests,
        refused=served.refused,
        bytes_sent=served.bytes_sent,
        gone=served.gone,
        stalled=served.stalled,
        evicted=store.evicted,
        lent=endpoint.lent,
        threads=bridge.statistics(),
    )
