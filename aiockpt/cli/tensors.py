"""Which tensors a checkpoint has, and where their elements are, from headers alone.

A Hugging Face directory holds tensors by name, and nothing else. So a tensor gets its
path with dots for a name, and any other value is refused. Nothing is read here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from aiockpt.cli.arguments import FLOATS
from aiockpt.cli.text import command_line, printable
from aiockpt.errors import MissingKeysError, StateDictError
from aiockpt.format.dtypes import CODES, itemsize
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.format.manifest import CONJ, NEG
from aiockpt.format.paths import Node, is_unicode
from aiockpt.state.catalogue import Catalogue
from aiockpt.state.mesh import Box
from aiockpt.state.reshard import BoxCopy, United
from aiockpt.state.selection import Selection, below, item
from aiockpt.state.trees import DICTS, items_of, number_of, tag_of
from aiockpt.storage.read import LoadSource

__all__ = ["CODE_OF", "TensorToWrite", "has_code", "is_name", "tensors_of"]

CODE_OF: Final = {name: code for code, name in CODES.items()}
"""The code that safetensors has for a dtype of torch; not all have one."""

_LAZY: Final = CONJ | NEG
_SHOWN: Final = 5


class TensorToWrite(NamedTuple):
    """A tensor to write.

    Attributes:
        name: Its name in the directory.
        path: Its path in the checkpoint.
        dtype: Its dtype in the checkpoint.
        shape: Its logical shape.
        boxes: The boxes of the sources' pieces that bring all of its elements.
        cast: The dtype that it is written with.
    """

    name: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    boxes: Sequence[BoxCopy]
    cast: str

    @property
    def nbytes(self) -> int:
        """Its bytes in the directory."""
        return math.prod(self.shape) * itemsize(self.cast)

    @property
    def source_bytes(self) -> int:
        """Its bytes as they are read."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def memory(self) -> int:
        """The memory while it is read and cast.

        What is not contiguous in the source and in the tensor is in spare memory first.
        """
        return 2 * self.source_bytes + (self.nbytes if self.cast != self.dtype else 0)

    @property
    def elements(self) -> object:
        """What is equal for tensors of the same elements in the same memory."""
        boxes = ((copy.piece, copy.box) for copy in self.boxes)
        where = (
            (piece.source, piece.start, piece.stop, piece.stride, piece.flags & _LAZY)
            for piece, _ in boxes
        )
        return self.dtype, self.shape, (*where,), (*(box for _, box in boxes),)

    def rows(self, first: int, stop: int) -> TensorToWrite:
        """Return some rows of it."""
        boxes: list[BoxCopy] = []
        for copy in self.boxes:
            box = copy.box
            start, end = box.mine[0], box.mine[0] + box.sizes[0]
            low, high = max(first, start), min(stop, end)
            if low < high:
                part = Box(
                    mine=(low - first, *box.mine[1:]),
                    theirs=(box.theirs[0] + low - start, *box.theirs[1:]),
                    sizes=(high - low, *box.sizes[1:]),
                )
                boxes.append(copy._replace(box=part))
        return self._replace(shape=(stop - first, *self.shape[1:]), boxes=boxes)


def is_name(name: str) -> bool:
    """Say whether a tensor of a safetensors file can have a name."""
    return name not in ("", "__metadata__") and is_unicode(name)


def has_code(dtype: str, shape: Sequence[int]) -> bool:
    """Say whether a safetensors file can have a tensor."""
    code = CODE_OF.get(dtype)
    return code is not None and (code != "F4" or len(shape) > 0)


def tensors_of(
    source: Path,
    sources: Sequence[LoadSource],
    united: United,
    *,
    select: Sequence[str] | None,
    rename: Sequence[tuple[str, str]],
    dtype: str | None,
) -> list[TensorToWrite]:
    """Return the selected tensors in the order of the checkpoint.

    Tied tensors are there once, under the first of their names.

    Args:
        source: The checkpoint, for errors.
        sources: Its files.
        united: Their trees as one.
        select: The dotted paths to take, each with everything below it; None: all.
        rename: Prefixes of names, and what takes their place.
        dtype: What floating tensors are cast to; None: they stay.

    Raises:
        MissingKeysError: a selected path is not there.
        StateDictError: a value is no tensor, a tensor has no name or no dtype in such
            a directory, or two have the same name.
    """
    selection = Selection(select)
    leaves = [*_leaves(united.tree, (), "", selection, chosen=selection.everything)]
    if lost := selection.unmet():
        raise MissingKeysError(str(source), lost)
    others = [path for path, _, node in leaves if tag_of(node) != "tensor"]
    if others or not leaves:
        _refuse_values(source, united.tree, others)
    naming = _Naming(source, rename)
    facts = _Facts(sources, united)
    found: dict[str, TensorToWrite] = {}
    for path, steps, node in leaves:
        number = number_of(node, path)
        tensor = facts.tensor(naming.name(path, steps), path, number, dtype)
        if tensor.name in found:
            raise StateDictError(
                f"{source}: {found[tensor.name].path} and {path} both get the name "
                f"{tensor.name!r}: choose one with --select, or another --rename"
            )
        _check_dtype(source, tensor)
        found[tensor.name] = tensor
    naming.check()
    return _written_once([*found.values()])


def _leaves(
    node: Node,
    steps: tuple[object, ...],
    path: str,
    selection: Selection,
    *,
    chosen: bool,
) -> Iterator[tuple[str, tuple[object, ...], Node]]:
    """Yield path, steps and node of each selected value in dicts, lists and tuples."""
    chosen = chosen or selection.takes(path)
    tag = tag_of(node)
    # A selection enters no tuple: it is one value.
    if tag in DICTS or tag == "list" or (tag == "tuple" and chosen):
        if chosen or selection.enters(path):
            for key, each in (items_of(node) or {}).items():
                inner = below(path, key) if tag in DICTS else item(path, _index(key))
                yield from _leaves(each, (*steps, key), inner, selection, chosen=chosen)
    elif chosen:
        yield path, steps, node


