"""torchft's process-group transport, replaced."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypedDict, TypeVar, Unpack

import torch
from torchft.checkpointing.transport import CheckpointTransport

import aiockpt
from aiockpt.format.limits import Limits
from aiockpt.pg.messages import Group
from aiockpt.runtime.sync_facade import SyncFacade
from aiockpt.state.flatten import ready_for_threads
from aiockpt.transport import Timeout, seconds

__all__ = ["GroupOptions", "PGTransport"]

T = TypeVar("T")

_METADATA = "aiockpt-process-group"
_PROMPT = 0.2
_PATIENT = 30.0


class GroupOptions(TypedDict, total=False):
    """The options of :class:`aiockpt.PGTransport`, which has their defaults."""

    chunk_bytes: int
    limits: Limits
    allow_pickle: bool


class PGTransport(CheckpointTransport[T]):
    """Sends checkpoints to healing replicas over torchft's process group.

    A send returns when its receivers have the checkpoint, as with torchft's class of
    this name. Each call takes up the group as it is then: what broke in one quorum is
    forgotten once the manager has configured the group for the next.

    Args:
        pg: The manager's group, or better one of its own, configured with it.
        timeout: Deadline of a send or a receive that is called without one, and how
            long :meth:`disallow_checkpoint` waits for a send at most. A call with 0
            has this one or the group's own, whichever is longer: torchft's class with
            gloo has no other deadline then than the group's.
        device: Where the group's backend wants its tensors.
        state_dict: Called at every receive, in the calling thread. A tensor that has
            the same path, dtype, shape and strides in what it returns is filled in
            place, once everything is verified. Every other tensor gets new memory.
        **options: What :class:`aiockpt.PGTransport` takes.
    """

    def __init__(
        self,
        pg: Group,
        timeout: Timeout,
        device: torch.device,
        state_dict: Callable[[], T] | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
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
        """Return a constant: a rank finds another one by the group."""
        return _METADATA

    def send_checkpoint(
        self,
        dst_ranks: list[int],
        step: int,
        state_dict: T,
        timeout: Timeout | None = None,
    ) -> None:
        """Send ``state_dict`` as ``step``; returns when its receivers have it.

        If this fails, they are told, unless it is the group that has failed.
        """
        sent: Any = ready_for_threads(state_dict)
        limit = self._limit(timeout)
        self._idle.clear()
        try:
            send = partial(self._send, dst_ranks, step, sent, limit)
            self._facade.call(send, timeout=limit, stop="serve")
        finally:
            self._idle.set()

    def disallow_checkpoint(self) -> None:
        """Wait until no send is under way, which its own deadline bounds."""
        if self._facade.is_ours:  # a forked child would wait for its parent's
            self._idle.wait(min(self._timeout, threading.TIMEOUT_MAX))

    def recv_checkpoint(
        self,
        src_rank: int,
        metadata: str,
        step: int,
        timeout: Timeout | None = None,
    ) -> T:
        """Return ``step`` from ``src_rank``; it may be early."""
        limit = self._limit(timeout)
        template = self._ask()
        fetch = partial(self._receive, src_rank, metadata, step, limit, template)
        return self._facade.call(fetch, timeout=limit, stop="recv")

    def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002 - torchft's signature
        """End the loop and its thread; the group is the caller's. Idempotent.

        Calls that are under way fail. With ``wait=False`` this returns at once.
        """
        self._facade.close(_nothing, wait=_PATIENT if wait else _PROMPT)

    def _limit(self, timeout: Timeout | None) -> float:
        """Return the deadline of a call in seconds."""
        if timeout is None:
            return self._timeout
        own: Timeout = getattr(self._group, "_timeout", 0.0)  # torchft's groups have it
        return seconds(timeout) or max(self._timeout, seconds(own))

    def _ask(self) -> Callable[[], T] | None:
        """Call for the template here, where the caller's streams and groups are.

        What it raises is raised when the sender has come, who is told.
        """
        if self._state_dict is None:
            return None
        try:
            template = self._state_dict()
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
