"""The chunk grid and its digests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import blake3
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import LocalProtocolError
from aiockpt.format.chunks import ChunkGrid, ChunkHasher, digest

SIZES = st.integers(0, 10_000)
LENGTHS = st.integers(1, 300)
HASHES: dict[str, Callable[[bytes], Any]] = {
    "xxh3-128": xxhash.xxh3_128,
    "sha256": hashlib.sha256,
    "blake3": blake3.blake3,
}


@given(SIZES, LENGTHS, st.data())
def test_chunks_tile_the_segment(size: int, length: int, data: st.DataObject) -> None:
    """Each byte is in exactly one chunk; only the last chunk may be shorter."""
    grid = ChunkGrid(size, length)
    ranges = [grid.range(index) for index in range(len(grid))]
    assert [0, *(stop for _, stop in ranges)] == [*(start for start, _ in ranges), size]
    assert all(stop - start == length for start, stop in ranges[:-1])
    assert all(0 < stop - start <= length for start, stop in ranges[-1:])
    assert bool(ranges) == bool(size)
    if size:
        offset = data.draw(st.integers(0, size - 1))
        start, stop = grid.range(grid.index_of(offset))
        assert start <= offset < stop
    for outside in (-1, len(grid), 10**30):
        with pytest.raises(IndexError):
            grid.range(outside)
    for outside in (-1, size):
        with pytest.raises(IndexError):
            grid.index_of(outside)


class TestChunkHasher:
    """`ChunkHasher`: every chunk's digest, from bytes that pass once."""

    @given(
        st.binary(min_size=1, max_size=300),
        st.lists(st.integers(1, 299)),
        st.sampled_from(sorted(HASHES)),
    )
    def test_any_blocks_give_the_same_digests(
        self, data: bytes, cuts: list[int], algorithm: str
    ) -> None:
        """Each chunk has the digest that it has alone, and is reported once."""
        grid, whole = ChunkGrid(len(data), 64, algorithm), memoryview(data)
        hasher = ChunkHasher(grid)
        stops = [*sorted({cut for cut in cuts if cut < len(data)}), len(data)]
        found = []
        for start, stop in zip([0, *stops], stops, strict=False):
            assert hasher.position == start
            middle = (start + stop) // 2
            found += hasher.update(start, whole[start:middle], data[middle:stop])
        chunks = [data[slice(*grid.range(n))] for n in range(len(grid))]
        expected = [HASHES[algorithm](each).hexdigest() for each in chunks]
        assert [digest([each], algorithm) for each in chunks] == expected
        assert {len(each) for each in expected} == {len(grid.unsealed)}
        assert [each.chunk for each in found] == [*range(len(grid))]
        assert [each.digest for each in found] == expected
        assert all(each.matches for each in found), "nobody expected anything"

    def test_a_chunk_is_compared_with_the_manifest(self) -> None:
        """The error names the chunk, both digests, and where the bytes came from."""
        data, grid = bytes(range(150)), ChunkGrid(150, 64)
        expected = [digest([data[:64]]), "?", digest([data[128:]])]
        found = ChunkHasher(grid, expected).update(0, data)
        assert [each.matches for each in found] == [True, False, True]
        error = found[1].error("http://peer")
        assert (error.chunk, error.expected, error.url) == (1, "?", "http://peer")
        assert error.actual == digest([data[64:128]])

    def test_a_run_begins_at_any_chunk(self) -> None:
        """An unfinished chunk is dropped, whether the run jumps or begins again."""
        data = bytes(range(200))
        hasher = ChunkHasher(ChunkGrid(200, 64))
        assert hasher.update(128, data[128:150]) == []
        assert hasher.update(64, b"x" * 10) == []
        (again,) = hasher.update(64, data[64:128])
        assert (again.chunk, again.digest) == (1, digest([data[64:128]]))
        assert [each.chunk for each in hasher.update(128, data[128:])] == [2, 3]
        (first,) = hasher.update(0, data[:64])
        assert (first.chunk, first.digest) == (0, digest([data[:64]]))

    @pytest.mark.parametrize("start", [1, 63, 65, 5])
    def test_a_gap_is_an_error(self, start: int) -> None:
        """No digest is made of bytes that do not follow one another."""
        hasher = ChunkHasher(ChunkGrid(200, 64))
        hasher.update(0, b"abc")
        with pytest.raises(LocalProtocolError, match=f"byte {start} neither follows"):
            hasher.update(start, b"d")
        assert hasher.position == 3
        with pytest.raises(IndexError):
            ChunkHasher(ChunkGrid(64, 64)).update(0, bytes(65))
