"""Runs of chunks: how they are cut, and how bytes are verified as they pass."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from aiockpt.format.chunks import ChunkGrid, digest
from aiockpt.format.header import build_manifest
from aiockpt.format.manifest import Manifest
from aiockpt.http.chunk_run import ChunkRun
from tests.support.headers import entries_of

CHUNK = 64 << 10


def manifest_of(segment: bytes, *, chunk_bytes: int = CHUNK) -> Manifest:
    """Return the manifest of a checkpoint that is one run of bytes."""
    grid = ChunkGrid(len(segment), chunk_bytes)
    ranges = [grid.range(chunk) for chunk in range(len(grid))]
    storage = ("bytes", "U8", (len(segment),), len(segment))
    return build_manifest(
        step=1,
        chunk_bytes=chunk_bytes,
        entries=entries_of(storage),
        tree=["tensor", 0],
        digests=[digest([segment[start:stop]]) for start, stop in ranges],
    )


SEGMENT = bytes(range(256)) * 1100  # four chunks and a bit
MANIFEST = manifest_of(SEGMENT)
OUTLINE = MANIFEST.outline


def run_of(verified: list[int], chunks: Iterable[int] = range(5)) -> ChunkRun:
    """Return a run of chunks that notes which are verified."""
    run = ChunkRun(OUTLINE, chunks)
    run.assign("peer", verified.append)
    return run


def receive(run: ChunkRun, data: bytes | bytearray) -> None:
    """Have the bytes of one request arrive, and the loop take note of them."""
    run.begin_request()
    run.digest(memoryview(data))
    run.mark_stored()
    run.verify_stored()


@pytest.mark.parametrize(
    ("chunks", "nbytes", "cut"),
    [
        ([0, 1, 2], 0, [1, 2]), ([0, 1, 2], CHUNK, [1, 2]),
        ([0, 1, 2], 2 * CHUNK - 1, [1, 2]), ([0, 1, 2], 2 * CHUNK, [2]),
        ([0, 1, 2], 3 * CHUNK, []), ([0, 1, 3, 4], 9 * CHUNK, [3, 4]),
        ([4, 0, 2], 9 * CHUNK, [2, 4]), ([4], 0, []),
    ],
)  # fmt: skip
def test_a_run_is_cut_behind_a_chunk(
    chunks: list[int], nbytes: int, cut: list[int]
) -> None:
    """It keeps one at least, and only consecutive ones."""
    run = run_of([], chunks)
    before = run.unverified
    assert run.cut(nbytes) == cut
    assert len(run) == len(chunks) - len(cut)
    assert run.bits == sum(1 << chunk for chunk in chunks if chunk not in cut)
    assert run.unverified + ChunkRun(OUTLINE, cut).unverified == before


def test_it_stands_still_until_it_takes_note() -> None:
    """A thread may be receiving while the loop looks."""
    verified: list[int] = []
    run = run_of(verified)
    before = (run.chunk, run.position, run.stop, run.remaining)
    run.digest(memoryview(SEGMENT)[: 2 * CHUNK + 10])
    now = (run.chunk, run.position, run.stop, run.remaining)
    assert now == before
    run.verify_stored()
    assert (run.chunk, run.position) == (0, 0)
    assert not verified
    run.mark_stored()
    run.verify_stored()
    assert (run.chunk, run.position) == (2, 2 * CHUNK + 10)
    assert verified == [0, 1]


def test_bad_chunks_alone_are_wanted_again() -> None:
    """The good ones between them stay verified, and the first one is blamed."""
    verified: list[int] = []
    run = run_of(verified)
    damaged = bytearray(SEGMENT)
    damaged[CHUNK] ^= 1
    damaged[-1] ^= 1
    receive(run, damaged)
    settled = run.want_bad_again()
    assert settled is not None
    lost, error = settled
    assert lost == CHUNK + len(SEGMENT) - 4 * CHUNK
    assert (error.chunk, error.expected) == (1, MANIFEST.digests[1])
    assert verified == [0, 2, 3]
    assert (run.position, run.stop) == (CHUNK, 2 * CHUNK)
    receive(run, SEGMENT[CHUNK : 2 * CHUNK])
    assert (run.position, run.stop) == (4 * CHUNK, len(SEGMENT))
    receive(run, SEGMENT[4 * CHUNK :])
    assert run.want_bad_again() is None
    assert verified == [0, 2, 3, 1, 4]


def test_another_peer_begins_with_whole_chunks() -> None:
    """One peer sends all of a chunk, so one peer is to blame for it."""
    run = run_of([])
    damaged = bytearray(SEGMENT)
    damaged[CHUNK] ^= 1
    receive(run, damaged[: 2 * CHUNK + 10])
    assert run.received == CHUNK + 10
    assert run.remaining == len(SEGMENT) - 2 * CHUNK - 10
    again: list[int] = []
    assert run.assign("peer", again.append) == 0
    assert run.position == 2 * CHUNK + 10
    assert run.assign("another", again.append) == CHUNK + 10
    assert (run.position, run.received) == (CHUNK, 0)
    receive(run, SEGMENT[CHUNK:])
    assert again == [1, 2, 3, 4]
    assert (run.unverified, run.remaining) == (0, 0)


def test_steals_are_forgotten_when_bytes_come() -> None:
    """Only steals that brought no byte are counted."""
    run = run_of([])
    run.steals = 2
    run.verify_stored()
    assert run.steals == 2
    receive(run, SEGMENT[:10])
    assert run.steals == 0
