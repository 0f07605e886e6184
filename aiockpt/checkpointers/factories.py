"""Factories: make a checkpointer from one config.

`load` needs no checkpointer: it reads one checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Never

from aiockpt.checkpointers.async_checkpointer import (
    AsyncCheckpointer,
    BackgroundCheckpointer,
    check_policy,
)
from aiockpt.checkpointers.base import template_of
from aiockpt.checkpointers.config import (
    ELSEWHERE,
    CheckpointerConfig,
    RankInfo,
    SaveRanks,
)
from aiockpt.checkpointers.handle import BackgroundWriter
from aiockpt.checkpointers.process import CheckpointProcess
from aiockpt.checkpointers.reader import CheckpointReader, MapLocation
from aiockpt.checkpointers.stager import DefaultStager
from aiockpt.checkpointers.sync import SyncCheckpointer
from aiockpt.checkpointers.thread import CheckpointThread
from aiockpt.checkpointers.writer import (
    WriterHook,
    Writers,
    configured_writer,
    default_subprocess_init_fn,
)
from aiockpt.runtime.background import takes_arguments_of
from aiockpt.state.reshard import RankValues
from aiockpt.state.selection import Select
from aiockpt.storage.directory import StrPath
from aiockpt.storage.read import OnBytes, Verify
from aiockpt.transport import names_its_options, refuse_unknown


@names_its_options
def make_sync_checkpointer(
    config: CheckpointerConfig = CheckpointerConfig(),  # noqa: B008 - frozen
    rank_info: RankInfo | None = None,
    commit_hook: WriterHook | None = None,
    **unknown: Never,
) -> SyncCheckpointer:
    """Return a checkpointer that saves and loads without an event loop.

    Args:
        config: How to write, and how ranks commit together.
        rank_info: This process's rank. By default the rank in ``torch.distributed``,
            or the only rank, looked up at each save and load.
        commit_hook: Called around each commit.
        unknown: Refused.
    """
    refuse_unknown(make_sync_checkpointer, unknown, elsewhere=ELSEWHERE)
    writers = Writers(
        configured_writer,
        {
            "writer_config": config.writer_config,
            "barrier_config": config.barrier_config,
            "commit_hook": commit_hook,
        },
        rank_info,
    )
    return SyncCheckpointer(
        writers,
        CheckpointReader(rank_info, allow_pickle=config.writer_config.allow_pickle),
    )


@names_its_options
def make_async_checkpointer(
    config: CheckpointerConfig = CheckpointerConfig(),  # noqa: B008 - frozen
    rank_info: RankInfo | None = None,
    subprocess_init_fn: Callable[..., object] = default_subprocess_init_fn,
    subprocess_init_args: tuple[Any, ...] = (),
    checkpoint_writer_init_fn: Callable[..., Any] | None = None,
    checkpoint_writer_init_args: Mapping[str, Any] | None = None,
    *,
    commit_hook: WriterHook | None = None,
    **unknown: Never,
) -> AsyncCheckpointer:
    """Return a checkpointer that saves in the background.

    The checkpoint process starts at once; no event loop needs to run yet. This works
    with and without an accelerator.

    Args:
        config: All options.
        rank_info: This process's rank. By default the rank in ``torch.distributed``,
            or the only rank, looked up at each save and load.
        subprocess_init_fn, subprocess_init_args: A function that is called first in the
            checkpoint process, and its arguments. Not called with
            ``use_process=False``.
        checkpoint_writer_init_fn, checkpoint_writer_init_args: Makes the writer in that
            process, from ``rank_info`` and these keywords, and another one if the rank
            changes. Then ``writer_config`` and ``barrier_config`` have no effect.
        commit_hook: Called around each commit by the default writer, in its process.
        unknown: Refused.

    Raises:
        TypeError: an unknown keyword.
        ValueError: several ranks have a busy policy other than ``wait``, which they
            might apply differently.
        LocalProtocolError: a function or an argument cannot be pickled.
    """
    refuse_unknown(make_async_checkpointer, unknown, elsewhere=ELSEWHERE)
    make_writer, arguments = checkpoint_writer_init_fn, dict[str, Any]()
    if make_writer is None:
        make_writer = configured_writer
        arguments["writer_config"] = config.writer_config
        arguments["barrier_config"] = config.barrier_config
        arguments["commit_hook"] = commit_hook
    arguments |= checkpoint_writer_init_args or {}
    staging, process = config.staging_config, config.process_config
    writers = Writers(make_writer, arguments, rank_info)
    check_policy(config.busy_policy, SaveRanks(writers.lookup.info()))
    writer: BackgroundWriter
    if config.use_process:
        writer = CheckpointProcess(
            rank_info,
            process,
            subprocess_init_fn,
            subprocess_init_args,
            make_writer,
            arguments,
            staging_config=staging,
        )
    else:
        writer = CheckpointThread(
            writers,
            shutdown_timeout_secs=process.subprocess_shutdown_timeout_secs,
            staging_config=staging,
        )
    return AsyncCheckpointer(
        DefaultStager(staging, shared=config.use_process),
        writer,
        CheckpointReader(rank_info, allow_pickle=staging.allow_pickle),
        busy_policy=config.busy_policy,
        raise_on_failure=config.raise_on_failure,
        keep_last=config.use_process and process.keep_last_seconds > 0,
    )


@takes_arguments_of(make_async_checkpointer)
def make_background_checkpointer(
    *arguments: Any, **options: Any
) -> BackgroundCheckpointer:
    """Return a checkpointer that saves in the background, without an event loop.

    The arguments and errors are those of :func:`make_async_checkpointer`.
    """
    return BackgroundCheckpointer(make_async_checkpointer(*arguments, **options))


@names_its_options
def load(
    path: StrPath,
    state_dict: Any = None,
    *,
    into: Any = None,
    map_location: MapLocation = None,
    strict: bool = True,
    select: Select | None = None,
    verify: Verify = "full",
    mmap: bool = False,
    on_bytes: OnBytes | None = None,
    rank: int | None = None,
    full: bool = False,
    rank_values: RankValues = "error",
    rank_info: RankInfo | None = None,
    allow_pickle: bool = False,
    **unknown: Never,
) -> Any:
    """Return the state dict at ``path``; fill and return ``into`` if given.

    The call blocks. It needs no checkpointer and no event loop.

    Args:
        path: A checkpoint's directory, or anything else that
            :meth:`.CheckpointReader.read` takes.
        state_dict: Another name of ``into``.
        into: A template to fill in place.
        map_location: The device of tensors that have no place in the template.
            A tensor that is also a part of a registered leaf stays on the CPU with it.
        strict: Raise if the checkpoint lacks a key of the template or of ``select``, or
            if a container is empty in the template and full in the checkpoint. Other
            keys that only the checkpoint has are left out silently.
        select: The dotted paths to read, or a function that is asked for each path.
        verify: ``full`` or ``none``: whether to compare digests.
        mmap: Return tensors over a private mapping of the file.
        on_bytes: Called from any thread with the number of bytes that were read.
        rank: Read the file of this rank alone, with its local tensors.
        full: Load full tensors where the template has no place for distributed ones,
            although this process has a process group.
        rank_values: What to do with values that differ by rank if another number of
            ranks loads the checkpoint: ``error``, ``keep`` the template's, or take
            those of a rank, by its number.
        rank_info: This process's rank. By default the rank in ``torch.distributed``,
            or the only rank.
        allow_pickle: Also load leaves that were saved as pickles, which runs code.
        unknown: Refused.

    Raises:
        TypeError: an unknown keyword, or ``state_dict`` and ``into``.
        CheckpointNotFoundError: there is no complete checkpoint at ``path``.
        StorageError, IntegrityError: the checkpoint cannot be read, or is damaged.
        MissingKeysError: the checkpoint lacks every key of the template; or, with
            ``strict``, one of them. Nothing was changed.
        TemplateMismatchError: the template does not fit. Nothing was changed.
        RankValuesError: another number of ranks loads the checkpoint, and the ranks
            saved different values. Nothing was changed.
    """
    refuse_unknown(load, unknown)
    reader = CheckpointReader(rank_info, allow_pickle=allow_pickle)
    loaded, _ = reader.read(
        path,
        template_of(state_dict, into),
        map_location=map_location,
        strict=strict,
        select=select,
        verify=verify,
        mmap=mmap,
        on_bytes=on_bytes,
        rank=rank,
        full=full,
        rank_values=rank_values,
    )
    return loaded
