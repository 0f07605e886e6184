"""Which bytes of a checkpoint belong into which memory.

`LoadPlanner` takes down the tensors that a load wants. A dense tensor of a template, in
host memory or on a device, gets its bytes straight from the source, if it is alone in
its entry. Everything else arrives in the arena of the data segment; what a template has
of it is copied when everything has been read. Nothing is read or changed here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from aiockpt.format.manifest import Manifest
from aiockpt.memory.copies import Backings, mark_changed, once
from aiockpt.state.distributed import has_version

__all__ = ["PLAIN", "LoadPlan", "LoadPlanner"]

PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that have nothing in them but their elements."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Where the bytes of one data segment go.

    Attributes:
        ranges: The bytes that are wanted: ascending, apart, neighbours joined.
        backings: The memory that an entry's bytes go straight to; zero bytes for an
            entry that has none.
        kept: For each entry, whether its bytes stay in the arena.
    """

    ranges: Sequence[tuple[int, int]]
    backings: Backings
    kept: bytearray


class Segment(Protocol):
    """A data segment in memory: where its bytes are, and what they mean."""

    manifest: Manifest

    def offset_of(self, address: int) -> int | None:
        """Return where an address is in the segment; None if it is elsewhere."""

    def entry_at(self, offset: int) -> int:
        """Return the entry that has a byte."""


@dataclass(frozen=True, slots=True)
class _Want:
    """Bytes of one entry, and a dense tensor with the same elements in order.

    Without a target the bytes are wanted where they are.
    """

    start: int
    stop: int
    source: torch.Tensor
    target: torch.Tensor | None

    @property
    def identity(self) -> tuple[object, ...]:
        """What two wants of the same tensor, such as tied ones, have in common."""
        target = self.target
        home = None if target is None else (target.device, target.data_ptr())
        return self.start, self.stop, home


