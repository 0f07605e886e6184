"""Arguments that several commands share, and the files that a path stands for."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from aiockpt.cli.text import counted
from aiockpt.errors import CheckpointNotFoundError, LocalProtocolError
from aiockpt.http.protocol import Address, parse_address
from aiockpt.runtime.secrets import Token
from aiockpt.storage.directory import Checkpoint, checkpoint_at, list_checkpoints

__all__ = [
    "Address",
    "Commands",
    "UsageError",
    "add_client_options",
    "add_overwrite_option",
    "address",
    "checkpoint_or_file",
    "local_path",
    "one_file",
    "pointing_below",
    "port",
    "seconds",
    "size",
    "step",
]

Commands: TypeAlias = "argparse._SubParsersAction[Any]"  # noqa: SLF001 - no public name
"""What a command adds its parser to."""


class UsageError(LocalProtocolError):
    """The arguments contradict each other, or do not fit what they name."""


_URL = re.compile(r"https?://", re.IGNORECASE)
_SIZE = re.compile(
    r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?(?:(?:([KMGT])(I?))?B)?", re.IGNORECASE
)
_PREFIXES = ["", "K", "M", "G", "T"]


def address(text: str) -> Address:
    """Parse what names a checkpoint at a peer; see `parse_address`."""
    try:
        return parse_address(text)
    except LocalProtocolError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def local_path(text: str) -> Path:
    """Parse the path of a file or a directory; a URL, which may hold a token, is none.

    The complaint does not repeat it.
    """
    if _URL.match(text):
        raise argparse.ArgumentTypeError(
            "it is a URL, and this command reads files; get the file first: "
            "aiockpt fetch URL -o FILE"
        )
    return Path(text)


def seconds(text: str) -> float:
    """Parse a time in seconds."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return value


def size(text: str) -> int:
    """Parse a number of bytes: ``10GiB`` in powers of 1024, ``10GB`` of 1000."""
    found = _SIZE.fullmatch(text)
    if found is None:
        detail = f"{text!r} is no size: write 10GiB, 500MB, or a number of bytes"
        raise argparse.ArgumentTypeError(detail)
    number, prefix, binary = found.groups()
    base = 1024 if binary else 1000
    return int(float(number) * base ** _PREFIXES.index((prefix or "").upper()))


def port(text: str) -> int:
    """Parse a TCP port."""
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 65535")
    return value


def step(text: str) -> int:
    """Parse a training step."""
    if re.fullmatch(r"[0-9]{1,18}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no step: it is a whole number")
    return int(text)


def add_overwrite_option(parser: argparse.ArgumentParser) -> None:
    """Add what every command asks for that writes where something may be."""
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace what is there already, when the new one is complete",
    )


def add_client_options(parser: argparse.ArgumentParser) -> None:
    """Add how to reach a peer, for every command that fetches."""
    parser.add_argument(
        "--token",
        type=Token,
        help="the token that the sender was given, if the URL has none; "
        "AIOCKPT_TOKEN and AIOCKPT_TOKEN_PATH keep it out of the process list",
    )
    parser.add_argument(
        "--cafile",
        metavar="FILE",
        help="trust this certificate (or authority) of an https sender",
    )
    parser.add_argument(
        "--wait",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help="wait so long for a sender, or a step, that is not there yet",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=math.inf,
        metavar="SECONDS",
        help="deadline of the whole command; none by default, though a sender that "
        "falls silent is given up",
    )
    parser.add_argument(
        "--reconnect",
        type=seconds,
        default=10.0,
        metavar="SECONDS",
        help="how long to try to reach a sender that fell silent (%(default)s)",
    )


def checkpoint_or_file(path: Path) -> Checkpoint | Path:
    """Return the checkpoint at a path; or the path, where there is no directory.

    Raises:
        CheckpointNotFoundError: it is a directory without a whole checkpoint.
    """
    if not path.is_dir():
        return path
    with pointing_below(path):
        return checkpoint_at(path)


@contextmanager
def pointing_below(path: Path) -> Iterator[None]:
    """Name a checkpoint in the directory where the directory itself is none."""
    try:
        yield
    except CheckpointNotFoundError:
        below = list_checkpoints(path) if path.is_dir() else []
        if not below:
            raise
        count = counted(len(below), "checkpoint")
        detail = f"it is a directory of {count}: name one, such as {below[-1].path}"
        raise CheckpointNotFoundError(str(path), detail) from None


def one_file(path: Path, rank: int | None) -> Path:
    """Return the file of one rank.

    Raises:
        UsageError: several ranks, and none was chosen; or a file was given.
        CheckpointNotFoundError: no whole checkpoint, or no such rank in it.
    """
    found = checkpoint_or_file(path)
    if isinstance(found, Path):
        if rank is not None:
            raise UsageError("--rank is for checkpoint directories")
        return found
    if rank is None and found.world_size > 1:
        raise UsageError(
            f"{found.world_size} ranks wrote {path}: choose one with --rank"
        )
    return found.file_of(rank or 0)
