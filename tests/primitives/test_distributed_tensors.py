"""Distributed tensors as data: what is sent, checked, rebuilt, and refused.

The world of four ranks here is torch's fake one, in which this process is rank 1 and
no collective moves anything; tests/behaviour/test_distributed_ranks.py has real ones.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from aiockpt.errors import (
    DeviceMeshError,
    LimitExceededError,
    RemoteProtocolError,
    TemplateMismatchError,
    UnsupportedLeafError,
)
from aiockpt.state.distributed import ranks_of
from aiockpt.state.flatten import describe
from aiockpt.state.rebuild import Frame, assemble, check_meshes, tensors_over
from aiockpt.testing import assert_same
from tests.support.states import LIMITS, match, matching, staged
from tests.support.transports import pair, receive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiockpt.format.manifest import Manifest

RANK, WORLD = 1, 4


@pytest.fixture
def world() -> Iterator[None]:
    """Be one of four ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh(world: None) -> DeviceMesh:
    """Return a mesh of 2 x 2 ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def dtensor(mesh: DeviceMesh, *placements: Any, shape: tuple[int, ...]) -> DTensor:
    """Return a DTensor whose part here has the shape [2, 3]."""
    return DTensor.from_local(
        torch.arange(6.0).view(2, 3),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=(shape[1], 1),
    )


def rebuilt(manifest: Manifest, segment: bytes) -> Any:
    """Return the state dict of what was staged."""
    tensors = tensors_over(manifest, memoryview(bytearray(segment)))
    return assemble(Frame.of(manifest), tensors, limits=LIMITS)


def round_trip(state: object) -> Any:
    """Send and rebuild it in this process."""
    return rebuilt(*staged(state))


PLACED: dict[str, Callable[[], tuple[Any, ...]]] = {
    "shards": lambda: (Shard(0), Shard(1)),
    "replicas": lambda: (Replicate(), Shard(0)),
    "sums": lambda: (Partial(), Replicate()),
    "averages": lambda: (Partial("avg"), Shard(1)),
    "strided": lambda: (_StridedShard(0, split_factor=2), Shard(0)),
}


class TestRoundTrip:
    """An equal mesh receives what was sent."""

    @pytest.mark.parametrize("kind", PLACED)
    def test_placements(self, mesh: DeviceMesh, kind: str) -> None:
        """Each kind survives, with the shape and the stride of the whole."""
        sent = dtensor(mesh, *PLACED[kind](), shape=(8, 6))
        found = round_trip({"w": sent})["w"]
        assert_same(found, sent)
        assert found._spec == sent._spec
        assert found.stride() == sent.stride()

    def test_ties(self, mesh: DeviceMesh) -> None:
        """One object is one object, and its part shares memory with what it did."""
        tied = dtensor(mesh, Shard(0), Replicate(), shape=(4, 3))
        found = round_trip({"a": tied, "b": [tied], "part": tied.to_local()})
        assert found["a"] is found["b"][0]
        assert found["part"].data_ptr() == found["a"].to_local().data_ptr()

    def test_an_order_of_cuts(self, mesh: DeviceMesh) -> None:
        """It survives where the placements do not tell it."""
        sent = dtensor(mesh, Shard(0), Shard(0), shape=(8, 3))
        (entry,) = sent._spec.shard_order
        sent._spec.shard_order = (entry._replace(mesh_dims=(1, 0)),)
        assert round_trip(sent)._spec.shard_order == sent._spec.shard_order

    @pytest.mark.parametrize("regular", [True, False])
    def test_ranks_of_a_large_mesh(self, *, regular: bool) -> None:
        """A regular grid takes a few numbers, however many ranks it has."""
        ranks = torch.arange(10_000).view(10, 10, 100).permute(1, 0, 2).flip(0)
        if not regular:
            ranks = ranks.clone()
            ranks[0, 0, :2] = ranks[0, 0, :2].flip(0)
        found = ranks_of(ranks)
        assert (len(repr(found)) < 100) is regular
        assert found.flat() == ranks.flatten().tolist()

    def test_flags(self, mesh: DeviceMesh) -> None:
        """A Parameter is one again, frozen or not; and so is a tensor with a grad."""
        base = dtensor(mesh, Shard(0), Replicate(), shape=(4, 3))
        sent = {
            "parameter": torch.nn.Parameter(base),
            "frozen": torch.nn.Parameter(base, requires_grad=False),
            "grad": base.detach().requires_grad_(),
        }
        found = round_trip(sent)
        assert_same(found, sent)
        for name in ("parameter", "frozen"):
            assert isinstance(found[name], torch.nn.Parameter)

    def test_meshes(self, mesh: DeviceMesh) -> None:
        """Parts of a mesh, the default process group, and ranks in an odd order."""
        odd = DeviceMesh("cpu", [[3, 0], [1, 2]], mesh_dim_names=("a", "b"))
        for sent in (mesh["dp"], mesh["tp"], init_device_mesh("cpu", (WORLD,)), odd):
            placements = [Shard(0)] * sent.ndim
            found = round_trip(dtensor(sent, *placements, shape=(8, 3))).device_mesh
            assert found == sent
            assert found.get_coordinate() == sent.get_coordinate()
            if sent.size() == WORLD and sent.ndim == 1:
                assert found.get_group() is dist.group.WORLD


def test_equal_meshes_keep_their_roots(mesh: DeviceMesh) -> None:
    """A mesh that was cut out of another one is not taken for one that was made."""
    alone = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    state = {
        name: dtensor(one, Shard(0), shape=(4, 3))
        for name, one in (("cut out", mesh["tp"]), ("alone", alone))
    }

    tree: Any = describe(state, limits=LIMITS).tree

    layouts = [node[2][1][1] for node in tree[2]]
    assert [layout[1][3] is None for layout in layouts] == [False, True]


def _sparse(mesh: DeviceMesh) -> DTensor:
    made = dtensor(mesh, Replicate(), Replicate(), shape=(2, 3))
    made._local_tensor = made._local_tensor.to_sparse()
    return made


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_sparse, "local tensor"),
        *(
            (
                lambda mesh, kind=kind: dtensor(mesh, kind, Replicate(), shape=(2, 3)),
                why,
            )
            for kind, why in (
                (_MaskPartial("sum"), "redistribute"),
                (Partial("median"), "placement Partial"),
            )
        ),
    ],
)
def test_what_cannot_be_said_as_data_is_refused(
    mesh: DeviceMesh, make: Callable[[DeviceMesh], DTensor], why: str
) -> None:
    """The sender hears of it before anything is copied, not each receiver."""
    with pytest.raises(UnsupportedLeafError, match=why) as caught:
        describe({"x": [make(mesh)]}, limits=LIMITS)
    assert caught.value.path == "x[0]"


def leaf(state: Any, **changes: Any) -> Manifest:
    """Return what a sender says, with items of the leaf ``w`` replaced."""
    manifest, _ = staged(state)
    tree: Any = copy.deepcopy(manifest.tree)
    items = tree[2][0][2][1]
    for name, node in changes.items():
        items[NAMES.index(name)] = node
    return replace(manifest, tree=tree)


NAMES = ["local", "mesh", "coordinate", "placements", "order", "shape", "stride"]
NAMES += ["flags"]


def t(*items: Any) -> list[Any]:
    """Return the node of a tuple."""
    return ["tuple", [t(*i) if isinstance(i, tuple) else i for i in items]]


def grid(sizes: Any, strides: Any, ranks: Any, *, names: Any = None) -> list[Any]:
    """Return the node of a mesh."""
    return t("cpu", names, (sizes, strides, ranks), None)


HUGE = ["int", f"{2**62:x}"]

NO_PLACE = {
    "too many ranks": grid((2, 4), (4, 1), (0,)),
    "a huge mesh": grid((HUGE,) * 2, (1, 1), (0,)),
    "a rank twice": grid((2, 2), (0, 1), (0,)),
    "a rank that is not there": grid((2, 2), None, (0, 1, 2, 4)),
    "a negative rank": grid((2, 2), (-2, 1), (0,)),
    "another grid of these ranks": grid((2, 2), None, (0, 3, 1, 2)),
    "another device": ["tuple", ["xla", *grid((2, 2), (2, 1), (0,))[1][1:]]],
}

MALFORMED: dict[str, dict[str, Any]] = {
    "no mesh": {"mesh": None},
    "a mesh that is a list": {"mesh": ["list", grid((2, 2), (2, 1), (0,))[1]]},
    "no ranks": {"mesh": grid((HUGE,), None, ())},
    "no dimensions": {"mesh": grid((), (), (0,))},
    "an empty dimension": {"mesh": grid((0, 2), (2, 1), (0,))},
    "65 dimensions": {"mesh": grid((1,) * 65, (1,) * 65, (0,))},
    "a name twice": {"mesh": grid((2, 2), (2, 1), (0,), names=("a", "a"))},
    "a root of a root": {
        "mesh": t(
            "cpu", None, ((2,), (1,), (0,)), ("cpu", None, ((2,), (1,), (0,)), ())
        )
    },
    "a coordinate outside": {"coordinate": t(0, 2)},
    "a short coordinate": {"coordinate": t(0)},
    "a true coordinate": {"coordinate": t(False, True)},
    "too few placements": {"placements": t(("shard", 0))},
    "no placement": {"placements": t(("shard", 0), ("hidden",))},
    "a placement that is a list": {
        "placements": ["tuple", [["list", ["replicate"]]] * 2]
    },
    "a dimension that is not there": {"placements": t(("shard", 2), ("replicate",))},
    "a negative dimension": {"placements": t(("shard", -1), ("replicate",))},
    "an unknown reduction": {
        "placements": t(("partial", "__import__"), ("replicate",))
    },
    "no pieces": {"placements": t(("strided", 0, 0), ("replicate",))},
    "huge pieces": {"placements": t(("strided", 0, 2**40), ("replicate",))},
    "an order of nothing": {"order": t((1, (0,)))},
    "an order outside": {"order": t((0, (0, 7)))},
    "a huge shape": {"shape": t(HUGE, HUGE)},
    "a shape smaller than its part": {"shape": t(1, 3)},
    "another number of dimensions": {"shape": t(4, 3, 1), "stride": t(3, 1, 1)},
    "a short stride": {"stride": t(1)},
    "a huge stride": {"stride": t(HUGE, 1)},
    "unknown flags": {"flags": 4},
    "true flags": {"flags": True},
    "no local tensor": {"local": 0},
    "a local tensor that is a list": {"local": ["list", [["tensor", 0]]]},
    "code": {"local": ["ext", "builtins.eval", "1"]},
}


class TestHostile:
    """Each claim of a peer ends in a typed error before it costs anything."""

    @pytest.fixture
    def state(self, mesh: DeviceMesh) -> dict[str, Any]:
        """Return a state dict of one DTensor."""
        return {"w": dtensor(mesh, Shard(0), Replicate(), shape=(4, 3))}

    @pytest.mark.parametrize("case", NO_PLACE)
    def test_a_mesh_without_a_place(self, state: dict[str, Any], case: str) -> None:
        """No such ranks here; the path says whose."""
        with pytest.raises(DeviceMeshError) as caught:
            check_meshes(Frame.of(leaf(state, mesh=NO_PLACE[case])), limits=LIMITS)
        assert caught.value.path == "w"
        assert str(caught.value).startswith("w: ")

    @pytest.mark.parametrize("case", MALFORMED)
    def test_a_malformed_leaf(self, state: dict[str, Any], case: str) -> None:
        """It is the peer's fault, with a template and without."""
        manifest = leaf(state, **MALFORMED[case])
        with pytest.raises(RemoteProtocolError, match=r"(at|refused) w:"):
            rebuilt(manifest, bytes(manifest.segment_bytes))
        with pytest.raises((RemoteProtocolError, TemplateMismatchError)):
            matching(manifest, state)

    def test_a_root_that_lies(self, mesh: DeviceMesh) -> None:
        """A mesh that its root does not contain is looked for by itself."""
        sent = {"w": dtensor(mesh["tp"], Shard(0), shape=(4, 3))}
        root = ("cpu", ("tp", "x"), ((2, 2), None, (1, 0, 3, 2)), None)
        node = t("cpu", ("tp",), ((2,), (1,), (0,)), root)
        manifest = leaf(sent, mesh=node)
        found = rebuilt(manifest, bytes(manifest.segment_bytes))["w"]
        assert found.device_mesh.mesh.tolist() == [0, 1]


