"""Process groups of a device that is not there: host memory stands for its memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import torch

from aiockpt.pg.device import Device, DeviceMedium
from tests.support.accelerators import FakeAccelerator
from tests.support.groups import Transport, gloo_groups

CPU = torch.device("cpu")


class FakeBoard(Device):
    """A device whose tensors are those that were put there; or all but bytes.

    Bytes are the host's on real devices too: those of values and of generators.

    Attributes:
        allocated: Bytes that a transport has taken of it for good.
    """

    def __init__(self, fake: FakeAccelerator, *, all_its_own: bool = False) -> None:
        super().__init__(CPU, fake, fake)
        self.allocated = 0
        self._all_its_own = all_its_own
        self._storages: dict[int, torch.UntypedStorage] = {}

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Say that a tensor, and whatever shares its storage, is on the device."""
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage  # kept, so that no other gets it
        return tensor

    def owns(self, tensor: torch.Tensor) -> bool:
        """Say whether it was put there, or allocated there."""
        if self._all_its_own:
            return tensor.dtype != torch.uint8
        return tensor.untyped_storage()._cdata in self._storages

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory, which is on the device."""
        self.allocated += nbytes
        return self.put(super().allocate(nbytes))


@asynccontextmanager
async def device_transports(
    monkeypatch: pytest.MonkeyPatch, *boards: FakeBoard, **options: Any
) -> AsyncIterator[list[Transport]]:
    """Make a transport for each board, all in one new group."""
    options = {"timeout": 20, "chunk_bytes": 64 << 10, **options}
    groups = await gloo_groups(len(boards))
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(made)
            for made in _made(monkeypatch, boards, groups, options)
        ]


def _made(
    monkeypatch: pytest.MonkeyPatch,
    boards: tuple[FakeBoard, ...],
    groups: list[Any],
    options: dict[str, Any],
) -> Iterator[Transport]:
    for board, group in zip(boards, groups, strict=True):

        def medium_of(_: object, *given: Any, board: Any = board, **more: Any) -> Any:
            return DeviceMedium(board, *given, **more)

        monkeypatch.setattr("aiockpt.pg.transport._medium_of", medium_of)
        yield Transport(group, **options)
