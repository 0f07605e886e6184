"""The fingerprint of a state dict, of all ranks of a group, or of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from aiockpt.checkpointers.ranks import gathered
from aiockpt.checkpointers.sources import Reading, is_url, open_sources
from aiockpt.errors import StateDictError
from aiockpt.format.fingerprint import Fingerprint
from aiockpt.format.limits import FILE_LIMITS, OF_A_SAVE, advising
from aiockpt.state.fingerprinting import fingerprint_of, fingerprint_of_segment
from aiockpt.state.segment import check_memory
from aiockpt.storage.boxes import LoadedSource
from aiockpt.storage.read import LoadSource, read_segment

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup


def fingerprint(state: Any, group: ProcessGroup | None = None) -> Fingerprint:
    """Return the fingerprint of a state dict, or of a checkpoint on disk.

    It has sums of the elements of each tensor, by path. They depend on the place of an
    element in the full tensor, and not on the mesh. So the sum of all ranks of one mesh
    equals that of any other mesh, and :meth:`.Fingerprint.require` compares them.

    The call blocks. Each tensor is read where it is, on its device. Do not change the
    tensors meanwhile. Values that are no tensors are not covered.

    Args:
        state: A state dict; its DTensors may be on any mesh. Or the path of a
            checkpoint's directory, whose files of all ranks are added, or of one file.
            Their bytes are verified as they are read.
        group: Add up the fingerprints of the ranks of this group of torch.distributed.
            Each of its ranks makes this call, and gets the sum. None: return that of
            this rank alone.

    Raises:
        UnsupportedLeafError: a tensor cannot be covered, such as a sparse one.
        StateDictError: another rank of the group could not make its fingerprint.
        FingerprintMismatchError: the ranks hold parts of different tensors at one path.
        CheckpointNotFoundError: there is no complete checkpoint at the path.
        StorageError, IntegrityError: the checkpoint cannot be read, or is damaged.
        ValueError: a URL, or a path together with ``group``.
        TypeError: ``state`` has no tensor and is no container, such as a number.
    """
    if isinstance(state, str | os.PathLike):
        if is_url(state):
            raise ValueError(
                "the fingerprint of a peer comes from a transport: await "
                "transport.fingerprint(metadata=..., step=...)"
            )
        if group is not None:
            raise ValueError("a path has the files of all ranks: leave out group=")
        return _of_checkpoint(state)
    if group is None:
        return _of_state(state)
    return _of_group(state, group)


def _of_state(state: object) -> Fingerprint:
    """Return the fingerprint of what this rank holds.

    Raises:
        TypeError: it is nothing that could have tensors.
    """
    found = _of_values(state)
    if not found.tensors and not _is_container(state):
        kind = type(state).__name__
        raise TypeError(
            f"a fingerprint is that of a state dict or a path, not a {kind}"
        )
    return found


def _of_values(values: object) -> Fingerprint:
    with advising(OF_A_SAVE):
        return fingerprint_of(values, limits=FILE_LIMITS)


def _is_container(value: object) -> bool:
    is_bytes = isinstance(value, bytes | bytearray | memoryview)
    return isinstance(value, Mapping | Sequence | Set) and not is_bytes


def _of_group(state: object, group: ProcessGroup) -> Fingerprint:
    """Return the sum of the ranks; a rank that fails keeps no other one waiting."""
    try:
        mine = _of_state(state).to_json()
    except Exception:
        gathered(b"", group)
        raise
    texts = gathered(mine, group)
    for rank, each in enumerate(texts):
        if not each:
            raise StateDictError(f"rank {rank} of the group has no fingerprint")
    return Fingerprint.total(
        Fingerprint.from_json(each, limits=FILE_LIMITS) for each in texts
    )


def _of_checkpoint(path: str | os.PathLike[str]) -> Fingerprint:
    reading = Reading(
        rank=0,
        world_size=1,  # so the files of all ranks are opened
        rank_values="error",
        limits=FILE_LIMITS,
        allow_pickle=False,
        verify="full",
        mmap=False,
        on_bytes=None,
    )
    with open_sources(path, reading) as found:
        return Fingerprint.total(map(_of_source, found.every()))


def _of_source(source: LoadSource) -> Fingerprint:
    """Read one source into memory, and give the memory back at the end."""
    if isinstance(source, LoadedSource):
        return _of_values(source.values)
    segment = source.segment
    size = segment.manifest.segment_bytes
    ranges = [(0, size)] if size else []
    check_memory(ranges, FILE_LIMITS)
    with ExitStack() as stack:
        stack.callback(segment.arena.close)
        read_segment(source, ranges, verify="full")
        return fingerprint_of_segment(
            segment.manifest, segment.arena.buffer, limits=FILE_LIMITS
        )
