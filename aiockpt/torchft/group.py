"""A replacement of torchft's process-group transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypedDict, TypeVar, Unpack

import torch
from torchft.checkpointing.transport import CheckpointTransport

import aiockpt
from aiockpt.format.limits import Limits
from aiockpt.memory.device import settle
from aiockpt.pg.messages import GroupLike
from aiockpt.runtime.sync_facade import SyncFacade
from aiockpt.state.flatten import ready_for_threads
from aiockpt.transport import Timeout, refuse_unknown, seconds

T = TypeVar("T")

_METADATA = "aiockpt-process-group"
_ABRUPT_SHUTDOWN_S = 0.2  # with wait=False
_SHUTDOWN_S = 30.0


class GroupOptions(TypedDict, total=False):
    """The options of :class:`aiockpt.PGTransport`, with its defaults."""

    chunk_bytes: int
    limits: Limits
    allow_pickle: bool


class PGTransport(CheckpointTransport[T]):
    """Sends checkpoints to healing replicas over torchft's process group.

    A send returns when its receivers have the checkpoint, like torchft's class of the
    same name. Each call uses the group as it is at that moment: after a failure, the
    transport works again as soon as the manager has configured the group anew.

    Args:
        pg: The manager's group. A separate group that is configured with it is better.
        timeout: The default deadline of a send or a receive, in seconds or as a
            ``timedelta``, and the longest time that :meth:`disallow_checkpoint` waits
            for a send. A call with timeout 0 gets this deadline or that of the group,
            whichever is longer, because torchft's class then waits as long as gloo.
        device: The device on which the group's backend needs its tensors.
        state_dict: Returns a template; called at each receive in the calling thread. A
            tensor of the template with the same path, dtype, shape and strides is
            filled in place after everything is verified. All others get new memory.
        **options: The options of :class:`aiockpt.PGTransport`.
    """

    def __init__(
        self,
        pg: GroupLike,
        timeout: Timeout,
        device: torch.device,
        state_dict: Callable[[], T] | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        named = GroupOptions.__annotations__
        unknown = {name: at for name, at in options.items() if name not in named}
        refuse_unknown(PGTransport, unknown, also=named)
        self._group, self._device = pg, device
        self._timeout = seconds(timeout)
        self._state_dict = state_dict
        self._options = options
        self._idle = threading.Event()
        self._idle.set()
        self._facade = SyncFacade("PGTransport", at_exit=_nothing)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} over {self._group}>"

    def metadata(self) -> str:
        """Return a constant; the ranks of the group know each other."""
        return _METADATA

    def send_checkpoint(
        self,
        dst_ranks: list[int],
        step: int,
        state_dict: T,
        timeout: Timeout | None = None,
    ) -> None:
        """Send ``state_dict`` as ``step``, and return when all receivers have it.

        If the call fails, the receivers are told, unless the group has failed.
        """
        sent: Any = ready_for_threads(state_dict)
        limit = self._limit(timeout)
        self._idle.clear()
        try:
            send = partial(self._send, dst_ranks, step, sent, limit)
            self._facade.call(send, timeout=limit, phase="serve")
        finally:
            self._idle.set()

    def disallow_checkpoint(self) -> None:
        """Wait until no send is running; the deadline of the send is the limit."""
        if self._facade.is_ours:  # a forked child would wait for its parent's
            self._idle.wait(min(self._timeout, threading.TIMEOUT_MAX))

    def recv_checkpoint(
        self,
        src_rank: int,
        metadata: str,
        step: int,
        timeout: Timeout | None = None,
    ) -> T:
        """Return ``step`` from ``src_rank``; wait until it is sent."""
        limit = self._limit(timeout)
        template = self._ask()
        fetch = partial(self._receive, src_rank, metadata, step, limit, template)
        return self._facade.call(fetch, timeout=limit, phase="recv")

    def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002 - torchft's signature
        """End the loop and its thread, but not the group. Idempotent.

        Calls that still run fail. With ``wait=False`` this returns at once.
        """
        self._facade.close(_nothing, wait=_SHUTDOWN_S if wait else _ABRUPT_SHUTDOWN_S)

    def _limit(self, timeout: Timeout | None) -> float:
        """Return the deadline of a call in seconds."""
        if timeout is None:
            return self._timeout
        own: Timeout = getattr(self._group, "_timeout", 0.0)  # torchft's groups have it
        return seconds(timeout) or max(self._timeout, seconds(own))

    def _ask(self) -> Callable[[], T] | None:
        """Get the template in the calling thread, which has the streams and groups.

        An error of the template is raised when the sender has come, and the sender is
        told.
        """
        if self._state_dict is None:
            return None
        try:
            template = self._state_dict()
            settle()
        except Exception as error:  # noqa: BLE001 - see above
            return partial(_fail, error)
        return lambda: template

    async def _send(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: float
    ) -> None:
        async with self._transport(timeout) as transport:
            await transport.send_checkpoint(dst_ranks, step, state_dict, timeout)

    async def _receive(
        self,
        src_rank: int,
        metadata: str,
        step: int,
        timeout: float,
        template: Callable[[], T] | None,
    ) -> T:
        async with self._transport(timeout, template) as transport:
            return await transport.recv_checkpoint(src_rank, metadata, step, timeout)

    def _transport(
        self, timeout: float, template: Callable[[], T] | None = None
    ) -> aiockpt.PGTransport[T]:
        return aiockpt.PGTransport[T](
            self._group, timeout, self._device, template, **self._options
        )


async def _nothing() -> None:
    pass


def _fail(error: Exception) -> T:  # type: ignore[type-var]
    raise error
