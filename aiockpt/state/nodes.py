"""Values with children that travel as structure: named tuples and pytree nodes.

Their tensors belong to the state dict and can be filled in a template. The type of such
a value comes from the receiver: from its template or from `register_leaf`. The types of
``torch.return_types`` are always known. A node's tag only selects one of these types.
"""

from __future__ import annotations

import importlib
import sys
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.utils import _pytree

from aiockpt.format.paths import NAMED_TUPLE, PYTREE
from aiockpt.format.registry import BUILTIN_TYPES, REGISTRY, STRUCTURES, exactly

Decoders: TypeAlias = Mapping[str, Callable[[Any], object]]

_RETURN_TYPES: Final = "torch.return_types."


class Opened(NamedTuple):
    """A value's children, its encoded form, and a function that replaces children."""

    tag: str
    payload: object
    children: Sequence[Any]
    make: Callable[[Sequence[Any]], object]


def opened(value: Any) -> Opened | None:
    """Return the children of a value that travels as structure; None for others."""
    kind: Any = type(value)
    if kind in BUILTIN_TYPES or isinstance(value, torch.Tensor):
        return None
    codec = REGISTRY.by_type(kind)
    if codec is not None and not codec.is_structure:
        return None
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        fields = dict(zip(kind._fields, value, strict=True))
        tag = codec.tag if codec else _name(kind)
        return Opened(NAMED_TUPLE + tag, fields, [*value], kind._make)
    node = _pytree.SUPPORTED_NODES.get(kind)
    if node is None:
        return None
    children, context = node.flatten_fn(value)
    unflatten = node.unflatten_fn
    payload = (children, context)
    tag = PYTREE + (codec.tag if codec else _name(kind))
    return Opened(tag, payload, children, lambda items: unflatten(items, context))


def is_known(value: object, tag: str) -> bool:
    """Say whether a process knows the type without a template, if this one does."""
    return REGISTRY.by_type(type(value)) is not None or decoder_of(tag) is not None


def decoder_of(tag: str) -> Callable[[Any], object] | None:
    """Return the decoder of a tag whose type is known to every process."""
    name = tag.removeprefix(PYTREE + _RETURN_TYPES)
    kind: Any = vars(torch.return_types).get(name) if name != tag else None
    # A type that a user has registered by itself rebuilds what was saved without that.
    codec = REGISTRY.named(tag)
    if codec is not None and tag.startswith(PYTREE):
        kind = codec.leaf_type
    elif codec is not None and not codec.is_structure and tag.startswith(NAMED_TUPLE):
        kind = codec.leaf_type
        return _of_fields(kind) if hasattr(kind, "_fields") else None
    return None if kind not in _pytree.SUPPORTED_NODES else _of_children(kind)


def decoders_for(template: object) -> dict[str, Callable[[Any], object]]:
    """Return the decoders of the types that a template has, by tag."""
    found: dict[str, Callable[[Any], object]] = {}
    for value, inside in _walk(template):
        is_named = inside.tag.startswith(NAMED_TUPLE)
        if inside.tag not in found:
            make = _of_fields if is_named else _of_children
            found[inside.tag] = make(type(value))
    return found


def _walk(template: object) -> Iterator[tuple[object, Opened]]:
    """Yield each value that travels as structure, with its children."""
    # Keep the values alive: a node may create its children on access, and a later
    # child could reuse the `id` of a freed one.
    waiting, seen = [template], dict[int, object]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor | str | int | float) or id(value) in seen:
            continue
        seen[id(value)] = value
        if (inside := opened(value)) is not None:  # maybe a subclass of dict
            yield value, inside
            waiting += inside.children
        elif isinstance(value, dict):
            waiting += value.values()
            waiting += [key for key in value if type(key) is not str]
            if type(value) is OrderedDict:
                waiting += vars(value).values()
        elif type(value) in (list, tuple, deque, set, frozenset):
            waiting += value  # type: ignore[arg-type]


def decoder_by_name(tag: str, *, imports: bool) -> Callable[[Any], object] | None:
    """Return the decoder of a tag that this user's own process has written.

    The tag names the type, which is looked up among the modules of this process. A
    named tuple whose type is not found becomes one of the same name and fields.

    Args:
        tag: The tag.
        imports: Whether to import the type's module, which runs its code.
    """
    if tag.startswith(NAMED_TUPLE):
        name = tag.removeprefix(NAMED_TUPLE)
        kind = _type_named(name, imports=imports)
        if isinstance(kind, type) and issubclass(kind, tuple):
            return _of_fields(kind)
        return partial(_stand_in, name)
    kind = None
    if tag.startswith(PYTREE):
        kind = _type_named(tag.removeprefix(PYTREE), imports=imports)
    return _of_children(kind) if kind in _pytree.SUPPORTED_NODES else None


def _type_named(name: str, *, imports: bool) -> Any:
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:length])
        if imports and module not in sys.modules:
            with suppress(Exception):  # whatever the module raises
                importlib.import_module(module)
        found: Any = sys.modules.get(module)
        for part in parts[length:]:
            found = getattr(found, part, None)
        if found is not None:
            return found
    return None


def _stand_in(name: str, payload: Any) -> object:
    fields = exactly(dict, payload)
    return _made_up(name.rpartition(".")[2], (*fields,))._make(fields.values())


@cache
def _made_up(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)


def _of_fields(kind: Any) -> Callable[[Any], object]:
    def decode(payload: Any) -> object:
        fields = exactly(dict, payload)
        if (*fields,) != kind._fields:
            raise ValueError(f"it has the fields {kind._fields}, not {(*fields,)}")
        return kind._make(fields.values())

    return decode


def _of_children(kind: Any) -> Callable[[Any], object]:
    def decode(payload: Any) -> object:
        children, context = exactly(tuple, payload)
        unflatten = _pytree.SUPPORTED_NODES[kind].unflatten_fn
        return unflatten(exactly(list, children), context)

    return decode


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _node_codec(
    kind: type,
) -> tuple[str, Callable[[Any], object], Callable[[Any], Any]] | None:
    """Return how a type that torch's pytree knows is registered without functions."""
    node = _pytree.SUPPORTED_NODES.get(kind)
    return None if node is None else (PYTREE, node.flatten_fn, _of_children(kind))


STRUCTURES.append(_node_codec)
