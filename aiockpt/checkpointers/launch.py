"""Starts the checkpoint process, and ends it. Everything here blocks: for threads.

``multiprocessing`` can do this too. But it runs the trainer's main module again in
every process that it spawns, guarded or not, and waits for each of them at the exit.
Here, the main module is imported only if an init function is defined in it.
"""

from __future__ import annotations

import multiprocessing.spawn  # noqa: TID251 - this is the checkpoint process
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import context, process  # noqa: TID251 - as above
from multiprocessing.reduction import ForkingPickler  # noqa: TID251 - as above
from typing import Any, Final

import msgspec

from aiockpt.checkpointers.messages import Setup
from aiockpt.errors import LocalProtocolError
from aiockpt.runtime.ipc import encode, pack, pair

__all__ = ["Child", "Recipe"]

_CODE: Final = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from aiockpt.checkpointers.worker import main; main(int(sys.argv[1]))"
)
_PATIENCE: Final = 5.0


@dataclass(slots=True)
class _Spawning:
    """Takes the place of multiprocessing's launcher while arguments are pickled."""

    fds: list[int] = field(default_factory=list)

    def duplicate_for_child(self, fd: int) -> int:
        """Let the child inherit a descriptor under the same number."""
        self.fds.append(fd)
        return fd


class Recipe:
    """What a checkpoint process is made of. It is pickled for each process.

    Raises:
        LocalProtocolError: a function or an argument cannot be pickled. Or this is a
            checkpoint process that has imported an unguarded main module.
    """

    def __init__(
        self,
        init: Callable[..., object],
        init_args: tuple[Any, ...],
        make_writer: Callable[..., Any],
        writer_args: Mapping[str, Any],
        setup: Callable[[], Setup],
    ) -> None:
        self._content = (init, init_args, make_writer, dict(writer_args))
        self.setup = setup
        _refuse_to_nest()
        self._pickled(_Spawning())

    def __repr__(self) -> str:
        return f"<Recipe {self._content[2]!r}>"

    def parcel(self) -> tuple[int, list[int]]:
        """Return the parcel for a new process, and the descriptors it inherits."""
        spawning = _Spawning()
        pickled = self._pickled(spawning)
        facts = msgspec.json.encode(_preparation(imports_main=b"__main__" in pickled))
        return pack(len(facts).to_bytes(8, "little"), facts, pickled), spawning.fds

    def _pickled(self, spawning: _Spawning) -> bytes:
        context.set_spawning_popen(spawning)  # type: ignore[arg-type]
        try:
            return bytes(ForkingPickler.dumps(self._content))
        except Exception as error:
            raise LocalProtocolError(
                "an init function of the checkpoint process, or an argument of it, "
                f"cannot be pickled: {error}"
            ) from error
        finally:
            context.set_spawning_popen(None)


def _refuse_to_nest() -> None:
    if getattr(process.current_process(), "_inheriting", False):
        raise LocalProtocolError(
            "the checkpoint process has imported the main module, which makes a "
            "checkpointer at once: guard it by `if __name__ == '__main__':`"
        )


def _preparation(*, imports_main: bool) -> dict[str, Any]:
    """Return what ``multiprocessing.spawn.prepare`` needs there."""
    found = multiprocessing.spawn.get_preparation_data("aiockpt-checkpoint")
    wanted = {"log_to_stderr", "log_level", "name", "sys_path", "sys_argv", "dir"}
    wanted.add("orig_dir")
    if imports_main:
        wanted |= {"init_main_from_name", "init_main_from_path"}
    return {key: value for key, value in found.items() if key in wanted}


class Child:
    """One checkpoint process, from its start to its end.

    ``socket`` is the trainer's end. What is sent before the process runs waits there.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.socket, self._theirs = pair()
        self.pidfd = -1
        self._recipe = recipe
        self._popen: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Child pid={self.pid}>"

    @property
    def pid(self) -> int | None:
        """Its process id, once it was launched."""
        return self._popen.pid if self._popen else None

    def launch(self) -> None:
        """Start it, unless that was done.

        Raises:
            OSError: the system refused.
        """
        with self._lock:
            if self._popen is None and self._theirs.fileno() >= 0:
                self._launch()

    def _launch(self) -> None:
        parcel, inherited = self._recipe.parcel()
        try:
            message = encode(self._recipe.setup())
            socket.send_fds(self.socket, [message], [parcel])
        finally:
            os.close(parcel)
        there = self._theirs.fileno()
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001 - as multiprocessing does
        program = multiprocessing.spawn.get_executable()
        self._popen = subprocess.Popen(  # noqa: S603 - this very interpreter
            [program, *flags, "-c", _CODE, str(there), *map(str, sys.path)],
            stdin=subprocess.DEVNULL,
            pass_fds=(there, *inherited),
            # Ctrl-C, and what ends the trainer's process group, must not end it. In a
            # session of its own, its niceness would not count (autogroups).
            process_group=0,
        )
        self._theirs.close()  # else nobody would notice when the process ends
        with suppress(OSError, AttributeError):  # an old kernel; the socket tells, too
            self.pidfd = os.pidfd_open(self._popen.pid)

    def kill(self) -> None:
        """Kill it at once."""
        if self._popen is not None:
            self._popen.kill()

    def reap(self) -> int | None:
        """Return the exit code of a process that has ended, or is about to."""
        if self._popen is None:
            return None
        with suppress(subprocess.TimeoutExpired):
            return self._popen.wait(_PATIENCE)
        return None

    def close(self) -> None:
        """Release it; a process that still runs is left to itself. Idempotent."""
        with self._lock:
            self._theirs.close()
            self.socket.close()
            if self.pidfd >= 0:
                os.close(self.pidfd)
                self.pidfd = -1
            if self._popen is not None and self._popen.poll() is None:
                self._popen.returncode = 0  # else subprocess warns about it later
