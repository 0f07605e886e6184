"""The command line: ``aiockpt serve | fetch | ls | inspect | verify | convert | ...``.

Each command is a module: ``configure`` adds its arguments, ``run`` does it and returns
the exit code. Nothing that needs torch or aiohttp is imported before a command runs.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from aiockpt import __version__
from aiockpt.cli import (
    bench,
    convert,
    demo,
    doctor,
    fetch,
    inspect,
    ls,
    serve,
    verify,
)
from aiockpt.cli.options import UsageError
from aiockpt.cli.text import printable
from aiockpt.errors import AiockptError

__all__ = ["main"]

_STANDARD = (0, 1, 2)  # descriptors

_EXITS = """\
exit codes:
  0    done           1    failed, and said why           2    wrong usage
  130  interrupted    141  nobody reads the output any more
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    What went wrong is one line on stderr; only a bug shows a traceback.
    """
    _replace_closed_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(format="aiockpt: %(message)s", level=logging.WARNING)
    try:
        code = _run(given)
        sys.stdout.flush()  # now, while a reader that went away is still an answer
    except KeyboardInterrupt as error:
        for note in getattr(error, "__notes__", ()):
            _complain(f"aiockpt: interrupted; {printable(note)}")
        return 130
    except BrokenPipeError:
        # The interpreter flushes once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (AiockptError, OSError) as error:
        _complain(f"aiockpt: error: {_sentence(error)}")
        return 2 if isinstance(error, UsageError) else 1
    return code


def _complain(line: str) -> None:
    with suppress(OSError):  # nobody may be reading it
        print(line, file=sys.stderr)


def _replace_closed_streams() -> None:
    """Open the null device in place of what the caller closed, as by ``2>&-``.

    Otherwise a socket or a file gets the descriptor, and messages are written to it.
    """
    for number in _STANDARD:
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _run(given: list[str]) -> int:
    arguments = _parser().parse_args(given)
    code: int = arguments.run(arguments)
    return code


class _Parser(argparse.ArgumentParser):
    """Complains in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"aiockpt: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="aiockpt",
        description="Move checkpoints between processes: verified, at wire speed.",
        epilog=_EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (
        *(serve, fetch, ls, inspect, verify, convert),
        *(bench, doctor, demo),
    ):
        command.configure(commands)
    return parser


def _sentence(error: Exception) -> str:
    """Return an error as one line that names the thing."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and not isinstance(error, AiockptError):
        named = f"{error.filename}: " if error.filename else ""
        text = f"{named}{error.strerror or error}"
    text = "; ".join([text, *getattr(error, "__notes__", ())])
    return printable(" ".join(text.split()))
