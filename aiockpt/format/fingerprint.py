"""Fingerprints: sums over the elements of tensors, which do not know a mesh.

A fingerprint has one record for each tensor's path: the dtype and shape of the full
tensor, and sums of its words times keys of their global index. Sums of the parts of a
tensor add up to the sums of the full tensor, however it was cut. So the fingerprints of
all ranks add up to one that is equal on every mesh. `aiockpt.memory.multilinear` has
the arithmetic.

Several ranks may hold the same elements. The number of such a *replica* is the lowest
rank that holds a part of it. Only parts with the same number are added. A replica that
is complete becomes one of the record's *wholes*: the distinct sums of complete tensors.
A tensor without a layout is complete on each rank, so it is never added to another one.
If all replicas hold the same elements, the record has one whole. If they do not, it has
several, and `Fingerprint.require` refuses it.

Everything here is pure, and needs no torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from aiockpt.errors import FingerprintMismatchError, RemoteProtocolError
from aiockpt.format.dtypes import DTYPES
from aiockpt.format.limits import Limits, enforce, enforce_values

_VERSION: Final = 1
_MAX_ELEMENTS: Final = 2**56  # as in a layout
MAX_PATH_CHARACTERS: Final = 16 << 10
MAX_DIMENSIONS: Final = 64
_VALUES_PER_TENSOR: Final = 16  # of JSON: a record, its shape, a few sums and parts

Sums: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
"""The sums of both rows of keys, modulo 2**64, as 16 hexadecimal digits each."""

_Path: TypeAlias = Annotated[str, Meta(max_length=MAX_PATH_CHARACTERS)]
_Natural: TypeAlias = Annotated[int, Meta(ge=0, le=_MAX_ELEMENTS)]

NOTHING: Final = "0" * 32
"""The sums of no elements."""


def format_sums(first: int, second: int) -> str:
    """Return the sums of both rows of keys as text."""
    return f"{first % 2**64:016x}{second % 2**64:016x}"


class ReplicaPart(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The elements that are known of an incomplete replica.

    Attributes:
        replica: The number of the replica.
        count: How many elements were added.
        sums: Their sums.
    """

    replica: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    count: _Natural
    sums: Sums

    @classmethod
    def total(cls, parts: Sequence[ReplicaPart]) -> ReplicaPart:
        """Return the sum of parts of one replica."""
        if len(parts) == 1:
            return parts[0]
        first = sum(int(part.sums[:16], 16) for part in parts)
        second = sum(int(part.sums[16:], 16) for part in parts)
        count = sum(part.count for part in parts)
        return cls(parts[0].replica, count, format_sums(first, second))


