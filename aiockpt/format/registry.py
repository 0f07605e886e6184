"""Leaf types that users add to those that the tree carries by itself.

Both ends register the same tags. A tag is only compared: no name that a peer sends is
imported, and only registered decoders are called.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from aiockpt.format.paths import NAMED_TUPLE, PYTREE

T = TypeVar("T")

BUILTIN_TYPES: Final[frozenset[type]] = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        list,
        tuple,
        set,
        frozenset,
        dict,
        deque,
        OrderedDict,
        defaultdict,
    }
)
"""The types that the tree carries by itself, without their subclasses."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How one registered type becomes a value that the tree can carry, and back.

    Attributes:
        prefix: Stands before the tag of a named tuple or a pytree node that was
            registered without functions; empty for all others. The tensors in such a
            value are the state dict's own.
        is_default: Marks a type of the package's own choice, which users may replace.
    """

    tag: str
    leaf_type: type
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]
    prefix: str = ""
    is_default: bool = False

    @property
    def is_structure(self) -> bool:
        """Whether the tensors in such a value are the state dict's own."""
        return bool(self.prefix)


Functions: TypeAlias = tuple[str, Callable[[Any], object], Callable[[Any], Any]]
"""The prefix, the encoder and the decoder of a type."""

StructureFinder: TypeAlias = Callable[[type], "Functions | None"]
"""Returns the functions of a type whose children only it knows."""


class Registry:
    """Leaf types by type (to encode) and by tag (to decode)."""

    def __init__(self) -> None:
        self._by_type: dict[type, Codec] = {}
        self._by_tag: dict[str, Codec] = {}

    def register(
        self,
        tag: str,
        leaf_type: type[T],
        encode: Callable[[T], object],
        decode: Callable[[Any], T],
        *,
        prefix: str = "",
        is_default: bool = False,
    ) -> None:
        """Carry values whose exact type is ``leaf_type`` as what ``encode`` returns.

        ``encode`` may return any value that the tree carries, tensors included.
        ``decode`` is its inverse. It is called with what a peer sent, so it must check
        its argument. Registering a type again replaces its functions, also after its
        module was reloaded. A type of ``is_default`` may get another tag; values with
        its own tag are decoded as before.

        Raises:
            ValueError: the type or the tag is taken by another one.
        """
        if leaf_type in BUILTIN_TYPES:
            raise ValueError(f"{_name(leaf_type)} is carried already")
        codec = Codec(tag, leaf_type, encode, decode, prefix, is_default)
        known = self._by_type.get(leaf_type)
        if known is not None and known.is_default:
            known = None
        for other in (known, self._by_tag.get(tag)):
            if other is not None and not _same(other, codec):
                raise ValueError(
                    f"cannot register {_name(leaf_type)} as {tag!r}: "
                    f"{_name(other.leaf_type)} is registered as {other.tag!r}"
                )
        if (reloaded := self._by_tag.get(tag)) is not None:
            del self._by_type[reloaded.leaf_type]
        self._by_tag[tag] = self._by_type[leaf_type] = codec

    def by_type(self, leaf_type: type) -> Codec | None:
        """Return the codec of an exact type."""
        return self._by_type.get(leaf_type)

    def by_tag(self, tag: str) -> Codec | None:
        """Return the codec of a tag; that of a structure has a prefix."""
        if (codec := self._by_tag.get(tag)) is not None:
            return codec
        codec = self.named(tag)
        if codec is not None and codec.prefix and tag.startswith(codec.prefix):
            return codec
        return None

    def named(self, tag: str) -> Codec | None:
        """Return the codec of the type that a tag with or without a prefix names."""
        return self._by_tag.get(tag.removeprefix(NAMED_TUPLE).removeprefix(PYTREE))


def _same(one: Codec, other: Codec) -> bool:
    return one.tag == other.tag and _name(one.leaf_type) == _name(other.leaf_type)


def _name(leaf_type: type) -> str:
    return f"{leaf_type.__module__}.{leaf_type.__qualname__}"


STRUCTURES: Final[list[StructureFinder]] = []
"""Asked by `register_leaf` for types without functions; torch knows such types."""

REGISTRY: Final = Registry()
"""The registry that `register_leaf` fills and that the package uses."""


def register_leaf(
    leaf_type: type[T],
    /,
    *,
    tag: str | None = None,
    encode: Callable[[T], object] | None = None,
    decode: Callable[[Any], T] | None = None,
) -> type[T]:
    """Let state dicts hold values of ``leaf_type``; call it on both ends.

    Enums (carried by name; flags by value), dataclasses (by their init fields), named
    tuples (by their fields) and types that torch's pytree knows (by their children)
    need no functions. Returns ``leaf_type``, so that it
    works as a decorator.

    Args:
        leaf_type: The type; its subclasses are not included.
        tag: What stands for the type; its full name by default.
        encode: Returns a value that state dicts can hold.
        decode: Makes the leaf from that value. A peer sends it, so check it.

    Raises:
        ValueError: another kind of type without both functions, or the type or the tag
            is taken by another one.
    """
    prefix = ""
    if encode is None and decode is None:
        prefix, encode, decode = _functions_of(leaf_type)
    if encode is None or decode is None:
        raise ValueError(f"{_name(leaf_type)} needs both encode and decode")
    tag = tag or _name(leaf_type)
    REGISTRY.register(tag, leaf_type, encode, decode, prefix=prefix)
    return leaf_type


def _functions_of(leaf_type: type[Any]) -> Functions:
    """Return the functions of a type that is registered without any.

    Raises:
        ValueError: it is of another kind.
    """
    if issubclass(leaf_type, enum.Flag):
        return "", lambda flag: flag.value, lambda found: leaf_type(exactly(int, found))
    if issubclass(leaf_type, enum.Enum):
        # An enum's own error shows the value, which may be a tensor, or very long.
        return (
            "",
            lambda member: member.name,
            lambda name: leaf_type[exactly(str, name)],
        )
    prefix = ""
    if dataclasses.is_dataclass(leaf_type):
        names = [each.name for each in dataclasses.fields(leaf_type) if each.init]
    elif issubclass(leaf_type, tuple) and hasattr(leaf_type, "_fields"):
        prefix, names = NAMED_TUPLE, [*leaf_type._fields]
    elif found := next(filter(None, (ask(leaf_type) for ask in STRUCTURES)), None):
        return found
    else:
        raise ValueError(f"{_name(leaf_type)} needs encode and decode functions")
    return (
        prefix,
        lambda value: {name: getattr(value, name) for name in names},
        lambda fields: leaf_type(**fields),
    )


def exactly(expected: type[T], value: object) -> T:
    """Return a value that a peer sent, if it has exactly this type.

    A decoder checks its payload with it: a value of another type may behave alike and
    be of any size.

    Raises:
        TypeError: the value has another type.
    """
    if type(value) is not expected:
        raise TypeError(f"a {type(value).__name__} instead of a {expected.__name__}")
    return value
