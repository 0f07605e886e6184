"""The shards of a mesh, against torch's own splitting, and the boxes between them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch.distributed.tensor import placement_types as kinds
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from aiockpt.state import mesh
from aiockpt.state.mesh import ByteRuns
from aiockpt.state.sharding import (
    DTensorLayout,
    Mesh,
    Placement,
    Ranks,
    Replicate,
    Split,
    StridedSplit,
)

ROW = tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]


def layout_of(
    shape: Sequence[int],
    sizes: Sequence[int],
    placements: Sequence[Placement],
    at: Sequence[int] | None,
    order: tuple[tuple[int, tuple[int, ...]], ...] | None = None,
) -> DTensorLayout:
    """Return the layout of a rank at a coordinate."""
    grid = Ranks((*sizes,), None, (*range(math.prod(sizes)),))
    stride = torch.empty(shape, device="meta").stride()
    coordinate = None if at is None else (*at,)
    return DTensorLayout(
        Mesh("cpu", None, grid, None),
        coordinate,
        (*placements,),
        order,
        (*shape,),
        stride,
        0,
    )


def torchs(placement: Placement) -> kinds.Placement:
    """Return torch's own placement."""
    if isinstance(placement, Split):
        return kinds.Shard(placement.dim)
    if isinstance(placement, StridedSplit):
        return kinds._StridedShard(placement.dim, split_factor=placement.pieces)
    return kinds.Replicate()


def split_by_torch(
    whole: torch.Tensor,
    sizes: Sequence[int],
    placements: Sequence[Placement],
    at: Sequence[int],
    order: Sequence[int],
) -> torch.Tensor:
    """Split a tensor along one mesh dimension after the other, as torch does."""
    for dim in order:
        placement = torchs(placements[dim])
        if isinstance(placement, kinds.Shard | kinds._StridedShard):
            parts, _ = placement._split_tensor(whole, sizes[dim], with_padding=False)
            whole = parts[at[dim]]
    return whole


def taken(whole: torch.Tensor, shard: mesh.ShardRuns) -> torch.Tensor:
    """Return the elements of a shard."""
    for dim, runs in enumerate(shard):
        index = [at for start, stop in runs for at in range(start, stop)]
        whole = whole.index_select(dim, torch.tensor(index, dtype=torch.long))
    return whole


