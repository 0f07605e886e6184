"""The ranks of jobs that save and publish on one mesh, and that load on another one.

``python mesh_ranks.py DIRECTORY few`` forks four ranks of gloo. They make a state on
each mesh of `SENT`, save it as ``DIRECTORY/MESH``, and the full tensors that it
consists of as ``DIRECTORY/MESH.pt``, and publish it. Then they, and one job of fewer
ranks after the other, run their `CASES`. Each rank writes what came of them to
``DIRECTORY/WORLD-RANK.json``: by the name of the case, an empty text, or what went
wrong. A job of zero ranks is a process without a process group. ``all`` instead of
``few`` adds the cases that are left to the night.

Tests whose ranks need no collective run in one process: `as_rank` is a rank of a group
whose other ranks do not exist, and `assembled` makes one checkpoint of what such ranks
have saved.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from aiockpt.background_transport import BackgroundTransport
from aiockpt.checkpointers import RankInfo
from tests.support.ports import free_port
from tests.support.transports import transport

SENT = ("fsdp", "hsdp", "tp", "tp_fsdp")
"""The meshes on which four ranks save and publish a state."""

SAVED = (*SENT, "one")
"""What is saved: by four ranks on a mesh, or by one process without a mesh."""

DCP = ("dcp_hsdp", "dcp_tp_fsdp")
"""What torch.distributed.checkpoint saves on the same meshes."""

STEP = 7
SECONDS = 60


class Case(NamedTuple):
    """One load or receive by ``world`` ranks."""

    saved: str
    world: int
    mesh: str
    way: str = "load"

    @property
    def name(self) -> str:
        """A name that says it all."""
        return f"{self.saved} to {self.mesh} {self.world} by {self.way}"


_MESHES = {4: SENT, 3: ("fsdp",), 2: ("fsdp", "tp"), 1: ("fsdp",)}
CASES = [
    *(
        Case(saved, world, mesh, way)
        for world, meshes in _MESHES.items()
        for mesh in meshes
        for way, kinds in (("load", SAVED), ("recv", SENT))
        for saved in kinds
    ),
    *(Case(saved, *at) for saved in DCP for at in ((2, "tp"), (3, "fsdp"))),
    *(Case(sent, 0, "alone", way) for sent in SENT for way in ("recv", "anew")),
]
"""What the jobs load and receive."""

FEW = {
    *(("fsdp", 4, mesh, way) for mesh in ("fsdp", "tp") for way in ("load", "recv")),
    *(("tp_fsdp", 4, "tp_fsdp", way) for way in ("load", "recv")),
    ("hsdp", 4, "tp_fsdp", "load"),
    ("tp_fsdp", 4, "hsdp", "load"),
    ("tp", 4, "hsdp", "recv"),
    ("one", 4, "fsdp", "load"),
    ("fsdp", 3, "fsdp", "load"),
    ("tp_fsdp", 3, "fsdp", "load"),
    ("dcp_hsdp", 3, "fsdp", "load"),
    ("hsdp", 3, "fsdp", "recv"),
    ("hsdp", 2, "fsdp", "load"),
    ("tp", 2, "tp", "load"),
    ("dcp_tp_fsdp", 2, "tp", "load"),
    ("tp_fsdp", 2, "tp", "recv"),
    ("tp", 1, "fsdp", "load"),
    ("one", 1, "fsdp", "load"),
    ("fsdp", 1, "fsdp", "recv"),
    ("hsdp", 0, "alone", "recv"),
    ("tp_fsdp", 0, "alone", "anew"),
}
"""Each mesh saved and loaded, with more ranks, as many and fewer; the rest at night."""


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


def large() -> torch.Tensor:
    """Return a full tensor of which each rank has several chunks."""
    return torch.arange(150_000, dtype=torch.int32).view(300, 500)


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
        "big": distributed(large() * saved, mesh, *cuts(kind, large())),
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


def save(
    states: dict[str, Any], meshes: dict[str, DeviceMesh], rank: int, directory: Path
) -> None:
    """Save on each mesh as one of four ranks, and alone as rank 0."""
    for kind in SENT:
        states[kind] = state = state_on(meshes, kind)
        whole = {**state, "cut": full_tensors()}
        whole["tied"] = [whole["cut"]["rows"], {"again": whole["cut"]["rows"]}]
        whole = whole_of(whole)
        train = whole["train"]
        train["parameters"] = {
            name: train["model"][name] for name in train["parameters"]
        }
        if f"dcp_{kind}" in DCP:
            save_by_dcp(state, checkpoint_id=directory / f"dcp_{kind}")
        if rank == 0 and kind == "fsdp":
            alone = RankInfo(0, 1)  # whatever group there is
            with aiockpt.make_sync_checkpointer(rank_info=alone) as checkpointer:
                checkpointer.save(whole | {"mine": own(0)}, directory / "one", step=1)
            torch.save(whole, directory / "one.pt")
        state["mine"] = own(rank)
        if kind == "fsdp":
            state["sharded"] = chunked(4, fill=1.0)
            whole["sharded"] = torch.arange(8.0).unsqueeze(1).repeat(1, 3)
        with aiockpt.make_sync_checkpointer() as checkpointer:
            checkpointer.save(state, directory / kind, step=1)
        if rank == 0:
            torch.save(whole, directory / f"{kind}.pt")


def run(
    cases: list[Case], templates: dict[str, Any], rank: int, directory: Path
) -> None:
    """Run the cases of a job, and write what went wrong."""
    said = dict[str, str]()
    for case in cases:
        whole = known(directory / case.saved)
        template = emptied(templates[case.mesh]) if case.world else zeroed(whole)
        try:
            if case.way == "anew":
                receive(case, whole, rank, directory, None)
            else:
                run_case(case, template, whole, rank, directory)
        except Exception:  # noqa: BLE001 - it is told
            said[case.name] = traceback.format_exc()
        else:
            said[case.name] = ""
    (directory / f"{cases[0].world}-{rank}.json").write_text(json.dumps(said))


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


def run_case(case: Case, template: Any, whole: Any, rank: int, directory: Path) -> None:
    """Fill a template, and compare every tensor of it."""
    path = directory / case.saved
    if case.saved == "fsdp":
        template["sharded"] = of_sharded(case, template["cut"]["rows"])
    saved_by = 1 if case.saved == "one" else 4
    if case.way == "load" and case.world == saved_by and case.saved not in DCP:
        template["mine"] = zeroed(own(0))
        whole["mine"] = own(rank if saved_by == 4 else 0)
    if case.saved in DCP:  # it saves tied tensors twice
        del template["train"]["parameters"], template["tied"]
    parameters: dict[str, Any] = template["train"].get("parameters", {})
    homes = {name: home_of(each) for name, each in parameters.items()}
    tied = template["cut"]["rows"]
    if case.way == "load":
        found = aiockpt.load(path, into=template)
    else:
        found = receive(case, whole, rank, directory, template)
    assert found is template
    check(found, whole)
    # Sums know no mesh, so two that saved and two that loaded prove the others.
    if case.way == "load" and case[::2] in {("tp_fsdp", "fsdp"), ("hsdp", "tp_fsdp")}:
        prove(found, path)
    if case.world and "tied" in found:
        assert found["tied"][0] is found["tied"][1]["again"] is tied
    for name, each in parameters.items():
        assert found["train"]["parameters"][name] is each
        assert home_of(each) == homes[name]
        assert each.requires_grad or not case.world


def receive(case: Case, whole: Any, rank: int, directory: Path, template: Any) -> Any:
    """Receive what the four ranks have published, and compare that it is all of it."""
    options: dict[str, Any] = {} if case.world == 4 else {"rank_values": 1}
    whole["mine"] = own(rank if case.world == 4 else 1)
    if template is not None:
        template["mine"] = zeroed(own(0))
    places = [place_of(directory, case.saved, each) for each in range(4)]
    metadata = aiockpt.join_metadata([each.read_text() for each in places])
    with BackgroundTransport(transport(timeout=SECONDS / 2)) as receiver:
        found = receiver.recv_checkpoint(
            metadata=metadata, step=STEP, into=template, **options
        )
    check(found, whole)
    assert {*found} == {*whole}
    return found


def home_of(tensor: torch.Tensor) -> int:
    """Return where the memory of this rank's part is."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.data_ptr()


