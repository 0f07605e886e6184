"""The structure of a state dict as tagged JSON.

None, bool, str, finite float and int below 2**53 are themselves; everything else is
an array ``[tag, ...]``. Types are exact: a subclass is refused unless it is
registered, since what it adds would be lost on the way. The normative table is in
the wire format's reference; ``_ENCODERS`` here and ``_DECODERS`` in `untree` follow it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from aiockpt.errors import LimitExceededError, UnsupportedLeafError
from aiockpt.format.limits import Limits
from aiockpt.format.paths import (
    NAMED_TUPLE,
    Node,
    Path,
    format_path,
    is_unicode,
)
from aiockpt.format.references import renumber, tensor_leaves, tensor_paths
from aiockpt.format.registry import REGISTRY, Registry, register_leaf
from aiockpt.format.scalars import encode_bytes, encode_float, encode_int, encode_str
from aiockpt.format.untree import FACTORIES, decode_tree

__all__ = [
    "BLOB_BYTES",
    "REGISTRY",
    "LeafEncoder",
    "Node",
    "Path",
    "Registry",
    "RowEncoder",
    "decode_tree",
    "encode_tree",
    "format_path",
    "register_leaf",
    "renumber",
    "tensor_leaves",
    "tensor_paths",
]

LeafEncoder: TypeAlias = Callable[[object, Path], Node]
"""Turns a leaf into a node such as ``["tensor", 3]``; None: it cannot."""

RowEncoder: TypeAlias = Callable[
    [Sequence[str], Sequence[object], Path], "list[int] | None"
]
"""Numbers all values of a dict at once; None: not all of them are tensors."""

BLOB_BYTES: Final = 4096
"""Longer bytes are offered to the leaf encoder, which may carry them as a blob."""

# A shorter row is sooner read value by value.
_ROW: Final = 16

_FACTORY_NAMES: Final[dict[type, str]] = {
    factory: name for name, factory in FACTORIES.items()
}


def encode_tree(
    value: object,
    *,
    registry: Registry,
    leaf: LeafEncoder,
    limits: Limits,
    row: RowEncoder | None = None,
) -> Node:
    """Return the node of ``value``.

    ``leaf`` is asked for each value of a type that is neither built in nor
    registered, and for bytes longer than `BLOB_BYTES`; ``row`` before it, for all
    values of a dict whose keys are text.

    Raises:
        UnsupportedLeafError: nothing encodes a value; names its path.
        LimitExceededError: too deep (or containing itself), or too many nodes.
    """
    encoder = _Encoder(registry, leaf, limits, row)
    try:
        return encoder.encode(value, ())
    except RecursionError:
        actual = encoder.depth + 1
        raise LimitExceededError("nesting", limit=actual - 1, actual=actual) from None


class _Encoder:
    __slots__ = ("depth", "leaf", "limits", "nodes", "registry", "row")

    def __init__(
        self,
        registry: Registry,
        leaf: LeafEncoder,
        limits: Limits,
        row: RowEncoder | None,
    ) -> None:
        self.registry = registry
        self.leaf = leaf
        self.row = row
        self.limits = limits
        self.depth = 0
        self.nodes = 1

    def encode(self, value: object, path: Path) -> Node:
        encode = _ENCODERS.get(type(value))
        return self.other(value, path) if encode is None else encode(self, value, path)

    def other(self, value: object, path: Path) -> Node:
        codec = self.registry.by_type(type(value))
        if codec is not None:
            self.descend(path)
            node = self.encode(codec.encode(value), path)
            self.ascend(1)
            tag = NAMED_TUPLE + codec.tag if codec.is_structure else codec.tag
            return ["ext", tag, node]
        node = self.leaf(value, path)
        if node is None:
            kind, remedy = _type_name(value), _remedy(value)
            raise UnsupportedLeafError(format_path(path), kind, remedy)
        return node

    def children(
        self, items: Iterable[tuple[object, object]], path: Path
    ) -> list[Node]:
        self.descend(path)
        encode = self.encode
        nodes = [encode(value, (*path, key)) for key, value in items]
        self.ascend(len(nodes))
        return nodes

    def descend(self, path: Path) -> None:
        self.depth += 1
        limit = self.limits.max_depth
        if self.depth > limit:
            what = f"the nesting of {format_path(path)[:200]}"
            raise LimitExceededError(what, limit=limit, actual=self.depth)

    def ascend(self, nodes: int) -> None:
        self.depth -= 1
        self.nodes += nodes
        if self.nodes > self.limits.max_nodes:
            limit = self.limits.max_nodes
            raise LimitExceededError("the tree", limit=limit, actual=self.nodes)


def _type_name(value: object) -> str:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"


def _itself(_: _Encoder, value: Any, __: Path) -> Node:
    return value  # type: ignore[no-any-return]


def _int(_: _Encoder, value: int, __: Path) -> Node:
    return encode_int(value)


def _float(_: _Encoder, value: float, __: Path) -> Node:
    return encode_float(value)


def _complex(_: _Encoder, value: complex, __: Path) -> Node:
    return ["complex", encode_float(value.real), encode_float(value.imag)]


def _str(_: _Encoder, value: str, __: Path) -> Node:
    return encode_str(value)


def _bytes(encoder: _Encoder, value: bytes, path: Path) -> Node:
    blob = encoder.leaf(value, path) if len(value) > BLOB_BYTES else None
    return encode_bytes(value) if blob is None else blob


def _list(encoder: _Encoder, value: list[object], path: Path) -> Node:
    return ["list", encoder.children(enumerate(value), path)]


def _tuple(encoder: _Encoder, value: tuple[object, ...], path: Path) -> Node:
    return ["tuple", encoder.children(enumerate(value), path)]


def _deque(encoder: _Encoder, value: deque[object], path: Path) -> Node:
    return ["deque", value.maxlen, encoder.children(enumerate(value), path)]


def _set(encoder: _Encoder, value: set[object] | frozenset[object], path: Path) -> Node:
    # Equal sets encode alike, in whatever order they happen to iterate.
    nodes = encoder.children(enumerate(value), path)
    return [type(value).__name__, sorted(nodes, key=msgspec.json.encode)]


def _dict(encoder: _Encoder, value: dict[object, object], path: Path) -> Node:
    keys = _keys(encoder, value, path)
    if (numbers := _row(encoder, keys, value, path)) is not None:
        return ["tensors", keys, numbers]
    values = encoder.children(value.items(), path)
    if keys and _are_tensors(keys, values):
        return ["tensors", keys, [node[1] for node in values]]  # type: ignore[index]
    return ["dict", keys, values]


def _are_tensors(keys: list[Node], values: list[Node]) -> bool:
    return all(type(n) is list and n[0] == "tensor" for n in values) and all(
        type(key) is str for key in keys
    )


def _items(
    encoder: _Encoder, value: dict[object, object], path: Path
) -> tuple[list[Node], list[Node]]:
    keys = _keys(encoder, value, path)
    if (numbers := _row(encoder, keys, value, path)) is not None:
        return keys, [["tensor", number] for number in numbers]
    return keys, encoder.children(value.items(), path)


def _keys(encoder: _Encoder, value: dict[object, object], path: Path) -> list[Node]:
    if set(map(type, value)) == {str} and is_unicode("".join(value)):  # type: ignore[arg-type]
        encoder.nodes += len(value)
        return list(value)  # type: ignore[arg-type]
    return encoder.children(((key, key) for key in value), path)


def _remedy(value: object) -> str:
    """Say what to pass in place of what is no state dict and has one."""
    if not callable(getattr(type(value), "state_dict", None)):
        return ""
    is_module = hasattr(type(value), "forward")
    return "pass module.state_dict()" if is_module else "pass its state_dict()"


def _row(
    encoder: _Encoder, keys: list[Node], value: dict[object, object], path: Path
) -> list[Node] | None:
    """Return the numbers of a dict's values, if all are tensors that can be one row."""
    if encoder.row is None or len(keys) < _ROW or set(map(type, keys)) != {str}:
        return None
    numbers = encoder.row(keys, [*value.values()], path)  # type: ignore[arg-type]
    if numbers is not None:
        encoder.descend(path)
        encoder.ascend(len(numbers))
    return numbers  # type: ignore[return-value]


