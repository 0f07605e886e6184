"""One rank's writer: it writes a durable file, then commits with the other ranks.

`CheckpointWriter._save` shows a write from top to bottom. `write` passes it a live
state dict; `write_job` and `write_staged` pass it a snapshot. `_Save` is the
communication of a write with the other ranks.

Only writing a live state dict needs torch. The checkpoint process writes from a
snapshot, and starts without torch.
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiockpt.checkpointers.barriers import (
    Meeting,
    Phase,
    TCPStoreBarrier,
    create_barrier_from_config,
)
from aiockpt.checkpointers.base import (
    Written,
    anything,
    committed_before,
    mark_committed,
    report_written,
    step_for,
    warn_of_commit,
)
from aiockpt.checkpointers.config import (
    BarrierConfig,
    CheckpointWriterConfig,
    GroupStore,
    RankInfo,
    SaveRanks,
)
from aiockpt.checkpointers.messages import Kept, Progressed, decode_keywords
from aiockpt.checkpointers.ranks import RankLookup
from aiockpt.errors import (
    PeerFailedError,
    StorageError,
    TransferTimeoutError,
    TransportError,
)
from aiockpt.events import Progress, guarded
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import ArenaPool
from aiockpt.memory.snapshot import TRUSTED, MappedSnapshot, Snapshot
from aiockpt.runtime.sync_facade import run_blocking
from aiockpt.storage.directory import MARKER, StrPath, absolute
from aiockpt.storage.interface import RankDraft, Storage, storage_at
from aiockpt.storage.ours import remove_ours
from aiockpt.storage.write import Writable, WritableSnapshot
from aiockpt.transfer.remarks import Remarks
from aiockpt.transfer.repeats import content_of
from aiockpt.transport import refuse_unknown

if TYPE_CHECKING:
    from mmap import mmap

logger = logging.getLogger("aiockpt")


class WriterHook(ABC):
    """Called by every rank's writer, around the commit of a checkpoint.

    Both methods may be coroutine functions; the writer waits for their end. They get
    the path that was saved to, and the keywords that were given to ``save``.
    """

    @abstractmethod
    def pre_commit(self, path: str, **kwargs: Any) -> Awaitable[None] | None:
        """Called when this rank's file is on the disk; if it raises, the save fails."""

    @abstractmethod
    def post_commit(self, path: str, **kwargs: Any) -> Awaitable[None] | None:
        """Called when the checkpoint is committed."""


