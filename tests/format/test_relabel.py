"""The same checkpoint under another step, or sealed later."""

from __future__ import annotations

from aiockpt.format.chunks import UNSEALED, ChunkGrid, digest
from aiockpt.format.entries import Storage
from aiockpt.format.header import build_manifest, decode_header, with_digests, with_step
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest

DATA = bytes(range(256)) * 1000
CHUNK = 64 << 10
CHUNKS = range(len(ChunkGrid(len(DATA), CHUNK)))


def manifest(digests: list[str], step: int = 3) -> Manifest:
    """Return one of four chunks."""
    storages = [
        Storage("b", "F32", (32_000,), 128_000, 4),
        Storage("a", "U8", (128_000,), 128_000, 1),
    ]
    return build_manifest(
        step=step,
        chunk_bytes=CHUNK,
        storages=storages,
        tree=["tensors", ["b", "a"], [0, 1]],
        digests=digests,
    )


def test_sealing_later_makes_the_same_header() -> None:
    """Whoever staged in a hurry has the same checkpoint in the end."""
    grid = ChunkGrid(len(DATA), CHUNK)
    ranges = [grid.range(chunk) for chunk in CHUNKS]
    digests = [digest([DATA[start:stop]]) for start, stop in ranges]
    early, late = manifest(digests), manifest([UNSEALED] * len(CHUNKS))
    assert len(early.header) == len(late.header)
    assert early.snapshot_id != late.snapshot_id
    assert with_digests(late, digests).header == early.header


def test_an_unsealed_header_can_be_decoded() -> None:
    """It travels to the process that seals it."""
    late = manifest([UNSEALED] * len(CHUNKS))
    assert decode_header(bytes(late.header), limits=Limits()) == late


def test_another_step_changes_nothing_else() -> None:
    """The memory is the same."""
    digests = [f"{chunk:032x}" for chunk in CHUNKS]
    assert with_step(manifest(digests), 9) == manifest(digests, step=9)