def _odict(encoder: _Encoder, value: OrderedDict[object, object], path: Path) -> Node:
    attributes: dict[object, object] = dict(vars(value).items())
    if any(hasattr(OrderedDict, str(name)) for name in attributes):
        remedy = "one of its attributes shadows a method; delete it"
        raise UnsupportedLeafError(format_path(path), _type_name(value), remedy)
    node: list[Node] = ["odict", *_items(encoder, value, path)]
    return [*node, _dict(encoder, attributes, path)] if attributes else node


def _defaultdict(
    encoder: _Encoder, value: defaultdict[object, object], path: Path
) -> Node:
    factory: Any = value.default_factory
    name = _FACTORY_NAMES.get(factory)
    if name is None and factory is not None:
        remedy = f"its default_factory is none of {', '.join(FACTORIES)}; use a dict"
        raise UnsupportedLeafError(format_path(path), _type_name(value), remedy)
    return ["defaultdict", name, *_items(encoder, value, path)]


_ENCODERS: Final[dict[type, Callable[[_Encoder, Any, Path], Node]]] = {
    type(None): _itself,
    bool: _itself,
    int: _int,
    float: _float,
    complex: _complex,
    str: _str,
    bytes: _bytes,
    list: _list,
    tuple: _tuple,
    deque: _deque,
    set: _set,
    frozenset: _set,
    dict: _dict,
    OrderedDict: _odict,
    defaultdict: _defaultdict,
}
