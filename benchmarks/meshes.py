"""What the ranks of a job do whose state is saved or sent, for jobs of other meshes."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files,
)
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import aiockpt
from aiockpt.cli import main as aiockpt_program
from aiockpt.events import TransferEvent, add_hook
from benchmarks.measures import BenchmarkError, Cost, Sample, spent, spent_since, timed
from benchmarks.training import Training

_COLUMNS = 1024
_GROUPS = ("model", "exp_avg", "exp_avg_sq")  # as AdamW has them
_EXACT = 1 << 24  # a float32 has each smaller whole number
_MIB = 1 << 20
_PATIENCE = 300.0  # seconds
RESHARDER = "torch-checkpointing"
"""The rival whose `DefaultResharder` loads on other meshes; it need not be there."""


class Rank:
    """A rank of a job, or a process without one; the job has other ranks each time."""

    def __init__(self, training: Training) -> None:
        del training
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        self._world, self._layout, self._rows, self._noisy = 1, "one", 0, False
        self._state: dict[str, Any] = {}
        self._full = self._count = torch.empty(0)
        self._manager: Any = None
        self._checked: set[str] = set()
        self._sender: aiockpt.HTTPTransport[Any] | None = None

    async def join(
        self,
        *,
        port: int,
        rank: int,
        world: int,
        address: str = "127.0.0.1",
        interface: str = "",
    ) -> None:
        """Be a rank of a new job; without a port, of one in which no rank talks."""
        self._world = world
        if interface:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        how: dict[str, Any] = {"rank": rank, "world_size": world}
        if port:
            dist.init_process_group("gloo", f"tcp://{address}:{port}", **how)
        else:
            dist.init_process_group("fake", store=FakeStore(), **how)

    async def leave(self) -> None:
        """End the job."""
        self._state, self._world = {}, 1
        sender, self._sender = self._sender, None
        if sender is not None:
            await sender.shutdown(wait=False)
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    async def release(self) -> None:
        """End the job, if there is one."""
        await self.leave()

    async def prepare(
        self, *, layout: str, count: int, rows: int, noisy: bool = False
    ) -> None:
        """Have a state of ``count`` tensors of so many rows, in three groups.

        ``one`` are full tensors, and ``new`` are their shapes only. If ``noisy``, they
        do not compress.
        """
        self._layout, self._rows, self._noisy = layout, rows, noisy
        names = [(group, f"{n}.weight") for n in range(count // 3) for group in _GROUPS]
        self._state = {group: {} for group in _GROUPS}
        for at, (group, name) in enumerate(names):
            tensor = self._tensor(at)
            self._state[group][name] = tensor.to("meta") if layout == "new" else tensor
        self._checked.clear()

    def _tensor(self, at: int) -> torch.Tensor:
        """Return a tensor whose elements count from its number on."""
        rows, columns = self._rows, min(_COLUMNS, self._rows)
        if self._full.shape != (rows, columns):
            self._full = torch.empty(rows, columns)
            self._count = torch.empty(rows, columns, dtype=torch.int32)
        # New memory for each full tensor would leave holes between the parts.
        full, count = self._full, self._count
        torch.arange(at, at + rows * columns, out=count.view(-1))
        full.copy_(count.bitwise_and_(_EXACT - 1))
        if self._noisy:
            full.uniform_(generator=torch.Generator().manual_seed(at))
        if self._layout in {"one", "new"}:
            return full.clone()
        sizes, placements = _placed(self._layout, at, self._world)
        mesh = init_device_mesh("cpu", sizes)
        local = full
        # Tensor parallelism, the inner dimension, cuts first.
        for dim in reversed(range(mesh.ndim)):
            placement: Any = placements[dim]
            if not placement.is_replicate():
                parts = local.chunk(sizes[dim], placement.dim)
                local = parts[mesh.get_local_rank(dim)]
        # A rival saves the whole storage.
        local = local.clone(memory_format=torch.contiguous_format)
        return DTensor.from_local(
            local,
            mesh,
            placements,
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )

    async def save(self, *, by: str, place: str) -> None:
        """Save the state by this library or by a rival, until the disk has it."""
        if by == RESHARDER:
            try:
                with _gathering_on_cpus():
                    self._resharder().save(f"{place}/{by}", self._state)
            finally:  # the other ranks need not wait for one that fails
                dist.barrier()
            if dist.get_rank() == 0:
                _fsync(f"{place}/{by}")
        elif by == "DCP":
            save_dcp(self._state, checkpoint_id=f"{place}/{by}")
        elif by == "safetensors":  # of DCP: a file of each rank
            writer = HuggingFaceStorageWriter(f"{place}/{by}", save_distributed=True)
            save_dcp(self._state, storage_writer=writer)
        else:
            with aiockpt.make_sync_checkpointer() as checkpointer:
                checkpointer.save(self._state, f"{place}/aiockpt/step-1")

    async def load(self, *, by: str, place: str) -> Sample:
        """Load it; say how long that took, how many bytes it read, and its memory.

        Raises:
            BenchmarkError: another state was loaded.
        """
        for each in self._tensors(self._state):
            each.fill_(-1)
        if by == RESHARDER:
            self._resharder()
        events: list[TransferEvent] = []
        with ExitStack() as stack:
            stack.callback(add_hook(events.append))
            before = _resident()
            if dist.is_initialized():
                dist.barrier()
            used, began = spent(), time.monotonic()
            found = self._load(by, place)
            sample = {"seconds": time.monotonic() - began, **spent_since(used)}
        sample["peak MiB"] = (_most_resident() - before) / _MIB
        if self._layout == "new":
            result = sum(each.nbytes for each in self._tensors(found))
            sample["peak MiB"] -= result / _MIB
        if by in {"aiockpt", "unverified"}:
            (event,) = (each for each in events if each.stop == "load")
            sample |= {"read": float(event.nbytes), "needed": float(event.needed)}
        if by not in self._checked:
            self._checked.add(by)
            self._check(found)
        return sample

    def _load(self, by: str, place: str) -> Mapping[str, Any]:
        if by == RESHARDER:
            loaded: Mapping[str, Any] = self._resharder().load(
                f"{place}/{by}", into=self._state
            )
            return loaded
        if by == "DCP":
            state = self._state
            if self._layout == "new":
                state = {
                    group: {name: _on_cpu(each) for name, each in some.items()}
                    for group, some in state.items()
                }
            alone = not dist.is_initialized()
            load_dcp(state, checkpoint_id=f"{place}/{by}", no_dist=alone)
            return state
        verify: Any = "none" if by == "unverified" else "full"
        into = None if self._layout == "new" else self._state
        path = f"{place}/aiockpt/step-1"
        found: dict[str, Any] = aiockpt.load(path, into=into, verify=verify)
        return found

    def _check(self, found: Mapping[str, Any]) -> None:
        """Compare what was loaded, bit by bit.

        Raises:
            BenchmarkError: it is another state.
        """
        for at, each in enumerate(self._tensors(found)):
            if not torch.equal(each, _local(self._tensor(at))):
                raise BenchmarkError(f"it has loaded a wrong tensor {at}")

    def _resharder(self) -> Any:
        """Return the manager of the rival; one for each job.

        Raises:
            BenchmarkError: the rival is not installed.
        """
        if find_spec("torch_checkpointing") is None:
            raise BenchmarkError(f"{RESHARDER} is not installed")
        if self._manager is None:
            package = "torch_checkpointing"
            manager = import_module(f"{package}.checkpoint_manager").CheckpointManager
            files = import_module(f"{package}.storage.filesystem")
            resharder = import_module(f"{package}.default_resharder").DefaultResharder()
            spec = import_module(f"{package}.schema").ItemSpec(resharder=resharder)
            config = manager.Config.with_sync_save()
            config.storage_config = files.LocalFileSystemStorageConfig(
                use_direct_io=False
            )
            # The ranks meet behind the save.
            config.save.writer_config.barrier_config = None
            config.save.writer_config.write_to_temp_dir = False
            config.items = dict.fromkeys(_GROUPS, spec)
            self._manager = config.build()
        return self._manager

    # ------------------------------------------------------------------ over HTTP

    async def offer(
        self,
        *,
        host: str,
        gathered: bool = False,
        step: int = 1,
        chunk_bytes: int = 16 * _MIB,
    ) -> tuple[str, Cost]:
        """Publish the state, or its full tensors; return the metadata and the cost.

        All ranks gather the full tensors; each of them could publish them.
        """
        if self._sender is None:
            self._sender = aiockpt.HTTPTransport(
                _PATIENCE, server=aiockpt.Server(host=host), chunk_bytes=chunk_bytes
            )
            await self._sender.start()
        state, sender = self._state, self._sender
        if gathered:
            state = {
                group: {name: each.full_tensor() for name, each in some.items()}
                for group, some in state.items()
            }
        _, cost = await timed(
            lambda: sender.send_checkpoint(step=step, state_dict=state)
        )
        return sender.metadata(), cost

    async def sent(self) -> int:
        """Return how many bytes this rank has sent."""
        return 0 if self._sender is None else self._sender.statistics().bytes_sent

    async def receive(
        self,
        *,
        source: Sequence[str],
        part: int = 0,
        parts: int = 1,
        timeout: float = _PATIENCE,
        failing: str = "",
        connections: int | None = None,
    ) -> Cost:
        """Receive from one sender, or from all senders of a job, into the state.

        Args:
            source: Their metadata.
            part: Which part of all tensors to receive.
            parts: How many parts there are.
            timeout: The deadline.
            failing: What the error says; the receive must fail. Then the cost has the
                seconds ``late``: after the deadline.
            connections: How many connections it has in all, if not as by default.

        Raises:
            BenchmarkError: another state came, or another error.
        """
        count = len(self._tensors(self._state))
        names = [f"{_GROUPS[at % 3]}.{at // 3}.weight" for at in range(count)]
        chosen = {name for at, name in enumerate(names) if at % parts == part}
        for each in self._tensors(self._state):
            each.fill_(-1)
        metadata = source[0] if len(source) == 1 else aiockpt.join_metadata(source)
        how = aiockpt.Receive()
        if connections is not None:
            how = aiockpt.Receive(connections=connections)
        receiver = aiockpt.HTTPTransport[Any](timeout, same_host=False, receive=how)
        options: dict[str, Any] = {"into": self._state}
        if parts > 1:
            options["select"] = chosen.__contains__
        began = time.monotonic()

        async with receiver:
            said = ""
            try:
                _, cost = await timed(
                    lambda: receiver.recv_checkpoint(
                        metadata=metadata, step=1, **options
                    )
                )
            except aiockpt.AiockptError as error:
                said = " ".join([str(error), *getattr(error, "__notes__", [])])
        if failing or said:
            if not failing or failing not in said:
                raise BenchmarkError(said or "the receive did not fail")
            if not all(each.eq(-1).all() for each in self._tensors(self._state)):
                raise BenchmarkError("a receive that failed has changed its template")
            seconds = time.monotonic() - began
            return {"began": began, "seconds": seconds, "late": seconds - timeout}
        for at, each in enumerate(self._tensors(self._state)):
            if at % parts == part and not torch.equal(each, _local(self._tensor(at))):
                raise BenchmarkError(f"it has received a wrong tensor {at}")
        return cost

    async def publish(self, *, first: int, times: int, every: float) -> float:
        """Publish some steps, whose elements are all the number of the step.

        Returns the seconds of a send, on average.
        """
        assert self._sender is not None
        due, spent_sending = time.monotonic(), 0.0
        for step in range(first, first + times):
            await asyncio.sleep(max(due - time.monotonic(), 0))
            for each in self._tensors(self._state):
                each.fill_(step)
            began = time.monotonic()
            await self._sender.send_checkpoint(step=step, state_dict=self._state)
            spent_sending += time.monotonic() - began
            due += every
        return spent_sending / times

    async def follow(
        self, *, source: Sequence[str], after: int, seconds: float
    ) -> Sample:
        """Follow one sender, or all senders of a job; return the steps, and the torn.

        A step is torn if not all of its elements are its number.
        """
        metadata = source[0] if len(source) == 1 else aiockpt.join_metadata(source)
        receiver = aiockpt.HTTPTransport[Any](_PATIENCE, same_host=False)
        found = {"steps": 0.0, "torn": 0.0}
        async with (
            receiver,
            aclosing(receiver.follow(metadata, after=after, into=self._state)) as steps,
        ):
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    async for step, _ in steps:
                        found["steps"] += 1
                        parts = self._tensors(self._state)
                        found["torn"] += not all(each.eq(step).all() for each in parts)
        return found

    # ------------------------------------------------------ files for Hugging Face

    async def export(self, *, by: str, place: str, shard_bytes: int) -> Sample:
        """Write the files of all ranks as those of one model; see `load`.

        Raises:
            BenchmarkError: it could not, or wrote another state.
        """
        out = Path(place, "out")
        before = _resident()
        used, began = spent(), time.monotonic()
        if by == "DCP":
            # Each file has as many tensors as the library puts into it.
            os.mkdir(out)
            names = [
                f"{group}.{name}"
                for group, some in self._state.items()
                for name in some
            ]
            each = max(shard_bytes // (4 * self._rows * min(_COLUMNS, self._rows)), 1)
            numbers = {name: 1 + at // each for at, name in enumerate(names)}
            consolidate_safetensors_files(f"{place}/safetensors", str(out), numbers)
            _fsync(str(out))
        else:
            source = f"{place}/aiockpt/step-1"
            most = ("--max-shard-size", str(shard_bytes))
            if aiockpt_program(["convert", source, str(out), "--hf", *most]):
                raise BenchmarkError("aiockpt convert has failed")
        sample = {"seconds": time.monotonic() - began, **spent_since(used)}
        sample["peak MiB"] = (_most_resident() - before) / _MIB
        if by not in self._checked:
            self._checked.add(by)
            tensors = _tensors_of(out)
            self._check(
                {
                    group: {name: tensors[f"{group}.{name}"] for name in some}
                    for group, some in self._state.items()
                }
            )
        shutil.rmtree(out)
        return sample

    def _tensors(self, state: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the local tensors, in the order of `prepare`."""
        rows = zip(*(state[group].values() for group in _GROUPS), strict=True)
        return [_local(each) for row in rows for each in row]

    async def remove(self, *, place: str) -> None:
        """Remove what was saved."""
        for name in os.listdir(place):
            shutil.rmtree(f"{place}/{name}")


