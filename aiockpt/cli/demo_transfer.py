"""The demo's two processes: a training state, its sender, and two receives of it.

The second receive goes through a proxy that cuts all connections half way. Fingerprints
that owe nothing to the wire format show whether every value arrived.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import torch

from aiockpt.cli.text import ProgressBar, format_bytes
from aiockpt.errors import AiockptError, StateDictError, WorkerError
from aiockpt.events import Progress, TransferEvent, add_hook
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.http.options import Server
from aiockpt.http.transport import HTTPTransport
from aiockpt.memory.arena import view_of_address
from aiockpt.storage.statefile import read_state_file

__all__ = ["fingerprints", "receive_twice", "send", "training_state"]

_STEP = 1
_TRAINABLE = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_LONGEST_OFFER = 1 << 26
_PIECE = 64 << 10


@dataclass(frozen=True, slots=True)
class _Offer:
    """What the sending process says."""

    metadata: str
    staged_in: float
    fingerprints: dict[str, str]


@dataclass(slots=True)
class _Received:
    """How a receive went."""

    state: object
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.nbytes / self.seconds / 1e9
        return f"{format_bytes(self.nbytes)} in {self.seconds:.2f} s ({rate:.2f} GB/s)"


async def receive_twice(model: Path, size: int) -> int:
    """Receive, cut, resume, compare; return the exit code.

    Args:
        model: The model's file.
        size: The bytes of its tensors.
    """
    async with _sender(model) as offer:
        count = len(offer.fingerprints)
        print(f"sender    another process; staged in {offer.staged_in:.2f} s")
        plain = await _receive(offer.metadata)
        print(
            f"state     {format_bytes(plain.nbytes)}, {plain.nbytes / size:.1f} times "
            "the model: each parameter, and the two moments that AdamW keeps of it"
        )
        print(f"received  {plain}, undisturbed")
        wrong = _differences(plain.state, offer)
        plain.state = None
        wrong |= await _receive_cut(offer, plain.nbytes)
    if wrong:
        print(f"WRONG     {len(wrong)} of {count} values differ: {sorted(wrong)[:5]}")
        return 1
    print(f"verified  both times, all {count} tensors and values are the sender's")
    return 0


async def _receive_cut(offer: _Offer, nbytes: int) -> set[str]:
    """Receive through connections that end half way; return what differs then."""
    target = urlsplit(offer.metadata)
    retries: list[TransferEvent] = []
    remove = add_hook(retries.append)
    try:
        cutter = _Cutter(target.hostname or "", target.port or 0, nbytes // 2)
        async with cutter.listening() as port:
            metadata = f"http://127.0.0.1:{port}{target.path}#{target.fragment}"
            received = await _receive(metadata)
    finally:
        remove()
    again = sum(event.stop == "retry" for event in retries)
    print(
        f"resumed   {received}, all connections cut after "
        f"{format_bytes(cutter.cut_at)}, {again} requests made again"
    )
    return _differences(received.state, offer)


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


async def _receive(metadata: str) -> _Received:
    bar = ProgressBar(sys.stderr)
    last = Progress(stop="")

    def progress(now: Progress) -> None:
        nonlocal last
        last = now
        bar(now)

    async with HTTPTransport[object](server=Server(host="127.0.0.1")) as transport:
        started = time.monotonic()
        try:
            state = await transport.recv_checkpoint(
                0, metadata, _STEP, progress=progress
            )
        finally:
            bar.close()
        elapsed = time.monotonic() - started
    return _Received(state, last.bytes_total, elapsed)


def _differences(state: object, offer: _Offer) -> set[str]:
    """Return the paths whose fingerprints are not those of the sender."""
    found = set(fingerprints(state)) ^ set(offer.fingerprints.items())
    return {path for path, _ in found}


@asynccontextmanager
async def _sender(model: Path) -> AsyncIterator[_Offer]:
    """Give the offer of a new process, which ends with the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from aiockpt.cli.demo_transfer import send; send()"),
        str(model),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LONGEST_OFFER,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = await process.stdout.readline()
        if not said:
            raise WorkerError("the sending process died", exitcode=process.returncode)
        offer = json.loads(said)
        if "error" in offer:
            raise StateDictError(offer["error"])
        yield _Offer(**offer)
    finally:
        process.stdin.close()
        await process.wait()


# ------------------------------------------------------------------ the sender


def send() -> None:
    """Serve the state of the model that the only argument names."""
    try:
        asyncio.run(_serve(Path(sys.argv[1])))
    except AiockptError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


async def _serve(model: Path) -> None:
    state = training_state(model)
    prints = dict(fingerprints(state))
    async with HTTPTransport[object](server=Server(host="127.0.0.1")) as transport:
        started = time.monotonic()
        await transport.send_checkpoint([1], _STEP, state)
        offer = {
            "metadata": transport.metadata(),
            "staged_in": time.monotonic() - started,
            "fingerprints": prints,
        }
        print(json.dumps(offer), flush=True)
        await _end_of_input()


async def _end_of_input() -> None:
    """Wait until the receiving process is done, or gone."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()


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
