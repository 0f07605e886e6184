"""A guard over what Python executes: it fails what a receiver must never do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Self

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


def main(mark: str) -> None:
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


if __name__ == "__main__":
    main(sys.argv[1])
