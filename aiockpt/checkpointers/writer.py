"""One rank's writer: its file, durable; then the commit with the other ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from aiockpt._files import remove_tree
from aiockpt.checkpointers.barriers import Barrier, Meeting, Phase
from aiockpt.checkpointers.base import step_for
from aiockpt.checkpointers.config import CheckpointWriterConfig, RankInfo
from aiockpt.checkpointers.hooks import WriterHook, finish
from aiockpt.commit import Draft
from aiockpt.directory import StrPath, part_of, settle
from aiockpt.errors import (
    PeerFailedError,
    StorageError,
    TransferTimeoutError,
    TransportError,
)
from aiockpt.memory import Arena, ArenaPool
from aiockpt.retention import retire, sweep
from aiockpt.snapshotfile import Sealed, Source, Viewed, write_source

__all__ = ["CheckpointWriter", "Report"]

logger = logging.getLogger("aiockpt")

Report: TypeAlias = Callable[[int, int], None]
"""Hears how many bytes of how many the writer has taken."""


class CheckpointWriter:
    """Writes one rank's share of a checkpoint, and commits it with the other ranks.

    At the path there is wholly the old checkpoint or wholly the new one, at any time
    and whatever dies. A subclass may do it differently: it overrides :meth:`write`.

    Args:
        config: How to write.
        rank_info: Whose file it writes.
        barrier: Where it waits for the other ranks; several ranks need one.
        commit_hook: Called around the commit.
    """

    def __init__(
        self,
        config: CheckpointWriterConfig,
        rank_info: RankInfo,
        barrier: Barrier | None = None,
        commit_hook: WriterHook | None = None,
    ) -> None:
        if rank_info.global_world_size > 1 and barrier is None:
            raise ValueError(
                f"{rank_info.global_world_size} ranks need a barrier to commit "
                "together; create_barrier_from_config makes one"
            )
        self._config = config
        self._rank_info = rank_info
        self._barrier = barrier
        self._hook = commit_hook
        self._pool = ArenaPool(shared=False, keep=1, dispose=Arena.close)

    def __repr__(self) -> str:
        rank = self._rank_info
        return (
            f"<{type(self).__name__} rank={rank.global_rank}/{rank.global_world_size}>"
        )

    def write(self, path: StrPath, state_dict: Any, **kwargs: Any) -> None:
        """Write ``state_dict`` to the directory ``path``; blocks until it is committed.

        The bytes go from where they are straight to the file. ``kwargs`` are for the
        hooks; ``step``, if given, is the checkpoint's step, else the number at the end
        of the path is.

        Raises:
            UnsupportedLeafError: a leaf cannot be saved; its path is in ``path``.
            TypeError, ValueError: ``step`` is none.
            StorageError: not written, or not committed; at ``path`` there is what was
                there before.
        """
        self.write_watched(path, state_dict, None, **kwargs)

    def write_watched(
        self, path: StrPath, state_dict: Any, report: Report | None, /, **kwargs: Any
    ) -> None:
        """Write as :meth:`write` does; ``report`` hears how many bytes of how many."""
        from aiockpt.livestate import LiveState

        save = self._begin(path, step_for(path, kwargs))
        with save.reporting("written"):
            source = LiveState(
                state_dict,
                step=save.step,
                chunk_bytes=self._config.chunk_bytes,
                allow_pickle=self._config.allow_pickle,
                pool=self._pool,
            )
        with source:
            told = source if report is None else _Reporting(source, report)
            self._save(path, save, told, kwargs)
            if report is not None:
                report(source.segment_bytes, source.segment_bytes)

    def write_snapshot(self, path: StrPath, snapshot: Viewed, /, **kwargs: Any) -> None:
        """Write what was staged and sealed already; else as :meth:`write`.

        Raises:
            StorageError: see :meth:`write`.
        """
        save = self._begin(path, snapshot.manifest.step)
        self._save(path, save, Sealed(snapshot), kwargs)

    def write_source(
        self, path: StrPath, source: Source, step: int, /, **kwargs: Any
    ) -> None:
        """Write what was staged, and seal it: its digests are computed meanwhile.

        A checkpointer calls this, unless a subclass has a :meth:`write` or a
        :meth:`write_snapshot` of its own.

        Raises:
            StorageError: see :meth:`write`.
        """
        self._save(path, self._begin(path, step), source, kwargs)

    def abandon(self, path: StrPath, step: int, reason: str) -> None:
        """Tell the ranks that wait for this one that it has nothing to write."""
        self._begin(path, step).tell("written", reason)

    def close(self) -> None:
        """Let go of what the barrier holds, and of memory."""
        self._pool.close()
        if self._barrier is not None:
            self._barrier.close()

    def _begin(self, path: StrPath, step: int) -> _Save:
        return _Save(settle(path), step, self._barrier, self._config)

    def _save(
        self, path: StrPath, save: _Save, source: Source, kwargs: Mapping[str, Any]
    ) -> None:
        target, rank = save.target, self._rank_info.global_rank
        if not rank:
            sweep(target.parent, shared=self._barrier is not None)
        with save.reporting("written"):
            draft = Draft(target, rank, durable=self._config.fsync)
        with draft:
            with save.reporting("written", draft):
                self._fill(draft, source)
                if self._hook is not None:
                    finish(self._hook.pre_commit(os.fspath(path), **kwargs))
            save.meet("written", draft)
            unused: list[Path] = []
            with save.reporting("committed", draft):
                if not rank:
                    world_size = self._rank_info.global_world_size
                    unused = draft.commit(save.step, world_size)
            save.meet("committed", draft)
        self._follow_up(path, target, unused, kwargs)

    def _fill(self, draft: Draft, source: Source) -> None:
        write_source(draft.temporary, draft.fd, source, durable=self._config.fsync)
        draft.keep_file()

    def _follow_up(
        self, path: StrPath, target: Path, unused: list[Path], kwargs: Mapping[str, Any]
    ) -> None:
        """Do what may also be left undone: the checkpoint is there."""
        try:
            if self._hook is not None:
                finish(self._hook.post_commit(os.fspath(path), **kwargs))
        finally:
            for each in unused:
                remove_tree(each)
            if not self._rank_info.global_rank:
                self._retire(target)

    def _retire(self, target: Path) -> None:
        config = self._config
        if config.keep_last is None:
            return
        try:
            retire(
                target.parent,
                keep_last=config.keep_last,
                keep_every=config.keep_every,
                spare=target,
            )
        except StorageError:
            logger.warning("old checkpoints are not removed", exc_info=True)


class _Reporting:
    """A source that tells how far its reader is."""

    def __init__(self, source: Source, report: Report) -> None:
        self.header_bytes = source.header_bytes
        self.segment_bytes = source.segment_bytes
        self.seal = source.seal
        self._source, self._report = source, report

    def __repr__(self) -> str:
        return f"<Reporting {self._source!r}>"

    def views(self, start: int, stop: int) -> Sequence[memoryview]:
        self._report(start, self.segment_bytes)
        return self._source.views(start, stop)


class _Save:
    """One save, as far as the other ranks are concerned."""

    def __init__(
        self,
        target: Path,
        step: int,
        barrier: Barrier | None,
        config: CheckpointWriterConfig,
    ) -> None:
        self.target, self.step = target, step
        self._barrier = barrier
        self._timeout = config.write_barrier_timeout_secs

    @contextmanager
    def reporting(self, phase: Phase, draft: Draft | None = None) -> Iterator[None]:
        """Clean up after what fails in the block, and tell the other ranks."""
        try:
            yield
        except BaseException as error:
            if draft is not None:
                draft.discard()
            self.tell(phase, str(error) or type(error).__name__)
            raise

    def tell(self, phase: Phase, reason: str) -> None:
        """Tell the other ranks why they need not wait."""
        if self._barrier is not None:
            with suppress(TransportError):
                self._barrier.meet(self._meeting(phase), failure=reason)

    def meet(self, phase: Phase, draft: Draft) -> None:
        """Wait for the other ranks.

        Raises:
            StorageError: they did not come, or failed.
        """
        if self._barrier is None:
            return
        try:
            self._barrier.meet(self._meeting(phase))
        except TransportError as error:
            if _is_final(phase, error):
                draft.discard()
            detail = f"it was not committed: {error}"
            raise StorageError(str(self.target), detail) from error

    def _meeting(self, phase: Phase) -> Meeting:
        return Meeting(
            name=self.target.name,
            step=self.step,
            phase=phase,
            place=part_of(self.target),
            timeout=self._timeout,
        )


def _is_final(phase: Phase, error: TransportError) -> bool:
    """Say whether certainly nobody commits any more what this rank has written."""
    if phase == "committed":  # rank 0 is the one that would
        return isinstance(error, PeerFailedError) and not error.rank
    return isinstance(error, PeerFailedError | TransferTimeoutError)
