"""Headers within the default limits that cost as much as a peer can make them."""

from __future__ import annotations

import time
import tracemalloc
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from aiockpt import AiockptError, Limits
from aiockpt.errors import LimitExceededError
from tests.support import rangepeer
from tests.support.headers import header_of, sealed
from tests.support.hostile import stalls
from tests.support.proofs import proves
from tests.support.transports import Transport, pair, receive, transport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = pytest.mark.asyncio

MIB = 1 << 20
WIDE = "\U0001f600".encode()  # makes a string take four bytes a character
TEXT = b"a" * (7 * MIB)
COLLIDING = 2**61 - 1  # ints that differ by this have one hash


def header(tree: bytes, *, views: int = 0, entries: int = 1) -> bytes:
    """Return a header with this tree, and tensors of four bytes."""
    view = [0, "float32", [1], [1], 0, 0]
    manifest = {
        "version": 1,
        "step": rangepeer.STEP,
        "chunk_bytes": 1 << 30,
        "algorithm": "xxh3-128",
        "digests": "0" * 32,
        "entries": entries,
        **({"views": [view] * views} if views else {}),
        "tree": msgspec.Raw(tree),
    }
    found = {
        f"w{n:07d}": {
            "dtype": "F32",
            "shape": [1],
            "data_offsets": [4 * n, 4 * n + 4],
        }
        for n in range(entries)
    }
    return header_of(manifest, found)


def join(items: list[bytes]) -> bytes:
    """Return a JSON array."""
    return b"[%b]" % b",".join(items)


def table(keys: list[bytes]) -> bytes:
    """Return the node of a dict with these keys."""
    return b'["dict",%b,%b]' % (join(keys), join([b"0"] * len(keys)))


