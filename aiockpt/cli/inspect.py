"""``aiockpt inspect``: what a checkpoint holds, from its header alone."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import msgspec

from aiockpt.cli.arguments import UsageError
from aiockpt.cli.paths import one_file
from aiockpt.cli.text import MAX_CELL, counted, format_bytes, format_table, some
from aiockpt.format.dtypes import CODES, itemsize
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.format.manifest import (
    COMPACTED,
    CONJ,
    NEG,
    PARAMETER,
    REQUIRES_GRAD,
    ForeignHeader,
    Manifest,
    TensorSpec,
)
from aiockpt.format.paths import PYTREE, Node, format_path, format_received
from aiockpt.format.paths import Path as TreePath
from aiockpt.format.references import tensor_leaves
from aiockpt.format.registry import REGISTRY
from aiockpt.format.tree import children_of, rebuilding
from aiockpt.http.protocol import Address
from aiockpt.runtime.words import clipped, printable
from aiockpt.storage.directory import expanded
from aiockpt.storage.interface import storage_at

_FLAGS = {
    PARAMETER: "parameter",
    REQUIRES_GRAD: "requires_grad",
    CONJ: "conj",
    NEG: "neg",
    COMPACTED: "compacted",
}
_ALWAYS_KNOWN = ("torch.", "numpy.", f"{PYTREE}torch.return_types.")
_HINT = " (--json)"
_MAX_DIGESTS = 8
_MAX_LINES = 30
_LINE_WIDTH = 200
_KEY_WIDTH = 60


def run(arguments: argparse.Namespace) -> int:
    """Print the report."""
    name, header = _read(arguments)
    if arguments.json:
        json.dump(_as_json(name, header), sys.stdout, indent=2)
        print()
    else:
        for line in _as_text(name, header):
            print(line)
    return 0


def _read(arguments: argparse.Namespace) -> tuple[str, Manifest | ForeignHeader]:
    """Return the header, and a name for it that holds no token."""
    what: Path | Address = arguments.what
    if isinstance(what, Address):
        if arguments.rank is not None:
            raise UsageError("--rank is for checkpoint directories")
        return what.origin.base_url, asyncio.run(_ask(what, arguments))
    if arguments.step is not None:
        raise UsageError("--step is for URLs: a file holds one step")
    path = one_file(what, arguments.rank)
    with storage_at(path).open() as file:
        return expanded(path), file.header(limits=FILE_LIMITS)


async def _ask(address: Address, arguments: argparse.Namespace) -> Manifest:
    from aiockpt.cli.peer import open_peer  # needs aiohttp, and a file does not

    async with open_peer([address], arguments) as peer:

        async def find(step: int) -> Manifest:
            return (await peer.find(step)).manifest

        return await peer.receive(find)


@dataclass(frozen=True, slots=True)
class _TensorLine:
    """One line of the table, and an object of the JSON document."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    entry: str
    flags: tuple[str, ...] = ()
    other_readers: str = ""


def _as_text(name: str, header: Manifest | ForeignHeader) -> Iterator[str]:
    """Yield the lines of the report."""
    yield from _heading(name, header)
    yield ""
    if isinstance(header, Manifest):
        yield "Tree"
        yield from (f"  {clipped(line, _LINE_WIDTH)}" for line in outline(header.tree))
        yield ""
        if strangers := _strangers(header):
            yield from (*strangers, "")
        yield from _digests(header)
        yield ""
    yield from _table(header)
    odd = (tensor for tensor in _tensors(header) if tensor.other_readers)
    if lines := [*some(odd, _MAX_LINES, _seen_by_others, _HINT)]:
        yield ""
        yield "Other readers of safetensors see these in another form:"
        yield from (f"  {line}" for line in lines)


def _seen_by_others(tensor: _TensorLine) -> str:
    seen = tensor.other_readers
    if seen == "absent":
        seen += f", only {clipped(tensor.entry, MAX_CELL)} is there"
    return f"{clipped(tensor.path, MAX_CELL) or '(the whole)'}: {seen}"


class _Streamed(list[object]):
    """Values that are made one by one while they are written as a JSON array."""

    def __init__(self, make: Callable[[], Iterator[object]]) -> None:
        super().__init__(islice(make(), 1))  # it is empty exactly if there are none
        self._make = make

    def __iter__(self) -> Iterator[object]:
        return self._make()