def numbered(shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor whose elements are their own numbers."""
    return torch.arange(math.prod(shape)).reshape((*shape,))


def drawn_mesh(
    rng: random.Random, dims: int
) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    """Draw a mesh of up to three dimensions, and a placement for each."""
    sizes = tuple(rng.choice([1, 2, 3, 4]) for _ in range(rng.choice([1, 2, 3])))
    placements: list[Placement] = []
    for position in range(len(sizes)):
        kind = rng.choice(["replicate", "split", "split", "strided"])
        dim = rng.randrange(dims) if dims else 0
        if kind == "replicate" or not dims:
            placements.append(Replicate())
        elif kind == "strided" and position + 1 < len(sizes):
            placements.append(StridedSplit(dim, sizes[position + 1]))
        else:
            placements.append(Split(dim))
    return sizes, (*placements,)


many = pytest.mark.parametrize(
    "count", [300, pytest.param(1600, marks=pytest.mark.nightly)]
)


def rows(count: int) -> Iterator[ROW]:
    """Draw tensors and meshes; the same in each run."""
    rng = random.Random(7)
    for _ in range(count):
        dims = rng.choice([0, 1, 1, 2, 2, 3])
        shape = tuple(rng.choice([0, 1, 2, 3, 5, 8, 12]) for _ in range(dims))
        yield shape, *drawn_mesh(rng, dims)


def coordinates(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all coordinates of a mesh."""
    return itertools.product(*map(range, sizes))


class TestShards:
    """A rank holds a shard of each tensor."""

    @many
    def test_torch_holds_the_same(self, count: int) -> None:
        """Even, uneven, empty, strided, replicated; on meshes up to 4 x 4 x 4."""
        for shape, sizes, placements in rows(count):
            whole = numbered(shape)
            for at in coordinates(sizes):
                shard = mesh.shard_of(layout_of(shape, sizes, placements, at))
                assert shard is not None
                local = taken(whole, shard)
                order = range(len(sizes))
                split = split_by_torch(whole, sizes, placements, at, order)
                assert torch.equal(local, split), (shape, sizes, placements, at)
                own = _compute_local_shape_and_global_offset(
                    shape, sizes, [*at], [*map(torchs, placements)]
                )
                assert own[0] == mesh.shape_of(shard)
                if math.prod(own[0]):
                    firsts = tuple(runs[0][0] for runs in shard)
                    assert own[1] == firsts, (shape, sizes, placements, at)

    def test_the_order_of_the_splits_counts(self) -> None:
        """A layout may say that a later mesh dimension splits first."""
        whole, sizes, placements = numbered((11,)), (2, 3), (Split(0), Split(0))
        for at in coordinates(sizes):
            layout = layout_of((11,), sizes, placements, at, ((0, (1, 0)),))
            shard = mesh.shard_of(layout)
            assert shard is not None
            split = split_by_torch(whole, sizes, placements, at, (1, 0))
            assert torch.equal(taken(whole, shard), split)

    def test_a_rank_outside_of_the_mesh_holds_nothing(self) -> None:
        """Such a rank does not even hold the only element of a scalar."""
        assert mesh.shard_of(layout_of((), (2,), (Replicate(),), None)) is None
        assert mesh.shard_of(layout_of((4,), (2,), (Split(0),), None)) is None

    def test_a_peer_cannot_claim_any_number_of_pieces(self) -> None:
        """Each piece costs memory here, and nothing there."""
        huge = (StridedSplit(0, 1 << 40),)
        with pytest.raises(ValueError, match="pieces"):
            mesh.shard_of(layout_of((1 << 40,), (2,), huge, (0,)))
        assert mesh.shard_of(layout_of((1 << 40,), (2,), huge, (1,))) == ((),)


class TestBoxes:
    """Two shards have boxes in common."""

    def test_many_shards_that_form_no_grid(self) -> None:
        """The planner compares only few pairs of shards."""
        bricks = []
        for row in range(3000):
            cut = 2 + row % 2
            bricks += [
                mesh.block((row, 0), (1, cut)),
                mesh.block((row, cut), (1, 5 - cut)),
            ]
        assert mesh.apart(bricks)
        assert not mesh.apart([*bricks, mesh.block((0, 0), (2, 1))])

    def test_a_peer_cannot_claim_any_number_of_boxes(self) -> None:
        """The number is limited, since each box takes memory and time."""
        every = tuple((2 * n, 2 * n + 1) for n in range(1000))
        with pytest.raises(ValueError, match="1000000 boxes"):
            next(mesh.boxes((every, every), mesh.whole((2000, 2000))))

    @many
    def test_every_receiver_gets_every_element_once(self, count: int) -> None:
        """Any mesh can be the source of any other one, with replicas."""
        for number, (shape, sizes, placements) in enumerate(rows(count)):
            rng = random.Random(number)
            there, mine = drawn_mesh(rng, len(shape)), (sizes, placements)
            have, need = (
                [mesh.shard_of(layout_of(shape, *each, at)) or () for at in places]
                for each in (there, mine)
                for places in [[*coordinates(each[0])]]
            )
            assert mesh.apart(have)
            whole = numbered(shape)
            locals_ = [taken(whole, shard).contiguous() for shard in have]
            for prefer, shard in enumerate(need):
                wanted = taken(whole, shard)
                assert torch.equal(filled(shard, have, locals_, prefer), wanted)

    def test_replicas_are_shared_out(self) -> None:
        """A receiver's own number chooses among them."""
        half, other = mesh.block((0,), (2,)), mesh.block((2,), (2,))
        have = [half, other, half, other]
        parts = [mesh.cover(mesh.whole((4,)), have, prefer).parts for prefer in (0, 1)]
        assert [[index for index, _ in each] for each in parts] == [[0, 1], [2, 3]]


def filled(
    shard: mesh.ShardRuns,
    have: list[mesh.ShardRuns],
    locals_: list[torch.Tensor],
    prefer: int,
) -> torch.Tensor:
    """Copy a shard box by box, through the bytes of its sources."""
    got = torch.full(mesh.shape_of(shard), -1)
    found = mesh.cover(shard, have, prefer)
    assert found.missing == 0
    for index, parts in found.parts:
        source = locals_[index]
        memory = source.reshape(-1)
        for part in parts:
            runs = mesh.byte_runs(
                part.theirs, part.sizes, source.shape, source.stride(), 1
            )
            places = [
                run.start + n * run.step + at
                for run in runs
                for n in range(run.count)
                for at in range(run.length)
            ]
            pairs = zip(part.mine, part.sizes, strict=True)
            box = got[tuple(slice(first, first + size) for first, size in pairs)]
            elements = memory[torch.tensor(places, dtype=torch.long)]
            box.copy_(elements.reshape(part.sizes))
    return got


class TestBytes:
    """A box has a place in memory."""

    def test_small_gaps_are_read_too(self) -> None:
        """A read of a small gap is faster than two reads."""
        near, far = ByteRuns(10, 4, 20, 3), ByteRuns(100, 4, 500, 2)
        assert mesh.touched([near], 16) == [(10, 54)]
        assert mesh.touched([near], 15) == [(10, 14), (30, 34), (50, 54)]
        assert mesh.touched([far, near], 64) == [(10, 104), (600, 604)]
        assert mesh.touched([ByteRuns(8, 4, 0, 3)], 0) == [(8, 12)]
