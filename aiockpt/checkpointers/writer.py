"""One rank's writer: its file, durable; then the commit with the other ranks.

Nothing here needs torch, except to write a live state dict: the checkpoint process
writes from a snapshot and starts without torch.
"""

from __future__ import annotations

import inspect
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from aiockpt.checkpointers.barriers import (
    Barrier,
    Meeting,
    Phase,
    create_barrier_from_config,
)
from aiockpt.checkpointers.base import step_for
from aiockpt.checkpointers.config import (
    BarrierConfig,
    CheckpointWriterConfig,
    RankInfo,
)
from aiockpt.errors import (
    PeerFailedError,
    StorageError,
    TransferTimeoutError,
    TransportError,
)
from aiockpt.events import TransferEvent, emit
from aiockpt.format.chunks import ChunkHasher, digest
from aiockpt.format.header import with_digests
from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import ArenaPool
from aiockpt.memory.snapshot import TRUSTED
from aiockpt.runtime.sync_facade import run_blocking
from aiockpt.storage.commit import Draft
from aiockpt.storage.directory import MARKER, StrPath, part_of, settle
from aiockpt.storage.files import remove_tree
from aiockpt.storage.retention import retire, sweep
from aiockpt.storage.write import Sealed, Source, Viewed, write_source
from aiockpt.transfer.repeats import content_of

if TYPE_CHECKING:
    from mmap import mmap

__all__ = [
    "CheckpointWriter",
    "Report",
    "WriterHook",
    "Written",
    "configured_writer",
    "default_subprocess_init_fn",
    "default_writer_init_fn",
    "seal",
    "tell_ranks",
    "write_staged",
]

logger = logging.getLogger("aiockpt")

_PHASES: Final = ("written", "committed")

Report: TypeAlias = Callable[[int, int], None]
"""Is called with how many bytes, of how many, the writer has taken."""


class WriterHook(ABC):
    """Called by every rank's writer, around the commit of a checkpoint.

    Both methods may be coroutine functions; the writer waits for their end. They get
    the path that was saved to, and the keywords that were given to ``save``.
    """

    @abstractmethod
    def pre_commit(self, path: str, **kwargs: Any) -> Awaitable[None] | None:
        """Act when this rank's file is on the disk; if it raises, the save fails."""

    @abstractmethod
    def post_commit(self, path: str, **kwargs: Any) -> Awaitable[None] | None:
        """Act when the checkpoint is committed."""


class Written(NamedTuple):
    """What there is to say about a checkpoint that was committed.

    Attributes:
        warning: Why not every rank has confirmed the commit; or empty.
        content: Equal for two checkpoints whose tensors hold the same bytes; empty if
            there are no tensors, or the writer does not know.
    """

    warning: str = ""
    content: str = ""


