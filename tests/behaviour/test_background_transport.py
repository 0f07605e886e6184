"""A transport for programs without an event loop: its verbs, iterators and ends."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

import aiockpt
from aiockpt.errors import ClosedError, LocalProtocolError, TransferTimeoutError
from aiockpt.testing import assert_same
from tests.support.commandline import ENVIRONMENT
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE, wait_until

Transport = aiockpt.BackgroundTransport[Any]
State = dict[str, Any]

LOCAL = aiockpt.Server(host="127.0.0.1")


def state(value: float = 1.0) -> State:
    """Return a small state dict."""
    return {"a": torch.full((1000,), value), "step": value}


@pytest.fixture
def sender() -> Iterator[Transport]:
    """Serve from a thread of its own."""
    with aiockpt.make_background_transport(server=LOCAL) as made:
        yield made


@pytest.fixture
def receiver() -> Iterator[Transport]:
    """Receive in a thread of its own."""
    with aiockpt.make_background_transport(server=LOCAL) as made:
        yield made


@contextmanager
def interrupt(when: Callable[[], object]) -> Iterator[None]:
    """Press Ctrl-C once something is true; expect it to end the block."""
    # A shell that starts the tests in the background has the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    presser = once(when, lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        presser.join()
        signal.signal(signal.SIGINT, before)


def waits(sender: Transport, count: int = 1) -> Callable[[], bool]:
    """Return what says whether so many requests wait for a step."""
    return lambda: sender.statistics().waiting == count


# ------------------------------------------------------------------------- the verbs

PROXIES: list[tuple[type, type, set[str], dict[str, Any]]] = [
    (aiockpt.BackgroundTransport, aiockpt.HTTPTransport, {"mount"}, {}),
    (
        aiockpt.BackgroundCheckpointer,
        aiockpt.AsyncCheckpointer,
        {"aclose", "ports"},
        {"strict": True},
    ),
]


def verbs(of: type) -> set[str]:
    """Return the names of the public verbs of a class."""
    return {name for name in dir(of) if not name.startswith("_")}


@pytest.mark.parametrize(("proxy", "original", "without", "others"), PROXIES)
def test_a_proxy_has_every_verb_with_its_signature(
    proxy: type, original: type, without: set[str], others: dict[str, Any]
) -> None:
    """A verb or an option that is added to the original is there, too."""
    assert verbs(proxy) == verbs(original) - without
    for name in verbs(proxy):
        here = inspect.signature(getattr(proxy, name))
        there = inspect.signature(getattr(original, name))
        expected = [
            each.replace(default=others.get(each.name, each.default))
            for each in there.parameters.values()
        ]
        assert [*here.parameters.values()] == expected, name
        assert inspect.getdoc(getattr(proxy, name))
        assert "Async" not in str(here.return_annotation), name


@pytest.mark.parametrize(
    ("proxy", "original"),
    [
        (aiockpt.make_background_transport, aiockpt.HTTPTransport),
        (aiockpt.make_background_checkpointer, aiockpt.make_async_checkpointer),
    ],
)
def test_a_factory_has_the_arguments_of_the_original(proxy: Any, original: Any) -> None:
    """`help` shows each option by its name."""
    here, there = inspect.signature(proxy), inspect.signature(original)
    assert here.parameters == there.parameters


def test_a_script_sends_and_receives(sender: Transport, receiver: Transport) -> None:
    """Every verb, in a program without a loop."""
    sender.send_checkpoint(step=1, state_dict=state(1))
    metadata = sender.metadata()
    assert metadata.startswith(sender.address())
    assert_same(receiver.recv_checkpoint(metadata=metadata, step=1), state(1))
    sender.allow_checkpoint(2)
    granted = sender.grant("rank-1", step=2)
    template = state(0)
    prepared = receiver.prepare(granted, 2, into=template)
    assert_same(template, state(0))
    assert prepared.apply() is template
    assert_same(template["a"], state(1)["a"])
    now = sender.statistics()
    assert (now.step, now.refused) == (2, 0)
    sender.disallow_checkpoint()
    with pytest.raises(TransferTimeoutError, match="timed out"):
        receiver.recv_checkpoint(0, metadata, 2, 0.05)


def test_a_callback_may_ask_its_transport(
    sender: Transport, receiver: Transport
) -> None:
    """It is called in the transport's thread, which cannot wait for itself."""
    sender.send_checkpoint(step=1, state_dict=state())
    asked: list[object] = []

    def ask(_: aiockpt.Progress) -> None:
        asked.append(receiver.statistics().step)
        with pytest.raises(LocalProtocolError, match="its own thread"):
            receiver.recv_checkpoint(metadata="http://127.0.0.1:9/")

    receiver.recv_checkpoint(metadata=sender.metadata(), progress=ask)
    assert asked
    assert not any(asked)


