"""Reads a pickle as plain data, without running it.

A pickle is a program for a machine with a stack. The machine here imports no module,
looks no name up, and calls nothing. Where Python would call what a name stands for, it
notes the name and the arguments, as `Made`. It never hashes or compares a value of the
pickle, so no choice of keys is slow.

It knows the instructions that Python writes for plain data, in the protocols 2 to 5.
Any other one is refused.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any, Final, Never

from aiockpt.errors import RemoteProtocolError
from aiockpt.format.limits import Limits, enforce

PERSISTENT: Final = "persistent id"
"""The name of a `Made` for which the pickle gives an id instead of a value."""

_ORDERED: Final = "collections.OrderedDict"
_SIZE: Final = "torch.Size"
_MAX_INT_BYTES: Final = 8
_MAX_NAME_CHARS: Final = 100


@dataclass(frozen=True, slots=True, eq=False)
class Global:
    """A name that the pickle mentions, with its module."""

    name: str


@dataclass(slots=True, eq=False, repr=False)
class Made:
    """What a call of ``name`` would return, with the state it would be given then."""

    name: str
    args: tuple[Any, ...]
    state: Any = None


class PickledDict(list[Any]):
    """A dict: its keys, each with its value behind it. A key may be there twice."""

    def by_name(self) -> dict[str, Any]:
        """Return the values by their keys.

        Raises:
            RemoteProtocolError: a key is not a string, or is there twice.
        """
        keys = self[::2]
        if not {*map(type, keys)} <= {str}:
            _refuse("a key is not a string")
        found = dict(zip(keys, self[1::2], strict=True))
        if len(found) != len(keys):
            _refuse("a key of a dict is there twice")
        return found

    def items(self) -> Iterable[tuple[Any, Any]]:
        """Return the keys with their values."""
        return zip(self[::2], self[1::2], strict=True)


def read_pickle(data: bytes, names: Container[str], *, limits: Limits) -> Any:
    """Return the value that a pickle describes.

    It consists of None, bools, integers, strings, tuples, lists, and objects of the
    classes `PickledDict`, `Global` and `Made`. A ``torch.Size`` becomes a tuple, and an
    ``OrderedDict`` a `PickledDict`. A list or dict may contain itself.

    Args:
        data: The pickle, to its last byte.
        names: The names that it may mention, as ``module.name``; with `PERSISTENT`, it
            may have persistent ids.
        limits: Bound the values, the length of a string, and the depth.

    Raises:
        RemoteProtocolError: it is malformed, or mentions another name.
        LimitExceededError: it is larger than the limits allow.
    """
    try:
        return _run(data, names, limits)
    except (IndexError, ValueError) as error:
        raise RemoteProtocolError("a pickle that is malformed or truncated") from error


def _run(data: bytes, names: Container[str], limits: Limits) -> Any:  # noqa: C901, PLR0912, PLR0915 - a case for each instruction, the most frequent ones first
    """Run the machine. What is read beyond the end is noticed at the next step.

    A case makes a value, which goes on the stack and is counted, or it continues.

    Raises:
        IndexError, ValueError: the pickle is malformed.
    """
    stack: list[Any] = []
    below: list[list[Any]] = []  # the stacks below each mark
    memo: list[Any] = []
    count, at, most = 0, 0, limits.max_nodes
    while True:
        code, at = data[at], at + 1
        made: Any = None
        match code:
            case 0x94:  # MEMOIZE
                memo.append(stack[-1])
                if len(memo) > count:
                    _refuse("more memo entries than values")
                continue
            case 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
                continue
            case 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
                continue
            case 0x52 | 0x81:  # REDUCE, NEWOBJ
                args, what = stack.pop(), stack.pop()
                if type(what) is not Global or type(args) is not tuple:
                    _refuse(f"a call of a {type(what).__name__}")
                if what.name == _SIZE and len(args) == 1:
                    (made,) = args
                elif what.name == _ORDERED and not args:
                    made = PickledDict()
                else:
                    made = Made(what.name, args)
            case 0x4B:  # BININT1
                made, at = data[at], at + 1
            case 0x4D:  # BININT2
                made, at = int.from_bytes(data[at : at + 2], "little"), at + 2
            case 0x28:  # MARK
                below.append(stack)
                depth = limits.max_depth
                enforce("the depth of a pickle", len(below), depth, "max_depth")
                stack = []
                continue
            case 0x7D:  # EMPTY_DICT
                made = PickledDict()
            case 0x75 | 0x73:  # SETITEMS, SETITEM
                if code == 0x75:
                    items, stack = stack, below.pop()
                else:
                    items = stack[-2:]
                    del stack[-2:]
                if type(stack[-1]) is not PickledDict or len(items) % 2:
                    _refuse(f"keys for a {type(stack[-1]).__name__}")
                stack[-1] += items
                continue
            case 0x62:  # BUILD
                state, what = stack.pop(), stack[-1]
                if type(what) is not Made or what.state is not None:
                    _refuse(f"a state for a {type(what).__name__}")
                what.state = state
                continue
            case 0x29:  # EMPTY_TUPLE
                made = ()
            case 0x85 | 0x86 | 0x87:  # TUPLE1, TUPLE2, TUPLE3
                size = code - 0x84
                if len(stack) < size:
                    raise IndexError
                made = (*stack[-size:],)
                del stack[-size:]
            case 0x4A:  # BININT
                made = int.from_bytes(data[at : at + 4], "little", signed=True)
                at += 4
            case 0x8C | 0x58:  # SHORT_BINUNICODE, BINUNICODE
                width = 1 if code == 0x8C else 4
                size, at = int.from_bytes(data[at : at + width], "little"), at + width
                text = limits.max_text_bytes
                enforce("the size of a string", size, text, "max_text_bytes")
                # Python writes file names that are no UTF-8 like this.
                made = data[at : at + size].decode("utf-8", "surrogatepass")
                at += size
            case 0x74:  # TUPLE
                made, stack = (*stack,), below.pop()
            case 0x5D:  # EMPTY_LIST
                made = []
            case 0x65 | 0x61:  # APPENDS, APPEND
                if code == 0x65:
                    items, stack = stack, below.pop()
                else:
                    items = [stack.pop()]
                if type(stack[-1]) is not list:
                    _refuse(f"items for a {type(stack[-1]).__name__}")
                stack[-1] += items
                continue
            case 0x8A:  # LONG1
                size, at = data[at], at + 1
                if size > _MAX_INT_BYTES:
                    _refuse(f"an integer of {size} bytes")
                made = int.from_bytes(data[at : at + size], "little", signed=True)
                at += size
            case 0x4E:  # NONE
                made = None
            case 0x88 | 0x89:  # NEWTRUE, NEWFALSE
                made = code == 0x88
            case 0x93:  # STACK_GLOBAL
                name, module = stack.pop(), stack.pop()
                if type(name) is not str or type(module) is not str:
                    _refuse("a name that is no string")
                made = Global(_checked(f"{module}.{name}", names))
            case 0x63:  # GLOBAL
                middle = data.index(b"\n", at, at + _MAX_NAME_CHARS)
                end = data.index(b"\n", middle + 1, middle + 1 + _MAX_NAME_CHARS)
                module, name = data[at:middle].decode(), data[middle + 1 : end].decode()
                made, at = Global(_checked(f"{module}.{name}", names)), end + 1
            case 0x51:  # BINPERSID
                made = Made(_checked(PERSISTENT, names), (stack.pop(),))
            case 0x71 | 0x72:  # BINPUT, LONG_BINPUT
                width = 1 if code == 0x71 else 4
                index, at = int.from_bytes(data[at : at + width], "little"), at + width
                if index != len(memo) or index >= count:  # Python counts
                    _refuse(f"memo entry {index} out of order")
                memo.append(stack[-1])
                continue
            case 0x80:  # PROTO
                if not 2 <= data[at] <= 5:
                    _refuse(f"a pickle of protocol {data[at]}")
                at += 1
                continue
            case 0x95:  # FRAME, a hint for readers of streams
                at += 8
                continue
            case 0x2E:  # STOP
                if len(stack) != 1 or below or at != len(data):
                    _refuse("a pickle that does not end with its one value")
                return stack[0]
            case _:
                detail = f"byte {at - 1} of a pickle is the instruction {code:#04x}"
                _refuse(f"{detail}, which plain data does not need")
        stack.append(made)
        count += 1
        if count > most:
            enforce("the number of values in a pickle", count, most, "max_nodes")


def _checked(name: str, names: Container[str]) -> str:
    if name not in names:
        shown = ascii(name[:_MAX_NAME_CHARS])[1:-1]
        _refuse(f"it mentions {shown}, which does not belong there")
    return name


def _refuse(detail: str) -> Never:
    raise RemoteProtocolError(detail)
