"""The published example of the wire format is what the package writes and reads."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from aiockpt import Limits
from aiockpt.format.chunks import digest
from aiockpt.format.header import build_manifest, decode_header
from aiockpt.format.manifest import Manifest, TensorSpec
from tests.support.headers import entries_of

PAGE = (Path(__file__).parents[2] / "docs/reference/wire-format.md").read_text()
SEGMENT = struct.pack("<4f", 1, 2, 3, 4)

pytestmark = pytest.mark.torch_free


def published_file() -> bytes:
    """Return the bytes that the page describes."""
    section = PAGE.partition("\n## An example\n")[2]
    length, segment = map(bytes.fromhex, re.findall(r"`([0-9a-f]{16,})`", section)[:2])
    (spaces,) = re.findall(r"this line and (\d+) spaces", section)
    (header,) = re.findall(r"^```text\n(.*)\n```", section, re.MULTILINE)
    return length + header.encode() + b" " * int(spaces) + segment


def published_reader() -> dict[str, object]:
    """Return the names that the page's program defines."""
    (source,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    exec(source, names)
    return names


def test_package_writes_the_published_bytes() -> None:
    """The format of version 1 does not change by accident."""
    manifest = build_manifest(
        step=7,
        chunk_bytes=1 << 22,
        entries=entries_of(("w", "F32", (2, 2), len(SEGMENT))),
        views=[TensorSpec(0, "float32", (2, 2), (1, 2), 0, 0)],
        tree=["dict", ["w", "t", "lr"], [["tensor", 0], ["tensor", 1], 0.1]],
        digests=[digest([SEGMENT])],
    )
    assert bytes(manifest.header) + SEGMENT == published_file()


def test_package_reads_the_published_bytes() -> None:
    """A checkpoint of version 1 stays readable."""
    header = published_file()[: -len(SEGMENT)]
    manifest = decode_header(header, limits=Limits())
    assert isinstance(manifest, Manifest)
    assert (manifest.step, manifest.names, manifest.tensor_count) == (7, ["w"], 2)


def test_published_reader_reads_the_published_bytes() -> None:
    """The page is enough to write a reader."""
    read = published_reader()["read"]
    manifest, segment = read(published_file())  # type: ignore[operator]
    assert manifest["tree"][1] == ["w", "t", "lr"]
    assert segment == SEGMENT


@pytest.mark.parametrize("position", [0, 8, 50, 100, 400, 447, 448, 463])
def test_published_reader_notices_a_flipped_bit(position: int) -> None:
    """Header, padding and data are all covered."""
    read = published_reader()["read"]
    broken = bytearray(published_file())
    broken[position] ^= 1
    with pytest.raises((AssertionError, ValueError)):
        read(bytes(broken))  # type: ignore[operator]
