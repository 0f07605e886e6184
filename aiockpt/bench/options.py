"""The arguments of ``aiockpt bench``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aiockpt.bench.shapes import SHAPES

__all__ = ["TRANSPORTS", "Options", "parse"]

TRANSPORTS = ("http", "pg")

_SIZE, _REPEAT = 2.0, 5
_DELTA_SIZE, _DELTA_REPEAT = 1.0, 3  # a whole GiB takes 9 s over its line
_CONNECTIONS = min(4, os.cpu_count() or 4)  # as of a transport
_QUICK_SIZE, _QUICK_REPEAT = 0.25, 3
_QUICK_SECONDS = 20.0  # of turns; processes that start take as long again
_LEAST = 1 / 1024  # GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for; ``size`` is in bytes.

    ``brief`` asks for a conclusion of the little that ``seconds`` allow.
    """

    transport: str
    size: int
    repeat: int
    shapes: tuple[str, ...]
    connections: tuple[int, ...]
    torchft: bool
    checkpointer: bool
    embedded: bool
    trainer: bool
    delta: bool
    url: str | None
    json: Path | None
    plot: Path | None
    markdown: bool
    check: bool
    brief: bool = False
    seconds: float | None = None


def parse(argv: Sequence[str]) -> Options:
    """Return the options; exits with a message for wrong ones."""
    parser = _parser()
    given = parser.parse_args(argv)
    one = _subject(parser, given)
    size, repeat = _defaults(given)
    brief = given.quick and not one and given.transport == TRANSPORTS[0]
    shapes = SHAPES[:1] if one or brief else SHAPES
    return Options(
        transport=given.transport,
        size=int((given.size or size) * 2**30),
        repeat=given.repeat or repeat,
        shapes=tuple(dict.fromkeys(given.shapes or shapes)),
        connections=(1,) if brief else tuple(dict.fromkeys((1, given.connections))),
        torchft=given.torchft and not brief,
        checkpointer=given.checkpointer,
        embedded=given.embedded,
        trainer=given.trainer,
        delta=given.delta,
        url=given.url,
        json=given.json,
        plot=given.plot,
        markdown=given.markdown,
        check=given.check,
        brief=brief,
        seconds=_QUICK_SECONDS if brief else None,
    )


def _subject(parser: argparse.ArgumentParser, given: argparse.Namespace) -> bool:
    """Return whether one shape is enough; complain where two subjects are named."""
    names = ("checkpointer", "embedded", "trainer", "delta", "url")
    named = [f"--{name}" for name in names if getattr(given, name)]
    if len(named) > 1:
        parser.error(f"{' and '.join(named)} are different subjects: choose one")
    if named and named != ["--checkpointer"] and given.transport != "http":
        parser.error(f"{named[0]} is about HTTP: no --transport with it")
    return bool(named)


def _defaults(given: argparse.Namespace) -> tuple[float, int]:
    """Return how many GiB, and how often."""
    if given.quick:
        return _QUICK_SIZE, _QUICK_REPEAT
    return (_DELTA_SIZE, _DELTA_REPEAT) if given.delta else (_SIZE, _REPEAT)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aiockpt bench",
        description="Measure this library on this machine against memcpy, raw sockets "
        "and, where it is installed, torchft.",
    )
    add = parser.add_argument
    add("--transport", choices=TRANSPORTS, default=TRANSPORTS[0],
        help="HTTP, or a process group over gloo; http")  # fmt: skip
    add("--size", type=_size, metavar="GIB", help=f"of a state dict; {_SIZE:g}")
    add("--repeat", type=_count, metavar="N", help=f"of each candidate; {_REPEAT}")
    add("--shapes", nargs="+", choices=SHAPES, help="of tensors; all")
    add("--connections", type=_count, default=_CONNECTIONS, metavar="N",
        help="of raw copies, beside 1; as many as a receive has")  # fmt: skip
    add("--quick", action="store_true",
        help=f"{_QUICK_SIZE} GiB, {_QUICK_REPEAT} repeats; over HTTP within a minute, "
        "and with a conclusion in place of the tables")  # fmt: skip
    add("--no-torchft", dest="torchft", action="store_false", help="leave torchft out")
    add("--checkpointer", action="store_true",
        help="measure saving instead, below the working directory")  # fmt: skip
    add("--embedded", action="store_true",
        help="measure what a transfer costs the app that serves it")  # fmt: skip
    add("--trainer", action="store_true",
        help="measure what serving costs a training loop, and vice versa")  # fmt: skip
    add("--delta", action="store_true",
        help="measure receives of what has changed, over a line of 1 Gb/s that it "
        "makes: needs root")  # fmt: skip
    add("--url", metavar="URL",
        help="measure receives from another host, which runs aiockpt serve: the URL "
        "that it prints")  # fmt: skip
    add("--json", type=Path, metavar="FILE",
        help="write all samples there, and what the machine is")  # fmt: skip
    add("--plot", type=Path, metavar="FILE.svg",
        help="draw the rows there, beside what they are compared with")  # fmt: skip
    add("--markdown", action="store_true", help="print tables for a document")
    add("--check", action="store_true", help="exit with 1 if a target is missed")
    return parser


def _size(text: str) -> float:
    size = float(text)
    if not _LEAST <= size < 2**20:
        raise argparse.ArgumentTypeError(f"{text} GiB is less than 1 MiB, or absurd")
    return size


def _count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to 1000")
    return count
