"""Distributed tensors: takes DTensors and ShardedTensors apart, and rebuilds them.

Each travels as ``["ext", tag, payload]``. The payload has its local tensors, which are
in the data segment like any tensor, and a layout (see `aiockpt.state.sharding`).

The receiver uses the tensors of a template as they are. It rebuilds the others over
process groups of this process. It never makes a new group, because that is a
collective, which would wait for ranks that may not be receiving anything. If a group is
missing, the receiver raises `DeviceMeshError` before it requests any tensor.

``torch.distributed.tensor`` is imported only when a state dict or a peer has such a
leaf.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from msgspec.json import encode
from msgspec.structs import replace

from aiockpt.errors import (
    DeviceMeshError,
    LimitExceededError,
    RemoteProtocolError,
    UnsupportedLeafError,
)
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import PARAMETER, REQUIRES_GRAD
from aiockpt.format.paths import Node, Path, format_path
from aiockpt.format.references import registered
from aiockpt.format.registry import Registry
from aiockpt.format.tree import decode_tree
from aiockpt.state.leaves import DTYPE_NAMES, DTYPES
from aiockpt.state.sharding import (
    LAYOUTS,
    OPERATIONS,
    DTensorLayout,
    Layout,
    Mesh,
    Partial,
    Placement,
    Ranks,
    Replicate,
    Shard,
    ShardedLayout,
    Split,
    StridedSplit,
    parse_layout,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SHARDED: Final = "torch.distributed._shard.sharded_tensor"

_Sizes: TypeAlias = tuple[int, ...]

# To compare shards with each other takes time that grows with their square.
_MAX_SHARDS: Final = 1024
_MAX_SHARDS_PER_RANK: Final = 16  # if these are more

# Describing a mesh takes long, and most tensors of a state dict have the same one.
_MESHES: WeakKeyDictionary[DeviceMesh, Mesh] = WeakKeyDictionary()


class Parts(NamedTuple):
    """A distributed tensor taken apart: its layout and its local tensors."""

    layout: Layout
    tensors: tuple[torch.Tensor, ...]


class _CannotTravelError(Exception):
    """The reason why a distributed tensor cannot travel."""


KnownLayouts: TypeAlias = dict[object, DTensorLayout]
"""Layouts by what torch says about them; many tensors have the same one."""


def take_apart(
    tensor: torch.Tensor, path: Path, known: KnownLayouts | None = None
) -> Parts | None:
    """Return the parts of a distributed tensor; None for any other tensor.

    Args:
        tensor: The tensor.
        path: Its path, for errors.
        known: The layouts of former tensors of the same state dict; gets new ones.

    Raises:
        UnsupportedLeafError: the tensor is distributed in a way that cannot travel.
    """
    try:
        if has_version(tensor):
            return _dtensor_parts(tensor, {} if known is None else known)
        if type(tensor) is _loaded(_SHARDED, "ShardedTensor"):
            return _sharded_parts(tensor)
    except _CannotTravelError as error:
        name, why = type(tensor).__name__, str(error)
        raise UnsupportedLeafError(format_path(path), name, why) from None
    return None


def local_tensors(tensor: Any) -> Sequence[torch.Tensor]:
    """Return the local tensors of a distributed tensor; none of any other tensor."""
    if has_version(tensor):
        return (tensor._local_tensor,)  # noqa: SLF001
    if type(tensor) is _loaded(_SHARDED, "ShardedTensor"):
        return [each.tensor for each in tensor.local_shards()]
    return ()


def has_version(whole: torch.Tensor) -> bool:
    """Say whether a tensor is a DTensor, for which autograd counts versions."""
    return type(whole) is _loaded("torch.distributed.tensor", "DTensor")


def _loaded(module: str, name: str) -> object:
    # If the module has not been imported, no tensor of its type exists.
    return getattr(sys.modules.get(module), name, None)


def _dtensor_parts(value: Any, known: KnownLayouts) -> Parts:
    spec, local = value._spec, _local(value._local_tensor)  # noqa: SLF001
    meta = spec.tensor_meta
    if meta is None or meta.dtype != local.dtype:
        raise _CannotTravelError("it does not say what the whole tensor is")
    flags = _flags(value, requires_grad=value.requires_grad)
    # To torch, placements of two types may be equal.
    key = spec, flags, *map(type, spec.placements)
    if key not in known:
        known[key] = _layout_of(spec, flags)
    return Parts(known[key], (local,))


def _layout_of(spec: Any, flags: int) -> DTensorLayout:
    """Return the layout of a DTensor with this spec, on this rank."""
    if spec.mesh not in _MESHES:
        _MESHES[spec.mesh] = mesh_of(spec.mesh)
    at, meta = spec.mesh.get_coordinate(), spec.tensor_meta
    return DTensorLayout(
        mesh=_MESHES[spec.mesh],
        coordinate=None if at is None else tuple(at),
        placements=tuple(map(_described, spec.placements)),
        order=_order(spec),
        shape=tuple(meta.shape),
        stride=tuple(meta.stride),
        flags=flags,
    )


def _sharded_parts(value: Any) -> Parts:
    metadata, local = value.metadata(), value.local_shards()
    shards = tuple(map(_shard, metadata.shards_metadata))
    mine = [_shard(each.metadata) for each in local]
    if any(shard not in shards for shard in mine):
        raise _CannotTravelError("a local shard of it is not in its metadata")
    tensors = tuple(_local(each.tensor) for each in local)
    ranks = torch.distributed.get_process_group_ranks(value._process_group)  # noqa: SLF001
    properties = metadata.tensor_properties
    layout = ShardedLayout(
        held=tuple(map(shards.index, mine)),
        shards=shards,
        size=tuple(metadata.size),
        dtype=DTYPE_NAMES[properties.dtype],
        group=ranks_of(torch.tensor(ranks)),
        rank=_this_rank("a ShardedTensor"),
        flags=_flags(value, requires_grad=properties.requires_grad),
    )
    return Parts(layout, tensors)


def _shard(metadata: Any) -> Shard:
    placement = metadata.placement
    if placement is None or placement.rank() is None:
        raise _CannotTravelError("a shard of it is not placed on a rank")
    return Shard(
        offsets=tuple(metadata.shard_offsets),
        sizes=tuple(metadata.shard_sizes),
        rank=placement.rank(),
        device=str(placement.device()),
    )


def _flags(value: object, *, requires_grad: bool) -> int:
    flags = REQUIRES_GRAD if requires_grad else 0
    return flags | (PARAMETER if getattr(value, "_is_param", False) else 0)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        tensor = tensor.wait()  # type: ignore[attr-defined]
    if not is_plain(tensor):
        kind = f"{type(tensor).__name__} with layout {tensor.layout}"
        raise _CannotTravelError(f"its local tensor is a {kind}")
    return tensor.detach() if tensor.requires_grad else tensor


def is_plain(tensor: object) -> bool:
    """Say whether the data segment can hold a tensor without a layout."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.dtype in DTYPE_NAMES
        and not tensor.is_nested
    )


