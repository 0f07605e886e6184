"""The chunk grid and its digests."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import LocalProtocolError
from aiockpt.format.chunks import ChunkGrid, ChunkHasher, digest

SIZES = st.integers(0, 10_000)
LENGTHS = st.integers(1, 300)


@given(SIZES, LENGTHS)
def test_chunks_tile_the_segment(size: int, length: int) -> None:
    """Each byte is in exactly one chunk; only the last chunk may be shorter."""
    grid = ChunkGrid(size, length)
    ranges = [grid.range(index) for index in range(len(grid))]
    assert [0, *(stop for _, stop in ranges)] == [*(start for start, _ in ranges), size]
    assert all(stop - start == length for start, stop in ranges[:-1])
    assert all(0 < stop - start <= length for start, stop in ranges[-1:])


@given(st.integers(1, 10_000), LENGTHS, st.data())
def test_every_byte_knows_its_chunk(
    size: int, length: int, data: st.DataObject
) -> None:
    """`index_of` is the inverse of `range`."""
    grid = ChunkGrid(size, length)
    offset = data.draw(st.integers(0, size - 1))
    start, stop = grid.range(grid.index_of(offset))
    assert start <= offset < stop


def test_an_empty_segment_has_no_chunks() -> None:
    """There is nothing to fetch and nothing to verify."""
    assert len(ChunkGrid(0, 64)) == 0


@pytest.mark.parametrize("index", [-1, 2, 10**30])
def test_a_chunk_outside_of_the_grid_is_an_error(index: int) -> None:
    """A negative index does not count from the end."""
    with pytest.raises(IndexError):
        ChunkGrid(100, 64).range(index)


@pytest.mark.parametrize("offset", [-1, 100])
def test_a_byte_outside_of_the_segment_is_an_error(offset: int) -> None:
    """No offset is rounded into the segment."""
    with pytest.raises(IndexError):
        ChunkGrid(100, 64).index_of(offset)


def test_a_grid_of_any_size_costs_nothing() -> None:
    """A peer that claims 2**62 bytes makes nobody count them."""
    assert ChunkGrid(2**62, 64).range(2**55) == (2**61, 2**61 + 64)


@given(st.binary(max_size=1000), st.integers(0, 1000))
def test_a_digest_does_not_depend_on_how_bytes_are_split(data: bytes, at: int) -> None:
    """A chunk has one digest, wherever tensors begin and end in it."""
    whole = xxhash.xxh3_128(data).hexdigest()
    assert digest([data]) == whole
    assert digest([memoryview(data)[:at], b"", bytearray(data[at:])]) == whole


class TestChunkHasher:
    """`ChunkHasher`: every chunk's digest, from bytes that pass once."""

    @given(st.binary(min_size=1, max_size=300), st.lists(st.integers(1, 299)))
    def test_any_blocks_give_the_same_digests(
        self, data: bytes, cuts: list[int]
    ) -> None:
        """As if each chunk were digested alone, and each is told once, in order."""
        grid, whole = ChunkGrid(len(data), 64), memoryview(data)
        hasher = ChunkHasher(grid)
        stops = [*sorted({cut for cut in cuts if cut < len(data)}), len(data)]
        found = []
        for start, stop in zip([0, *stops], stops, strict=False):
            assert hasher.position == start
            middle = (start + stop) // 2
            found += hasher.update(start, whole[start:middle], data[middle:stop])
        expected = [digest([data[slice(*grid.range(n))]]) for n in range(len(grid))]
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

    def test_bytes_beyond_the_segment_are_an_error(self) -> None:
        """What belongs to no chunk is not digested silently."""
        hasher = ChunkHasher(ChunkGrid(64, 64))
        with pytest.raises(IndexError):
            hasher.update(0, bytes(65))
