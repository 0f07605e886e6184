"""What holds for every test: its event loop, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests share the cores

import hypothesis
import pytest
import pytest_asyncio
from blockbuster import BlockBuster

import aiockpt

HERE = Path(__file__).parent
ROOT = str(HERE.parent)
# The repository has what the tests share, and the benchmarks. It comes after the
# package, so that this process and those that tests start import the installed wheel.
sys.path.append(ROOT)
PACKAGE = str(Path(aiockpt.__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join([PACKAGE, ROOT])

from tests.support import forkserver  # noqa: E402 - it is found from here on
from tests.support.leakcheck import (  # noqa: E402
    KINDS,
    PATIENCE,
    ErrorLog,
    Footprint,
    allowed_leaks,
)
from tests.support.matrix import EXHAUSTIVE  # noqa: E402
from tests.support.objectstore import WEED  # noqa: E402
from tests.support.proofs import faults_of  # noqa: E402
from tests.support.shortages import FaultUnavailableError  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping

    from tests.support.saving import Gate

HAS_TORCH = find_spec("torch") is not None
HAS_TORCHFT = HAS_TORCH and find_spec("torchft") is not None
HAS_VLLM = HAS_TORCH and find_spec("vllm") is not None
HAS_TRAINERS = HAS_TORCH and find_spec("lightning") is not None
HAS_STORE = HAS_TORCH and find_spec("obstore") is not None and WEED.exists()
HAS_UVLOOP = find_spec("uvloop") is not None

TORCH_FREE = (
    "wire/test_h",
    "wire/test_re",
    "properties/test_tree.py",
    "properties/test_chunks.py",
    "behaviour/test_errors.py",
    "behaviour/test_exports.py",
    "primitives/test_rwlock.py",
    "primitives/test_bridge",
)
"""Modules whose tests need no torch; other modules say so by a ``torch_free`` mark."""

LOGS_ERRORS = {
    "test_a_progress_that_raises_disturbs_nothing",
    "test_a_save_that_cannot_be_written",
    "test_a_leaf_that_cannot_be_saved",
    "test_statistics_count_saves",
}
"""Tests of the public suites, which know no markers of ours."""

# A shared machine is slow now and then; a slow example is no failure. To explain a
# failure, Hypothesis traces every line on Python 3.11, which is slow. A property gets a
# few examples here, and many in `nox -s thorough`.
hypothesis.settings.register_profile(
    "aiockpt",
    max_examples=25,
    deadline=None,
    phases=[
        phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain
    ],
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("aiockpt")
hypothesis.settings.register_profile("thorough", max_examples=500)


def pytest_report_header() -> list[str]:
    """Say which package is tested, and how much of it."""
    lines = [f"aiockpt: {Path(aiockpt.__file__).parent}"]
    if not HAS_TORCH:
        lines.append("torch is not installed: only the torch-free modules are tested")
    elif not HAS_TORCHFT:
        lines.append("torchft is not installed: tests/torchft runs in `nox -s torchft`")
    if not HAS_VLLM:
        lines.append("vLLM is not installed: tests/vllm runs in `nox -s vllm`")
    if not HAS_TRAINERS:
        lines.append("Lightning is not installed: see `nox -s integrations`")
    if not HAS_STORE:
        lines.append("SeaweedFS is not installed: see `nox -s objects`")
    return lines


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test the source tree where the wheel was asked for."""
    # A shell starts what runs in its background deaf to interrupts, and the processes
    # that tests start would be deaf, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ[forkserver.SHARED] = f"t{os.getpid()}_"  # Python allows nine letters
    forkserver.name_shared_memory()
    if (
        os.environ.get("AIOCKPT_TEST_INSTALLED")
        and HERE.parent in Path(aiockpt.__file__).parents[:2]
    ):
        raise pytest.UsageError(f"testing {aiockpt.__file__}, not the installed wheel")
    if HAS_TORCH and config.getoption("numprocesses", None):
        forkserver.install()  # the workers of xdist are forks of one server, too


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what cannot be imported without torch, torchft or another package."""
    absent = {
        "integrations": not HAS_TRAINERS,
        "objects": not HAS_STORE,
        "torchft": not HAS_TORCHFT,
        "vllm": not HAS_VLLM,
    }
    if collection_path.parent == HERE and absent.get(collection_path.name):
        return True
    if HAS_TORCH or not collection_path.name.startswith("test_"):
        return None
    inside = collection_path.relative_to(HERE).as_posix()
    if inside.startswith(TORCH_FREE) or "torch_free" in collection_path.read_text():
        return None
    return True


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave the cases marked ``nightly`` to `nox -s thorough` and `nox -s faults`."""
    if EXHAUSTIVE or "nightly" in config.option.markexpr:
        return
    late = [item for item in items if item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=late)
    items[:] = [item for item in items if not item.get_closest_marker("nightly")]