def _order(spec: Any) -> tuple[tuple[int, _Sizes], ...] | None:
    """Return the order of the splits; None if the placements imply it."""
    plain = type(spec)(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta)
    order = getattr(spec, "shard_order", None)
    if order is None or order == plain.shard_order:
        return None
    return tuple((entry.tensor_dim, tuple(entry.mesh_dims)) for entry in order)


def mesh_of(mesh: DeviceMesh) -> Mesh:
    """Return a mesh as data."""
    root = mesh._get_root_mesh()  # noqa: SLF001 - a mesh that was cut out has a root
    cut_out_of = None if root is mesh or root == mesh else mesh_of(root)
    names, grid = mesh.mesh_dim_names, ranks_of(mesh.mesh)
    return Mesh(mesh.device_type, names, grid, cut_out_of)


def ranks_of(ranks: torch.Tensor) -> Ranks:
    """Return a grid of ranks as data; short if it is regular."""
    sizes, first = tuple(ranks.shape), int(ranks.flatten()[0])
    nexts = [ranks.select(dim, min(1, size - 1)) for dim, size in enumerate(sizes)]
    strides = tuple(int(each.flatten()[0]) - first for each in nexts)
    regular = Ranks(sizes, strides, (first,))
    if regular.flat() == (flat := ranks.flatten().tolist()):
        return regular
    return Ranks(sizes, None, tuple(flat))


