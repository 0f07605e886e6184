"""A guard over what Python executes: it fails what a receiver must never do.

``python auditing.py probe FILE`` tries what the guard must see.

``python auditing.py receive DIRECTORY`` is a receiver under guard. It reads one JSON
object a line: ``{"metadata": ..., "into": bool}``, or ``{"fetch": ...}`` for the
command line. The guard comes up after the first ones, which have imported what a
receive needs. Each line is answered with one: what came of it, and what the guard saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Self
from urllib.parse import urlsplit

import torch

from aiockpt import HTTPTransport, Limits, Receive, Server
from aiockpt.cli import main as command_line

HARMLESS = frozenset(
    {
        "array.__new__",
        "builtins.id",
        "ctypes.string_at",  # of a tensor, whose bounds were checked
        "gc.get_objects",
        "object.__delattr__",
        "object.__getattr__",
        "object.__setattr__",
        "sys._getframe",
        "sys.set_asyncgen_hook_finalizer",
        "sys.set_asyncgen_hook_firstiter",
        "time.sleep",
    }
)
"""Events that neither run code, nor start anything, nor leave the process."""

ON_PATHS = {
    "open": 1,
    "os.chmod": 1,
    "os.link": 2,
    "os.listdir": 1,
    "os.remove": 1,
    "os.rename": 2,
    "os.truncate": 1,
    "os.utime": 1,
}
"""Events about files, and how many of their arguments are paths."""


class Guard:
    """While it is entered, an event of Python's audit that is not allowed raises.

    It stays on record, too, in case that somebody swallows what was raised. A hook can
    never be removed, so this one sleeps before and after.

    Args:
        events: Events that are allowed beside the harmless ones.
        paths: Files, and directories of files, that may be opened and changed.

    Attributes:
        ports: Ports of this host that may be connected to; only a free one is bound.
        events: What was not allowed.
    """

    def __init__(
        self,
        *,
        events: frozenset[str] = frozenset(),
        paths: tuple[str, ...] = (),
    ) -> None:
        self.events: list[str] = []
        self._allowed = HARMLESS | events
        self.ports: frozenset[int] = frozenset()
        self._paths = tuple(os.path.realpath(each) for each in paths)
        self._armed = False
        sys.addaudithook(self._hook)

    def __enter__(self) -> Self:
        self._armed = True
        return self

    def __exit__(self, *_: object) -> None:
        self._armed = False

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._armed or event in self._allowed or self._fits(event, args):
            return
        line = f"{event} {args!r}"[:300]
        self.events.append(line)
        raise RuntimeError(f"a receiver must not do this: {line}")

    def _fits(self, event: str, args: tuple[Any, ...]) -> bool:
        if event in ON_PATHS:
            return all(map(self._is_inside, args[: ON_PATHS[event]]))
        if event == "socket.connect":
            host, port = args[1][:2]
            return host in ("127.0.0.1", "::1") and port in self.ports
        return event == "socket.bind" and args[1][1] == 0

    def _is_inside(self, path: object) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return isinstance(path, int)  # a descriptor that is open already
        real = os.path.realpath(os.fsdecode(path))
        return any(real == each or real.startswith(f"{each}/") for each in self._paths)


def probe(mark: str) -> None:
    """Try what the guard must see; say for each whether it did, and prevented it."""
    import pickle

    tries: dict[str, Callable[[], object]] = {
        "import": lambda: __import__("this"),
        "eval": lambda: eval("1 + 1"),
        "unpickle": lambda: pickle.loads(b"cos\nsystem\n."),
        "system": lambda: os.system(f"touch {mark}"),
        "process": lambda: subprocess.Popen(["touch", mark]),
        "fork": os.fork,
        "write": lambda: open(mark, "w"),  # noqa: SIM115 - fails
        "read": lambda: open("/etc/passwd"),  # noqa: SIM115 - fails
        "remove": lambda: os.remove(__file__),
        "connect": lambda: socket.create_connection(("127.0.0.1", 9)),
    }
    seen = {}
    for name, attempt in tries.items():
        guard = Guard(events=frozenset({"socket.__new__", "socket.getaddrinfo"}))
        try:
            with guard:
                attempt()
        except RuntimeError:
            seen[name] = bool(guard.events)
        else:
            seen[name] = False
    print(json.dumps(seen))


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
    roles = {"probe": probe, "receive": main}
    roles[sys.argv[1]](sys.argv[2])
