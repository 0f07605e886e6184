"""A header as a table for people and as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from aiockpt.cli.outline import outline
from aiockpt.cli.text import counted, format_bytes, format_table, printable
from aiockpt.format.dtypes import CODES, itemsize
from aiockpt.format.manifest import (
    COMPACTED,
    CONJ,
    NEG,
    PARAMETER,
    REQUIRES_GRAD,
    ForeignHeader,
    Manifest,
)
from aiockpt.format.paths import format_path
from aiockpt.format.references import tensor_leaves

__all__ = ["as_json", "as_text"]

_FLAGS = {
    PARAMETER: "parameter",
    REQUIRES_GRAD: "requires_grad",
    CONJ: "conj",
    NEG: "neg",
    COMPACTED: "compacted",
}
_DIGESTS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One line of the table."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    entry: str
    flags: tuple[str, ...] = ()


def as_text(name: str, header: Manifest | ForeignHeader) -> str:
    """Return the report as lines."""
    parts = [_heading(name, header)]
    if isinstance(header, Manifest):
        parts += [_tree(header), _digests(header)]
    return "\n\n".join([*parts, _table(header)])


def as_json(name: str, header: Manifest | ForeignHeader) -> dict[str, object]:
    """Return the report as a JSON object; digests and tensors are complete."""
    report: dict[str, object] = {
        "source": name,
        "header_bytes": header.header_bytes,
        "segment_bytes": header.segment_bytes,
        "tensors": [_tensor_object(tensor) for tensor in _tensors(header)],
    }
    if isinstance(header, ForeignHeader):
        return {"format": "safetensors", **report, "metadata": header.metadata}
    facts = {
        "step": header.step,
        "snapshot": header.snapshot_id,
        "chunk_bytes": header.chunk_bytes,
        "algorithm": header.algorithm,
        "digests": list(header.digests),
        "tree": header.tree,
    }
    return {"format": "aiockpt", **report, **facts}


def _tensor_object(tensor: _Tensor) -> dict[str, object]:
    return {
        "path": tensor.path,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": tensor.nbytes,
        "entry": tensor.entry,
        "flags": list(tensor.flags),
    }


def _tensors(header: Manifest | ForeignHeader) -> Iterator[_Tensor]:
    if isinstance(header, ForeignHeader):
        for name, entry in zip(header.names, header.entries, strict=True):
            start, stop = entry.data_offsets
            dtype = CODES.get(entry.dtype, entry.dtype)
            yield _Tensor(name, dtype, entry.shape, stop - start, name)
        return
    for path, index in tensor_leaves(header.tree):
        if 0 <= index < header.tensor_count:  # the tree has not been decoded
            yield _described(header, index, format_path(path))


def _described(manifest: Manifest, index: int, path: str) -> _Tensor:
    spec = manifest.tensor(index)
    nbytes = math.prod(spec.shape) * itemsize(spec.dtype)
    entry = manifest.names[spec.storage]
    flags = tuple(word for flag, word in _FLAGS.items() if spec.flags & flag)
    return _Tensor(path, spec.dtype, spec.shape, nbytes, entry, flags)


def _heading(name: str, header: Manifest | ForeignHeader) -> str:
    size = f"{format_bytes(header.segment_bytes)} ({header.segment_bytes} bytes)"
    size += f" after a header of {format_bytes(header.header_bytes)}"
    lines = [f"{printable(name)}:"]
    if isinstance(header, ForeignHeader):
        lines += [f"  safetensors file, not written by aiockpt: {size}"]
        lines += [
            f"  {printable(key)}: {printable(value)[:200]}"
            for key, value in header.metadata.items()
        ]
        return "\n".join(lines)
    lines += [f"  step {header.step}, snapshot {header.snapshot_id}", f"  {size}"]
    return "\n".join(lines)


def _tree(manifest: Manifest) -> str:
    lines = [printable(line) for line in outline(manifest.tree)]
    return "\n".join(["Tree", *(f"  {line}" for line in lines)])


def _digests(manifest: Manifest) -> str:
    shown = manifest.digests[:_DIGESTS_SHOWN]
    size = format_bytes(manifest.chunk_bytes)
    count = counted(len(manifest.digests), "chunk")
    lines = [f"Digests: {count} of {size}, {manifest.algorithm}"]
    lines += [f"  {chunk:>3}  {digits}" for chunk, digits in enumerate(shown)]
    if len(manifest.digests) > len(shown):
        lines.append(f"  ... and {len(manifest.digests) - len(shown)} more (--json)")
    return "\n".join(lines)


def _table(header: Manifest | ForeignHeader) -> str:
    rows = [
        (
            printable(tensor.path) or "(the whole)",
            tensor.dtype,
            " x ".join(map(str, tensor.shape)) or "scalar",
            format_bytes(tensor.nbytes),
            _remarks(tensor),
        )
        for tensor in _tensors(header)
    ]
    total = format_bytes(header.segment_bytes)  # tensors that share bytes count once
    rows.append((counted(len(rows), "tensor"), "", "", total, ""))
    return format_table(("Tensor", "dtype", "shape", "size", ""), rows, right=(3,))


def _remarks(tensor: _Tensor) -> str:
    words = list(tensor.flags)
    if tensor.entry != tensor.path:
        words.append(f"in {printable(tensor.entry)}")
    return ", ".join(words)
