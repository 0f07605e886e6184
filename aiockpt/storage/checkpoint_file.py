"""Reads the header of an existing checkpoint file, and verifies its chunks.

Everything here blocks. Nothing needs tensors.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

from aiockpt.errors import (
    AiockptError,
    IntegrityError,
    ProtocolError,
    RemoteProtocolError,
    StorageError,
)
from aiockpt.format.chunks import ChunkHasher, digest
from aiockpt.format.header import LENGTH_BYTES, decode_header, header_length
from aiockpt.format.limits import OF_A_FILE, Limits, advising, enforce
from aiockpt.format.manifest import ForeignHeader, Manifest
from aiockpt.format.tree import UnknownLeafError
from aiockpt.runtime.switching import CACHE_BLOCK_BYTES
from aiockpt.runtime.words import command_line
from aiockpt.storage.files import named, open_regular, read_at

ZIP_MAGIC: Final = b"PK\x03\x04"
_PICKLE_MAGIC: Final = b"\x80"


class OpenFile(ABC):
    """A file that is open for reading, wherever it is.

    Attributes:
        path: Its path, for errors. Another file may have got this name meanwhile.
        block_bytes: How much a load reads at once, for one digest after the other.
        readers: How many threads of a load read it; None: as many as copy memory.
    """

    path: Path | str
    block_bytes = CACHE_BLOCK_BYTES
    readers: int | None = None

    @abstractmethod
    def size(self) -> int:
        """Return its size in bytes."""

    @abstractmethod
    def read(self, views: Sequence[memoryview], at: int) -> None:
        """Fill views one after another from an offset, all of them.

        Raises:
            StorageError: the file ends too early, or cannot be read.
        """

    @abstractmethod
    def unchanged(self) -> AbstractContextManager[None]:
        """Raise at the end of the block if the file was written to meanwhile.

        It is for files without digests.

        Raises:
            StorageError: the file was changed.
        """

    @abstractmethod
    def fileno(self) -> int:
        """Return its descriptor.

        Raises:
            StorageError: it is not on a file system.
        """

    def bytes_at(self, at: int, size: int) -> bytes:
        """Return so many bytes from an offset, all of them.

        Raises:
            StorageError: the file ends too early, or cannot be read.
        """
        found = bytearray(size)
        self.read([memoryview(found)] if size else [], at)
        return bytes(found)

    def start(self) -> bytes:
        """Return the first bytes, up to the opening brace of a safetensors header."""
        return self.bytes_at(0, min(LENGTH_BYTES + 1, self.size()))

    def is_of_torch(self) -> bool:
        """Say whether the file looks like one that ``torch.save`` wrote."""
        start = self.start()
        return start.startswith((ZIP_MAGIC, _PICKLE_MAGIC)) and not start.endswith(b"{")

    def header(self, *, limits: Limits) -> Manifest | ForeignHeader:
        """Return the header of a safetensors file; see `read_header`."""
        actual = self.size()
        header = self._decoded(actual, limits)
        expected = header.header_bytes + header.segment_bytes
        if actual != expected:
            fault = "truncated" if actual < expected else "too long"
            detail = f"it is {fault}: {actual} bytes where its header says {expected}"
            raise StorageError(str(self.path), detail)
        return header

    def blocks(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes of a range, block by block, in memory that is reused."""
        # Read, not mapped: a file that shrinks under a mapping kills the process.
        block = memoryview(bytearray(min(self.block_bytes, stop - start)))
        for at in range(start, stop, max(len(block), 1)):
            piece = block[: min(len(block), stop - at)]
            self.read([piece], at)
            yield piece

    def digest(self, manifest: Manifest, chunk: int) -> str:
        """Return the digest of a chunk's bytes."""
        start, stop = manifest.grid.range(chunk)
        base = manifest.header_bytes
        return digest(self.blocks(base + start, base + stop), manifest.algorithm)

    def _decoded(self, size: int, limits: Limits) -> Manifest | ForeignHeader:
        try:
            with advising(OF_A_FILE):
                start = self.bytes_at(0, min(LENGTH_BYTES, size))
                length = header_length(start, limits=limits)
                header = self.bytes_at(0, min(length, size))
                return decode_header(header, limits=limits)
        except IntegrityError as error:
            error.url = str(self.path)
            raise
        except ProtocolError as error:
            detail = f"it cannot be read: {error}"
            if self.is_of_torch():
                # A name that begins with a hyphen would be taken for an option.
                path = str(self.path)
                shown = command_line(f"./{path}" if path.startswith("-") else path)
                detail = (
                    "it is a file of torch.save, which has no header and no digests; "
                    f"make one that has: aiockpt convert {shown} CHECKPOINT"
                )
            raise StorageError(str(self.path), detail) from error


class LocalFile(OpenFile):
    """A regular file of a file system that is open for reading.

    Args:
        path: Its path.
        fd: Its descriptor.
    """

    path: Path

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd = path, fd

    def size(self) -> int:
        """Return its size in bytes."""
        with named(self.path):
            return os.fstat(self._fd).st_size

    def read(self, views: Sequence[memoryview], at: int) -> None:
        """Fill views one after another from an offset, all of them."""
        with named(self.path):
            read_at(self.path, self._fd, views, at)

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._fd

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise at the end of the block if the file was written to meanwhile.

        A change within one tick of the file system's clock goes unnoticed.
        """
        before = os.fstat(self._fd)
        yield
        after = os.fstat(self._fd)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            detail = "it was changed while it was read; try again"
            raise StorageError(str(self.path), detail)


@contextmanager
def opened(path: Path) -> Iterator[LocalFile]:
    """Open a regular file for reading, and close it at the end of the block.

    Raises:
        StorageError: there is no such file, or it cannot be read.
    """
    with named(path):
        fd = open_regular(path)
    try:
        yield LocalFile(path, fd)
    finally:
        os.close(fd)


def read_header(path: Path, *, limits: Limits) -> Manifest | ForeignHeader:
    """Return the header of a safetensors file, ours or another tool's.

    Raises:
        StorageError: it cannot be read, is no safetensors file, or is truncated.
        IntegrityError: the header of our file is damaged.
    """
    with opened(path) as file:
        return file.header(limits=limits)


def contents(file: OpenFile, *, limits: Limits) -> bytes:
    """Return the bytes of a file that describes others.

    Raises:
        StorageError: it cannot be read.
        LimitExceededError: it is larger than a header may be.
    """
    size, limit = file.size(), limits.max_header_bytes
    enforce(f"the size of {file.path}", size, limit, "max_header_bytes")
    return file.bytes_at(0, size)


def verify_chunks(file: OpenFile, manifest: Manifest) -> Iterator[IntegrityError]:
    """Read every chunk of a file; yield an error for each wrong digest.

    Raises:
        StorageError: it cannot be read to the end.
    """
    hasher, base = ChunkHasher(manifest.grid, manifest.digests), manifest.header_bytes
    for block in file.blocks(base, base + manifest.segment_bytes):
        for each in hasher.update(hasher.position, block):
            if not each.matches:
                yield each.error(str(file.path))


@contextmanager
def blaming_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Translate what the decoder says of a peer, where there is only a file.

    Raises:
        UnsupportedLeafError: a leaf has a type that this process does not know.
        StorageError: the file breaks the format.
    """
    try:
        with advising(OF_A_FILE):
            yield
    except RemoteProtocolError as error:
        if isinstance(error, UnknownLeafError):
            own: AiockptError = error.local()
        else:
            own = StorageError(str(path), f"it cannot be read: {error}")
        for note in getattr(error, "__notes__", ()):
            own.add_note(note)
        raise own from error
