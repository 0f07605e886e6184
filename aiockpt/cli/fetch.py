"""``aiockpt fetch``: a peer's checkpoint into a file, resumed and verified."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from aiockpt.cli.options import (
    Commands,
    add_client_options,
    add_overwrite_option,
    address,
    size,
    step,
)
from aiockpt.cli.progress import ProgressBar
from aiockpt.errors import AiockptError

__all__ = ["configure", "run"]


def configure(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "fetch",
        help="fetch a checkpoint into a file",
        description="Fetch a checkpoint into a safetensors file. Every chunk is "
        "verified; FILE appears in one step, when all of it is on the disk. What "
        "a failed fetch has verified stays in FILE.part, where the next one goes on.",
    )
    parser.add_argument(
        "urls",
        metavar="URL",
        nargs="+",
        type=address,
        help="what the sender's metadata() says; .../checkpoint/100 names a step. Of "
        "several that hold the same checkpoint each gives a part",
    )
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, required=True)
    add_overwrite_option(parser)
    parser.add_argument(
        "--step", type=step, metavar="N", help="the step to fetch (what is served now)"
    )
    parser.add_argument(
        "--max-size",
        type=size,
        metavar="SIZE",
        help="refuse a larger checkpoint before a byte of it is fetched: 10GiB, 500MB "
        "(as large as the disk holds)",
    )
    add_client_options(parser)
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="report nothing but errors"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Fetch; the bar and the summary go to stderr."""
    from aiockpt.cli.download import download

    bar = ProgressBar(sys.stderr, quiet=arguments.quiet)
    try:
        summary = asyncio.run(download(arguments, bar))
    except (AiockptError, OSError, KeyboardInterrupt) as error:
        part = Path(f"{arguments.output.resolve()}.part")
        if bar.chunks_done and part.exists():
            error.add_note(
                f"what was verified is in {part}: run the same command again to go on "
                "from there"
            )
        raise
    finally:
        bar.close()
    bar.note(summary)
    return 0
