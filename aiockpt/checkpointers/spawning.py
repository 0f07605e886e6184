"""How the init functions get to the checkpoint process: pickled, as spawn does it.

``multiprocessing`` could start that process, too. But it runs the trainer's main module
again in every process that it spawns, guarded or not, and waits for each of them at the
exit. Here, the main module is imported only if an init function is defined in it.
"""

from __future__ import annotations

import json
import logging
import multiprocessing.spawn  # noqa: TID251 - this is the checkpoint process
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import context, process  # noqa: TID251 - as above
from multiprocessing.reduction import ForkingPickler  # noqa: TID251 - as above
from typing import Any

from aiockpt.checkpointers.writer import Writers
from aiockpt.errors import LocalProtocolError
from aiockpt.runtime.children import Child
from aiockpt.runtime.ipc import pack, unpack
from aiockpt.runtime.system import is_programs
from aiockpt.storage.interface import register_store, registered_stores

logger = logging.getLogger("aiockpt")


@dataclass(slots=True)
class _Spawning:
    """Takes the place of multiprocessing's launcher while arguments are pickled."""

    fds: list[int] = field(default_factory=list)

    def duplicate_for_child(self, fd: int) -> int:
        """Let the child inherit a descriptor under the same number."""
        self.fds.append(fd)
        return fd


class InitFunctions:
    """The init functions and their arguments, which are pickled for each process.

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
    ) -> None:
        self._content = (init, init_args, make_writer, dict(writer_args))
        _refuse_to_nest()
        self._pickled(_Spawning())

    def start(self, setup: object) -> Child:
        """Start a process whose first message is ``setup``, with the functions.

        Raises:
            OSError: the system refuses.
            LocalProtocolError: an argument cannot be pickled any more.
        """
        spawning = _Spawning()
        pickled = self._pickled(spawning)
        # As ASCII: an argument of the program need not be valid text.
        facts = json.dumps(_preparation(imports_main=b"__main__" in pickled)).encode()
        parcel = pack(len(facts).to_bytes(8, "little"), facts, pickled)
        try:
            return Child(
                "aiockpt.checkpointers.worker",
                greeting=setup,
                fds=[parcel],
                inherited=spawning.fds,
                program=multiprocessing.spawn.get_executable(),
            )
        finally:
            os.close(parcel)

    def _pickled(self, spawning: _Spawning) -> bytes:
        context.set_spawning_popen(spawning)  # type: ignore[arg-type]
        try:
            stores = _stores()
            try:
                return bytes(ForkingPickler.dumps((*self._content, stores)))
            except Exception as error:
                raise LocalProtocolError(
                    "an init function of the checkpoint process, or an argument of it, "
                    f"cannot be pickled: {error}"
                ) from error
        finally:
            context.set_spawning_popen(None)


def make_writers(parcel: int) -> Writers:
    """Call the init function, in its process; return the writers."""
    content = unpack(parcel)
    size = int.from_bytes(content[:8], "little")
    facts = json.loads(content[8 : 8 + size])
    own: Any = process.current_process()
    own._inheriting = True  # noqa: SLF001 - see _refuse_to_nest
    try:
        # This imports the trainer's main module, too, if the functions are in it.
        multiprocessing.spawn.prepare(facts)
        functions = ForkingPickler.loads(content[8 + size :])
    except AttributeError as error:
        if "__main__" not in str(error):
            raise
        raise LocalProtocolError(
            "the checkpoint process cannot import the main module (a notebook, `-c`, "
            "`-m` of a package, a zip file or standard input), which defines an init "
            f"function or an argument of one: move it to a module; {error}"
        ) from error
    finally:
        del own._inheriting  # noqa: SLF001 - as above
    init, init_args, make, writer_args, stores = functions
    for address, pickled in stores.items():
        register_store(address, pickled and ForkingPickler.loads(pickled))
    init(*init_args)
    return Writers(make, writer_args)


def _stores() -> dict[str, bytes | None]:
    """Return the registered stores, pickled. None stands for one that cannot be."""
    found: dict[str, bytes | None] = dict.fromkeys(registered_stores())
    for address, store in registered_stores().items():
        try:
            found[address] = bytes(ForkingPickler.dumps(store))
        except BaseException as error:
            # A panic of obstore is no Exception.
            if is_programs(error) or isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            logger.debug("the store of %s is left out: %s", address, error)
    return found


def _refuse_to_nest() -> None:
    if getattr(process.current_process(), "_inheriting", False):
        raise LocalProtocolError(
            "the checkpoint process has imported the main module, which makes a "
            "checkpointer at once: guard it by `if __name__ == '__main__':`"
        )


def _preparation(*, imports_main: bool) -> dict[str, Any]:
    """Return what ``multiprocessing.spawn.prepare`` needs there.

    Its own ``get_preparation_data`` needs a working directory, and chooses the start
    method for the whole program. Here, `Child` passes on the directory and the path of
    imports.
    """
    facts: dict[str, Any] = {"name": "aiockpt-checkpoint", "sys_argv": sys.argv}
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    path = getattr(main, "__file__", None)
    if not imports_main:
        return facts
    if name is not None:
        return {**facts, "init_main_from_name": name}
    if path is not None:
        path = os.path.join(process.ORIGINAL_DIR or os.sep, path)  # type: ignore[attr-defined]
        if os.path.isfile(path):  # and not `<stdin>`
            return {**facts, "init_main_from_path": os.path.normpath(path)}
    return facts
