"""What the bytes of a transport are moved in: host memory, or that of a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from mmap import mmap
from typing import Protocol

import torch

from aiockpt.format.chunks import DEVICE_ALGORITHM, ChunkGrid
from aiockpt.format.header import LENGTH_BYTES, decode_header, header_length
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import ForeignHeader, Manifest
from aiockpt.memory.arena import Memory
from aiockpt.memory.device import Accelerator, numbered, port_for
from aiockpt.pg.device.board import Board, decode_placement
from aiockpt.pg.device.destination import device_destination_of
from aiockpt.pg.device.mover import DeviceMover
from aiockpt.pg.device.sealing import DeviceSealing, Sealed
from aiockpt.pg.device.segment import Segment
from aiockpt.pg.device.staging import DeviceSnapshot, DeviceStager
from aiockpt.pg.group import Group
from aiockpt.pg.messages import MESSAGE_BYTES
from aiockpt.pg.mover import Mover
from aiockpt.pg.sealing import HostSealing, OnChunk, Sealing
from aiockpt.runtime.bridge import Bridge
from aiockpt.state.template import Template
from aiockpt.transfer.destination import Destination, Terms, destination_of
from aiockpt.transfer.stager import Snapshot, Stager, StagerOptions

__all__ = ["DeviceMedium", "Medium", "Offered", "Parcel", "medium_of"]

_THREADS = 2


@dataclass(frozen=True, slots=True)
class Parcel:
    """A snapshot that is ready to be sent, and what a receiver is told first."""

    manifest: Manifest
    offer: bytearray = field(repr=False)
    memory: Memory
    sealing: Sealing
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Offered:
    """What a receiver was told: the manifest, and what the sender has on its device."""

    manifest: Manifest | ForeignHeader
    placement: Sequence[int] = ()


class Medium(Protocol):
    """How a transport stages, moves, verifies and receives."""

    @property
    def tagged(self) -> bool:
        """Whether conversations may be held at once."""

    @property
    def message_bytes(self) -> int:
        """How long a message of a large entry may be."""

    async def stage(self, state_dict: object, *, step: int) -> Parcel:
        """Return a snapshot; see `aiockpt.transfer.stager.Stager.stage`."""

    def close(self) -> None:
        """Keep no memory from now on."""

    def mover(self, group: Group, rank: int, *, sending: bool) -> Mover:
        """Return what moves messages between this rank and another one."""

    def read(self, offer: mmap, limits: Limits) -> Offered:
        """Return what a sender has said; see `decode_header`."""

    def destination(
        self,
        manifest: Manifest,
        placement: Sequence[int],
        template: Template | None,
        terms: Terms,
    ) -> Destination:
        """Return where a checkpoint goes; see `destination_of`."""

    def sealing(
        self, memory: Memory, grid: ChunkGrid, on_chunk: OnChunk | None
    ) -> Sealing:
        """Return what finds the digests of a segment that is received."""


def medium_of(
    device: torch.device,
    bridge: Bridge,
    *,
    chunk_bytes: int,
    allow_pickle: bool,
    limits: Limits,
) -> Medium:
    """Return the medium of a transport whose group wants its tensors on ``device``."""
    device = numbered(device)
    made: Callable[..., Medium] = _Host
    if (port := port_for(device)) is not None:
        made = partial(DeviceMedium, Board(device, port, Accelerator(device)))
    return made(
        bridge, chunk_bytes=chunk_bytes, allow_pickle=allow_pickle, limits=limits
    )


class _Host:
    """Host memory."""

    tagged = True
    message_bytes = MESSAGE_BYTES

    def __init__(
        self, bridge: Bridge, *, chunk_bytes: int, allow_pickle: bool, limits: Limits
    ) -> None:
        self._bridge = bridge
        self._stager = Stager(
            bridge,
            threads=_THREADS,
            chunk_bytes=chunk_bytes,
            # A send ends when everything has been sent: it needs no copy until then.
            zero_copy=True,
            allow_pickle=allow_pickle,
            limits=limits,
            options=StagerOptions(seal=False),
        )

    async def stage(self, state_dict: object, *, step: int) -> Parcel:
        snapshot = await self._stager.stage(state_dict, step=step)
        manifest = snapshot.manifest
        return Parcel(
            manifest,
            await _offer(snapshot, self._bridge),
            snapshot,
            HostSealing(manifest.grid, torn=snapshot.changed),
            snapshot.release,
        )

    def close(self) -> None:
        self._stager.close()

    def mover(self, group: Group, rank: int, *, sending: bool) -> Mover:
        return Mover(group, rank, sending=sending)

    def read(self, offer: mmap, limits: Limits) -> Offered:
        return Offered(decode_header(offer, limits=limits, ours=True))

    def destination(
        self,
        manifest: Manifest,
        placement: Sequence[int],
        template: Template | None,
        terms: Terms,
    ) -> Destination:
        return destination_of(manifest, template, terms, self._bridge)

    def sealing(
        self,
        memory: Memory,
        grid: ChunkGrid,
        on_chunk: OnChunk | None,
    ) -> Sealing:
        return HostSealing(grid, on_chunk)


class DeviceMedium:
    """The memory of a device, whose communicator has an order in place of tags.

    Both ends must keep it: one conversation at a time.
    """

    tagged = False
    message_bytes = DeviceMover.message_bytes

    def __init__(
        self,
        board: Board,
        bridge: Bridge,
        *,
        chunk_bytes: int,
        allow_pickle: bool,
        limits: Limits,
    ) -> None:
        self._board, self._bridge = board, bridge
        self._stager = DeviceStager(
            bridge,
            board,
            chunk_bytes=chunk_bytes,
            allow_pickle=allow_pickle,
            limits=limits,
            ports=port_for,
        )

    async def stage(self, state_dict: object, *, step: int) -> Parcel:
        """Return a snapshot; the state dict must not change until it is released."""
        snapshot = await self._stager.stage(state_dict, step=step)
        manifest = snapshot.manifest
        offer = await _offer(snapshot, self._bridge) + snapshot.placement
        sealed = Sealed(manifest.digests)
        return Parcel(manifest, offer, snapshot.memory, sealed, snapshot.release)

    def close(self) -> None:
        """Do nothing: no memory is kept."""

    def mover(self, group: Group, rank: int, *, sending: bool) -> Mover:
        """Return one whose messages are on the device."""
        return DeviceMover(group, rank, self._board, sending=sending)

    def read(self, offer: mmap, limits: Limits) -> Offered:
        """Return the manifest, and what is on the sender's device."""
        length = header_length(offer[:LENGTH_BYTES], limits=limits)
        header, placement = memoryview(offer)[:length], memoryview(offer)[length:]
        found = decode_header(
            header, limits=limits, algorithm=DEVICE_ALGORITHM, ours=True
        )
        return Offered(found, decode_placement(placement, len(found.entries)))

    def destination(
        self,
        manifest: Manifest,
        placement: Sequence[int],
        template: Template | None,
        terms: Terms,
    ) -> Destination:
        """Return where it goes: to this device what is on the sender's."""
        return device_destination_of(
            manifest, placement, self._board, template, terms, self._bridge
        )

    def sealing(
        self, memory: Memory, grid: ChunkGrid, on_chunk: OnChunk | None
    ) -> Sealing:
        """Return what finds the digests where the bytes are."""
        if not isinstance(memory, Segment):
            raise TypeError(f"{memory} is not on the device")
        return DeviceSealing(self._board, self._bridge, memory, grid, on_chunk)


async def _offer(snapshot: Snapshot | DeviceSnapshot, bridge: Bridge) -> bytearray:
    """Copy the header for all receivers, in a thread: it may be long."""
    try:
        return await bridge.run(bytearray, snapshot.manifest.header)
    except BaseException:
        snapshot.release()
        raise
