"""Paths that lead to leaves, and how people read them: ``optimizer.state[0].step``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias, Union

NAMED_TUPLE: Final = "namedtuple:"
PYTREE: Final = "pytree:"
"""Prefixes of tags: the tensors in such a value are the state dict's own."""

PICKLE: Final = "pickle"
"""The tag of a value that only running code brings back."""

Node: TypeAlias = Union[bool, int, float, str, "list[Node]", None]
"""One JSON value of an encoded tree; anything but a scalar is ``[tag, ...]``."""

_SHOWN_CHARS: Final = 200
Path: TypeAlias = tuple[object, ...]
"""The keys and indices that lead from the root of a state dict to a leaf."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a path that is neither a plain key nor an index; equal by its text."""

    text: str

    def __repr__(self) -> str:
        return self.text


_PLAIN: Final = (str, bytes, bool, float, complex, type(None), Step)


def format_path(path: Iterable[object]) -> str:
    """Return a readable path: strings joined by dots, everything else in brackets."""
    text = ""
    for key in path:
        # Most keys are ASCII, and there are many.
        if isinstance(key, str) and key and (key.isascii() or is_unicode(key)):
            text = f"{text}.{key}" if text else key
        else:
            text = f"{text}[{key!r}]"
    return text


def format_received(path: Iterable[object]) -> str:
    """Return a short readable path whose keys a peer chose.

    Only plain keys are shown: a number may have more digits than Python prints, and
    the text of a tensor is long, and takes modules that are not loaded yet.
    """
    shown = (key if _is_plain(key) else type(key) for key in path)
    return format_path(shown)[:_SHOWN_CHARS] or "the root"


def format_refusal(error: Exception) -> str:
    """Return the short text of an error about a peer's value, if it is safe to show."""
    if all(map(_is_plain, error.args)):
        return repr(error)[:_SHOWN_CHARS]
    return type(error).__name__


def _is_plain(key: object) -> bool:
    if type(key) is int:
        return key.bit_length() < _SHOWN_CHARS
    return isinstance(key, _PLAIN)


def is_unicode(text: str) -> bool:
    """Whether ``text`` has no lone surrogates, which JSON cannot hold."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
