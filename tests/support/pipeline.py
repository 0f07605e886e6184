"""From a state dict to its staged bytes and back, without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch

from aiockpt.format.header import decode_header, header_length
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest
from aiockpt.memory.device import Port, PortFor
from aiockpt.runtime.bridge import Bridge
from aiockpt.state.rebuild import Frame, assemble, tensors_over
from aiockpt.transfer.stager import Snapshot, Stager

LIMITS = Limits()


def host_only(device: torch.device) -> Port | None:
    """Know no accelerator."""
    return None


@asynccontextmanager
async def stager(
    *, ports: PortFor = host_only, **options: Any
) -> AsyncIterator[Stager]:
    """Make a stager with small chunks."""
    bridge = Bridge(threads=2, name="staging")
    defaults = {
        "threads": 2,
        "chunk_bytes": 64 << 10,
        "zero_copy": False,
        "allow_pickle": False,
        "limits": LIMITS,
    }
    try:
        yield Stager(bridge, ports=ports, **{**defaults, **options})
    finally:
        bridge.close()


def file_of(snapshot: Snapshot) -> bytes:
    """Return the whole file that a snapshot is."""
    manifest = snapshot.manifest
    segment = snapshot.views(0, manifest.segment_bytes)
    return b"".join([manifest.header, *segment])


def rebuilt(file: bytes, *, allow_pickle: bool = False) -> Any:
    """Return the state dict that a file holds, the way a receiver makes it."""
    memory = memoryview(bytearray(file))
    start = header_length(file[:8], limits=LIMITS)
    manifest = decode_header(memory[:start], limits=LIMITS)
    assert isinstance(manifest, Manifest)
    tensors = tensors_over(manifest, memory, base=start)
    return assemble(
        Frame.of(manifest), tensors, limits=LIMITS, allow_pickle=allow_pickle
    )