def place_of(directory: Path, kind: str, rank: int) -> Path:
    """Return the file with the metadata of one sender."""
    return directory / f"{kind}-{rank}.metadata"


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


def of_sharded(case: Case, beside: torch.Tensor) -> torch.Tensor:
    """Return a template of a ShardedTensor: one of its kind, or of any other."""
    if case.mesh == "tp" and isinstance(beside, DTensor):
        return distributed(torch.zeros(8, 3), beside.device_mesh, Shard(1))
    return torch.zeros(8, 3) if case.world in (0, 3) else chunked(case.world)


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


def act(world: int, rank: int, directory: Path, everything: bool) -> None:
    """Run the cases of one rank; the four ranks have saved and published before."""
    meshes = meshes_of(world) if world else {}
    cases = [each for each in CASES if each.world == world]
    cases = [each for each in cases if everything or each in FEW]
    if world != 4:
        kinds = {each.mesh for each in cases} & meshes.keys()
        templates = {kind: state_on(meshes, kind, seed=2) for kind in sorted(kinds)}
        run(cases, templates, rank, directory)
        return
    states = dict[str, Any]()
    save(states, meshes, rank, directory)
    with ExitStack() as stack:
        for kind, state in states.items():
            sender = BackgroundTransport(transport(timeout=SECONDS))
            stack.enter_context(sender)
            sender.send_checkpoint(step=STEP, state_dict=state)
            place_of(directory, kind, rank).write_text(sender.metadata())
            # The snapshots are made: from now on the states are templates.
            state.pop("mine", None)
            state.pop("sharded", None)
        dist.barrier()
        run(cases, states, rank, directory)
        while not (directory / "end").exists():
            time.sleep(0.05)


