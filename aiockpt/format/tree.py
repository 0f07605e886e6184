"""The structure of a state dict as tagged JSON: one grammar, to encode and to decode.

None, bool, str, finite floats and ints below 2**53 are themselves. Everything else is
an array ``[tag, ...]``. `_ENCODERS` says how each type is encoded. `_FORMS` says what
may follow each tag, and how it is decoded. Types are exact: a subclass is refused
unless it is registered, since what it adds would be lost on the way. The normative
table is in the wire format's reference.

Decoding imports nothing and runs only registered decoders. It bounds depth, nodes and
hash collisions, since the tree may come from a hostile peer.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from binascii import a2b_base64, b2a_base64
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

import msgspec

import aiockpt.format.standard  # noqa: F401 - it registers its types
from aiockpt.errors import (
    AiockptError,
    LimitExceededError,
    RemoteProtocolError,
    StateDictError,
    UnsupportedLeafError,
)
from aiockpt.format.limits import (
    Limits,
    WorkCancelledError,
    enforce,
    raise_if_cancelled,
)
from aiockpt.format.paths import (
    NAMED_TUPLE,
    PICKLE,
    PYTREE,
    Node,
    Path,
    Step,
    format_path,
    format_received,
    format_refusal,
    is_unicode,
)
from aiockpt.format.registry import BUILTIN_TYPES, Codec, Registry

LeafEncoder: TypeAlias = Callable[[object, Path], Node]
"""Turns a leaf into a node such as ``["tensor", 3]``; None: it cannot."""

RowEncoder: TypeAlias = Callable[
    [Sequence[str], Sequence[object], Path], "list[int] | None"
]
"""Numbers all values of a dict at once; None: not all of them are tensors."""

BLOB_BYTES: Final = 4096
"""Longer bytes are offered to the leaf encoder, which may carry them as a blob."""

_SHOWN_CHARS: Final = 200  # characters of a tag in an error
_MIN_ROW: Final = 16  # below this length, encoding value by value is faster
_MIN_CHECKED: Final = 16  # so few keys cannot collide often
_MAX_COLLISIONS: Final = 1000  # of all dicts and sets of one tree
_MAX_INT_DIGITS: Final = 1000  # hexadecimal; of an int that is quickly compared
_EXACT_INT: Final = 2**53  # readers other than Python keep JSON numbers as doubles

_PLAIN: Final = frozenset({type(None), bool, int, float, str})
_FACTORIES: Final[dict[str, type]] = {
    each.__name__: each for each in (list, dict, int, float, set, str, bool, tuple)
}
_FACTORY_NAMES: Final = {factory: name for name, factory in _FACTORIES.items()}


# ------------------------------------------------------------------------- encode


def encode_tree(
    value: object,
    *,
    registry: Registry,
    leaf: LeafEncoder,
    limits: Limits,
    row: RowEncoder | None = None,
    path: Path = (),
) -> Node:
    """Return the node of ``value``, which is at ``path``.

    ``leaf`` is asked for each value of a type that is neither built in nor
    registered, and for bytes longer than `BLOB_BYTES`. Before that, ``row`` is asked
    for all values of a long dict whose keys are strings.

    Raises:
        UnsupportedLeafError: nothing encodes some values; names their paths.
        LimitExceededError: too deep (or containing itself), or too many nodes.
        StateDictError: the encoder of a registered type failed.
    """
    encoder = _Encoder(registry, leaf, limits, row)
    try:
        node = encoder.encode(value, path)
    except RecursionError:
        cycle = _cycle(value, path, encoder.path)
        raise _too_deep(encoder.depth, cycle) from None
    except LimitExceededError as error:
        if encoder.depth > limits.max_depth:
            error.detail = _cycle(value, path, encoder.path)
        raise
    encoder.refused.raise_if_any()
    return node


def _too_deep(depth: int, cycle: str = "") -> LimitExceededError:
    remedy = (
        cycle or "Python's own stack holds no more: nest the state dict less deeply"
    )
    return LimitExceededError(
        "the nesting", limit=depth, actual=depth + 1, detail=remedy
    )


def _cycle(value: Any, root: Path, path: tuple[Any, ...]) -> str:
    """Return where a container on a path contains itself; an empty text if none does.

    Args:
        value: The value at ``root``.
        root: The beginning of the path.
        path: A path below it.
    """
    depths: dict[int, int] = {}  # of the containers on the way
    for depth in range(len(root), len(path) + 1):
        if (first := depths.setdefault(id(value), depth)) < depth:
            inner, outer = format_path(path[:depth]), format_path(path[:first])
            return f"{inner} is {outer or 'the state dict'} itself: leave it out"
        if depth == len(path):
            break
        if isinstance(value, dict):
            value = value.get(path[depth])
        elif isinstance(value, list | tuple | deque) and (
            path[depth] in range(len(value))
        ):
            value = value[path[depth]]
        else:  # a set, a key, or a value of a registered type
            break
    return ""


class Refusals:
    """Gathers leaves that cannot be encoded, so that one error names them all."""

    __slots__ = ("_first",)

    def __init__(self) -> None:
        self._first: UnsupportedLeafError | None = None

    def add(self, error: UnsupportedLeafError) -> None:
        """Note the leaves of an error. Its traceback, which holds them, is dropped."""
        if self._first is None:
            self._first = error.with_traceback(None)
            return
        self._first.add(error.path, error.type_name)
        for path, type_name in error.others:
            self._first.add(path, type_name)
        self._first.more += error.more

    def raise_if_any(self) -> None:
        """Raise one error for all leaves, if there are any."""
        first, self._first = self._first, None
        try:
            if first is not None:
                raise first
        finally:
            del first  # else the error and this frame would hold each other


@dataclass(slots=True)
class _Encoder:
    registry: Registry
    leaf: LeafEncoder
    limits: Limits
    row: RowEncoder | None
    refused: Refusals = field(default_factory=Refusals)
    path: Path = ()  # of the last container that was entered
    depth: int = 0
    nodes: int = 1

    def encode(self, value: Any, path: Path) -> Node:
        return _ENCODERS.get(type(value), _Encoder.other)(self, value, path)

    def plain(self, value: Any, path: Path) -> Node:
        return value  # type: ignore[no-any-return]

    def sequence(self, value: Any, path: Path) -> Node:
        return [type(value).__name__, self.children(enumerate(value), path)]

    def unordered(self, value: Any, path: Path) -> Node:
        # Equal sets are encoded alike, in whatever order they happen to iterate.
        nodes = self.children(enumerate(value), path)
        return [type(value).__name__, sorted(nodes, key=msgspec.json.encode)]

    def bounded(self, value: deque[Any], path: Path) -> Node:
        return ["deque", value.maxlen, self.children(enumerate(value), path)]

    def binary(self, value: bytes, path: Path) -> Node:
        blob = self.leaf(value, path) if len(value) > BLOB_BYTES else None
        return ["bytes", _base64(value)] if blob is None else blob

    def other(self, value: object, path: Path) -> Node:
        """Encode a value of a registered type, or a leaf."""
        codec = self.registry.by_type(type(value))
        try:
            if codec is not None:
                payload = _payload_of(codec, value, path)
                self.descend(path)
                node = self.encode(payload, path)
                self.ascend(1)
                return ["ext", codec.prefix + codec.tag, node]
            if (node := self.leaf(value, path)) is None:
                raise unsupported(value, format_path(path), remedy_for(value))
        except UnsupportedLeafError as error:
            self.refused.add(error)
            return None
        return node

    def mapping(self, value: dict[object, object], path: Path) -> Node:
        keys = self.keys(value, path)
        numbers: list[Any] | None = self.numbers(keys, value, path)
        if numbers is None:
            values: list[Any] = self.children(value.items(), path)
            if not (keys and _are_tensors(keys, values)):
                return ["dict", keys, values]
            numbers = [node[1] for node in values]
        return ["tensors", keys, numbers]

    def ordered(self, value: OrderedDict[object, object], path: Path) -> Node:
        attributes: dict[object, object] = dict(vars(value).items())
        if any(hasattr(OrderedDict, str(name)) for name in attributes):
            remedy = "one of its attributes shadows a method; delete it"
            self.refused.add(unsupported(value, format_path(path), remedy))
            return None
        node: list[Node] = ["odict", *self.items(value, path)]
        return [*node, self.mapping(attributes, path)] if attributes else node

    def default(self, value: defaultdict[object, object], path: Path) -> Node:
        factory: Any = value.default_factory
        name = _FACTORY_NAMES.get(factory)
        if name is None and factory is not None:
            names = ", ".join(_FACTORIES)
            remedy = f"its default_factory is none of {names}; use a dict"
            self.refused.add(unsupported(value, format_path(path), remedy))
            return None
        return ["defaultdict", name, *self.items(value, path)]

    def items(
        self, value: dict[object, object], path: Path
    ) -> tuple[list[Node], list[Node]]:
        """Return the nodes of a dict's keys and values."""
        keys = self.keys(value, path)
        if (numbers := self.numbers(keys, value, path)) is not None:
            return keys, [["tensor", number] for number in numbers]
        return keys, self.children(value.items(), path)

    def keys(self, value: dict[Any, object], path: Path) -> list[Node]:
        if set(map(type, value)) == {str} and is_unicode("".join(value)):
            self.nodes += len(value)
            return list(value)
        return self.children(((key, key) for key in value), path)

    def numbers(
        self, keys: list[Any], value: dict[object, object], path: Path
    ) -> list[int] | None:
        """Return the numbers of a dict's values, if ``row`` takes them all at once."""
        if self.row is None or len(keys) < _MIN_ROW or set(map(type, keys)) != {str}:
            return None
        numbers = self.row(keys, [*value.values()], path)
        if numbers is not None:
            self.descend(path)
            self.ascend(len(numbers))
        return numbers

    def children(
        self, items: Iterable[tuple[object, object]], path: Path
    ) -> list[Node]:
        self.descend(path)
        encode = self.encode
        nodes = [encode(value, (*path, key)) for key, value in items]
        self.ascend(len(nodes))
        return nodes

    def descend(self, path: Path) -> None:
        self.depth, self.path = self.depth + 1, path
        if self.depth > self.limits.max_depth:
            what = f"the nesting of {format_path(path)[:200]}"
            enforce(what, self.depth, self.limits.max_depth, "max_depth")

    def ascend(self, nodes: int) -> None:
        self.depth -= 1
        self.nodes += nodes
        _enforce_nodes(self.nodes, self.limits)