def _index(key: object) -> int:
    assert isinstance(key, int)
    return key


def _refuse_values(source: Path, tree: Node, others: Sequence[str]) -> None:
    """Refuse what is no tensor, and say what could be written.

    Raises:
        StateDictError: always.
    """
    shown = ", ".join(path or "the whole" for path in others[:_SHOWN])
    if len(others) > _SHOWN:
        shown += f" and {len(others) - _SHOWN} more"
    fault = f"{shown}: no tensor" if others else "there are no tensors"
    parts = [*_parts_of_tensors(tree, "")]
    best = max(parts, key=lambda path: "model" in path, default=None)
    if best:
        remedy = f"choose what to write, such as {command_line('--select', best)}"
    else:
        remedy = "save the tensors under a key of their own, and --select that"
    raise StateDictError(
        f"{source}: {fault}, and a Hugging Face directory holds nothing else: {remedy}"
    )


def _parts_of_tensors(node: Node, path: str) -> Iterator[str]:
    """Yield the paths of the largest dicts that hold tensors and nothing else."""
    leaves = [
        tag_of(each) for *_, each in _leaves(node, (), "", Selection(None), chosen=True)
    ]
    if path and leaves and {*leaves} == {"tensor"}:
        yield path
    elif "tensor" in leaves and tag_of(node) in DICTS:
        for key, each in (items_of(node) or {}).items():
            yield from _parts_of_tensors(each, below(path, key))


class _Naming:
    """Gives tensors their names, and remembers which prefixes it has met."""

    def __init__(self, source: Path, rename: Sequence[tuple[str, str]]) -> None:
        self._source = source
        self._rename = dict(rename)
        self._unmet = dict.fromkeys(self._rename)

    def name(self, path: str, steps: Iterable[object]) -> str:
        """Return the name of a tensor: its path with dots, and other prefixes.

        Raises:
            StateDictError: there is none.
        """
        words: list[str] = []
        for step in steps:
            if type(step) not in (str, int):
                detail = f"a key of {path} has the type {type(step).__name__}"
                self._refuse(f"{detail}, which no name of a tensor can hold")
            words.append(f"{step}")
        name = ".".join(words)
        fits = [old for old in self._rename if _begins(name, old)]
        if fits:
            old = max(fits, key=len)
            self._unmet.pop(old, None)
            rest = name[len(old) :].removeprefix(".")
            name = ".".join(filter(None, (self._rename[old], rest)))
        if not is_name(name):
            said = f"{path or 'the whole'} gets the name {name!r}"
            self._refuse(f"{said}, which no tensor of a safetensors file can have")
        return name

    def check(self) -> None:
        """Refuse a prefix that no tensor has.

        Raises:
            StateDictError: there is one.
        """
        for old in self._unmet:
            self._refuse(f"no tensor has a name that begins with {old!r} (--rename)")

    def _refuse(self, fault: str) -> None:
        raise StateDictError(f"{self._source}: {fault}")


def _begins(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


class _Facts:
    """What the headers of the sources say about the tensors of their united tree."""

    def __init__(self, sources: Sequence[LoadSource], united: United) -> None:
        manifests = [each.segment.manifest for each in sources]
        self._pieces = Catalogue(manifests, limits=FILE_LIMITS, tree=["dict", [], []])
        self._joined = united

    def tensor(
        self, name: str, path: str, number: int, dtype: str | None
    ) -> TensorToWrite:
        """Return a tensor by its number in the tree."""
        boxes: Sequence[BoxCopy]
        if number < len(self._pieces):  # it is whole in one source
            fact = self._pieces.piece(number)
            zero = (0,) * len(fact.shape)
            local = number - self._pieces.numbers_of(fact.source).start
            boxes = [BoxCopy(fact, local, Box(zero, zero, fact.shape))]
            if 0 in fact.shape:
                boxes = []
            made, shape = fact.dtype, fact.shape
        else:
            spec = self._joined.manifest.tensor(number - len(self._pieces))
            boxes = self._joined.copies[spec.storage]
            made, shape = spec.dtype, spec.shape
        cast = dtype if dtype and made in FLOATS else made
        return TensorToWrite(name, path, made, shape, boxes, cast)


def _check_dtype(source: Path, tensor: TensorToWrite) -> None:
    """Refuse a dtype that safetensors cannot say.

    Raises:
        StateDictError: it cannot.
    """
    if not has_code(tensor.cast, tensor.shape):
        raise StateDictError(
            f"{source}: {tensor.path} has the dtype {tensor.dtype} and the shape "
            f"{[*tensor.shape]}, which safetensors cannot say"
        )


def _written_once(tensors: Sequence[TensorToWrite]) -> list[TensorToWrite]:
    """Return the tensors without those that are tied to one before them."""
    found: dict[object, TensorToWrite] = {}
    tied: list[str] = []
    for tensor in tensors:
        key = tensor.elements if tensor.boxes else tensor.name
        first = found.setdefault(key, tensor)
        if first is not tensor:
            tied.append(f"{tensor.name} (as {first.name})")
    if tied:
        shown = printable(", ".join(tied[:_SHOWN]))
        more = f" and {len(tied) - _SHOWN} more" if len(tied) > _SHOWN else ""
        print(
            f"aiockpt: tied tensors are written once; the model ties {shown}{more}",
            file=sys.stderr,
        )
    return [*found.values()]
