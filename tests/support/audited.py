"""A receiver under guard, in a process of its own: ``audited.py``.

It reads one JSON object a line: ``{"metadata": ..., "into": bool}``, or
``{"fetch": ...}`` for the command line. The first ones come before the guard is up,
so that what a good receive imports is there. It answers each with a line of JSON:
what came of it, and what the guard saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import sys
from typing import Any
from urllib.parse import urlsplit

import torch

from aiockpt import HTTPTransport, Limits, Receive, Server
from aiockpt.cli import main as command_line
from tests.support.auditing import Guard

WARMING = 3
LIMITS = Limits(max_bytes=16 << 20)
READ = (
    *("/proc/meminfo", "/sys/fs/cgroup", "/proc/self"),
    "/proc/sys/kernel/random/boot_id",
)
"""Where a receiver looks how much memory there is, and which host it is on."""

EVENTS = frozenset(
    {
        "_thread.start_new_thread",
        "ctypes.addressof",
        "ctypes.cdata",
        "ctypes.cdata/buffer",
        "fcntl.flock",
        "fcntl.ioctl",
        "mmap.__new__",
        "socket.__new__",
        "socket.getaddrinfo",
    }
)


def allowed_ports(wanted: dict[str, Any]) -> frozenset[int]:
    """Return the port that the receiver was told of."""
    text = wanted.get("metadata") or wanted["fetch"]
    return frozenset({urlsplit(text).port or 0})


async def receive(metadata: str, *, into: bool) -> str:
    """Receive once; say what came."""
    template = {"weight": torch.zeros(1000, dtype=torch.uint8)} if into else None
    async with HTTPTransport[Any](
        timeout=5,
        stall_timeout=2,
        server=Server(host="127.0.0.1"),
        receive=Receive(reconnect_timeout=0, limits=LIMITS),
    ) as transport:
        state = await transport.recv_checkpoint(0, metadata, 7, into=template)
    return type(state).__name__


def perform(wanted: dict[str, Any], directory: str) -> str:
    """Do what a line asks for."""
    try:
        if "fetch" in wanted:
            arguments = ["fetch", wanted["fetch"], "--step", "7", "--reconnect", "0"]
            arguments += [
                "--overwrite",
                "--max-size",
                "16MiB",
                "-o",
                f"{directory}/fetched",
            ]
            said = io.StringIO()
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                status = command_line(arguments)
            return f"exit {status}: {said.getvalue()[-300:]}"
        return asyncio.run(receive(wanted["metadata"], into=wanted["into"]))
    except Exception as error:  # noqa: BLE001 - what it is, is the answer
        return f"{type(error).__name__}: {error}"[:400]


def main(directory: str) -> None:
    """Answer line by line."""
    os.chdir(directory)
    guard = Guard(events=EVENTS, paths=(directory, *READ))
    for number, line in enumerate(sys.stdin):
        wanted = json.loads(line)
        guard.events, guard.ports = [], allowed_ports(wanted)
        with contextlib.nullcontext() if number < WARMING else guard:
            came = perform(wanted, directory)
        print(json.dumps({"came": came, "events": guard.events}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