def _described(placement: Any) -> Placement:
    """Return a placement of torch's as data."""
    from torch.distributed.tensor import placement_types as kinds

    if type(placement) is kinds.Replicate:
        return Replicate()
    if type(placement) is kinds.Shard:
        return Split(placement.dim)
    if type(placement) is kinds._StridedShard:  # noqa: SLF001 - FSDP over tensor parallel
        return StridedSplit(placement.dim, int(placement.split_factor))
    operation: Any = getattr(placement, "reduce_op", None)
    if type(placement) is kinds.Partial and operation in OPERATIONS:
        return Partial(operation)
    name = type(placement).__name__
    raise _CannotTravelError(f"its placement {name} cannot travel; redistribute it")


def _placement(placement: Placement) -> Any:
    """Return torch's placement; the inverse of `_described`."""
    from torch.distributed.tensor import placement_types as kinds

    match placement:
        case Split(dim):
            return kinds.Shard(dim)
        case StridedSplit(dim, pieces):
            return kinds._StridedShard(dim, split_factor=pieces)  # noqa: SLF001
        case Partial(operation):
            return kinds.Partial(operation)
    return kinds.Replicate()


# ------------------------------------------------------- rebuilding: process groups


def group_rank() -> tuple[int, int] | None:
    """Return this process's rank in the default process group, and how many it has.

    None: there is no such group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(), dist.get_world_size()


def _this_rank(what: str) -> int:
    """Return this process's rank in the default process group.

    Raises:
        DeviceMeshError: there is no default process group.
    """
    if not dist.is_available():
        raise DeviceMeshError(what, "this build of torch has no torch.distributed")
    if not dist.is_initialized():
        remedy = "start a job of as many ranks, and call init_process_group first"
        raise DeviceMeshError(what, f"there is no default process group; {remedy}")
    return dist.get_rank()


def _check_ranks(grid: Ranks, what: str) -> list[int]:
    """Return the ranks of a grid, all of which the default process group has.

    Raises:
        DeviceMeshError: the group has not all of them, or there is no group.
    """
    _this_rank(what)
    world = dist.get_world_size()
    if grid.count > world:
        detail = (
            f"the default process group has {world} ranks, which is too few; start a "
            f"job of {grid.count} ranks"
        )
        raise DeviceMeshError(what, detail)
    ranks = grid.flat()
    if len(set(ranks)) < len(ranks) or not all(0 <= rank < world for rank in ranks):
        detail = f"ranks {ranks[:20]} are not those of a group of {world}"
        raise DeviceMeshError(what, detail)
    return ranks


class Meshes:
    """The meshes of one tree, each looked up once."""

    def __init__(self) -> None:
        # Each mesh of this process, and the coordinate of this rank.
        self._found: dict[Mesh, tuple[DeviceMesh, tuple[int, ...] | None]] = {}

    def find(self, layout: DTensorLayout) -> DeviceMesh:
        """Return this process's mesh for a local tensor of another process.

        Raises:
            DeviceMeshError: see `_find_mesh`; or this rank holds another part.
        """
        mesh = layout.mesh
        if mesh not in self._found:
            found = _find_mesh(mesh)
            at = mesh.grid.coordinate(_this_rank(str(mesh)))
            self._found[mesh] = found, at
        found, at = self._found[mesh]
        if mesh.grid.sizes and layout.held(at) != layout.held(layout.coordinate):
            detail = f"this rank is at {at} and holds another part of the tensor"
            raise DeviceMeshError(
                str(layout),
                f"{detail}; receive from the rank with the same mesh coordinate, or "
                "load without rank=",
            )
        return found


def _find_mesh(mesh: Mesh) -> DeviceMesh:
    """Return an equal mesh, over process groups of this process.

    Raises:
        DeviceMeshError: there is no default process group, it has other ranks, or a
            dimension of the mesh has no group.
    """
    if mesh.root is not None and mesh.names is not None:
        # Cut it out of its root, as the sender did: to torch, two meshes are equal only
        # if their roots are.
        try:
            cut = _over_groups(mesh.root)[mesh.names]
        except (DeviceMeshError, KeyError, RuntimeError, ValueError):
            return _over_groups(mesh)
        if cut.mesh.flatten().tolist() == _check_ranks(mesh.grid, str(mesh)):
            return cut
    return _over_groups(mesh)


def _over_groups(mesh: Mesh) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    if not mesh.grid.sizes:
        return _of_one(mesh)
    ranks = _check_ranks(mesh.grid, str(mesh))
    groups = [_group_along(mesh, dim) for dim in range(len(mesh.grid.sizes))]
    grid = torch.tensor(ranks, dtype=torch.int).view(mesh.grid.sizes)
    made = DeviceMesh(
        mesh.device_type, grid, mesh_dim_names=mesh.names, _init_backend=False
    )
    # As DeviceMesh.from_group does, but that needs names and treats one dimension
    # differently.
    made._dim_group_names = [group.group_name for group in groups]  # noqa: SLF001
    if hasattr(made, "_pg_registry"):  # torch.compile's, and newer than 2.10
        made._pg_registry.update((group.group_name, group) for group in groups)  # noqa: SLF001
    return made


def _of_one(mesh: Mesh) -> DeviceMesh:
    """Return a mesh without dimensions, whose tensors are whole and need no group."""
    from torch.distributed.device_mesh import DeviceMesh

    _this_rank(str(mesh))
    try:
        rank = torch.tensor(mesh.grid.ranks[0], dtype=torch.int)
        return DeviceMesh(mesh.device_type, rank, _init_backend=False)
    except (RuntimeError, ValueError) as error:  # torch lacks the rank or the device
        raise DeviceMeshError(str(mesh), str(error)) from error


def _group_along(mesh: Mesh, dim: int) -> dist.ProcessGroup:
    name = mesh.names[dim] if mesh.names else f"dim_{dim}"
    ranks = mesh.grid.along(dim, rank := _this_rank(str(mesh)))
    if ranks is None:
        raise DeviceMeshError(str(mesh), f"rank {rank} is not in it")
    group = _find_group(ranks, mesh.device_type, f"mesh_{name}")
    if group is not None:
        return group
    named = f", mesh_dim_names={mesh.names}" if mesh.names else ""
    how = f"init_device_mesh({mesh.device_type!r}, {mesh.grid.sizes}{named})"
    raise DeviceMeshError(
        str(mesh),
        f"there is no process group of ranks {ranks[:20]} for its dimension {name}; "
        f"make the mesh on all ranks before ({how})",
    )


def _find_group(
    ranks: list[int], device_type: str | None, description: str
) -> dist.ProcessGroup | None:
    """Return a process group of exactly these ranks; prefer this description."""
    from torch.distributed.distributed_c10d import _world

    wanted, found = set(ranks), []
    for group, members in list(_world.pg_group_ranks.items()):
        if set(members) == wanted and isinstance(group, dist.ProcessGroup):
            types = {device.type for device in group._device_types}  # noqa: SLF001
            if device_type is None or device_type in types:
                found.append(group)
    described = [group for group in found if group.group_desc == description]
    return next(iter([*described, *found]), None)


# ------------------------------------------------------------- rebuilding: tensors


class LayoutReader:
    """Reads the layouts of distributed tensors, and decodes each distinct one once.

    Args:
        limits: What is accepted.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: dict[bytes, Layout] = {}
        self._meshes: dict[object, Mesh] = {}
        self._same: dict[tuple[int, int], bool] = {}

    def __repr__(self) -> str:
        return f"<LayoutReader layouts={len(self._known)}>"

    def read(self, path: Path, tag: str, node: Node) -> tuple[list[int], Layout]:
        """Return the numbers of the local tensors, and the layout, of a leaf's payload.

        Raises:
            RemoteProtocolError, LimitExceededError: it is malformed, or too large.
        """
        numbers: list[int | None]
        match node:
            case ["tuple", [["tensor", int(number)], *rest]]:
                numbers = [number]
            case ["tuple", [["tuple", [*held]], *rest]]:
                numbers = [*map(_number_of, held)]
            case ["tuple", [_, *rest]]:
                numbers = [None]
            case _:
                raise _malformed(path, tag, "its payload is no tuple")
        if None in numbers:
            raise _malformed(path, tag, "its local part is no tensor")
        key = encode([tag, rest])
        if key not in self._known:
            kind, more = LAYOUTS[tag], cast("Node", ["tuple", [None, *rest]])
            nothing = Registry()  # a layout contains no other leaves
            try:
                payload = decode_tree(
                    more, registry=nothing, tensors=(), limits=self._limits
                )
                self._known[key] = self._of_known_mesh(parse_layout(kind, payload))
            except (TypeError, ValueError, RemoteProtocolError) as error:
                raise _malformed(path, tag, str(error)) from error
        layout, count = self._known[key], 1
        if isinstance(layout, ShardedLayout):
            count = len(layout.held)
        if len(numbers) != count:
            raise _malformed(path, tag, f"it has {len(numbers)} local tensors")
        return cast("list[int]", numbers), layout

    def all_in(self, tree: Node) -> Iterator[tuple[Path, list[int], Layout]]:
        """Yield the path of each distributed tensor in a tree, and what `read` says."""
        for path, tag, node in registered(tree):
            if tag in LAYOUTS:
                yield path, *self.read(path, tag, node)

    def are_same(self, one: Layout, other: Layout) -> bool:
        """Say whether a tensor of one layout, which this has read, fits another one."""
        key = id(one), id(other)  # of objects that live as long as this
        if key not in self._same:
            self._same[key] = one is other or (
                type(one) is type(other) and one.comparable() == other.comparable()
            )
        return self._same[key]

    def _of_known_mesh(self, layout: Layout) -> Layout:
        """Return a layout whose mesh is the same object as in others with this mesh."""
        if not isinstance(layout, DTensorLayout):
            return layout
        mesh = layout.mesh
        known = self._meshes.setdefault((mesh, mesh.root), mesh)
        return replace(layout, mesh=known)