def _as_json(name: str, header: Manifest | ForeignHeader) -> dict[str, object]:
    """Return the report as a JSON object; digests and tensors are complete."""
    report: dict[str, object] = {
        "source": name,
        "header_bytes": header.header_bytes,
        "segment_bytes": header.segment_bytes,
        "tensors": _Streamed(lambda: map(_told, _tensors(header))),
    }
    if isinstance(header, ForeignHeader):
        return {"format": "safetensors", **report, "metadata": header.metadata}
    facts = {
        "step": header.step,
        "snapshot": header.snapshot_id,
        "chunk_bytes": header.chunk_bytes,
        "algorithm": header.algorithm,
        "digests": header.digests,
        "tree": header.tree,
    }
    return {"format": "aiockpt", **report, **facts}


def _told(tensor: _TensorLine) -> dict[str, object]:
    """Return a tensor as a JSON object; ``other_readers`` only if they see another."""
    found = asdict(tensor)
    if not tensor.other_readers:
        del found["other_readers"]
    return found


def _tensors(header: Manifest | ForeignHeader) -> Iterator[_TensorLine]:
    if isinstance(header, ForeignHeader):
        for name, entry in zip(header.names, header.entries, strict=True):
            start, stop = entry.data_offsets
            dtype = CODES.get(entry.dtype, entry.dtype)
            yield _TensorLine(name, dtype, entry.shape, stop - start, name)
        return
    for path, index in tensor_leaves(header.tree):
        if 0 <= index < header.tensor_count:  # the tree has not been decoded
            yield _described(header, index, format_path(path))


def _described(manifest: Manifest, index: int, path: str) -> _TensorLine:
    spec = manifest.tensor(index)
    nbytes = math.prod(spec.shape) * itemsize(spec.dtype)
    entry = manifest.names[spec.storage]
    flags = tuple(word for flag, word in _FLAGS.items() if spec.flags & flag)
    foreign = _foreign(manifest, spec, path)
    return _TensorLine(path, spec.dtype, spec.shape, nbytes, entry, flags, foreign)


def _foreign(manifest: Manifest, spec: TensorSpec, path: str) -> str:
    """Return what other safetensors readers get instead; "" if they get the tensor."""
    entry = manifest.entries[spec.storage]
    if manifest.names[spec.storage] != path:
        return "absent"
    if CODES[entry.dtype] != spec.dtype:
        return f"{CODES[entry.dtype]} {[*entry.shape]}"
    if entry.shape != spec.shape:
        return f"shape {[*entry.shape]}"
    words = [_FLAGS[flag] for flag in (CONJ, NEG) if spec.flags & flag]
    return f"values without {' and '.join(words)}" if words else ""


def _heading(name: str, header: Manifest | ForeignHeader) -> Iterator[str]:
    size = f"{format_bytes(header.segment_bytes)} ({header.segment_bytes} bytes)"
    size += f" after a header of {format_bytes(header.header_bytes)}"
    yield f"{printable(name)}:"
    if isinstance(header, Manifest):
        yield f"  step {header.step}, snapshot {clipped(header.snapshot_id, MAX_CELL)}"
        yield f"  {size}"
        return
    yield f"  safetensors file, not written by aiockpt: {size}"

    def fact(item: tuple[str, str]) -> str:
        return f"{clipped(item[0], MAX_CELL)}: {clipped(item[1], _LINE_WIDTH)}"

    facts = some(header.metadata.items(), _MAX_LINES, fact, _HINT)
    yield from (f"  {line}" for line in facts)


def _strangers(manifest: Manifest) -> list[str]:
    """Return lines that say what to register before a load; none if all is known."""
    found: dict[str, str] = {}
    stack: list[tuple[TreePath, Node]] = [((), manifest.tree)]
    while stack:
        path, node = stack.pop()
        match node:
            case ["ext", str(tag), _] if not (
                # Asked without torch, which a header does not need.
                tag.startswith(_ALWAYS_KNOWN) or REGISTRY.named(tag)
            ):
                found.setdefault(tag, format_received(path))
        below = [
            ((*path, *steps), child)
            for steps, child in children_of(node)
            if type(child) is list
        ]
        stack += reversed(below)
    if not found:
        return []
    lines = (
        f"  {clipped(where, MAX_CELL)}: {clipped(rebuilding(tag), _LINE_WIDTH)}"
        for tag, where in islice(found.items(), _MAX_LINES)
    )
    return ["Types that a load needs to know (see --import):", *lines]


