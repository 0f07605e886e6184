"""State dict → tree, entries and the memory that they come from. No I/O, no copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import torch

from aiockpt._backings import Backings
from aiockpt._distributed import take_apart
from aiockpt._drafts import Drafts, draft
from aiockpt._gc import collector_paused
from aiockpt._leaves import extension
from aiockpt.errors import AiockptError, StateDictError, UnsupportedLeafError
from aiockpt.wire.layout import plan_segment
from aiockpt.wire.limits import Limits
from aiockpt.wire.manifest import TensorSpec
from aiockpt.wire.paths import Node, Path, format_path
from aiockpt.wire.references import renumber
from aiockpt.wire.registry import REGISTRY, register_leaf
from aiockpt.wire.storages import Storages
from aiockpt.wire.tree import encode_tree

if TYPE_CHECKING:
    from typing_extensions import TypeIs

__all__ = [
    "Description",
    "Layout",
    "Survey",
    "describe",
    "lay_out",
    "register_leaf",
    "survey",
]

_DENSE_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_LAYOUT: Final = attrgetter("layout")
_IS_QUANTIZED: Final = attrgetter("is_quantized")
_IS_NESTED: Final = attrgetter("is_nested")

# Tensors that C functions look at in a row, with the interpreter lock held.
_SLICE: Final = 2000


@dataclass(frozen=True, slots=True)
class Description:
    """A state dict as data: what the manifest says, and where the bytes are.

    ``storages`` and ``backings`` run in the order of the data segment.
    """

    tree: Node
    storages: Storages
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


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a survey's tensors come in a checkpoint.

    ``firsts`` are the numbers that entries go by in the survey, in the order of the
    data segment, as ``storages`` and ``offsets``; ``numbers`` are the tensors' numbers
    in the manifest, in the order of the survey.
    """

    firsts: Sequence[int]
    storages: Storages
    offsets: Sequence[int]
    segment_bytes: int
    views: Sequence[TensorSpec]
    numbers: Sequence[int]


class _Collector:
    """Numbers tensors as the tree codec meets them; one object, one number."""

    def __init__(self, limits: Limits, *, allow_pickle: bool, writing: bool) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: dict[str, None] = {}
        self.wholes: dict[int, torch.Tensor] = {}
        self.writing = writing
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
            row=None if path else self._row,
        )

    def _leaf_below(self, above: Path, value: object, path: Path) -> Node:
        return self._leaf(value, (*above, *path))

    def _leaf(self, value: object, path: Path) -> Node:
        """Say how a leaf travels; None where it cannot."""
        if _is_dense_tensor(value):
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

    def _row(
        self, keys: Sequence[str], values: Sequence[object], path: Path
    ) -> list[int] | None:
        """Number dense tensors: most state dicts have long rows of them."""
        if not _are_dense_tensors(values):
            return None
        numbers: list[int] = []
        above = f"{format_path(path)}." if path else ""
        for start in range(0, len(keys), _SLICE):
            some, tensors = keys[start : start + _SLICE], values[start : start + _SLICE]
            numbers += self._in_a_row(above, some, tensors) or [
                self._number(tensor, (*path, key))
                for key, tensor in zip(some, tensors, strict=True)
            ]
        return numbers

    def _in_a_row(
        self, above: str, keys: Sequence[str], tensors: Sequence[torch.Tensor]
    ) -> Iterable[int] | None:
        """Number tensors that are new, if their names are plain and new, too."""
        if not (all(keys) and "".join(keys).isascii()):
            return None
        first = len(self.tensors)
        numbers = range(first, first + len(tensors))
        self._numbers.update(zip(map(id, tensors), numbers, strict=True))
        self.names.update(dict.fromkeys([above + key for key in keys]))
        if (
            len(self._numbers) < numbers.stop
            or len(self.names) < numbers.stop
            or "__metadata__" in self.names
        ):
            self._numbers = {id(tensor): n for n, tensor in enumerate(self.tensors)}
            self.names = dict.fromkeys(islice(self.names, first))
            return None
        self.tensors += tensors
        return numbers

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


def _are_dense_tensors(values: Sequence[object]) -> TypeIs[Sequence[torch.Tensor]]:
    """Say whether all are, as `_is_dense_tensor` does of one."""
    if any(REGISTRY.by_type(each) is not None for each in _DENSE_TYPES):
        return False  # they travel as their user says
    for start in range(0, len(values), _SLICE):
        some = values[start : start + _SLICE]
        if (
            not set(map(type, some)) <= _DENSE_TYPES
            or set(map(_LAYOUT, some)) != {torch.strided}
            or any(map(_IS_QUANTIZED, some))
            or any(map(_IS_NESTED, some))
        ):
            return False
    return True


def survey(
    state_dict: object, *, limits: Limits, allow_pickle: bool, writing: bool
) -> Survey:
    """Look at a state dict without copying a byte of it.

    ``writing`` says that its memory is going to be written: what has no memory to
    write to is refused then.

    Raises:
        UnsupportedLeafError: a leaf has no encoding; its path is in ``path``.
        LimitExceededError: too deep or too many nodes; containers with cycles too.
        StateDictError: a tensor or a registered type failed when it was looked at.
    """
    collector = _Collector(limits, allow_pickle=allow_pickle, writing=writing)
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
        layout = lay_out(found)
        renumber(found.tree, layout.numbers)
    return Description(
        tree=found.tree,
        storages=layout.storages,
        offsets=layout.offsets,
        segment_bytes=layout.segment_bytes,
        backings=found.drafts.backings.taken(layout.firsts),
        views=layout.views,
    )


def lay_out(found: Survey) -> Layout:
    """Give every tensor its place; whoever uses the tree renumbers it."""
    drafts, firsts = found.drafts, found.drafts.entries()
    storages = drafts.storages(firsts, found.names)
    order, offsets, segment_bytes = plan_segment(storages)
    if order != range(len(firsts)):
        firsts = [*map(firsts.__getitem__, order)]
    views, numbers = _number_tensors(drafts, firsts)
    taken = storages.taken(order)
    return Layout(firsts, taken, offsets, segment_bytes, views, numbers)


def _number_tensors(
    drafts: Drafts, firsts: Sequence[int]
) -> tuple[Sequence[TensorSpec], Sequence[int]]:
    """Number the plain tensors after their entries, and the others behind them."""
    if isinstance(firsts, range):  # of all tensors: each is an entry, in its order
        return (), firsts
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
