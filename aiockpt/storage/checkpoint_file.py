"""Reads the header of an existing checkpoint file, and verifies its chunks.

Everything here blocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiockpt.errors import (
    AiockptError,
    IntegrityError,
    ProtocolError,
    RemoteProtocolError,
    StorageError,
)
from aiockpt.format.chunks import digest
from aiockpt.format.header import LENGTH_BYTES, decode_header, header_length
from aiockpt.format.limits import OF_A_FILE, Limits, advising, enforce
from aiockpt.format.manifest import ForeignHeader, Manifest
from aiockpt.format.tree import UnknownLeafError
from aiockpt.runtime.words import command_line
from aiockpt.storage.files import named, open_regular, read_at

__all__ = [
    "blocks_of",
    "bytes_at",
    "chunk_errors",
    "contents",
    "digest_of",
    "header_of",
    "is_of_torch",
    "opened",
    "read_header",
    "verify_chunks",
]

_BLOCK = 1 << 20


def read_header(path: Path, *, limits: Limits) -> Manifest | ForeignHeader:
    """Return the header of a safetensors file, ours or another tool's.

    Raises:
        StorageError: it cannot be read, is no safetensors file, or is truncated.
        IntegrityError: the header of our file is damaged.
    """
    with opened(path) as fd:
        return header_of(path, fd, limits=limits)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a regular file for reading; yield its descriptor.

    Raises:
        StorageError: there is no such file, or it cannot be read.
    """
    with named(path):
        fd = open_regular(path)
    try:
        yield fd
    finally:
        os.close(fd)


def contents(path: Path, *, limits: Limits) -> bytes:
    """Return the bytes of a file that describes others.

    Raises:
        StorageError: there is no such file, or it cannot be read.
        LimitExceededError: it is larger than a header may be.
    """
    with opened(path) as fd:
        size, limit = os.fstat(fd).st_size, limits.max_header_bytes
        enforce(f"the size of {path}", size, limit, "max_header_bytes")
        return bytes_at(path, fd, 0, size)


def bytes_at(path: Path, fd: int, at: int, size: int) -> bytes:
    """Return bytes of an open file, all of them.

    Raises:
        StorageError: it ends too early, or cannot be read.
    """
    found = bytearray(size)
    with named(path):
        read_at(path, fd, [memoryview(found)] if size else [], at)
    return bytes(found)


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


def header_of(path: Path, fd: int, *, limits: Limits) -> Manifest | ForeignHeader:
    """Return what `read_header` returns, for an open file."""
    with named(path):
        header = _decode(path, fd, limits)
        _check_size(path, header, os.fstat(fd).st_size)
    return header


def _decode(path: Path, fd: int, limits: Limits) -> Manifest | ForeignHeader:
    try:
        with advising(OF_A_FILE):
            length = header_length(os.pread(fd, LENGTH_BYTES, 0), limits=limits)
            return decode_header(os.pread(fd, length, 0), limits=limits)
    except IntegrityError as error:
        error.url = str(path)
        raise
    except ProtocolError as error:
        if is_of_torch(os.pread(fd, LENGTH_BYTES + 1, 0)):
            # A name that begins with a hyphen would be taken for an option.
            shown = f"./{path}" if str(path).startswith("-") else str(path)
            detail = (
                "it is a file of torch.save, which has no header and no digests; make "
                f"one that has: aiockpt convert {command_line(shown)} CHECKPOINT"
            )
            raise StorageError(str(path), detail) from error
        raise StorageError(str(path), f"it cannot be read: {error}") from error


def is_of_torch(start: bytes) -> bool:
    """Say whether a file that starts with these 9 bytes looks like ``torch.save``'s."""
    return start.startswith((b"PK\x03\x04", b"\x80")) and not start.endswith(b"{")


def _check_size(path: Path, header: Manifest | ForeignHeader, actual: int) -> None:
    expected = header.header_bytes + header.segment_bytes
    if actual != expected:
        fault = "truncated" if actual < expected else "too long"
        detail = f"it is {fault}: {actual} bytes where its header says {expected}"
        raise StorageError(str(path), detail)


def verify_chunks(path: Path, manifest: Manifest) -> Iterator[IntegrityError]:
    """Read every chunk of a file; yield an error for each wrong digest.

    Raises:
        StorageError: it cannot be read to the end.
    """
    with opened(path) as fd:
        yield from chunk_errors(path, fd, manifest)


def chunk_errors(path: Path, fd: int, manifest: Manifest) -> Iterator[IntegrityError]:
    """Yield what `verify_chunks` yields, for an open file."""
    with named(path):
        for chunk, expected in enumerate(manifest.digests):
            actual = digest_of(path, fd, manifest, chunk)
            if actual != expected:
                yield IntegrityError(
                    chunk=chunk, expected=expected, actual=actual, url=str(path)
                )


def digest_of(path: Path, fd: int, manifest: Manifest, chunk: int) -> str:
    """Return the digest of a chunk's bytes in the open file."""
    start, stop = manifest.grid.range(chunk)
    base = manifest.header_bytes
    blocks = blocks_of(path, fd, base + start, base + stop)
    return digest(blocks, manifest.algorithm)


def blocks_of(path: Path, fd: int, start: int, stop: int) -> Iterator[memoryview]:
    """Yield the bytes of an open file, block by block, in memory that is used again."""
    # Read, not mapped: a file that shrinks under a mapping kills the process.
    block = memoryview(bytearray(min(_BLOCK, stop - start)))
    for at in range(start, stop, _BLOCK):
        piece = block[: min(_BLOCK, stop - at)]
        read_at(path, fd, [piece], at)
        yield piece