class TensorSums(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The record of one tensor in a fingerprint.

    Attributes:
        path: The path of the tensor.
        dtype: Torch's name of its dtype.
        shape: The shape of the full tensor.
        plain: Whether no rank has a layout of it: each has all of it.
        wholes: The distinct sums of complete replicas, ascending.
        parts: The incomplete replicas, by ascending number. An element counts once.
    """

    path: _Path
    dtype: Annotated[str, Meta(max_length=40)]
    shape: Annotated[tuple[_Natural, ...], Meta(max_length=MAX_DIMENSIONS)]
    plain: bool
    wholes: tuple[Sums, ...]
    parts: tuple[ReplicaPart, ...]

    @classmethod
    def of(
        cls,
        path: str,
        dtype: str,
        shape: tuple[int, ...],
        parts: Iterable[ReplicaPart],
        *,
        plain: bool = False,
    ) -> TensorSums:
        """Return the record of these parts; those of the same replica are added."""
        if not (count := math.prod(shape)):
            return cls(path, dtype, shape, plain, (NOTHING,), ())
        replicas = defaultdict[int, list[ReplicaPart]](list)
        for part in parts:
            replicas[part.replica].append(part)
        found = {nth: ReplicaPart.total(some) for nth, some in replicas.items()}
        wholes = {each.sums for each in found.values() if each.count == count}
        rest = (found[nth] for nth in sorted(found) if found[nth].count != count)
        return cls(path, dtype, shape, plain, (*sorted(wholes),), (*rest,))

    @classmethod
    def total(cls, records: Sequence[TensorSums]) -> TensorSums | None:
        """Return the sum of records of one path; None for different plain tensors.

        Raises:
            FingerprintMismatchError: they are parts of different tensors.
        """
        first, *others = records
        if not others:
            return first
        if all(each.plain for each in records):
            return first if all(each == first for each in others) else None
        for each in others:
            if (each.dtype, each.shape) != (first.dtype, first.shape):
                detail = f"is {first.kind} on one rank and {each.kind} on another one"
                raise FingerprintMismatchError({first.path: f"{first.path} {detail}"})
        parts = [part for each in records for part in each.parts]
        found = cls.of(first.path, first.dtype, first.shape, parts)
        wholes = {sums for each in (*records, found) for sums in each.wholes}
        return msgspec.structs.replace(found, wholes=(*sorted(wholes),))

    @property
    def kind(self) -> str:
        """The dtype and the shape, for messages."""
        return f"{self.dtype} {[*self.shape]}"

    def fault(self, side: str) -> str:
        """Return why nothing can be compared with this record; empty if it can be.

        Args:
            side: Which fingerprint has it, for the message.
        """
        path = self.path or "the state dict"
        if len(self.wholes) > 1:
            return f"the replicas of {path} differ from each other in {side}"
        if self.wholes:
            return ""
        most = max((part.count for part in self.parts), default=0)
        if most < (count := math.prod(self.shape)):
            remedy, thousandths = "add up the ranks first", 1000 * most // count
        else:
            remedy, thousandths = "a rank was added twice", -(-1000 * most // count)
        # Rounded away from 100 %, which would contradict the remedy.
        return f"{side} covers {thousandths / 10:g} % of {path}: {remedy}"


class _FingerprintDocument(Struct, frozen=True, forbid_unknown_fields=True):
    """A fingerprint as JSON."""

    aiockpt: int
    tensors: list[TensorSums]
    by_rank: list[_Path]


_DOCUMENT: Final = msgspec.json.Decoder(_FingerprintDocument)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the tensors of a state dict hold, in a few bytes for each tensor.

    :func:`aiockpt.fingerprint` makes one. ``+`` adds those of several ranks. The sum
    of all ranks is the same on every mesh. It is a check against faults, such as a
    flipped bit or a shard in the wrong place. It gives no protection against somebody
    who makes a state dict with the same fingerprint on purpose.

    Attributes:
        tensors: The record of each tensor, by path.
        by_rank: The paths of plain tensors that differ between ranks, such as the
            states of random number generators. They are left out of a comparison. If
            all ranks should have the same weight, its path here shows a fault.
    """

    tensors: Mapping[str, TensorSums] = field(default_factory=dict)
    by_rank: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Fingerprint tensors={len(self.tensors)} by_rank={len(self.by_rank)}>"

    def __add__(self, other: Fingerprint) -> Fingerprint:
        """Return the fingerprint of what both describe, such as two ranks.

        Raises:
            FingerprintMismatchError: the two have parts of different tensors at a path.
        """
        if not isinstance(other, Fingerprint):
            return NotImplemented
        return Fingerprint.total([self, other])

    @classmethod
    def total(cls, fingerprints: Iterable[Fingerprint]) -> Fingerprint:
        """Return the fingerprint of what several describe, such as all ranks.

        Raises:
            FingerprintMismatchError: they have parts of different tensors at a path.
        """
        records = defaultdict[str, list[TensorSums]](list)
        by_rank = set[str]()
        for each in fingerprints:
            by_rank.update(each.by_rank)
            for path, record in each.tensors.items():
                records[path].append(record)
        found = dict[str, TensorSums]()
        for path in [path for path in records if path not in by_rank]:
            if (record_of_all := TensorSums.total(records[path])) is None:
                by_rank.add(path)
            else:
                found[path] = record_of_all
        return cls(found, (*sorted(by_rank),))

    @property
    def is_whole(self) -> bool:
        """Whether each tensor has at least one complete replica."""
        return all(each.wholes for each in self.tensors.values())

    def require(self, theirs: Fingerprint) -> list[str]:
        """Check that the tensors are those of another fingerprint, bit by bit.

        The paths of this fingerprint are compared, each with all of its complete
        replicas. A plain tensor equals a distributed one with the same elements.
        Paths that are in ``by_rank`` of either fingerprint are left out. Check that
        these are only those that you expect to differ by rank. If no tensor remains,
        that is an error. Two fingerprints without any path are equal.

        Returns:
            The paths that only ``theirs`` has.

        Raises:
            FingerprintMismatchError: tensors differ, or are not there, or a fingerprint
                covers only a part of them, or all of them are left out. The message
                names them.
        """
        given: object = theirs  # callers without types pass anything
        if not isinstance(given, Fingerprint):
            kind = type(given).__name__
            raise TypeError(f"a Fingerprint is compared with another one, not a {kind}")
        ours, others = self._paths(), theirs._paths()
        faults = {
            path: f"{path or 'the state dict'} is missing in theirs"
            for path in ours
            if path not in others
        }
        if others and not ours:
            faults[""] = "ours has no tensor to compare"
        compared = self.tensors.keys() & theirs.tensors.keys()
        for path in (path for path in self.tensors if path in compared):
            if fault := _difference(self.tensors[path], theirs.tensors[path]):
                faults[path] = fault
        if not compared and not faults:
            faults = {path: self._excuse(path) for path in sorted(ours)}
        if faults:
            raise FingerprintMismatchError(faults)
        return sorted(others - ours)

    def to_json(self) -> bytes:
        """Return the fingerprint as JSON; :meth:`from_json` is the inverse."""
        tensors = [self.tensors[path] for path in sorted(self.tensors)]
        document = _FingerprintDocument(_VERSION, tensors, [*self.by_rank])
        return msgspec.json.encode(document)

    @classmethod
    def from_json(
        cls,
        text: bytes | str,
        *,
        limits: Limits = Limits(),  # noqa: B008 - frozen
    ) -> Fingerprint:
        """Return the fingerprint in what :meth:`to_json` returned, perhaps elsewhere.

        Args:
            text: The JSON; whoever sent it is not trusted.
            limits: ``max_header_bytes`` bounds its length, ``max_tensors`` its records.

        Raises:
            RemoteProtocolError: it is malformed.
            LimitExceededError: it is larger than the limits.
        """
        data = text.encode() if isinstance(text, str) else bytes(text)
        most = limits.max_header_bytes
        enforce("the size of a fingerprint", len(data), most, "max_header_bytes")
        values = (limits.max_tensors + 1) * _VALUES_PER_TENSOR
        enforce_values("a fingerprint", data, values, "max_tensors")
        try:
            document = _DOCUMENT.decode(data)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise RemoteProtocolError(f"malformed fingerprint: {error}") from error
        if fault := _fault_of(document):
            raise RemoteProtocolError(f"malformed fingerprint: {fault}")
        count = len(document.tensors) + len(document.by_rank)
        enforce("the number of tensors", count, limits.max_tensors, "max_tensors")
        tensors = {each.path: each for each in document.tensors}
        return cls(tensors, (*document.by_rank,))

    def _paths(self) -> set[str]:
        return {*self.tensors, *self.by_rank}

    def _excuse(self, path: str) -> str:
        """Return why a path that both fingerprints have is left out."""
        side = "theirs" if path in self.tensors else "ours"
        name = path or "the state dict"
        return f"{name} cannot be compared: it differs between the ranks of {side}"


def _difference(mine: TensorSums, other: TensorSums) -> str:
    """Return how two records differ; empty if they describe the same tensor."""
    path = mine.path or "the state dict"
    if (mine.dtype, mine.shape) != (other.dtype, other.shape):
        return f"{path} is {mine.kind} in ours and {other.kind} in theirs"
    if fault := mine.fault("ours") or other.fault("theirs"):
        return fault
    return "" if mine.wholes == other.wholes else f"{path} differs"


def _fault_of(document: _FingerprintDocument) -> str:
    """Return what contradicts the form of a fingerprint; empty if nothing does."""
    if document.aiockpt != _VERSION:
        return f"it has version {document.aiockpt}; this side knows {_VERSION}"
    paths = [each.path for each in document.tensors]
    if not _ascend(paths) or not _ascend(document.by_rank):
        return "its paths are not in order, or one is there twice"
    if not {*paths}.isdisjoint(document.by_rank):
        return "a path is both compared and left out"
    return next(filter(None, map(_fault_of_record, document.tensors)), "")


def _fault_of_record(record: TensorSums) -> str:
    """Return what contradicts the form of a record; empty if nothing does."""
    if record.dtype not in DTYPES:
        return f"no dtype is {record.dtype!r}"
    if (count := math.prod(record.shape)) > _MAX_ELEMENTS:
        return "no tensor has that size"
    if not _ascend(record.wholes):
        return "the sums of replicas are not in order"
    is_whole = len(record.wholes) == 1 if count else record.wholes == (NOTHING,)
    if (record.plain or not count) and (record.parts or not is_whole):
        return "a tensor that is plain or has no element is not whole"
    if not _ascend(part.replica for part in record.parts):
        return "the parts are not in the order of their replicas"
    if any(part.count == count for part in record.parts):
        return "a part is a whole tensor"
    return ""


def _ascend(values: Iterable[str] | Iterable[int]) -> bool:
    return all(one < other for one, other in pairwise(values))  # type: ignore[operator]
