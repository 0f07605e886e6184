"""Decode a tree that a peer sent: nothing is imported, only registered decoders run."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NoReturn, TypeAlias

from aiockpt.errors import AiockptError, LimitExceededError, RemoteProtocolError
from aiockpt.format.limits import CalledOffError, Limits, look
from aiockpt.format.paths import Node, format_received, format_refusal
from aiockpt.format.registry import Registry
from aiockpt.format.scalars import parse_bytes, parse_float, parse_int, parse_str

__all__ = ["FACTORIES", "decode_tree"]

FACTORIES: Final[dict[str, type]] = {  # of the defaultdicts that travel, by name
    each.__name__: each for each in (list, dict, int, float, set, str, bool, tuple)
}

_SCALARS: Final = frozenset({type(None), bool, int, float, str})
_FEW: Final = 16
_MOST_COLLISIONS: Final = 1000  # of all dicts of one tree


def decode_tree(
    node: Node,
    *,
    registry: Registry,
    tensors: Sequence[object],
    limits: Limits,
    blob: Callable[[int], bytes] | None = None,
) -> object:
    """Return the value of an untrusted ``node``; the inverse of `encode_tree`.

    ``tensors`` are what ``["tensor", i]`` stands for; ``blob``, called once per index
    at most, returns the bytes that tensor i carries (default: ``bytes(tensors[i])``).

    Raises:
        RemoteProtocolError: malformed, or an unregistered type; names the path.
        LimitExceededError: too deep, or too many nodes.
    """
    decoder = _Decoder(registry, tensors, limits, blob)
    try:
        return decoder.decode(node)
    except RecursionError:
        actual = decoder.depth + 1
        raise LimitExceededError("nesting", limit=actual - 1, actual=actual) from None


class _Decoder:
    __slots__ = (
        "blob",
        "blobs",
        "collisions",
        "depth",
        "limits",
        "nodes",
        "path",
        "registry",
        "tensors",
    )

    def __init__(
        self,
        registry: Registry,
        tensors: Sequence[Any],
        limits: Limits,
        blob: Callable[[int], bytes] | None,
    ) -> None:
        self.registry = registry
        self.tensors = tensors
        self.limits = limits
        self.blob = blob or (lambda index: bytes(tensors[index]))
        self.blobs: dict[int, bytes] = {}
        self.path: list[object] = []
        self.depth = 0
        self.nodes = 1
        self.collisions = 0

    def fail(self, why: str) -> NoReturn:
        path = format_received(self.path)
        raise RemoteProtocolError(f"malformed tree at {path}: {why}")

    def decode(self, node: Node) -> Any:
        if type(node) in _SCALARS:
            return node
        tag, *arguments = node if type(node) is list and node else (None,)
        if type(tag) is not str:
            self.fail("no node")
        decode, kinds = _DECODERS.get((tag, len(arguments)), (None, ()))
        if decode is None or not _fit(arguments, kinds):
            self.fail(f"no node {tag[:40]!r} with {len(arguments)} such arguments")
        return decode(self, *arguments)

    def children(self, nodes: list[Node], keys: Iterable[object]) -> list[Any]:
        self.descend(len(nodes))
        path, decode, values = self.path, self.decode, []
        path.append(None)
        for key, node in zip(keys, nodes, strict=False):
            path[-1] = key
            values.append(node if type(node) in _SCALARS else decode(node))
        path.pop()
        self.depth -= 1
        return values

    def descend(self, nodes: int) -> None:
        look()
        self.depth += 1
        self.nodes += nodes
        limits = self.limits
        for what, limit, actual in (
            ("the nesting of the tree", limits.max_depth, self.depth),
            ("the number of nodes in the tree", limits.max_nodes, self.nodes),
        ):
            if actual > limit:
                raise LimitExceededError(what, limit=limit, actual=actual)

    def items(self, nodes: list[Node]) -> list[Any]:
        return self.children(nodes, range(len(nodes)))

    def tensor(self, index: int) -> Any:
        if not 0 <= index < len(self.tensors):
            self.fail(f"tensor {index} of {len(self.tensors)}")
        return self.tensors[index]


_Kinds: TypeAlias = tuple[tuple[type, ...], ...]


def _fit(arguments: list[Node], kinds: _Kinds) -> bool:
    pairs = zip(arguments, kinds, strict=True)
    return all(type(argument) in kind for argument, kind in pairs)


def _parsed(parse: Callable[[str], Any]) -> Callable[[_Decoder, str], Any]:
    def decode(decoder: _Decoder, text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            decoder.fail(str(error))

    return decode


def _complex(decoder: _Decoder, real: Node, imag: Node) -> complex:
    parts = [decoder.decode(real), decoder.decode(imag)]
    if set(map(type, parts)) != {float}:
        decoder.fail("odd complex")
    return complex(*parts)


def _list(decoder: _Decoder, nodes: list[Node]) -> list[Any]:
    return decoder.items(nodes)


def _tuple(decoder: _Decoder, nodes: list[Node]) -> tuple[Any, ...]:
    return tuple(decoder.items(nodes))


def _set(decoder: _Decoder, nodes: list[Node]) -> set[Any]:
    values = decoder.items(nodes)
    return set(_index(decoder, values, values))


def _frozenset(decoder: _Decoder, nodes: list[Node]) -> frozenset[Any]:
    return frozenset(_set(decoder, nodes))


def _deque(decoder: _Decoder, maxlen: int | None, nodes: list[Node]) -> deque[Any]:
    if maxlen is not None and not len(nodes) <= maxlen <= sys.maxsize:
        decoder.fail(f"a deque of {len(nodes)} items with maxlen {maxlen}")
    return deque(decoder.items(nodes), maxlen)


def _dict(decoder: _Decoder, keys: list[Node], values: list[Node]) -> dict[Any, Any]:
    if len(keys) != len(values):
        decoder.fail(f"{len(keys)} keys with {len(values)} values")
    names = decoder.items(keys)
    return _index(decoder, names, decoder.children(values, names))


def _index(decoder: _Decoder, keys: list[Any], values: list[Any]) -> dict[Any, Any]:
    try:
        if len(keys) > _FEW and set(map(type, keys)) != {str}:
            _refuse_collisions(decoder, keys)
        table = dict(zip(keys, values, strict=True))
    except TypeError as error:
        decoder.fail(str(error))
    if len(table) != len(keys):
        decoder.fail("duplicate keys")
    return table


def _refuse_collisions(decoder: _Decoder, keys: list[Any]) -> None:
    # Keys that hash alike make a table quadratic. Only the hash of str is salted.
    decoder.collisions += len(keys) - len(set(map(hash, keys)))
    if decoder.collisions > _MOST_COLLISIONS:
        decoder.fail("too many keys have the same hash")


def _odict(
    decoder: _Decoder, keys: list[Node], values: list[Node]
) -> OrderedDict[Any, Any]:
    return OrderedDict(_dict(decoder, keys, values))


def _attributed(
    decoder: _Decoder, keys: list[Node], values: list[Node], attributes: list[Node]
) -> OrderedDict[Any, Any]:
    ordered = _odict(decoder, keys, values)
    (names,) = decoder.items([attributes])
    # An attribute must not take the place of a method: the user would call it.
    if type(names) is not dict or any(
        type(name) is not str or hasattr(OrderedDict, name) for name in names
    ):
        decoder.fail("odd attributes of an OrderedDict")
    vars(ordered).update(names)
    return ordered


def _defaultdict(
    decoder: _Decoder, factory: str | None, keys: list[Node], values: list[Node]
) -> defaultdict[Any, Any]:
    if factory is not None and factory not in FACTORIES:
        decoder.fail(f"unknown default factory {factory[:40]!r}")
    make = None if factory is None else FACTORIES[factory]
    return defaultdict(make, _dict(decoder, keys, values))


def _tensor(decoder: _Decoder, index: int) -> Any:
    return decoder.tensor(index)


def _tensors(
    decoder: _Decoder, keys: list[Node], indices: list[Node]
) -> dict[Any, Any]:
    if set(map(type, keys)) != {str} or set(map(type, indices)) != {int}:
        decoder.fail("odd names or indices of tensors")
    decoder.descend(len(indices))
    decoder.depth -= 1
    decoder.tensor(min(indices))  # type: ignore[type-var, arg-type]
    decoder.tensor(max(indices))  # type: ignore[type-var, arg-type]
    values = [*map(decoder.tensors.__getitem__, indices)]  # type: ignore[arg-type]
    if len(keys) != len(values):
        decoder.fail(f"{len(keys)} names with {len(values)} tensors")
    return _index(decoder, keys, values)


def _blob(decoder: _Decoder, index: int) -> bytes:
    decoder.tensor(index)
    # Once per index: a tree that repeats one must not multiply its memory.
    if index not in decoder.blobs:
        decoder.blobs[index] = decoder.blob(index)
    return decoder.blobs[index]


def _ext(decoder: _Decoder, tag: str, node: Node) -> object:
    codec = decoder.registry.by_tag(tag)
    if codec is None:
        decoder.fail(
            f"a leaf of the unknown type {tag[:200]!r}; "
            "call aiockpt.register_leaf for this type here too, or receive a named "
            "tuple or a pytree node into a template that has one"
        )
    decoder.descend(1)
    value = decoder.decode(node)
    decoder.depth -= 1
    try:
        return codec.decode(value)
    except (AiockptError, CalledOffError):
        raise
    except Exception as error:
        path = format_received(decoder.path)
        why = f"the decoder of {tag!r} refused {path}: {format_refusal(error)}"
        raise RemoteProtocolError(why) from error


_TEXT, _NUMBER, _ARRAY = (str,), (int,), (list,)

_FORMS: Final[tuple[tuple[Any, ...], ...]] = (
    ("int", _parsed(parse_int), _TEXT),
    ("float", _parsed(parse_float), _TEXT),
    ("complex", _complex, (float, list), (float, list)),
    ("str", _parsed(parse_str), _TEXT),
    ("bytes", _parsed(parse_bytes), _TEXT),
    ("list", _list, _ARRAY),
    ("tuple", _tuple, _ARRAY),
    ("set", _set, _ARRAY),
    ("frozenset", _frozenset, _ARRAY),
    ("deque", _deque, (int, type(None)), _ARRAY),
    ("dict", _dict, _ARRAY, _ARRAY),
    ("odict", _odict, _ARRAY, _ARRAY),
    ("odict", _attributed, _ARRAY, _ARRAY, _ARRAY),
    ("defaultdict", _defaultdict, (str, type(None)), _ARRAY, _ARRAY),
    ("tensor", _tensor, _NUMBER),
    ("tensors", _tensors, _ARRAY, _ARRAY),
    ("blob", _blob, _NUMBER),
    ("ext", _ext, _TEXT, (*_SCALARS, list)),
)
"""Tag, decoder, and the types that each argument may have."""

_DECODERS: Final[dict[tuple[str, int], tuple[Callable[..., Any], _Kinds]]] = {
    (tag, len(kinds)): (decode, tuple(kinds)) for tag, decode, *kinds in _FORMS
}
