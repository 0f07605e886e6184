"""Where the bytes of a checkpoint come from.

A `Source` is awaited and serves `aiockpt.transfer.receive`. A `SegmentSource` blocks
and serves a load from files, or from a peer without a loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol, TypeAlias, TypeVar, get_args

from aiockpt.format.manifest import Manifest, Outline
from aiockpt.memory.arena import Arena, Memory
from aiockpt.transfer.placement import Placement
from aiockpt.transfer.segment import Segment

__all__ = [
    "OnBytes",
    "OnProgress",
    "OnVerified",
    "Prepare",
    "SegmentSource",
    "Source",
    "Verify",
    "check_verify",
]

Verify: TypeAlias = Literal["full", "none"]
"""Which digests are compared: of every chunk that is read, or of none."""

OnBytes: TypeAlias = Callable[[int], None]


OnProgress: TypeAlias = Callable[[int, int], None]
"""Is told of bytes and chunks that have arrived and were verified."""

OnVerified: TypeAlias = Callable[[int], None]
"""Is told of each verified chunk."""

Prepare: TypeAlias = Callable[[int, int], Awaitable[None]]
"""Has the memory of a range ready for its bytes."""

V = TypeVar("V")


class Source(Protocol):
    """One checkpoint that is received, from its manifest to its last chunk.

    Attributes:
        name: Who is asked, without tokens.
        medium: How the bytes come.
        remark: Why they do not come as they should, if so.
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

    async def keep(self, step: int, work: Awaitable[V]) -> V:
        """Await what asks the peer nothing; the peer keeps the checkpoint meanwhile."""

    async def read(
        self,
        outline: Outline,
        target: Memory,
        chunks: Sequence[int],
        *,
        on_progress: OnProgress,
        prepare: Prepare | None = None,
        on_verified: OnVerified | None = None,
    ) -> None:
        """Have chunks in ``target``, each with the digest of the manifest.

        Raises:
            AiockptError: they cannot be had. Any part of the target may have been
                written.
        """

    async def end(self, step: int) -> None:
        """Tell the peer that everything has arrived."""

    async def refuse(self, step: int, error: BaseException) -> None:
        """Tell the peer that the receive has failed, if the peer can be told."""

    def give_back(self) -> None:
        """Give the mapped memory back, unless tensors lie in it. For threads."""

    def close(self) -> None:
        """Let go of the mapped memory, which may be in use. Idempotent."""


class SegmentSource(Protocol):
    """A checkpoint whose bytes can be read, range by range. Everything blocks."""

    @property
    def segment(self) -> Segment:
        """The data segment, whose bytes `read` brings."""

    def read(
        self, placement: Placement, *, verify: Verify, on_bytes: OnBytes | None
    ) -> None:
        """Read what ``placement`` wants to where it belongs.

        ``on_bytes`` is told how many bytes were read; what it raises ends the reading.

        Raises:
            StorageError, TransportError: the bytes cannot be had.
            IntegrityError: a chunk has another digest; its bytes may have been
                written.
        """


def check_verify(verify: Verify) -> Verify:
    """Return ``verify`` if it is one of its values.

    Raises:
        ValueError: it is not.
    """
    if verify not in get_args(Verify):
        raise ValueError(f"verify is 'full' or 'none', not {verify!r}")
    return verify
