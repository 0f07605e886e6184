"""The two ends of a transfer over a process group, by everyone's transports.

Every transport has a gloo group of its own, made by files in a directory that both
processes know: what one leaves behind does not disturb another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed

import aiockpt
from benchmarks.ends import Receiver, Sender
from benchmarks.measures import Cost, timed
from benchmarks.references import in_thread
from benchmarks.state import State

__all__ = ["OURS", "TORCH", "TORCHFT", "GroupReceiver", "GroupSender"]

OURS, TORCHFT, TORCH = "aiockpt", "torchft", "torch's own"
"""Whose ``PGTransport`` it is."""

_SENDER, _RECEIVER, _STEP = 0, 1, 1
_TIMEOUT = timedelta(seconds=600)
_CPU = torch.device("cpu")


class _End(Protocol):
    """One end of one transfer."""

    async def send(self, state_dict: State) -> None:
        """Send it to the receiver."""

    async def receive(self, template: State | None) -> State:
        """Receive what the sender sends, into a template or not."""

    async def close(self) -> None:
        """Let go of everything but the group; not timed."""


class _Ours:
    def __init__(self, group: Any) -> None:
        self._transport = aiockpt.PGTransport[State](group, _TIMEOUT)

    async def send(self, state_dict: State) -> None:
        await self._transport.send_checkpoint([_RECEIVER], _STEP, state_dict)

    async def receive(self, template: State | None) -> State:
        metadata, direct = self._transport.metadata(), template is not None
        return await self._transport.recv_checkpoint(
            _SENDER, metadata, _STEP, into=template, direct=direct
        )

    async def close(self) -> None:
        await self._transport.shutdown()


class _Torchft:
    def __init__(self, group: Any) -> None:
        self._group = group

    def _make(self, module: str, template: State | None = None) -> Any:
        fill = None if template is None else (lambda: template)
        made = import_module(module).PGTransport
        return made(self._group, _TIMEOUT, _CPU, fill)

    async def close(self) -> None:
        """Do nothing: it has nothing but the group."""

    async def send(self, state_dict: State) -> None:
        end = self._make("torchft.checkpointing.pg_transport")
        await in_thread(end.send_checkpoint, [_RECEIVER], _STEP, state_dict, _TIMEOUT)

    async def receive(self, template: State | None) -> State:
        end = self._make("torchft.checkpointing.pg_transport", template)
        found: State = await in_thread(
            end.recv_checkpoint, _SENDER, end.metadata(), _STEP, _TIMEOUT
        )
        return found


class _Torch(_Torchft):
    _MODULE = "torch.distributed.checkpoint._pg_transport"

    async def send(self, state_dict: State) -> None:
        await in_thread(
            self._make(self._MODULE).send_checkpoint, [_RECEIVER], state_dict
        )

    async def receive(self, template: State | None) -> State:
        end = self._make(self._MODULE, template)
        found: State = await in_thread(end.recv_checkpoint, _SENDER)
        return found


_ENDS: Mapping[str, Callable[[Any], _End]] = {
    OURS: _Ours,
    TORCHFT: _Torchft,
    TORCH: _Torch,
}


async def _joined(directory: str, by: str, rank: int) -> Any:
    """Wait for the other rank; return the group."""

    def connect() -> Any:
        gloo: Any = distributed  # whose stubs lack these names, or their methods
        store = gloo.FileStore(str(Path(directory) / by), 2)
        return gloo.ProcessGroupGloo(store, rank, 2, _TIMEOUT)

    return await in_thread(connect)


class GroupSender(Sender):
    """A sender that is a rank of process groups too."""

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[str, Any] = {}

    async def join(self, directory: str, by: str) -> None:
        """Wait for the other rank in a transport's group."""
        self._groups[by] = await _joined(directory, by, _SENDER)

    async def send(self, by: str) -> Cost:
        """Send the state dict once."""
        end = _ENDS[by](self._groups[by])
        _, cost = await timed(lambda: end.send(self._state))
        await end.close()
        return cost


class GroupReceiver(Receiver):
    """A receiver that is a rank of process groups too."""

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[str, Any] = {}

    async def join(self, directory: str, by: str) -> None:
        """Wait for the other rank in a transport's group."""
        self._groups[by] = await _joined(directory, by, _RECEIVER)

    async def receive_by(self, by: str, into: bool) -> Cost:  # noqa: FBT001 - from JSON
        """Receive what the sender sends, into fresh memory or into the template."""
        end = _ENDS[by](self._groups[by])
        template = self._template if into else None
        state, cost = await timed(lambda: end.receive(template))
        await end.close()
        return self.checked(state, cost)
