"""``aiockpt convert``: a checkpoint as another kind of file, exactly or not at all."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from aiockpt.cli.options import Commands, step
from aiockpt.cli.text import printable

__all__ = ["configure", "run"]


def configure(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "convert",
        help="convert a checkpoint from or to .pt and plain safetensors",
        description="Convert a checkpoint. FROM is a checkpoint directory, any "
        "safetensors file, a directory of such, or a file of torch.save. TO says by "
        "its name what it becomes: .pt for torch.save, .safetensors for a plain file "
        "of any tool's, else a checkpoint directory. What was written is read back "
        "and compared, so a conversion is exact, or refused.",
    )
    parser.add_argument("source", metavar="FROM", type=Path)
    parser.add_argument("target", metavar="TO", type=Path)
    parser.add_argument(
        "--rank",
        type=step,
        metavar="N",
        help="of a checkpoint by several ranks",
    )
    parser.add_argument(
        "--step",
        type=step,
        metavar="N",
        help="the step of a checkpoint directory (the number at the end of its name)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Convert; the summary goes to stderr."""
    from aiockpt.cli.conversion import convert

    target: Path = arguments.target
    convert(arguments.source, target, rank=arguments.rank, step=arguments.step)
    print(f"wrote {printable(str(target))}", file=sys.stderr)
    return 0
