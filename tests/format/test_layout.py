"""The segment has no holes, every tensor is aligned, and the file is safetensors."""

from __future__ import annotations

from math import prod

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import LocalProtocolError
from aiockpt.format.chunks import ChunkGrid, digest
from aiockpt.format.dtypes import DTYPES
from aiockpt.format.entries import Storage, Storages, make_entries, plan_segment
from aiockpt.format.header import PREFIX, build_manifest, decode_header
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest, dense_stride

CODES = {code: size for size, code in DTYPES.values() if code is not None}
NAMES = st.text(max_size=6).filter(lambda name: name != "__metadata__")


@st.composite
def storages(draw: st.DrawFn) -> list[Storage]:
    """Return storages as a state dict may have them, in any order."""
    found = []
    for name in draw(st.lists(NAMES, unique=True, max_size=8)):
        code = draw(st.sampled_from(sorted(CODES)))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        nbytes = prod(shape) * CODES[code]
        wider = [size for size in (16, 8, 4, 2, 1) if nbytes % size == 0]
        align = draw(st.sampled_from([s for s in wider if s >= CODES[code]] or [1]))
        found.append(Storage(name, code, shape, nbytes, align))
    return found


@given(storages())
def test_storages_tile_the_segment_aligned(found: list[Storage]) -> None:
    """No gap, no overlap, and each starts at a multiple of its widest element."""
    order, offsets, segment_bytes = plan_segment(Storages.of(found))
    assert sorted(order) == list(range(len(found)))
    end = 0
    for index, offset in zip(order, offsets, strict=True):
        assert offset == end
        assert offset % found[index].align == 0
        end = offset + found[index].nbytes
    assert end == segment_bytes


@given(storages())
def test_widest_come_first_and_equals_keep_their_order(found: list[Storage]) -> None:
    """The order depends on nothing but the state dict."""
    order, _, _ = plan_segment(Storages.of(found))
    assert list(order) == sorted(order, key=lambda i: (-found[i].align, i))


def test_a_ragged_storage_is_refused() -> None:
    """Whatever follows it would not be aligned."""
    with pytest.raises(LocalProtocolError, match="alignment"):
        plan_segment(Storages.of([Storage("a", "U8", (10,), 10, 8)]))


def build(found: list[Storage], segment: bytes) -> Manifest:
    """Lay storages out and describe them."""
    order, _, size = plan_segment(Storages.of(found))
    grid = ChunkGrid(size, 1 << 16)
    chunks = [segment[slice(*grid.range(index))] for index in range(len(grid))]
    return build_manifest(
        step=1,
        chunk_bytes=grid.chunk_bytes,
        storages=[found[index] for index in order],
        tree=["list", [["tensor", index] for index in range(len(found))]],
        digests=[digest([chunk]) for chunk in chunks],
    )


@given(storages())
def test_every_layout_survives_the_header(found: list[Storage]) -> None:
    """What was built is what is read, and what is read encodes to the same bytes."""
    manifest = build(found, bytes(plan_segment(Storages.of(found))[2]))
    assert decode_header(manifest.header, limits=Limits()) == manifest
    assert manifest.header_bytes % 64 == 0


def test_the_header_starts_with_the_prefix_and_its_keys_in_order() -> None:
    """The bytes of version 1 do not depend on how a dict was made."""
    manifest = build([Storage("b", "U8", (0,), 0, 1)], b"")
    assert bytes(manifest.header).startswith(PREFIX, 8)
    header = msgspec.json.decode(manifest.header[8:])
    assert list(header) == ["__metadata__", "b"]
    assert list(header["__metadata__"]) == ["aiockpt.snapshot", "format", "aiockpt"]
    assert list(header["b"]) == ["dtype", "shape", "data_offsets"]


def test_a_name_given_twice_is_refused() -> None:
    """JSON would keep one of the two."""
    twice = [Storage("a", "U8", (1,), 1, 1)] * 2
    with pytest.raises(LocalProtocolError, match="same name"):
        make_entries(Storages.of(twice))


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_a_name_that_the_header_cannot_hold_is_refused(name: str) -> None:
    """It is our bug, not the receiver's puzzle."""
    with pytest.raises(LocalProtocolError):
        build([Storage(name, "U8", (1,), 1, 1)], b"\0")


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((), ()),
        ((5,), (1,)),
        ((2, 3, 4), (12, 4, 1)),
        ((2, 0, 3), (3, 3, 1)),
        ((0,), (1,)),
        ((1, 1), (1, 1)),
    ],
)
def test_dense_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Row-major; a dimension without elements counts as one."""
    assert dense_stride(shape) == stride