def _enforce_nodes(nodes: int, limits: Limits) -> None:
    enforce("the number of nodes in the tree", nodes, limits.max_nodes, "max_nodes")


def _are_tensors(keys: list[Any], values: list[Any]) -> bool:
    return all(type(n) is list and n[0] == "tensor" for n in values) and all(
        type(key) is str for key in keys
    )


def _payload_of(codec: Codec, value: object, path: Path) -> object:
    try:
        return codec.encode(value)
    except UnsupportedLeafError as error:
        error.path = error.path or format_path(path)  # an encoder does not know it
        raise
    except (AiockptError, RecursionError):
        raise
    except Exception as error:
        where = format_path(path) or "the state dict"
        why = f"the encoder of {codec.tag!r} failed: {format_refusal(error)}"
        raise StateDictError(f"{where}: {why}") from error


def unsupported(value: object, path: str, remedy: str) -> UnsupportedLeafError:
    """Return the error that a value at ``path`` is none of a state dict's."""
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return UnsupportedLeafError(path, f"{module}{kind.__qualname__}", remedy)


def remedy_for(value: object) -> str:
    """Return what to pass instead of an object that has a state dict; else nothing."""
    if not callable(getattr(type(value), "state_dict", None)):
        return ""
    is_module = hasattr(type(value), "forward")
    return "pass module.state_dict()" if is_module else "pass its state_dict()"


