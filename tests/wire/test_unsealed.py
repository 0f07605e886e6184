"""Manifests that come before their digests, and what the sealed ones must be."""

from __future__ import annotations

import pytest

from aiockpt.errors import IntegrityError, RemoteProtocolError
from aiockpt.wire.chunks import ChunkGrid
from aiockpt.wire.layout import ID_SLICE, LENGTH_BYTES, Storage, snapshot_id_of
from aiockpt.wire.manifest import Manifest, build_manifest
from aiockpt.wire.relabel import UNSEALED, with_digests
from aiockpt.wire.unsealed import Promise, accepts, make_tag, parse_tag, wanted_tag

NBYTES, CHUNK = 200_000, 64 << 10
CHUNKS = range(len(ChunkGrid(NBYTES, CHUNK)))
DIGESTS = [f"{chunk + 1:032x}" for chunk in CHUNKS]
TAG = make_tag(bytes(range(16)))
LOOKALIKE = r"\"digests\":\""


def manifest(step: int = 3, name: str = "w") -> Manifest:
    """Return one that is not sealed."""
    return build_manifest(
        step=step,
        chunk_bytes=CHUNK,
        storages=[Storage(name, "U8", (NBYTES,), NBYTES, 1)],
        tree=["dict", [LOOKALIKE], [["tensor", 0]]],
        digests=[UNSEALED] * len(CHUNKS),
    )


def altered(header: bytes, at: int) -> bytes:
    """Return another header, with a snapshot id that fits it."""
    text = bytearray(header)
    text[at] ^= 1
    view = memoryview(text)[LENGTH_BYTES:]
    view[ID_SLICE] = snapshot_id_of(view).encode()
    return bytes(text)


@pytest.mark.parametrize("name", ["w", LOOKALIKE])
def test_the_seal_is_the_same_header_with_digests(name: str) -> None:
    """Whatever else in it looks like them."""
    unsealed = manifest(name=name)
    sealed = with_digests(unsealed, DIGESTS)
    promise = Promise.of(unsealed, TAG)
    assert promise.outline(unsealed.outline).snapshot_id == TAG
    assert promise.kept(bytes(sealed.header), unsealed.outline) == sealed.outline


def test_no_other_header_is_a_seal() -> None:
    """Not that of another step, nor of another tree, nor a longer one."""
    unsealed = manifest()
    promise = Promise.of(unsealed, TAG)
    others = [
        with_digests(manifest(step=4), DIGESTS),
        with_digests(manifest(name="v"), DIGESTS),
        with_digests(manifest(name="w" * 100), DIGESTS),
    ]
    for other in others:
        with pytest.raises(RemoteProtocolError, match="another checkpoint"):
            promise.kept(bytes(other.header), unsealed.outline)


def test_a_byte_anywhere_else_makes_it_another_header() -> None:
    """Though its snapshot id is right."""
    unsealed = manifest()
    promise, sealed = Promise.of(unsealed, TAG), with_digests(unsealed, DIGESTS)
    header = bytes(sealed.header)
    digits = range(header.find(DIGESTS[0].encode()), header.rfind(b"4") + 1)
    place = ID_SLICE.start + LENGTH_BYTES
    for at in range(LENGTH_BYTES, len(header)):
        if place <= at < place + 32:
            continue  # the snapshot id itself
        other = altered(header, at)
        if at in digits[: 32 * len(CHUNKS)]:
            found = promise.kept(other, unsealed.outline)
            assert found.digests != sealed.digests
        else:
            with pytest.raises(RemoteProtocolError):
                promise.kept(other, unsealed.outline)


def test_a_seal_that_was_damaged_is_refused() -> None:
    """Its snapshot id is its digest."""
    unsealed = manifest()
    header = bytearray(with_digests(unsealed, DIGESTS).header)
    header[-1] ^= 1
    with pytest.raises(IntegrityError):
        Promise.of(unsealed, TAG).kept(header, unsealed.outline)


def test_what_has_digests_is_not_unsealed() -> None:
    """A peer that says so contradicts itself."""
    sealed = with_digests(manifest(), DIGESTS)
    with pytest.raises(RemoteProtocolError, match="has digests"):
        Promise.of(sealed, TAG)


def test_an_empty_checkpoint_has_no_digests() -> None:
    """Sealed or not, its header is the same."""
    empty = build_manifest(step=1, chunk_bytes=CHUNK, storages=[], tree=1, digests=[])
    assert with_digests(empty, []) == empty
    promise = Promise.of(empty, TAG)
    assert promise.kept(bytes(empty.header), empty.outline) == empty.outline


def test_a_tag_is_no_snapshot_id() -> None:
    """Nor is anything else a tag."""
    assert wanted_tag(f" {TAG} ") == parse_tag(TAG) == TAG
    for other in (None, "", "accept", 32 * "0", f'"{TAG}"', TAG + "0", TAG.upper()):
        assert wanted_tag(other) is None
    for other in ("", "accept", 32 * "0", TAG + "\n"):
        with pytest.raises(RemoteProtocolError, match="Aiockpt-Unsealed"):
            parse_tag(other)


def test_who_accepts_says_so() -> None:
    """In one word."""
    assert accepts(" accept ")
    assert not any(map(accepts, (None, "", "no", TAG)))
