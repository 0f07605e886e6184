"""A process group as torchft wraps one, without torchft."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from tests.support.groups import joined

__all__ = ["Wrapped"]


class WrappedWork(distributed.Work):
    """Passes a wait on; it is a Work, but not one of the backend."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it has ended."""
        return bool(self._work.wait(timeout or timedelta(seconds=60)))


class Wrapped(distributed.ProcessGroup):
    """Says that it is rank 0, whichever rank it is, and can be configured anew.

    Until it is, and after an abort, it has no group, and everything but its rank is an
    ``AssertionError``.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # torch has a second one
        self._parent: Any = None

    async def configure(self, store: Any, rank: int, count: int) -> None:
        """Take part in another group than before."""
        self.abort()
        self._parent = await joined(store, rank, count)

    def abort(self) -> None:
        """Drop the group."""
        self._parent = None

    @property
    def parent(self) -> Any:
        """The group."""
        assert self._parent is not None, "process group not initialized"
        return self._parent

    def size(self) -> int:
        """Pass on."""
        return int(self.parent.size())

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int) -> Any:
        """Pass on, and wrap."""
        return WrappedWork(self.parent.send(tensors, dst_rank, tag))

    def recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int) -> Any:
        """Pass on, and wrap."""
        return WrappedWork(self.parent.recv(tensors, src_rank, tag))
