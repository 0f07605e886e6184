"""Exceptions as data: what failed in the checkpoint process, told to the trainer."""

from __future__ import annotations

import traceback
from typing import Final, TypeAlias

import msgspec

from aiockpt import errors
from aiockpt.errors import AiockptError, WorkerError

__all__ = ["Failure", "failure_of", "plain", "raised"]

Fact: TypeAlias = str | int | float | bool | None

_LONGEST: Final = 8 << 10  # all of it must fit a message


class Failure(msgspec.Struct, frozen=True):
    """An exception of another process.

    Attributes:
        kind: The name of its class.
        text: What it says.
        traceback: Where it was raised there, as Python prints it.
        facts: The attributes of an error of this package.
    """

    kind: str
    text: str
    traceback: str
    facts: dict[str, Fact] = {}


def failure_of(error: BaseException) -> Failure:
    """Return an exception as data that fits a message."""
    lines = "".join(traceback.format_exception(error))
    facts: dict[str, Fact] = {}
    if isinstance(error, AiockptError):
        facts = {
            name: _short(value)
            for name, value in vars(error).items()
            if not name.startswith("_")
        }
    text = plain(str(error) or repr(error))[:_LONGEST]
    return Failure(type(error).__name__, text, plain(lines)[-_LONGEST:], facts)


def plain(text: str) -> str:
    """Return text that can be sent: without the bytes of a path that are none."""
    return text.encode("utf-8", "backslashreplace").decode()


def _short(value: object) -> Fact:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return plain(str(value))[:_LONGEST]


def raised(failure: Failure, doing: str) -> AiockptError:
    """Return the exception to raise here: of its own class, if that is the package's.

    Anything else becomes a ``WorkerError``. Python prints the remote traceback with
    either, and a ``WorkerError`` has it as an attribute.
    """
    cls = getattr(errors, failure.kind, None)
    if isinstance(cls, type) and issubclass(cls, AiockptError) and failure.facts:
        error: AiockptError = cls.__new__(cls)
        error.__dict__.update(failure.facts)
        if isinstance(error, WorkerError):
            error.remote_traceback = failure.traceback
    else:
        said = f"{doing} raised {failure.kind}: {failure.text}"
        error = WorkerError(said, remote_traceback=failure.traceback)
    error.add_note(f"in the checkpoint process:\n{failure.traceback.rstrip()}")
    return error
