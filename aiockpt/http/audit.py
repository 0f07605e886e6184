"""Who fetched what: one line for each answer, on a logger of its own.

``aiockpt.audit`` gets a record for every request that a checkpoint's bytes, or a
refusal for lack of a token, answered. The record's argument is an :class:`Access`,
for programs that want more than a line. All is at ``INFO``, so it is off until somebody
turns it on.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import web

__all__ = ["VISIT", "Access", "Auditor", "Visit"]

logger = logging.getLogger("aiockpt.audit")

_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, 421)
_BURST = 20  # lines about refusals in one period; whoever scans a port sends thousands
_PERIOD = 60.0
_LONGEST = 200
_STEP = re.compile(r"[0-9]{1,19}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One request, and what it got.

    Attributes:
        peer: The address at the other end of the connection: behind a proxy, the
            proxy's; ``pid:`` and a number where a process of this host took memory.
        receiver: Whose token it was; empty for the token that is everybody's.
        method, path: What was asked for, without any query; ``LEND`` is memory.
        step: The step in the path.
        status: The HTTP status of the answer; 499 where the client left before it.
        nbytes: Bytes of the body that were sent.
        outcome: ``sent``, ``refused``, or why the body was not sent whole: ``gone``,
            ``stalled``, ``evicted``; ``lent`` for memory.
    """

    peer: str
    receiver: str
    method: str
    path: str
    step: int | None
    status: int
    nbytes: int
    outcome: str

    def __str__(self) -> str:
        step = "-" if self.step is None else self.step
        return (
            f"peer={self.peer or '-'} receiver={self.receiver or '-'} "
            f"{self.method} {self.path!r} step={step} status={self.status} "
            f"bytes={self.nbytes} {self.outcome}"
        )


@dataclass(slots=True)
class Visit:
    """What is learnt of one request while it is answered."""

    receiver: str = ""
    status: int = 499
    nbytes: int = 0
    outcome: str = ""

    def access(self, request: web.Request) -> Access:
        """Return the record of it."""
        step = request.match_info.get("step", "")
        refused = self.status >= HTTPStatus.BAD_REQUEST
        return Access(
            peer=request.remote or "",
            receiver=self.receiver,
            method=request.method[:_LONGEST],
            path=request.rel_url.raw_path[:_LONGEST],
            step=int(step) if _STEP.fullmatch(step) else None,
            status=self.status,
            nbytes=self.nbytes,
            outcome=self.outcome or ("refused" if refused else "sent"),
        )


VISIT: web.RequestKey[Visit] = web.RequestKey("aiockpt.visit", Visit)
"""Where a request keeps it."""


class Auditor:
    """Logs accesses at INFO; of refusals a bounded number, and the rest as a count."""

    def __init__(self) -> None:
        self._since = -_PERIOD
        self._refusals = 0

    def __repr__(self) -> str:
        return f"<Auditor refusals={self._refusals}>"

    def note(self, access: Access) -> None:
        """Log one access."""
        if access.status in _REFUSED:
            self._refuse(access)
        elif access.nbytes or access.status < HTTPStatus.BAD_REQUEST:
            logger.info("%s", access)
        else:
            logger.debug("%s", access)

    def _refuse(self, access: Access) -> None:
        now = time.monotonic()
        if now - self._since >= _PERIOD:
            if self._refusals > _BURST:
                logger.info("%d more were refused", self._refusals - _BURST)
            self._since, self._refusals = now, 0
        self._refusals += 1
        if self._refusals <= _BURST:
            logger.info("%s", access)