def _digests(manifest: Manifest) -> Iterator[str]:
    size = format_bytes(manifest.chunk_bytes)
    count = counted(len(manifest.digests), "chunk")
    yield f"Digests: {count} of {size}, {manifest.algorithm}"
    lines = (f"{chunk:>3}  {digits}" for chunk, digits in enumerate(manifest.digests))
    yield from (f"  {line}" for line in some(lines, _MAX_DIGESTS, str, _HINT))


def _table(header: Manifest | ForeignHeader) -> Iterator[str]:
    total = format_bytes(header.segment_bytes)  # tensors that share bytes count once
    return format_table(
        ("Tensor", "dtype", "shape", "size", ""),
        map(_row, _tensors(header)),
        right=(3,),
        hint=_HINT,
        last=lambda count: (counted(count, "tensor"), "", "", total, ""),
    )


def _row(tensor: _TensorLine) -> tuple[str, ...]:
    remarks = list(tensor.flags)
    if tensor.entry != tensor.path:
        remarks.append(f"in {clipped(tensor.entry, MAX_CELL)}")
    return (
        tensor.path or "(the whole)",
        tensor.dtype,
        " x ".join(map(str, tensor.shape)) or "scalar",
        format_bytes(tensor.bytes),
        ", ".join(remarks),
    )


def outline(node: Node) -> list[str]:
    """Return the top level of an encoded tree, one line per child.

    A malformed node counts as one value: this reads headers that nobody has decoded.
    """
    kind, children = _open(node)
    if children is None:
        return [_describe(node)]
    if all(_open(child)[0] == "tensor" for _, child in children):
        return [_describe(node)]  # the table of tensors says the rest
    keys = [clipped(key, _KEY_WIDTH) for key, _ in children[:_MAX_LINES]]
    width = max(map(len, keys), default=0)

    def line(child: tuple[str, Node]) -> str:
        return f"{clipped(child[0], _KEY_WIDTH).ljust(width)}  {_describe(child[1])}"

    below = some(children, _MAX_LINES, line)
    return [f"{kind} of {len(children)}", *(f"  {each}" for each in below)]


def _describe(node: Node) -> str:
    kind, children = _open(node)
    if children is None:
        return kind
    tensors, values = _count(node)
    counts = [(tensors, "tensor"), (values, "value")]
    below = ", ".join(counted(count, what) for count, what in counts if count)
    return f"{kind} of {len(children)}: {below or 'empty'}"


def _count(node: Node) -> tuple[int, int]:
    """Return how many tensors and how many other leaves lie below."""
    tensors = values = 0
    stack = [node]
    while stack:
        kind, children = _open(stack.pop())
        if children is not None:
            stack += [child for _, child in children]
        elif kind == "tensor":
            tensors += 1
        else:
            values += 1
    return tensors, values


def _open(node: Node) -> tuple[str, list[tuple[str, Node]] | None]:
    """Return a node's kind, and its children by name unless it is a leaf."""
    match node:
        case ["list" | "tuple" | "set" | "frozenset" as kind, [*items]]:
            pass
        case ["deque" as kind, _, [*items]]:
            pass
        case ["tensors", [*keys], [*indices]]:
            return "dict", _keyed(keys, [["tensor", index] for index in indices])
        case ["odict", [*keys], [*values], *_]:
            return "OrderedDict", _keyed(keys, values)
        case ["dict", [*keys], [*values], *_]:
            return "dict", _keyed(keys, values)
        case ["defaultdict", _, [*keys], [*values]]:
            return "defaultdict", _keyed(keys, values)
        case ["ext", str(tag), child]:
            return tag, _open(child)[1]
        case _:
            return _leaf_kind(node), None
    return kind, [(f"[{index}]", item) for index, item in enumerate(items)]


def _keyed(keys: list[Node], values: list[Node]) -> list[tuple[str, Node]]:
    names = (
        key if isinstance(key, str) else msgspec.json.encode(key).decode()
        for key in keys
    )
    return list(zip(names, values, strict=False))


def _leaf_kind(node: Node) -> str:
    match node:
        case [str(tag), *_]:
            return tag
        case None:
            return "None"
        case str():
            return f"str {msgspec.json.encode(node[:60]).decode()}"
    return f"{type(node).__name__} {node}"
