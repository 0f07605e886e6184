"""The figures of a transport, in one record."""

from __future__ import annotations

from typing import NamedTuple

from aiockpt.http.server_process import AnyEndpoint
from aiockpt.runtime.bridge import Bridge, BridgeStatistics

__all__ = ["TransportStatistics", "survey"]


class TransportStatistics(NamedTuple):
    """The state of a transport at one moment; counters count from its beginning.

    Attributes:
        step: The published step; None if there is none.
        readers: Bodies that are being sent, of any checkpoint.
        oldest_reader: Seconds since the oldest of them began.
        superseded: Checkpoints that were replaced and are still being read.
        waiting: Requests that wait for a step.
        requests: Requests that came.
        refused: Requests that were answered with an error.
        bytes_sent: Bytes of bodies that were sent.
        gone: Bodies whose client left, or whose connection broke.
        stalled: Bodies that were aborted because nothing moved.
        evicted: Readers that were cut off when their grace was over.
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


def survey(endpoint: AnyEndpoint, bridge: Bridge) -> TransportStatistics:
    """Return the figures of a transport's parts."""
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
