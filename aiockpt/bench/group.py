"""The two processes of a transfer over a process group, and everyone's transports.

Every transport has a gloo group of its own, made by files in a directory that both
processes know: what one leaves behind does not disturb another.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed  # noqa: TID251 - it makes the groups

from aiockpt.bench.receiver import Receiver
from aiockpt.bench.sender import Sender
from aiockpt.bench.timed import Cost, timed
from aiockpt.pg.messages import Group
from aiockpt.pg.transport import PGTransport
from aiockpt.runtime.bridge import Bridge

__all__ = ["OURS", "TORCH", "TORCHFT", "GroupReceiver", "GroupSender"]

OURS, TORCHFT, TORCH = "aiockpt", "torchft", "torch's own"
"""Whose ``PGTransport`` it is."""

_SIZE, _SENDER, _RECEIVER = 2, 0, 1
_STEP = 1
_TIMEOUT = timedelta(seconds=600)
_CPU = torch.device("cpu")
_State = dict[str, torch.Tensor]


class _Transport(Protocol):
    """One end, for one transfer."""

    async def send(self, state_dict: _State) -> None:
        """Send it to the receiver."""

    async def receive(self, template: _State | None) -> _State:
        """Receive what the sender sends, into a template or not."""

    async def close(self) -> None:
        """Let go of everything but the group."""


class _Ours:
    def __init__(self, group: Group, _: Bridge) -> None:
        self._transport: PGTransport[_State] = PGTransport(group, _TIMEOUT)

    async def send(self, state_dict: _State) -> None:
        await self._transport.send_checkpoint([_RECEIVER], _STEP, state_dict)

    async def receive(self, template: _State | None) -> _State:
        metadata, direct = self._transport.metadata(), template is not None
        return await self._transport.recv_checkpoint(
            _SENDER, metadata, _STEP, into=template, direct=direct
        )

    async def close(self) -> None:
        await self._transport.shutdown()


class _Torchft:
    def __init__(self, group: Group, bridge: Bridge) -> None:
        module = import_module("torchft.checkpointing.pg_transport")
        self._make: Callable[..., Any] = module.PGTransport
        self._group, self._bridge = group, bridge

    async def send(self, state_dict: _State) -> None:
        end = self._make(self._group, _TIMEOUT, _CPU)
        ranks = [_RECEIVER]
        await self._bridge.run(end.send_checkpoint, ranks, _STEP, state_dict, _TIMEOUT)

    async def receive(self, template: _State | None) -> _State:
        fill = None if template is None else (lambda: template)
        end = self._make(self._group, _TIMEOUT, _CPU, fill)
        found: _State = await self._bridge.run(
            end.recv_checkpoint, _SENDER, end.metadata(), _STEP, _TIMEOUT
        )
        return found

    async def close(self) -> None:
        """Do nothing: it has nothing of its own."""


class _Torch(_Torchft):
    def __init__(self, group: Group, bridge: Bridge) -> None:
        module = import_module("torch.distributed.checkpoint._pg_transport")
        self._make = module.PGTransport
        self._group, self._bridge = group, bridge

    async def send(self, state_dict: _State) -> None:
        end = self._make(self._group, _TIMEOUT, _CPU)
        await self._bridge.run(end.send_checkpoint, [_RECEIVER], state_dict)

    async def receive(self, template: _State | None) -> _State:
        fill = None if template is None else (lambda: template)
        end = self._make(self._group, _TIMEOUT, _CPU, fill)
        found: _State = await self._bridge.run(end.recv_checkpoint, _SENDER)
        return found


_TRANSPORTS: dict[str, Callable[[Group, Bridge], _Transport]] = {
    OURS: _Ours,
    TORCHFT: _Torchft,
    TORCH: _Torch,
}


class _Groups:
    """A process's groups, one for each transport."""

    def __init__(self, bridge: Bridge, rank: int) -> None:
        self._bridge, self._rank = bridge, rank
        self._found: dict[str, Group] = {}

    async def join(self, directory: str, by: str) -> None:
        self._found[by] = await self._bridge.run(self._connect, Path(directory) / by)

    def _connect(self, path: Path) -> Group:
        gloo: Any = distributed  # whose stubs lack these names, or their methods
        store = gloo.FileStore(str(path), _SIZE)
        group: Group = gloo.ProcessGroupGloo(store, self._rank, _SIZE, _TIMEOUT)
        return group

    def transport(self, by: str) -> _Transport:
        return _TRANSPORTS[by](self._found[by], self._bridge)


class GroupSender(Sender):
    """A sender that is a rank of process groups, too."""

    def __init__(self, bridge: Bridge) -> None:
        super().__init__(bridge)
        self._groups = _Groups(bridge, _SENDER)

    async def join(self, directory: str, by: str) -> None:
        """Wait for the other rank in a transport's group."""
        await self._groups.join(directory, by)

    async def send(self, by: str) -> Cost:
        """Send the state dict, once."""
        transport = self._groups.transport(by)
        _, cost = await timed(lambda: transport.send(self._state))
        await transport.close()
        return cost


class GroupReceiver(Receiver):
    """A receiver that is a rank of process groups, too."""

    def __init__(self, bridge: Bridge) -> None:
        super().__init__(bridge)
        self._groups = _Groups(bridge, _RECEIVER)

    async def join(self, directory: str, by: str) -> None:
        """Wait for the other rank in a transport's group."""
        await self._groups.join(directory, by)

    async def receive_by(self, by: str, into: bool) -> Cost:  # noqa: FBT001 - from JSON
        """Receive what the sender sends, into fresh memory or into the template."""
        transport = self._groups.transport(by)
        template = self._template if into else None
        state, cost = await timed(lambda: transport.receive(template))
        await transport.close()
        return self._checked(state, cost)
