"""Own frames between a public verb and the system call that moves its bytes.

Run as a program, this prints them as JSON for six paths: a name, and the frames. A
frame counts if its code is the package's and it is in a task of the call, in a calling
thread without a loop, or in the thread that makes the system call. The task that renews
a lease does not count.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import distributed

import aiockpt

PACKAGE = str(Path(aiockpt.__file__).parent)
RECEIVING = {"recv", "recv_into", "recvmsg_into", "preadv", "readinto"}
SENDING = {"send", "sendall", "sendmsg", "sendfile", "writev", "pwritev", "pwrite"}
TIMEOUT = timedelta(seconds=60)
# Small enough for many messages, large enough that each travels by itself.
STATE = {f"w{n}": torch.zeros(300 << 10, dtype=torch.uint8) for n in range(100)}

Way = list[str]


def own(frame: FrameType) -> str | None:
    """Return where a frame is; None if its code is not the package's."""
    code = frame.f_code
    if not code.co_filename.startswith(PACKAGE):
        return None
    name = getattr(code, "co_qualname", code.co_name)
    return f"{code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno} {name}"


def stack(frame: FrameType | None) -> Way:
    """Return the own frames of a thread, the outermost one first."""
    found: Way = []
    while frame is not None:
        found += [row] if (row := own(frame)) else []
        frame = frame.f_back
    return found[::-1]


def awaited(task: asyncio.Task[Any]) -> Iterator[str]:
    """Yield the own frames of a task that waits."""
    coroutine: Any = task.get_coro()
    while coroutine is not None:
        frames = (
            getattr(coroutine, f"{kind}_frame", None) for kind in ["cr", "ag", "gi"]
        )
        frame = next((each for each in frames if each is not None), None)
        if frame is not None and (row := own(frame)):
            yield row
        awaits = ("cr_await", "ag_await", "gi_yieldfrom")
        coroutine = next(
            (found for name in awaits if (found := getattr(coroutine, name, None))),
            None,
        )


def clocked(way: Way) -> bool:
    """Say whether a task waits for the time of its next request."""
    return bool(way) and way[-1].endswith("CheckpointClient.pause")


class Spy:
    """Keeps the longest way to a system call of a kind."""

    def __init__(self) -> None:
        self.longest: Way = []
        self._calls: set[str] = set()
        self._main = threading.main_thread().ident or 0
        self._loops: list[asyncio.AbstractEventLoop] = []
        begin = asyncio.SelectorEventLoop.__init__

        def note_loop(loop: Any, *arguments: Any) -> None:
            begin(loop, *arguments)
            self._loops.append(loop)

        asyncio.SelectorEventLoop.__init__ = note_loop  # type: ignore[assignment, method-assign]

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Be what a profiler is."""
        if event == "c_call" and getattr(argument, "__name__", "") in self._calls:
            self.note(frame)

    def note(self, frame: FrameType) -> None:
        """Keep the way to this frame, if it is the longest one."""
        here = stack(frame)
        if not here:
            return  # asyncio's own transports
        tasks = [t for loop in self._loops for t in asyncio.all_tasks(loop)]
        ways = [[*awaited(task)] for task in tasks]
        # A task that renews a lease by the clock moves no bytes.
        way = [row for each in ways if not clocked(each) for row in each]
        if threading.get_ident() != self._main and not self._runs_a_loop(self._main):
            way += stack(sys._current_frames().get(self._main))
        # A function that several threads or tasks are in is read once.
        way = list({row.split()[1]: row for row in [*way, *here]}.values())
        if len(way) > len(self.longest):
            self.longest = way

    def _runs_a_loop(self, thread: int) -> bool:
        return any(getattr(loop, "_thread_id", None) == thread for loop in self._loops)

    def watching(self, calls: set[str], verb: Callable[[], object]) -> Way:
        """Call a verb; return its longest way to one of these system calls."""
        self.longest, self._calls = [], calls
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            verb()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        return self.longest


class Watched:
    """A process group that notes who sends and receives large messages."""

    def __init__(self, group: Any, spy: Spy) -> None:
        self._group, self._spy = group, spy

    def size(self) -> int:
        """Pass on."""
        return int(self._group.size())

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Note, and pass on."""
        return self._noted(self._group.send, tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Note, and pass on."""
        return self._noted(self._group.recv, tensors, rank, tag)

    def _noted(
        self, move: Any, tensors: list[torch.Tensor], rank: int, tag: int
    ) -> Any:
        if tensors[0].nbytes == STATE["w0"].nbytes:
            self._spy.note(sys._getframe(2))
        return move(tensors, rank, tag)


async def serve(pipe: Any) -> None:
    """Serve until the other process has received."""
    server = aiockpt.Server(host="127.0.0.1")
    async with aiockpt.HTTPTransport(60, server=server) as transport:
        await transport.send_checkpoint(step=1, state_dict=STATE)
        pipe.send(transport.metadata())
        while not pipe.poll():  # noqa: ASYNC110 - another process has no event
            await asyncio.sleep(0.01)
        pipe.recv()


async def receive(metadata: str) -> None:
    """Receive what is served."""
    options = aiockpt.Receive(connections=1)
    transport: aiockpt.HTTPTransport[Any]
    transport = aiockpt.HTTPTransport(60, receive=options, same_host=False)
    async with transport:
        await transport.recv_checkpoint(metadata=metadata, step=1)


async def move(group: Watched, rank: int) -> None:
    """Send as rank 0, or receive as rank 1."""
    async with aiockpt.PGTransport[Any](group, 60) as transport:
        if rank == 0:
            await transport.send_checkpoint([1], 1, STATE)
        else:
            await transport.recv_checkpoint(0, "", 1)


def group_way(path: str, rank: int, spy: Spy) -> Way:
    """Move the state over a group; return this rank's way."""
    store = distributed.FileStore(path, 2)  # type: ignore[attr-defined]
    group = distributed.ProcessGroupGloo(store, rank, 2, TIMEOUT)
    return spy.watching(set(), lambda: asyncio.run(move(Watched(group, spy), rank)))


def be_the_other_end(pipe: Any, path: str) -> None:
    """Serve, then send as rank 0, and say what the ways were."""
    spy = Spy()
    served = spy.watching(SENDING, lambda: asyncio.run(serve(pipe)))
    pipe.send({"served range": served, "group send": group_way(path, 0, spy)})


def ways(folder: Path) -> dict[str, Way]:
    """Return all six."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    rendezvous = str(folder / "group")
    other = context.Process(target=be_the_other_end, args=(there, rendezvous))
    other.start()
    spy = Spy()
    try:
        metadata = here.recv()
        found = {
            "HTTP receive": spy.watching(
                RECEIVING, lambda: asyncio.run(receive(metadata))
            )
        }
        here.send("received")
        found["group receive"] = group_way(rendezvous, 1, spy)
        found |= here.recv()
    finally:
        other.join(20)
        other.kill()
    saved = folder / "saved"
    with aiockpt.make_sync_checkpointer() as checkpointer:
        save = partial(checkpointer.save, STATE, saved)
        found["save"] = spy.watching(SENDING, save)
    found["load"] = spy.watching(RECEIVING, partial(aiockpt.load, saved))
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(ways(Path(name))))