class TestPlaces:
    """A local tensor belongs to one place in the mesh."""

    def test_no_process_group(self, mesh: DeviceMesh) -> None:
        """The error says what to do without a process group."""
        manifest, _ = staged({"w": dtensor(mesh, Shard(0), Shard(1), shape=(4, 6))})
        dist.destroy_process_group()
        with pytest.raises(DeviceMeshError, match="init_process_group"):
            check_meshes(Frame.of(manifest), limits=LIMITS)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        with pytest.raises(DeviceMeshError, match="has 1 ranks"):
            check_meshes(Frame.of(manifest), limits=LIMITS)
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
        with pytest.raises(DeviceMeshError, match=r"init_device_mesh\('cpu', \(2, 2\)"):
            check_meshes(Frame.of(manifest), limits=LIMITS)

    @pytest.mark.parametrize(
        ("placements", "fits"),
        [
            ((Shard(0), Replicate()), True),
            ((Replicate(), Shard(0)), False),
            ((Replicate(), Partial()), False),
            ((Replicate(), Replicate()), True),
        ],
    )
    def test_the_part_of_another_rank(
        self, mesh: DeviceMesh, placements: tuple[Any, ...], *, fits: bool
    ) -> None:
        """Rank 0 differs from rank 1 along the second dimension only."""
        manifest = leaf(
            {"w": dtensor(mesh, *placements, shape=(4, 3))}, coordinate=t(0, 0)
        )
        if fits:
            check_meshes(Frame.of(manifest), limits=LIMITS)
        else:
            with pytest.raises(DeviceMeshError, match="another part"):
                check_meshes(Frame.of(manifest), limits=LIMITS)