class CheckpointWriter:
    """Writes one rank's share of a checkpoint, and commits it with the other ranks.

    At any time, even after a crash, the path has either the whole old checkpoint or the
    whole new one. A subclass may write in another way. It overrides :meth:`write`,
    which gets a state dict, or :meth:`write_staged`, which gets a staged checkpoint.

    Args:
        config: How to write.
        rank_info: The rank whose file it writes.
        barrier: Where the ranks meet; several ranks need it.
        commit_hook: Called around the commit.
    """

    def __init__(
        self,
        config: CheckpointWriterConfig,
        rank_info: RankInfo,
        barrier: TCPStoreBarrier | None = None,
        commit_hook: WriterHook | None = None,
    ) -> None:
        if rank_info.global_world_size > 1 and barrier is None:
            raise ValueError(
                f"{rank_info.global_world_size} ranks need a barrier to commit "
                "together; create_barrier_from_config makes one"
            )
        if not isinstance(barrier, TCPStoreBarrier | None):
            raise TypeError(
                f"barrier must be aiockpt's TCPStoreBarrier, not a "
                f"{type(barrier).__module__}.{type(barrier).__qualname__}; "
                "create_barrier_from_config makes one"
            )
        self._config = config
        self._rank_info = rank_info
        self._barrier = barrier
        self._hook = commit_hook
        self._pool = ArenaPool(keep=1)
        self._remarks = Remarks(FILE_LIMITS, FILE_LIMITS)
        self._tell_file: Callable[[tuple[int, int]], object] | None = None

    @property
    def config(self) -> CheckpointWriterConfig:
        """How it writes."""
        return self._config

    @property
    def rank_info(self) -> RankInfo:
        """The rank whose file it writes."""
        return self._rank_info

    def write(self, path: StrPath, state_dict: Any, **kwargs: Any) -> None:
        """Write ``state_dict`` to the directory ``path``; blocks until it is committed.

        The bytes go from the tensors straight to the file. ``kwargs`` are for a hook
        that takes them. The checkpoint's step is ``step`` if given, else the number at
        the end of the path.

        Raises:
            UnsupportedLeafError: a leaf cannot be saved; its path is in ``path``.
            TypeError, ValueError: an unknown keyword, or ``step`` is not a step.
            StorageError: the checkpoint was not written or not committed, and ``path``
                has what it had before. If ``may_be_committed`` is true, the new
                checkpoint may be there instead, and the message says why.
        """
        if extra := kwargs.keys() - {"step"}:
            refuse_unknown(
                CheckpointWriter.write, dict.fromkeys(extra), *own_functions(self)
            )
        written = self.write_live(path, state_dict, None, **kwargs)
        warn_of_commit(step_for(path, kwargs), written.warning)

    def write_live(
        self,
        path: StrPath,
        state_dict: Any,
        progress: Callable[[Progress], None] | None,
        /,
        **kwargs: Any,
    ) -> Written:
        """Write like :meth:`write`, with progress; return what :meth:`write` logs.

        It blocks, and raises what :meth:`write` raises.
        """
        from aiockpt.transfer.live import LiveState

        destination, save = self._begin(path, step_for(path, kwargs))
        with save.telling_failures("written"):
            live = LiveState(
                state_dict,
                step=save.step,
                chunk_bytes=self._config.chunk_bytes,
                allow_pickle=self._config.allow_pickle,
                pool=self._pool,
                remarks=self._remarks,
            )
        with live:
            told = None if progress is None else guarded(progress)
            began, total = time.monotonic(), live.segment_bytes

            def report(done: int) -> None:
                report_written(told, began, done, total)

            watched = _WithProgress(live, report)
            written = self._save(path, destination, save, watched, kwargs)
            report(total)
        return written

    def write_staged(
        self, path: StrPath, staged: Writable, step: int, /, **kwargs: Any
    ) -> Written | None:
        """Write a staged checkpoint; its digests are computed while it is read.

        A checkpointer calls this, unless a subclass overrides :meth:`write`. An
        override that needs the digests before the bytes calls ``staged.seal()`` first.

        Raises:
            StorageError: see :meth:`write`.
        """
        return self._save(path, *self._begin(path, step), staged, kwargs)

    def abandon(
        self, path: StrPath, step: int, reason: str, *, begun: bool = False
    ) -> None:
        """Tell the waiting ranks that this rank will not write the checkpoint.

        ``begun`` says that an earlier process of this rank had begun to write it, and
        has died.
        """
        save = self._described(path, os.fspath(path), step)
        if not begun:
            save.expect()
        save.tell("written", reason)

    def close(self) -> None:
        """Release memory, and close the barrier."""
        self._pool.close()
        if self._barrier is not None:
            self._barrier.close()

    @contextmanager
    def telling_file(self, tell: Callable[[tuple[int, int]], object]) -> Iterator[None]:
        """Within the block, call ``tell`` with the `RankDraft.identity`, once complete.

        It is no argument of :meth:`write`: a user's own ``write`` would not pass it on.
        """
        self._tell_file = tell
        try:
            yield
        finally:
            self._tell_file = None  # or it would keep the snapshot

    def _begin(self, path: StrPath, step: int) -> tuple[Storage, _Save]:
        try:
            destination = storage_at(path)
        except BaseException as error:
            self.abandon(path, step, _reason(error))
            raise
        save = self._described(path, str(destination), step)
        save.expect()
        return destination, save

    def _described(self, path: StrPath, where: str, step: int) -> _Save:
        meeting = Meeting(
            directory=_unresolved(path),
            step=step,
            phase="written",
            timeout=self._config.write_barrier_timeout_secs,
        )
        return _Save(where, meeting, self._barrier)

    def _save(
        self,
        path: StrPath,
        destination: Storage,
        save: _Save,
        writable: Writable,
        kwargs: Mapping[str, Any],
    ) -> Written:
        """Write this rank's file and commit it with the other ranks, step by step."""
        config, rank = self._config, self._rank_info.global_rank
        with save.telling_failures("written"):
            shared = self._barrier is not None
            draft = destination.draft(rank, durable=config.fsync, shared=shared)
        written: Written | None = None  # until it is committed
        try:
            with draft:
                with save.telling_failures("written", draft):
                    header = draft.write(writable)
                    if self._tell_file is not None:
                        self._tell_file(draft.identity)
                    if self._hook is not None:
                        _finish(self._hook.pre_commit(os.fspath(path), **kwargs))
                content = content_of(header)
                result = Written("", content, writable.segment_bytes)
                warning, snapshots = save.meet(draft, rank, draft.arrival(header))
                unused: list[Path] = []
                try:
                    with save.telling_failures("committed", draft):
                        if not rank:
                            unused = draft.commit(save.step, snapshots)
                    warning = warning or save.confirm(draft, rank)
                except BaseException as error:
                    unconfirmed = getattr(error, "may_be_committed", False)
                    if not unconfirmed and draft.is_committed():
                        written = result
                    raise
                written = result._replace(warning=warning)
            # The checkpoint is committed. Nothing that follows changes that.
            try:
                if self._hook is not None:
                    _finish(self._hook.post_commit(os.fspath(path), **kwargs))
            finally:
                for each in unused:
                    remove_ours(each)
                if not rank:
                    remove_old(destination, config)
        except BaseException as error:
            if written is not None:
                mark_committed(error, written)
            raise
        return written


