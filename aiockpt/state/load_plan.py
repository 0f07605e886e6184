"""Which bytes of a checkpoint belong into which memory, as its values tell.

`ValueWalk` walks the values of a checkpoint beside a template or a selection, and finds
out what is wanted, and where. `LoadPlanner` takes that down, tensor by tensor. A dense
tensor of a template, in host memory or on a device, gets its bytes straight from the
source, if it is alone in its entry. Everything else arrives in the arena of the data
segment; what a template has of it is copied when everything has been read. Nothing is
read or changed here before `finish`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, Protocol

import torch

from aiockpt.errors import (
    StateDictError,
    TemplateMismatchError,
    UnsupportedLeafError,
)
from aiockpt.format.manifest import Manifest
from aiockpt.format.tree import remedy_for, unsupported
from aiockpt.memory.copies import Backings, mark_changed, once
from aiockpt.state.containers import DICTS, Containers, children
from aiockpt.state.distributed import has_version, take_apart
from aiockpt.state.nodes import opened
from aiockpt.state.selection import Selection, below, item

__all__ = ["PLAIN", "LoadPlan", "LoadPlanner", "ValueWalk"]

_NOTHING: Final = object()

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


class ValueWalk(Containers):
    """Walks a checkpoint's values beside a template, and has what is wanted planned.

    Args:
        selection: What is wanted.
        planner: Takes down what is to be read.

    Attributes:
        missing: The keys of the template that the checkpoint lacks.
    """

    def __init__(self, selection: Selection, planner: LoadPlanner) -> None:
        super().__init__()
        self.missing: list[str] = []
        self._selection = selection
        self._planner = planner
        self._in_leaf = 0  # in what is selected as a whole

    def __repr__(self) -> str:
        return f"<ValueWalk missing={len(self.missing)}>"

    def plan(self, template: object | None, found: object) -> object:
        """Return what the load returns, once `finish` has been called.

        Raises:
            TemplateMismatchError: a value of the template is of another type, or a
                tensor of another shape or dtype, than the checkpoint's.
            UnsupportedLeafError: a tensor of the template is not dense.
        """
        if template is not None:
            self._selection.takes("")  # the template is there, whatever it is
            return self._into(template, found, "")
        chosen = self._chosen(found, "")
        return {} if chosen is _NOTHING else chosen

    def unmet(self) -> list[str]:
        """Return what was wanted, and was not found or has no place in the template."""
        return [*dict.fromkeys([*self.missing, *self._selection.unmet()])]

    def _chosen(self, value: object, path: str) -> object:
        """Return what is selected of a value; `_NOTHING` if nothing is."""
        if self._selection.takes(path):
            return self._taken(value)
        if type(value) in DICTS:
            return self._chosen_of_dict(value, path)
        if type(value) is list:
            items = [self._chosen(v, item(path, i)) for i, v in enumerate(value)]
            if all(each is _NOTHING for each in items):
                return _NOTHING
            return [None if each is _NOTHING else each for each in items]
        return self._taken(value) if self._selection.takes_leaf(path) else _NOTHING

    def _chosen_of_dict(self, value: Any, path: str) -> object:
        if not self._selection.enters(path):
            return _NOTHING
        for key in [*value]:
            chosen = self._chosen(value[key], below(path, key))
            if chosen is _NOTHING:
                del value[key]
            else:
                value[key] = chosen
        return value or _NOTHING

    def _taken(self, value: object) -> object:
        """Return a value of the checkpoint with all of its tensors wanted."""
        return _mapped(value, self._wanted)

    def _wanted(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = _parts(tensor)
        if parts is None:
            return self._planner.take(tensor)
        for part in parts.tensors:
            self._planner.keep(part)
        return tensor

    def _into(self, target: object, value: object, path: str) -> object:
        if target is None or (isinstance(target, torch.Tensor) and _is_meta(target)):
            if target is not None:
                _check_tensor(target, value, path)
            return self._anew(value, path)
        if isinstance(value, torch.Tensor):
            return self._into_tensor(target, value, path)
        if not isinstance(target, dict if type(value) in DICTS else type(value)):
            raise _mismatch(path, value, target)
        if isinstance(target, dict):
            return self._into_dict(target, value, path)
        if isinstance(target, list):
            return self._into_list(target, value, path)
        if type(target) is type(value):
            old, new = children(target), children(value)
            if old is not None and new is not None and len(old) == len(new):
                items = self._items(old, new, path)
                return self._rebuilt(target, value, items)
        return self._taken(value)

    def _into_dict(self, target: dict[Any, Any], value: Any, path: str) -> object:
        for key, old in target.items():
            where = below(path, key)
            if key not in value:
                if self._selection.takes(where):
                    self.missing.append(where)
            elif self._is_selected(value[key], where):
                new = self._into(old, value[key], where)
                if new is not old:
                    self._assign(target, key, new)
        return target

    def _items(self, old: Sequence[Any], new: Sequence[Any], path: str) -> list[Any]:
        self._in_leaf += 1
        pairs = enumerate(zip(old, new, strict=True))
        found = [self._into(*pair, item(path, at)) for at, pair in pairs]
        self._in_leaf -= 1
        return found

    def _anew(self, value: object, path: str) -> object:
        """Return what is selected of a value that is, for a place that has nothing."""
        if self._in_leaf or type(value) not in (*DICTS, list):
            return self._taken(value)
        chosen = self._chosen(value, path)
        return None if chosen is _NOTHING else chosen

    def _into_list(self, target: list[Any], value: Any, path: str) -> object:
        found = [*target]
        for at, (mine, theirs) in enumerate(zip_longest(target, value)):
            where = item(path, at)
            if self._is_selected(theirs, where):
                # It grows as far as something is selected, and no further.
                found += [None] * (at + 1 - len(found))
                found[at] = self._into(mine, theirs, where)
        self._assign_items(target, found)
        return target

    def _is_selected(self, value: object, path: str) -> bool:
        if self._in_leaf or self._selection.everything or self._selection.takes(path):
            return True
        if type(value) in (*DICTS, list):
            return self._selection.enters(path)
        return self._selection.takes_leaf(path)

    def _into_tensor(
        self, target: object, value: torch.Tensor, path: str
    ) -> torch.Tensor:
        if not isinstance(target, torch.Tensor):
            raise _mismatch(path, value, target)
        mine, theirs = _parts(target), _parts(value)
        # Torch does not tell the dtype of a distributed tensor without local parts.
        if all(parts is None or parts.tensors for parts in (mine, theirs)):
            _check_tensor(target, value, path)
        if mine is None and theirs is None:
            _check_layout(target, path)
            self._planner.fill(target, value)
            return target
        if mine is None or theirs is None or not _same_layout(mine, theirs):
            kinds = [
                "a tensor" if each is None else each.tag for each in (theirs, mine)
            ]
            layouts = [f"{kind} of another layout" for kind in kinds]
            expected, actual = layouts if kinds[0] == kinds[1] else kinds
            raise TemplateMismatchError(path, expected=expected, actual=actual)
        for own, part in zip(mine.tensors, theirs.tensors, strict=True):
            _check_tensor(own, part, path)
            self._planner.fill(own, part, whole=target)
        return target


def _parts(tensor: torch.Tensor) -> Any:
    """Return what a distributed tensor is made of; None for other tensors."""
    return None if type(tensor) in PLAIN else take_apart(tensor, ())


def _is_meta(target: torch.Tensor) -> bool:
    parts = _parts(target)
    if parts is None:
        return target.is_meta
    return bool(parts.tensors) and all(part.is_meta for part in parts.tensors)


def _same_layout(mine: Any, theirs: Any) -> bool:
    """Compare what two distributed tensors travel as, but for their tensors."""
    if mine.tag != theirs.tag or len(mine.tensors) != len(theirs.tensors):
        return False
    return bool(mine.payload[1:-1] == theirs.payload[1:-1])


def _check_layout(target: torch.Tensor, path: str) -> None:
    """Refuse what is made of other tensors, whose sizes may differ from theirs."""
    if target.layout is not torch.strided:
        remedy = "what it is made of cannot be filled; put None in its place"
        raise UnsupportedLeafError(path, f"{target.layout} tensor", remedy)


def _check_tensor(target: torch.Tensor, value: object, path: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise _mismatch(path, value, target)
    if target.shape != value.shape or target.dtype != value.dtype:
        raise _mismatch(path, value, target)


def _mismatch(path: str, value: object, target: object) -> StateDictError:
    if remedy := remedy_for(target):
        return unsupported(target, path, remedy)
    expected, actual = _words(value), _words(target)
    return TemplateMismatchError(path, expected=expected, actual=actual)


def _words(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"


def _mapped(value: Any, put: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with its tensors replaced; its own containers are changed."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return put(value)
    if kind in DICTS:
        for key in value:
            value[key] = _mapped(value[key], put)
        if kind is OrderedDict:
            _mapped(vars(value), put)
    elif kind is list:
        value[:] = _each(value, put)
    elif kind in (tuple, set, frozenset):
        return kind(_each(value, put))
    elif kind is deque:
        return deque(_each(value, put), value.maxlen)
    elif (inside := opened(value)) is not None:
        return inside.make(_each(inside.children, put))
    return value


def _each(
    values: Iterable[Any], put: Callable[[torch.Tensor], torch.Tensor]
) -> Sequence[Any]:
    return [_mapped(value, put) for value in values]
