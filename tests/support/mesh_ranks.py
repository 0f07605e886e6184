"""The ranks of jobs that save on one mesh, and of jobs that load on another one.

``python mesh_ranks.py save 4 DIRECTORY`` saves a state on each mesh of `SAVED`: as
``DIRECTORY/MESH``, and the full tensors that it consists of as ``DIRECTORY/MESH.pt``.

``python mesh_ranks.py load WORLD DIRECTORY`` runs the cases of `CASES` that have as
many ranks. Each rank writes what came of them to ``DIRECTORY/load-WORLD-RANK.json``: by
the name of the case, an empty text, or what went wrong.

Tests whose ranks need no collective run in one process: `as_rank` is a rank of a group
whose other ranks do not exist, and `assembled` makes one checkpoint of what such ranks
have saved.
"""

from __future__ import annotations

import json
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import zeros
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import aiockpt
from aiockpt import errors
from aiockpt.checkpointers import RankInfo
from tests.support.ports import free_port
from tests.support.ranks import rank_of

__all__ = [
    "CASES",
    "DCP",
    "SAVED",
    "Case",
    "as_rank",
    "assembled",
    "bits",
    "check",
    "distributed",
    "equal",
    "known",
    "own",
    "part_of",
    "zeroed",
]

SAVED = ("fsdp", "hsdp", "tp", "tp_fsdp", "one")
"""What is saved: by four ranks on a mesh, or by one process without a mesh."""

DCP = ("dcp_fsdp", "dcp_hsdp", "dcp_tp_fsdp")
"""What torch.distributed.checkpoint saves on the same meshes."""


class Case(NamedTuple):
    """One load by ``world`` ranks."""

    saved: str
    world: int
    mesh: str
    way: str = "load"

    @property
    def name(self) -> str:
        """A name that says it all."""
        return f"{self.saved} to {self.mesh} {self.world} by {self.way}"


_MESHES = {
    1: ("fsdp",),
    2: ("fsdp", "tp"),
    3: ("fsdp",),
    4: ("fsdp", "hsdp", "tp", "tp_fsdp"),
}
CASES = [
    *(
        Case(saved, world, mesh)
        for world, meshes in _MESHES.items()
        for mesh in meshes
        for saved in SAVED
    ),
    *(Case(saved, *at) for saved in DCP for at in ((2, "tp"), (3, "fsdp"))),
]
"""What the jobs load."""


# --------------------------------------------------------------------------- states


class Net(nn.Module):
    """Layers that can be cut, one with fewer rows than ranks, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.odd = nn.Linear(6, 3)
        self.register_buffer("mean", torch.arange(5.0))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return something to make smaller."""
        found: torch.Tensor = self.odd(self.down(self.up(batch).relu()))
        return found


def trained(meshes: dict[str, DeviceMesh], kind: str, seed: int) -> dict[str, Any]:
    """Return a model and its optimizer after a step, as torch's own functions do."""
    torch.manual_seed(seed)
    net = Net()
    mesh = meshes[kind]
    cuts = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if kind in ("tp", "tp_fsdp"):
        parallelize_module(net, mesh if kind == "tp" else mesh["tensor"], cuts)
    if kind in ("fsdp", "hsdp", "tp_fsdp"):
        data = mesh["data"] if kind == "tp_fsdp" else mesh
        for layer in (net.up, net.down):
            fully_shard(layer, mesh=data)
        fully_shard(net, mesh=data)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
    if seed == SEED:  # a template has what a fresh optimizer has
        net(torch.ones(4, 6)).square().sum().backward()
        optimizer.step()
    model, optim = get_state_dict(net, optimizer)
    parameters = dict(net.named_parameters())
    return {"model": model, "optim": optim, "parameters": parameters}


SEED = 1
"""Of what is saved."""