def remove_old(destination: Storage, config: CheckpointWriterConfig) -> None:
    """Remove the checkpoints beside a new one that the config does not keep."""
    if config.keep_last is None:
        return
    try:
        destination.retire_others(
            keep_last=config.keep_last, keep_every=config.keep_every
        )
    except StorageError:
        logger.warning("old checkpoints are not removed", exc_info=True)


class _WithProgress:
    """Wraps a `Writable` and reports the writer's progress."""

    def __init__(self, writable: Writable, report: Callable[[int], object]) -> None:
        self.header_bytes = writable.header_bytes
        self.segment_bytes = writable.segment_bytes
        self.seal = writable.seal
        self._writable, self._report = writable, report

    def views(self, start: int, stop: int) -> Sequence[memoryview]:
        self._report(start)
        return self._writable.views(start, stop)


class _Save:
    """The communication of one save with the other ranks.

    Args:
        where: The checkpoint's final path, for errors.
        meeting: The meeting of the first phase.
        barrier: The barrier of the ranks; None if there is only one rank.
    """

    def __init__(
        self, where: str, meeting: Meeting, barrier: TCPStoreBarrier | None
    ) -> None:
        self._where = where
        self.step = meeting.step
        self._meeting = meeting
        self._barrier = barrier

    def expect(self) -> None:
        """Make the barrier distinguish this save from an earlier one of its name."""
        if self._barrier is not None:
            with suppress(TransportError):  # the meeting will fail, too
                self._barrier.expect(self._meeting)

    @contextmanager
    def telling_failures(
        self, phase: Phase, draft: RankDraft | None = None
    ) -> Iterator[None]:
        """Clean up after a failure of the block, and tell the other ranks."""
        try:
            yield
        except BaseException as error:
            mark_committed(error, None)
            if draft is not None:
                draft.discard()
            self.tell(phase, _reason(error))
            raise

    def tell(self, phase: Phase, reason: str) -> None:
        """Tell the other ranks why this rank has failed."""
        if self._barrier is not None:
            with suppress(TransportError):
                meeting = replace(self._meeting, phase=phase)
                self._barrier.report(meeting, reason)

    def meet(
        self, draft: RankDraft, rank: int, snapshot: str
    ) -> tuple[str, dict[int, str]]:
        """Wait until every rank has written its file.

        Returns:
            A warning if rank 0 has committed it and this rank was not told, or "". And
            for rank 0, the snapshot that each rank has written.

        Raises:
            StorageError: a rank did not arrive, or failed.
        """
        if self._barrier is None:
            return "", {rank: snapshot}
        try:
            meeting = replace(self._meeting, snapshot=snapshot)
            return "", self._barrier.meet(meeting)
        except TransportError as error:
            if draft.is_committed():
                return self._not_confirmed(error), {}
            # Rank 0 commits. These errors tell the others that it will not.
            if not rank or isinstance(error, PeerFailedError | TransferTimeoutError):
                draft.discard(agreed=True)
                raise self._not_committed(error) from error
            raise self._not_known(error) from error

    def confirm(self, draft: RankDraft, rank: int) -> str:
        """Wait until every rank knows of the commit; return a warning if one does not.

        Raises:
            StorageError: rank 0 has not committed it, or this rank cannot find out.
        """
        if self._barrier is None:
            return ""
        try:
            self._barrier.meet(replace(self._meeting, phase="committed"))
        except Exception as error:
            # A committed checkpoint stays committed if the barrier fails.
            if not rank or draft.is_committed():
                return self._not_confirmed(error)
            if isinstance(error, PeerFailedError) and not error.rank:
                draft.discard()
                raise self._not_committed(error) from error
            raise self._not_known(error) from error
        return ""

    def _not_confirmed(self, error: Exception) -> str:
        why = _reason(error).partition("\n")[0]
        name = os.path.basename(self._where)
        return f"{name} is committed, but not every rank confirmed it: {why}"

    def _not_committed(self, error: Exception) -> StorageError:
        return StorageError(self._where, f"it was not committed: {error}")

    def _not_known(self, error: Exception) -> StorageError:
        detail = (
            f"it is not known whether it was committed: {error}; it was, if "
            f"{MARKER} is there with step {self.step}"
        )
        failure = StorageError(self._where, detail)
        failure.may_be_committed = True
        return failure


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _finish(outcome: Awaitable[None] | None) -> None:
    """Run the result of a hook to its end if it is awaitable."""
    if inspect.isawaitable(outcome):
        run_blocking(_awaited(outcome))


