"""Turns a state dict into a tree, entries, and the memory that they come from.

`survey` inspects a state dict. `_Numbering` encodes the tree and numbers the tensors.
`_draft` decides which tensors become entries. `describe` also gives each entry its
offset in the data segment. Nothing here copies a byte or does I/O.

Most tensors are *plain*: contiguous, alone in their memory, unknown to autograd. There
may be 100,000 of them, so none gets an object of its own: each is one line in columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import add, attrgetter, le, mul
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

import torch

from aiockpt.errors import (
    AiockptError,
    StagingError,
    StateDictError,
    UnsupportedLeafError,
)
from aiockpt.format.entries import Entries, lay_out
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import TensorSpec
from aiockpt.format.paths import Node, Path, format_path
from aiockpt.format.references import renumber
from aiockpt.format.registry import REGISTRY, Registry, register_leaf
from aiockpt.format.tree import Refusals, encode_tree
from aiockpt.memory.copies import Backings, Part
from aiockpt.memory.device import PortFor, port_for, settle
from aiockpt.memory.held import TENSORS_PER_CALL, HeldMemory
from aiockpt.runtime.system import collector_paused, is_programs
from aiockpt.state.distributed import KnownLayouts, take_apart
from aiockpt.state.leaves import DTYPE_NAMES, extension
from aiockpt.state.nodes import Opened, is_known, opened
from aiockpt.state.overlaps import (
    CODES,
    Group,
    OverlapMember,
    group_members,
    overlapping,
    span,
)
from aiockpt.state.sharding import Layout, ShardedLayout, encode_layout

if TYPE_CHECKING:
    from typing_extensions import TypeIs

__all__ = ["register_leaf"]  # users find it here, with torch's types registered

T = TypeVar("T")

_DENSE_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_UNFLAGGED: Final = frozenset({torch.Tensor})
_ITEMSIZES: Final = {code: dtype.itemsize for dtype, code in CODES.items() if code}
NO_MEMORY: Final = (
    "it has no memory to receive into; give it some by module.to_empty(device=...), or "
    "receive without into= and pass the result to load_state_dict(state, assign=True)"
)
_EMPTY: Final[Node] = ["list", []]
_NO_LEAVES: Final = Registry()

ODD: Final = "?"
"""The tag of a template's value that has no encoding; no leaf has this tag."""

_LAYOUT: Final = attrgetter("layout")
_IS_NESTED: Final = attrgetter("is_nested")
_DTYPE: Final = attrgetter("dtype")
_NBYTES: Final = attrgetter("nbytes")
_SHAPE: Final = attrgetter("shape")
_REQUIRES_GRAD: Final = attrgetter("requires_grad")

_Columns: TypeAlias = "tuple[list[str | None], list[tuple[int, ...]], array[int]]"


@dataclass(frozen=True, slots=True)
class Description:
    """A state dict as data: what the manifest contains, and where the bytes are.

    ``entries`` and ``backings`` are in the order of the data segment. ``strangers``
    are the tags of structures that not every process knows, with a path of each.
    """

    tree: Node
    entries: Entries
    backings: Backings
    views: Sequence[TensorSpec]
    strangers: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class Unready:
    """Stands for a state dict whose computation failed; receivers get the error."""

    error: Exception


def ready_for_threads(state_dict: T, ports: PortFor = port_for) -> T | Unready:
    """Wait for the device work that computes a state dict; return the state dict.

    Copies in another thread wait only for that thread's current stream. So the caller
    waits here, in its own thread, before it hands a state dict to another thread. If
    the device work has failed, this returns `Unready`, and the staging raises the
    error, so that waiting receivers are told.
    """
    try:
        settle(ports)
    except Exception as error:  # noqa: BLE001 - see above
        return Unready(error)
    return state_dict