# ------------------------------------------------------------------------- decode


def decode_tree(
    node: Node,
    *,
    registry: Registry,
    tensors: Sequence[Any],
    limits: Limits,
    blob: Callable[[int], bytes] | None = None,
) -> object:
    """Return the value of an untrusted ``node``; the inverse of `encode_tree`.

    ``tensors`` are what ``["tensor", i]`` stands for. ``blob`` returns the bytes that
    tensor i carries (default: ``bytes(tensors[i])``); it is called at most once for
    each index.

    Raises:
        RemoteProtocolError: malformed, or an unregistered type; names the path.
        LimitExceededError: too deep, or too many nodes.
    """
    read_blob = blob or (lambda index: bytes(tensors[index]))
    decoder = _Decoder(registry, tensors, limits, read_blob)
    try:
        return decoder.decode(node)
    except RecursionError:
        raise _too_deep(decoder.depth) from None


class UnknownLeafError(RemoteProtocolError):
    """A leaf has a type that this process does not know."""

    def __init__(self, path: str, tag: str) -> None:
        super().__init__()
        self.path = path
        self.tag = tag

    def __str__(self) -> str:
        if self.tag == PICKLE:
            return f"a pickle at {self.path}: {rebuilding(self.tag)}"
        known = type_of(self.tag) if is_structure(self.tag) else self.tag[:_SHOWN_CHARS]
        text = f"a leaf of the unknown type {known!r} at {self.path}: "
        text += f"{rebuilding(self.tag)} here too"
        if is_structure(self.tag):
            text += ", or receive into a template that has one there"
        return text

    def local(self) -> UnsupportedLeafError:
        """Return the error for a checkpoint of one's own, such as a file."""
        if self.tag == PICKLE:
            return UnsupportedLeafError(self.path, PICKLE, rebuilding(self.tag))
        remedy = f"this process does not know the type: {rebuilding(self.tag)} first"
        if is_structure(self.tag):
            remedy += ", or load into a template that has one there"
        return UnsupportedLeafError(self.path, type_of(self.tag), remedy)


