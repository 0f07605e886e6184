"""Makes a state dict from a manifest and memory: first tensors, then the tree."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from mmap import mmap
from typing import Any, TypeAlias

import torch

from aiockpt.errors import RemoteProtocolError
from aiockpt.format.dtypes import CODES
from aiockpt.format.entries import Entry
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import (
    CONJ,
    NEG,
    PARAMETER,
    REQUIRES_GRAD,
    Manifest,
    TensorSpec,
)
from aiockpt.format.paths import Node, Path
from aiockpt.format.references import check_numbers
from aiockpt.format.tree import decode_tree
from aiockpt.runtime.system import collector_paused
from aiockpt.state.distributed import LayoutReader, check_places, decoders
from aiockpt.state.leaves import DTYPES, TreeRegistry
from aiockpt.state.nodes import Decoders
from aiockpt.state.sharding import Layout

OnDevice: TypeAlias = Mapping[int, torch.Tensor]
"""Entries whose bytes are not in the segment's buffer but in these tensors."""

_CODE_DTYPES = {code: DTYPES[name] for code, name in CODES.items()}


def tensors_over(
    manifest: Manifest,
    buffer: mmap | memoryview,
    *,
    base: int = 0,
    on_device: OnDevice | None = None,
) -> list[torch.Tensor]:
    """Return the tensors by number, over the segment that starts at ``base``.

    Every entry becomes a storage of its own, which keeps ``buffer`` alive; views of
    an entry share its storage. The bytes of entries in ``on_device`` are elsewhere.

    Raises:
        RemoteProtocolError: torch has no such tensor: its flags do not fit its
            dtype, or its size overflows.
    """
    with collector_paused(), _blaming_the_manifest():
        entries = manifest.entries
        dtypes = {code: _dtype(code) for code in dict.fromkeys(entries.dtypes)}
        columns = entries.dtypes, entries.shapes, entries.starts, entries.stops
        tensors = [
            _dense(buffer, dtypes[code], shape, base + start, base + stop)
            for code, shape, start, stop in zip(*columns, strict=True)
        ]
        for number, data in (on_device or {}).items():
            tensors[number] = _typed(entries[number], data)
        bases = tensors.copy()
        tensors += (view_of(bases[spec.storage], spec) for spec in manifest.views)
    return tensors


def parts_over(
    manifest: Manifest,
    buffer: memoryview,
    *,
    parts: Set[int],
    blobs: Set[int],
    fresh: Set[int] = frozenset(),
    on_device: OnDevice | None = None,
) -> dict[int, torch.Tensor]:
    """Return the ``parts``, ``blobs`` and ``fresh`` tensors only, by number.

    Registered leaves are made of ``parts``. They get memory of their own, so that they
    do not keep the segment alive. ``blobs`` hold the bytes of values and stay in the
    segment, because these bytes are copied out anyway. ``fresh`` tensors stay there
    permanently.

    Raises:
        RemoteProtocolError: as `tensors_over`.
    """
    count, on_device = len(manifest.entries), on_device or {}

    def dense(number: int) -> torch.Tensor:
        entry, data = manifest.entries[number], on_device.get(number)
        if data is not None:
            return _typed(entry, data)
        return _dense(buffer, _dtype(entry.dtype), entry.shape, *entry.data_offsets)

    with collector_paused(), _blaming_the_manifest():
        # Views of an entry share its memory, as the parts of a tied leaf do.
        bases: dict[int, torch.Tensor] = {}
        found = {number: dense(number) for number in blobs if number < count}
        for storage in {manifest.storage_of(number) for number in fresh}:
            bases[storage] = dense(storage)
        for number in chain(fresh, parts):
            spec = manifest.tensor(number)
            if spec.storage not in bases:
                bases[spec.storage] = dense(spec.storage).clone()
            base = bases[spec.storage]
            found[number] = base if number < count else view_of(base, spec)
    return found


