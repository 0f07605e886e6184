"""Looks into the nodes of two or more trees side by side, without decoding values.

A tree comes from a manifest, so it may be malformed: see `aiockpt.format.tree` for the
nodes. Only keys of dicts are decoded, because they are compared.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from typing import Any, Final, NamedTuple, TypeAlias, cast

import msgspec

from aiockpt.errors import AiockptError, LimitExceededError, RemoteProtocolError
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest
from aiockpt.format.paths import NAMED_TUPLE, PYTREE, Node, Step
from aiockpt.format.references import registered
from aiockpt.format.tree import decode_tree, fault_of
from aiockpt.runtime.system import is_callers
from aiockpt.state.flatten import ODD
from aiockpt.state.leaves import TreeRegistry
from aiockpt.state.selection import below, item
from aiockpt.state.sharding import LAYOUTS

DICTS: Final = frozenset({"tensors", "dict", "odict", "defaultdict"})
"""The tags of dicts."""

HOLE: Final[Node] = ["ext", ODD, secrets.token_hex()]
"""Stands in a tree for an item that stays as the template has it.

The trees of peers cannot have it, since its payload is random.
"""

_MAX_COLLISIONS: Final = 1000  # keys of equal hashes, which take time to compare
_LONG_KEY_BITS: Final = 4096
_MAX_KEY_BYTES: Final = 1 << 20  # the memory of a key

Items: TypeAlias = dict[object, Node]
"""The items of a container by key or position; a key without a decoder is a `Step`."""


def tag_of(node: Node) -> str | None:
    """Return the tag of a node; None for a scalar."""
    if isinstance(node, list) and node and isinstance(node[0], str):
        return node[0]
    return None


def is_distributed(node: Any) -> bool:
    """Say whether a node is a distributed tensor."""
    return tag_of(node) == "ext" and len(node) == 3 and node[1] in LAYOUTS


def has_distributed(root: Node) -> bool:
    """Say whether a node is a distributed tensor, or has one, at whatever depth."""
    todo = [root]
    while todo:
        for _, tag, payload in registered(todo.pop()):
            if tag in LAYOUTS:
                return True
            todo.append(payload)
    return False


def number_of(node: Any, path: str) -> int:
    """Return the number of a tensor's node.

    Raises:
        RemoteProtocolError: it is malformed.
    """
    match node:
        case ["tensor", int(number)]:
            return number
    raise RemoteProtocolError(f"malformed tree at {path[:200] or 'the root'}")


def values_of(node: Any) -> list[Node] | None:
    """Return the nodes of a container's items; None for another node."""
    match node:
        case [("tensors" | "dict" | "odict"), _, [*_] as values, *_]:
            pass
        case ["defaultdict", _, _, [*_] as values] | ["deque", _, [*_] as values]:
            pass
        case ["list" | "tuple", [*_] as values]:
            pass
        case _:
            return None
    return cast("list[Node]", values)


def entered(node: Any, path: str) -> Iterable[tuple[object, Node, str]] | None:
    """Return keys, values and paths of what a selection may enter: a dict, a list."""
    if tag_of(node) in DICTS:
        pairs = (items_of(node) or {}).items()
        return ((key, each, below(path, key)) for key, each in pairs)
    if tag_of(node) == "list":
        return (
            (at, each, item(path, at)) for at, each in enumerate(values_of(node) or ())
        )
    return None


@contextmanager
def blaming(sources: Sequence[Manifest]) -> Iterator[None]:
    """Blame the sources for what a malformed tree of theirs makes fail.

    Raises:
        RemoteProtocolError: a tree is malformed, or nested too deeply.
    """
    try:
        yield
    except RecursionError:
        raise RemoteProtocolError("the tree is nested too deeply") from None
    except AiockptError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if is_callers(error):  # such as one of select=
            raise
        if any(why := fault_of(each.tree) for each in sources):
            raise RemoteProtocolError(why) from error
        raise


class Structure(NamedTuple):
    """A value that is made of its items: a tuple, deque, named tuple or pytree node.

    Attributes:
        kind: The tag; structures of other kinds are other values.
        items: The nodes of the items.
        made_of: Returns the node of a structure with other items.
    """

    kind: str
    items: list[Node]
    made_of: Callable[[list[Node]], Node]


def structure_of(node: Any) -> Structure | None:
    """Return a node as a structure; None for another node."""
    match node:
        case ["tuple", [*items]]:
            return Structure("tuple", items, lambda new: ["tuple", new])
        case ["deque", most, [*items]]:
            return Structure("deque", items, lambda new: ["deque", most, new])
        case ["ext", str(tag), ["dict", keys, [*items]]]:
            if tag.startswith(NAMED_TUPLE):
                return Structure(
                    tag, items, lambda new: ["ext", tag, ["dict", keys, new]]
                )
        case ["ext", str(tag), ["tensors", [*keys], [*numbers]]]:
            if tag.startswith(NAMED_TUPLE):
                return Structure(
                    tag,
                    [["tensor", number] for number in numbers],
                    lambda new: ["ext", tag, ["dict", keys, new]],
                )
        case ["ext", str(tag), ["tuple", [["list", [*items]], context]]]:
            if tag.startswith(PYTREE):
                return Structure(
                    tag,
                    items,
                    lambda new: ["ext", tag, ["tuple", [["list", new], context]]],
                )
    return None


def keys_of(node: Any) -> dict[object, Node]:
    """Return the nodes of the keys of a dict, by key."""
    keys = node[2] if node[0] == "defaultdict" else node[1]
    return dict(zip(_known(keys), keys, strict=True))


def items_of(node: Node) -> Items | None:
    """Return the items of a container; None for another node."""
    match node:
        case ["tensors", [*keys], [*numbers]]:
            values: list[Node] = [["tensor", number] for number in numbers]
        case ["dict" | "odict", [*keys], [*values], *_]:
            pass
        case ["defaultdict", _, [*keys], [*values]]:
            pass
        case ["list" | "tuple", [*values]] | ["deque", _, [*values]]:
            return dict(enumerate(values))
        case _:
            return None
    known = _known(keys)
    if len(known) - len({*map(hash, known)}) > _MAX_COLLISIONS:
        raise RemoteProtocolError("malformed tree: the keys of a dict collide")
    kinds = {*map(type, known)}
    if {int, Decimal} <= kinds and any(map(_is_long, known)):
        raise RemoteProtocolError("malformed tree: keys that take long to compare")
    found = dict(zip(known, values, strict=False))
    if not len(found) == len(keys) == len(values):
        raise RemoteProtocolError("malformed tree: a key is there twice, or alone")
    return found


def _is_long(key: object) -> bool:
    """Say whether a number has so many digits that comparing it takes long."""
    return type(key) is int and key.bit_length() > _LONG_KEY_BITS


def _known(keys: list[Node]) -> Sequence[object]:
    """Return keys as a state dict has them; most are texts."""
    return keys if {*map(type, keys)} == {str} else [*map(_key_of, keys)]


def _key_of(key: Node) -> object:
    """Return a key as a state dict has it; as a `Step` if it cannot be decoded here."""
    if not isinstance(key, list):
        if isinstance(key, dict):  # JSON may have one
            raise RemoteProtocolError("malformed tree: a key is a JSON object")
        return key
    with suppress(RemoteProtocolError, LimitExceededError, TypeError):
        types = TreeRegistry({}, allow_pickle=False, travelled=_MAX_KEY_BYTES)
        found: Any = decode_tree(key, registry=types, tensors=(), limits=Limits())
        hash(found)
        if found == found:
            return cast("object", found)
    return Step(msgspec.json.encode(key).decode())
