"""torchft's interface over any transport of ours.

A receive goes on until its deadline, whatever passes by itself meanwhile. If one local
rank's receive fails while another's succeeds, torchft's manager can take the whole
group for healed: weights then differ, and nothing says so. So `receive` tries again
after an error that may pass, as long as there is time. An error that cannot pass is
raised at once, because everybody waits for it: the source has failed, or its process
is gone.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from torchft.checkpointing.transport import CheckpointTransport

from aiockpt import transport as awaited
from aiockpt.errors import (
    AiockptError,
    CheckpointChangedError,
    PeerUnreachableError,
    TransferInterruptedError,
    TransferStalledError,
    TransferTimeoutError,
)
from aiockpt.runtime.sync_facade import SyncFacade
from aiockpt.state.flatten import ready_for_threads
from aiockpt.transport import Timeout, seconds

__all__ = ["Adapter", "adapt", "passes", "receive"]

T = TypeVar("T")

_STARTING = 30.0
_RETRACTING = 1.0  # a turn of the loop, wherever nobody reads live memory
_DRAINING = 30.0  # transports bound this by a grace of their own
_PROMPT = 0.2
_PATIENT = 30.0
_PAUSE = 0.1  # between two tries of a receive

_PASSING = (
    CheckpointChangedError,
    PeerUnreachableError,
    TransferInterruptedError,
    TransferStalledError,
)

logger = logging.getLogger("aiockpt")


class Adapter(CheckpointTransport[T]):
    """A transport of ours, called from threads that have no event loop.

    It may be called from any thread. What is raised is an ``Exception`` of this
    package, and a timeout says "timed out".

    Args:
        transport: It is started here, belongs to the adapter's loop from then on, and
            is shut down with it.
        timeout: Deadline of a send or a receive that is called without one.
        lingers: Whether :meth:`disallow_checkpoint` may leave readers to finish by
            themselves, because what they read is a copy.
    """

    def __init__(
        self,
        transport: awaited.CheckpointTransport[T],
        *,
        timeout: Timeout = 60.0,
        lingers: bool = False,
    ) -> None:
        self._transport = transport
        self._timeout = seconds(timeout)
        self._lingers = lingers
        self._offered = False
        self._retractions: set[asyncio.Task[None]] = set()
        abrupt = partial(transport.shutdown, wait=False)
        self._facade = SyncFacade(type(transport).__name__, at_exit=abrupt)
        try:
            start = partial(self._facade.call, timeout=_STARTING, stop="start")
            self._metadata: str = start(self._start)
        except BaseException:
            self.shutdown(wait=False)
            raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} over {self._transport}>"

    def metadata(self) -> str:
        """Return where a peer finds this transport; the same string at every call."""
        return self._metadata

    def send_checkpoint(
        self,
        dst_ranks: list[int],
        step: int,
        state_dict: T,
        timeout: Timeout | None = None,
    ) -> None:
        """Offer a copy of ``state_dict`` as ``step``, and do not wait for receivers.

        What the calling thread's stream has been given is waited for. If this fails,
        the receivers that wait are told.
        """
        limit = self._timeout if timeout is None else seconds(timeout)
        sent: Any = ready_for_threads(state_dict)
        send = partial(self._transport.send_checkpoint, dst_ranks, step, sent)
        offer = partial(self._offer, partial(send, limit))
        self._facade.call(offer, timeout=limit, stop="stage")

    def disallow_checkpoint(self) -> None:
        """Offer nothing any more. Never raises, and costs nothing if nothing is.

        Those who read a copy have the transport's grace to finish, while this returns.
        Where they read live memory it waits until they are done or evicted.
        """
        if not self._offered:
            return
        limit = _RETRACTING if self._lingers else _DRAINING
        try:
            self._facade.call(self._retract, timeout=limit, stop="retract")
        except Exception as error:  # noqa: BLE001 - it would end a healthy replica
            logger.warning("%s: retracting failed: %s", self, error)

    def recv_checkpoint(
        self,
        src_rank: int,
        metadata: str,
        step: int,
        timeout: Timeout | None = None,
    ) -> T:
        """Return ``step`` from the peer that gave ``metadata``; it may be early.

        Whatever passes by itself is tried again until the deadline: a connection that
        breaks or stalls, a host that cannot be reached, a checkpoint that is replaced.
        """
        limit = self._timeout if timeout is None else seconds(timeout)
        fetch = self._fetching(src_rank, metadata, step)
        del metadata  # a traceback with local variables would show the token
        return self._facade.call(
            partial(receive, fetch, limit), timeout=limit, stop="recv"
        )

    def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002 - torchft's signature
        """End serving, the loop and its thread. Idempotent.

        With ``wait=False`` readers get no grace, and this returns at once: the end
        comes a moment later, by itself.
        """
        self._offered = False
        last = partial(self._transport.shutdown, wait=wait)
        self._facade.close(last, wait=_PATIENT if wait else _PROMPT)

    def _fetching(
        self, src_rank: int, metadata: str, step: int
    ) -> Callable[[float], Awaitable[T]]:
        # Not a partial: its repr, in a traceback, would show the token.
        return lambda timeout: self._transport.recv_checkpoint(
            src_rank, metadata, step, timeout
        )

    async def _start(self) -> str:
        await self._transport.__aenter__()
        return self._transport.metadata()

    async def _offer(self, send: Callable[[], Awaitable[None]]) -> None:
        # On the loop, as its undoing, so that both have one order.
        self._offered = True
        await send()

    async def _retract(self) -> None:
        self._offered = False
        retraction = asyncio.create_task(self._transport.disallow_checkpoint())
        self._retractions.add(retraction)
        retraction.add_done_callback(self._retracted)
        if self._lingers:
            await asyncio.sleep(0)  # nothing is offered from here on
        else:
            await asyncio.wait({retraction}, timeout=_DRAINING)

    def _retracted(self, retraction: asyncio.Task[None]) -> None:
        self._retractions.discard(retraction)
        if not retraction.cancelled() and (error := retraction.exception()):
            logger.warning("%s: retracting failed: %s", self, error)


def adapt(
    transport: awaited.CheckpointTransport[T], timeout: Timeout = 60.0
) -> Adapter[T]:
    """Return torchft's interface over a transport that has not been used yet.

    ``timeout`` is the deadline of a send or a receive that is called without one.
    """
    return Adapter(transport, timeout=timeout)


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
