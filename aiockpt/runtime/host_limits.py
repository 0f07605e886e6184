"""What this host cannot do, as an error of ours."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Final, ParamSpec, TypeVar

from aiockpt.errors import AiockptError, LimitExceededError, StagingError
from aiockpt.runtime.available import available_memory

__all__ = [
    "allocating",
    "failing_here",
    "is_callers",
    "is_hosts",
    "of_caller",
    "refused_by_host",
]

P = ParamSpec("P")
T = TypeVar("T")

_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)
_HOSTS: Final = (*_DESCRIPTORS, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC)
_CALLERS: Final = "_aiockpt_callers"


@contextmanager
def failing_here(what: str) -> Iterator[None]:
    """Raise ``StagingError`` for what the system, or its memory, refuses the block."""
    try:
        yield
    except AiockptError:
        raise  # some are OSErrors, too
    except (OSError, MemoryError) as error:
        if is_callers(error):
            raise
        raise refused_by_host(what, error) from error


def is_hosts(error: BaseException) -> bool:
    """Say whether an error of the system is this host's, whoever was talked to."""
    return isinstance(error, OSError) and error.errno in _HOSTS


def refused_by_host(what: str, error: BaseException) -> StagingError:
    """Return the error that says so."""
    reason = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.errno in _DESCRIPTORS:
        reason += f"; {_descriptors()}raise the limit with `ulimit -n`"
    return StagingError(f"{what} failed on this host: {reason}")


def _descriptors() -> str:
    try:
        import resource
    except ImportError:  # Windows
        return ""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"this process may open {most} files: "


def of_caller(fn: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function of the caller's: what it raises is nobody's fault but its own."""

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            with suppress(AttributeError):  # a class with slots
                setattr(error, _CALLERS, True)
            raise

    return call


def is_callers(error: BaseException) -> bool:
    """Say whether an error came out of a function that `of_caller` has wrapped."""
    return hasattr(error, _CALLERS)


@contextmanager
def allocating(what: str, nbytes: int) -> Iterator[None]:
    """Say what there is no memory for, where the block gets none.

    Raises:
        LimitExceededError: it is more than is free.
        StagingError: the system refuses it all the same.
    """
    try:
        yield
    except (OSError, OverflowError, MemoryError, ValueError) as error:
        free = available_memory()
        if nbytes > free:
            raise LimitExceededError(what, limit=free, actual=nbytes) from error
        reason = str(error) or type(error).__name__
        raise StagingError(
            f"no memory for {what} of {nbytes} bytes on this host: {reason}; {free} "
            "bytes are free, so look at `ulimit -v` and vm.overcommit_memory"
        ) from error
