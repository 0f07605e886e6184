"""Where a tree refers to tensors: to name them, to pair two trees, to renumber one.

Nothing is decoded or looked up. A malformed node counts as empty, so the readers here
work on a tree that `decode_tree` is going to refuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeGuard

from aiockpt.format.limits import look
from aiockpt.format.paths import NAMED_TUPLE, PYTREE, Node, Path, format_path
from aiockpt.format.tree import children_of

__all__ = [
    "Mention",
    "Reference",
    "mentions",
    "references",
    "registered",
    "renumber",
    "tensor_leaves",
    "tensor_paths",
]


STRUCTURES: Final = (NAMED_TUPLE, PYTREE)


class Reference(NamedTuple):
    """One mention of a tensor's number.

    ``leaf`` is the path and tag of the outermost registered leaf around it: the
    tensor is a part of that leaf's payload then, and none of the state dict's own.
    """

    path: Path
    kind: str
    number: int
    leaf: tuple[Path, str] | None


class Mention(NamedTuple):
    """Tensors that the tree names in a row below one path; most trees have few rows.

    ``names`` are the last steps of their paths; None for a single tensor that is at
    ``path`` itself. Kind and leaf are as in a `Reference`.
    """

    path: Path
    names: Sequence[object] | None
    numbers: Sequence[int]
    kind: str
    leaf: tuple[Path, str] | None

    def references(self) -> Iterator[Reference]:
        """Yield its references one by one."""
        if self.names is None:
            yield Reference(self.path, self.kind, self.numbers[0], self.leaf)
            return
        for name, number in zip(self.names, self.numbers, strict=True):
            yield Reference((*self.path, name), self.kind, number, self.leaf)


_Level: TypeAlias = tuple[Path, "tuple[Path, str] | None", Iterator[tuple[Path, Node]]]


def tensor_paths(node: Node) -> dict[int, str]:
    """Return where each tensor number (blobs included) appears first in the tree."""
    paths: dict[int, str] = {}
    for path, _, number, _ in references(node):
        if number not in paths:
            paths[number] = format_path(path)
    return paths


def tensor_leaves(node: Node) -> Iterator[tuple[Path, int]]:
    """Yield the path and the number of each tensor, in the order of the tree.

    Unlike readable paths these never coincide within one tree. Blobs are left out:
    they are no tensors of the state dict.
    """
    return (
        (path, number) for path, kind, number, _ in references(node) if kind == "tensor"
    )


def references(root: Node) -> Iterator[Reference]:
    """Yield every mention of a tensor's number, in the order of the tree.

    Its ``kind`` is ``"tensor"`` or ``"blob"``.
    """
    for mention in mentions(root):
        yield from mention.references()


def mentions(root: Node) -> Iterator[Mention]:
    """Yield every mention of tensors' numbers in the order of the tree, row by row."""
    # A stack of iterators: no peer's tree makes this recursive, or hold more than
    # one path per level.
    levels: list[_Level] = [((), None, iter([((), root)]))]
    while levels:
        look()
        path, leaf, children = levels[-1]
        names: list[object] = []
        numbers: list[int] = []
        for steps, node in children:
            if steps and _is_tensor(node):
                names.append(steps[0])
                numbers.append(node[1])
            elif isinstance(node, list) and node:
                break
        else:
            levels.pop()
            node = None
        if names:
            yield Mention(path, names, numbers, "tensor", leaf)
        match node:
            case ["tensor" | "blob" as kind, int(number)]:
                yield Mention((*path, *steps), None, (number,), str(kind), leaf)
            case ["tensors", list(keys), list(values)]:
                yield _row((*path, *steps), keys, values, leaf)
            case [_, *_]:
                below = (*path, *steps)
                levels.append((below, leaf or _leaf(below, node), children_of(node)))


def _is_tensor(node: Node) -> TypeGuard[list[Any]]:
    return (
        type(node) is list
        and len(node) == 2
        and node[0] == "tensor"
        and isinstance(node[1], int)
    )


def _row(
    path: Path, names: list[Any], numbers: list[Any], leaf: tuple[Path, str] | None
) -> Mention:
    """Return the mention of a node, without what is malformed in it."""
    kinds = ({*map(type, names)}, {*map(type, numbers)})
    if kinds != ({str}, {int}) or len(names) != len(numbers):
        sound = [
            (name, number)
            for name, number in zip(names, numbers, strict=False)
            if isinstance(name, str) and isinstance(number, int)
        ]
        names, numbers = [name for name, _ in sound], [number for _, number in sound]
    return Mention(path, names, numbers, "tensor", leaf)


def _leaf(path: Path, node: list[Node]) -> tuple[Path, str] | None:
    match node:
        case ["ext", str(tag), _] if not tag.startswith(STRUCTURES):
            return path, tag
    return None


def registered(root: Node) -> Iterator[tuple[Path, str, Node]]:
    """Yield path, tag and payload of every registered leaf that is in no other one."""
    stack: list[tuple[Path, Node]] = [((), root)]
    while stack:
        path, node = stack.pop()
        match node:
            case ["ext", str(tag), payload] if not tag.startswith(STRUCTURES):
                yield path, str(tag), payload
            case [_, *_]:
                below = [((*path, *steps), child) for steps, child in children_of(node)]
                stack += reversed(below)


def renumber(node: Node, numbers: Sequence[int]) -> None:
    """Replace each tensor number ``n`` of our own tree by ``numbers[n]``, in place."""
    if numbers == range(len(numbers)):
        return
    stack: list[Node] = [node]
    while stack:
        match stack.pop():
            case ["tensor" | "blob", int(number)] as reference:
                reference[1] = numbers[number]
            case ["tensors", _, [*old]] as reference:
                reference[2] = [numbers[n] for n in old if isinstance(n, int)]
            case [_, *_] as other:
                stack += (child for _, child in children_of(other))