class TestTemplate:
    """A template shares some facts with the checkpoint, and may keep others."""

    def test_what_differs(self, mesh: DeviceMesh) -> None:
        """Mesh, placements and shape are compared, and named."""
        sent = dtensor(mesh, Shard(0), Replicate(), shape=(4, 3))
        other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        for own, text in (
            (dtensor(mesh, Replicate(), Shard(0), shape=(4, 3)), "shard 0, replicate"),
            (dtensor(other, Shard(0), Replicate(), shape=(4, 3)), "mesh dp, tp"),
            (dtensor(mesh, Shard(0), Replicate(), shape=(3, 3)), r"DTensor \[4, 3\]"),
            (torch.zeros(2, 3), "the template has no distributed tensor"),
        ):
            with pytest.raises(TemplateMismatchError, match=text) as caught:
                match({"w": sent}, {"w": own})
            assert caught.value.path == "w"
        with pytest.raises(TemplateMismatchError, match="has no distributed tensor"):
            match({"w": torch.zeros(2, 3)}, {"w": sent})


SHARDED = ["tensors", "held", "shards", "size", "dtype", "group", "rank", "flags"]


@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
class TestShardedTensor:
    """Its shards are the receiver's, wherever the sender was."""

    @pytest.fixture
    def state(self, world: None) -> dict[str, Any]:
        """Return a state dict of one ShardedTensor, of two rows per rank."""
        from torch.distributed._shard.sharded_tensor import zeros
        from torch.distributed._shard.sharding_spec import ChunkShardingSpec

        ranks: Any = [f"rank:{rank}/cpu" for rank in range(WORLD)]
        return {"w": zeros(ChunkShardingSpec(0, ranks), 2 * WORLD, 3)}

    def test_round_trip(self, state: dict[str, Any]) -> None:
        """All metadata of the tensor survives, with its group."""
        found = round_trip(state)
        assert_same(found, state)
        assert found["w"].metadata() == state["w"].metadata()
        assert found["w"]._process_group is dist.group.WORLD

    @pytest.mark.asyncio
    @pytest.mark.parametrize("way", [{}, {"direct": True}, {"select": ["w", "step"]}])
    async def test_a_rank_without_a_shard(self, world: None, way: Any) -> None:
        """Its template's own tensor is returned, though nothing of it is filled."""
        from torch.distributed._shard.sharded_tensor import zeros
        from torch.distributed._shard.sharding_spec import ChunkShardingSpec

        assert RANK != 0

        def made(step: int) -> dict[str, Any]:
            spec = ChunkShardingSpec(0, ["rank:0/cpu"])
            return {"w": zeros(spec, 2, 3), "step": step}

        template = made(1)
        whole = template["w"]
        assert not whole.local_shards()
        async with pair(state=made(2)) as (sender, receiver):
            got = await receive(sender, receiver, into=template, **way)
        assert got is template
        assert got["w"] is whole
        assert got["step"] == 2

    def test_from_another_rank(self, state: dict[str, Any]) -> None:
        """Two ranks exchange what they hold."""
        manifest, segment = staged(state)
        tree: Any = copy.deepcopy(manifest.tree)
        items = tree[2][0][2][1]
        items[SHARDED.index("rank")], items[SHARDED.index("held")] = 3, t(3)
        found = rebuilt(replace(manifest, tree=tree), segment)["w"]
        placed = [each.placement.rank() for each in found.metadata().shards_metadata]
        assert placed == [0, 3, 2, 1]
        (shard,) = found.local_shards()
        assert shard.metadata.shard_offsets == [6, 0]

    @pytest.mark.parametrize(
        ("item", "node"),
        [
            ("tensors", t(0)), ("held", t(0, 1)), ("held", t(9)), ("shards", t()),
            ("shards", t(*[((0, 0), (2, 3), rank, "cpu") for rank in range(4)])),
            ("shards", t(((0,), (2,), 1, "cpu"))), ("size", t(7, 3)),
            ("size", t(2**52, 2**52)), ("dtype", "float33"), ("dtype", "int8"),
            ("group", t((2, 2), (2, 1), (0,))), ("group", t((8,), (1,), (0,))),
            ("group", t((2,), (1,), (1,))),
            ("shards", t(*[((n, 0), (1, 3), 1, "cpu") for n in range(2000)])),
        ],
    )  # fmt: skip
    def test_malformed(self, state: dict[str, Any], item: str, node: Any) -> None:
        """A malformed layout is an error of the peer."""
        manifest, segment = staged(state)
        tree: Any = copy.deepcopy(manifest.tree)
        tree[2][0][2][1][SHARDED.index(item)] = node
        with pytest.raises((RemoteProtocolError, DeviceMeshError, LimitExceededError)):
            rebuilt(replace(manifest, tree=tree), segment)


def test_a_torch_without_process_groups(
    monkeypatch: pytest.MonkeyPatch, mesh: DeviceMesh
) -> None:
    """It is built without them on some platforms: an error, and no AttributeError."""
    manifest, _ = staged({"w": dtensor(mesh, Shard(0), Shard(1), shape=(4, 6))})
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(DeviceMeshError, match=r"no torch\.distributed"):
        check_meshes(Frame.of(manifest), limits=LIMITS)