def pytest_collection_finish() -> None:
    """Make what stays for good now, and keep it out of the collections later."""
    if HAS_TORCH:
        forkserver.install()
    for factory in loops().values():
        factory().close()  # libuv keeps the signal pipe of its first loop
    keep_out_of_collections()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Do the same for what the tests of a module have imported: it is a lot."""
    if nextitem is not None and nextitem.path != item.path:
        keep_out_of_collections()


def keep_out_of_collections() -> None:
    """Have every later ``gc.collect()``, of which each test makes one, pass by it."""
    gc.collect()
    gc.freeze()


def loops() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return what makes asyncio's loop, and uvloop's."""
    factories = {"asyncio": asyncio.new_event_loop}
    if HAS_UVLOOP:
        import uvloop

        factories["uvloop"] = uvloop.new_event_loop
    return factories


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run an async test on asyncio's loop; with ``every_loop`` on uvloop's, too.

    The whole matrix of faults runs on both.
    """
    found = loops()
    mark = item.get_closest_marker("asyncio")
    chosen = mark is not None and "loop_factories" in mark.kwargs
    whole = EXHAUSTIVE and bool(faults_of(item))
    if chosen or whole or item.get_closest_marker("every_loop") is not None:
        return found
    return {"asyncio": found["asyncio"]}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Put the check for tasks around every async test and all its fixtures."""
    if not pytest_asyncio.is_async_test(item):
        return
    names = item.fixturenames
    if "no_task_left" not in names:  # the list is shared by the cases of one function
        # Inside of what outlives the loop, outside of what the test asked for.
        names.insert(names.index("error_log") + 1, "no_task_left")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Skip a test for whose fault this machine has no tool, or no permission."""
    try:
        return (yield)
    except FaultUnavailableError as error:
        pytest.skip(str(error))


@pytest_asyncio.fixture
async def no_task_left(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Fail an async test that leaves a task on its loop."""
    before = asyncio.all_tasks()
    yield
    for _ in range(50):  # what was cancelled or closed ends within a few rounds
        if not (left := asyncio.all_tasks() - before - {asyncio.current_task()}):
            return
        await asyncio.sleep(0)
    if "tasks" not in allowed_leaks(request.node):
        pytest.fail(f"tasks left: {sorted(map(repr, left))}", pytrace=False)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, descriptor, shared memory or child behind."""
    before = Footprint(set(KINDS) - allowed_leaks(request.node))
    yield
    if grown := before.grown():
        pytest.fail(f"left behind: {grown}", pytrace=False)


@pytest.fixture(autouse=True)
def error_log(request: pytest.FixtureRequest, nothing_left: None) -> Iterator[ErrorLog]:
    """Fail a test in which an ERROR was logged unexpectedly."""
    log = ErrorLog()
    log.allowed = (
        request.node.get_closest_marker("allow_error_logs") is not None
        or getattr(request.node, "originalname", None) in LOGS_ERRORS
    )
    logging.getLogger().addHandler(log)
    yield log
    gc.collect()  # an exception that no task's owner took is logged when it goes
    logging.getLogger().removeHandler(log)
    if log.records and not log.allowed:
        pytest.fail(f"logged: {log.messages()}", pytrace=False)


@pytest.fixture
def allow_error_logs(error_log: ErrorLog) -> list[logging.LogRecord]:
    """Let the test log errors; return the list in which they arrive."""
    error_log.allowed = True
    return error_log.records


@pytest.fixture
def events() -> Iterator[list[aiockpt.TransferEvent]]:
    """Return what hooks hear, as it comes."""
    found: list[aiockpt.TransferEvent] = []
    remove = aiockpt.add_hook(found.append)
    yield found
    remove()


@pytest.fixture
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no variable of the machine say which token or which interface is used."""
    for name in ("AIOCKPT_TOKEN", "AIOCKPT_TOKEN_PATH", "AIOCKPT_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fresh_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the processes of this test as fresh interpreters, not as forks."""
    monkeypatch.setenv(forkserver.FRESH, "1")


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Return a gate at which a writer waits, in whatever process it is."""
    from tests.support.saving import Gate

    made = Gate(tmp_path / "gate")
    yield made
    made.close()


@pytest.fixture
def no_blocking() -> Iterator[BlockBuster]:
    """Raise ``BlockingError`` where the package blocks an event loop.

    Only calls that the package makes, directly or through a library, count: a test may
    read a file. Modules that test the transports use it for every test.
    """
    guard = BlockBuster("aiockpt")
    # The first torch operation of a kind imports modules, which reads files.
    for function in guard.functions.values():
        function.can_block_in("<frozen importlib._bootstrap>", "_find_and_load")
    # `Prepared.apply` blocks its caller until the bytes are copied.
    guard.functions["threading.Lock.acquire"].can_block_in("bridge.py", "share_out")
    # `fingerprint` blocks its caller, and finds the libraries of its threads.
    read = guard.functions["io.TextIOWrapper.read"]
    read.can_block_in("multilinear.py", "_openmp")
    guard.activate()
    yield guard
    guard.deactivate()


@pytest.fixture
def only_waits_left() -> Iterator[None]:
    """Check the threads that a test may leave behind: those that wait for gloo.

    Nothing ends a wait for gloo but its deadline. The thread that waits is a daemon,
    and its name says what it does.
    """
    before = set(threading.enumerate())
    yield
    until = time.monotonic() + PATIENCE
    while others := [
        each
        for each in set(threading.enumerate()) - before
        if not (each.daemon and "-apart" in each.name)
    ]:
        assert time.monotonic() < until, f"left behind: {others}"
        time.sleep(0.01)
