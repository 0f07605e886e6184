"""Starts Python processes as forks of one that has imported torch already.

A fresh interpreter needs two seconds of CPU to import torch and this package. After
:func:`install`, ``subprocess.Popen`` and everything built on it, and ``spawn`` of
multiprocessing, hand a plain ``python script.py``, ``python -m module`` or ``python -c
code``, also with ``-W``, to a fork server: a child of this process that has done only
imports. The server forks twice, so the new process becomes a child of this one. It has
the descriptors, the environment, the directory, the process group and the ``__main__``
that a fresh interpreter would have, and is waited for, stopped and killed as usual.

A test whose processes must be fresh interpreters, for example because it asks what they
import, uses the fixture ``fresh_interpreters``.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import fcntl
import importlib
import inspect
import json
import multiprocessing.process
import multiprocessing.shared_memory
import multiprocessing.util
import os
import random
import resource
import runpy
import socket
import struct
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = [
    "ADOPTED",
    "FRESH",
    "NAME",
    "SHARED",
    "children_of",
    "install",
    "name_shared_memory",
]

FRESH = "AIOCKPT_TEST_FRESH"
"""The name of a variable. A process that has it forks none; see `tests/conftest.py`."""

SHARED = "TEST_SHARED_NAMES"
"""The name of a variable: how the names of a run's shared memory begin."""

PRELOADED = (
    "pytest",
    "torch",
    "torch._dynamo",  # the first optimizer imports it
    "torch.distributed",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "safetensors.torch",
    "torchft",
    "aiohttp.web",
    "aiockpt",
    "aiockpt.checkpointers.factories",
    "aiockpt.checkpointers.worker",
    *(
        f"aiockpt.cli.{name}"
        for name in ("fetch", "serve", "convert", "inspect", "verify", "ls")
    ),
    "aiockpt.local._server_main",
    "aiockpt.pg.transport",
    "aiockpt.testing",
)
NAME = "fork server"
"""What the kernel calls a fork server."""

_PLAIN: dict[str, Any] = {
    **dict.fromkeys(("cwd", "env", "gid", "gids", "preexec_fn", "uid", "umask")),
    **dict.fromkeys(("shell", "start_new_session"), False),
    "close_fds": True,
}
"""How multiprocessing starts a process, in the words of ``subprocess``."""

ADOPTED: set[int] = set()
"""Children that another process of the tests left while this one made a new one."""

_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_HIGH = 512  # descriptors that arrive wait above this number for their own


# ------------------------------------------------------------- in the starting process


def install(server: socket.socket | None = None) -> None:
    """Have ``subprocess.Popen`` fork what it can from here on. Idempotent.

    Args:
        server: The connection to a fork server; None: one is started.
    """
    original = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    if original.__module__ != subprocess.__name__:
        return  # a process that was forked has a server already
    parameters = inspect.signature(original)
    client = _Client(server)

    def execute(popen: Any, *args: Any, **options: Any) -> None:
        given = parameters.bind(popen, *args, **options).arguments
        request = _request(given)
        if request is None or not client.like_this():
            original(popen, *args, **options)
            return
        given_fds = [
            max(given["p2cread"], 0),
            1 if given["c2pwrite"] < 0 else given["c2pwrite"],
            2 if given["errwrite"] < 0 else given["errwrite"],
            *request["pass_fds"],
        ]
        popen.pid = client.fork(request, given_fds)
        popen._child_created = True
        null = getattr(popen, "_devnull", None)
        pairs = (
            ("p2cread", "p2cwrite"),
            ("c2pwrite", "c2pread"),
            ("errwrite", "errread"),
        )
        for ours, other in pairs:
            if given[ours] >= 0 and given[other] >= 0 and given[ours] != null:
                os.close(given[ours])
        if null is not None:
            os.close(null)
        popen._closed_child_pipe_fds = True

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]
    spawn_fresh = multiprocessing.util.spawnv_passfds

    def spawn(path: Any, args: Any, passfds: Any) -> int:
        given = {**_PLAIN, "args": args, "executable": path, "pass_fds": passfds}
        ours = args[-1] == "--multiprocessing-fork"  # a resource tracker has another
        request = _request(given) if ours else None
        if request is None or not client.like_this():
            return int(spawn_fresh(path, args, passfds))
        return client.fork(request, [0, 1, 2, *request["pass_fds"]])

    multiprocessing.util.spawnv_passfds = spawn


def name_shared_memory() -> None:
    """Have what Python shares by name here begin as the variable ``SHARED`` says.

    So a leak is told from what other programs, and other processes of the suite, share.
    """
    prefix = f"/{os.environ.get(SHARED, 'other')}"
    config = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    config["semprefix"] = prefix  # processes that multiprocessing starts inherit it
    multiprocessing.shared_memory._SHM_NAME_PREFIX = prefix  # type: ignore[attr-defined]


