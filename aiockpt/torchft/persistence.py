"""A receive that goes on until its deadline, whatever passes by itself meanwhile.

One local rank's receive that fails while another's succeeds can make torchft's manager
take the whole group for healed: weights then differ, and nothing says so. So an error
that may pass is not an answer as long as there is time. What cannot pass is one at
once, for everybody waits for it: the source has failed, or nobody is there any more.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from aiockpt.errors import (
    AiockptError,
    CheckpointChangedError,
    PeerUnreachableError,
    TransferInterruptedError,
    TransferStalledError,
    TransferTimeoutError,
)

__all__ = ["passes", "receive"]

T = TypeVar("T")

_PASSING = (
    CheckpointChangedError,
    PeerUnreachableError,
    TransferInterruptedError,
    TransferStalledError,
)
_PAUSE = 0.1

logger = logging.getLogger("aiockpt")


async def receive(fetch: Callable[[float], Awaitable[T]], timeout: float) -> T:
    """Return what ``fetch(seconds_left)`` does, which is called until it succeeds.

    Raises:
        TransferTimeoutError: the deadline passed; it names the last error.
        AiockptError: one that does not pass.
    """
    loop = asyncio.get_running_loop()
    deadline, left, last = loop.time() + timeout, timeout, ""
    while True:
        try:
            return await fetch(left)
        except TransferTimeoutError as late:
            last = late.last_error or last
            raise TransferTimeoutError(
                late.stop, timeout, what=late.what, last_error=last
            ) from late
        except AiockptError as error:
            if not passes(error):
                raise
            last = str(error)
            logger.info("receiving again: %s", error)
        await asyncio.sleep(_PAUSE)
        left = max(deadline - loop.time(), 0.0)


def passes(error: AiockptError) -> bool:
    """Tell whether to try again after an error that a transport has given up on.

    A host that refuses the connection for so long is there, and the process is not.
    """
    return isinstance(error, _PASSING) and not any(map(_is_refusal, _causes(error)))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