class LoadPlanner:
    """Takes down what a load wants of some data segments.

    Args:
        segments: What it reads from.
        device: Where tensors go that have no place in a template; None: they stay in
            the memory of their segment.
    """

    def __init__(
        self, segments: Sequence[Segment], *, device: torch.device | None
    ) -> None:
        self.touched = False
        self._device = device
        self._segments = segments
        self._wants: list[dict[int, list[_Want]]] = [{} for _ in segments]
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._changed: list[torch.Tensor] = []
        self._bases: dict[int, torch.Tensor] = {}
        self._replicas: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __repr__(self) -> str:
        return f"<LoadPlanner entries={sum(map(len, self._wants))}>"

    def keep(self, tensor: torch.Tensor) -> None:
        """Want the bytes of a segment's tensor where it is."""
        self._want(tensor, None)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Want a segment's tensor on the load's device; return it there."""
        if self._device is None:
            self.keep(tensor)
            return tensor
        if not is_dense(tensor) or self._device.type == "meta" or not tensor.numel():
            return tensor.to(self._device)
        known = self._replicas.get(id(tensor))
        if known is None:
            known = self._replicas[id(tensor)] = (self._replica(tensor), tensor)
        return known[0]

    def fill(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        *,
        whole: torch.Tensor | None = None,
    ) -> None:
        """Want the elements of a segment's tensor in one of a template."""
        if not source.numel():
            return
        self._changed.append(target)
        if whole is not None and has_version(whole):
            self._changed.append(whole)
        alike = is_dense(target) and is_dense(source) and _are_alike(target, source)
        if not (alike and self._want(source, target.detach())):
            self.keep(source)
            self._copies.append((target, source))

    def plans(self) -> list[LoadPlan]:
        """Return the plan of each segment."""
        return [*map(self._plan, self._segments, self._wants)]

    def begin(self) -> None:
        """Say that the template changes from now on."""
        self.touched = bool(self._changed)
        mark_changed(self._changed)

    def finish(self) -> None:
        """Copy what has not arrived where it belongs."""
        for target, source in self._copies:
            destination, origin = once(target, source)
            with torch.inference_mode(target.is_inference()), torch.no_grad():
                destination.copy_(origin)

    def _want(self, source: torch.Tensor, target: torch.Tensor | None) -> bool:
        """Take it down; return False if its bytes are in no segment."""
        if not is_dense(source) or not source.numel():
            return False
        address, nbytes = source.data_ptr(), _span(source)
        for segment, wants in zip(self._segments, self._wants, strict=True):
            start = segment.offset_of(address)
            if start is not None:
                want = _Want(start, start + nbytes, source, target)
                wants.setdefault(segment.entry_at(start), []).append(want)
                return True
        return False

    def _replica(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device, whose storage is wanted there.

        Tensors that share a storage share one there too.
        """
        storage = tensor.untyped_storage()
        base = self._bases.get(storage.data_ptr())
        if base is None:
            nbytes = storage.nbytes()
            base = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._bases[storage.data_ptr()] = base
            raw = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))
            if not self._want(raw, base):
                self._copies.append((base, raw))
        return _like(tensor, base)

    def _plan(self, segment: Segment, entries: dict[int, list[_Want]]) -> LoadPlan:
        starts = segment.manifest.entries.starts
        straight: dict[int, _Want] = {}
        for entry, wants in entries.items():
            first = wants[0]
            whole = first.target is not None and first.start == starts[entry]
            alone = len(wants) == 1 or len({want.identity for want in wants}) == 1
            if whole and alone:
                straight[entry] = first
        for entry in [*_sharing(straight)]:
            del straight[entry]
        kept = bytearray(len(starts))
        ranges: list[tuple[int, int]] = []
        for entry, wants in entries.items():
            ranges += ((want.start, want.stop) for want in wants)
            if entry not in straight:
                kept[entry] = True
                distinct = {want.identity: want for want in wants}.values()
                self._copies += (
                    (want.target, want.source)
                    for want in distinct
                    if want.target is not None
                )
        return LoadPlan(_joined(ranges), _backings(len(starts), straight), kept)


def _backings(count: int, straight: dict[int, _Want]) -> Backings:
    tensors = [torch.empty(0)] * count
    addresses, sizes = array("Q", [0]) * count, array("q", [0]) * count
    for entry, want in straight.items():
        assert want.target is not None
        tensors[entry] = want.target
        addresses[entry] = want.target.data_ptr()
        sizes[entry] = want.stop - want.start
    return Backings(tensors, addresses, sizes, {})


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def _sharing(straight: dict[int, _Want]) -> Iterator[int]:
    """Yield the entries whose targets overlap others in memory."""
    homes: dict[torch.device, list[tuple[int, int, int]]] = {}
    for entry, want in straight.items():
        assert want.target is not None
        address = want.target.data_ptr()
        reach = address, address + want.stop - want.start, entry
        homes.setdefault(want.target.device, []).append(reach)
    for reaches in homes.values():
        cluster: list[int] = []
        end = 0
        for address, stop, entry in sorted(reaches):
            if address >= end:
                if len(cluster) > 1:
                    yield from cluster
                cluster = []
            cluster.append(entry)
            end = max(end, stop)
        if len(cluster) > 1:
            yield from cluster


def is_dense(tensor: torch.Tensor) -> bool:
    """Say whether a tensor's elements lie in memory as they are."""
    return (
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


def _are_alike(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Say whether the bytes of one are those of the other, without holes."""
    if (target.is_conj(), target.is_neg()) != (source.is_conj(), source.is_neg()):
        return False
    if target.is_contiguous() and source.is_contiguous():
        return True
    order = sorted(range(target.dim()), key=target.stride, reverse=True)
    dense = target.permute(order).is_contiguous()
    return dense and target.stride() == source.stride()


def _span(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the end of the last one."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.itemsize


def _like(tensor: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return the same view, with the same flags, of another storage."""
    replica = torch.empty(0, dtype=tensor.dtype, device=base.device).set_(
        base.untyped_storage(),
        int(tensor.storage_offset()),
        tensor.shape,
        tensor.stride(),
    )
    if tensor.is_conj():
        replica = replica.conj()
    if tensor.is_neg():
        replica = torch._neg_view(replica)  # noqa: SLF001 - torch has no public way
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(replica, tensor.requires_grad)
    return replica.requires_grad_() if tensor.requires_grad else replica