def is_structure(tag: str) -> bool:
    """Say whether a tag is that of a named tuple or a pytree node."""
    return tag.startswith((NAMED_TUPLE, PYTREE))


def type_of(tag: str) -> str:
    """Return the name of the type that a tag stands for, which a peer may have sent."""
    return tag.removeprefix(NAMED_TUPLE).removeprefix(PYTREE)[:_SHOWN_CHARS]


def rebuilding(tag: str) -> str:
    """Return what to do in a process that is to rebuild a leaf with this tag."""
    if tag == PICKLE:
        return "it runs code; say allow_pickle=True here too if you trust who made it"
    name = type_of(tag)
    short = name.rpartition(".")[2]
    short = short if short.isidentifier() else "TYPE"
    more = "" if is_structure(tag) else ", encode=..., decode=..."
    return f"call aiockpt.register_leaf({short}, tag={name!r}{more})"


@dataclass(slots=True)
class _Decoder:
    registry: Registry
    tensors: Sequence[Any]
    limits: Limits
    read_blob: Callable[[int], bytes]
    blobs: dict[int, bytes] = field(default_factory=dict)
    path: list[object] = field(default_factory=list)
    depth: int = 0
    nodes: int = 1
    collisions: int = 0
    costly: set[type] = field(default_factory=set)

    def decode(self, node: Any) -> Any:
        if type(node) in _PLAIN:
            return node
        if (form := _form_of(node)) is None:
            self.fail_form(node)
        return form.decode(self, *node[1:])

    def items(self, nodes: list[Node]) -> list[Any]:
        return self.children(nodes, range(len(nodes)))

    def bounded(self, maxlen: int | None, nodes: list[Node]) -> deque[Any]:
        if maxlen is not None and not len(nodes) <= maxlen <= sys.maxsize:
            self.fail(f"a deque of {len(nodes)} items with maxlen {maxlen}")
        return deque(self.items(nodes), maxlen)

    def distinct(self, nodes: list[Node]) -> dict[Any, Any]:
        values = self.keys(nodes)
        return self.table(values, values)

    def keys(self, nodes: list[Node]) -> list[Any]:
        before, self.costly = self.costly, set()
        values = self.items(nodes)
        # Comparing these takes minutes, and their hashes may be made equal.
        if {int, Decimal} <= self.costly:
            self.fail("a Decimal and an int of many digits in the keys of one dict")
        self.costly |= before
        return values

    def integer(self, text: str) -> int:
        try:
            value = _parse_int(text)
        except ValueError as error:
            self.fail(str(error))
        if len(text) > _MAX_INT_DIGITS:
            self.costly.add(int)
        return value

    def mapping(self, keys: list[Node], values: list[Node]) -> dict[Any, Any]:
        if len(keys) != len(values):
            self.fail(f"{len(keys)} keys with {len(values)} values")
        names = self.keys(keys)
        return self.table(names, self.children(values, names))

    def default(
        self, factory: str | None, keys: list[Node], values: list[Node]
    ) -> defaultdict[Any, Any]:
        if factory is not None and factory not in _FACTORIES:
            self.fail(f"unknown default factory {factory[:40]!r}")
        make = None if factory is None else _FACTORIES[factory]
        return defaultdict(make, self.mapping(keys, values))

    def attributed(
        self, keys: list[Node], values: list[Node], attributes: Node
    ) -> OrderedDict[Any, Any]:
        ordered = OrderedDict(self.mapping(keys, values))
        (names,) = self.items([attributes])
        # An attribute must not take the place of a method: the user would call it.
        if type(names) is not dict or any(
            type(name) is not str or hasattr(OrderedDict, name) for name in names
        ):
            self.fail("an OrderedDict with attributes that it cannot have")
        vars(ordered).update(names)
        return ordered

    def table(self, keys: list[Any], values: list[Any]) -> dict[Any, Any]:
        try:
            if len(keys) > _MIN_CHECKED and set(map(type, keys)) != {str}:
                # Keys of equal hashes make a table quadratic. Only str has a salt.
                self.collisions += len(keys) - len(set(map(hash, keys)))
                if self.collisions > _MAX_COLLISIONS:
                    self.fail("too many keys have the same hash")
            table = dict(zip(keys, values, strict=True))
        except TypeError as error:
            self.fail(str(error))
        if len(table) != len(keys):
            self.fail("duplicate keys")
        return table

    def tensor(self, index: int) -> Any:
        if not 0 <= index < len(self.tensors):
            self.fail(f"tensor {index} of {len(self.tensors)}")
        return self.tensors[index]

    def row(self, names: list[Any], indices: list[Any]) -> dict[Any, Any]:
        if set(map(type, names)) != {str} or set(map(type, indices)) != {int}:
            self.fail("tensors whose names or indices have the wrong type")
        self.descend(len(indices))
        self.depth -= 1
        self.tensor(min(indices))
        self.tensor(max(indices))
        if len(names) != len(indices):
            self.fail(f"{len(names)} names with {len(indices)} tensors")
        return self.table(names, [*map(self.tensors.__getitem__, indices)])

    def blob(self, index: int) -> bytes:
        self.tensor(index)
        # Once per index: a tree that repeats one must not multiply its memory.
        if index not in self.blobs:
            self.blobs[index] = self.read_blob(index)
        return self.blobs[index]

    def complex_number(self, real: Node, imag: Node) -> complex:
        parts = [self.decode(real), self.decode(imag)]
        if set(map(type, parts)) != {float}:
            self.fail("a complex whose parts are not floats")
        return complex(*parts)

    def registered(self, tag: str, payload: Node) -> object:
        codec = self.registry.by_tag(tag)
        if codec is None:
            raise UnknownLeafError(format_received(self.path), tag)
        self.descend(1)
        value = self.decode(payload)
        self.depth -= 1
        try:
            decoded = codec.decode(value)
        except (AiockptError, WorkCancelledError):
            raise
        except Exception as error:
            path = format_received(self.path)
            why = f"the decoder of {tag!r} refused {path}: {format_refusal(error)}"
            raise RemoteProtocolError(why) from error
        if type(decoded) is Decimal:
            self.costly.add(Decimal)
        return decoded

    def children(self, nodes: list[Node], keys: Iterable[object]) -> list[Any]:
        self.descend(len(nodes))
        path, decode, values = self.path, self.decode, []
        path.append(None)
        for key, node in zip(keys, nodes, strict=False):
            path[-1] = key
            values.append(node if type(node) in _PLAIN else decode(node))
        path.pop()
        self.depth -= 1
        return values

    def descend(self, nodes: int) -> None:
        raise_if_cancelled()
        self.depth += 1
        self.nodes += nodes
        limit = self.limits.max_depth
        enforce("the nesting of the tree", self.depth, limit, "max_depth")
        _enforce_nodes(self.nodes, self.limits)

    def fail(self, why: str) -> NoReturn:
        path = format_received(self.path)
        raise RemoteProtocolError(f"malformed tree at {path}: {why}")

    def fail_form(self, node: Any) -> NoReturn:
        if type(node) is not list or not node or type(node[0]) is not str:
            self.fail("a value that is neither plain nor an array with a tag")
        tag, count = node[0][:40], len(node) - 1
        self.fail(f"the tag {tag!r} does not go with these {count} arguments")


