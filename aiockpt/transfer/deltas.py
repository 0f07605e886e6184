"""Element-wise deltas: the differences of a chunk from the same chunk of a base.

An optimizer step in bf16 changes a few percent of the elements, scattered over nearly
all chunks. The delta of a chunk begins with 8 bytes: its kind, three zero bytes, and
the length of what follows as an unsigned 32-bit number. All numbers are little endian.
There are three kinds:

* 0, *same*: the chunks are equal, and nothing follows;
* 1, *sparse*: the number *n* of changes, of 32 bits, and a Zstandard frame (RFC 8878)
  that states its content size, 4 *n* bytes;
* 2, *raw*: the bytes of the chunk, if a delta would not be much smaller.

A change applies to one 16-bit word of the chunk. An odd last byte must be equal in both
snapshots. The frame has four planes of *n* bytes: the low and the high bytes of the
gaps, then the low and the high bytes of the differences. A gap is the number of
unchanged words before a change. A difference ``d`` is new - base modulo 2**16, read as
a signed number, and written as ``(2 * d) ^ (d >> 15)``. So small differences of either
sign become small numbers. A gap of more than 65,535 words is split by changes with the
difference 0.

A receiver must not decompress a frame that states another size, and must refuse more
changes than half of the chunk's words. This module does not know whether a base is the
right one. The receiver compares the digest of the patched chunk with the manifest.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final, TypeAlias

from aiockpt.errors import MissingExtraError, RemoteProtocolError
from aiockpt.runtime.switching import CACHE_BLOCK_BYTES

SAME: Final = 0
SPARSE: Final = 1
RAW: Final = 2

_HEAD: Final = struct.Struct("<BxxxI")  # the kind, and the length of the body
HEAD_BYTES: Final = _HEAD.size
_COUNT: Final = struct.Struct("<I")
_WORD_BYTES: Final = 2
_NUMBER_BYTES: Final = 8  # are compared as one number
_SHIFT: Final = 2  # 4 words in one number
_MAX_GAP: Final = 0xFFFF
_MAX_CHANGED: Final = 0.3  # of the words; beyond that, a delta saves too little
_MAX_LENGTH: Final = 0.5  # of the chunk; a longer delta is not worth its memory
_SAMPLES: Final = 32
_SAMPLE_BYTES: Final = 4096
_LEVEL: Final = 1

_Changes: TypeAlias = "tuple[Any, Any]"  # arrays: int64 positions, uint16 differences

Change: TypeAlias = Callable[[int, memoryview], None]
"""Changes a block of a chunk from base to target: called with position and block."""


@cache
def is_available() -> bool:
    """Say whether this process can encode and apply deltas."""
    try:
        check_available()
    except MissingExtraError:
        return False
    return True


def check_available() -> None:
    """Check that the libraries for deltas are installed.

    Raises:
        MissingExtraError: numpy or zstandard is not installed.
    """
    _libraries()


def head(kind: int, nbytes: int) -> bytes:
    """Return the head of a delta whose body has ``nbytes`` bytes."""
    return _HEAD.pack(kind, nbytes)


def encode(base: memoryview, target: memoryview) -> bytes | None:
    """Return the delta from ``base`` to ``target``, two chunks of the same size.

    Call this in a thread. It takes about 10 ms for 16 MiB, mostly without the
    interpreter lock.

    Returns:
        The delta with its head, or None if the chunk should be sent as it is (`RAW`).

    Raises:
        MissingExtraError: numpy or zstandard is not installed.
    """
    np, zstandard = _libraries()
    if _changed_in_samples(np, base, target) <= _MAX_CHANGED:
        found = _changes(np, base, target)
        if found is not None:
            if not len(found[0]):
                return head(SAME, 0)
            planes = _planes(np, *found)
            packed: bytes = zstandard.ZstdCompressor(level=_LEVEL).compress(planes)
            if len(packed) <= _MAX_LENGTH * target.nbytes:
                body = _COUNT.pack(len(planes) // 4) + packed
                return head(SPARSE, len(body)) + body
    return None


def split(deltas: memoryview, count: int) -> list[tuple[int, memoryview]]:
    """Return the kinds and the bodies of ``count`` consecutive deltas.

    Raises:
        RemoteProtocolError: the bytes are not exactly ``count`` deltas.
    """
    found: list[tuple[int, memoryview]] = []
    at = 0
    for _ in range(count):
        if at + _HEAD.size > deltas.nbytes:
            raise RemoteProtocolError(f"{len(found)} deltas instead of {count}")
        kind, nbytes = _HEAD.unpack_from(deltas, at)
        at += _HEAD.size
        if at + nbytes > deltas.nbytes:
            raise RemoteProtocolError(f"delta {len(found)} ends too early")
        found.append((kind, deltas[at : at + nbytes]))
        at += nbytes
    if at != deltas.nbytes:
        raise RemoteProtocolError(f"{deltas.nbytes - at} bytes after the last delta")
    return found


def changer(kind: int, body: memoryview, nbytes: int) -> Change:
    """Return a function that changes a chunk of ``nbytes`` from base to target.

    It changes blocks in place, at even positions, each once and in any order. So the
    caller can copy, change and digest a block while it is in the processor's cache.

    Raises:
        RemoteProtocolError: the delta is malformed.
        MissingExtraError: numpy or zstandard is not installed.
    """
    if kind == SAME and not body.nbytes:
        return lambda _at, _block: None
    if kind == RAW and body.nbytes == nbytes:
        return partial(_replace, body)
    if kind != SPARSE or body.nbytes < _COUNT.size:
        raise RemoteProtocolError(
            f"a delta of kind {kind} with {body.nbytes} bytes for {nbytes}"
        )
    np, zstandard = _libraries()
    (count,) = _COUNT.unpack_from(body)
    words = nbytes // _WORD_BYTES
    packed = body[_COUNT.size :]
    size = 2 * _WORD_BYTES * count
    if count > words // 2:  # bounds the memory that a peer can make this take
        raise RemoteProtocolError(f"a delta of {count} changes for {words} words")
    try:
        # zstandard ignores max_output_size if the frame states its content size.
        if zstandard.get_frame_parameters(packed).content_size != size:
            raise RemoteProtocolError(f"a delta without {count} changes")
        planes = zstandard.ZstdDecompressor().decompress(packed, max_output_size=size)
    except zstandard.ZstdError as error:
        detail = f"a delta that cannot be decompressed: {error}"
        raise RemoteProtocolError(detail) from error
    if len(planes) != size:
        raise RemoteProtocolError(f"a delta without {count} changes")
    positions, differences = _unplaned(np, planes, count)
    if count and int(positions[-1]) >= words:
        raise RemoteProtocolError(f"a change after the last of {words} words")

    def change(at: int, block: memoryview) -> None:
        first, last = at // _WORD_BYTES, (at + block.nbytes) // _WORD_BYTES
        some = slice(*np.searchsorted(positions, (first, last)))
        _words(np, block)[positions[some] - first] += differences[some]

    return change


def _replace(body: memoryview, at: int, block: memoryview) -> None:
    block[:] = body[at : at + block.nbytes]


def _libraries() -> tuple[Any, Any]:
    try:
        import numpy as np
        import zstandard
    except ImportError as error:
        raise MissingExtraError(str(error.name), extra="delta") from error
    return np, zstandard


def _words(np: Any, chunk: memoryview) -> Any:
    """Return the 16-bit words of a chunk, without an odd last byte."""
    return np.frombuffer(chunk, dtype=np.uint16, count=chunk.nbytes // _WORD_BYTES)


def _numbers(np: Any, block: memoryview) -> Any:
    """Return the 64-bit numbers of a block, the last one filled up with zeros."""
    if rest := -block.nbytes % _NUMBER_BYTES:
        block = memoryview(bytes(block) + bytes(rest))
    return np.frombuffer(block, dtype=np.uint64)


def _changed_in_samples(np: Any, base: memoryview, target: memoryview) -> float:
    """Return the fraction of words that differ, in samples all over the chunk."""
    step = max(base.nbytes // _SAMPLES // _WORD_BYTES * _WORD_BYTES, _SAMPLE_BYTES)
    looked = changed = 0
    for at in range(0, base.nbytes, step):
        stop = min(at + _SAMPLE_BYTES, base.nbytes)
        one, other = _words(np, base[at:stop]), _words(np, target[at:stop])
        looked += len(one)
        changed += int(np.count_nonzero(one != other))
    return changed / max(looked, 1)


def _changes(np: Any, base: memoryview, target: memoryview) -> _Changes | None:
    """Return the positions of the words that differ, and the differences.

    Returns:
        None if too many words differ, or if an odd last byte does.
    """
    if base.nbytes % _WORD_BYTES and base[-1] != target[-1]:
        return None
    most = _MAX_CHANGED * (base.nbytes // _WORD_BYTES)
    parts, count = [], 0
    for at in range(0, base.nbytes, CACHE_BLOCK_BYTES):
        old, new = (
            _numbers(np, each[at : at + CACHE_BLOCK_BYTES]) for each in (base, target)
        )
        found = np.flatnonzero(old != new)
        count += len(found)
        if count > most:
            return None
        parts.append((found + at // _NUMBER_BYTES, old[found], new[found]))
    if not count:
        return np.empty(0, np.int64), np.empty(0, np.uint16)
    numbers, *both = map(np.concatenate, zip(*parts, strict=True))
    before, after = (each.view(np.uint16) for each in both)
    found = np.flatnonzero(before != after)
    if len(found) > most:
        return None
    # Shifts, because a division takes as long as the comparison.
    positions = (numbers[found >> _SHIFT] << _SHIFT) + (found & (1 << _SHIFT) - 1)
    return positions, after[found] - before[found]


def _planes(np: Any, positions: Any, differences: Any) -> Any:
    """Return the gaps and the differences as four planes of bytes.

    A gap is the number of words between two changes. A gap that needs more than 16 bits
    is split by changes with the difference 0. Differences are zigzag-encoded, so that
    small ones of either sign are small numbers. The planes compress well.
    """
    gaps = np.diff(positions, prepend=-1) - 1
    if len(far := np.flatnonzero(gaps > _MAX_GAP - 1)):
        positions, differences = _bridged(np, positions, differences, gaps, far)
        gaps = np.diff(positions, prepend=-1) - 1
    signed = differences.view(np.int16)
    columns = (gaps.astype("<u2"), ((signed << 1) ^ (signed >> 15)).astype("<i2"))
    planes = np.empty((4, len(gaps)), np.uint8)
    for number, column in enumerate(columns):
        pairs = column.view(np.uint8).reshape(-1, _WORD_BYTES)
        planes[2 * number], planes[2 * number + 1] = pairs[:, 0], pairs[:, 1]
    return planes.reshape(-1)


def _bridged(
    np: Any, positions: Any, differences: Any, gaps: Any, far: Any
) -> _Changes:
    """Insert changes with the difference 0 where gaps are too long."""
    bridges = [
        np.arange(positions[at] - gaps[at] + _MAX_GAP - 1, positions[at], _MAX_GAP)
        for at in far.tolist()
    ]
    where = np.repeat(far, [len(each) for each in bridges])
    positions = np.insert(positions, where, np.concatenate(bridges))
    return positions, np.insert(differences, where, 0)


def _unplaned(np: Any, planes: bytes, count: int) -> _Changes:
    """Return the positions and the differences; the inverse of `_planes`."""
    rows = np.frombuffer(planes, np.uint8).reshape(4, count)
    pairs = np.empty((2, count, _WORD_BYTES), np.uint8)
    pairs[0, :, 0], pairs[0, :, 1], pairs[1, :, 0], pairs[1, :, 1] = rows
    gaps, folded = pairs.reshape(2, -1).view("<u2")
    positions = np.cumsum(gaps, dtype=np.int64)
    positions += np.arange(count)
    differences = (folded >> 1) ^ -(folded & 1)
    return positions, differences
