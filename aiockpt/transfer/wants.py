"""The tensors that a load wants, and the shortest way of their bytes to them.

A dense tensor of a template, in host memory or on a device, gets its bytes straight
from the file. What differs from the checkpoint's in layout, or shares memory where that
does not, is filled by a copy when everything has been read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from aiockpt.memory.device import Event, Port, PortFor
from aiockpt.memory.parts import once
from aiockpt.state.autograd import mark_changed
from aiockpt.state.distributed import has_version
from aiockpt.transfer.content import Content
from aiockpt.transfer.landing import DeviceMemory, Place, host_memory

__all__ = ["Wants"]

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class _Want:
    """Bytes of the segment; for a dense tensor, or to stay in the segment's memory.

    Attributes:
        start, stop: The range.
        source: A content's tensor over just this range.
        target: What has the same elements in the same order; None: nothing else.
    """

    start: int
    stop: int
    source: torch.Tensor
    target: torch.Tensor | None

    @property
    def home(self) -> tuple[str, int]:
        """Where its target is, to be sorted by."""
        assert self.target is not None
        return str(self.target.device), self.target.data_ptr()


class Wants:
    """Takes down what a load wants of its contents.

    Args:
        contents: Where it reads from.
        device: Where tensors go that have no place in a template; None: where they
            are.
        ports: Finds the port of a device.
    """

    def __init__(
        self,
        contents: Sequence[Content],
        *,
        device: torch.device | None,
        ports: PortFor,
    ) -> None:
        self.touched = False
        self._device, self._ports = device, ports
        self._wants: list[tuple[Content, list[_Want]]] = [(c, []) for c in contents]
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._changed: list[torch.Tensor] = []
        self._bases: dict[int, torch.Tensor] = {}
        self._replicas: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._fences: dict[torch.device, tuple[Port, Event] | None] = {}

    def __repr__(self) -> str:
        return f"<Wants {sum(len(wants) for _, wants in self._wants)}>"

    def keep(self, tensor: torch.Tensor) -> None:
        """Want the bytes of a content's tensor where it is."""
        self._want(tensor, None)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Want a content's tensor on the load's device; return it there."""
        if self._device is None:
            self.keep(tensor)
            return tensor
        if not is_dense(tensor) or self._device.type == "meta" or not tensor.numel():
            return tensor.to(self._device)
        known = self._replicas.get(id(tensor))
        if known is None:
            known = self._replicas[id(tensor)] = (self._replica(tensor), tensor)
        return known[0]

    def fill(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        *,
        whole: torch.Tensor | None = None,
    ) -> None:
        """Want the elements of a content's tensor in one of a template."""
        if not source.numel():
            return
        self._changed.append(target)
        if whole is not None and has_version(whole):
            self._changed.append(whole)
        alike = is_dense(target) and is_dense(source) and _are_alike(target, source)
        if not (alike and self._want(source, target.detach())):
            self.keep(source)
            self._copies.append((target, source))

    def begin(self) -> None:
        """Say that the template changes from now on."""
        self.touched = bool(self._changed)
        mark_changed(self._changed)

    def places(self) -> Iterator[tuple[Content, list[Place]]]:
        """Yield what is to be read of each content, and where to."""
        for content, wants in self._wants:
            yield content, [*self._placed(content, wants)]

    def finish(self) -> None:
        """Copy what could not be read straight to where it belongs."""
        for target, source in self._copies:
            destination, origin = once(target, source)
            with torch.inference_mode(target.is_inference()), torch.no_grad():
                destination.copy_(origin)

    def _want(self, source: torch.Tensor, target: torch.Tensor | None) -> bool:
        """Take it down; False if its bytes are not a content's."""
        if not is_dense(source) or not source.numel():
            return False
        address, nbytes = source.data_ptr(), _span(source)
        for content, wants in self._wants:
            start = content.offset_of(address)
            if start is not None:
                wants.append(_Want(start, start + nbytes, source, target))
                return True
        return False

    def _replica(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device, whose storage is wanted there.

        Tensors that share a storage share one there too.
        """
        storage = tensor.untyped_storage()
        base = self._bases.get(storage.data_ptr())
        if base is None:
            nbytes = storage.nbytes()
            base = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._bases[storage.data_ptr()] = base
            raw = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))
            if not self._want(raw, base):
                self._copies.append((base, raw))
        return _like(tensor, base)

    def _placed(self, content: Content, wants: Iterable[_Want]) -> Iterator[Place]:
        """Yield places that are apart; what overlaps stays in the content's memory."""
        direct: list[_Want] = []
        for cluster in _clusters(wants):
            only = cluster[0]
            if len(cluster) == 1 and only.target is not None and not content.mapped:
                direct.append(only)
            else:
                yield self._kept(content, cluster)
        for cluster in _sharing(direct):
            for want in cluster:
                if len(cluster) == 1:
                    yield self._straight(want)
                else:
                    yield self._kept(content, [want])

    def _kept(self, content: Content, cluster: Sequence[_Want]) -> Place:
        for want in cluster:
            if want.target is not None:
                self._copies.append((want.target, want.source))
        start, stop = cluster[0].start, max(want.stop for want in cluster)
        return content.place(start, stop)

    def _straight(self, want: _Want) -> Place:
        assert want.target is not None
        device = want.target.device
        if device not in self._fences:
            port = self._ports(device)
            self._fences[device] = None if port is None else (port, port.fence())
        away = self._fences[device]
        if away is None:
            return Place(want.start, want.stop, host_memory(want.target))
        return Place(want.start, want.stop, DeviceMemory(want.target, *away))


def is_dense(tensor: torch.Tensor) -> bool:
    """Say whether a tensor's elements lie in memory as they are."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


def _are_alike(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Say whether the bytes of one are those of the other, without holes."""
    if (target.is_conj(), target.is_neg()) != (source.is_conj(), source.is_neg()):
        return False
    if target.is_contiguous() and source.is_contiguous():
        return True
    order = sorted(range(target.dim()), key=target.stride, reverse=True)
    dense = target.permute(order).is_contiguous()
    return dense and target.stride() == source.stride()


def _span(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the end of the last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.itemsize


def _like(tensor: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return the same view, with the same flags, of another storage."""
    replica = torch.empty(0, dtype=tensor.dtype, device=base.device).set_(
        base.untyped_storage(),
        int(tensor.storage_offset()),
        tensor.shape,
        tensor.stride(),
    )
    if tensor.is_conj():
        replica = replica.conj()
    if tensor.is_neg():
        replica = torch._neg_view(replica)  # noqa: SLF001 - torch has no public way
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(replica, tensor.requires_grad)
    return replica.requires_grad_() if tensor.requires_grad else replica


def _clusters(wants: Iterable[_Want]) -> Iterator[list[_Want]]:
    """Yield wants that overlap in the segment together, by ascending start."""
    cluster: list[_Want] = []
    stop = 0
    for want in sorted(wants, key=lambda want: want.start):
        if cluster and want.start >= stop:
            yield _distinct(cluster)
            cluster = []
        cluster.append(want)
        stop = max(stop, want.stop)
    if cluster:
        yield _distinct(cluster)


def _distinct(cluster: list[_Want]) -> list[_Want]:
    """Leave out what was asked for twice: tied tensors."""
    if len(cluster) == 1:
        return cluster
    found = {
        (want.start, want.stop, want.target is not None and want.home): want
        for want in cluster
    }
    return [*found.values()]


def _sharing(direct: Iterable[_Want]) -> Iterator[list[_Want]]:
    """Yield wants together whose targets overlap in memory."""
    cluster: list[_Want] = []
    reach = ("", 0)
    for want in sorted(direct, key=lambda want: want.home):
        device, address = want.home
        if cluster and want.home >= reach:
            yield cluster
            cluster = []
        cluster.append(want)
        reach = max(reach, (device, address + want.stop - want.start))
    if cluster:
        yield cluster