# ------------------------------------------------------------------------ scalars
# Each pair is exact for every value. A parser gets text that may come from a peer, and
# raises ValueError with a reason.


def _encode_int(value: int) -> Node:
    return value if -_EXACT_INT < value < _EXACT_INT else ["int", f"{value:x}"]


def _parse_int(text: str) -> int:
    # Hexadecimal, since decimal digits would take quadratic time.
    if re.fullmatch(r"-?[0-9a-f]+", text) is None:
        raise ValueError("not a hexadecimal number")
    return int(text, 16)


def _encode_float(value: float) -> Node:
    if math.isfinite(value):
        return value
    if math.isinf(value):
        return ["float", str(value)]
    return ["float", f"nan:{struct.pack('>d', value).hex()}"]


def _parse_float(text: str) -> float:
    if text in ("inf", "-inf"):
        return float(text)
    match = re.fullmatch(r"nan:([0-9a-f]{16})", text)
    value: float = struct.unpack(">d", bytes.fromhex(match[1]))[0] if match else 0.0
    if not math.isnan(value):
        raise ValueError("neither inf nor nan")
    return value


def _encode_str(value: str) -> Node:
    if is_unicode(value):
        return value
    return ["str", _base64(value.encode("utf-8", "surrogatepass"))]


def _parse_str(text: str) -> str:
    return _parse_bytes(text).decode("utf-8", "surrogatepass")


