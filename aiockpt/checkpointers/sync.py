"""A checkpointer without an event loop: every call blocks until it is done."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from aiockpt.checkpointers.base import Checkpointer
from aiockpt.checkpointers.reader import CheckpointReader
from aiockpt.checkpointers.writer import CheckpointWriter
from aiockpt.directory import StrPath, step_of
from aiockpt.errors import ClosedError
from aiockpt.observe import TransferEvent, emit

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

    def save(self, state_dict: Any, path: StrPath, **kwargs: Any) -> None:
        """Write the state dict; returns when all ranks have committed it.

        Nobody may mutate it meanwhile. See :meth:`.CheckpointWriter.write`.

        Raises:
            UnsupportedLeafError: a leaf cannot be saved.
            StorageError: not committed; at ``path`` is what was there before.
            ClosedError: after :meth:`close`.
        """
        self._check()
        with _told("write", path, kwargs.get("step", step_of(path))):
            self._writer.write(path, state_dict, **kwargs)

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
        with _told("load", path, None):
            loaded, _ = self._reader.read(
                path,
                state_dict,
                map_location=default_map_location,
                strict=strict,
                **kwargs,
            )
        return loaded

    def close(self) -> None:
        """Let go of the barrier and of memory. Idempotent."""
        if not self._closed:
            self._closed = True
            self._writer.close()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the checkpointer")


@contextmanager
def _told(stop: str, path: StrPath, step: int | None) -> Iterator[None]:
    """Emit an event when a call has ended well."""
    started = time.monotonic()
    yield
    emit(
        TransferEvent(
            stop=stop,
            step=step,
            seconds=time.monotonic() - started,
            detail=os.fspath(path).partition("#")[0],
            level=logging.INFO,
        )
    )
