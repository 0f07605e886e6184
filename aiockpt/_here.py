"""What this host cannot do, as an error of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aiockpt.errors import AiockptError, StagingError

__all__ = ["failing_here"]


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
