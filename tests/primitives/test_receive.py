"""One receive: what it leaves in a template, and what it allocates."""

from __future__ import annotations

import mmap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from aiockpt.errors import (
    AiockptError,
    IntegrityError,
    LimitExceededError,
    StagingError,
)
from aiockpt.format.chunks import digest
from aiockpt.format.header import build_manifest
from aiockpt.format.manifest import Manifest
from aiockpt.format.paths import Node
from tests.support.headers import entries_of
from tests.support.proofs import proves
from tests.support.rangepeer import RangePeer, serving_peer
from tests.support.transports import transport

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_blocking")]

ONES = b"\1" * 24


def manifest_of(beside: int, value: Node) -> Manifest:
    """Return the manifest of four floats, and of a value with bytes of its own."""
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
        digests=[digest([ONES])] * -(-(16 + beside) // chunk),
    )


@asynccontextmanager
async def sending(manifest: Manifest, content: bytes = ONES) -> AsyncIterator[str]:
    """Serve a manifest, and bytes that need not be those that it describes."""
    async with serving_peer(RangePeer(content, manifest)) as peer:
        yield peer.base_url


async def receive(url: str, into: object, *, direct: bool = False) -> Any:
    """Receive as a program does that was given the metadata."""
    async with transport(insecure=True) as receiver:
        return await receiver.recv_checkpoint(
            metadata=url, step=1, into=into, direct=direct
        )


LIES: dict[str, Node] = {
    "unknown type": ["ext", "nobody.Knows", None],
    "pickle": ["ext", "pickle", ["blob", 1]],
    "bad payload": ["ext", "torch.dtype", "float33"],
    "no node": ["list", [["what"]]],
    "no bytes": ["blob", 0],
}


@proves("threat T5")
@pytest.mark.parametrize("kind", LIES)
async def test_a_state_that_cannot_be_made_leaves_the_template(kind: str) -> None:
    """Everything that can fail has been done before the first byte is written."""
    weight = torch.zeros(4)
    async with sending(manifest_of(8, LIES[kind])) as url:
        with pytest.raises(AiockptError) as caught:
            await receive(url, {"w": weight})
    assert not weight.any()
    assert "the template was not modified" in caught.value.__notes__


@pytest.mark.parametrize(("direct", "done"), [(False, "was not"), (True, "was")])
async def test_a_receive_that_fails_says_what_it_left(direct: bool, done: str) -> None:
    """The note is there in both ways."""
    async with sending(manifest_of(8, None), ONES[:-1] + b"?") as url:
        with pytest.raises(IntegrityError) as caught:
            await receive(url, {"w": torch.zeros(4)}, direct=direct)
    assert f"the template {done} modified" in caught.value.__notes__


@pytest.mark.parametrize("direct", [False, True])
async def test_values_come_beside_the_template(direct: bool) -> None:
    """Values that are no tensors get memory of their own."""
    weight = torch.zeros(4)
    async with sending(manifest_of(8, ["blob", 1])) as url:
        got = await receive(url, {"w": weight}, direct=direct)
    assert got["w"] is weight
    assert got["x"] == b"\1" * 8
    assert weight.any()


@proves("invariant 3")
@pytest.mark.parametrize("into", [lambda: {"w": torch.zeros(4)}, lambda: None])
@pytest.mark.parametrize("direct", [False, True])
async def test_more_than_the_memory_is_refused(
    into: Callable[[], object], direct: bool
) -> None:
    """Memory that the template lacks counts, for every way to receive."""
    async with sending(manifest_of(1 << 50, ["blob", 1])) as url:
        with pytest.raises(LimitExceededError, match="size"):
            await receive(url, into(), direct=direct)


@pytest.mark.parametrize("error", [OSError, OverflowError, MemoryError])
async def test_memory_that_the_system_refuses_is_named(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """The error names the size, instead of an error of mmap."""

    def refuse(*_: object, **__: object) -> None:
        raise error("on purpose")

    async with sending(manifest_of(8, None)) as url:
        monkeypatch.setattr(mmap, "mmap", refuse)
        with pytest.raises(StagingError, match=r"no memory .* 24 bytes .* on purpose"):
            await receive(url, None)
