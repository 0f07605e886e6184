"""State dicts of every kind, and their way to staged bytes and back.

There is no network between. A manifest or a tree may also be one that only a hostile
sender would write, over a few counted bytes.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from aiockpt import Limits
from aiockpt.format.chunks import digest
from aiockpt.format.header import build_manifest, decode_header, header_length
from aiockpt.format.manifest import Manifest, TensorSpec
from aiockpt.format.paths import Node
from aiockpt.memory.arena import Arena
from aiockpt.memory.copies import Backings, CopyPlan
from aiockpt.memory.device import Port, PortFor
from aiockpt.memory.snapshot import Snapshot
from aiockpt.runtime.bridge import Bridge
from aiockpt.state.flatten import describe
from aiockpt.state.load_plan import Matching, Template
from aiockpt.state.match import RECEIVE
from aiockpt.state.rebuild import Frame, assemble, tensors_over
from aiockpt.state.segment import Segment
from aiockpt.transfer.stager import Stager, StagerOptions
from tests.support.headers import entries_of

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.bits8,
]

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(), max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from(
        [
            torch.Size([2]),
            torch.float16,
            torch.device("cpu"),
            b"x" * 5000,
            datetime(2026, 11, 27, 16, 45, fold=1, tzinfo=UTC),
            Decimal("1.50"),
            Path("runs/1"),
            UUID(int=7),
        ]
    )
)


@st.composite
def bases(draw: st.DrawFn) -> torch.Tensor:
    """Make a contiguous tensor with random bytes."""
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    tensor = torch.empty(shape, dtype=draw(st.sampled_from(DTYPES)))
    limit = 2 if tensor.dtype is torch.bool else 256
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    raw.random_(0, limit)
    return tensor


def _sliced(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    for dim, size in enumerate(tensor.shape):
        start = draw(st.integers(0, size))
        step = draw(st.integers(1, 4))
        tensor = tensor[(slice(None),) * dim + (slice(start, None, step),)]
    return tensor


def _transposed(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(draw(st.permutations(range(tensor.dim()))))


def _expanded(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(0).expand(draw(st.integers(0, 3)), *tensor.shape)


def _lazy(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if draw(st.booleans()) else tensor


def _flagged(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.nn.Parameter(tensor, requires_grad=False)
    grad = draw(st.booleans())
    if draw(st.booleans()):
        return torch.nn.Parameter(tensor, requires_grad=grad)
    return tensor.detach().requires_grad_(grad)


def _retyped(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        return tensor
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:
        return tensor
    smaller = [dtype for dtype in DTYPES if dtype.itemsize <= tensor.itemsize]
    return flat.view(draw(st.sampled_from(smaller)))


VIEWS: list[Callable[[st.DrawFn, torch.Tensor], torch.Tensor]] = [
    _sliced,
    _transposed,
    _expanded,
    _retyped,
    _lazy,
]


@st.composite
def families(draw: st.DrawFn) -> list[torch.Tensor]:
    """Make tensors that share a few storages in odd ways."""
    roots = draw(st.lists(bases(), min_size=1, max_size=3))
    found = []
    for _ in range(draw(st.integers(1, 6))):
        tensor = roots[draw(st.integers(0, len(roots) - 1))]
        for change in draw(st.lists(st.sampled_from(VIEWS), max_size=3)):
            tensor = change(draw, tensor)
        found.append(_flagged(draw, tensor) if draw(st.booleans()) else tensor)
    return found


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=4)
    keys = st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.text())
    dicts = st.dictionaries(keys, inner, max_size=4)
    return (
        lists
        | dicts
        | lists.map(tuple)
        | lists.map(lambda items: deque(items, 5))
        | dicts.map(OrderedDict)
        | dicts.map(lambda items: defaultdict(list, items))
    )


class State(dict[str, Any]):
    """A state dict that can be shown: torch cannot print tensors of every dtype."""

    def __repr__(self) -> str:
        tensors = [
            f"{each.dtype}{list(each.shape)} stride {each.stride()} at "
            f"{each.storage_offset()} of {each.untyped_storage().nbytes()}"
            for each in self["tensors"]
        ]
        return f"<State {tensors}>"


@st.composite
def states(draw: st.DrawFn) -> State:
    """Make a state dict; the same tensor may be in several places."""
    tensors = draw(families())
    # By number, since hypothesis shows what it samples from.
    numbers = st.integers(0, len(tensors) - 1)
    leaves = SCALARS | numbers.map(lambda number: tensors[number])
    tree = draw(st.recursive(leaves, _containers, max_leaves=12))
    return State(tree=tree, tensors=tensors)


def rich() -> dict[Any, Any]:
    """Return a state of every kind: containers, ties, views, holes, odd values."""
    torch.manual_seed(0)
    weight = torch.randn(300, 300)
    return {
        "model": OrderedDict(embed=weight, head=weight, norm=torch.randn(7)),
        "optimizer": {
            "state": {0: {"step": 3, "avg": torch.randn(50)}, 1: {"step": 4}},
            "groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "betas": (0.9, 0.5)}],
        },
        "view": weight[3:5],
        "strided": torch.randn(100, 400).t(),
        "sparse": torch.randn(4000, 20)[:, ::7],
        "conj": torch.randn(9, dtype=torch.complex64).conj(),
        "odd": torch.randn(33)[1:],
        "array": np.arange(50_000),
        "blob": b"x" * 100_000,
        "half": torch.randn(30_000).to(torch.bfloat16),
        "scale": torch.nn.Parameter(torch.randn(30_000)),
        "empty": torch.empty(0, 3),
        "made": defaultdict(list, a=[torch.ones(2)]),
        (1, "key"): torch.ones(3),
    }


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


def match(state: object, template: object) -> Matching:
    """Match a template with a checkpoint of ``state``."""
    manifest, _ = staged(state)
    return matching(manifest, template)


def matching(manifest: Manifest, template: object) -> Matching:
    """Match a template with a checkpoint, as a receive does."""
    segment = Segment(manifest, arena=Arena(manifest.segment_bytes))
    own = Template(template, limits=LIMITS, watched=True)
    return Matching([segment], RECEIVE, limits=LIMITS, allow_pickle=False, template=own)


def backings_of(found: Matching) -> Backings:
    """Return the template's memory of each entry."""
    assert found.backings is not None
    return found.backings


def described(state: object) -> Manifest:
    """Return the manifest of a state dict, without digests; no byte is copied."""
    found = describe(state, limits=LIMITS)
    return Manifest(
        step=1,
        snapshot_id="",
        chunk_bytes=64 << 10,
        algorithm="",
        digests=(),
        entries=found.entries,
        views=tuple(found.views),
        tree=found.tree,
        header=b"",
        header_bytes=0,
    )


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