def test_no_traceback_shows_the_token(receiver: Transport) -> None:
    """No frame's local variables show it, which some reporters print."""
    metadata = f"http://127.0.0.1:{free_port()}/#open-sesame-open-sesame"
    calls: list[Callable[[], object]] = [
        lambda: receiver.recv_checkpoint(0, metadata, 1, 0.05),
        lambda: receiver.recv_checkpoint(metadata=metadata, nonsense=1),  # type: ignore[arg-type]
        lambda: receiver.prepare(metadata, nonsense=1),  # type: ignore[call-arg, arg-type]
        lambda: receiver.follow(metadata, nonsense=1),  # type: ignore[call-overload]
        lambda: receiver.follow(f"ftp:{metadata}"),
        lambda: next(receiver.follow(metadata, reconnect_timeout=0)),
    ]
    for call in calls:
        with pytest.raises((aiockpt.AiockptError, TypeError, ValueError)) as caught:
            call()
        trace = caught.value.__traceback__
        assert trace is not None
        assert trace.tb_next is not None
        ours = trace.tb_next.tb_next  # beyond the two frames of this test
        shown = traceback.TracebackException(
            type(caught.value), caught.value, ours, capture_locals=True
        )
        assert "open-sesame" not in "".join(shown.format())


def test_a_start_that_fails_leaves_no_thread(sender: Transport) -> None:
    """The error is that of the start, and the block does not begin."""
    port = urlsplit(sender.address()).port or 0
    taken = aiockpt.Server(host="127.0.0.1", port=port)
    with (
        pytest.raises(OSError, match=str(port)),
        aiockpt.make_background_transport(server=taken),
    ):
        pytest.fail("it was taken")


# --------------------------------------------------------------------- the iterators


def others_than_pools() -> set[threading.Thread]:
    """Return the threads, without those of the transports' pools, whose size is set."""
    found = threading.enumerate()
    return {each for each in found if not each.name.startswith("aiockpt_")}


def is_gone(held: weakref.ref[Any]) -> bool:
    """Return whether nothing refers to an object any more."""
    gc.collect()
    return held() is None


def fail_in(steps: Iterator[object]) -> None:
    """Leave a loop by an exception."""
    for _ in steps:
        raise ZeroDivisionError


def once(when: Callable[[], object], then: Callable[[], object]) -> threading.Thread:
    """Do something in another thread once something is true."""

    def run() -> None:
        wait_until(when, "the call")
        then()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


