"""What this host cannot do, as an error of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aiockpt._available import available_memory
from aiockpt.errors import AiockptError, LimitExceededError, StagingError

__all__ = ["allocating", "failing_here"]


@contextmanager
def failing_here(what: str) -> Iterator[None]:
    """Raise ``StagingError`` for what the system, or its memory, refuses the block."""
    try:
        yield
    except AiockptError:
        raise  # some are OSErrors, too
    except (OSError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        raise StagingError(f"{what} failed on this host: {reason}") from error


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