@dataclass(frozen=True, slots=True)
class Drafts:
    """The entry that each tensor becomes, by the tensor's number.

    A plain tensor is an entry. Each other tensor is a member of a group, and the group
    is an entry, with the number of its first member.

    Attributes:
        codes: The safetensors code of each plain tensor; None for the others.
        shapes: The shapes; tensors of the same shape share one tuple.
        backings: The memory of plain tensors and groups; other rows are unused.
        owners: For each other tensor, its group and the tensor as a member of it.
        held: The memory of all tensors.
    """

    codes: Sequence[str | None]
    shapes: Sequence[tuple[int, ...]]
    backings: Backings
    owners: Mapping[int, tuple[Group, OverlapMember]]
    held: HeldMemory

    def placed(self, names: Sequence[str]) -> tuple[Sequence[int], Entries]:
        """Give each entry its offset in the data segment.

        Args:
            names: The name of each tensor's entry, by the tensor's number.

        Returns:
            The numbers of the entries and their columns, in the order of the segment.
        """
        if not self.owners:
            codes = cast("Sequence[str]", self.codes)
            aligns = [*map(_ITEMSIZES.__getitem__, codes)]
            return lay_out(names, codes, self.shapes, self.backings.sizes, aligns)
        numbers = [
            number
            for number, code in enumerate(self.codes)
            if code is not None or self.owners[number][0].first == number
        ]
        rows = (self._row(number, names) for number in numbers)
        order, entries = lay_out(*zip(*rows, strict=True))
        return [*map(numbers.__getitem__, order)], entries

    def _row(
        self, number: int, names: Sequence[str]
    ) -> tuple[str, str, tuple[int, ...], int, int]:
        """Return the name, code, shape, bytes and alignment of an entry."""
        code = self.codes[number]
        if code is None:
            group, _ = self.owners[number]
            return group.name, group.code, group.shape, group.nbytes, group.align
        size, align = self.backings.sizes[number], _ITEMSIZES[code]
        return names[number], code, self.shapes[number], size, align


@dataclass(frozen=True, slots=True)
class Survey:
    """A state dict as data, its tensors numbered in the order of the tree.

    Attributes:
        tree: The tree, which refers to tensors by number.
        tensors: The tensors, by number.
        names: The name of each tensor's entry, if it has one.
        drafts: The entry that each tensor becomes.
        wholes: The distributed tensors, by the `id` of each of their local tensors.
        strangers: See `Description`.
    """

    tree: Node
    tensors: Sequence[torch.Tensor]
    names: Sequence[str]
    drafts: Drafts
    wholes: Mapping[int, torch.Tensor]
    strangers: Mapping[str, Path]

    def described(self) -> tuple[Description, Sequence[int]]:
        """Return the state dict as its manifest will describe it; call it once.

        Returns:
            The description, and the number that each tensor has in it.
        """
        with _blaming_the_state_dict():
            firsts, entries = self.drafts.placed(self.names)
            views, numbers = _number_tensors(self.drafts, firsts)
            renumber(self.tree, numbers)
            backings = self.drafts.backings.taken(firsts)
        found = Description(self.tree, entries, backings, views, self.strangers)
        return found, numbers


@dataclass(frozen=True, slots=True)
class Wanted:
    """A template as data. It may have values and tensors that no checkpoint can hold.

    Attributes:
        tree: The tree. A registered leaf has no payload, unless it is a key, or a dict
            or list, whose items are its payload. A value without an encoding is
            ``["ext", ODD, index]``.
        tensors: The tensors, by number: those without memory, too.
        codes: The safetensors code of each plain tensor; None for the others.
        shapes: The shapes; tensors of the same shape share one tuple.
        sizes: The bytes from the first element of each tensor to the end of the last.
        held: The memory of all tensors.
        wholes: The distributed tensors, by the `id` of each of their local tensors.
        odd: The values without an encoding, by index.
        plain: The node of a plain dict or list with the same items, by the `id` of the
            node of a pytree node that is a dict or list, too.
    """

    tree: Node
    tensors: Sequence[torch.Tensor]
    codes: Sequence[str | None]
    shapes: Sequence[tuple[int, ...]]
    sizes: array[int]
    held: HeldMemory
    wholes: Mapping[int, torch.Tensor]
    odd: Sequence[object]
    plain: Mapping[int, Node] = field(default_factory=dict)


def wanted(template: object, *, limits: Limits) -> Wanted:
    """Describe a template: what could be filled, whatever is going to be.

    Raises:
        LimitExceededError: too deep or too many nodes, also because of a cycle.
        StateDictError: reading a tensor or a registered type failed.
    """
    odd: list[object] = []
    numbering = _Numbering(
        limits, allow_pickle=False, reading=False, odd=odd, is_template=True
    )
    with _blaming_the_state_dict():
        tree = numbering.encode(template)
        tensors, wholes, plain = numbering.tensors, numbering.wholes, numbering.plain
        del numbering
        held = HeldMemory.of(tensors)
        codes, shapes, sizes = _columns_of(held, flags=False)
        for number, code in enumerate(codes):
            if code is None:
                sizes[number] = 0 if tensors[number].is_meta else span(tensors[number])
        for number in overlapping(held.addresses, sizes):
            codes[number] = None
    return Wanted(tree, tensors, codes, shapes, sizes, held, wholes, odd, plain)


