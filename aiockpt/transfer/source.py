"""The interfaces of a receive: the source of its bytes, and the target of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from aiockpt.format.manifest import Manifest, Outline
from aiockpt.memory.arena import Arena, Memory

if TYPE_CHECKING:  # a fetch into a file does without torch
    from aiockpt.state.load_plan import Template
    from aiockpt.transfer.destination import Destination, Terms

OnProgress: TypeAlias = Callable[[int, int], None]
"""Is told of bytes that have arrived and of chunks that are whole, on the loop.

The number of bytes is negative if some were discarded. It must be quick.
"""

Prepare: TypeAlias = Callable[[int, int], int]
"""Prepares the memory of ``[start, stop)`` for its bytes. For threads.

Returns where to continue, if that is worth it; behind ``stop`` at the earliest.
"""

Patch: TypeAlias = Callable[[Memory, int, int, memoryview], Awaitable[bool]]
"""Applies a delta to the receiver's bytes: called with target, chunk, kind and body.

Returns whether the digest is right, and so the chunk is in the target.
"""

V = TypeVar("V")


class Target(Protocol):
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
        """What keeps the memory after the receive; None if it is used for others."""

    def complete(self, chunk: int) -> None:
        """Note, on the loop, that a chunk is verified and will not change."""


@dataclass(frozen=True, slots=True)
class PlainTarget:
    """Memory that needs no preparation."""

    memory: Memory
    prepare: None = None
    patch: None = None
    kept: None = None

    def complete(self, chunk: int) -> None:
        """Do nothing."""


class Source(AbstractAsyncContextManager[object], Protocol):
    """One checkpoint that is received, from its manifest to its last chunk.

    The receive enters the source as a context, and calls the methods in this order. If
    the block fails, even before the first call, its end tells the peer if it can. It
    also releases mapped memory.

    Attributes:
        name: The peer's name, without tokens.
        medium: How the bytes travel, for the event of the receive.
        remark: Why the bytes do not travel in the best way, if so.
        arena: Memory that holds the data segment already, or from which it is copied
            as a whole; None: the bytes are read into the receiver's memory.
    """

    name: str
    medium: str
    remark: str
    arena: Arena | None

    @property
    def sends_deltas(self) -> bool:
        """Whether the peers may send deltas."""

    async def manifest(self, step: int) -> Manifest:
        """Return the manifest, once the peer has the step.

        The peer keeps the checkpoint from its answer until the end of the context,
        whatever the receiver does meanwhile.
        """

    async def map(self, outline: Outline, *, most: int | None) -> None:
        """Set ``arena`` if the bytes are in this host's memory.

        Raises:
            LimitExceededError: there are more than ``most`` bytes.
        """

    def destination(
        self, manifest: Manifest, template: Template | None, terms: Terms
    ) -> Destination:
        """Return the destination of a whole checkpoint. For a thread.

        Most sources call `destination_of`, which documents the errors.
        """

    async def accept(self, step: int) -> None:
        """Tell the peer that the checkpoint fits, if the protocol provides for it."""

    async def read(
        self,
        outline: Outline,
        target: Target,
        chunks: Sequence[int],
        on_progress: OnProgress,
    ) -> None:
        """Read chunks into ``target``, and verify each with the manifest's digest.

        Raises:
            AiockptError: the chunks cannot be read. Any part of the target may have
                been written.
        """

    async def end(self, step: int) -> None:
        """Tell the peer that everything has arrived and was verified."""

    def give_back(self) -> None:
        """Release the mapped memory, unless tensors lie in it. For threads."""
