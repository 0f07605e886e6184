"""Says what a forked child has of its parent's checkpoints: ``MODE`` is an argument.

It prints one line of JSON, and needs a process of its own, so that the figures are
those of the checkpoints alone.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from aiockpt import HTTPTransport
from tests.support.transports import transport

MIB = 1 << 20
CHECKPOINT_MIB = 64
KEPT: list[Any] = []
"""What the program has at the time of the fork, and so the child."""


def weights(fill: float) -> dict[str, Any]:
    """Return a state dict of one checkpoint's size."""
    return {"w": torch.full((CHECKPOINT_MIB * MIB // 4,), fill)}


def facts() -> dict[str, Any]:
    """Return how much writable memory this process has, and what it shares."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    maps = Path("/proc/self/maps").read_text()
    writable = [line.split(" ", 1)[0] for line in maps.splitlines() if " rw" in line]
    ends = ([int(end, 16) for end in each.split("-")] for each in writable)
    return {
        "mapped": sum(stop - start for start, stop in ends) >> 20,
        "descriptors": sum("memfd:aiockpt" in link for link in links),
        "shared": maps.count("memfd:aiockpt"),
    }


def in_child(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what ``look`` says in a forked child, and how the child ended."""
    source, sink = os.pipe()
    if not (child := os.fork()):
        code = 1
        try:
            os.write(sink, json.dumps(look()).encode())
            code = 0
        except BaseException:  # noqa: BLE001 - the child ends here in any case
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(sink)
    with os.fdopen(source) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return {**json.loads(said or "{}"), "status": status}


def collected(taken: int = 2 * CHECKPOINT_MIB // 16) -> dict[str, Any]:
    """Return the facts after the child has dropped all that it has of its parent's.

    New memory is taken first, which may lie where the parent's was: tensors of 16 MiB.
    """
    before = facts()
    mine = [torch.full((4 * MIB,), float(n)) for n in range(taken)]
    asyncio.set_event_loop(None)
    for kept in KEPT:
        with suppress(Exception):
            asyncio.run(kept.disallow_checkpoint())
    KEPT.clear()
    gc.collect()
    assert all(bool((each == n).all()) for n, each in enumerate(mine))
    return before


@asynccontextmanager
async def staged(**options: Any) -> AsyncIterator[HTTPTransport[Any]]:
    """Send twice, so that there is an arena that is offered and a free one."""
    sender = transport(timeout=60, chunk_bytes=16 << 20, **options)
    async with sender:
        KEPT.append(sender)
        for step in range(3):
            await sender.send_checkpoint([1], step, weights(float(step)))
        yield sender


async def sender(**options: Any) -> dict[str, Any]:
    """Fork beside a sender, then have it serve its checkpoint."""
    before = facts()
    async with staged(**options) as sending:
        parent, child = facts(), in_child(collected)
        async with HTTPTransport[Any](same_host=False) as receiver:
            got = await receiver.recv_checkpoint(0, sending.metadata(), 2)
        right = bool((got["w"] == 2.0).all())
    return {"before": before, "parent": parent, "child": child, "right": right}


async def staging() -> dict[str, Any]:
    """Fork again and again while one is staged; the heaviest child counts."""
    async with staged() as sending:
        parent, children = facts(), []
        sends = asyncio.create_task(sending.send_checkpoint([1], 3, weights(3.0)))
        while not sends.done():
            children.append(in_child(lambda: collected(1)))
            await asyncio.sleep(0)
        await sends
    worst = max(children, key=lambda each: each.get("mapped", 1 << 30))
    failed = [each for each in children if each["status"]]
    return {"parent": parent, "child": worst, "failed": failed, "forks": len(children)}


async def received(**options: Any) -> dict[str, Any]:
    """Fork with what was received, which the child reads and changes."""
    async with staged(same_host=options.get("share", False)) as sending:
        async with HTTPTransport[Any]() as receiver:
            metadata = sending.metadata()
            got = await receiver.recv_checkpoint(0, metadata, 2, **options)

            def use() -> dict[str, Any]:
                right = bool((got["w"] == 2.0).all())
                got["w"].add_(1.0)
                return {"right": right and bool((got["w"] == 3.0).all())}

            child = in_child(use)
        return {"child": child, "right": bool((got["w"] == 2.0).all())}


async def main(mode: str) -> dict[str, Any]:
    """Return what the mode found."""
    if mode == "loop":
        return await sender()
    if mode == "shared":
        return await sender(same_host=True)
    if mode == "process":
        return await sender(process=True)
    if mode == "staging":
        return await staging()
    if mode == "received":
        return await received()
    if mode == "share":
        return await received(share=True)
    raise ValueError(mode)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))), flush=True)
