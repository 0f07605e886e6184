"""``aiockpt convert``: a checkpoint as another kind of file, exactly or not at all."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from aiockpt.cli.options import Commands, add_overwrite_option, local_path, step
from aiockpt.cli.text import printable

__all__ = ["configure", "run"]

_FORMS = (".pt", ".safetensors")
_SUFFIX = re.compile(r"\.[a-z][a-z0-9_]*")  # "llama-3.1" has none


def configure(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "convert",
        help="convert a checkpoint from or to .pt and plain safetensors",
        description="Convert a checkpoint. FROM is a checkpoint directory, any "
        "safetensors file, a directory of such, or a file of torch.save. TO says by "
        "its name what it becomes: .pt for torch.save, .safetensors for a plain file "
        "of any tool's, a name without a suffix (or that ends with a slash) for a "
        "checkpoint directory. What was written is read back and compared, so a "
        "conversion is exact, or refused.",
    )
    parser.add_argument("source", metavar="FROM", type=local_path)
    parser.add_argument("target", metavar="TO", type=_target)
    add_overwrite_option(parser)
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


def _target(text: str) -> Path:
    """Return what is to be written; a suffix that means nothing is refused."""
    path = Path(text)
    suffix = path.suffix.lower()
    known = suffix in _FORMS or _SUFFIX.fullmatch(suffix) is None
    if known or text.endswith("/"):
        return path
    raise argparse.ArgumentTypeError(
        f"{text!r} has the suffix of no known kind of file: name a file .pt or "
        f".safetensors, or write {text + '/'!r} for a checkpoint directory"
    )


def run(arguments: argparse.Namespace) -> int:
    """Convert; the summary goes to stderr."""
    from aiockpt.cli.conversion import convert

    target: Path = arguments.target
    convert(
        arguments.source,
        target,
        rank=arguments.rank,
        step=arguments.step,
        replace=arguments.overwrite,
    )
    print(f"wrote {printable(str(target))}", file=sys.stderr)
    return 0
