"""Loading onto a device, and a peer's memory and deadline, with stand-ins for both."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest
import torch
from aiohttp import web

from aiockpt import Progress
from aiockpt.checkpointers import CheckpointReader, reader
from aiockpt.checkpointers import peer as peers
from aiockpt.errors import TransferTimeoutError
from aiockpt.memory.arena import Arena
from aiockpt.runtime.lifetime import Deadline
from aiockpt.testing import assert_same
from tests.support.accelerators import FakeAccelerator, run_beside
from tests.support.commandline import beside
from tests.support.rangepeer import serving
from tests.support.saving import ALONE, CHUNK, load, save, training_state
from tests.support.transports import transport


@pytest.mark.parametrize(
    ("held", "way"),
    [
        (None, {}), (None, {"mmap": True}), (False, {"verify": "none"}),
        (False, {"mmap": True, "verify": "none"}), (True, {}), (True, {"mmap": True}),
    ],
    ids=str,
)  # fmt: skip
def test_onto_a_device(tmp_path, way, held, monkeypatch) -> None:
    """Through pinned memory, into a template or not, while more is read."""
    state = {**training_state(), "large": torch.randn(40 * CHUNK)}
    path = save(tmp_path / "s", state)
    device = FakeAccelerator(held=bool(held))
    monkeypatch.setattr(reader, "device_of", lambda _: torch.device("cpu"))
    loader = CheckpointReader(ALONE, ports=device.port_for)
    into = None
    if held is not None:
        into = {**training_state(seed=1), "large": torch.zeros(40 * CHUNK)}
    where = "fake" if held is None else None
    found, _ = run_beside(
        device, lambda: loader.read(path, into, map_location=where, **way)
    )
    assert_same(found, state)
    assert not device.pinned  # any more
    assert device.copied


@contextlib.asynccontextmanager
async def served(state):
    """Serve a state dict; give the metadata."""
    async with transport() as sender:
        await sender.send_checkpoint([1], 100, state)
        yield sender.metadata()


def test_a_peers_state_onto_a_device(monkeypatch) -> None:
    """The bytes reach the device by way of host memory."""
    device = FakeAccelerator(held=False)
    monkeypatch.setattr(reader, "device_of", lambda _: torch.device("cpu"))
    with beside(served(training_state())) as metadata:
        loader = CheckpointReader(ALONE, ports=device.port_for)
        found, _ = loader.read(metadata, map_location="fake")
        assert_same(found, training_state())
    assert device.copied


def test_a_peers_memory_is_free_with_the_last_name_of_it() -> None:
    """The memory is freed at once, not by the collector."""

    def arenas() -> int:
        found = (each for each in gc.get_objects() if isinstance(each, Arena))
        return sum(not arena.closed for arena in found)

    with beside(served({"a": torch.ones(100_000)})) as metadata:
        gc.collect()
        gc.disable()
        try:
            before = arenas()
            assert set(load(metadata)) == {"a"}
            assert arenas() == before
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("refused", "status", "doing"),
    [
        ("", 502, "waiting for a checkpoint"),
        ("7/metadata", 404, "waiting for step 7"),
        ("7/full", 502, "fetching step 7"),
    ],
)
def test_a_peer_that_never_gives_anything_new_is_given_up(
    monkeypatch, refused: str, status: int, doing: str
) -> None:
    """The peer answers each request, and the error has its last answer."""
    monkeypatch.setattr(peers, "_IDLE_TIMEOUT_S", 0.3)

    async def meddle(peer, request):
        if refused in request.path:
            problem = {"type": "tag:aiockpt,2025:step-not-found"}  # a sender's
            return web.json_response(problem, status=status)
        if not request.path.endswith("latest"):
            return None
        tag = f'"{peer.manifest.snapshot_id}"'
        return web.Response(headers={"ETag": tag, "Aiockpt-Step": "7"})

    @contextlib.asynccontextmanager
    async def addressed():
        async with serving(bytes(1000), meddle=meddle) as peer:
            yield peer.base_url

    with (
        beside(addressed()) as url,
        pytest.raises(TransferTimeoutError, match=doing) as caught,
    ):
        load(url)
    assert url in caught.value.last_error


@pytest.mark.asyncio
async def test_each_new_byte_renews_the_deadline() -> None:
    """No byte that was there before does, when a chunk is fetched again."""
    async with Deadline(60, phase="here") as deadline:
        meter, renewed = peers._ByteReporter(None, deadline), []
        for step, nbytes in ((1, 900), (1, 500), (2, 100), (2, 50)):
            meter.begin(step)
            before = deadline.when
            await asyncio.sleep(0.01)
            meter.update(Progress(stop="fetch_chunk", bytes_done=nbytes))
            renewed.append(deadline.when > before)
        assert renewed == [True, False, True, False]
