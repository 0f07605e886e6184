"""Count the requests of a service, and report how each body that it sends has ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from aiockpt.events import LogLimit, TransferEvent, emit
from aiockpt.http.audit import VISIT
from aiockpt.http.body_writer import BodySender, Outcome
from aiockpt.http.extension import Asked
from aiockpt.http.store import Statistics

_LEVELS: Final = {
    Outcome.SENT: logging.DEBUG,
    Outcome.GONE: logging.INFO,
    Outcome.STALLED: logging.WARNING,
    Outcome.EVICTED: logging.WARNING,
    Outcome.INTERRUPTED: logging.INFO,
}


class Traffic:
    """What a service has been asked for and has sent.

    Attributes:
        requests: Requests that have arrived.
        refused: Requests that were answered with an error.
        gone: Bodies, and waits for one, that ended because the client left.
        waiting: Requests that wait for a step.
        bytes_sent: Bytes of the bodies that have ended.
        limit: Says which log lines would only repeat others.
    """

    def __init__(self) -> None:
        self.requests = self.refused = self.gone = self.waiting = self.bytes_sent = 0
        self.limit = LogLimit()
        self._stalled = 0
        self._bodies: set[BodySender] = set()

    def statistics(self) -> Statistics:
        """Return the counters, with the bytes of the bodies that are being sent."""
        return Statistics(
            waiting=self.waiting,
            requests=self.requests,
            refused=self.refused,
            bytes_sent=self.bytes_sent + sum(body.sent for body in self._bodies),
            gone=self.gone,
            stalled=self._stalled,
        )

    def evict(self) -> None:
        """Abort all bodies that are being sent."""
        for body in tuple(self._bodies):
            body.evict()

    @contextmanager
    def sending(self, asked: Asked, body: BodySender, *, quiet: bool) -> Iterator[None]:
        """Account for a body that is sent during the block.

        If ``quiet``, no early end of it is a warning.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._bodies.add(body)
        try:
            yield
        finally:
            self._bodies.discard(body)
            self.bytes_sent += body.sent
            outcome = body.outcome or Outcome.GONE
            self.gone += outcome is Outcome.GONE
            self._stalled += outcome is Outcome.STALLED
            visit = asked.request[VISIT]
            visit.nbytes, visit.outcome = body.sent, outcome.value
            level = _LEVELS[outcome]
            if level == logging.WARNING and (quiet or not self.limit.passes(outcome)):
                level = logging.INFO
            emit(
                TransferEvent(
                    stop="evict" if outcome is Outcome.EVICTED else "serve",
                    step=asked.publication.step,
                    peer=asked.request.remote or "",
                    nbytes=body.sent,
                    seconds=loop.time() - began,
                    detail="" if outcome is Outcome.SENT else outcome.value,
                    level=level,
                )
            )