async def _awaited(outcome: Awaitable[None]) -> None:
    await outcome


def _unresolved(path: StrPath) -> str:
    """Return an absolute path without following links, or the path as it is."""
    try:
        return absolute(path)
    except OSError:  # the working directory is gone
        return os.fspath(path)


# --------------------------------------------- how a background writer uses a writer


class WriteJob(ABC):
    """One write for a worker: what to write, and whom to tell about it.

    Attributes:
        number: Which of the trainer's saves it is.
        path: The checkpoint's absolute path.
        ranks: The ranks of the save.
        keywords: The encoded keyword arguments of ``save``.
    """

    number: int
    path: str
    ranks: SaveRanks
    keywords: bytes

    def advance(self, nbytes: int = 0) -> None:
        """Report that the writer has consumed so many bytes; first, that it begins."""
        self.tell(Progressed(self.number, nbytes))

    def keep(self, file: tuple[int, int]) -> None:
        """Report the `RankDraft.identity` of the complete file, before the commit."""
        self.tell(Kept(self.number, *file))

    @abstractmethod
    def snapshot(self) -> Snapshot | MappedSnapshot:
        """Return the copy; called once."""

    @abstractmethod
    def memory(self) -> mmap | memoryview:
        """Return the data segment; a writer of the user's own may modify it."""

    @abstractmethod
    def tell(self, message: Progressed | Kept) -> None:
        """Tell the trainer how far the write is; see `SaveHandle.hear`."""

    @abstractmethod
    def seal(self, manifest: Manifest) -> None:
        """Note the manifest once it has the digests."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory: the write has ended, or was dropped."""

    @abstractmethod
    def end(self, outcome: Written | BaseException) -> bool:
        """Report the end; return False if nobody is there to be told."""


def write_job(job: WriteJob, writers: Writers) -> Written:
    """Write a staged checkpoint with a writer, which may be the user's own.

    A writer that overrides ``write`` gets a state dict over ``job.memory()``, which it
    may modify until it returns. Its types are found by name, and their modules are
    imported. An error that comes after the commit is a warning of the result.
    """
    snapshot = job.snapshot()
    step = snapshot.manifest.step
    try:
        keywords = decode_keywords(job.keywords)
    except Exception as error:
        tell_ranks(writers, job.ranks, job.path, step, str(error))
        raise
    writer = writers.of(job.ranks)
    ours = isinstance(writer, CheckpointWriter)
    staged = WritableSnapshot(snapshot, on_seal=job.seal)
    try:
        with writer.telling_file(job.keep) if ours else nullcontext():
            if getattr(type(writer), "write", None) is CheckpointWriter.write:
                watched = _WithProgress(staged, job.advance)
                told = writer.write_staged(job.path, watched, step, **keywords)
                return told if isinstance(told, Written) else Written()
            manifest = staged.seal()
            writer.write(path=job.path, state_dict=_state(manifest, job), **keywords)
            return Written(content=content_of(manifest), nbytes=manifest.segment_bytes)
    except BaseException as error:
        if (written := committed_before(error)) is None:
            raise
        what = f"{Path(job.path).name} is committed, but {type(error).__name__} came"
        return written._replace(warning=f"{what} after the commit: {_reason(error)}")


