"""On what terms a checkpoint is received, and the memory that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import ArenaPool, Loan, lend
from aiockpt.memory.copies import Backings
from aiockpt.memory.device import PortFor
from aiockpt.state.nodes import Decoders
from aiockpt.state.rebuild import Away, Frame, assemble

__all__ = ["Terms", "allocate", "at_home", "nbytes_of", "put"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a receive accepts, and whether bytes go straight into a template.

    ``warm`` lends the memory that it needs, if some is kept. ``ahead`` says that who
    brings the bytes has no time to touch new pages.
    """

    limits: Limits
    allow_pickle: bool
    direct: bool
    ports: PortFor
    warm: ArenaPool | None = None
    ahead: bool = False


def nbytes_of(away: Away) -> int:
    """Return how many bytes are in other memory."""
    return sum(data.numel() for data in away.values())


def allocate(manifest: Manifest, nbytes: int, terms: Terms) -> Loan:
    """Return an arena for the segment, of which ``nbytes`` are going to be used."""
    size, most = manifest.segment_bytes, terms.limits.max_bytes
    return lend(size, used=nbytes, most=most, pool=terms.warm)


def at_home(backings: Backings, ports: PortFor) -> int:
    """Return how many bytes need no arena in a direct receive."""
    sizes, parts = backings.sizes, backings.parts
    away = {device for device in backings.devices() if ports(device) is not None}
    nbytes = sum(sizes) - sum(sizes[entry] for entry in parts)
    for entry, tensor in enumerate(backings.tensors if away else ()):
        if tensor.device in away and entry not in parts:
            nbytes -= sizes[entry]
    return nbytes


def put(
    frame: Frame,
    tensors: Sequence[torch.Tensor],
    terms: Terms,
    wholes: Mapping[int, torch.Tensor] | None = None,
    nodes: Decoders | None = None,
) -> object:
    """Put tensors into the tree of a checkpoint; see `assemble`."""
    return assemble(
        frame,
        tensors,
        limits=terms.limits,
        allow_pickle=terms.allow_pickle,
        wholes=wholes,
        nodes=nodes,
    )
