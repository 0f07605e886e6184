"""torchft's interface over any transport of ours.

If the receive of one local rank fails while that of another succeeds, torchft's manager
can count the whole group as healed: the weights then differ, and nothing reports it. So
`receive` tries again after a temporary error until its deadline. It raises a permanent
error at once, because all ranks wait for it: the sender has failed, or its process is
gone.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Never, TypeVar

from torchft.checkpointing.transport import CheckpointTransport

from aiockpt import transport as awaited
from aiockpt.errors import Advice, AiockptError, TransferTimeoutError, advice
from aiockpt.runtime.sync_facade import SyncFacade
from aiockpt.state.flatten import ready_for_threads
from aiockpt.transport import Timeout, names_its_options, refuse_unknown, seconds

T = TypeVar("T")

_START_TIMEOUT_S = 30.0
_RETRACT_TIMEOUT_S = 1.0  # one turn of the loop is enough if receivers read a copy
_DRAIN_TIMEOUT_S = 30.0  # the transport's grace period ends it earlier
_ABRUPT_SHUTDOWN_S = 0.2  # with wait=False
_SHUTDOWN_S = 30.0
_RETRY_PAUSE_S = 0.1  # between two attempts of a receive

logger = logging.getLogger("aiockpt")


class Adapter(CheckpointTransport[T]):
    """A transport of ours, called from threads that have no event loop.

    Any thread may call it. All errors are exceptions of this package, and the message
    of a timeout contains "timed out".

    Args:
        transport: The adapter starts it, runs it on its own loop, and shuts it down.
        timeout: The default deadline of a send or a receive, in seconds or as a
            ``timedelta``.
        lingers: Whether :meth:`disallow_checkpoint` may return while receivers still
            read, because they read a copy.
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
            start = partial(self._facade.call, timeout=_START_TIMEOUT_S, phase="start")
            self._metadata: str = start(self._start)
        except BaseException:
            self.shutdown(wait=False)
            raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} over {self._transport}>"

    def metadata(self) -> str:
        """Return the string that a peer's :meth:`recv_checkpoint` needs; a constant."""
        return self._metadata

    def send_checkpoint(
        self,
        dst_ranks: list[int],
        step: int,
        state_dict: T,
        timeout: Timeout | None = None,
    ) -> None:
        """Publish a copy of ``state_dict`` as ``step``, without waiting for receivers.

        The copy begins after the work in the calling thread's current stream. If the
        call fails, receivers that wait for the step are told.
        """
        limit = self._timeout if timeout is None else seconds(timeout)
        sent: Any = ready_for_threads(state_dict)
        send = partial(self._transport.send_checkpoint, dst_ranks, step, sent)
        offer = partial(self._offer, partial(send, limit))
        self._facade.call(offer, timeout=limit, phase="stage")

    def disallow_checkpoint(self) -> None:
        """Retract the checkpoint. Never raises; cheap if nothing is published.

        Receivers get the transport's grace period. If they read a copy, the call
        returns at once. If they read live memory, it waits until they are done or their
        connections are cut.
        """
        if not self._offered:
            return
        limit = _RETRACT_TIMEOUT_S if self._lingers else _DRAIN_TIMEOUT_S
        try:
            self._facade.call(self._retract, timeout=limit, phase="retract")
        except Exception as error:  # noqa: BLE001 - it would end a healthy replica
            logger.warning("%s: retracting failed: %s", self, error)

    def recv_checkpoint(
        self,
        src_rank: int,
        metadata: str,
        step: int,
        timeout: Timeout | None = None,
    ) -> T:
        """Return ``step`` from the peer of ``metadata``; wait if it is not published.

        The call retries temporary errors until the deadline: a connection that breaks
        or stalls, an unreachable host, a checkpoint that is replaced.
        """
        limit = self._timeout if timeout is None else seconds(timeout)
        fetch = self._fetching(src_rank, metadata, step)
        del metadata  # a traceback with local variables would show the token
        return self._facade.call(
            partial(receive, fetch, limit), timeout=limit, phase="recv"
        )

    def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002 - torchft's signature
        """Stop serving, and end the loop and its thread. Idempotent.

        With ``wait=False`` receivers get no grace period, and the call returns at once;
        the shutdown finishes in the background.
        """
        self._offered = False
        last = partial(self._transport.shutdown, wait=wait)
        self._facade.close(last, wait=_SHUTDOWN_S if wait else _ABRUPT_SHUTDOWN_S)

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
        # On the loop, like the retraction, so that both keep their order.
        self._offered = True
        await send()

    async def _retract(self) -> None:
        self._offered = False
        retraction = asyncio.create_task(self._transport.disallow_checkpoint())
        self._retractions.add(retraction)
        retraction.add_done_callback(self._retracted)
        if self._lingers:
            await asyncio.sleep(0)  # nothing is published from here on
        else:
            await asyncio.wait({retraction}, timeout=_DRAIN_TIMEOUT_S)

    def _retracted(self, retraction: asyncio.Task[None]) -> None:
        self._retractions.discard(retraction)
        if not retraction.cancelled() and (error := retraction.exception()):
            logger.warning("%s: retracting failed: %s", self, error)


@names_its_options
def adapt(
    transport: awaited.CheckpointTransport[T],
    timeout: Timeout = 60.0,
    **unknown: Never,
) -> Adapter[T]:
    """Return torchft's interface over a transport that has not been used yet.

    ``timeout`` is the default deadline of a send or a receive.
    """
    refuse_unknown(adapt, unknown)
    return Adapter(transport, timeout=timeout)


async def receive(fetch: Callable[[float], Awaitable[T]], timeout: float) -> T:
    """Call ``fetch(seconds_left)`` until it succeeds, and return its result.

    Raises:
        TransferTimeoutError: the deadline passed; the message has the last error.
        AiockptError: a permanent error.
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
        await asyncio.sleep(_RETRY_PAUSE_S)
        left = max(deadline - loop.time(), 0.0)


def passes(error: AiockptError) -> bool:
    """Return whether the error is temporary, so that a receive should try again.

    A refused connection is permanent here: the transport has retried it, so the host is
    there and the process is not.
    """
    return Advice.AGAIN in advice(error) and not any(map(_is_refusal, _causes(error)))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
