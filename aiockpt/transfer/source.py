"""The interfaces of a receive: the source of its chunks, and their destination."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from aiockpt.format.manifest import Manifest, Outline
from aiockpt.memory.arena import Arena, Memory

if TYPE_CHECKING:  # a fetch into a file does without torch
    from aiockpt.memory.device import Event, Marks
    from aiockpt.state.load_plan import Matching
    from aiockpt.state.rebuild import OnDevice
    from aiockpt.transfer.reuse import Reuse

OnProgress: TypeAlias = Callable[[int, int], None]
"""Called on the loop with the numbers of bytes that arrived, and of complete chunks.

The number of bytes is negative if some were discarded. The call must be quick.
"""

Prepare: TypeAlias = Callable[[int, int], int]
"""Prepares the memory of ``[start, stop)`` for its bytes. For threads.

Returns where to continue, if that is worth it; behind ``stop`` at the earliest.
"""

Patch: TypeAlias = Callable[[Memory, int, int, memoryview], Awaitable[bool]]
"""Applies a delta to the receiver's bytes: called with memory, chunk, kind and body.

Returns whether the digest is right, and so the chunk is in the memory.
"""


class ChunkDestination(Protocol):
    """The memory that a source fills with chunks."""

    @property
    def memory(self) -> Memory:
        """The data segment."""

    @property
    def prepare(self) -> Prepare | None:
        """A function that prepares the memory of a range; None if none is needed."""

    @property
    def patch(self) -> Patch | None:
        """A function that applies deltas; None if the receiver holds nothing."""

    @property
    def kept(self) -> object:
        """The object that keeps the memory after the receive; None: it is reused."""

    def complete(self, chunk: int) -> None:
        """Note, on the loop, that a chunk is verified and will not change."""


@dataclass(frozen=True, slots=True)
class PlainDestination:
    """Memory that needs no preparation, as a `ChunkDestination`."""

    memory: Memory
    prepare: None = None
    patch: None = None
    kept: None = None

    def complete(self, chunk: int) -> None:
        """Do nothing."""


class DeviceEntries(Protocol):
    """The entries of a checkpoint that a source receives into a device's memory.

    `aiockpt.pg` has the implementation, since only a process group can do that.
    """

    @property
    def homes(self) -> OnDevice:
        """Their bytes on the device."""

    def joined(self, memory: Memory, marks: Marks) -> Memory:
        """Return the whole data segment; ``memory`` has the other entries.

        Nothing is received into the device's memory before the marked work has run.
        """

    def load(self, marks: Marks) -> list[Event]:
        """Copy the bytes that arrived elsewhere into a template; for a thread."""

    def drain(self) -> None:
        """Block until nothing is in flight."""


class Source(AbstractAsyncContextManager[object], Protocol):
    """One checkpoint that is received, from its manifest to its last chunk.

    The receive enters the source as a context, and calls the methods in this order. If
    the block fails, even before the first call, its end tells the peer if it can. It
    also releases mapped memory. A source inherits the methods that it does not need.

    Attributes:
        name: The peer's name, without tokens.
        medium: How the bytes travel, for the event of the receive.
        remark: Why the bytes do not travel in the best way, if so.
    """

    name: str
    medium: str
    remark: str

    @property
    def sends_deltas(self) -> bool:
        """Whether the peers may send deltas."""
        return False

    async def manifest(self, step: int) -> Manifest:
        """Return the manifest, once the peer has the step.

        The peer keeps the checkpoint from its answer until the end of the context,
        whatever the receiver does meanwhile.
        """

    async def map(self, outline: Outline, *, most: int | None) -> Arena | None:
        """Return memory that has the data segment, or from which it is copied whole.

        None: the bytes are read into the receiver's memory.

        Raises:
            LimitExceededError: there are more than ``most`` bytes.
        """
        return None

    def device_entries(
        self, manifest: Manifest, rule: Matching, *, direct: bool
    ) -> DeviceEntries | None:
        """Return what the source receives into a device's memory. For a thread.

        These entries are taken out of ``rule.backings``.
        """
        return None

    def takes(self, reuse: Reuse) -> bool:
        """Say whether `read` looks itself for what the receiver holds already."""
        return False

    async def accept(self, step: int) -> None:
        """Tell the peer that the checkpoint fits, if the protocol provides for it."""
        return

    async def read(
        self,
        outline: Outline,
        destination: ChunkDestination,
        chunks: Sequence[int],
        on_progress: OnProgress,
    ) -> None:
        """Read chunks into the destination, and verify each with its digest.

        Raises:
            AiockptError: the chunks cannot be read. Any part of the destination may
                have been written.
        """

    async def end(self, step: int) -> None:
        """Tell the peer that everything has arrived and was verified."""

    def give_back(self) -> None:
        """Release the mapped memory, unless tensors lie in it. For threads."""
        return