def children_of(pid: int) -> set[int]:
    """Return the child processes of one, without its fork server."""
    found: set[int] = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as listing:
            found.update(map(int, listing.read().split()))
    return {pid for pid in found if _name_of(pid) != NAME}


def _name_of(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/comm") as file:  # it may have ended
        return file.read().strip()
    return ""


def _request(given: dict[str, Any]) -> dict[str, Any] | None:
    """Return what the server has to know; None if only a fresh interpreter will do."""
    argv = [os.fsdecode(each) for each in _as_list(given["args"])]
    env = dict(os.environ if given["env"] is None else given["env"])
    env = {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}
    program = given["executable"]
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    rest = argv[1:]
    worker = rest[:1] == ["-u"]  # so xdist starts its workers
    rest = rest[worker:]
    if rest[: len(flags)] == flags:
        rest = rest[len(flags) :]
    warnoptions = []
    while rest[:1] == ["-W"]:
        _, filtered, *rest = rest
        warnoptions.append(filtered)
    if (
        given["shell"]
        or given["preexec_fn"] is not None
        or not given["close_fds"]
        or any(
            given[name] not in (None, -1) for name in ("gid", "gids", "uid", "umask")
        )
        or not argv
        or argv[0] != sys.executable
        or (program is not None and os.fsdecode(program) != sys.executable)
        or not rest
        or (rest[0].startswith("-") and rest[0] not in ("-m", "-c"))
        or (rest[0] in ("-m", "-c") and len(rest) < 2)
        or _differs(env)
    ):
        return None
    cwd = given["cwd"]
    if cwd is not None and not os.path.isdir(cwd):
        return None  # Popen raises
    group = given.get("process_group", -1)
    return {
        "argv": rest,
        "worker": worker,
        "warnoptions": warnoptions,
        "env": env,
        "cwd": os.getcwd() if cwd is None else os.path.abspath(os.fsdecode(cwd)),
        "session": bool(given["start_new_session"]),
        "group": -1 if group is None else group,
        "pass_fds": sorted(given["pass_fds"]),
    }


def _as_list(args: Any) -> list[Any]:
    return [args] if isinstance(args, str | bytes | os.PathLike) else list(args)


def _differs(env: dict[str, str]) -> bool:
    """Return whether this environment makes an interpreter unlike the server."""
    if FRESH in env or FRESH in os.environ:
        return True
    known = {os.path.realpath(path) for path in [*sys.path, *_own_paths()]}
    paths = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    others = {os.path.realpath(path) for path in paths} - known
    imported = {name.partition(".")[0] for name in PRELOADED}
    if any(imported.intersection(_names_in(path)) for path in others):
        return True  # the program means another package of this name
    return any(
        env.get(name) != os.environ.get(name)
        for name in {*env, *os.environ}
        if name.startswith(("PYTHON", "LD_", "OMP_", "MALLOC_"))
        and name not in ("PYTHONPATH", "PYTHONSAFEPATH")  # see _search_path
    )


def _names_in(path: str) -> list[str]:
    with suppress(OSError):  # a path may not exist
        return [name.partition(".")[0] for name in os.listdir(path)]
    return []


def _own_paths() -> list[str]:
    here = Path(__file__).parent
    return [str(here), str(here.parent), str(here.parents[1])]


class _Client:
    """The connection of one process to its fork server."""

    def __init__(self, server: socket.socket | None) -> None:
        self._server = server or _start_server()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._kind = _kind_of_process()

    def like_this(self) -> bool:
        """Return whether a fork has the limits and namespaces of this process."""
        return self._kind == _kind_of_process()

    def fork(self, request: dict[str, Any], fds: list[int]) -> int:
        """Return the id of the new child of this process."""
        with self._lock:
            if self._pid != os.getpid():
                self._server, self._pid = _start_server(), os.getpid()
            before = children_of(os.getpid())
            adopt(True)
            try:
                _send(self._server, json.dumps(request).encode(), fds)
                answer, _ = _receive(self._server)
            finally:
                adopt(False)
            pid = int(answer)
            ADOPTED.update(children_of(os.getpid()) - before - {pid})
        return pid


def _kind_of_process() -> list[object]:
    limits = (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_FSIZE)
    return [
        *(os.readlink(f"/proc/self/ns/{name}") for name in ("net", "mnt", "time")),
        *map(resource.getrlimit, limits),
        os.getpriority(os.PRIO_PROCESS, 0),
        os.geteuid(),
        os.sched_getaffinity(0),
    ]


def adopt(orphans: bool) -> None:
    """Make this process the parent of its descendants' orphans, or stop that."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0)


def _start_server() -> socket.socket:
    ours, theirs = socket.socketpair()
    env = {
        **os.environ,
        FRESH: "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with theirs:
        server = subprocess.Popen(  # it ends when `ours` is closed
            [sys.executable, __file__, str(theirs.fileno())],
            env=env,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,
        )
        _receive(ours)  # it is ready
    atexit.register(_end, server, ours)
    return ours


def _end(server: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    server.wait()


def _send(to: socket.socket, data: bytes, fds: list[int]) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    to.sendmsg([struct.pack("<I", len(data))], ancillary if fds else [])
    to.sendall(data)


def _receive(source: socket.socket) -> tuple[bytes, list[int]]:
    head, fds, _, _ = socket.recv_fds(source, 4, 250)
    if not head:
        raise EOFError
    (size,) = struct.unpack("<I", head)
    data = b""
    while len(data) < size:
        more = source.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data, list(fds)


# ------------------------------------------------------------------- in the fork server


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; return it in the new process, and None at the end."""
    while True:
        try:
            data, fds = _receive(connection)
        except (EOFError, OSError):
            return None
        request = json.loads(data)
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            child = os.fork()
            if child:
                os.write(write, str(child).encode())
                os._exit(0)
            while os.getppid() == parent:  # until it was adopted
                time.sleep(0.0002)
            connection.detach()  # its number may become another one's
            _become(request, fds)
            return request
        os.waitpid(between, 0)
        os.close(write)
        pid = os.read(read, 32)
        os.close(read)
        for fd in fds:
            os.close(fd)
        _send(connection, pid, [])


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Give this process all that the request says."""
    waiting = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH) for fd in fds]
    os.closerange(3, _HIGH)
    targets = [0, 1, 2, *request["pass_fds"]]
    # A number that is asked for may be one that waits: those come last.
    for fd, number in sorted(
        zip(waiting, targets, strict=True), key=lambda pair: pair[1]
    ):
        os.dup2(fd, number)
        os.close(fd)
    if request["session"]:
        os.setsid()
    elif request["group"] >= 0:
        os.setpgid(0, request["group"])
    os.environ.clear()
    os.environ.update(request["env"])
    name_shared_memory()
    # A fork of Python 3.11 takes its main thread for that of its parent.
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    time.tzset()
    os.chdir(request["cwd"])
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"python", 0, 0, 0)
    random.seed()


def _nest() -> None:
    """Give this process a fork server of its own, as clean as it is now."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        ctypes.CDLL(None).prctl(_PR_SET_NAME, NAME.encode(), 0, 0, 0)
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        os.close(null)
        request = serve(theirs)
        if request is None:
            os._exit(0)
        run(request)
        sys.exit()
    theirs.close()
    install(ours)


def run(request: dict[str, Any]) -> None:
    """Run the program as the interpreter would."""
    kind, *rest = request["argv"]
    sys.warnoptions += request["warnoptions"]
    warnings._processoptions(request["warnoptions"])  # type: ignore[attr-defined]
    if kind != "-c" or request["worker"]:  # those of the package start none
        _nest()
    sys.path[:] = _search_path(kind, request["env"])
    sys.orig_argv = [sys.executable, *request["argv"]]
    if kind == "-m":
        sys.argv = rest
        _new_main()
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), _new_main().__dict__)
    else:
        sys.argv = [kind, *rest]
        main = _new_main()
        main.__file__ = kind
        exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)