def full_tensors() -> dict[str, torch.Tensor]:
    """Return full tensors of odd shapes, dtypes, strides and bits."""
    noise = torch.Generator().manual_seed(3)

    def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        size = (*shape[:-1], shape[-1] * dtype.itemsize)
        raw = torch.randint(0, 256, size, dtype=torch.uint8, generator=noise)
        return raw.view(dtype)

    return {
        "rows": drawn(8, 6, dtype=torch.float32),
        "odd": torch.arange(15.0).view(5, 3),
        "long": torch.arange(13, dtype=torch.int64),
        "one row": torch.ones(1, 2),
        "none": torch.ones(0, 3),
        "no columns": torch.ones(4, 0),
        "scalar": torch.tensor(2.5),
        "bf16": drawn(7, 4, dtype=torch.bfloat16),
        "fp8": drawn(9, 2, dtype=torch.float8_e4m3fn),
        "bool": torch.arange(10) % 3 == 0,
        "complex": torch.arange(15.0).view(3, 5) * (1 + 2j),
        "turned": torch.arange(24.0).view(4, 6).t(),
        "deep": torch.arange(2 * 3 * 4 * 5, dtype=torch.int16).view(2, 3, 4, 5),
        "nan": torch.tensor([2141192193, -1, 1] * 3, dtype=torch.int32).view(
            torch.float32
        ),
    }


def cuts(kind: str, tensor: torch.Tensor) -> list[Placement]:
    """Return the placements of a full tensor on a mesh of that kind."""
    last = Shard(tensor.dim() - 1) if tensor.dim() else Replicate()
    first = Shard(0) if tensor.dim() else Replicate()
    found: dict[str, list[Placement]] = {
        "fsdp": [first],
        "tp": [last],
        "hsdp": [Replicate(), first],
        "tp_fsdp": [first, last],
    }
    return found[kind]


def distributed(
    tensor: torch.Tensor, mesh: DeviceMesh, *placements: Placement
) -> DTensor:
    """Split a full tensor that every rank knows; no rank talks to another one."""
    return distribute_tensor(tensor.clone(), mesh, placements, src_data_rank=None)


def chunked(world: int, fill: float = 0.0) -> Any:
    """Return a ShardedTensor of eight rows, which are their numbers, and more."""
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{n}/cpu" for n in range(world)])
    made = zeros(spec, 8, 3)
    for shard in made.local_shards():
        first = shard.metadata.shard_offsets[0]
        rows = torch.arange(first, first + shard.tensor.shape[0])
        shard.tensor.copy_((rows * fill).unsqueeze(1).expand_as(shard.tensor))
    return made


def state_on(
    meshes: dict[str, DeviceMesh], kind: str, *, seed: int = SEED
) -> dict[str, Any]:
    """Return a state on a mesh; with another seed, a template of it."""
    saved, mesh = seed == SEED, meshes[kind]
    whole = full_tensors()
    if not saved:
        whole = {name: zeroed(each) for name, each in whole.items()}
    cut: dict[str, Any] = {
        name: distributed(each, mesh, *cuts(kind, each)) for name, each in whole.items()
    }
    replicated = [Replicate()] * mesh.ndim
    return {
        "train": trained(meshes, kind, seed),
        "cut": cut,
        "same": {
            "whole": distributed(whole["odd"], mesh, *replicated),
            "plain": whole["rows"],
            "nested": [{"a": whole["scalar"]}, (1.5 if saved else 0.0, "x")],
            "step": 7 if saved else 0,
        },
        "tied": [cut["rows"], {"again": cut["rows"]}],
    }


def own(rank: int) -> dict[str, Any]:
    """Return what differs by rank."""
    return {"rank": rank, "rng": torch.full((40,), rank, dtype=torch.uint8)}


def zeroed(value: Any) -> Any:
    """Return a copy of a state in new memory, without what it said."""
    if isinstance(value, dict):
        return {key: zeroed(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(zeroed, value))
    if isinstance(value, torch.Tensor):
        made = torch.empty_like(value)  # keeps the strides
        bits_in(made).zero_()
        return made
    return type(value)()


def bits_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor that has all of it."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements, in their order."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8)


# ------------------------------------------------------------------------ comparing


def part_of(whole: torch.Tensor, tensor: DTensor) -> torch.Tensor:
    """Cut out of a full tensor what this rank holds of it, as torch cuts."""
    return distributed(whole, tensor.device_mesh, *tensor.placements).to_local()


def check(found: Any, whole: Any, path: str = "") -> None:
    """Compare what this rank got with the full tensors, bit by bit."""
    if isinstance(found, dict):
        assert isinstance(whole, dict), path
        assert not {*found} - {*whole}, path
        for key, value in found.items():
            check(value, whole[key], f"{path}.{key}")
    elif isinstance(found, list | tuple):
        assert type(found) is type(whole), path
        assert len(found) == len(whole), path
        for index, value in enumerate(found):
            check(value, whole[index], f"{path}[{index}]")
    elif isinstance(found, DTensor):
        equal(found.to_local(), part_of(whole, found), path)
        assert found.shape == whole.shape, path
    elif isinstance(found, ShardedTensor):
        for shard in found.local_shards():
            first, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            equal(shard.tensor, whole[first : first + rows], path)
    elif isinstance(found, torch.Tensor):
        equal(found, whole, path)
    else:
        assert type(found) is type(whole), path
        assert found == whole, path


