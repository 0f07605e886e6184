"""The memory behind addresses: held while it is in use, and compared before each use.

A tensor can get other memory at any time, by ``.data =``, ``resize_``, ``set_``,
``Module.to``, or by a resize of its storage. Its old address may then belong to another
tensor. `HeldMemory` holds the storages, so that their memory is not given away. A
resize frees memory even of a storage that is held. So whoever uses an address calls
`HeldMemory.check` right before, without an ``await`` in between.

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

__all__ = ["Geometry", "HeldMemory", "changed_error"]

# How many tensors one C call reads, because it holds the interpreter lock.
_SLICE: Final = 1000

_STORAGE: Final = torch.Tensor.untyped_storage
_ADDRESS: Final = torch.Tensor.data_ptr
_SIZE: Final = torch.UntypedStorage.nbytes
_SHAPE: Final = attrgetter("shape")
_DTYPE: Final = attrgetter("dtype")
_STRIDE: Final = torch.Tensor.stride


def changed_error(path: str, what: str) -> LocalProtocolError:
    """Return the error for a tensor that changed while its memory was in use."""
    return LocalProtocolError(
        f"{path or 'the state dict'} {what} while its memory was in use: leave the "
        "tensors of a state dict as they are until the call that uses them has ended "
        "(after prepare: until the step is applied), and start again"
    )


class HeldMemory:
    """The storages of some tensors, held, with the addresses and sizes they had.

    Attributes:
        tensors: The tensors.
        addresses: The address of each tensor's first element.
    """

    __slots__ = ("_sizes", "_storages", "addresses", "tensors")

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        storages: Sequence[torch.UntypedStorage],
        addresses: array[int],
        sizes: array[int],
    ) -> None:
        self.tensors, self.addresses = tensors, addresses
        self._storages, self._sizes = storages, sizes

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> HeldMemory:
        """Hold the memory that the tensors have now."""
        storages: list[torch.UntypedStorage] = []
        addresses, sizes = array("Q"), array("Q")
        for start in range(0, len(tensors), _SLICE):
            some = tensors[start : start + _SLICE]
            own = [*map(_STORAGE, some)]
            storages += own
            addresses.extend(map(_ADDRESS, some))
            sizes.extend(map(_SIZE, own))
        return cls(tensors, storages, addresses, sizes)

    def __repr__(self) -> str:
        return f"<HeldMemory tensors={len(self.tensors)}>"

    def taken(self, order: Sequence[int]) -> HeldMemory:
        """Return the memory of the given tensors, in order; -1 stands for none."""
        nothing = torch.empty(0)
        nowhere = nothing.untyped_storage()
        tensors, storages = self.tensors, self._storages
        addresses, sizes = self.addresses, self._sizes
        return HeldMemory(
            [nothing if number < 0 else tensors[number] for number in order],
            [nowhere if number < 0 else storages[number] for number in order],
            array("Q", (0 if number < 0 else addresses[number] for number in order)),
            array("Q", (0 if number < 0 else sizes[number] for number in order)),
        )

    def beside(self, other: HeldMemory) -> HeldMemory:
        """Return the memory of these tensors, followed by that of others."""
        return HeldMemory(
            [*self.tensors, *other.tensors],
            [*self._storages, *other._storages],
            self.addresses + other.addresses,
            self._sizes + other._sizes,
        )

    def check(
        self, name: Callable[[int], str], first: int = 0, last: int = sys.maxsize
    ) -> None:
        """Check that the tensors ``[first, last)`` still have the memory they had.

        Raises:
            LocalProtocolError: one has other memory, or less or more; ``name`` returns
                its path.
        """
        for start in range(first, min(last, len(self.tensors)), _SLICE):
            stop = min(start + _SLICE, last)
            some = self.tensors[start:stop]
            addresses = array("Q", map(_ADDRESS, some))
            sizes = array("Q", map(_SIZE, map(_STORAGE, some)))
            was = self.addresses[start:stop], self._sizes[start:stop]
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
    """The shapes, strides and dtypes of some tensors, to notice when one changes."""

    __slots__ = ("_dtypes", "_shapes", "_strides", "_tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._shapes: list[tuple[int, ...]] = []
        self._strides: list[tuple[int, ...]] = []
        self._dtypes: list[torch.dtype] = []
        for start in range(0, len(tensors), _SLICE):
            shapes, strides, dtypes = _read(tensors[start : start + _SLICE])
            self._shapes += map(known.setdefault, shapes, shapes)
            self._strides += map(known.setdefault, strides, strides)
            self._dtypes += dtypes

    def __repr__(self) -> str:
        return f"<Geometry tensors={len(self._tensors)}>"

    def check(self, name: Callable[[int], str]) -> None:
        """Check that all tensors are as they were.

        Raises:
            LocalProtocolError: one has another shape, stride or dtype; ``name`` returns
                its path.
        """
        for start in range(0, len(self._tensors), _SLICE):
            near = slice(start, start + _SLICE)
            now = _read(self._tensors[near])
            was = self._shapes[near], self._strides[near], self._dtypes[near]
            if now != was:
                before, after = [*zip(*was, strict=True)], zip(*now, strict=True)
                at = next(n for n, each in enumerate(after) if each != before[n])
                what = "got another shape, stride or dtype"
                raise changed_error(name(start + at), what)


def _read(
    tensors: Sequence[torch.Tensor],
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[torch.dtype]]:
    return [*map(_SHAPE, tensors)], [*map(_STRIDE, tensors)], [*map(_DTYPE, tensors)]
