"""Where a tree refers to tensors: to name them, to pair two trees, to renumber one.

Nothing is decoded or looked up. A malformed node counts as empty, so these functions
work on a tree that `decode_tree` is going to refuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from aiockpt.errors import RemoteProtocolError
from aiockpt.format.limits import raise_if_cancelled
from aiockpt.format.paths import NAMED_TUPLE, PYTREE, Node, Path
from aiockpt.format.tree import children_of

_Leaf: TypeAlias = tuple[Path, str] | None


class Reference(NamedTuple):
    """One mention of a tensor's number.

    ``kind`` is ``"tensor"`` or ``"blob"``. ``leaf`` is the path and tag of the
    outermost registered leaf around it: then the tensor is a part of that leaf's
    payload, and none of the state dict's own.
    """

    path: Path
    kind: str
    number: int
    leaf: _Leaf


class Mention(NamedTuple):
    """Tensors that the tree names in a row below one path; most trees have few rows.

    ``names`` are the last steps of their paths; None for a single tensor that is at
    ``path`` itself. Kind and leaf are as in a `Reference`.
    """

    path: Path
    names: Sequence[object] | None
    numbers: Sequence[int]
    kind: str
    leaf: _Leaf

    def references(self) -> Iterator[Reference]:
        """Yield its references one by one."""
        if self.names is None:
            yield Reference(self.path, self.kind, self.numbers[0], self.leaf)
            return
        for name, number in zip(self.names, self.numbers, strict=True):
            yield Reference((*self.path, name), self.kind, number, self.leaf)


def mentions(root: Node) -> Iterator[Mention]:
    """Yield every mention of tensors' numbers in the order of the tree, row by row."""
    # A stack of iterators: no peer's tree makes this recursive, or hold more than
    # one path per level.
    levels: list[tuple[Path, _Leaf, Iterator[tuple[Path, Node]]]]
    levels = [((), None, iter([((), root)]))]
    while levels:
        raise_if_cancelled()
        path, leaf, children = levels[-1]
        names: list[object] = []
        numbers: list[int] = []
        node: Any = None
        for steps, node in children:
            if type(node) is not list or not node:
                continue
            if steps and len(node) == 2 and node[0] == "tensor" and _is_int(node[1]):
                names.append(steps[0])
                numbers.append(node[1])
            else:
                break
        else:
            levels.pop()
            node = None
        if names:
            yield Mention(path, names, numbers, "tensor", leaf)
        match node:
            case ["tensor" | "blob" as kind, int(number)]:
                yield Mention((*path, *steps), None, (number,), kind, leaf)
            case ["tensors", list(row), list(values)]:
                kinds = {*map(type, row)}, {*map(type, values)}
                if kinds != ({str}, {int}) or len(row) != len(values):
                    pairs = zip(row, values, strict=False)
                    sound = [(n, v) for n, v in pairs if type(n) is str and _is_int(v)]
                    row, values = [n for n, _ in sound], [v for _, v in sound]
                yield Mention((*path, *steps), row, values, "tensor", leaf)
            case [_, *_]:
                below = (*path, *steps)
                inner = leaf or _registered_leaf(below, node)
                levels.append((below, inner, children_of(node)))


def references(root: Node) -> Iterator[Reference]:
    """Yield every mention of a tensor's number, in the order of the tree."""
    for mention in mentions(root):
        yield from mention.references()


def check_numbers(numbers: Sequence[int], count: int) -> None:
    """Check that a manifest of ``count`` tensors has all of these numbers.

    Raises:
        RemoteProtocolError: it lacks one.
    """
    if numbers and not 0 <= min(numbers) <= max(numbers) < count:
        wrong = next(number for number in numbers if not 0 <= number < count)
        raise RemoteProtocolError(f"the tree names tensor {wrong}")


def tensor_leaves(node: Node) -> Iterator[tuple[Path, int]]:
    """Yield the path and the number of each tensor, in the order of the tree.

    Unlike readable paths these never coincide within one tree. Blobs are left out:
    they are no tensors of the state dict.
    """
    return (
        (path, number) for path, kind, number, _ in references(node) if kind == "tensor"
    )


def registered(root: Node) -> Iterator[tuple[Path, str, Node]]:
    """Yield path, tag and payload of every registered leaf that is in no other one."""
    stack: list[tuple[Path, Any]] = [((), root)]
    while stack:
        raise_if_cancelled()
        path, node = stack.pop()
        if (leaf := _registered_leaf(path, node)) is not None:
            yield *leaf, node[2]
        else:
            # Plain values hold nothing, and a peer may send half a million of them.
            children = children_of(node)
            below = [
                ((*path, *steps), child)
                for steps, child in children
                if type(child) is list
            ]
            stack += reversed(below)


def renumber(node: Node, numbers: Sequence[int]) -> None:
    """Replace each tensor number ``n`` of our own tree by ``numbers[n]``, in place."""
    if numbers == range(len(numbers)):
        return
    stack: list[Any] = [node]
    while stack:
        match stack.pop():
            case ["tensor" | "blob", int(number)] as reference:
                reference[1] = numbers[number]
            case ["tensors", _, old] as reference:
                reference[2] = [numbers[n] for n in old]
            case [_, *_] as other:
                stack += (child for _, child in children_of(other))


def _registered_leaf(path: Path, node: Any) -> _Leaf:
    match node:
        case ["ext", str(tag), _] if not tag.startswith((NAMED_TUPLE, PYTREE)):
            return path, tag
    return None


def _is_int(value: object) -> bool:
    return isinstance(value, int)