def survey(
    state_dict: object,
    *,
    limits: Limits,
    allow_pickle: bool,
    writing: bool,
    reading: bool = False,
    odd: list[object] | None = None,
) -> Survey:
    """Describe a state dict and its tensors without copying a byte of it.

    Args:
        state_dict: The state dict.
        limits: Nesting and counts that are accepted.
        allow_pickle: Whether leaves without another encoding travel as pickles.
        writing: Whether its memory will be written. Tensors that share elements in a
            way that a checkpoint cannot keep are then refused.
        reading: Whether the caller only looks for bytes to reuse. Tensors without
            memory are then left out instead of refused.
        odd: Gets the values without an encoding, which are refused otherwise. Their
            nodes are ``["ext", ODD, index]``.

    Raises:
        UnsupportedLeafError: leaves have no encoding; up to ten are named.
        LimitExceededError: too deep or too many nodes, also because of a cycle.
        StateDictError: reading a tensor or a registered type failed.
    """
    numbering = _Numbering(limits, allow_pickle=allow_pickle, reading=reading, odd=odd)
    refused = Refusals()
    with _blaming_the_state_dict():
        tree: Node = None
        try:
            tree = numbering.encode(state_dict)
        except UnsupportedLeafError as error:
            refused.add(error)  # tensors without memory are named beside these
        tensors, names = numbering.tensors, [*numbering.names]
        wholes, strangers = numbering.wholes, numbering.strangers
        del numbering  # its tables are large, and drafting needs memory
        drafts = _draft(tensors, names, writing=writing, refused=refused)
    return Survey(tree, tensors, names, drafts, wholes, strangers)


@contextmanager
def _blaming_the_state_dict() -> Iterator[None]:
    """Blame the state dict for errors of torch, and of registered types."""
    try:
        with collector_paused():
            yield
    except AiockptError:
        raise
    except Exception as error:
        if is_programs(error):
            raise
        raise StateDictError(f"cannot describe the state dict: {error}") from error


def describe(
    state_dict: object,
    *,
    limits: Limits,
    allow_pickle: bool = False,
    writing: bool = False,
) -> Description:
    """Describe a state dict as a manifest will; see `survey` for arguments and errors.

    Raises:
        StagingError: the state dict is `Unready`.
    """
    if isinstance(state_dict, Unready):
        why = f"the caller's stream failed: {state_dict.error}"
        raise StagingError(why) from state_dict.error
    found = survey(
        state_dict, limits=limits, allow_pickle=allow_pickle, writing=writing
    )
    description, _ = found.described()
    return description


def _number_tensors(
    drafts: Drafts, firsts: Sequence[int]
) -> tuple[Sequence[TensorSpec], Sequence[int]]:
    """Number plain tensors as their entries, and the other tensors after them."""
    if isinstance(firsts, range):  # each tensor is an entry, in this order
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


# ------------------------------------------------------------ the tree, in numbers