def _keep_until_the_end() -> set[str]:
    """Have no process take these modules apart at its end; the caller names them.

    That would need 0.1 s of CPU. It must be called before they are imported, so that
    their own exit handlers come first. What the program itself has made ends as in any
    interpreter.
    """
    names: set[str] = set()

    def keep() -> None:
        kept = [sys.modules.pop(name) for name in names & sys.modules.keys()]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    atexit.register(keep)
    return names


def _leave_out_destructors() -> None:
    """Have no process call the destructors of torch's libraries: they need 0.2 s."""
    for each in weakref.finalize._registry:  # type: ignore[attr-defined]
        each.atexit = False
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # the last handler that is added is called first


def _search_path(kind: str, env: dict[str, str]) -> list[str]:
    first = {"-m": os.getcwd(), "-c": ""}.get(kind, os.path.dirname(kind))
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    safe = env.get("PYTHONSAFEPATH")
    return list(dict.fromkeys([*([] if safe else [first]), *paths, *_SYSTEM_PATH]))


def _new_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    return main


if __name__ == "__main__":
    _SYSTEM_PATH = [
        path
        for path in sys.path
        if os.path.realpath(path) not in {os.path.realpath(p) for p in _own_paths()}
    ]
    before = set(sys.modules)
    kept = _keep_until_the_end()
    for name in PRELOADED:
        with suppress(ImportError):  # a test then says what is missing
            importlib.import_module(name)
    kept |= sys.modules.keys() - before
    _leave_out_destructors()
    import gc

    gc.collect()
    gc.freeze()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, NAME.encode(), 0, 0, 0)
    connection = socket.socket(fileno=int(sys.argv[1]))
    _send(connection, b"ready", [])
    request = serve(connection)
    if request is not None:
        run(request)
