"""Who fetched what: one line for each answer, on a logger of its own.

The logger ``aiockpt.audit`` gets a record for each request. The argument of the record
is an :class:`Access`, for programs that want more than a line. Successes, answers with
bytes and refusals of a token are at ``INFO``, so they are off by default. Other errors
and looks at the status page are at ``DEBUG``. Of many refusals, a minute's first 20
have records, and a line counts the rest.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from aiohttp import web

logger = logging.getLogger("aiockpt.audit")

_REFUSED: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, 421)
STATUS: Final = "status"
"""The outcome of a look at the status page, which asks again each second."""
_LOGGED_PER_PERIOD: Final = 20  # refusals; a port scan sends thousands
_PERIOD_S: Final = 60.0
_MAX_CHARACTERS: Final = 200  # of a method, and of a path
_STEP: Final = re.compile(r"[0-9]{1,19}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One request, and how it was answered.

    Attributes:
        peer: The address at the other end of the connection: behind a proxy, the
            proxy's; ``pid:`` and a number if a process of this host took memory.
        receiver: The receiver that the token was made for; empty for the shared token.
        method, path: What was asked for, without any query; ``LEND`` for memory.
        step: The step in the path.
        status: The HTTP status of the answer; 499 if the client left before it.
        nbytes: Bytes of the body that were sent.
        outcome: ``sent``, ``refused``, or why the body was not sent whole: ``gone``,
            ``stalled``, ``evicted``; ``lent`` for memory; ``status`` for a look at the
            status page, which is a record of level ``DEBUG``.
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
    """What is known of one request while it is answered.

    Attributes:
        receiver, nbytes, status, outcome: As of `Access`.
        lapses: When the request's own token ends, in seconds since 1970.
    """

    receiver: str = ""
    lapses: float = math.inf
    status: int = 499
    nbytes: int = 0
    outcome: str = ""

    def access(self, request: web.Request) -> Access:
        """Return the record of the request."""
        step = request.match_info.get("step", "")
        refused = self.status >= HTTPStatus.BAD_REQUEST
        return Access(
            peer=request.remote or "",
            receiver=self.receiver,
            method=request.method[:_MAX_CHARACTERS],
            path=request.rel_url.raw_path[:_MAX_CHARACTERS],
            step=int(step) if _STEP.fullmatch(step) else None,
            status=self.status,
            nbytes=self.nbytes,
            outcome=self.outcome or ("refused" if refused else "sent"),
        )


VISIT: web.RequestKey[Visit] = web.RequestKey("aiockpt.visit", Visit)
"""The key of a request's :class:`Visit`."""


class Auditor:
    """Logs accesses; of many refusals it logs some, and counts the others."""

    def __init__(self) -> None:
        self._since = -_PERIOD_S
        self._refusals = 0

    @contextmanager
    def visit(self, request: web.Request) -> Iterator[Visit]:
        """Log a request at the end of the block, which fills in the visit."""
        visit = request[VISIT] = Visit()
        try:
            yield visit
        finally:
            self.note(visit.access(request))

    def note(self, access: Access) -> None:
        """Log one access."""
        if access.status in _REFUSED:
            self._refuse(access)
        elif access.outcome != STATUS and (
            access.nbytes or access.status < HTTPStatus.BAD_REQUEST
        ):
            logger.info("%s", access)
        else:
            logger.debug("%s", access)

    def _refuse(self, access: Access) -> None:
        now = time.monotonic()
        if now - self._since >= _PERIOD_S:
            if self._refusals > _LOGGED_PER_PERIOD:
                logger.info("%d more were refused", self._refusals - _LOGGED_PER_PERIOD)
            self._since, self._refusals = now, 0
        self._refusals += 1
        if self._refusals <= _LOGGED_PER_PERIOD:
            logger.info("%s", access)