class _Numbering:
    """Numbers tensors in the order of the tree codec; one object, one number.

    With ``reading``, a tensor without memory is left out. ``odd`` gets the values that
    have no encoding, which are refused otherwise. No leaf of a template is encoded.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        allow_pickle: bool,
        reading: bool,
        odd: list[object] | None = None,
        is_template: bool = False,
    ) -> None:
        self.plain: dict[int, Node] = {}
        self.tensors: list[torch.Tensor] = []
        self._known: KnownLayouts = {}
        # By the `id` of a layout: the layout, and the nodes of its attributes.
        self._layouts: dict[int, tuple[Layout, list[Node]]] = {}
        self.names: dict[str, None] = {}
        self.wholes: dict[int, torch.Tensor] = {}
        self.strangers: dict[str, Path] = {}
        self._reading = reading
        self._odd, self._is_template = odd, is_template
        self._numbers: dict[int, int] = {}
        self._limits = limits
        self._allow_pickle = allow_pickle

    def encode(self, value: object, path: Path = ()) -> Node:
        """Return the tree of a value at ``path``."""
        return encode_tree(
            value,
            registry=_NO_LEAVES if self._is_template else REGISTRY,
            leaf=self._wanted_leaf if self._is_template else self._leaf,
            limits=self._limits,
            row=self._row,
            path=path,
        )

    def _leaf(self, value: object, path: Path) -> Node:
        """Return the node of a leaf; None if it is refused."""
        if self._odd is None:
            return self._encoded(value, path)
        with suppress(UnsupportedLeafError):
            is_meta = isinstance(value, torch.Tensor) and value.is_meta
            node = None if is_meta else self._encoded(value, path)
            if node is not None:
                return node
        return self._odd_one(value)

    def _odd_one(self, value: object) -> Node:
        """Return the node of a value that has no encoding."""
        assert self._odd is not None
        self._odd.append(value)
        return ["ext", ODD, len(self._odd) - 1]

    def _encoded(self, value: object, path: Path) -> Node:
        """Return the node of a leaf; None if it has no encoding."""
        if _is_dense_tensor(value):
            if self._reading and value.is_meta:
                return _EMPTY
            return ["tensor", self._number(value, path)]
        if isinstance(value, torch.Tensor):
            node = self._distributed(value, path)
            if node is not None:
                return node
        if (inside := opened(value)) is not None:
            if inside.tag not in self.strangers and not is_known(value, inside.tag):
                self.strangers[inside.tag] = path
            return ["ext", inside.tag, self.encode(inside.payload, path)]
        if type(value) is bytes:
            blob = torch.frombuffer(bytearray(value), dtype=torch.uint8)
            return ["blob", self._number(blob, path)]
        odd = extension(value, path, allow_pickle=self._allow_pickle)
        return None if odd is None else ["ext", odd.tag, self.encode(odd.payload, path)]

    def _distributed(self, value: torch.Tensor, path: Path) -> Node:
        """Return the node of a distributed tensor; None for any other tensor."""
        if (parts := take_apart(value, path, self._known)) is None:
            return None
        layout, local = parts.layout, list[Node]()
        for tensor in parts.tensors:
            # Each is named like the distributed tensor.
            local.append(["tensor", self._number(tensor, path)])
            self.wholes[id(tensor)] = value
        self.wholes.setdefault(id(value), value)
        if id(layout) not in self._layouts:
            node: Any = self.encode(encode_layout(layout), path)
            self._layouts[id(layout)] = layout, node[1]
        _, rest = self._layouts[id(layout)]
        is_sharded = isinstance(layout, ShardedLayout)
        held: Node = ["tuple", local] if is_sharded else local[0]
        return ["ext", layout.tag, ["tuple", [held, *rest]]]

    def _wanted_leaf(self, value: object, path: Path) -> Node:
        """Return the node of a leaf of a template, whatever it is."""
        assert self._odd is not None
        codec, node = REGISTRY.by_type(type(value)), None
        if codec is None and _is_dense_tensor(value):  # most are
            return ["tensor", self._number(value, path)]
        with suppress(UnsupportedLeafError):
            if _is_key(value, path):  # keys are compared, so they are whole
                node = self._key(value, path)
            elif codec is not None and not codec.is_structure:
                payload = None
                if isinstance(value, dict | list):  # a checkpoint may have a plain one
                    payload = self.encode(_plain_copy(value), path)
                node = ["ext", codec.tag, payload]
            elif (inside := opened(value)) is not None:
                node = ["ext", inside.tag, self.encode(inside.payload, path)]
                self._note_plain(value, inside, node, path)
            elif isinstance(value, torch.Tensor):
                node = self._distributed(value, path)
                is_dense = node is None and value.layout is torch.strided
                if is_dense and not value.is_nested:
                    node = ["tensor", self._number(value, path)]
            elif type(value) is bytes:
                node = ["bytes", ""]
            elif isinstance(value, dict | list):  # a subclass
                node = self.encode(_plain_copy(value), path)
            elif (found := extension(value, path, allow_pickle=False)) is not None:
                is_scalar = found.tag == "numpy.scalar"  # its dtype says what fits
                payload = self.encode(found.payload, path) if is_scalar else None
                node = ["ext", found.tag, payload]
        return self._odd_one(value) if node is None else node

    def _key(self, value: object, path: Path) -> Node:
        """Return the node of a key, as the sender of a checkpoint encodes it."""
        sender = _Numbering(self._limits, allow_pickle=False, reading=False)
        node = sender.encode(value, path)
        return None if sender.tensors else node  # their numbers are others there

    def _note_plain(
        self, value: object, inside: Opened, node: list[Node], path: Path
    ) -> None:
        """Note the items of a pytree node that is a dict or list, too."""
        match node, value:
            case [_, _, ["tuple", [["list", [*nodes]], _]]], dict() | list():
                of_child = dict(zip(map(id, inside.children), nodes, strict=True))
            case _:
                return
        items = [*value.values()] if isinstance(value, dict) else value
        if of_child.keys() >= {*map(id, items)}:
            own = [of_child[id(each)] for each in items]
            self.plain[id(node)] = ["list", own]
            if isinstance(value, dict):
                keys: Any = self.encode(dict.fromkeys(value), path)
                self.plain[id(node)] = ["dict", keys[1], own]

    def _row(
        self, keys: Sequence[str], values: Sequence[object], path: Path
    ) -> list[int] | None:
        """Number a sequence of dense tensors; most state dicts have long ones."""
        if not _are_dense_tensors(values):
            return None
        is_skipped = self._reading or not (self._odd is None or self._is_template)
        if is_skipped and any(tensor.is_meta for tensor in values):
            return None
        numbers: list[int] = []
        above = f"{format_path(path)}." if path else ""
        for start in range(0, len(keys), TENSORS_PER_CALL):
            some, tensors = (
                keys[start : start + TENSORS_PER_CALL],
                values[start : start + TENSORS_PER_CALL],
            )
            numbers += self._in_a_row(above, some, tensors) or [
                self._number(tensor, (*path, key))
                for key, tensor in zip(some, tensors, strict=True)
            ]
        return numbers

    def _in_a_row(
        self, above: str, keys: Sequence[str], tensors: Sequence[torch.Tensor]
    ) -> Iterable[int] | None:
        """Number tensors if all of them and all of their names are new and plain."""
        if not (all(keys) and "".join(keys).isascii()):
            return None
        first = len(self.tensors)
        numbers = range(first, first + len(tensors))
        new = dict(zip(map(id, tensors), numbers, strict=True))
        names = dict.fromkeys([above + key for key in keys])
        if (
            not len(new) == len(names) == len(tensors)
            or "__metadata__" in names
            or not self._numbers.keys().isdisjoint(new)
            or not self.names.keys().isdisjoint(names)
        ):
            return None
        self._numbers.update(new)
        self.names.update(names)
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


def _plain_copy(value: dict[Any, Any] | list[Any]) -> object:
    """Return a plain dict or list with the items of one of another type."""
    return {**value} if isinstance(value, dict) else [*value]


def _is_key(value: object, path: Path) -> bool:
    """Say whether a value is a key at the end of a path, or inside of such a key."""
    for start, key in enumerate(path):
        inside: Any = key
        for at in path[start + 1 :]:
            items = [*inside] if isinstance(inside, tuple | frozenset) else ()
            inside = items[at] if isinstance(at, int) and at < len(items) else None
        if inside is value:
            return True
    return False


def _is_dense_tensor(value: object) -> TypeIs[torch.Tensor]:
    return (
        type(value) in _DENSE_TYPES
        and value.layout is torch.strided  # type: ignore[attr-defined]
        and value.dtype in DTYPE_NAMES  # type: ignore[attr-defined]
        and not value.is_nested  # type: ignore[attr-defined]
    )


def _are_dense_tensors(values: Sequence[object]) -> TypeIs[Sequence[torch.Tensor]]:
    """Say whether `_is_dense_tensor` holds for all values."""
    if any(REGISTRY.by_type(each) is not None for each in _DENSE_TYPES):
        return False  # a user has registered the type
    for start in range(0, len(values), TENSORS_PER_CALL):
        some = values[start : start + TENSORS_PER_CALL]
        if (
            not set(map(type, some)) <= _DENSE_TYPES
            or set(map(_LAYOUT, some)) != {torch.strided}
            or not DTYPE_NAMES.keys() >= set(map(_DTYPE, some))
            or any(map(_IS_NESTED, some))
        ):
            return False
    return True


# ----------------------------------------------------------- tensors become entries


def _draft(
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
    *,
    writing: bool,
    refused: Refusals,
) -> Drafts:
    """Decide which tensors are entries; ``writing``: their memory will be written.

    Raises:
        UnsupportedLeafError: leaves were refused, or have no memory; or one cannot be
            written, since one of its elements belongs to another entry too.
    """
    held = HeldMemory.of(tensors)
    codes, shapes, sizes = _columns_of(held)
    members: dict[int, OverlapMember] = {}
    for number, code in enumerate(codes):
        if code is None:
            try:
                if writing and tensors[number].is_meta:
                    raise UnsupportedLeafError(names[number], "meta tensor", NO_MEMORY)
                member = OverlapMember(tensors[number], names[number], number)
            except UnsupportedLeafError as error:
                refused.add(error)
                continue
            members[number], sizes[number] = member, member.stop - member.start
    refused.raise_if_any()
    for number in overlapping(held.addresses, sizes) - members.keys():
        members[number] = OverlapMember(tensors[number], names[number], number)
        codes[number] = None
    groups = group_members(members.values(), writing=writing)
    return Drafts(
        codes,
        shapes,
        _backings(held, sizes, groups),
        {
            member.number: (group, member)
            for group in groups
            for member in group.members
        },
        held,
    )


def _columns_of(held: HeldMemory, *, flags: bool = True) -> _Columns:
    """Return the codes, shapes and sizes; equal shapes share one tuple.

    Without ``flags``, parameters and tensors that require gradients count as plain.
    """
    codes: list[str | None] = []
    shapes: list[tuple[int, ...]] = []
    sizes = array("Q")
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    for first in range(0, len(held.tensors), TENSORS_PER_CALL):
        near = slice(first, first + TENSORS_PER_CALL)
        some = held.tensors[near]
        sizes.extend(map(_NBYTES, some))
        own = [*map(tuple, map(_SHAPE, some))]
        shapes += map(known.setdefault, own, own)
        memory = held.addresses[near], sizes[near], held.storage_sizes[near]
        codes += _plain_codes(some, *memory, flags=flags)
    return codes, shapes, sizes


def _plain_codes(
    tensors: Sequence[torch.Tensor],
    addresses: Sequence[int],
    sizes: Sequence[int],
    storage_sizes: Sequence[int],
    *,
    flags: bool,
) -> list[str | None]:
    """Return the code of each plain tensor; None for each other one."""
    codes = [*map(CODES.get, map(_DTYPE, tensors))]
    if _all_are_plain(tensors, codes, addresses, sizes, storage_sizes, flags=flags):
        return codes
    plain = partial(_plain_code, flags=flags)
    return [*map(plain, tensors, addresses, sizes, storage_sizes)]


def _all_are_plain(
    tensors: Sequence[torch.Tensor],
    codes: Sequence[str | None],
    addresses: Sequence[int],
    sizes: Sequence[int],
    storage_sizes: Sequence[int],
    *,
    flags: bool,
) -> bool:
    """Say whether all tensors are plain, faster than `_plain_code` one by one."""
    kinds = {*codes}
    if (
        None in kinds
        or not all(addresses)
        or not {*map(type, tensors)} <= (_UNFLAGGED if flags else _DENSE_TYPES)
        or (flags and any(map(_REQUIRES_GRAD, tensors)))
        or any(map(torch.Tensor.is_neg, tensors))
        or ("C64" in kinds and any(map(torch.Tensor.is_conj, tensors)))
        or not all(map(torch.Tensor.is_contiguous, tensors))
    ):
        return False
    widths = map(_ITEMSIZES.__getitem__, codes)  # type: ignore[arg-type]
    offsets = map(mul, map(torch.Tensor.storage_offset, tensors), widths)
    return all(map(le, map(add, offsets, sizes), storage_sizes))


def _plain_code(
    tensor: torch.Tensor, address: int, nbytes: int, storage_bytes: int, *, flags: bool
) -> str | None:
    """Return the code of a tensor that is plain unless others overlap it, or None."""
    code = CODES.get(tensor.dtype)
    if (
        code is None
        or not address
        or type(tensor) not in (_UNFLAGGED if flags else _DENSE_TYPES)
        or (flags and tensor.requires_grad)
        or tensor.is_neg()
        or (code == "C64" and tensor.is_conj())
        or not tensor.is_contiguous()
    ):
        return None
    stop = tensor.storage_offset() * _ITEMSIZES[code] + nbytes
    return code if stop <= storage_bytes else None


def _backings(held: HeldMemory, sizes: array[int], groups: Sequence[Group]) -> Backings:
    """Return the backings of plain tensors and groups, in one table."""
    addresses, order = held.addresses, list[int]()
    if groups:
        addresses, order = addresses[:], [*range(len(sizes))]
    parts: dict[int, tuple[Part, ...]] = {}
    inner: dict[int, HeldMemory] = {}
    for group in groups:
        own, first = group.backing(), group.first
        numbers = {id(member.tensor): member.number for member in group.members}
        order[first] = numbers[id(own.tensor)]
        addresses[first], sizes[first] = own.address, own.nbytes
        if own.parts:
            parts[first] = own.parts
            inner[first] = held.taken([numbers[id(each.tensor)] for each in own.parts])
    if groups:
        held = held.taken(order)
    return Backings(held, addresses, sizes, parts, inner)
