"""One of the processes: ``python -m aiockpt.bench.worker ROLE``.

It reads commands from its standard input, one JSON object a line,
``{"do": name, "with": {...}}``, and answers ``{"ok": value}`` or ``{"error": text}`` on
its standard output. It ends with its input. Whatever prints meanwhile prints to the
standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TextIO

from aiockpt.bench.app import AppSender
from aiockpt.bench.group import GroupReceiver, GroupSender
from aiockpt.bench.guest import Guest
from aiockpt.bench.keeper import Keeper
from aiockpt.bench.receiver import Receiver
from aiockpt.bench.saver import Saver
from aiockpt.bench.sender import Sender
from aiockpt.bench.trainer import Trainer
from aiockpt.bench.training import Training, train_beside
from aiockpt.bench.visitor import Visitor
from aiockpt.runtime.bridge import Bridge

__all__ = ["main"]

_Role = Callable[[Bridge], Sender | Receiver | Saver | Visitor | Guest]
_ROLES: dict[str, _Role] = {
    "sender": Sender,
    "receiver": Receiver,
    "keeper": Keeper,
    "guest": Guest,
    "group sender": GroupSender,
    "group receiver": GroupReceiver,
    "saver": Saver,
    "app": AppSender,
    "visitor": Visitor,
}
_TRAINER = "trainer"  # its main thread trains, and another one obeys
_THREADS = 16


def main(argv: Sequence[str]) -> None:
    """Obey until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with answers:
        if argv[0] == _TRAINER:
            train_beside(partial(_obey_beside, answers))
        else:
            asyncio.run(_obey(_ROLES[argv[0]], answers))


def _obey_beside(answers: TextIO, training: Training) -> None:
    asyncio.run(_obey(partial(Trainer, training), answers))


async def _obey(role: _Role, answers: TextIO) -> None:
    bridge = Bridge(threads=_THREADS, name="bench")
    worker = role(bridge)
    async for line in await _input():
        answers.write(json.dumps(await _answer(worker, json.loads(line))) + "\n")
        answers.flush()
    await worker.release()
    bridge.close()


async def _input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


async def _answer(worker: object, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"ok": await getattr(worker, request["do"])(**request["with"])}
    except Exception as error:  # noqa: BLE001 - it is the answer
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(sys.argv[1:])