class CheckpointWriter:
    """Writes one rank's share of a checkpoint, and commits it with the other ranks.

    At the path there is either the whole old checkpoint or the whole new one, at any
    time and whatever dies. A subclass may write otherwise: it overrides :meth:`write`.

    Args:
        config: How to write.
        rank_info: The rank whose file it writes.
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
        self._pool = ArenaPool(keep=1)

    def __repr__(self) -> str:
        rank = self._rank_info
        return (
            f"<{type(self).__name__} rank={rank.global_rank}/{rank.global_world_size}>"
        )

    def write(self, path: StrPath, state_dict: Any, **kwargs: Any) -> None:
        """Write ``state_dict`` to the directory ``path``; blocks until it is committed.

        The bytes go from the tensors straight to the file. ``kwargs`` are for the
        hooks. The checkpoint's step is ``step`` if given, else the number at the end
        of the path.

        Raises:
            UnsupportedLeafError: a leaf cannot be saved; its path is in ``path``.
            TypeError, ValueError: ``step`` is not a step.
            StorageError: not written, or not committed; at ``path`` is what was there
                before. Or this rank cannot find out whether rank 0 has committed it;
                the message says so.
        """
        written = self.write_watched(path, state_dict, None, **kwargs)
        if written.warning:
            step = step_for(path, kwargs)
            emit(
                TransferEvent(
                    stop="write",
                    step=step,
                    detail=written.warning,
                    level=logging.WARNING,
                )
            )

    def write_watched(
        self, path: StrPath, state_dict: Any, report: Report | None, /, **kwargs: Any
    ) -> Written:
        """Write as :meth:`write` does, and report how many bytes are taken."""
        from aiockpt.transfer.live import LiveState

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
            written = self._save(path, save, told, kwargs)
            if report is not None:
                report(source.segment_bytes, source.segment_bytes)
        return written

    def write_snapshot(
        self, path: StrPath, snapshot: Viewed, /, **kwargs: Any
    ) -> Written | None:
        """Write a snapshot that has its digests already; else as :meth:`write`.

        Raises:
            StorageError: see :meth:`write`.
        """
        save = self._begin(path, snapshot.manifest.step)
        return self._save(path, save, Sealed(snapshot), kwargs)

    def write_source(
        self, path: StrPath, source: Source, step: int, /, **kwargs: Any
    ) -> Written | None:
        """Write a source that computes its digests while it is read.

        A checkpointer calls this, unless a subclass overrides :meth:`write` or
        :meth:`write_snapshot`.

        Raises:
            StorageError: see :meth:`write`.
        """
        return self._save(path, self._begin(path, step), source, kwargs)

    def abandon(
        self, path: StrPath, step: int, reason: str, *, begun: bool = False
    ) -> None:
        """Tell the ranks that wait for this one that it has nothing to write.

        ``begun``: another process of this rank had begun to write it, and has died.
        """
        save = _Save(path, step, self._barrier, self._config)
        if not begun:
            save.expect()
        save.tell("written", reason)

    def close(self) -> None:
        """Release memory, and what the barrier holds."""
        self._pool.close()
        if self._barrier is not None:
            self._barrier.close()

    def _begin(self, path: StrPath, step: int) -> _Save:
        save = _Save(path, step, self._barrier, self._config)
        save.expect()
        with save.reporting("written"):
            save.target = settle(path)
        return save

    def _save(
        self, path: StrPath, save: _Save, source: Source, kwargs: Mapping[str, Any]
    ) -> Written:
        """Write this rank's file and commit it with the other ranks, step by step."""
        config, rank = self._config, self._rank_info.global_rank
        with save.reporting("written"):
            if not rank:
                sweep(save.target.parent, shared=self._barrier is not None)
            draft = Draft(save.target, rank, durable=config.fsync)
        with draft:
            with save.reporting("written", draft):
                header = write_source(
                    draft.temporary, draft.fd, source, durable=config.fsync
                )
                draft.keep_file()
                if self._hook is not None:
                    _finish(self._hook.pre_commit(os.fspath(path), **kwargs))
            save.meet(draft, rank)
            unused: list[Path] = []
            with save.reporting("committed", draft):
                if not rank:
                    world_size = self._rank_info.global_world_size
                    unused = draft.commit(save.step, world_size)
            warning = save.confirm(draft, rank)
        # The checkpoint is committed. Nothing that follows changes that.
        try:
            if self._hook is not None:
                _finish(self._hook.post_commit(os.fspath(path), **kwargs))
        finally:
            for each in unused:
                remove_tree(each)
            if not rank:
                self._retire(save.target)
        content = content_of(header) if isinstance(header, Manifest) else ""
        return Written(warning, content)

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
    """A source that reports how far its reader is."""

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
        path: StrPath,
        step: int,
        barrier: Barrier | None,
        config: CheckpointWriterConfig,
    ) -> None:
        # Until the path is resolved, and for meeting ranks that could not resolve it.
        self.target = _unresolved(path)
        self.step = step
        self._name = self.target.name
        self._barrier = barrier
        self._timeout = config.write_barrier_timeout_secs

    def expect(self) -> None:
        """Have the barrier tell this save from an earlier one of the same name."""
        if self._barrier is not None:
            with suppress(TransportError):  # then the meeting fails, too
                for phase in _PHASES:
                    self._barrier.expect(self._meeting(phase))

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

    def meet(self, draft: Draft, rank: int) -> None:
        """Wait until every rank has written its file.

        Raises:
            StorageError: a rank did not come, or failed.
        """
        if self._barrier is None:
            return
        try:
            self._barrier.meet(self._meeting("written"))
        except TransportError as error:
            # Rank 0 commits. These errors tell the others that it will not.
            if not rank or isinstance(error, PeerFailedError | TransferTimeoutError):
                raise self._not_committed(draft, error) from error
            raise self._not_known(error) from error

    def confirm(self, draft: Draft, rank: int) -> str:
        """Wait until every rank knows of the commit; return a warning if one does not.

        Raises:
            StorageError: rank 0 has not committed it, or this rank cannot find out.
        """
        if self._barrier is None:
            return ""
        try:
            self._barrier.meet(self._meeting("committed"))
        except Exception as error:
            # Whatever the barrier says, a committed checkpoint is committed.
            if not rank or draft.is_committed():
                why = str(error).partition("\n")[0] or type(error).__name__
                name = self.target.name
                return f"{name} is committed, but not every rank confirmed it: {why}"
            if isinstance(error, PeerFailedError) and not error.rank:
                raise self._not_committed(draft, error) from error
            raise self._not_known(error) from error
        return ""

    def _not_committed(self, draft: Draft, error: Exception) -> StorageError:
        draft.discard()
        return StorageError(str(self.target), f"it was not committed: {error}")

    def _not_known(self, error: Exception) -> StorageError:
        detail = (
            f"it is not known whether it was committed: {error}; it was, if "
            f"{MARKER} is there with step {self.step}"
        )
        return StorageError(str(self.target), detail)

    def _meeting(self, phase: Phase) -> Meeting:
        return Meeting(
            name=self._name,
            step=self.step,
            phase=phase,
            place=part_of(self.target) if self._name else self.target,
            timeout=self._timeout,
        )


def _finish(outcome: Awaitable[None] | None) -> None:
    """Run what a hook has returned to its end, if that is a coroutine."""
    if inspect.isawaitable(outcome):
        run_blocking(_awaited(outcome))


async def _awaited(outcome: Awaitable[None]) -> None:
    await outcome