def _number_of(node: Node) -> int | None:
    match node:
        case ["tensor", int(number)]:
            return number
    return None


def _malformed(path: Path, tag: str, why: str) -> RemoteProtocolError:
    where = format_path(path)[:200] or "the root"
    return RemoteProtocolError(f"malformed {tag} at {where}: {why}")


def check_places(found: Mapping[Path, Layout]) -> None:
    """Check that this process can rebuild each tensor, before any transfer.

    Raises:
        DeviceMeshError: a process group is missing; names the tensor's path.
        LimitExceededError: a tensor has too many shards.
    """
    meshes = Meshes()
    for path, layout in found.items():
        try:
            if isinstance(layout, DTensorLayout):
                meshes.find(layout)
            else:
                _placed(layout)
        except DeviceMeshError as error:
            error.path = format_path(path)
            raise


def decoders(
    wholes: Mapping[int, torch.Tensor],
) -> dict[str, Callable[[Any], object]]:
    """Return the decoders of one tree, by tag.

    Args:
        wholes: The template's own distributed tensors, by the `id` of a local tensor.
            They are used as they are.
    """
    builder = _Builder(wholes)
    return {tag: partial(builder.build, kind) for tag, kind in LAYOUTS.items()}


class _Builder:
    """Rebuilds the distributed tensors of one tree."""

    def __init__(self, wholes: Mapping[int, torch.Tensor]) -> None:
        self._wholes = wholes
        self._meshes = Meshes()
        # A tensor that the state dict holds twice becomes one tensor again.
        self._built: dict[tuple[object, Layout], torch.Tensor] = {}

    def build(self, kind: type[Layout], payload: Any) -> torch.Tensor:
        layout = parse_layout(kind, payload)
        held = payload[0] if isinstance(layout, ShardedLayout) else payload[:1]
        if held and (whole := self._wholes.get(id(held[0]))) is not None:
            return whole
        key = tuple(map(id, held)), layout
        if key not in self._built:
            if isinstance(layout, ShardedLayout):
                made = _sharded(held, layout)
            else:
                made = self._dtensor(held[0], layout)
            if layout.flags & PARAMETER:
                made = torch.nn.Parameter(made, bool(layout.flags & REQUIRES_GRAD))
            self._built[key] = made
        return self._built[key]

    def _dtensor(self, local: torch.Tensor, layout: DTensorLayout) -> torch.Tensor:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        _check_local(local, layout)
        mesh = self._meshes.find(layout)
        meta = TensorMeta(torch.Size(layout.shape), layout.stride, local.dtype)
        placements = tuple(map(_placement, layout.placements))
        more = {} if layout.order is None else _ordered(layout.order)
        spec = DTensorSpec(mesh, placements, tensor_meta=meta, **more)
        requires_grad = bool(layout.flags & REQUIRES_GRAD)
        return DTensor(local, spec, requires_grad=requires_grad)  # type: ignore[no-untyped-call]