def _base64(data: bytes) -> str:
    return b2a_base64(data, newline=False).decode()


def _parse_bytes(text: str) -> bytes:
    return a2b_base64(text, strict_mode=True)


def _parsed(parse: Callable[[str], Any]) -> Callable[[_Decoder, str], Any]:
    def decode(decoder: _Decoder, text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            decoder.fail(str(error))

    return decode


# ------------------------------------------------------------------------ grammar

_ENCODERS: Final[dict[type, Callable[[_Encoder, Any, Path], Node]]] = {
    type(None): _Encoder.plain,
    bool: _Encoder.plain,
    int: lambda _, value, __: _encode_int(value),
    float: lambda _, value, __: _encode_float(value),
    complex: lambda _, z, __: ["complex", _encode_float(z.real), _encode_float(z.imag)],
    str: lambda _, value, __: _encode_str(value),
    bytes: _Encoder.binary,
    list: _Encoder.sequence,
    tuple: _Encoder.sequence,
    set: _Encoder.unordered,
    frozenset: _Encoder.unordered,
    deque: _Encoder.bounded,
    dict: _Encoder.mapping,
    OrderedDict: _Encoder.ordered,
    defaultdict: _Encoder.default,
}
assert _ENCODERS.keys() == BUILTIN_TYPES


class _Argument(NamedTuple):
    """One argument of a form: its JSON types, and which nodes it holds, if any."""

    types: frozenset[type]
    holds: str = ""


class _Form(NamedTuple):
    """What may follow a tag, and the method of a decoder that makes a value of it."""

    decode: Callable[..., Any]
    arguments: Sequence[_Argument]


_TEXT: Final = _Argument(frozenset({str}))
_TEXT_OR_NULL: Final = _Argument(frozenset({str, type(None)}))
_NUMBER: Final = _Argument(frozenset({int}))
_NUMBER_OR_NULL: Final = _Argument(frozenset({int, type(None)}))
_FLOAT: Final = _Argument(frozenset({float, list}))
_ARRAY: Final = _Argument(frozenset({list}))
_ITEMS: Final = _Argument(frozenset({list}), "items")
_KEYS: Final = _Argument(frozenset({list}), "keys")
_VALUES: Final = _Argument(frozenset({list}), "values")
_ATTRIBUTES: Final = _Argument(frozenset({list}), "attributes")
_NODE: Final = _Argument(_PLAIN | {list}, "node")

_FORMS: Final[tuple[tuple[str, Callable[..., Any], *tuple[_Argument, ...]], ...]] = (
    ("int", _Decoder.integer, _TEXT),
    ("float", _parsed(_parse_float), _TEXT),
    ("complex", _Decoder.complex_number, _FLOAT, _FLOAT),
    ("str", _parsed(_parse_str), _TEXT),
    ("bytes", _parsed(_parse_bytes), _TEXT),
    ("list", _Decoder.items, _ITEMS),
    ("tuple", lambda decoder, nodes: tuple(decoder.items(nodes)), _ITEMS),
    ("set", lambda decoder, nodes: set(decoder.distinct(nodes)), _ITEMS),
    ("frozenset", lambda decoder, nodes: frozenset(decoder.distinct(nodes)), _ITEMS),
    ("deque", _Decoder.bounded, _NUMBER_OR_NULL, _ITEMS),
    ("dict", _Decoder.mapping, _KEYS, _VALUES),
    (
        "odict",
        lambda decoder, *given: OrderedDict(decoder.mapping(*given)),
        _KEYS,
        _VALUES,
    ),
    ("odict", _Decoder.attributed, _KEYS, _VALUES, _ATTRIBUTES),
    ("defaultdict", _Decoder.default, _TEXT_OR_NULL, _KEYS, _VALUES),
    ("tensor", _Decoder.tensor, _NUMBER),
    ("tensors", _Decoder.row, _ARRAY, _ARRAY),
    ("blob", _Decoder.blob, _NUMBER),
    ("ext", _Decoder.registered, _TEXT, _NODE),
)
_GRAMMAR: Final = {
    (tag, len(arguments)): _Form(decode, arguments)
    for tag, decode, *arguments in _FORMS
}
_ATTRIBUTES_STEP: Final = Step("attributes")  # no key looks like it: it is no JSON


def _form_of(node: Any) -> _Form | None:
    """Return the form that ``node`` has; None if it is malformed."""
    if type(node) is not list or not node or type(node[0]) is not str:
        return None
    form = _GRAMMAR.get((node[0], len(node) - 1))
    if form is not None:
        for argument, given in zip(form.arguments, node[1:], strict=True):
            if type(given) not in argument.types:
                return None
    return form


def children_of(node: Any) -> Iterator[tuple[Path, Node]]:
    """Yield the steps to each child of a container's node, and the child.

    A node that is malformed, or no container, has no children. Long bytes may be a
    blob in a key too, so keys that are arrays are children.
    """
    if (form := _form_of(node)) is None:
        return
    keys: list[Any] = []
    for argument, given in zip(form.arguments, node[1:], strict=True):
        match argument.holds:
            case "items":
                yield from (((index,), item) for index, item in enumerate(given))
            case "keys":
                keys = given
            case "values":
                for key, value in zip(keys, given, strict=False):
                    if isinstance(key, list):
                        step = _step_of(key)
                        yield (Step(f"key {step}"),), key
                        yield (step,), value
                    else:
                        yield (key,), value
            case "attributes":
                yield (_ATTRIBUTES_STEP,), given
            case "node":
                yield (), given


def fault_of(root: Node) -> str:
    """Return where a tree has a node of no form, if it has one, and what that is.

    A tree without such a node may still be one that `decode_tree` refuses.
    """
    stack: list[tuple[Path, Any]] = [((), root)]
    while stack:
        raise_if_cancelled()
        path, node = stack.pop()
        if type(node) in _PLAIN:
            continue
        if _form_of(node) is None:
            return f"malformed tree at {format_received(path)}: a node of no known form"
        stack += (((*path, *steps), child) for steps, child in children_of(node))
    return ""


def _step_of(key: object) -> Step:
    try:
        return Step(msgspec.json.encode(key).decode())
    except RecursionError:
        raise RemoteProtocolError("a key in the tree is nested too deeply") from None
