"""The memory behind addresses: held while it is in use, and compared before each use.

A tensor can get other memory at any time, by ``.data =``, ``resize_``, ``set_``,
``Module.to``, or by a resize of its storage. Its old address may then belong to another
tensor. `HeldMemory` holds the storages, so that their memory is not given away. A
resize frees memory even of a storage that is held. So the user of an address
calls `HeldMemory.check` right before, without an ``await`` in between.

What remains is a resize by another thread while a copy is running. Nothing can prevent
that from here, since PyTorch has no lock for a storage.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final

import torch

from aiockpt.errors import LocalProtocolError

TENSORS_PER_CALL: Final = 1000
"""How many tensors one C call reads, because it holds the interpreter lock."""

_STORAGE: Final = torch.Tensor.untyped_storage
_ADDRESS: Final = torch.Tensor.data_ptr
_SIZE: Final = torch.UntypedStorage.nbytes
_SHAPE: Final = attrgetter("shape")
_DTYPE: Final = attrgetter("dtype")
_IS_CONTIGUOUS: Final = torch.Tensor.is_contiguous

# A number for each dtype, because a byte per tensor is less than a reference.
_DTYPES: Final = {
    dtype: number
    for number, dtype in enumerate(
        {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    )
}


def changed_error(path: str, what: str) -> LocalProtocolError:
    """Return the error for a tensor that changed while its memory was in use."""
    return LocalProtocolError(
        f"{path or 'the state dict'} {what} while its memory was in use: leave the "
        "tensors of a state dict as they are until the call that uses them has ended "
        "(after prepare: until the step is applied), and start again"
    )


def picked(column: array[int], order: Sequence[int]) -> array[int]:
    """Return the numbers at the given positions, in order; 0 for position -1."""
    with_none = column + array(column.typecode, [0])
    return array(column.typecode, map(with_none.__getitem__, order))


class HeldMemory:
    """The storages of some tensors, held, with the addresses and sizes they had.

    Attributes:
        tensors: The tensors.
        addresses: The address of each tensor's first element.
        storage_sizes: The bytes of each tensor's storage.
    """

    __slots__ = ("_kept", "addresses", "storage_sizes", "tensors")

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        kept: object,
        addresses: array[int],
        storage_sizes: array[int],
    ) -> None:
        self.tensors, self.addresses = tensors, addresses
        self._kept, self.storage_sizes = kept, storage_sizes

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> HeldMemory:
        """Hold the memory that the tensors have now."""
        storages: list[torch.UntypedStorage] = []
        addresses, sizes = array("Q"), array("Q")
        for start in range(0, len(tensors), TENSORS_PER_CALL):
            some = tensors[start : start + TENSORS_PER_CALL]
            own = [*map(_STORAGE, some)]
            storages += own
            addresses.extend(map(_ADDRESS, some))
            sizes.extend(map(_SIZE, own))
        return cls(tensors, storages, addresses, sizes)

    def taken(self, order: Sequence[int]) -> HeldMemory:
        """Return the memory of the given tensors, in order; -1 stands for none.

        All storages are held, also those of other tensors.
        """
        return HeldMemory(
            [*map([*self.tensors, torch.empty(0)].__getitem__, order)],
            self._kept,
            picked(self.addresses, order),
            picked(self.storage_sizes, order),
        )

    def beside(self, other: HeldMemory) -> HeldMemory:
        """Return the memory of these tensors, followed by that of others."""
        return HeldMemory(
            [*self.tensors, *other.tensors],
            (self._kept, other._kept),
            self.addresses + other.addresses,
            self.storage_sizes + other.storage_sizes,
        )

    def check(
        self, name: Callable[[int], str], first: int = 0, last: int = sys.maxsize
    ) -> None:
        """Check that the tensors ``[first, last)`` still have the memory they had.

        Raises:
            LocalProtocolError: one has other memory, or less or more; ``name`` returns
                its path.
        """
        for start in range(first, min(last, len(self.tensors)), TENSORS_PER_CALL):
            stop = min(start + TENSORS_PER_CALL, last)
            some = self.tensors[start:stop]
            addresses = array("Q", map(_ADDRESS, some))
            sizes = array("Q", map(_SIZE, map(_STORAGE, some)))
            was = self.addresses[start:stop], self.storage_sizes[start:stop]
            if (addresses, sizes) != was:
                before, after = (
                    [*zip(*was, strict=True)],
                    [*zip(addresses, sizes, strict=True)],
                )
                at = next(n for n, each in enumerate(after) if each != before[n])
                freed = before[at][1] and not sizes[at]
                what = "lost its memory" if freed else "got other memory"
                raise changed_error(name(start + at), what)


class Geometry:
    """The shapes, strides and dtypes of some tensors, to notice when one changes.

    Args:
        tensors: The tensors.
        shapes: Their shapes, if the caller knows them.
    """

    __slots__ = ("_dense", "_dtypes", "_shapes", "_strides", "_tensors")

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        shapes: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self._tensors = tensors
        self._shapes = [*map(_SHAPE, tensors)] if shapes is None else shapes
        self._dtypes, self._dense = b"", b""  # a byte for each tensor
        self._strides: dict[int, tuple[int, ...]] = {}
        for start in range(0, len(tensors), TENSORS_PER_CALL):
            some = tensors[start : start + TENSORS_PER_CALL]
            self._dtypes += bytes(map(_DTYPES.__getitem__, map(_DTYPE, some)))
            self._dense += (dense := bytes(map(_IS_CONTIGUOUS, some)))
            self._strides |= _strides(some, dense, start)

    def check(self, name: Callable[[int], str]) -> None:
        """Check that all tensors are as they were.

        Raises:
            LocalProtocolError: one has another shape, stride or dtype; ``name`` returns
                its path.
        """
        for start in range(0, len(self._tensors), TENSORS_PER_CALL):
            stop = start + TENSORS_PER_CALL
            some = self._tensors[start:stop]
            dense = bytes(map(_IS_CONTIGUOUS, some))
            now = (
                [*map(_SHAPE, some)],
                bytes(map(_DTYPES.__getitem__, map(_DTYPE, some))),
                dense,
            )
            was = (column[start:stop] for column in self._columns)
            strides = _strides(some, dense, start)
            if (*now,) == (*was,) and strides.items() <= self._strides.items():
                continue
            for number in range(start, min(stop, len(self._tensors))):
                if not self._is_alike(number):
                    what = "got another shape, stride or dtype"
                    raise changed_error(name(number), what)

    @property
    def _columns(self) -> tuple[Sequence[object], ...]:
        return self._shapes, self._dtypes, self._dense

    def _is_alike(self, number: int) -> bool:
        tensor = self._tensors[number]
        stride = self._strides.get(number)
        return (
            tensor.shape == self._shapes[number]
            and _DTYPES[tensor.dtype] == self._dtypes[number]
            and tensor.is_contiguous() == self._dense[number]
            and (stride is None or tensor.stride() == stride)
        )


def _strides(
    tensors: Sequence[torch.Tensor], dense: bytes, first: int
) -> dict[int, tuple[int, ...]]:
    """Return the strides of the tensors that are not contiguous, by number."""
    if all(dense):
        return {}
    pairs = enumerate(zip(tensors, dense, strict=True), first)
    return {number: each.stride() for number, (each, flag) in pairs if not flag}
