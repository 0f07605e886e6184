"""The chunk grid and its digests."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.format.chunks import ChunkGrid, Digester, digest

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


@given(st.binary(min_size=1, max_size=300), st.lists(st.integers(1, 299)))
def test_chunks_that_pass_by_in_any_blocks_have_their_digests(
    data: bytes, cuts: list[int]
) -> None:
    """As if each were digested alone; the views are handed on as they are."""
    grid = ChunkGrid(len(data), 64)
    made = Digester(grid, unknown="?")
    whole = memoryview(data)
    passed = b""
    stops = [*sorted({cut for cut in cuts if cut < len(data)}), len(data)]
    for start, stop in zip([0, *stops], stops, strict=False):
        found = made.views(start, stop, lambda first, last: [whole[first:last]])
        passed += b"".join(found)
        assert made.digests[-1] == "?" or stop == len(data)
    assert passed == data
    chunks = [grid.range(index) for index in range(len(grid))]
    assert made.digests == [digest([whole[a:b]]) for a, b in chunks]