class TestIterators:
    """``follow`` and ``steps``, in an ordinary loop."""

    def test_each_step_is_given_once(
        self, sender: Transport, receiver: Transport
    ) -> None:
        """Each step comes once until the block is left."""
        template, found = state(0), list[int]()
        sender.send_checkpoint(step=1, state_dict=state(1))
        for step, got in receiver.follow(sender.metadata(), into=template):
            assert_same(got["a"], state(step)["a"])
            found.append(step)
            if step == 3:
                break
            sender.send_checkpoint(step=step + 1, state_dict=state(step + 1))
        assert found == [1, 2, 3]
        later = receiver.steps(sender.metadata(), after=2)
        assert next(later) == 3

    def test_a_prepared_step_is_applied_by_its_caller(
        self, sender: Transport, receiver: Transport
    ) -> None:
        """The thread that uses the template applies it, also after the loop's end."""
        template = state(0)
        sender.send_checkpoint(step=1, state_dict=state(1))
        metadata = sender.metadata()
        kept: list[aiockpt.Prepared[Any]] = []
        for prepared in receiver.follow(metadata, into=template, prepare=True):
            kept.append(prepared)
            break
        gc.collect()
        assert_same(template, state(0))
        kept[0].apply()
        assert_same(template["a"], state(1)["a"])

    @pytest.mark.parametrize("how", ["break", "exception", "dropped", "closed"])
    def test_it_may_be_left(
        self, sender: Transport, receiver: Transport, how: str
    ) -> None:
        """A loop that is left runs nothing and holds no memory."""
        sender.send_checkpoint(step=1, state_dict=state(1))
        threads = others_than_pools()
        for _ in range(3):
            template = state(0)
            held = weakref.ref(template["a"])
            steps = receiver.follow(sender.metadata(), into=template, prepare=True)
            del template
            if how == "break":
                for prepared in steps:
                    del prepared
                    break
            elif how == "exception":
                with pytest.raises(ZeroDivisionError):
                    fail_in(steps)
            else:
                next(steps)
            if how == "closed":
                steps.close()
                steps.close()
                assert list(steps) == []
            del steps
            wait_until(lambda: is_gone(held), "the end of the template")  # noqa: B023
        wait_until(waits(sender, 0), "the end of the requests")
        assert others_than_pools() == threads

    def test_another_thread_may_close_it(
        self, sender: Transport, receiver: Transport
    ) -> None:
        """The loop that waits for a step ends as any loop."""
        steps = receiver.steps(sender.metadata())
        closer = once(waits(sender), steps.close)
        assert list(steps) == []
        closer.join()
        wait_until(waits(sender, 0), "the end of the request")

    def test_two_threads_need_two(self, sender: Transport, receiver: Transport) -> None:
        """The second one is told so; the first one waits on."""
        steps = receiver.follow(sender.metadata())
        found: list[int] = []
        first = threading.Thread(target=lambda: found.append(next(steps)[0]))
        first.start()
        wait_until(waits(sender), "the call")
        with pytest.raises(LocalProtocolError, match=r"call follow\(\) for each"):
            next(steps)
        sender.send_checkpoint(step=5, state_dict=state())
        first.join(PATIENCE)
        assert found == [5]

    def test_it_ends_with_its_transport(
        self, sender: Transport, receiver: Transport
    ) -> None:
        """The iterator ends whether it waits at this moment or is asked later."""
        steps = receiver.follow(sender.metadata())
        closer = once(waits(sender), receiver.shutdown)
        with pytest.raises(ClosedError):
            next(steps)
        closer.join()
        with pytest.raises(ClosedError):
            next(receiver.steps(sender.metadata()))
        steps.close()


# ----------------------------------------------------------------------- interruption


