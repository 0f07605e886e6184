"""The ranks of a job that publishes its shards, and of jobs that receive them.

``python joined_ranks.py DIRECTORY`` forks four ranks of gloo. They publish a state on
each mesh of `SENT`, and save the full tensors that it consists of as
``DIRECTORY/MESH.pt``. Then it forks one receiving job after the other. Each of their
ranks writes what came of its `CASES` to ``DIRECTORY/received-WORLD-RANK.json``: by the
name of the case, an empty text, or what went wrong. A job of zero ranks is a process
without a process group.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import aiockpt
from tests.support.mesh_ranks import (
    Case,
    check,
    check_together,
    chunked,
    cuts,
    distributed,
    emptied,
    full_tensors,
    known,
    meshes_of,
    of_sharded,
    own,
    state_on,
    whole_of,
    zeroed,
)
from tests.support.transports import transport
from tests.support.waiting import wait_until

__all__ = ["CASES", "SENT"]

SENT = ("fsdp", "hsdp", "tp", "tp_fsdp")
"""The meshes on which four ranks publish a state."""

OWN = "own"
"""What is published besides: the state on ``fsdp``, and what differs by rank."""

STEP = 7
SECONDS = 60

_MESHES = {
    4: ("fsdp", "hsdp", "tp", "tp_fsdp"),
    3: ("fsdp",),
    2: ("fsdp", "tp"),
    1: ("fsdp",),
    0: ("alone",),
}
CASES = [
    *(
        Case(sent, world, mesh, "recv")
        for world, meshes in _MESHES.items()
        for mesh in meshes
        for sent in SENT
    ),
    *(Case(sent, 0, "alone", "anew") for sent in SENT),
    *(Case(OWN, 4, mesh, "recv") for mesh in ("fsdp", "tp")),
]


def large() -> torch.Tensor:
    """Return a full tensor of which each rank has several chunks."""
    return torch.arange(600_000, dtype=torch.int32).view(600, 1000)


def of_chunks(meshes: dict[str, DeviceMesh], kind: str, whole: torch.Tensor) -> DTensor:
    """Split it as a mesh of that kind does."""
    return distributed(whole, meshes[kind], *cuts(kind, whole))


# -------------------------------------------------------------------------- publishing


def publish(rank: int, directory: Path) -> None:
    """Publish a state on each mesh as one of four ranks."""
    meshes, states = meshes_of(4), dict[str, Any]()
    for kind in SENT:
        state = {**state_on(meshes, kind), "big": of_chunks(meshes, kind, large())}
        whole = {**state, "cut": full_tensors()}
        whole["tied"] = [whole["cut"]["rows"], {"again": whole["cut"]["rows"]}]
        whole = whole_of(whole)
        model, parameters = whole["train"]["model"], state["train"]["parameters"]
        whole["train"]["parameters"] = {name: model[name] for name in parameters}
        states[kind] = state
        if rank == 0:
            torch.save(whole, directory / f"{kind}.pt")
        if kind == "fsdp":
            states[OWN] = {
                **state,
                "mine": own(rank),
                "sharded": chunked(4, fill=1.0),
            }
            whole["sharded"] = torch.arange(8.0).unsqueeze(1).repeat(1, 3)
            if rank == 0:
                torch.save(whole, directory / f"{OWN}.pt")
    asyncio.run(serve(rank, states, directory))


async def serve(rank: int, states: dict[str, Any], directory: Path) -> None:
    """Offer each state until the receiving jobs have ended."""
    async with AsyncExitStack() as stack:
        for kind, state in states.items():
            sender = transport(timeout=SECONDS)
            await stack.enter_async_context(sender)
            await sender.send_checkpoint(step=STEP, state_dict=state)
            written = place_of(directory, kind, rank).with_suffix(".tmp")
            written.write_text(sender.metadata())
            written.rename(place_of(directory, kind, rank))
        while not (directory / "end").exists():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.02)


def place_of(directory: Path, kind: str, rank: int) -> Path:
    """Return the file with the metadata of one sender."""
    return directory / f"{kind}-{rank}.metadata"


# --------------------------------------------------------------------------- receiving


def home_of(tensor: torch.Tensor) -> int:
    """Return where the memory of this rank's part is."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.data_ptr()


