"""Where a leaf is: paths as people read them, such as ``optimizer.state[0].step``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias, Union

__all__ = [
    "Node",
    "Path",
    "format_path",
    "is_unicode",
]

Node: TypeAlias = Union[bool, int, float, str, "list[Node]", None]
"""One JSON value of an encoded tree; anything but a scalar is ``[tag, ...]``."""

Path: TypeAlias = tuple[object, ...]
"""The keys and indices that lead from the root of a state dict to a leaf."""


def format_path(path: Iterable[object]) -> str:
    """Return a readable path: strings joined by dots, everything else in brackets."""
    text = ""
    for key in path:
        if type(key) is str and key and key.isascii():  # most are, and there are many
            text = f"{text}.{key}" if text else key
        else:
            text = _extend(text, key if isinstance(key, str) else "", key)
    return text


def _extend(prefix: str, name: str, key: object) -> str:
    if not name or not is_unicode(name):
        return f"{prefix}[{key!r}]"
    return f"{prefix}.{name}" if prefix else name


def is_unicode(text: str) -> bool:
    """Whether ``text`` has no lone surrogates, which JSON cannot hold."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