def _placed(
    layout: str, at: int, world: int
) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    """Return the sizes of the mesh, and how it splits a tensor.

    Tensor parallelism cuts the columns of one tensor and the rows of the next one.
    """
    cut = at // len(_GROUPS) % 2
    if layout == "FSDP":
        return (world,), (Shard(0),)
    if layout == "TP":
        return (world,), (Shard(cut),)
    if layout == "HSDP":
        return (2, world // 2), (Replicate(), Shard(0))
    outer = Shard(0) if cut else _StridedShard(0, split_factor=2)
    return (world // 2, 2), (outer, Shard(cut))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu")


def _gathering_on_cpus() -> Any:
    """Have the resharder's metadata gathered by a group of gloo: it asks for CUDA."""
    metadata = import_module("torch_checkpointing.metadata_manager")

    def gather(_: object, data: Any, process_group: Any = None) -> dict[int, Any]:
        found: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(found, data, group=process_group)
        return dict(enumerate(found))

    name = "_all_gather_pickled_data"
    return patch.object(metadata.DefaultMetadataManager, name, gather)


def _tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all safetensors files in a directory."""
    files = map(load_file, directory.glob("*.safetensors"))
    return {name: tensor for some in files for name, tensor in some.items()}


def _fsync(directory: str) -> None:
    """Wait until the disk has every file below a directory."""
    for path in Path(directory).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def _resident() -> int:
    """Return the bytes in memory, and let their high-water mark begin there."""
    gc.collect()
    trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _most_resident() -> int:
    """Return the high-water mark; mapped pages of files count, too."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(found.split()[1]) * 1024