def _state(manifest: Manifest, job: WriteJob) -> Any:
    """Return a state dict over the memory of a job."""
    from aiockpt.state.nodes import decoder_by_name
    from aiockpt.state.rebuild import Frame, assemble, tensors_over

    # The trainer has staged it, so it has also decided about pickles.
    return assemble(
        Frame.of(manifest),
        tensors_over(manifest, job.memory()),
        limits=TRUSTED,
        allow_pickle=True,
        by_name=partial(decoder_by_name, imports=True),
    )


def own_functions(writer: Any) -> list[Callable[..., object]]:
    """Return the user's own functions that get the keywords of a save."""
    if isinstance(writer, Writers):
        return writer.own_functions()
    own: list[Callable[..., object]] = []
    for name in ("write", "write_staged"):
        given = getattr(type(writer), name, None)
        if given not in (None, getattr(CheckpointWriter, name)):
            own.append(getattr(writer, name))
    return own + _of_hook(getattr(writer, "_hook", None))


def _of_hook(hook: WriterHook | None) -> list[Callable[..., object]]:
    return [] if hook is None else [hook.pre_commit, hook.post_commit]


def tell_ranks(
    writers: Writers,
    ranks: SaveRanks,
    path: str,
    step: int,
    reason: str,
    *,
    begun: bool = False,
) -> None:
    """Tell the other ranks, by the writer, that this rank saves nothing."""
    try:
        writer = writers.of(ranks)
        if callable(abandon := getattr(writer, "abandon", None)):
            # A writer of the user's own need not know the argument.
            own = isinstance(writer, CheckpointWriter)
            keywords = {"begun": True} if begun and own else {}
            abandon(path, step, reason, **keywords)
    except Exception:
        logger.warning("the other ranks were not told", exc_info=True)


# --------------------------------------- what the checkpoint process calls by default


def default_subprocess_init_fn(*_: object) -> None:
    """Do nothing in the new process."""


def configured_writer(
    rank_info: RankInfo,
    writer_config: CheckpointWriterConfig = CheckpointWriterConfig(),  # noqa: B008 - frozen
    barrier_config: BarrierConfig = BarrierConfig(),  # noqa: B008 - frozen
    commit_hook: WriterHook | None = None,
    store: GroupStore | None = None,
) -> CheckpointWriter:
    """Make a writer and its barrier, in the process that will write.

    ``store`` is the store of the default group, in another process.
    """
    barrier = create_barrier_from_config(barrier_config, rank_info, store)
    return CheckpointWriter(writer_config, rank_info, barrier, commit_hook)


class Writers:
    """The writer for the ranks of each save. Another one is made if they change.

    Args:
        make: Makes a writer, which may be the user's own, from ``rank_info`` and the
            arguments.
        arguments: The other arguments of ``make``; a ``rank_info`` in them counts.
        rank_info: The rank of every save. None: ``lookup`` looks it up.

    Attributes:
        lookup: Finds out the ranks of a save.
        are_default: Whether each is the default writer, and none the user's own.
        config: What a writer does after a commit, as far as the arguments tell.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        arguments: Mapping[str, Any],
        rank_info: RankInfo | None = None,
    ) -> None:
        self._make, self._arguments = make, arguments
        given = arguments.get("rank_info", rank_info)
        barrier = arguments.get("barrier_config", BarrierConfig())
        self.are_default = make is configured_writer
        self.lookup = RankLookup(given, barrier if self.are_default else None)
        config = arguments.get("writer_config")
        self.config = config if isinstance(config, CheckpointWriterConfig) else None
        self._ranks: SaveRanks | None = None
        self._writer: Any = None

    def own_functions(self) -> list[Callable[..., object]]:
        """Return the user's own functions that get the keywords of a save.

        A writer that a function of the user makes gets all keywords.
        """
        if self.are_default:
            return _of_hook(self._arguments.get("commit_hook"))
        return [anything]

    def of(self, ranks: SaveRanks) -> Any:
        """Return the writer of these ranks."""
        if ranks != self._ranks:
            self.close()
            arguments = {"rank_info": ranks.info, **self._arguments}
            if self.are_default:
                arguments["store"] = ranks.store
            self._writer = self._make(**arguments)
            self._ranks = ranks
        return self._writer

    def close(self) -> None:
        """Close the writer, if there is one. Idempotent."""
        writer, self._writer, self._ranks = self._writer, None, None
        if callable(close := getattr(writer, "close", None)):
            close()