def started(world: int, *arguments: Any) -> list[int]:
    """Fork the ranks of a job, each of which acts; return their process ids."""
    pids, store = [], f"tcp://127.0.0.1:{free_port()}"
    for rank in range(max(world, 1)):
        if pid := os.fork():
            pids.append(pid)
            continue
        code = 1
        try:
            if world:
                dist.init_process_group(
                    "gloo",
                    init_method=store,
                    rank=rank,
                    world_size=world,
                    timeout=timedelta(seconds=SECONDS),
                )
            act(world, rank, *arguments)
            if world:
                dist.barrier()
                dist.destroy_process_group()
            code = 0
        except BaseException:  # noqa: BLE001 - it must not return into the parent's code
            traceback.print_exc()
        finally:
            os._exit(code)
    return pids


def ended(pids: list[int]) -> None:
    """Wait for the ranks of a job.

    Raises:
        RuntimeError: one has failed.
    """
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        raise RuntimeError(f"ranks have ended with {codes}")


def have_published(directory: Path, senders: list[int]) -> bool:
    """Tell whether the first four ranks have done all but wait.

    Raises:
        RuntimeError: one has ended.
    """
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    if any(os.waitid(os.P_PID, pid, look) for pid in senders):
        raise RuntimeError("a sender has ended")
    return all((directory / f"4-{rank}.json").exists() for rank in range(4))


def main(directory: Path, everything: bool) -> None:
    """Run all jobs; the ranks of the first one publish until the last one has ended."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    senders = started(4, directory, everything)
    try:
        while not have_published(directory, senders):
            time.sleep(0.05)
        for world in (3, 2, 1, 0):
            ended(started(world, directory, everything))
    finally:
        (directory / "end").touch()
        ended(senders)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "all")