@contextmanager
def _blaming_the_manifest() -> Iterator[None]:
    """Blame the sender for torch's errors, such as for a size that overflows."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise RemoteProtocolError(f"a tensor of the manifest: {error}") from error


def _dense(
    buffer: mmap | memoryview,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    start: int,
    stop: int,
) -> torch.Tensor:
    if start == stop:
        return torch.empty(shape, dtype=dtype)
    count = (stop - start) // dtype.itemsize
    flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=start)
    # A view would be a second tensor, with the first one as its base. This call does
    # not compare the shape with the bytes, because `tiling_fault` has done so.
    return flat if len(shape) == 1 else flat.resize_(shape)


def _typed(entry: Entry, data: torch.Tensor) -> torch.Tensor:
    return data.view(_dtype(entry.dtype)).view(entry.shape)


def _dtype(code: str) -> torch.dtype:
    dtype = _CODE_DTYPES.get(code)
    if dtype is None:
        raise RemoteProtocolError(f"torch has no dtype for {code!r}")
    return dtype


def view_of(base: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the tensor of a spec, over the storage of an entry."""
    dtype = DTYPES[spec.dtype]
    tensor = torch.empty(0, dtype=dtype, device=base.device).set_(
        base.untyped_storage(), spec.offset, spec.shape, spec.stride
    )
    if spec.flags & CONJ:
        tensor = tensor.conj()
    if spec.flags & NEG:
        tensor = torch._neg_view(tensor)  # noqa: SLF001 - torch has no public way
    if spec.flags & PARAMETER:
        return torch.nn.Parameter(tensor, bool(spec.flags & REQUIRES_GRAD))
    return tensor.requires_grad_() if spec.flags & REQUIRES_GRAD else tensor


@dataclass(frozen=True, slots=True)
class Frame:
    """The part of a manifest that is still needed once the tensors exist.

    The manifest of 100,000 tensors takes much memory. A caller that keeps only the
    frame lets that memory be freed.
    """

    tree: Node
    entries: Sequence[range]
    tensors: int
    total_bytes: int

    @classmethod
    def of(cls, manifest: Manifest) -> Frame:
        """Return the frame of ``manifest``."""
        entries, tensors = range(len(manifest.entries)), manifest.tensor_count
        return cls(manifest.tree, [entries], tensors, manifest.total_bytes)


def assemble(
    frame: Frame,
    tensors: Sequence[torch.Tensor],
    *,
    limits: Limits,
    allow_pickle: bool = False,
    wholes: Mapping[int, torch.Tensor] | None = None,
    nodes: Decoders | None = None,
    by_name: Callable[[str], Callable[[Any], object] | None] = lambda _: None,
) -> object:
    """Return the state dict of a checkpoint, made of its tree and tensors.

    Only registered leaves read the tensors' bytes. The values made of these bytes take
    no more memory than the checkpoint. ``wholes`` and ``nodes`` come from a template.
    ``by_name`` is for what this user's own process has staged: see `decoder_by_name`.

    Raises:
        DeviceMeshError: a distributed tensor has no place in this process.
        RemoteProtocolError: the tree is malformed, or has a leaf type that this
            process has not registered.
    """
    if not wholes:
        check_meshes(frame, limits=limits)
    more = {**decoders(wholes or {}), **(nodes or {})}
    with collector_paused():
        return decode_tree(
            frame.tree,
            registry=TreeRegistry(
                more,
                allow_pickle=allow_pickle,
                travelled=frame.total_bytes,
                by_name=by_name,
            ),
            tensors=tensors,
            blob=lambda number: _bytes(frame, number, tensors),
            limits=limits,
        )


def check_meshes(frame: Frame, *, limits: Limits) -> None:
    """Refuse distributed tensors that this process cannot hold, before any transfer.

    Raises:
        DeviceMeshError: this process lacks a process group that one needs.
        RemoteProtocolError, LimitExceededError: one is malformed, or too large.
    """
    found: dict[Path, Layout] = {}
    with collector_paused():
        for path, numbers, layout in LayoutReader(limits).all_in(frame.tree):
            check_numbers(numbers, frame.tensors)
            found[path] = layout
        check_places(found)


def _bytes(frame: Frame, number: int, tensors: Sequence[torch.Tensor]) -> bytes:
    # Only whole entries: each view of an entry would become a copy of the entry.
    is_entry = any(number in each for each in frame.entries)
    if not is_entry or tensors[number].dtype != torch.uint8:
        raise RemoteProtocolError(f"bytes cannot come from tensor {number}")
    tensor = tensors[number]
    if tensor.device.type != "cpu":  # its address is not in host memory
        raise RemoteProtocolError(f"bytes cannot come from {tensor.device}")
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())