def colliding() -> bytes:
    """Return many dicts, each with few enough keys of one hash."""
    keys = [b'["int","%x"]' % (n * COLLIDING) for n in range(1, 1000)]
    return b'["list",%b]' % join([table(keys)] * 99)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "keys": lambda: header(table([b'"%d"' % n for n in range(249_000)])),
    "a fourth of the keys": lambda: header(table([b'"%d"' % n for n in range(62_000)])),
    "values": lambda: header(b'["list",%b]' % join([b"0"] * 499_000)),
    "lists": lambda: header(b'["list",%b]' % join([b'["list",[]]'] * 160_000)),
    "tuple keys": lambda: header(table([b'["tuple",[%d]]' % n for n in range(99_000)])),
    "colliding keys": lambda: header(colliding()),
    "text": lambda: header(b'"%b"' % (b"a" * (7 * MIB))),
    "wide text": lambda: header(b'"%b"' % (WIDE + b"a" * (7 * MIB))),
    "texts": lambda: header(b'["list",%b]' % join([b'"%b"' % (WIDE + TEXT)] * 4)),
    "quotes": lambda: header(b'"%b"' % (b'\\"' * (2 * MIB))),
    "too long a text": lambda: header(b'"%b"' % (WIDE + b"a" * (30 * MIB))),
    "too long a text with commas": lambda: header(
        b'"%b"' % (WIDE + (b"a" * 99 + b",") * (15 * MIB // 100))
    ),
    "names": lambda: header(
        b'["tensors",%b,%b]'
        % (join([b'"n%d"' % n for n in range(240_000)]), join([b"0"] * 240_000))
    ),
    "views": lambda: header(b"null", views=99_000),
    "too many views": lambda: header(b"null", views=350_000),
    "entries": lambda: header(b"null", entries=100_000),
    "another tool's": lambda: sealed(
        b"{%b}" % b",".join(b'"%d":0' % n for n in range(1_000_000))
    ),
    "more keys than are taken": lambda: header(
        table([b'"%d"' % n for n in range(1_000_000)])
    ),
}

COSTLIEST = ("colliding keys", "texts", "values", "views")
"""One of each way to cost much: hashes, copies, objects, records."""

TOO_LONG = "LimitExceededError: the length of a string"


@asynccontextmanager
async def sending(kind: str) -> AsyncIterator[tuple[str, Transport]]:
    """Give the URL of a peer that sends such a header, and a receiver."""
    async with (
        rangepeer.serving(bytes(4), chunk_bytes=1 << 20) as peer,
        transport() as receiver,
    ):
        object.__setattr__(peer.manifest, "header", HOSTILE[kind]())
        yield peer.base_url, receiver


@proves("threat D2")
@pytest.mark.parametrize(
    ("kind", "seconds", "options"),
    [
        *[(kind, seconds, {}) for kind in COSTLIEST for seconds in (0.1, 2)],
        ("names", 2, {"select": bool}),
        *[
            pytest.param(kind, seconds, {}, marks=pytest.mark.nightly)
            for kind in HOSTILE
            for seconds in (0.1, 5)
        ],
        *[
            pytest.param(kind, 5, {"select": bool}, marks=pytest.mark.nightly)
            for kind in ("keys", "lists", "names", "views")
        ],
    ],
)
async def test_a_receive_ends_at_its_deadline(
    kind: str, seconds: float, options: dict[str, Any]
) -> None:
    """Any header is given up at the deadline, and the loop stays live."""
    async with sending(kind) as (url, receiver), stalls() as longest:
        start, computed = time.monotonic(), time.process_time()
        with suppress(AiockptError):
            await receiver.recv_checkpoint(
                0, url, rangepeer.STEP, timeout=seconds, **options
            )
        # On a busy machine, more time passes than this process has.
        elapsed = min(time.monotonic() - start, time.process_time() - computed)
    assert elapsed < seconds + 2
    assert longest[0] < 1  # some of these headers take several seconds


@proves("threat D2")
@pytest.mark.parametrize(
    ("kind", "most", "said"),
    [
        ("a fourth of the keys", 25, ""),
        ("wide text", 100, ""),
        ("too long a text", 100, TOO_LONG),
        ("too long a text with commas", 100, TOO_LONG),
        pytest.param("keys", 100, "", marks=pytest.mark.nightly),
        pytest.param("views", 100, "", marks=pytest.mark.nightly),
    ],
)
async def test_it_takes_little_memory(kind: str, most: int, said: str) -> None:
    """Several times what a header of many tensors weighs, and no more MiB than that.

    What is too long is named: a receiver that wants it raises the limit.
    """
    error = ""
    async with sending(kind) as (url, receiver):
        tracemalloc.start()
        try:
            await receiver.recv_checkpoint(0, url, rangepeer.STEP)
        except AiockptError as caught:
            error = f"{type(caught).__name__}: {caught}"
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert peak < most * MIB
    assert error.startswith(said)


async def test_a_long_string_travels() -> None:
    """A tokenizer's description has megabytes."""
    state = {"tokenizer": "\u00e9 token, " * (MIB // 4), "w": torch.zeros(2)}
    async with pair(state=state) as (sender, receiver):
        assert (await receive(sender, receiver))["tokenizer"] == state["tokenizer"]


@pytest.mark.nightly
async def test_a_hundred_thousand_tensors_are_taken() -> None:
    """The limit that is the default, and not one tensor more."""
    flat = torch.zeros(100_001)
    state: dict[str, Any] = {f"layer.{n}.weight": flat[n] for n in range(100_000)}
    state = {key: each.clone() for key, each in state.items()}
    async with pair(state=state) as (sender, receiver):
        got = await receive(sender, receiver)
        assert len(got) == len(state)
        state["one more"] = torch.zeros(1)
        async with transport(limits=Limits(max_tensors=100_001)) as generous:
            await generous.send_checkpoint([], 2, state)
            with pytest.raises(LimitExceededError, match="100001, more than"):
                await receiver.recv_checkpoint(0, generous.metadata(), 2)
