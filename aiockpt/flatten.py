"""State dict → tree, entries and the memory that they come from. No I/O, no copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from aiockpt._backings import Backings
from aiockpt._distributed import take_apart
from aiockpt._drafts import Drafts, draft
from aiockpt._gc import collector_paused
from aiockpt._leaves import extension
from aiockpt.errors import AiockptError, StateDictError, UnsupportedLeafError
from aiockpt.wire.layout import Storage, plan_segment
from aiockpt.wire.limits import Limits
from aiockpt.wire.manifest import TensorSpec
from aiockpt.wire.paths import Node, Path, format_path
from aiockpt.wire.references import renumber
from aiockpt.wire.registry import REGISTRY, register_leaf
from aiockpt.wire.tree import encode_tree

if TYPE_CHECKING:
    from typing_extensions import TypeIs

__all__ = ["Description", "Survey", "describe", "register_leaf", "survey"]

_DENSE_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_EMPTY: Node = ["list", []]


@dataclass(frozen=True, slots=True)
class Description:
    """A state dict as data: what the manifest says, and where the bytes are.

    ``storages`` and ``backings`` run in the order of the data segment.
    """

    tree: Node
    storages: Sequence[Storage]
    offsets: Sequence[int]
    segment_bytes: int
    backings: Backings
    views: Sequence[TensorSpec]


@dataclass(frozen=True, slots=True)
class Survey:
    """A state dict as data, its tensors numbered as they come in the tree.

    ``names`` are what the tensors' entries are called, where they have one; ``wholes``
    are its distributed tensors, by the `id` of each of their local tensors.
    """

    tree: Node
    tensors: Sequence[torch.Tensor]
    names: Sequence[str]
    drafts: Drafts
    wholes: Mapping[int, torch.Tensor]


class _Collector:
    """Numbers tensors as the tree codec meets them; one object, one number."""

    def __init__(
        self, limits: Limits, *, allow_pickle: bool, writing: bool, reading: bool
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: dict[str, None] = {}
        self.wholes: dict[int, torch.Tensor] = {}
        self.writing, self._reading = writing, reading
        self._numbers: dict[int, int] = {}
        self._limits = limits
        self._allow_pickle = allow_pickle

    def encode(self, value: object, path: Path = ()) -> Node:
        """Return the tree of a value that is at ``path``."""
        return encode_tree(
            value,
            registry=REGISTRY,
            leaf=partial(self._leaf_below, path) if path else self._leaf,
            limits=self._limits,
        )

    def _leaf_below(self, above: Path, value: object, path: Path) -> Node:
        return self._leaf(value, (*above, *path))

    def _leaf(self, value: object, path: Path) -> Node:
        """Say how a leaf travels; None where it cannot."""
        if _is_dense_tensor(value):
            if self._reading and value.is_meta:
                return _EMPTY
            return ["tensor", self._number(value, path)]
        if (parts := take_apart(value, path)) is not None:
            for tensor in parts.tensors:
                self._number(tensor, path)  # the entry has the name of the whole
                self.wholes[id(tensor)] = parts.whole
            self.wholes.setdefault(id(parts.whole), parts.whole)
            return ["ext", parts.tag, self.encode(parts.payload, path)]
        if self.writing and isinstance(value, torch.Tensor) and value.is_quantized:
            remedy = "it cannot be received into; receive without a template"
            raise UnsupportedLeafError(format_path(path), "quantized tensor", remedy)
        if type(value) is bytes:
            blob = torch.frombuffer(bytearray(value), dtype=torch.uint8)
            return ["blob", self._number(blob, path)]
        odd = extension(value, path, allow_pickle=self._allow_pickle)
        return None if odd is None else ["ext", odd.tag, self.encode(odd.payload, path)]

    def _number(self, tensor: torch.Tensor, path: Path) -> int:
        identity = id(tensor)
        number = self._numbers.get(identity)
        if number is None:
            number = self._numbers[identity] = len(self.tensors)
            self.tensors.append(tensor)
            name = format_path(path) or "tensor"
            if name in self.names or name == "__metadata__":
                name = self._another(name)
            self.names[name] = None
        return number

    def _another(self, name: str) -> str:
        again = 2
        while (unique := f"{name}#{again}") in self.names:
            again += 1
        return unique


def _is_dense_tensor(value: object) -> TypeIs[torch.Tensor]:
    return (
        type(value) in _DENSE_TYPES
        and value.layout is torch.strided  # type: ignore[attr-defined]
        and not value.is_quantized  # type: ignore[attr-defined]
        and not value.is_nested  # type: ignore[attr-defined]
    )


def survey(
    state_dict: object,
    *,
    limits: Limits,
    allow_pickle: bool,
    writing: bool,
    reading: bool = False,
) -> Survey:
    """Look at a state dict without copying a byte of it.

    ``writing`` says that its memory is going to be written: what has no memory to
    write to is refused then. ``reading`` says that it is only looked for what may be
    of use: tensors without memory are left out then, and not refused.

    Raises:
        UnsupportedLeafError: a leaf has no encoding; its path is in ``path``.
        LimitExceededError: too deep or too many nodes; containers with cycles too.
        StateDictError: a tensor or a registered type failed when it was looked at.
    """
    collector = _Collector(
        limits, allow_pickle=allow_pickle, writing=writing, reading=reading
    )
    with _looking():
        tree = collector.encode(state_dict)
        tensors, names = collector.tensors, [*collector.names]
        wholes = collector.wholes
        del collector  # its tables are large, and there is more to come
        drafts = draft(tensors, names, writing=writing)
    return Survey(tree, tensors, names, drafts, wholes)


@contextmanager
def _looking() -> Iterator[None]:
    try:
        with collector_paused():
            yield
    except AiockptError:
        raise
    except Exception as error:
        raise StateDictError(f"cannot describe the state dict: {error}") from error


def describe(
    state_dict: object,
    *,
    limits: Limits,
    allow_pickle: bool = False,
    writing: bool = False,
) -> Description:
    """Describe a state dict as it travels; see `survey`."""
    found = survey(
        state_dict, limits=limits, allow_pickle=allow_pickle, writing=writing
    )
    with _looking():
        return _laid_out(found)


def _laid_out(found: Survey) -> Description:
    drafts, firsts = found.drafts, found.drafts.entries()
    storages = [drafts.storage(number, found.names[number]) for number in firsts]
    order, offsets, segment_bytes = plan_segment(storages)
    firsts = [firsts[index] for index in order]
    views, numbers = _number_tensors(drafts, firsts)
    renumber(found.tree, numbers)
    return Description(
        tree=found.tree,
        storages=[storages[index] for index in order],
        offsets=offsets,
        segment_bytes=segment_bytes,
        backings=drafts.backings.taken(firsts),
        views=views,
    )


def _number_tensors(
    drafts: Drafts, firsts: Sequence[int]
) -> tuple[list[TensorSpec], list[int]]:
    """Number the plain tensors after their entries, and the others behind them."""
    views: list[TensorSpec] = []
    numbers = [0] * len(drafts.codes)
    for entry, first in enumerate(firsts):
        if drafts.codes[first] is not None:
            numbers[first] = entry
            continue
        group, _ = drafts.owners[first]
        for member in group.members:
            spec = group.spec(member, entry)
            if spec is None:
                numbers[member.number] = entry
            else:
                numbers[member.number] = len(firsts) + len(views)
                views.append(spec)
    return views, numbers