def equal(found: torch.Tensor, expected: torch.Tensor, path: str) -> None:
    """Compare the facts and the bits of two tensors."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
    assert torch.equal(bits(found), bits(expected)), f"{path}: {found} {expected}"


def whole_of(state: Any) -> Any:
    """Return a state with its full tensors; all ranks must ask for it."""
    if isinstance(state, dict):
        return {key: whole_of(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(whole_of, state))
    if isinstance(state, DTensor):
        return state.full_tensor().detach()
    return state.detach() if isinstance(state, torch.Tensor) else state


# -------------------------------------------------------------------------- the jobs


def meshes_of(world: int) -> dict[str, DeviceMesh]:
    """Make all meshes of a job; all ranks must do so together."""
    flat = init_device_mesh("cpu", (world,))
    made = {"fsdp": flat, "tp": flat}
    if world == 4:
        for kind, names in (
            ("hsdp", ("replica", "data")),
            ("tp_fsdp", ("data", "tensor")),
        ):
            made[kind] = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    return made


def save(rank: int, directory: Path) -> None:
    """Save on each mesh as one of four ranks, and alone as rank 0."""
    meshes = meshes_of(4)
    for kind in SAVED[:-1]:
        state = state_on(meshes, kind)
        whole = {**state, "cut": full_tensors()}
        whole["tied"] = [whole["cut"]["rows"], {"again": whole["cut"]["rows"]}]
        whole = whole_of(whole)
        train = whole["train"]
        train["parameters"] = {
            name: train["model"][name] for name in train["parameters"]
        }
        state["mine"] = own(rank)
        if kind == "fsdp":
            state["sharded"] = chunked(4, fill=1.0)
            rows = torch.arange(8.0).unsqueeze(1).expand(8, 3).contiguous()
            whole["sharded"] = rows
        with aiockpt.make_sync_checkpointer() as checkpointer:
            checkpointer.save(state, directory / kind, step=1)
        if f"dcp_{kind}" in DCP:
            alike = {key: value for key, value in state.items() if key != "sharded"}
            save_by_dcp(alike, checkpoint_id=directory / f"dcp_{kind}")
        if rank == 0:
            torch.save(whole, directory / f"{kind}.pt")
            if kind == "fsdp":
                del whole["sharded"]
                save_alone({**whole, "mine": own(0)}, directory / "one")
                torch.save(whole, directory / "one.pt")


def save_alone(state: Any, path: Path) -> None:
    """Save as the only rank, whatever group there is."""
    with aiockpt.make_sync_checkpointer(rank_info=RankInfo(0, 1)) as checkpointer:
        checkpointer.save(state, path, step=1)


def load(world: int, rank: int, directory: Path) -> dict[str, str]:
    """Run all cases of so many ranks; return what went wrong."""
    meshes, said = meshes_of(world), dict[str, str]()
    templates = {kind: state_on(meshes, kind, seed=2) for kind in meshes}
    for case in CASES:
        if case.world != world:
            continue
        template = emptied(templates[case.mesh])
        try:
            load_case(case, template, rank, directory)
        except Exception:  # noqa: BLE001 - it is told
            said[case.name] = traceback.format_exc()
        else:
            said[case.name] = ""
        if case.saved == "tp":
            check_together(said, case, template, known(directory / case.saved))
    return said


def check_together(said: dict[str, str], case: Case, template: Any, whole: Any) -> None:
    """Compare what all ranks have together with the full tensor, as torch joins it."""
    everybodys = [""] * case.world
    dist.all_gather_object(everybodys, said[case.name])
    if any(everybodys):
        return
    for name in ("odd", "rows", "turned"):
        found = template["cut"][name].full_tensor()
        if not torch.equal(bits(found), bits(whole["cut"][name])):
            said[case.name] += f"{name} is another tensor"


def emptied(value: Any) -> Any:
    """Return a template in new containers, over the same tensors without elements."""
    if isinstance(value, dict):
        return {key: emptied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(emptied, value))
    if not isinstance(value, torch.Tensor):
        return type(value)()
    local = value._local_tensor if isinstance(value, DTensor) else value
    bits_in(local.detach()).zero_()
    return value


def known(path: Path) -> dict[str, Any]:
    """Return the full tensors of what is saved."""
    place = path.with_name(f"{path.name.removeprefix('dcp_')}.pt")
    found: dict[str, Any] = torch.load(place, weights_only=True)
    return found


def load_case(case: Case, template: Any, rank: int, directory: Path) -> None:
    """Load into a template, and compare every tensor of it."""
    path = directory / case.saved
    whole = known(path)
    if case.saved == "fsdp":
        template["sharded"] = of_sharded(case, template["cut"]["rows"].device_mesh)
    saved_by = 1 if case.saved == "one" else 4
    if case.world == saved_by and case.saved not in DCP:
        template["mine"] = zeroed(own(0))
        whole["mine"] = own(rank if saved_by == 4 else 0)
    if case.saved in DCP:  # it saves tied tensors twice
        del template["train"]["parameters"], template["tied"]
    parameters: dict[str, Any] = template["train"].get("parameters", {})
    homes = {
        name: each.to_local().data_ptr()
        for name, each in parameters.items()
        if isinstance(each, DTensor)
    }
    tied = template["cut"]["rows"]
    found = aiockpt.load(path, into=template)
    assert found is template
    check(found, whole)
    # Sums know no mesh: each mesh is proved by one that saved, and the other way round.
    if "tp_fsdp" in (case.saved, case.mesh):
        prove(found, path)
    if "tied" in found:
        assert found["tied"][0] is found["tied"][1]["again"] is tied
    for name, each in parameters.items():
        assert found["train"]["parameters"][name] is each
        assert each.requires_grad
        if name in homes:
            assert each.to_local().data_ptr() == homes[name]


def prove(found: Any, path: Path) -> None:
    """Compare the sum of the ranks' fingerprints with that of the files."""
    ours = aiockpt.fingerprint(found, group=dist.group.WORLD)
    theirs = aiockpt.fingerprint(path)
    ours.require(theirs)
    mine = aiockpt.fingerprint(found)
    cut = [name for name in ours.tensors if name.startswith("cut.")]
    for name in cut:  # but each rank has only a part
        if dist.get_world_size() > 1 and not mine.tensors[name].wholes:
            with pytest.raises(errors.FingerprintMismatchError, match="add up"):
                mine.require(ours)
            break
    assert len(cut) == len(full_tensors())
    by_rank = {"mine.rng"} if "mine" in found and dist.get_world_size() > 1 else set()
    assert {*ours.by_rank} == by_rank


