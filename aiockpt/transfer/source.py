"""Where the bytes of a receive come from, and what they are put into."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from aiockpt.format.manifest import Manifest, Outline
from aiockpt.memory.arena import Arena, Memory

if TYPE_CHECKING:  # a fetch into a file does without torch
    from aiockpt.state.template import Template
    from aiockpt.transfer.destination import Destination, Terms

__all__ = [
    "OnProgress",
    "PlainTarget",
    "Prepare",
    "Source",
    "Target",
]

OnProgress: TypeAlias = Callable[[int, int], None]
"""Is told of bytes that have arrived and of chunks that are whole, on the loop.

The bytes are negative where some were thrown away. It must be quick.
"""

Prepare: TypeAlias = Callable[[int, int], object]
"""Has the memory of ``[start, stop)`` ready for its bytes. For threads."""

V = TypeVar("V")


class Target(Protocol):
    """What a source fills with chunks."""

    @property
    def memory(self) -> Memory:
        """The data segment."""

    @property
    def prepare(self) -> Prepare | None:
        """What has the memory of a range ready for its bytes; None if all is ready."""

    def complete(self, chunk: int) -> None:
        """Take note that a chunk is there and verified, and stays as it is.

        On the loop.
        """


@dataclass(frozen=True, slots=True)
class PlainTarget:
    """Memory that is ready, and needs nothing but its bytes."""

    memory: Memory
    prepare: None = None

    def complete(self, chunk: int) -> None:
        """Do nothing."""


class Source(AbstractAsyncContextManager[object], Protocol):
    """One checkpoint that is received, from its manifest to its last chunk.

    The receive is a block, in which the methods are called in this order. If the block
    fails, its end tells the peer, if the peer can be told, also before the first call.
    It also lets go of memory that is mapped.

    Attributes:
        name: Who is asked, without tokens.
        medium: How the bytes come, for the event of the receive.
        remark: Why the bytes do not come as they should, if so.
        arena: Memory that holds the data segment already, or from which it is copied
            as a whole; None: the bytes are read into memory of the receiver.
    """

    name: str
    medium: str
    remark: str
    arena: Arena | None

    async def manifest(self, step: int) -> Manifest:
        """Return the manifest, once the peer has the step."""

    async def map(self, outline: Outline, *, most: int | None) -> None:
        """Set ``arena``, if the bytes are in memory of this host.

        Raises:
            LimitExceededError: they are more than ``most``.
        """

    def destination(
        self, manifest: Manifest, template: Template | None, terms: Terms
    ) -> Destination:
        """Return where a whole checkpoint goes. For a thread.

        Most sources return what `destination_of` does; see there for what it raises.
        """

    async def accept(self, step: int) -> None:
        """Tell the peer that the checkpoint fits, if the peer waits for that."""

    async def keep(self, step: int, work: Awaitable[V]) -> V:
        """Await what asks the peer nothing; the peer keeps the checkpoint meanwhile."""

    async def read(
        self,
        outline: Outline,
        target: Target,
        chunks: Sequence[int],
        on_progress: OnProgress,
    ) -> None:
        """Have chunks in ``target``, each with the digest of the manifest.

        Raises:
            AiockptError: they cannot be had. Any part of the target may have been
                written.
        """

    async def end(self, step: int) -> None:
        """Tell the peer that everything has arrived, and is what the peer sent."""

    def give_back(self) -> None:
        """Give the mapped memory back, unless tensors lie in it. For threads."""
