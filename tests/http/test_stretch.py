"""Runs of chunks: how they are planned, and how bytes are verified as they pass."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import LocalProtocolError
from aiockpt.format.chunks import ChunkGrid, digest
from aiockpt.format.entries import Storage
from aiockpt.format.header import build_manifest
from aiockpt.format.manifest import Manifest
from aiockpt.http.stretch import Part, Stretch, plan

CHUNK = 64 << 10


def manifest_of(segment: bytes, *, chunk_bytes: int = CHUNK) -> Manifest:
    """Return the manifest of a checkpoint that is one run of bytes."""
    grid = ChunkGrid(len(segment), chunk_bytes)
    ranges = [grid.range(chunk) for chunk in range(len(grid))]
    storage = Storage("bytes", "U8", (len(segment),), len(segment), align=1)
    return build_manifest(
        step=1,
        chunk_bytes=chunk_bytes,
        storages=[storage],
        tree=["tensor", 0],
        digests=[digest([segment[start:stop]]) for start, stop in ranges],
    )


SEGMENT = bytes(range(256)) * 1100  # four chunks and a bit
MANIFEST = manifest_of(SEGMENT)
OUTLINE = MANIFEST.outline


def chunks_of(runs: list[list[Part]]) -> list[list[int]]:
    """Return the chunk numbers of planned runs."""
    return [[part.chunk for part in run] for run in runs]


@pytest.mark.parametrize(
    ("chunks", "workers", "planned"),
    [
        ([], 4, []),
        (range(5), 1, [[0, 1, 2], [3, 4]]),
        (range(5), 2, [[0, 1], [2, 3], [4]]),
        (range(5), 4, [[0], [1], [2], [3], [4]]),
        ([0, 1, 3, 4], 1, [[0, 1], [3, 4]]),
        ([4, 0, 4, 2], 1, [[4], [0], [2]]),
    ],
)
def test_a_plan_has_each_chunk_once_in_consecutive_runs(
    chunks: list[int], workers: int, planned: list[list[int]]
) -> None:
    """Every worker gets two runs where there are chunks enough."""
    assert chunks_of(plan(OUTLINE, list(chunks), workers=workers)) == planned


def test_a_run_is_no_longer_than_half_of_a_share_or_what_is_said() -> None:
    """A broken request, or a slow one, must not be the whole transfer."""
    large = manifest_of(bytes(16 << 20), chunk_bytes=CHUNK).outline
    big = replace(large, grid=ChunkGrid(16 << 20, 32 << 20))
    assert max(map(len, plan(large, range(256), workers=1))) == 128
    assert max(map(len, plan(large, range(256), workers=1, most=4 << 20))) == 64
    assert chunks_of(plan(big, [0], workers=1)) == [[0]]


def test_a_run_has_a_gibibyte_at_most() -> None:
    """However large the checkpoint is."""
    grid = ChunkGrid(16 << 30, 16 << 20)
    outline = replace(OUTLINE, grid=grid, digests=("",) * len(grid))
    assert {len(run) for run in plan(outline, range(len(grid)), workers=2)} == {64}


@pytest.mark.parametrize("chunk", [-1, 5])
def test_a_chunk_outside_the_grid_is_the_callers_mistake(chunk: int) -> None:
    """It is named."""
    with pytest.raises(LocalProtocolError, match=f"chunk {chunk}"):
        plan(OUTLINE, [chunk], workers=1)


def stretch_of(verified: list[int]) -> Stretch:
    """Return a stretch over all chunks that notes which are verified."""
    runs = plan(OUTLINE, range(5), workers=1)
    parts = [part for run in runs for part in run]
    return Stretch(parts, on_verified=verified.append)


def receive(stretch: Stretch, data: bytes | bytearray) -> None:
    """Have bytes arrive, and the loop take note of them."""
    stretch.take(memoryview(data))
    stretch.placed()
    stretch.note()


@given(cuts=st.lists(st.integers(0, len(SEGMENT)), max_size=9))
def test_bytes_in_any_pieces_verify_every_chunk(cuts: list[int]) -> None:
    """A piece may end within a chunk, or span several."""
    verified: list[int] = []
    stretch = stretch_of(verified)
    assert (stretch.position, stretch.stop) == (0, len(SEGMENT))
    bounds = [0, *sorted(cuts), len(SEGMENT)]
    for start, stop in pairwise(bounds):
        receive(stretch, SEGMENT[start:stop])
    assert stretch.chunk is None
    assert stretch.settle() is None
    assert verified == [0, 1, 2, 3, 4]


def test_it_says_where_a_chunk_ends() -> None:
    """Then all of it is wanted in its place."""
    stretch = stretch_of([])
    ends = [0, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 1, 4 * CHUNK - 1]
    pieces = [memoryview(SEGMENT)[start:stop] for start, stop in pairwise(ends)]
    assert [*map(stretch.take, pieces)] == [False, True, False, True, False]


def test_it_stands_still_until_it_takes_note() -> None:
    """A thread may be receiving while the loop looks."""
    verified: list[int] = []
    stretch = stretch_of(verified)
    before = (stretch.chunk, stretch.position, stretch.stop, stretch.remaining)
    stretch.take(memoryview(SEGMENT)[: 2 * CHUNK + 10])
    now = (stretch.chunk, stretch.position, stretch.stop, stretch.remaining)
    assert now == before
    stretch.note()
    assert (stretch.chunk, stretch.position) == (0, 0)
    assert not verified
    stretch.placed()
    stretch.note()
    assert (stretch.chunk, stretch.position) == (2, 2 * CHUNK + 10)
    assert verified == [0, 1]


def test_bad_chunks_alone_are_wanted_again() -> None:
    """The good ones between them stay verified, and the first one is blamed."""
    verified: list[int] = []
    stretch = stretch_of(verified)
    damaged = bytearray(SEGMENT)
    damaged[CHUNK] ^= 1
    damaged[-1] ^= 1
    receive(stretch, damaged)
    settled = stretch.settle()
    assert settled is not None
    lost, error = settled
    assert lost == CHUNK + len(SEGMENT) - 4 * CHUNK
    assert (error.chunk, error.expected) == (1, MANIFEST.digests[1])
    assert verified == [0, 2, 3]
    assert (stretch.position, stretch.stop) == (CHUNK, 2 * CHUNK)
    receive(stretch, SEGMENT[CHUNK : 2 * CHUNK])
    assert (stretch.position, stretch.stop) == (4 * CHUNK, len(SEGMENT))
    receive(stretch, SEGMENT[4 * CHUNK :])
    assert stretch.settle() is None
    assert verified == [0, 2, 3, 1, 4]


def test_what_is_left_begins_with_whole_chunks() -> None:
    """Whoever takes it over is to blame for all of a chunk, or for nothing of it."""
    stretch = stretch_of([])
    damaged = bytearray(SEGMENT)
    damaged[CHUNK] ^= 1
    receive(stretch, damaged[: 2 * CHUNK + 10])
    left, come = stretch.leave()
    assert [part.chunk for part in left] == [1, 2, 3, 4]
    assert come == CHUNK + 10
    assert stretch.remaining == len(SEGMENT) - 2 * CHUNK - 10
    stretch = stretch_of([])
    receive(stretch, SEGMENT)
    assert stretch.leave() == ([], 0)
    assert stretch.remaining == 0
