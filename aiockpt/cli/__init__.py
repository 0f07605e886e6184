"""The command line: ``aiockpt serve | fetch | follow | ls | inspect | verify | ...``.

`main` parses the arguments (`arguments.py`), imports the module of the command that was
given, and calls its ``run``, which does the work and returns the exit code. A path of
this host becomes files in `paths.py`, a URL becomes a `Peer` in `peer.py`, and
`text.py` has what people read.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from aiockpt.cli.arguments import UsageError, parse
from aiockpt.errors import AiockptError
from aiockpt.format.limits import OF_A_COMMAND, advising
from aiockpt.runtime.system import raise_descriptor_limit
from aiockpt.runtime.words import printable

__all__ = ["main"]

_STANDARD = (0, 1, 2)  # descriptors
_ENDLESS = ("follow", "top")  # an interrupt is how they end
_BREAKS = re.compile(r"\s*\n\s*")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    What went wrong is one line on stderr; only a bug shows a traceback.
    """
    _replace_closed_streams()
    if arguments is None:  # no other program calls this, so the process is ours
        raise_descriptor_limit()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # its encoding may lack a name's
                with suppress(OSError):  # another file has its descriptor now
                    stream.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines("aiockpt: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    command = ""
    try:
        given = parse(sys.argv[1:] if arguments is None else arguments)
        for module in getattr(given, "imports", ()):
            _import(module)
        command = given.command
        # Now, so that no other command's frameworks are loaded.
        run = import_module(f"{__name__}.{given.command}").run
        with advising(OF_A_COMMAND):
            code: int = run(given)
        sys.stdout.flush()  # now, while a reader that went away is still an answer
    except KeyboardInterrupt as error:
        if command not in _ENDLESS:
            notes = map(printable, getattr(error, "__notes__", ()))
            _complain("; ".join(["aiockpt: interrupted", *notes]))
        return 130
    except BrokenPipeError:
        # The interpreter flushes once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (AiockptError, OSError) as error:
        _complain(f"aiockpt: error: {_sentence(error)}")
        return 2 if isinstance(error, UsageError) else 1
    return code


def _import(module: str) -> None:
    """Import a module of the user's, which may be in this directory.

    Raises:
        UsageError: it cannot be imported.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        import_module(module)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"--import {module} failed: {why}") from error


class _Lines(logging.Formatter):
    """Writes a record without what would control the terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record))


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


def _sentence(error: Exception) -> str:
    """Return an error as one line that names the thing."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and not isinstance(error, AiockptError):
        named = f"{error.filename}: " if error.filename else ""
        text = f"{named}{error.strerror or error}"
    text = "; ".join([text, *getattr(error, "__notes__", ())])
    # Blanks stay: a name may have two, and a command to paste quotes them.
    return printable(_BREAKS.sub(" ", text.strip()))