def of_sharded(case: Case, mesh: DeviceMesh) -> torch.Tensor:
    """Return a template of a ShardedTensor: one of its kind, or of any other."""
    if case.mesh == "tp":
        return distributed(torch.zeros(8, 3), mesh, Shard(1))
    return torch.zeros(8, 3) if case.world == 3 else chunked(case.world)


# --------------------------------------------------------- ranks that do not exist


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """Be a rank of a default group whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it would take the next rank for this one


def assembled(path: Path, world: int, state_of: Callable[[int], Any]) -> Path:
    """Save the states of all ranks as one checkpoint, from this process."""
    from tests.support.saving import save as save_quickly

    path.mkdir(parents=True)
    marker: dict[str, Any] = {}
    for rank in range(world):
        alone = path.with_name(f"{path.name}-rank-{rank}")
        with as_rank(rank, world):
            save_quickly(alone, state_of(rank))
        adopt(alone, path, rank, marker)
    return path


def adopt(alone: Path, path: Path, rank: int, marker: dict[str, Any]) -> None:
    """Make the file of a checkpoint of one rank that of a rank of another one."""
    said = json.loads((alone / "commit.json").read_text())
    name = f"checkpoint_{rank}.safetensors"
    (file,) = said["files"].values()
    shutil.move(alone / "checkpoint_0.safetensors", path / name)
    shutil.rmtree(alone)
    files = {**marker.get("files", {}), name: file}
    marker.update({**said, "files": files, "world_size": max(len(files), 1)})
    (path / "commit.json").write_text(json.dumps(marker, indent=2))


# ------------------------------------------------------------------------------ main


def main(verb: str, world: int, directory: Path) -> None:
    """Save or load as one of the ranks."""
    port = free_port()
    rank = rank_of(world)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo",
        init_method=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    if verb == "save":
        save(rank, directory)
    else:
        said = load(world, rank, directory)
        (directory / f"load-{world}-{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
