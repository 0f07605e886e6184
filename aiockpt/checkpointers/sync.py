"""SyncCheckpointer: every call blocks until it is done."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Never, Self

from aiockpt.checkpointers.base import (
    Account,
    Checkpointer,
    CheckpointerStatistics,
    Written,
    committed_before,
    path_for,
    step_for,
    template_of,
)
from aiockpt.checkpointers.config import ELSEWHERE
from aiockpt.checkpointers.reader import (
    CheckpointReader,
    loads_of,
    options_of,
    own_read,
    tell_if_own,
)
from aiockpt.checkpointers.writer import CheckpointWriter, Writers, own_functions
from aiockpt.errors import ClosedError
from aiockpt.events import Progress
from aiockpt.state.reshard import RankValues
from aiockpt.state.selection import Select
from aiockpt.storage.directory import StrPath
from aiockpt.storage.read import OnBytes, Verify
from aiockpt.transport import refuse_unknown


class SyncCheckpointer(Checkpointer):
    """Saves straight from the tensors' memory and loads straight into it.

    It needs no event loop; a loop of the calling thread is blocked during a call. Use
    the checkpointer as a context manager, or call :meth:`close`.

    Args:
        writer: Writes this rank's part; or makes a writer for the rank of each save.
        reader: Reads this rank's part.
    """

    def __init__(
        self, writer: CheckpointWriter | Writers, reader: CheckpointReader
    ) -> None:
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

    def save(
        self,
        state_dict: Any,
        path: StrPath,
        *,
        step: int | None = None,
        progress: Callable[[Progress], None] | None = None,
        **own: Never,
    ) -> None:
        """Write the state dict, and return when all ranks have committed it.

        Do not change the state dict during the call. See
        :meth:`.CheckpointWriter.write`. If ``post_commit`` raises, the checkpoint is
        committed and counted as written, and this raises the hook's error.

        Args:
            state_dict: The state to save.
            path: The checkpoint's directory.
            step: The checkpoint's step. None: the number at the end of ``path``.
            progress: Called with :class:`.Progress` during the write, except by a
                writer that overrides ``write``.
            own: Keywords for a commit hook or a writer of your own that takes them;
                see :meth:`.Checkpointer.save`.

        Raises:
            UnsupportedLeafError: a leaf has a type that cannot be saved.
            StorageError: the checkpoint is not committed, and ``path`` has what it had
                before. If ``may_be_committed`` is true, the new checkpoint may be there
                instead, and the message says why.
            TypeError: an unknown keyword, or ``path`` is not a path.
            ValueError: several ranks have nowhere to meet.
            TransportError: rank 0 cannot host the store at which they meet.
            ClosedError: after :meth:`close`.
        """
        writer = self._writer
        own_ones = own_functions(writer)
        refuse_unknown(SyncCheckpointer.save, own, *own_ones, elsewhere=ELSEWHERE)
        text, keywords = path_for(state_dict, path), dict[str, Any](own)
        self._check()
        self._account.note_step(text, step)
        if step is not None:
            keywords["step"] = step
        step = step_for(text, keywords)
        began, written = time.monotonic(), Written()
        if isinstance(writer, Writers):
            writer = writer.of(writer.lookup.of_save())
        self._account.count("saves")
        try:
            if type(writer).write is CheckpointWriter.write:
                written = writer.write_live(path, state_dict, progress, **keywords)
            else:
                writer.write(path, state_dict, **keywords)
        except BaseException as error:
            if (made := committed_before(error)) is None:
                self._account.count("failed")
            else:
                self._note_written(text, step, made, began)
            raise
        self._note_written(text, step, written, began)

    def load(
        self,
        path: StrPath,
        state_dict: Any = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
        into: Any = None,
        select: Select | None = None,
        verify: Verify = "full",
        mmap: bool = False,
        on_bytes: OnBytes | None = None,
        rank: int | None = None,
        full: bool = False,
        rank_values: RankValues = "error",
        **own: Never,
    ) -> Any:
        """Return the state dict at ``path``; see :meth:`.CheckpointReader.read`.

        ``into`` is the template, and ``state_dict`` another name of it. ``own`` are
        keywords for a reader of your own that takes them.

        Raises:
            MissingKeysError: the checkpoint lacks keys, with ``strict``.
            CheckpointNotFoundError: there is no complete checkpoint at ``path``.
            StorageError, IntegrityError: the checkpoint cannot be read, or is damaged.
            ClosedError: after :meth:`close`.
        """
        refuse_unknown(SyncCheckpointer.load, own, *own_read(self._reader))
        template = template_of(state_dict, into)
        self._check()
        began = time.monotonic()
        options = options_of(
            select=select,
            verify=verify,
            mmap=mmap,
            on_bytes=on_bytes,
            rank=rank,
            full=full,
            rank_values=rank_values,
        )
        loaded, _ = self._reader.read(
            path,
            template,
            map_location=default_map_location,
            strict=strict,
            **options,
            **own,
        )
        tell_if_own(self._reader, path, began)
        return loaded

    def _note_written(
        self, path: str, step: int, written: Written, began: float
    ) -> None:
        seconds = time.monotonic() - began
        self._account.note_stall(seconds)
        self._account.note_written(path, step, written, seconds, _without_token(path))

    def statistics(self) -> CheckpointerStatistics:
        """Return the numbers of saves and loads, their bytes, and times of saves."""
        now = self._account.now
        under_way = now.saves - now.written - now.failed
        return now._replace(under_way=under_way, loads=loads_of(self._reader))

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