class TestCtrlC:
    """It ends the call in the main thread, and everything that the call has begun."""

    def test_in_a_receive(self, sender: Transport, receiver: Transport) -> None:
        """The template is unchanged, and the transport works on."""
        template = state(0)
        with interrupt(waits(sender)):
            receiver.recv_checkpoint(metadata=sender.metadata(), step=1, into=template)
        wait_until(waits(sender, 0), "the end of the request")
        assert_same(template, state(0))
        sender.send_checkpoint(step=1, state_dict=state(1))
        assert_same(receiver.recv_checkpoint(metadata=sender.metadata()), state(1))

    def test_in_a_follow(self, sender: Transport, receiver: Transport) -> None:
        """The iterator is at its end, and another one goes on."""
        steps = receiver.follow(sender.metadata(), into=state(0))
        with interrupt(waits(sender)):
            next(steps)
        wait_until(waits(sender, 0), "the end of the request")
        sender.send_checkpoint(step=1, state_dict=state(1))
        assert list(steps) == []
        assert next(receiver.follow(sender.metadata()))[0] == 1

    def test_in_steps(self, sender: Transport, receiver: Transport) -> None:
        """No step is lost, and the same iterator goes on."""
        steps = receiver.steps(sender.metadata())
        with interrupt(waits(sender)):
            next(steps)
        sender.send_checkpoint(step=1, state_dict=state(1))
        assert next(steps) == 1

    def test_in_the_block(self) -> None:
        """The transport is shut down; receivers get no grace."""
        made = aiockpt.make_background_transport(server=LOCAL)
        with interrupt(lambda: made.statistics().step == 1), made:
            made.send_checkpoint(step=1, state_dict=state())
            threading.Event().wait(PATIENCE)
        with pytest.raises(ClosedError):
            made.metadata()
        made.shutdown()


# --------------------------------------------------------------- other processes, ends


def test_a_forked_child_is_told_to_make_its_own(
    sender: Transport, receiver: Transport
) -> None:
    """It never waits for a thread that it does not have; the parent goes on."""
    sender.send_checkpoint(step=1, state_dict=state())
    steps = receiver.follow(sender.metadata())
    calls = [
        lambda: receiver.recv_checkpoint(metadata="http://127.0.0.1:9/", step=1),
        lambda: next(steps),
        receiver.statistics,
        receiver.shutdown,
    ]
    child = os.fork()
    if not child:
        status = 0
        for call in calls:
            try:
                call()
                status = 1
            except LocalProtocolError as error:
                status = status or "forked" not in str(error)
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert next(steps)[0] == 1


def test_it_does_not_travel_to_another_process(sender: Transport) -> None:
    """Pickling fails with a message, as for a trainer that starts its ranks."""
    with pytest.raises(TypeError, match="BackgroundTransport belongs to"):
        pickle.dumps(sender)


ENDS = """
import os, signal, sys, threading
import torch, aiockpt
made = aiockpt.make_background_transport(server=aiockpt.Server(host="127.0.0.1"))
made.send_checkpoint(step=1, state_dict=dict(a=torch.ones(3)))
other = aiockpt.make_background_transport(server=aiockpt.Server(host="127.0.0.1"))
steps = other.follow(made.metadata())
assert next(steps)[0] == 1
"""
WAYS = {
    "the end": ("", 0, ""),
    "an error": ("1 / 0", 1, "ZeroDivisionError"),
    "an exit within a block": ("with made: sys.exit(3)", 3, ""),
    "a thread that waits": (
        (
            "def wait():\n"
            "    try: next(steps)\n"
            "    except aiockpt.errors.ClosedError: pass\n"
            "threading.Thread(target=wait, daemon=True).start()"
        ),
        0,
        "",
    ),
    "Ctrl-C": (
        (
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
            "next(steps)"
        ),
        -signal.SIGINT,
        "KeyboardInterrupt",
    ),
    "an exit of a forked child within a block": (
        (
            "with other:\n"
            "    child = os.fork()\n"
            "    if not child: sys.exit(7)\n"
            "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
        ),
        7,
        "",
    ),
    "a shutdown after the exit has ended everything": (
        (
            "class Trainer:\n"
            "    def __del__(self): self.sender.shutdown()\n"
            "trainer = Trainer()\n"
            "trainer.sender = made"
        ),
        0,
        "",
    ),
    "nobody closes what nobody has any more": (
        "import warnings; warnings.simplefilter('always'); del made",
        0,
        "ResourceWarning",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_program_ends(way: str) -> None:
    """The program ends at once, with its own status and no output of ours."""
    more, status, said = WAYS[way]
    done = subprocess.run(
        [sys.executable, "-c", ENDS + more],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 2,
        check=False,
    )
    last = done.stderr.strip().rpartition("\n")[2]
    assert (done.returncode, last.partition(":")[0]) == (status, said), done.stderr
