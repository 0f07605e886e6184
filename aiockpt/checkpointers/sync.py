"""A checkpointer without an event loop: every call blocks until it is done."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from aiockpt.checkpointers.base import Checkpointer, step_for
from aiockpt.checkpointers.handle import CheckpointerStatistics, meter, with_warning
from aiockpt.checkpointers.reader import CheckpointReader
from aiockpt.checkpointers.writer import CheckpointWriter, Written
from aiockpt.errors import ClosedError
from aiockpt.events import Progress, TransferEvent, emit
from aiockpt.storage.directory import StrPath
from aiockpt.transfer.repeats import Repeats

__all__ = ["SyncCheckpointer"]


class SyncCheckpointer(Checkpointer):
    """Saves straight from the tensors' memory and loads straight into it.

    No loop is needed; one that runs in the calling thread stands still meanwhile. Use
    it as a context manager, or call :meth:`close`.

    Args:
        writer: Writes this rank's share.
        reader: Reads it.
    """

    def __init__(self, writer: CheckpointWriter, reader: CheckpointReader) -> None:
        self._writer = writer
        self._reader = reader
        self._closed = False
        self._account = _Account()
        self._repeats = Repeats("save")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = " closed" if self._closed else ""
        return f"<SyncCheckpointer {self._writer}{closed}>"

    def save(
        self,
        state_dict: Any,
        path: StrPath,
        *,
        progress: Callable[[Progress], None] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the state dict; returns when all ranks have committed it.

        Nobody may mutate it meanwhile. See :meth:`.CheckpointWriter.write`.
        ``progress`` is called with :class:`.Progress` as it is written, unless by a
        writer with a ``write`` of its own.

        Raises:
            UnsupportedLeafError: a leaf cannot be saved.
            StorageError: not committed; at ``path`` is what was there before.
            ClosedError: after :meth:`close`.
        """
        self._check()
        step, watch = step_for(path, kwargs), _Watch(progress)
        began, written = time.monotonic(), Written()
        with self._account.counted(watch):
            if type(self._writer).write is CheckpointWriter.write:
                written = self._writer.write_watched(path, state_dict, watch, **kwargs)
            else:
                self._writer.write(path, state_dict, **kwargs)
        event = _event("write", path, step, watch.nbytes, began)
        event = with_warning(event, written.warning)
        emit(self._repeats.told(event, written.content, os.fspath(path)))

    def load(
        self,
        path: StrPath,
        state_dict: Any = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the state dict at ``path``; see :meth:`.CheckpointReader.read`.

        Raises:
            MissingKeysError: with ``strict``, if the checkpoint lacks keys.
            CheckpointNotFoundError: no whole checkpoint is there.
            StorageError, IntegrityError: it cannot be read.
            ClosedError: after :meth:`close`.
        """
        self._check()
        began = time.monotonic()
        loaded, _ = self._reader.read(
            path,
            state_dict,
            map_location=default_map_location,
            strict=strict,
            **kwargs,
        )
        emit(_event("load", path, None, 0, began))
        return loaded

    def statistics(self) -> CheckpointerStatistics:
        """Return how many saves there were, and what they took."""
        return self._account.statistics()

    def close(self) -> None:
        """Let go of the barrier and of memory. Idempotent."""
        if not self._closed:
            self._closed = True
            self._writer.close()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the checkpointer")


class _Watch:
    """Knows how many bytes one save has, and tells a caller how far it is."""

    def __init__(self, progress: Callable[[Progress], None] | None) -> None:
        self.nbytes = 0
        self._progress = progress
        self._tell: Callable[[int], None] | None = None

    def __repr__(self) -> str:
        return f"<Watch bytes={self.nbytes}>"

    def __call__(self, done: int, total: int) -> None:
        if self._tell is None:
            self.nbytes = total
            self._tell = meter(self._progress, total)
        if self._tell is not None:
            self._tell(done)


class _Account:
    """Counts saves."""

    def __init__(self) -> None:
        self._saves = self._written = self._failed = self._bytes = 0
        self._seconds = 0.0

    def __repr__(self) -> str:
        return f"<Account {self.statistics()}>"

    @contextmanager
    def counted(self, watch: _Watch) -> Iterator[None]:
        """Count what happens in the block as one save."""
        began = time.monotonic()
        self._saves += 1
        try:
            yield
        except BaseException:
            self._failed += 1
            raise
        self._written += 1
        self._bytes += watch.nbytes
        self._seconds = time.monotonic() - began

    def statistics(self) -> CheckpointerStatistics:
        """Return the numbers: the caller is kept for as long as a write takes."""
        return CheckpointerStatistics(
            saves=self._saves,
            written=self._written,
            failed=self._failed,
            skipped=0,
            replaced=0,
            under_way=self._saves - self._written - self._failed,
            bytes_written=self._bytes,
            stall_seconds=self._seconds,
            write_seconds=self._seconds,
            restarts=0,
        )


def _event(
    stop: str, path: StrPath, step: int | None, nbytes: int, began: float
) -> TransferEvent:
    """Return the event of a call that has ended well."""
    return TransferEvent(
        stop=stop,
        step=step,
        nbytes=nbytes,
        seconds=time.monotonic() - began,
        detail=os.fspath(path).partition("#")[0],
        level=logging.INFO,
    )
