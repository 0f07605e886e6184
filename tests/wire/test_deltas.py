"""Deltas of chunks: each kind, whatever has changed, and bytes that are no delta."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import RemoteProtocolError
from aiockpt.transfer.deltas import RAW, SAME, SPARSE, changer, encode, head, split

HEAD = struct.Struct("<BxxxI")


def patched(base: bytes, delta: bytes) -> bytes:
    """Return what a delta makes of a base."""
    [(kind, body)] = split(memoryview(delta), 1)
    made = memoryview(bytearray(base))
    change = changer(kind, body, len(base))
    block = 6 + len(base) // 100 * 2  # changes fall before, on and after a border
    for at in reversed(range(0, len(base), block)):
        change(at, made[at : at + block])
    return bytes(made)


def changed(base: bytes, places: list[int], by: int = 1) -> bytes:
    """Return a copy in which some bytes are others."""
    made = bytearray(base)
    for place in places:
        made[place] = (made[place] + by) % 256
    return bytes(made)


def kind_of(delta: bytes | None) -> int:
    """Return the kind of a delta."""
    return RAW if delta is None else delta[0]


@pytest.mark.parametrize("nbytes", [0, 1, 2, 7, 8, 64, 65, 4097, 300_001])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.2])
def test_a_delta_makes_the_target_of_the_base(nbytes: int, share: float) -> None:
    """Sizes that are no multiple of a word work, and changes far apart."""
    chance = random.Random(nbytes)
    base = chance.randbytes(nbytes)
    for count in {0, min(1, nbytes), int(share * nbytes)}:
        target = changed(base, chance.sample(range(nbytes), count))
        delta = encode(memoryview(base), memoryview(target))
        if delta is not None:
            assert patched(base, delta) == target
            assert len(delta) <= max(nbytes, 8) + 8
        else:
            assert count


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_two_chunks_of_one_size(base: bytes, target: bytes) -> None:
    """A delta is right, or there is none."""
    nbytes = min(len(base), len(target))
    base, target = base[:nbytes], target[:nbytes]
    delta = encode(memoryview(base), memoryview(target))
    assert delta is None or patched(base, delta) == target


@pytest.mark.parametrize(
    "words", [[0], [65535], [65536], [65537], [131071, 131072], [0, 2**19 - 1]]
)
def test_changes_that_are_far_apart(words: list[int]) -> None:
    """A gap that 16 bits cannot hold is bridged."""
    base = bytes(1 << 20)
    target = changed(base, [2 * word for word in words])
    delta = encode(memoryview(base), memoryview(target))
    assert kind_of(delta) == SPARSE
    assert delta is not None
    assert patched(base, delta) == target
    assert len(delta) < 64


def test_each_kind_where_it_is_best() -> None:
    """Nothing changed, a little, and nearly everything."""
    base = random.Random(1).randbytes(1 << 20)
    few = changed(base, [*range(0, 1 << 20, 200)])
    all_of_it = changed(base, [*range(1 << 20)])
    for target, kind in ((base, SAME), (few, SPARSE), (all_of_it, RAW)):
        assert kind_of(encode(memoryview(base), memoryview(target))) == kind


def test_small_steps_of_scattered_weights_take_less_than_a_percent() -> None:
    """One weight of a hundred of bfloat16, by the smallest step either way."""
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.02, 1 << 20).astype(np.float32).view(np.uint32)
    base = (weights >> 16).astype(np.uint16)
    target = base.copy()
    places = rng.choice(len(base), len(base) // 100, replace=False)
    target[places] += rng.choice([1, 65535], len(places)).astype(np.uint16)
    delta = encode(memoryview(base.tobytes()), memoryview(target.tobytes()))
    assert delta is not None
    assert len(delta) <= 0.008 * base.nbytes
    assert patched(base.tobytes(), delta) == target.tobytes()


def sparse(count: int, planes: bytes, **options: Any) -> bytes:
    """Return a delta of these planes, whatever they are."""
    packed = zstandard.ZstdCompressor(**options).compress(planes)
    return struct.pack("<I", count) + packed


BOMB = zstandard.ZstdCompressor().compress(bytes(64 << 20))


@pytest.mark.parametrize(
    ("kind", "body", "fault"),
    [
        (3, b"", "kind 3"),
        (SAME, b"x", "kind 0"),
        (RAW, b"short", "kind 2"),
        (SPARSE, b"", "kind 1"),
        (SPARSE, b"\1\0\0", "kind 1"),
        (SPARSE, struct.pack("<I", 1) + b"no frame", "decompressed"),
        (SPARSE, sparse(2, bytes(4)), "without 2 changes"),
        (SPARSE, sparse(1, bytes(4), write_content_size=False), "without 1 changes"),
        (SPARSE, struct.pack("<I", 1) + BOMB, "without 1 changes"),
        (SPARSE, struct.pack("<I", 16 << 20) + BOMB, "changes for 32 words"),
        (SPARSE, sparse(1, b"\x20\0\1\0"), "after the last"),
        (SPARSE, sparse(1, bytes(4))[:-1], "decompressed"),
    ],
)
def test_what_is_no_delta_is_refused(kind: int, body: bytes, fault: str) -> None:
    """It is refused before more memory is taken than the chunk has."""
    with pytest.raises(RemoteProtocolError, match=fault):
        changer(kind, memoryview(body), 64)


@pytest.mark.parametrize(
    ("deltas", "fault"),
    [
        (b"", "0 deltas instead of 2"),
        (head(SAME, 0) + bytes(7), "1 deltas instead of 2"),
        (head(SAME, 0) + head(RAW, 9) + bytes(8), "ends too early"),
        (head(SAME, 0) * 3, "after the last"),
    ],
)
def test_other_bytes_than_so_many_deltas(deltas: bytes, fault: str) -> None:
    """Cut short, or with something behind them."""
    with pytest.raises(RemoteProtocolError, match=fault):
        split(memoryview(deltas), 2)
