"""``into=``: find the memory of a template that a manifest's bytes belong to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from aiockpt._distributed import TAGS, has_version
from aiockpt._gc import collector_paused
from aiockpt._groups import Backing
from aiockpt._wholes import layouts
from aiockpt.errors import (
    RemoteProtocolError,
    TemplateMismatchError,
    UnsupportedLeafError,
)
from aiockpt.flatten import Description, describe
from aiockpt.wire.limits import Limits
from aiockpt.wire.manifest import (
    COMPACTED,
    CONJ,
    NEG,
    PARAMETER,
    REQUIRES_GRAD,
    Manifest,
    TensorSpec,
)
from aiockpt.wire.paths import Path, format_path
from aiockpt.wire.references import Reference, references

__all__ = ["Match", "Template"]

# What a tensor is here, and how it travelled, need not agree.
_LOCAL_FLAGS = PARAMETER | REQUIRES_GRAD | COMPACTED

_REMEDY = (
    "what it is made of cannot be received into; put None in its place, "
    "and take it from what the receive returns"
)


@dataclass(frozen=True, slots=True)
class Match:
    """A template that fits.

    Attributes:
        backings: The template's memory, one per entry of the manifest; nothing (zero
            bytes) for an entry that carries no tensor of the template.
        tensors: The template's tensors by the manifest's tensor number.
        parts: Numbers of tensors that registered leaves are made of. A leaf is a
            value: it is made anew from what arrived, and never filled.
        blobs: Numbers of tensors that hold the bytes of values.
        wholes: The template's distributed tensors, by the `id` of a local tensor.
    """

    backings: Sequence[Backing]
    tensors: Mapping[int, torch.Tensor]
    parts: Set[int]
    blobs: Set[int]
    wholes: Mapping[int, torch.Tensor]

    def changed(self) -> list[torch.Tensor]:
        """Return every tensor of the template that has other elements once filled."""
        wholes = filter(has_version, self.wholes.values())
        return [*self.tensors.values(), *wholes]


class Template:
    """A state dict to receive into.

    Raises:
        UnsupportedLeafError: it has a leaf that no checkpoint can hold, a tensor
            whose memory cannot be written, or a registered leaf with tensors in it.
    """

    def __init__(
        self, state_dict: object, *, limits: Limits, allow_pickle: bool
    ) -> None:
        self._own = describe(
            state_dict, limits=limits, allow_pickle=allow_pickle, writing=True
        )
        self._numbers = dict(_own_tensors(self._own))
        self._limits = limits

    def __repr__(self) -> str:
        return f"<Template tensors={len(self._numbers)}>"

    def match(self, manifest: Manifest) -> Match:
        """Return where the checkpoint goes, tensor by tensor, matched by path.

        Values may differ, registered leaves among them; flags such as
        ``requires_grad`` too.

        Raises:
            TemplateMismatchError: a tensor is missing or left over, or differs in
                dtype, shape, stride, or in what shares its memory.
            RemoteProtocolError: the tree names a tensor that there is not.
        """
        with collector_paused():
            return self._match(manifest)

    def _match(self, manifest: Manifest) -> Match:
        theirs: list[tuple[Path, int]] = []
        values: list[Reference] = []
        for each in references(manifest.tree):
            if not 0 <= each.number < manifest.tensor_count:
                raise RemoteProtocolError(f"the tree names tensor {each.number}")
            if each.kind == "tensor" and _is_filled(each):
                theirs.append((each.path, each.number))
            else:
                values.append(each)
        if self._own.wholes or any(tag.encode() in manifest.header for tag in TAGS):
            self._same_layouts(manifest)
        _same_paths(dict(theirs), self._numbers)
        pairing = _Pairing(manifest, self._own)
        for path, number in theirs:
            pairing.add(path, number, self._numbers[path])
        return pairing.match(values)

    def _same_layouts(self, manifest: Manifest) -> None:
        own, limits = self._own, self._limits
        mine = layouts(own.tree, count=len(own.tensors), limits=limits)
        theirs = layouts(manifest.tree, count=manifest.tensor_count, limits=limits)
        for path in {**theirs, **mine}:
            one, other = theirs.get(path), mine.get(path)
            if one is None or other is None or one.comparable() != other.comparable():
                nothing = "no distributed tensor"
                expected, actual = (str(each or nothing) for each in (one, other))
                raise _mismatch(path, expected=expected, actual=actual)


def _is_filled(reference: Reference) -> bool:
    """Say whether a tensor is one of the state dict, or a local part of one."""
    return reference.leaf is None or reference.leaf[1] in TAGS


def _own_tensors(own: Description) -> Iterator[tuple[Path, int]]:
    """Yield the tensors to fill, and refuse those that a leaf is made of.

    A sparse tensor's indices are valid for its size alone, and nothing compares that
    with the sender's: once they were filled, reading it would leave its memory.
    """
    for each in references(own.tree):
        if each.kind == "tensor":
            if each.leaf is not None and not _is_filled(each):
                where, tag = each.leaf
                raise UnsupportedLeafError(format_path(where), tag, _REMEDY)
            yield each.path, each.number


def _same_paths(theirs: Mapping[Path, int], own: Mapping[Path, int]) -> None:
    for path in theirs:
        if path not in own:
            raise _mismatch(path, expected="a tensor", actual="nothing")
    for path in own:
        if path not in theirs:
            raise _mismatch(path, expected="nothing", actual="a tensor")


def _mismatch(path: Path, *, expected: str, actual: str) -> TemplateMismatchError:
    return TemplateMismatchError(format_path(path), expected=expected, actual=actual)


class _Pairing:
    """Pairs their tensors and entries with ours, one to one."""

    def __init__(self, manifest: Manifest, own: Description) -> None:
        self._manifest = manifest
        self._own = own
        self._tensors = _Bijection()
        self._entries = _Bijection()

    def add(self, path: Path, number: int, own_number: int) -> None:
        if self._is_plain_pair(number, own_number):
            self._entries.add(path, number, own_number)
        else:
            self._compare(path, number, own_number)
        self._tensors.add(path, number, own_number)

    def _is_plain_pair(self, number: int, own_number: int) -> bool:
        """Say whether both are dense tensors of one dtype and shape: most are."""
        entries, storages = self._manifest.entries, self._own.storages
        if number >= len(entries) or own_number >= len(storages):
            return False
        theirs, own = entries[number], storages[own_number]
        return theirs.dtype == own.dtype_code and theirs.shape == own.shape

    def _compare(self, path: Path, number: int, own_number: int) -> None:
        theirs, own = self._manifest.tensor(number), self._own.spec(own_number)
        if _comparable(theirs) != _comparable(own):
            raise _mismatch(path, expected=_words(theirs), actual=_words(own))
        self._entries.add(path, theirs.storage, own.storage)

    def match(self, values: Sequence[Reference]) -> Match:
        self._keep_apart(values)
        own, nothing = self._own, Backing(torch.empty(0), 0, 0)
        entries, numbers = self._entries.there, self._tensors.there
        return Match(
            [
                own.backings[entries[entry]] if entry in entries else nothing
                for entry in range(len(self._manifest.entries))
            ],
            {number: own.tensors[mine] for number, mine in numbers.items()},
            {value.number for value in values if value.kind == "tensor"},
            {value.number for value in values if value.kind == "blob"},
            own.wholes,
        )

    def _keep_apart(self, values: Sequence[Reference]) -> None:
        """Refuse a value in memory that is filled: it would change once it is made."""
        for path, _, number, _ in values:
            if self._manifest.tensor(number).storage in self._entries.there:
                memory = "a value in the memory of a tensor"
                raise _mismatch(path, expected=memory, actual="tensors only")


class _Bijection:
    """A mapping that must also hold backwards: what is shared there is shared here."""

    def __init__(self) -> None:
        self.there: dict[int, int] = {}
        self._back: dict[int, int] = {}

    def add(self, path: Path, theirs: int, own: int) -> None:
        if self.there.setdefault(theirs, own) != own:
            raise _mismatch(
                path, expected="memory shared with another tensor", actual="its own"
            )
        if self._back.setdefault(own, theirs) != theirs:
            raise _mismatch(
                path, expected="memory of its own", actual="memory that is shared"
            )


def _comparable(spec: TensorSpec) -> tuple[object, ...]:
    """What must be equal; strides of dimensions of one element mean nothing."""
    stride: tuple[int, ...] = ()
    if 0 not in spec.shape:
        stride = tuple(
            step for size, step in zip(spec.shape, spec.stride, strict=True) if size > 1
        )
    return spec.dtype, spec.shape, stride, spec.offset, spec.flags & ~_LOCAL_FLAGS


def _words(spec: TensorSpec) -> str:
    lazy = " conjugated" * bool(spec.flags & CONJ) + " negated" * bool(spec.flags & NEG)
    return f"{spec.dtype} {list(spec.shape)} stride {list(spec.stride)}{lazy}"
