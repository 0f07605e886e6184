"""Keeps tokens out of exceptions.

An exception refers to the frames that it passed. A tool that prints tracebacks with
local variables prints the arguments of each of these frames. So a function that takes a
token raises without its own frame, and without the frames of libraries that it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


class Token(str):
    """A string whose repr hides its value, so that any frame may hold it.

    In all other respects it is an ordinary string.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "<a token>"


def severed(error: E) -> E:
    """Return an exception without its traceback, its cause and its context."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def discreet(fn: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that takes a token, so that its errors show no frame of it.

    The caller's own frame is still in the traceback; the caller must ``del`` the token.
    """

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return fn(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - it is raised below
            failure = severed(error)
        args, kwargs = (), {}  # type: ignore[assignment]
        try:
            # Not in the handler above: the context would be the same chain again.
            raise failure
        finally:
            del failure  # or it would keep itself alive through this frame

    return call
