"""Where the bytes of one data segment come from: a file, or a peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias, get_args

from aiockpt.transfer.landing import Landing
from aiockpt.transfer.segment import Segment

__all__ = ["OnBytes", "Source", "Verify", "check_verify"]

Verify: TypeAlias = Literal["full", "none"]
"""Which digests are compared: of every chunk that is read, or of none."""

OnBytes: TypeAlias = Callable[[int], None]


class Source(Protocol):
    """A checkpoint whose bytes can be read, range by range. Everything blocks."""

    @property
    def segment(self) -> Segment:
        """The data segment, whose bytes `read` brings."""

    def read(
        self, landing: Landing, *, verify: Verify, on_bytes: OnBytes | None
    ) -> None:
        """Read what ``landing`` wants to where it belongs.

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
