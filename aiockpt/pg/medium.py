"""The memory that a transport moves: host memory here, a device's in `device`.

A medium stages what is sent, makes the channels, and decides where a checkpoint goes
that is received.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from typing import Final, Protocol

from aiockpt.format.chunks import ChunkGrid
from aiockpt.format.header import decode_header
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import ForeignHeader, Manifest
from aiockpt.memory.arena import Memory
from aiockpt.pg.messages import (
    MESSAGE_BYTES,
    Channel,
    Digests,
    Group,
    HostDigests,
    OnChunk,
    messages_of,
)
from aiockpt.runtime.bridge import Bridge
from aiockpt.state.template import Template
from aiockpt.transfer.destination import Destination, Terms, destination_of
from aiockpt.transfer.stager import Stager, StagerOptions

__all__ = ["HostMedium", "Medium", "Offered", "Parcel", "copy_header"]

_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class Parcel:
    """A snapshot that is ready to be sent to several receivers.

    Attributes:
        manifest: Describes it.
        offer: What a receiver is told first: the header, and what a device adds.
        memory: The data segment.
        messages: The ranges of the segment that travel, in order.
        digests: Computes the digests of the chunks, or has them.
        release: Lets go of the memory.
    """

    manifest: Manifest
    offer: bytearray = field(repr=False)
    memory: Memory
    messages: Sequence[tuple[int, int]] = field(repr=False)
    digests: Digests
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Offered:
    """What a sender offers: the manifest, and the entries that are on its device."""

    manifest: Manifest | ForeignHeader
    placement: Sequence[int] = ()


class Medium(Protocol):
    """How a transport stages, moves, verifies and receives."""

    @property
    def tagged(self) -> bool:
        """Whether several conversations may be held at once."""

    @property
    def message_bytes(self) -> int:
        """How long a message of a large entry may be."""

    async def stage(self, state_dict: object, *, step: int) -> Parcel:
        """Return a snapshot; the state dict must not change until it is released.

        Raises:
            UnsupportedLeafError: a leaf cannot travel; nothing was copied.
            StagingError: a copy failed.
        """

    def close(self) -> None:
        """Keep no memory from now on."""

    def channel(self, group: Group, rank: int, *, sending: bool) -> Channel:
        """Return what moves messages between this rank and another one."""

    def read(self, offer: mmap, limits: Limits) -> Offered:
        """Parse what a sender offers; see `decode_header` for what is raised."""

    def destination(
        self,
        manifest: Manifest,
        placement: Sequence[int],
        template: Template | None,
        terms: Terms,
    ) -> Destination:
        """Return where a checkpoint goes; see `destination_of` for what is raised."""

    def digests(
        self, memory: Memory, grid: ChunkGrid, on_chunk: OnChunk | None
    ) -> Digests:
        """Return what computes the digests of a segment that is received."""


class HostMedium:
    """Host memory, and a group that moves it by tags: gloo."""

    tagged = Channel.tagged
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
        """Return a snapshot, most of which is the state dict's own memory."""
        snapshot = await self._stager.stage(state_dict, step=step)
        manifest = snapshot.manifest
        try:
            offer = await self._bridge.run(copy_header, manifest)
            messages = await self._bridge.run(messages_of, manifest, MESSAGE_BYTES)
        except BaseException:
            snapshot.release()
            raise
        digests = HostDigests(manifest.grid, changed=snapshot.changed)
        return Parcel(manifest, offer, snapshot, messages, digests, snapshot.release)

    def close(self) -> None:
        """Keep no memory from now on."""
        self._stager.close()

    def channel(self, group: Group, rank: int, *, sending: bool) -> Channel:
        """Return what moves messages between this rank and another one."""
        return Channel(group, rank, sending=sending)

    def read(self, offer: mmap, limits: Limits) -> Offered:
        """Parse the header."""
        return Offered(decode_header(offer, limits=limits, ours=True))

    def destination(
        self,
        manifest: Manifest,
        placement: Sequence[int],
        template: Template | None,
        terms: Terms,
    ) -> Destination:
        """Return tensors over an arena, or those of the template."""
        return destination_of(manifest, template, terms, self._bridge)

    def digests(
        self, memory: Memory, grid: ChunkGrid, on_chunk: OnChunk | None
    ) -> Digests:
        """Return what digests each message as it arrives."""
        return HostDigests(grid, on_chunk)


def copy_header(manifest: Manifest) -> bytearray:
    """Return a writable copy of the header for all receivers; it may be long."""
    return bytearray(manifest.header)