def receive(world: int, rank: int, directory: Path) -> dict[str, str]:
    """Run all cases of so many ranks; return what went wrong."""
    meshes, said = meshes_of(world) if world else {}, dict[str, str]()
    templates = {kind: state_on(meshes, kind, seed=2) for kind in meshes}
    for kind, each in templates.items():
        each["big"] = of_chunks(meshes, kind, 0 * large())
    for case in CASES:
        if case.world != world:
            continue
        whole = known(directory / case.saved)
        template = emptied(templates[case.mesh]) if world else zeroed(whole)
        if case.saved == OWN:
            template["mine"] = zeroed(own(0))
            template["sharded"] = of_sharded(case, template["cut"]["rows"].device_mesh)
            whole["mine"] = own(rank)
        metadata = aiockpt.join_metadata(
            [place_of(directory, case.saved, each).read_text() for each in range(4)]
        )
        try:
            if case.way == "anew":
                asyncio.run(received_anew(metadata, whole))
            else:
                asyncio.run(received(metadata, template, whole))
        except Exception:  # noqa: BLE001 - it is told
            said[case.name] = traceback.format_exc()
        else:
            said[case.name] = ""
        if world and (case.saved, case.way) == ("tp", "recv"):
            check_together(said, case, template, whole)
    return said


async def received(metadata: str, template: Any, whole: Any) -> None:
    """Receive into a template, which is filled in place, its parameters too."""
    parameters = dict(template["train"]["parameters"])
    homes = {name: home_of(each) for name, each in parameters.items()}
    rows = template["cut"]["rows"]
    async with transport(timeout=SECONDS / 2) as receiver:
        found = await receiver.recv_checkpoint(
            metadata=metadata, step=STEP, into=template
        )
    assert found is template
    check(found, whole)
    assert {*found} == {*whole}
    assert found["cut"]["rows"] is rows
    for name, each in found["train"]["parameters"].items():
        assert each is parameters[name]
        assert home_of(each) == homes[name]


async def received_anew(metadata: str, whole: Any) -> None:
    """Receive without a template and a group: full tensors come."""
    async with transport(timeout=SECONDS / 2) as receiver:
        found = await receiver.recv_checkpoint(metadata=metadata, step=STEP)
    check(found, whole)
    check(whole, found)


# ------------------------------------------------------------------------------- main


def started(world: int, act: Callable[[int], None], store: Path) -> list[int]:
    """Fork the ranks of a job, each of which acts; return their process ids."""
    pids = []
    for rank in range(max(world, 1)):
        if pid := os.fork():
            pids.append(pid)
            continue
        code = 1
        try:
            if world:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{store}",
                    rank=rank,
                    world_size=world,
                    timeout=timedelta(seconds=SECONDS),
                )
            act(rank)
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


def have_published(places: list[Path], senders: list[int]) -> bool:
    """Tell whether all metadata are there.

    Raises:
        RuntimeError: a sender has ended.
    """
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    if any(os.waitid(os.P_PID, pid, look) for pid in senders):
        raise RuntimeError("a sender has ended")
    return all(each.exists() for each in places)


def main(directory: Path) -> None:
    """Run all jobs."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    senders = started(4, lambda rank: publish(rank, directory), directory / "store")
    places = [place_of(directory, kind, at) for kind in (*SENT, OWN) for at in range(4)]
    try:
        wait_until(lambda: have_published(places, senders), "the publication")
        for world in _MESHES:

            def act(rank: int, world: int = world) -> None:
                said = receive(world, rank, directory)
                place = directory / f"received-{world}-{rank}.json"
                place.write_text(json.dumps(said))

            ended(started(world, act, directory / f"store-{world}"))
    finally:
        (directory / "end").touch()
        ended(senders)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
