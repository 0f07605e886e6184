"""Which tensors a checkpoint has, and where their elements are, from headers alone.

A Hugging Face directory holds tensors by name, and nothing else. So a tensor gets its
path with dots for a name, and any other value is refused. Nothing is read here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from aiockpt.cli.arguments import FLOATS
from aiockpt.errors import MissingKeysError, StateDictError
from aiockpt.format.dtypes import CODES, itemsize
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.format.manifest import CONJ, NEG
from aiockpt.format.paths import Node, is_unicode
from aiockpt.runtime.words import command_line, printable
from aiockpt.state.catalogue import Catalogue
from aiockpt.state.composing import BoxCopy
from aiockpt.state.mesh import Box
from aiockpt.state.reshard import United
from aiockpt.state.selection import Selection, below, item
from aiockpt.state.trees import DICTS, items_of, number_of, tag_of
from aiockpt.storage.read import LoadSource

CODE_OF: Final = {name: code for code, name in CODES.items()}
"""The code that safetensors has for a dtype of torch; not all have one."""

_LAZY: Final = CONJ | NEG
_MAX_SHOWN: Final = 5


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
    source: str,
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
    catalogue = Catalogue(
        [each.segment.manifest for each in sources],
        limits=FILE_LIMITS,
        tree=["dict", [], []],
    )
    selection = Selection(select)
    leaves = [*_leaves(united.tree, (), "", selection, chosen=selection.everything)]
    if lost := selection.unmet():
        raise MissingKeysError(source, lost)
    others = [path for path, _, node in leaves if tag_of(node) != "tensor"]
    if others or not leaves:
        _refuse_values(source, united.tree, others)
    met, found = set[str | None](), dict[str, TensorToWrite]()
    for path, steps, node in leaves:
        name, prefix = _name_of(source, path, steps, dict(rename))
        met.add(prefix)
        if name in found:
            raise StateDictError(
                f"{source}: {found[name].path} and {path} both get the name {name!r}: "
                "choose one with --select, or another --rename"
            )
        found[name] = tensor = _tensor_of(
            name, path, number_of(node, path), catalogue, united, dtype
        )
        if not has_code(tensor.cast, tensor.shape):
            raise StateDictError(
                f"{source}: {path} has the dtype {tensor.dtype} and the shape "
                f"{[*tensor.shape]}, which safetensors cannot say"
            )
    for old, _ in rename:
        if old not in met:
            detail = f"no tensor has a name that begins with {old!r} (--rename)"
            raise StateDictError(f"{source}: {detail}")
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
                if tag in DICTS:
                    inner = below(path, key)
                else:
                    assert isinstance(key, int)
                    inner = item(path, key)
                yield from _leaves(each, (*steps, key), inner, selection, chosen=chosen)
    elif chosen:
        yield path, steps, node


def _refuse_values(source: str, tree: Node, others: Sequence[str]) -> None:
    """Refuse what is no tensor, and say what could be written.

    Raises:
        StateDictError: always.
    """
    shown = ", ".join(path or "the whole" for path in others[:_MAX_SHOWN])
    if len(others) > _MAX_SHOWN:
        shown += f" and {len(others) - _MAX_SHOWN} more"
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


def _name_of(
    source: str, path: str, steps: Iterable[object], rename: Mapping[str, str]
) -> tuple[str, str | None]:
    """Return the name of a tensor, and the prefix that was replaced in it.

    The name is the path with dots. Of several prefixes, the longest is replaced.

    Raises:
        StateDictError: safetensors cannot hold such a name.
    """
    for step in steps:
        if type(step) not in (str, int):
            raise StateDictError(
                f"{source}: a key of {path} has the type {type(step).__name__}, which "
                "no name of a tensor can hold"
            )
    name = ".".join(map(str, steps))
    fits = [old for old in rename if not old or f"{name}.".startswith(f"{old}.")]
    old = max(fits, key=len, default=None)
    if old is not None:
        rest = name[len(old) :].removeprefix(".")
        name = ".".join(filter(None, (rename[old], rest)))
    if not is_name(name):
        raise StateDictError(
            f"{source}: {path or 'the whole'} gets the name {name!r}, which no tensor "
            "of a safetensors file can have"
        )
    return name, old


def _tensor_of(
    name: str,
    path: str,
    number: int,
    catalogue: Catalogue,
    united: United,
    dtype: str | None,
) -> TensorToWrite:
    """Return a tensor by its number in the united tree."""
    boxes: Sequence[BoxCopy] = ()
    if number < len(catalogue):  # it is whole in one source
        piece = catalogue.piece(number)
        made, shape = piece.dtype, piece.shape
        if 0 not in shape:
            zero = (0,) * len(shape)
            local = number - catalogue.numbers_of(piece.source).start
            boxes = [BoxCopy(piece, local, Box(zero, zero, shape))]
    else:
        spec = united.manifest.tensor(number - len(catalogue))
        boxes = united.copies[spec.storage]
        made, shape = spec.dtype, spec.shape
    cast = dtype if dtype and made in FLOATS else made
    return TensorToWrite(name, path, made, shape, boxes, cast)


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
        shown = printable(", ".join(tied[:_MAX_SHOWN]))
        more = f" and {len(tied) - _MAX_SHOWN} more" if len(tied) > _MAX_SHOWN else ""
        print(
            f"aiockpt: tied tensors are written once; the model ties {shown}{more}",
            file=sys.stderr,
        )
    return [*found.values()]