def _check_local(local: torch.Tensor, layout: DTensorLayout) -> None:
    if not is_plain(local) or local.requires_grad:
        raise TypeError("the local tensor is no plain tensor")
    fits = local.dim() == len(layout.shape) and all(
        part <= whole for part, whole in zip(local.shape, layout.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{list(local.shape)} is no part of {list(layout.shape)}")


def _ordered(order: tuple[tuple[int, tuple[int, ...]], ...]) -> dict[str, Any]:
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

    entries = tuple(ShardOrderEntry(dim, by) for dim, by in order)
    return {"shard_order": entries, "use_strided_shard_as_shard_order": False}


def _placed(layout: ShardedLayout) -> tuple[list[int], Any]:
    """Return the rank that holds each shard here, and the process group.

    This rank holds the shards that the sender held, so the two ranks are exchanged.

    Raises:
        DeviceMeshError: this process has no process group of these ranks.
        LimitExceededError: there are more shards than such a group can have.
    """
    what = str(layout)
    ranks = _check_ranks(layout.group, what)
    limit = max(_MAX_SHARDS, _MAX_SHARDS_PER_RANK * len(ranks))
    if len(layout.shards) > limit:
        actual = len(layout.shards)
        raise LimitExceededError(
            "the number of shards",
            limit=limit,
            actual=actual,
            detail="no ShardedTensor of this group has as many",
        )
    here = _this_rank(what)
    swap = {layout.rank: here, here: layout.rank}
    holders = [swap.get(shard.rank, shard.rank) for shard in layout.shards]
    group = _find_group(ranks, None, "")
    if group is None or not {here, *holders} <= set(ranks):
        detail = f"there is no process group of ranks {ranks[:20]} with all its shards"
        raise DeviceMeshError(what, detail)
    return holders, group


def _sharded(tensors: tuple[torch.Tensor, ...], layout: ShardedLayout) -> torch.Tensor:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import api
    from torch.distributed._shard.sharded_tensor.metadata import (
        ShardedTensorMetadata,
        TensorProperties,
    )
    from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

    if len(tensors) != len(layout.held) or not all(map(is_plain, tensors)):
        raise TypeError("the local tensors are not plain, or not those of its shards")
    holders, group = _placed(layout)
    devices = [torch.device(shard.device) for shard in layout.shards]
    for index, tensor in zip(layout.held, tensors, strict=True):
        devices[index] = tensor.device
    metadata = [
        ShardMetadata(list(shard.offsets), list(shard.sizes), f"rank:{rank}/{device}")
        for shard, rank, device in zip(layout.shards, holders, devices, strict=True)
    ]
    requires_grad = bool(layout.flags & REQUIRES_GRAD)
    properties = TensorProperties(
        dtype=DTYPES[layout.dtype],
        requires_grad=requires_grad,
        pin_memory=any(tensor.is_pinned() for tensor in tensors),
    )
    return api.ShardedTensor._init_from_local_shards_and_global_metadata(  # noqa: SLF001
        [
            LocalShard(tensor.requires_grad_(requires_grad), metadata[index])
            for index, tensor in zip(layout.held, tensors, strict=True)
        ],
        ShardedTensorMetadata(metadata, torch.Size(layout.size), properties),
        process_group=group,
    )
