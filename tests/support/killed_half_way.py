"""Measures a receive from three processes, one of which is killed half way.

``killed_half_way.py [MIB] [ROUNDS]`` prints the seconds of a clean receive from two, of
a clean one from three, and of one from three of which one gets SIGKILL when half has
arrived; the kinds take turns. The target: the last one takes 1.3 times the first.
"""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from collections.abc import Callable
from statistics import median

import torch

import aiockpt
from aiockpt import HTTPTransport, Progress, Server

MIB = 1 << 20


async def serve(mib: int) -> None:
    """Serve step 1 until killed."""
    async with HTTPTransport(server=Server(host="127.0.0.1")) as sender:
        await sender.send_checkpoint([], 1, {"w": torch.ones(mib * MIB // 4)})
        print(sender.metadata(), flush=True)
        await asyncio.Event().wait()


async def start(mib: int) -> tuple[Process, str]:
    """Start a sender; return its metadata, too."""
    process = await create_subprocess_exec(
        sys.executable, __file__, "serve", str(mib), stdout=PIPE
    )
    assert process.stdout is not None
    return process, (await process.stdout.readline()).decode().strip()


async def end(process: Process) -> None:
    """Kill a sender, if it still lives."""
    if process.returncode is None:
        process.kill()
    await process.communicate()


class Killing:
    """A ``progress`` that kills a process half way."""

    def __init__(self, process: Process) -> None:
        self._process: Process | None = process

    def __call__(self, progress: Progress) -> None:
        """Kill it once."""
        half = progress.bytes_total / 2
        if self._process is not None and half and progress.bytes_done >= half:
            self._process.kill()
            self._process = None


async def receive(
    receiver: HTTPTransport,
    into: dict[str, torch.Tensor],
    sources: list[str],
    progress: Callable[[Progress], None] | None = None,
) -> float:
    """Return the seconds of one receive."""
    into["w"].zero_()
    began = time.perf_counter()
    await receiver.recv_checkpoint(
        0, sources, 1, into=into, direct=True, progress=progress
    )
    seconds = time.perf_counter() - began
    assert bool((into["w"] == 1).all())
    return seconds


async def measure(mib: int, rounds: int) -> None:
    """Take turns, and print medians."""
    into = {"w": torch.zeros(mib * MIB // 4)}
    times: dict[str, list[float]] = {"two": [], "three": [], "one of three killed": []}
    (first, one), (second, two) = await start(mib), await start(mib)
    async with HTTPTransport(server=Server(host="127.0.0.1")) as receiver:
        await receive(receiver, into, [one, two])  # connections, pages
        for _ in range(rounds):
            victim, third = await start(mib)
            sources = [one, two, third]
            times["two"].append(await receive(receiver, into, [one, two]))
            times["three"].append(await receive(receiver, into, sources))
            killing = Killing(victim)
            seconds = await receive(receiver, into, sources, killing)
            times["one of three killed"].append(seconds)
            await end(victim)
    await end(first)
    await end(second)
    clean = median(times["two"])
    for kind, seen in times.items():
        shown = " ".join(f"{seconds:.3f}" for seconds in seen)
        ratio = median(seen) / clean
        print(f"{kind:20} median {median(seen):.3f} s = {ratio:.2f} x two  ({shown})")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(serve(int(sys.argv[2])))
    else:
        given = [*map(int, sys.argv[1:])]
        print(f"aiockpt {aiockpt.__version__}")
        asyncio.run(measure(*(given + [512, 5][len(given) :])))
