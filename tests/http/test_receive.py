"""One receive: what it leaves in a template, and what it allocates."""

from __future__ import annotations

import mmap
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from aiockpt.errors import (
    AiockptError,
    LimitExceededError,
    RemoteProtocolError,
    StagingError,
    TransferInterruptedError,
)
from aiockpt.format.header import build_manifest
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest, Outline
from aiockpt.format.paths import Node
from aiockpt.http.manifests import ManifestReply
from aiockpt.http.source import HttpSource, Sharing
from aiockpt.memory.device import port_for
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Deadline
from aiockpt.transfer.destination import Terms
from aiockpt.transfer.receive import ReceiveOptions
from aiockpt.transfer.receive import receive as receive_from
from headers import entries_of

pytestmark = pytest.mark.asyncio

DIGEST = "0" * 32


def manifest_of(beside: int, value: Node) -> Manifest:
    """Return the manifest of four floats, and a value with bytes of its own."""
    chunk = 1 << 40
    return build_manifest(
        step=1,
        chunk_bytes=chunk,
        entries=entries_of(
            ("w", "F32", (4,), 16),
            ("x", "U8", (beside,), beside),
        ),
        views=[],
        tree=["dict", ["w", "x"], [["tensor", 0], value]],
        digests=[DIGEST] * -(-(16 + beside) // chunk),
    )


class Peer:
    """An origin that sends one manifest, and bytes that are all ones."""

    name = "http://127.0.0.1/"

    def __init__(self, manifest: Manifest, fail: Exception | None = None) -> None:
        self._manifest = manifest
        self._fail = fail

    async def fetch_manifest(self, *_: object, **__: object) -> ManifestReply:
        """Send the manifest."""
        return ManifestReply(self._manifest, None)

    async def end_lease(self, step: int) -> None:
        """Keep nothing for it."""

    async def fetch_chunks(
        self, outline: Outline, target: Any, *__: object, **___: object
    ) -> None:
        """Fill the target."""
        for view in target.memory.buffers(0, outline.grid.segment_bytes):
            view[:] = b"\1" * view.nbytes
        if self._fail is not None:
            raise self._fail


Receiving = Callable[..., Awaitable[Any]]


@pytest.fixture
def receive() -> Iterator[Receiving]:
    """Receive from a peer, as a transport does."""
    bridge = Bridge(threads=2, name="test")
    yield partial(_receive, bridge)
    bridge.close()


async def _receive(bridge: Bridge, peer: Peer, into: object, *, direct: bool) -> Any:
    terms = Terms(limits=Limits(), allow_pickle=False, direct=direct, ports=port_for)
    sharing = Sharing(wanted=False, keep=False, through=not direct, verify=False)
    options = ReceiveOptions(
        into=into, have=None, select=None, progress=None, terms=terms
    )
    deadline = Deadline(20, stop="test")
    source = HttpSource(peer, bridge, sharing, deadline)  # type: ignore[arg-type]
    return await receive_from(source, 1, options, bridge, deadline)


LIES: dict[str, Node] = {
    "unknown type": ["ext", "nobody.Knows", None],
    "pickle": ["ext", "pickle", ["blob", 1]],
    "bad payload": ["ext", "torch.dtype", "float33"],
    "no node": ["list", [["what"]]],
    "no bytes": ["blob", 0],
}


@pytest.mark.parametrize("kind", LIES)
async def test_a_state_that_cannot_be_made_leaves_the_template(
    receive: Receiving, kind: str
) -> None:
    """Everything that can fail has been done before the first byte is written."""
    weight = torch.zeros(4)
    with pytest.raises(AiockptError) as caught:
        await receive(Peer(manifest_of(8, LIES[kind])), {"w": weight}, direct=False)
    assert not weight.any()
    assert caught.value.__notes__ == ["the template was not modified"]


async def test_direct_says_that_the_template_was_modified(receive: Receiving) -> None:
    """Its bytes were there before the tree was looked at."""
    weight = torch.zeros(4)
    peer = Peer(manifest_of(8, LIES["unknown type"]))
    with pytest.raises(RemoteProtocolError) as caught:
        await receive(peer, {"w": weight}, direct=True)
    assert caught.value.__notes__ == ["the template was modified"]


@pytest.mark.parametrize(("direct", "done"), [(False, "was not"), (True, "was")])
async def test_an_interrupted_receive_says_what_it_left(
    receive: Receiving,
    done: str,
    direct: bool,
) -> None:
    """The note is there in both ways."""
    lost = TransferInterruptedError("lost", chunk=0, received=0, expected=1)
    peer = Peer(manifest_of(8, None), lost)
    with pytest.raises(TransferInterruptedError) as caught:
        await receive(peer, {"w": torch.zeros(4)}, direct=direct)
    assert caught.value.__notes__ == [f"the template {done} modified"]


@pytest.mark.parametrize("direct", [False, True])
async def test_values_come_beside_the_template(
    receive: Receiving,
    direct: bool,
) -> None:
    """In memory of their own."""
    weight = torch.zeros(4)
    peer = Peer(manifest_of(8, ["blob", 1]))
    got = await receive(peer, {"w": weight}, direct=direct)
    assert got["w"] is weight
    assert got["x"] == b"\1" * 8
    assert weight.any()


@pytest.mark.parametrize("into", [lambda: {"w": torch.zeros(4)}, lambda: None])
@pytest.mark.parametrize("direct", [False, True])
async def test_more_than_the_memory_is_refused(
    receive: Receiving,
    into: Callable[[], object],
    direct: bool,
) -> None:
    """What has no home in the template counts, however it is received."""
    with pytest.raises(LimitExceededError, match="size"):
        await receive(Peer(manifest_of(1 << 50, ["blob", 1])), into(), direct=direct)


@pytest.mark.parametrize("error", [OSError, OverflowError, MemoryError])
async def test_memory_that_the_system_refuses_is_named(
    receive: Receiving, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """With its size, instead of an error of mmap."""

    def refuse(*_: object, **__: object) -> None:
        raise error("on purpose")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(StagingError, match=r"no memory .* 24 bytes .* on purpose"):
        await receive(Peer(manifest_of(8, None)), None, direct=False)
