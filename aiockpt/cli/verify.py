"""``aiockpt verify``: every chunk of a file, or of a checkpoint, by its digest."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from aiockpt.cli.options import Commands, checkpoint_or_file, local_path
from aiockpt.cli.text import counted, format_bytes, printable
from aiockpt.errors import IntegrityError
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.format.manifest import ForeignHeader, Manifest
from aiockpt.storage.checkpoint_file import read_header, verify_chunks

__all__ = ["configure", "run"]

_SHOWN = 10


def configure(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "verify",
        help="verify every chunk of a file or a checkpoint directory",
        description="Verify the header and every chunk of a file that aiockpt wrote, "
        "or of all files of a checkpoint directory. Fails if something is damaged, and "
        "if the file has no digests, as those of other tools have none.",
    )
    parser.add_argument("file", metavar="PATH", type=local_path)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify everything, also after the first damage."""
    found = checkpoint_or_file(arguments.file)
    if isinstance(found, Path):
        return _verify(found)
    codes = [
        _verify(found.path / name, expected=file.snapshot)
        for name, file in sorted(found.files.items())
    ]
    return max(codes)


def _verify(path: Path, *, expected: str | None = None) -> int:
    """Verify one file; ``expected`` is the snapshot that it must be."""
    header = read_header(path, limits=FILE_LIMITS)
    shown = printable(str(path))
    if isinstance(header, ForeignHeader):
        detail = "well formed, but it has no digests to verify"
        print(f"aiockpt: error: {shown}: {detail}", file=sys.stderr)
        return 1
    if expected not in (None, header.snapshot_id):
        detail = f"it is snapshot {header.snapshot_id}, the marker names {expected}"
        print(f"aiockpt: error: {shown}: {detail}", file=sys.stderr)
        return 1
    damage = list(verify_chunks(path, header))
    if damage:
        print(f"aiockpt: error: {shown}: {_describe(damage, header)}", file=sys.stderr)
        return 1
    print(
        f"{shown}: {counted(len(header.grid), 'chunk')} of "
        f"{format_bytes(header.chunk_bytes)} and "
        f"the header are intact; step {header.step}, snapshot {header.snapshot_id}"
    )
    return 0


def _describe(damage: list[IntegrityError], manifest: Manifest) -> str:
    """Name the damaged chunks, and what the first one should have been."""
    first, *others = damage
    start, stop = manifest.grid.range(first.chunk or 0)
    base = manifest.header_bytes
    text = (
        f"chunk {first.chunk} of {len(manifest.grid)} (bytes {base + start} to "
        f"{base + stop}) has digest {first.actual}, expected {first.expected}"
    )
    if others:
        named = ", ".join(str(error.chunk) for error in others[:_SHOWN])
        more = ", ..." if len(others) > _SHOWN else ""
        text += f"; {len(others)} more are damaged: {named}{more}"
    return text
