"""What a process does on an accelerator: its methods are commands of a worker.

Without an accelerator the device is the host's memory: see `fake_device`. Each command
that is timed ends when the device has ended its work.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import aiockpt
from aiockpt.checkpointers import RankInfo
from benchmarks.ends import CHUNK_BYTES, changed_chunks
from benchmarks.measures import Sample
from benchmarks.memory import State, available_memory, bytes_of
from benchmarks.references import Torchft, fetch_raw, in_thread, read_raw
from benchmarks.savers import Saver
from benchmarks.training import Training, progress

_TIMEOUT = 120.0
_WARM_SENDS = 2  # until both of the arenas that take turns have been used
_SHARE = 8, 16  # of the device's memory and of the host's that a state dict may take
_FIT = 8192  # rows and columns of matrices whose product fills a device
_PRODUCTS = 4  # of a step of the training


class Device:
    """Has a state dict on the device, and moves it in all ways that are measured."""

    def __init__(self, training: Training) -> None:
        real = torch.cuda.is_available()
        self._device = torch.device("cuda" if real else "cpu")
        self._synchronize: Callable[[], object]
        self._synchronize = torch.cuda.synchronize if real else (lambda: None)
        self._training = training
        self._saver = Saver(training)
        self._transport: aiockpt.HTTPTransport[Any] | None = None
        self._loader: aiockpt.SyncCheckpointer | None = None
        self._sends = 0
        self._place = Path()
        self._state: State = {}
        self._flat = self._pinned = self._spare = torch.empty(0, dtype=torch.uint8)

    async def describe(self) -> dict[str, Any]:
        """Return what the device is, and how many bytes a state dict should have."""
        most = available_memory() // _SHARE[1]
        found: dict[str, Any] = {"GPU": "none", "CUDA": "none"}
        if self._device.type == "cuda":
            most = min(most, torch.cuda.mem_get_info()[0] // _SHARE[0])
            found["GPU"] = torch.cuda.get_device_name()
            found["CUDA"] = torch.version.cuda
        return found | {"most": most}

    async def prepare(self, *, count: int, each: int, place: str) -> None:
        """Build tensors that are storages of their own, and as many bytes in one."""
        await self.release()
        self._place = Path(place)
        nbytes, real = count * each, self._device.type == "cuda"
        self._pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=real)
        torch.arange(nbytes // 8, out=self._pinned.view(torch.int64))  # `numbered`
        self._flat = self._pinned.to(self._device, copy=True)
        self._spare = torch.empty_like(self._flat)
        self._state = {
            f"layers.{number}.weight": part.clone().view(torch.float32)
            for number, part in enumerate(torch.split(self._flat, each))
        }
        self._saver.hold(
            self._flat, self._state, self._place, synchronize=self._synchronize
        )
        await self._saver.clean()
        self._synchronize()

    async def release(self) -> None:
        """Close everything, and forget the state dict."""
        if self._transport is not None:
            await self._transport.shutdown()
        if self._loader is not None:
            self._loader.close()
        self._transport, self._loader, self._sends, self._state = None, None, 0, {}
        self._flat = self._pinned = self._spare = torch.empty(0, dtype=torch.uint8)
        await self._saver.release()

    def _timed(self, work: Callable[[], object]) -> Sample:
        self._synchronize()
        started = time.perf_counter()
        work()
        self._synchronize()
        return {"seconds": time.perf_counter() - started}

    # ------------------------------------------------------- copies, the references

    async def copy(self, *, to: str, share: float = 1.0) -> Sample:
        """Copy a share of the bytes in one piece, from or to page-locked memory."""
        ends = {
            "host": (self._pinned, self._flat),
            "device": (self._flat, self._pinned),
            "itself": (self._spare, self._flat),
        }
        chunks = len(changed_chunks(self._flat.nbytes, share))
        into, origin = (each[: chunks * CHUNK_BYTES] for each in ends[to])
        return self._timed(lambda: into.copy_(origin, non_blocking=True))

    async def gather(self) -> Sample:
        """Join the tensors on the device, and copy them to page-locked memory."""
        flat = self._spare.view(torch.float32)

        def work() -> None:
            torch.cat(list(self._state.values()), out=flat)
            self._pinned.copy_(self._spare, non_blocking=True)

        return self._timed(work)

    async def read(self, *, threads: int) -> Sample:
        """Read the file that `load` loads into page-locked memory, and copy that."""
        (path,), memory = self._kept().glob("*.safetensors"), bytes_of(self._pinned)

        def work() -> None:
            read_raw(path, memory, threads=threads)
            self._flat.copy_(self._pinned, non_blocking=True)

        return self._timed(work)

    async def fold(self) -> Sample:
        """Digest the bytes on the device."""
        digests = import_module("aiockpt.pg.device")
        keys = digests.keys(self._device)
        return self._timed(lambda: digests.fold(self._flat, keys))

    async def fingerprint(self) -> Sample:
        """Sum the words of the state dict on the device."""
        return self._timed(lambda: aiockpt.fingerprint(self._state))

    # ------------------------------------------------------------ staging and saving

    async def stage(self) -> Sample:
        """Send by a transport whose memory earlier sends have used."""
        if self._transport is None:
            server = aiockpt.Server(host="127.0.0.1")
            self._transport = aiockpt.HTTPTransport(_TIMEOUT, server=server)
            await self._transport.start()
            for _ in range(_WARM_SENDS):
                await self._send()
        self._synchronize()
        started = time.perf_counter()
        await self._send()
        return {"seconds": time.perf_counter() - started}

    async def _send(self) -> None:
        assert self._transport is not None
        self._sends += 1
        await self._transport.send_checkpoint(step=self._sends, state_dict=self._state)

    async def save(self, *, by: str) -> Sample:
        """Save in the background by a checkpointer, ours or one of torch's."""
        return await self._saver.save(by=by)

    # ---------------------------------------------------------- loading and receiving

    async def load(self) -> Sample:
        """Load a file of the system's cache into the state dict, verified."""
        return self._timed(lambda: self._load(self._state))

    def _load(self, into: State) -> None:
        if self._loader is None:
            self._loader = aiockpt.make_sync_checkpointer(rank_info=RankInfo(0, 1))
            self._loader.load(self._kept(), into)
        self._loader.load(self._kept(), into)

    def _kept(self) -> Path:
        """Return a checkpoint of the state dict; the system's cache has its file."""
        path = self._place / "whole"
        if not path.exists():
            with aiockpt.make_sync_checkpointer(rank_info=RankInfo(0, 1)) as saver:
                saver.save(self._state, path)
        return path

    async def receive(self, *, by: str, source: Any, connections: int = 1) -> Sample:
        """Receive into the state dict, or into host memory that is copied there."""
        acts: dict[str, Callable[..., Awaitable[object]]] = {
            "aiockpt": self._receive_ours,
            "raw": partial(self._receive_raw, connections=connections),
            "torchft": self._receive_torchft,
        }
        self._spoil(1.0)
        self._flat.zero_()
        self._synchronize()
        started = time.perf_counter()
        await acts[by](source)
        self._synchronize()
        seconds = time.perf_counter() - started
        if by == "raw":
            self._check({"": self._flat})
            self._spoil(1.0)  # twice is not at all
        self._check(self._state)
        return {"seconds": seconds}

    async def _receive_ours(self, source: str) -> None:
        receive = self._receiver().recv_checkpoint
        await receive(metadata=source, step=1, into=self._state, direct=True)

    async def _receive_raw(self, source: list[Any], *, connections: int) -> None:
        address, memory = (source[0], source[1]), bytes_of(self._pinned)
        await fetch_raw(address, memory, connections=connections)
        self._flat.copy_(self._pinned, non_blocking=True)

    async def _receive_torchft(self, source: str) -> None:
        end = Torchft(0)  # the sender says how many chunks there are
        try:
            host = await in_thread(end.receive, source)
        finally:
            end.close()
        self._state = {name: each.to(self._device) for name, each in host.items()}

    async def apply(self, *, source: str, changed: float) -> Sample:
        """Prepare what differs in a share of the chunks, and apply it."""
        self._spoil(changed)
        self._synchronize()
        started = time.perf_counter()
        prepare = self._receiver().prepare
        prepared = await prepare(source, into=self._state, have=True)
        seconds = time.perf_counter() - started
        found = self._timed(prepared.apply) | {"prepare": seconds}
        self._check(self._state)
        return found

    def _receiver(self) -> aiockpt.HTTPTransport[Any]:
        if self._transport is None:
            warm = aiockpt.Receive(keep_arena=True)
            self._transport = aiockpt.HTTPTransport(
                _TIMEOUT, receive=warm, same_host=False
            )
        return self._transport

    def _spoil(self, share: float) -> None:
        """Change about a share of the chunks of the state dict."""
        parts = [each.view(torch.uint8) for each in self._state.values()]
        each, nbytes = parts[0].nbytes, self._flat.nbytes
        for chunk in changed_chunks(nbytes, share):
            stop = min((chunk + 1) * CHUNK_BYTES, nbytes)
            for at in range(chunk * CHUNK_BYTES, stop, each):
                part = parts[at // each][at % each :][: stop - at]
                part.bitwise_not_()

    def _check(self, found: State) -> None:
        """Raise unless these are the bytes that were built."""
        words = self._spare.view(torch.int64)
        torch.arange(len(words), out=words)
        parts = torch.split(self._spare, self._spare.nbytes // len(found))
        for mine, part in zip(found.values(), parts, strict=True):
            if not torch.equal(mine.view(torch.uint8), part):
                raise AssertionError("what arrived is not what was sent")

    # ------------------------------------------------------------------------ training

    async def train(self, *, beside: str, seconds: float) -> Sample:
        """Multiply matrices for a while, and do something beside it all the time."""
        real = self._device.type == "cuda"
        size, dtype = (_FIT, torch.bfloat16) if real else (64, torch.float32)
        one = torch.ones(size, size, device=self._device, dtype=dtype)
        out = torch.empty_like(one)
        stream = torch.cuda.current_stream() if real else None

        def step() -> None:
            for _ in range(_PRODUCTS):
                torch.mm(one, one, out=out)
            if stream is not None:
                stream.synchronize()

        elsewhere = {name: each.clone() for name, each in self._state.items()}

        async def load() -> None:
            self._load(elsewhere)

        acts = {"stage": self.stage, "load": load}
        if beside in acts:
            await acts[beside]()  # it is warm from here on
        self._training.work = step
        self._training.begin()
        began = time.monotonic()
        while (now := time.monotonic()) < began + seconds:
            if beside in acts:
                await acts[beside]()
            else:
                await in_thread(time.sleep, began + seconds - now)
        ended = time.monotonic()
        speed = progress(self._training.end(), began, ended)["speed"]
        return {"seconds": ended - began, "speed": speed}
