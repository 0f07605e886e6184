"""Manifest and memory → state dict: tensors over the segment, then the tree."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import mmap

import torch

from aiockpt._gc import collector_paused
from aiockpt._leaves import DTYPES, registry
from aiockpt._wholes import check_places, decoders, layouts
from aiockpt.errors import RemoteProtocolError
from aiockpt.wire.dtypes import CODES
from aiockpt.wire.entries import Entry
from aiockpt.wire.limits import Limits
from aiockpt.wire.manifest import (
    CONJ,
    NEG,
    PARAMETER,
    REQUIRES_GRAD,
    Manifest,
    TensorSpec,
)
from aiockpt.wire.paths import Node
from aiockpt.wire.untree import decode_tree

__all__ = [
    "Frame",
    "assemble",
    "check_meshes",
    "entry_tensors",
    "parts_over",
    "tensors_over",
]

_CODE_DTYPES = {code: DTYPES[name] for code, name in CODES.items()}


def tensors_over(
    manifest: Manifest, buffer: mmap | memoryview, *, base: int = 0
) -> list[torch.Tensor]:
    """Return the tensors by number, over the segment that starts at ``base``.

    Every entry becomes a storage of its own, which keeps ``buffer`` alive; views of
    an entry share its storage.

    Raises:
        RemoteProtocolError: torch has no such tensor: its flags do not fit its
            dtype, or its size overflows.
    """
    with collector_paused(), _blaming_the_manifest():
        tensors = entry_tensors(manifest.entries, buffer, base=base)
        bases = tensors.copy()
        tensors += (_view(bases[spec.storage], spec) for spec in manifest.views)
    return tensors


def parts_over(
    manifest: Manifest, buffer: memoryview, *, parts: Set[int], blobs: Set[int]
) -> dict[int, torch.Tensor]:
    """Return only the tensors that values are made of, by number.

    ``parts`` get memory of their own, so that they do not keep the segment alive;
    ``blobs`` stay in the segment, since their bytes are copied out anyway.

    Raises:
        RemoteProtocolError: as `tensors_over`.
    """
    count = len(manifest.entries)
    with collector_paused(), _blaming_the_manifest():
        # Views of an entry share its memory, as the parts of a tied leaf do.
        bases: dict[int, torch.Tensor] = {}
        found = {n: _dense(manifest.entries[n], buffer, 0) for n in blobs if n < count}
        for number in parts:
            spec = manifest.tensor(number)
            if spec.storage not in bases:
                dense = _dense(manifest.entries[spec.storage], buffer, 0)
                bases[spec.storage] = dense.clone()
            base = bases[spec.storage]
            found[number] = base if number < count else _view(base, spec)
    return found


@contextmanager
def _blaming_the_manifest() -> Iterator[None]:
    """Torch's own objections, say to a size that overflows, are the sender's fault."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise RemoteProtocolError(f"a tensor of the manifest: {error}") from error


def entry_tensors(
    entries: Iterable[Entry], buffer: mmap | memoryview, *, base: int = 0
) -> list[torch.Tensor]:
    """Return the dense tensor of every entry."""
    return [_dense(entry, buffer, base) for entry in entries]


def _dense(entry: Entry, buffer: mmap | memoryview, base: int) -> torch.Tensor:
    dtype = _CODE_DTYPES.get(entry.dtype)
    if dtype is None:
        raise RemoteProtocolError(f"torch has no dtype for {entry.dtype!r}")
    start, stop = entry.data_offsets
    if start == stop:
        return torch.empty(entry.shape, dtype=dtype)
    count = (stop - start) // dtype.itemsize
    flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=base + start)
    return flat if len(entry.shape) == 1 else flat.view(entry.shape)


def _view(base: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    dtype = DTYPES[spec.dtype]
    tensor = torch.empty(0, dtype=dtype).set_(
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
    """What is left to know of a checkpoint when its tensors exist.

    The manifest of 100,000 tensors weighs a tenth of a gigabyte of them: whoever keeps
    only this lets go of it.
    """

    tree: Node
    entries: int
    tensors: int
    total_bytes: int

    @classmethod
    def of(cls, manifest: Manifest) -> Frame:
        """Return what is left of ``manifest``."""
        entries, tensors = len(manifest.entries), manifest.tensor_count
        return cls(manifest.tree, entries, tensors, manifest.total_bytes)


def assemble(
    frame: Frame,
    tensors: Sequence[torch.Tensor],
    *,
    limits: Limits,
    allow_pickle: bool = False,
    wholes: Mapping[int, torch.Tensor] | None = None,
) -> object:
    """Return the state dict of a checkpoint with its tensors put in.

    Nothing but registered leaves looks into the tensors. What is made of their bytes
    takes no more memory than the checkpoint. ``wholes`` are those of a `Match`.

    Raises:
        DeviceMeshError: a distributed tensor has no place in this process.
        RemoteProtocolError: the tree is malformed, or has a leaf type that this
            process has not registered.
    """
    if not wholes:
        check_meshes(frame, limits=limits)
    more = decoders(wholes or {})
    with collector_paused():
        return decode_tree(
            frame.tree,
            registry=registry(
                more, allow_pickle=allow_pickle, travelled=frame.total_bytes
            ),
            tensors=tensors,
            blob=lambda number: _bytes(frame, number, tensors),
            limits=limits,
        )


def check_meshes(frame: Frame, *, limits: Limits) -> None:
    """Refuse distributed tensors that have no place here, before a byte is moved.

    Raises:
        DeviceMeshError: this process lacks a process group that one needs.
        RemoteProtocolError, LimitExceededError: one is malformed, or too large.
    """
    check_places(layouts(frame.tree, count=frame.tensors, limits=limits))


def _bytes(frame: Frame, number: int, tensors: Sequence[torch.Tensor]) -> bytes:
    # Only of whole entries: views of one entry would each be a copy of it.
    if number >= frame.entries or tensors[number].dtype != torch.uint8:
        raise RemoteProtocolError(f"bytes cannot come from tensor {number}")
    tensor = tensors[number]
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())
