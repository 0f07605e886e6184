"""Find the device mesh of this process that a layout means.

A mesh is put together from process groups that exist. No new group is ever made: that
is a collective, and would wait for ranks that may not be receiving anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, TypeAlias

import torch
import torch.distributed as dist

from aiockpt.errors import DeviceMeshError
from aiockpt.state.layouts import DTensorLayout, Mesh, Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_Sizes: TypeAlias = tuple[int, ...]

__all__ = [
    "Meshes",
    "check_ranks",
    "encode_mesh",
    "encode_ranks",
    "find_group",
    "find_mesh",
    "this_rank",
]


def this_rank(what: str) -> int:
    """Return this process's rank in the default process group.

    Raises:
        DeviceMeshError: there is none.
    """
    if not dist.is_available():
        raise DeviceMeshError(what, "this build of torch has no torch.distributed")
    if not dist.is_initialized():
        remedy = "call torch.distributed.init_process_group first, or pass into="
        raise DeviceMeshError(what, f"there is no default process group; {remedy}")
    return dist.get_rank()


def check_ranks(grid: Ranks, what: str) -> list[int]:
    """Return the ranks of a grid, which the default process group has.

    Raises:
        DeviceMeshError: it has not, or there is none.
    """
    this_rank(what)
    world = dist.get_world_size()
    if grid.count > world:
        detail = f"the default process group has {world} ranks, which is too few"
        raise DeviceMeshError(what, detail)
    ranks = grid.flat()
    if len(set(ranks)) < len(ranks) or not all(0 <= rank < world for rank in ranks):
        detail = f"ranks {ranks[:20]} are not those of a group of {world}"
        raise DeviceMeshError(what, detail)
    return ranks


class Meshes:
    """The meshes of one tree, each looked up once."""

    def __init__(self) -> None:
        self._found: dict[Mesh, DeviceMesh] = {}
        self._places: dict[Mesh, tuple[int, ...] | None] = {}

    def __repr__(self) -> str:
        return f"<Meshes found={len(self._found)}>"

    def find(self, layout: DTensorLayout) -> DeviceMesh:
        """Return the mesh that a local tensor of another process belongs on here.

        Raises:
            DeviceMeshError: as `find_mesh`; or this rank holds another part.
        """
        mesh = layout.mesh
        if mesh not in self._found:
            self._found[mesh] = find_mesh(mesh)
            self._places[mesh] = mesh.grid.coordinate(this_rank(str(mesh)))
        if not mesh.grid.sizes:
            return self._found[mesh]
        at = self._places[mesh]
        if layout.held(at) != layout.held(layout.coordinate):
            detail = f"this rank is at {at} and holds another part of the tensor"
            raise DeviceMeshError(str(layout), f"{detail}; receive from its like")
        return self._found[mesh]


def find_mesh(mesh: Mesh) -> DeviceMesh:
    """Return an equal mesh, over process groups of this process.

    Raises:
        DeviceMeshError: there is no default process group, it has other ranks, or a
            dimension of the mesh has no group.
    """
    if mesh.root is not None and mesh.names is not None:
        # Cut it out of its root as its maker did: two meshes are equal to torch only
        # if these are too.
        try:
            cut = _over_groups(mesh.root)[mesh.names]
        except (DeviceMeshError, KeyError, RuntimeError, ValueError):
            return _over_groups(mesh)
        if cut.mesh.flatten().tolist() == check_ranks(mesh.grid, str(mesh)):
            return cut
    return _over_groups(mesh)


def _over_groups(mesh: Mesh) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    if not mesh.grid.sizes:
        return _of_one(mesh)
    ranks = check_ranks(mesh.grid, str(mesh))
    groups = [_group_along(mesh, dim) for dim in range(len(mesh.grid.sizes))]
    grid = torch.tensor(ranks, dtype=torch.int).view(mesh.grid.sizes)
    made = DeviceMesh(
        mesh.device_type, grid, mesh_dim_names=mesh.names, _init_backend=False
    )
    # As DeviceMesh.from_group does, which wants names, and one dimension apart.
    made._dim_group_names = [group.group_name for group in groups]  # noqa: SLF001
    if hasattr(made, "_pg_registry"):  # torch.compile's, and newer than 2.10
        made._pg_registry.update((group.group_name, group) for group in groups)  # noqa: SLF001
    return made


def _of_one(mesh: Mesh) -> DeviceMesh:
    """Return a mesh without dimensions: its tensors are whole, and need no group."""
    from torch.distributed.device_mesh import DeviceMesh

    rank = torch.tensor(mesh.grid.ranks[0], dtype=torch.int)
    return DeviceMesh(mesh.device_type, rank, _init_backend=False)


def _group_along(mesh: Mesh, dim: int) -> dist.ProcessGroup:
    name = mesh.names[dim] if mesh.names else f"dim_{dim}"
    ranks = mesh.grid.along(dim, rank := this_rank(str(mesh)))
    if ranks is None:
        raise DeviceMeshError(str(mesh), f"rank {rank} is not in it")
    group = find_group(ranks, mesh.device_type, f"mesh_{name}")
    return group or _no_group(mesh, name, ranks)


def _no_group(mesh: Mesh, name: str, ranks: list[int]) -> NoReturn:
    sizes, names = mesh.grid.sizes, mesh.names
    named = f", mesh_dim_names={names}" if names else ""
    how = f"init_device_mesh({mesh.device_type!r}, {sizes}{named})"
    raise DeviceMeshError(
        str(mesh),
        f"there is no process group of ranks {ranks[:20]} for its dimension {name}; "
        f"make the mesh on all ranks before ({how}), or pass into=",
    )


def find_group(
    ranks: list[int], device_type: str | None, description: str
) -> dist.ProcessGroup | None:
    """Return a process group of exactly these ranks; rather one so described."""
    from torch.distributed.distributed_c10d import _world

    wanted, found = set(ranks), []
    for group, members in list(_world.pg_group_ranks.items()):
        if set(members) == wanted and isinstance(group, dist.ProcessGroup):
            types = {device.type for device in group._device_types}  # noqa: SLF001
            if device_type is None or device_type in types:
                found.append(group)
    described = [group for group in found if group.group_desc == description]
    return next(iter([*described, *found]), None)


def encode_mesh(mesh: DeviceMesh) -> tuple[object, ...]:
    """Return a mesh as the payload of a leaf has it."""
    root = mesh._get_root_mesh()  # noqa: SLF001 - a mesh that was cut out has a root
    own = (mesh.device_type, mesh.mesh_dim_names, encode_ranks(mesh.mesh))
    return (*own, None if root is mesh or root == mesh else encode_mesh(root))


def encode_ranks(ranks: torch.Tensor) -> tuple[_Sizes, _Sizes | None, _Sizes]:
    """Return a grid of ranks, briefly where it is regular."""
    sizes, first = tuple(ranks.shape), int(ranks.flatten()[0])
    nexts = [ranks.select(dim, min(1, size - 1)) for dim, size in enumerate(sizes)]
    strides = tuple(int(each.flatten()[0]) - first for each in nexts)
    if Ranks(sizes, strides, (first,)).flat() == (flat := ranks.flatten().tolist()):
        return sizes, strides, (first,)
    return sizes, None, tuple(flat)
