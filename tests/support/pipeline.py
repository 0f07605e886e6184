"""From a state dict to its staged bytes and back, without a network.

And manifests and trees as a sender could write them, over a few counted bytes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from aiockpt.format.chunks import digest
from aiockpt.format.header import build_manifest, decode_header, header_length
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest, TensorSpec
from aiockpt.format.paths import Node
from aiockpt.memory.copies import CopyPlan
from aiockpt.memory.device import Port, PortFor
from aiockpt.runtime.bridge import Bridge
from aiockpt.state.rebuild import Frame, assemble, tensors_over
from aiockpt.state.template import Match, Template
from aiockpt.transfer.stager import Snapshot, Stager, StagerOptions
from tests.support.headers import entries_of

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
        "limits": LIMITS,
        "allow_pickle": False,
    }
    made = StagerOptions(**{**defaults, **options})
    try:
        yield Stager(bridge, made, ports=ports)
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


def staged(state: object) -> tuple[Manifest, bytes]:
    """Return what a sender says, and the data segment."""

    async def stage() -> tuple[Manifest, bytes]:
        async with stager() as staging:
            snapshot = await staging.stage(state, step=1)
            views = snapshot.views(0, snapshot.manifest.segment_bytes)
            return snapshot.manifest, b"".join(views)

    return asyncio.run(stage())


def match(state: object, template: object) -> Match:
    """Match a template with a checkpoint of ``state``."""
    manifest, _ = staged(state)
    return Template(template, limits=LIMITS, allow_pickle=False).match(manifest)


def manifest_of(
    tree: Node,
    *,
    segment: bytes = bytes(range(16)),
    code: str = "U8",
    shape: tuple[int, ...] = (16,),
    views: Sequence[TensorSpec] = (),
) -> Manifest:
    """Return the manifest of one entry of 16 bytes."""
    return build_manifest(
        step=1,
        chunk_bytes=64 << 10,
        entries=entries_of(*[("t", code, shape, len(segment))] if segment else []),
        views=views,
        tree=tree,
        digests=[digest([segment])] if segment else [],
    )


def value_of(
    tree: Node, *, allow_pickle: bool = False, limits: Limits = LIMITS, **options: Any
) -> Any:
    """Return what a receiver makes of a tree over 16 counted bytes."""
    manifest = manifest_of(tree, **options)
    tensors = tensors_over(manifest, memoryview(bytearray(range(16))))
    return assemble(
        Frame.of(manifest), tensors, limits=limits, allow_pickle=allow_pickle
    )


def view(**changes: Any) -> TensorSpec:
    """Return a view of four floats."""
    facts = {
        "storage": 0,
        "dtype": "float32",
        "shape": (4,),
        "stride": (1,),
        "offset": 0,
        "flags": 0,
    }
    return TensorSpec(**{**facts, **changes})


class Copies:
    """Holds the copies of host memory to a segment's bytes ``after`` some.

    Attributes:
        waiting: Whether one of them is held now.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
        self.waiting = False
        self.failure: Exception | None = None
        self._go = threading.Event()
        copy = CopyPlan.staged

        def staged(plan: CopyPlan, start: int, stop: int, *block: int) -> Iterator[int]:
            if start >= after:
                self.waiting = True
                assert self._go.wait(30)
                if self.failure is not None:
                    raise self.failure
            return copy(plan, start, stop, *block)

        monkeypatch.setattr(CopyPlan, "staged", staged)

    def go(self, failure: Exception | None = None) -> None:
        """Let them go on, or fail."""
        self.failure = failure
        self._go.set()
