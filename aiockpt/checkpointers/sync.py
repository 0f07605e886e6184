"""SyncCheckpointer: every call blocks until it is done."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from aiockpt.checkpointers.base import (
    Account,
    Checkpointer,
    CheckpointerStatistics,
    Written,
    step_for,
)
from aiockpt.checkpointers.reader import CheckpointReader
from aiockpt.checkpointers.writer import CheckpointWriter
from aiockpt.errors import ClosedError
from aiockpt.events import Progress, TransferEvent, emit
from aiockpt.storage.directory import StrPath

__all__ = ["SyncCheckpointer"]


class SyncCheckpointer(Checkpointer):
    """Saves straight from the tensors' memory and loads straight into it.

    It needs no event loop; a loop of the calling thread is blocked during a call. Use
    the checkpointer as a context manager, or call :meth:`close`.

    Args:
        writer: Writes this rank's part.
        reader: Reads this rank's part.
    """

    def __init__(self, writer: CheckpointWriter, reader: CheckpointReader) -> None:
        self._writer = writer
        self._reader = reader
        self._closed = False
        self._account = Account()

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
        """Write the state dict, and return when all ranks have committed it.

        Do not change the state dict during the call. See
        :meth:`.CheckpointWriter.write`. ``progress`` is called with
        :class:`.Progress` during the write, except by a writer that overrides
        ``write``.

        Raises:
            UnsupportedLeafError: a leaf has a type that cannot be saved.
            StorageError: the checkpoint is not committed; ``path`` is as before.
            ClosedError: after :meth:`close`.
        """
        self._check()
        step = step_for(path, kwargs)
        began, written = time.monotonic(), Written()
        self._account.count("saves")
        try:
            if type(self._writer).write is CheckpointWriter.write:
                written = self._writer.write_live(path, state_dict, progress, **kwargs)
            else:
                self._writer.write(path, state_dict, **kwargs)
        except BaseException:
            self._account.count("failed")
            raise
        seconds = time.monotonic() - began
        self._account.note_stall(seconds)
        self._account.note_written(
            os.fspath(path), step, written, seconds, _without_token(path)
        )

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
            MissingKeysError: the checkpoint lacks keys, with ``strict``.
            CheckpointNotFoundError: there is no complete checkpoint at ``path``.
            StorageError, IntegrityError: the checkpoint cannot be read, or is damaged.
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
        seconds = time.monotonic() - began
        detail = _without_token(path)
        emit(
            TransferEvent(
                stop="load", seconds=seconds, detail=detail, level=logging.INFO
            )
        )
        return loaded

    def statistics(self) -> CheckpointerStatistics:
        """Return the numbers of saves, their bytes and their times."""
        now = self._account.now
        return now._replace(under_way=now.saves - now.written - now.failed)

    def close(self) -> None:
        """Release the barrier and memory. Idempotent."""
        if not self._closed:
            self._closed = True
            self._writer.close()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the checkpointer")


def _without_token(path: StrPath) -> str:
    return os.fspath(path).partition("#")[0]