def _unresolved(path: StrPath) -> Path:
    """Return an absolute path without following links, or the path as it is."""
    try:
        return Path(os.path.abspath(path))
    except OSError:  # the working directory is gone
        return Path(path)


# --------------------------------------------- how a background writer uses a writer


def write_staged(
    writer: Any,
    path: str,
    snapshot: Viewed,
    keywords: Mapping[str, Any],
    *,
    memory: Callable[[], mmap | memoryview],
    report: Callable[[int], object],
    on_seal: Callable[[Manifest], object],
) -> Written:
    """Have a writer, perhaps the user's own, write what was staged.

    A writer that overrides ``write_snapshot`` gets the snapshot with its digests. A
    writer with a ``write`` of its own gets a state dict over ``memory()``, which it
    may change until it returns.

    Args:
        writer: What writes.
        path: The checkpoint's directory.
        snapshot: The staged state dict; its manifest has no digests yet.
        keywords: Those of ``save``.
        memory: Returns the whole data segment.
        report: Is called with the number of bytes that the writer has taken.
        on_seal: Is called with the manifest once it has the digests.
    """
    overridden = {
        name
        for name in ("write", "write_snapshot")
        if getattr(type(writer), name, None) is not getattr(CheckpointWriter, name)
    }
    if not overridden:
        source = _Digesting(snapshot, report, on_seal)
        told = writer.write_source(path, source, snapshot.manifest.step, **keywords)
        return told if isinstance(told, Written) else Written()
    manifest = seal(snapshot)
    on_seal(manifest)
    by_content = Written(content=content_of(manifest))
    if "write" not in overridden:
        sealed = _SealedSnapshot(snapshot, manifest, report)
        told = writer.write_snapshot(path, sealed, **keywords)
        return told if isinstance(told, Written) else by_content
    from aiockpt.state.rebuild import Frame, assemble, tensors_over

    tensors = tensors_over(manifest, memory())
    state = assemble(Frame.of(manifest), tensors, limits=TRUSTED)
    writer.write(path=path, state_dict=state, **keywords)
    return by_content


def tell_ranks(
    writer: Any, path: str, step: int, reason: str, *, begun: bool = False
) -> None:
    """Have a writer tell the other ranks, if it can, that this rank saves nothing."""
    if callable(abandon := getattr(writer, "abandon", None)):
        # A writer of the user's own need not know the argument.
        own = isinstance(writer, CheckpointWriter)
        keywords = {"begun": True} if begun and own else {}
        try:
            abandon(path, step, reason, **keywords)
        except Exception:
            logger.warning("the other ranks were not told", exc_info=True)


def seal(snapshot: Viewed) -> Manifest:
    """Return the snapshot's manifest with the digest of every chunk."""
    grid = snapshot.manifest.grid
    chunks = range(len(grid))
    digests = [digest(snapshot.views(*grid.range(chunk))) for chunk in chunks]
    return with_digests(snapshot.manifest, digests)


class _SealedSnapshot:
    """A snapshot with its digests, which reports how far its reader is."""

    def __init__(
        self, snapshot: Viewed, manifest: Manifest, report: Callable[[int], object]
    ) -> None:
        self.manifest = manifest
        self._snapshot, self._report = snapshot, report

    def views(self, start: int, stop: int) -> Sequence[memoryview]:
        self._report(start)
        return self._snapshot.views(start, stop)


class _Digesting:
    """A snapshot as a `storage` source: each block is digested as it is read."""

    def __init__(
        self,
        snapshot: Viewed,
        report: Callable[[int], object],
        on_seal: Callable[[Manifest], object],
    ) -> None:
        manifest = snapshot.manifest
        self.header_bytes = manifest.header_bytes
        self.segment_bytes = manifest.segment_bytes
        self._snapshot, self._report, self._on_seal = snapshot, report, on_seal
        self._hasher = ChunkHasher(manifest.grid)
        self._digests: list[str] = []

    def views(self, start: int, stop: int) -> Sequence[memoryview]:
        self._report(start)
        views = self._snapshot.views(start, stop)
        self._digests += [each.digest for each in self._hasher.update(start, *views)]
        return views

    def seal(self) -> Manifest:
        manifest = with_digests(self._snapshot.manifest, self._digests)
        self._on_seal(manifest)
        return manifest


# --------------------------------------- what the checkpoint process calls by default


def default_subprocess_init_fn(*_: object) -> None:
    """Do nothing in the new process."""


def default_writer_init_fn(rank_info: RankInfo) -> CheckpointWriter:
    """Make a writer with the default options."""
    return configured_writer(rank_info)


def configured_writer(
    rank_info: RankInfo,
    writer_config: CheckpointWriterConfig = CheckpointWriterConfig(),  # noqa: B008 - frozen
    barrier_config: BarrierConfig = BarrierConfig(),  # noqa: B008 - frozen
    commit_hook: WriterHook | None = None,
) -> CheckpointWriter:
    """Make a writer and its barrier, in the process that will write."""
    barrier = create_barrier_from_config(barrier_config, rank_info)
    return CheckpointWriter(writer_config, rank_info, barrier, commit_hook)
