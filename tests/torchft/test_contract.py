"""What torchft's Manager needs of a transport, point by point.

The numbers are those of the table in ``docs/howto/torchft.md``.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from fractions import Fraction
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import torchft.checkpointing
from torchft.checkpointing.transport_test import TIMEOUT_REGEX

import aiockpt
from aiockpt.errors import (
    AiockptError,
    AuthenticationError,
    ClosedError,
    LocalProtocolError,
    PeerFailedError,
    PeerUnreachableError,
    StepNotFoundError,
    TransferTimeoutError,
    UnsupportedLeafError,
)
from aiockpt.memory.device import Event
from aiockpt.runtime.sync_facade import SyncFacade
from aiockpt.state.flatten import ready_for_threads
from aiockpt.testing import Fault, FaultProxy, Refuse, StallAfter, assert_same
from aiockpt.torchft import HTTPTransport, PGTransport, adapt
from aiockpt.torchft.http import HTTPOptions
from tests.support.accelerators import FakeAccelerator
from tests.support.commandline import until
from tests.support.proofs import proves
from tests.support.torchft_job import stuck_reader

Transport = HTTPTransport[Any]
Pair = tuple[Transport, Transport]
Make = Callable[..., Transport]

LIMIT = timedelta(seconds=10)


def state(value: float = 1.0, size: int = 1000) -> dict[str, Any]:
    """Return what a manager sends."""
    model = {"weight": torch.full((size,), value), "bias": torch.zeros(3)}
    counts = {"step": 3, "batches_committed": 6}
    return {"user": {"default": {"model": model, "lr": 0.1}}, "torchft": counts}


def send(source: Transport, step: int, content: object, ranks: int = 1) -> None:
    """Send as the manager does."""
    source.send_checkpoint(
        dst_ranks=[*range(1, ranks + 1)], step=step, state_dict=content, timeout=LIMIT
    )


def receive(heir: Any, metadata: str, step: int, timeout: float = 10) -> Any:
    """Receive as the manager does."""
    limit = timedelta(seconds=timeout)
    return heir.recv_checkpoint(src_rank=0, metadata=metadata, step=step, timeout=limit)


@contextmanager
def beside(call: Callable[..., Any], *args: Any) -> Iterator[Any]:
    """Make a call in another thread; give what waits for its result."""
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(call, *args)
        yield lambda: work.result(30)


def watch(monkeypatch: pytest.MonkeyPatch, device: FakeAccelerator) -> None:
    """Let the adapter find this device in use."""
    ready = partial(ready_for_threads, ports=device.port_for)
    monkeypatch.setattr("aiockpt.torchft.adapter.ready_for_threads", ready)


def waiting(source: Transport) -> int:
    """Count the requests that wait for a step."""
    served = source.statistics()
    return served.waiting


class TestPoint1Subclass:
    """It is torchft's interface, generic, with torchft's constructor."""

    @pytest.mark.parametrize("kind", [HTTPTransport, PGTransport])
    def test_it_is_a_torchft_transport(self, kind: type) -> None:
        """`isinstance` says so, and ``HTTPTransport[...](...)`` works."""
        assert issubclass(kind, torchft.checkpointing.CheckpointTransport)
        assert kind[dict[str, int]]  # type: ignore[index]

    def test_torchft_s_arguments(self) -> None:
        """The manager makes its default transport so."""
        made = HTTPTransport[dict[str, int]](timeout=LIMIT, num_chunks=0)
        made.shutdown()

    def test_options_are_those_of_the_awaited_transport(self) -> None:
        """All but the session, which belongs to a loop of somebody else's."""
        code = aiockpt.HTTPTransport.__init__
        names = set(code.__kwdefaults__ or {})
        assert set(HTTPOptions.__annotations__) == names - {"session"}

    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            ("num_chunk", "did you mean 'num_chunks'?"),
            ("zerocopy", "did you mean 'zero_copy'?"),
            ("port", "say HTTPTransport(server=Server(port=...))"),
        ],
    )
    def test_the_nearest_option_is_named(self, name: str, hint: str) -> None:
        """The error names the nearest one of torchft's and of our options."""
        wrong: dict[str, Any] = {name: 1}
        with pytest.raises(TypeError, match=re.escape(f"no option {name!r}: {hint}")):
            HTTPTransport(LIMIT, **wrong)

    def test_a_group_s_transport_refuses_it_at_once(self) -> None:
        """The constructor refuses it, not the first receive."""
        group: Any = object()
        wrong: dict[str, Any] = {"alow_pickle": True}
        with pytest.raises(TypeError, match="did you mean 'allow_pickle'"):
            PGTransport(group, LIMIT, torch.device("cpu"), **wrong)
        with pytest.raises(TypeError, match="did you mean 'timeout'"):
            adapt(group, **{"timout": 3, **wrong})


def test_point_2_keyword_names(pair: Pair) -> None:
    """All verbs take the manager's keywords."""
    source, heir = pair
    source.send_checkpoint(dst_ranks=[1], step=1, state_dict=state(), timeout=LIMIT)
    heir.recv_checkpoint(src_rank=0, metadata=source.metadata(), step=1, timeout=LIMIT)
    source.shutdown(wait=False)


class TestPoint3Metadata:
    """It is asked for in every step, on every rank."""

    def test_it_is_there_before_a_send_short_and_stable(self, make: Make) -> None:
        """The string is the same in every thread, also after the end of serving."""
        source = make()
        first = source.metadata()
        with beside(source.metadata) as result:
            assert result() == first
        assert len(first) < 200
        source.shutdown()
        assert source.metadata() == first

    def test_other_hosts_can_use_it(self) -> None:
        """By default it names no loopback address if there is another one."""
        source: Transport = HTTPTransport(LIMIT)
        try:
            host = urlsplit(source.metadata()).hostname
            with socket.create_connection((host, urlsplit(source.address()).port)):
                pass
            told = aiockpt.http.listen.advertised_address(
                advertise=None, interface=None, host=None, env={}
            )
            assert host == told
        finally:
            source.shutdown()

    def test_only_holders_can_read(self, pair: Pair) -> None:
        """The address alone is not enough."""
        source, heir = pair
        send(source, 1, state())
        with pytest.raises(AuthenticationError):
            receive(heir, source.address(), 1)

    def test_what_is_shown_has_no_secret(self, make: Make) -> None:
        """Logs have reprs and addresses."""
        source = make()
        secret = source.metadata().partition("#")[2]
        assert secret
        assert secret not in f"{source!r} {source.address()}"


class TestPoint4Threads:
    """Calls come from plain threads, and from one that runs a loop."""

    def test_while_the_caller_runs_a_loop(self, pair: Pair) -> None:
        """The loop stands still meanwhile, as with torchft's own."""
        source, heir = pair

        async def main() -> Any:
            send(source, 1, state())
            return receive(heir, source.metadata(), 1)

        assert_same(asyncio.run(main()), state())

    def test_many_threads_at_once(self, make: Make) -> None:
        """The calls of one transport do not take turns."""
        source, heir = make(), make()
        with ThreadPoolExecutor(8) as pool:
            works = [pool.submit(receive, heir, source.metadata(), 1) for _ in range(8)]
            send(source, 1, state())
            for work in works:
                assert_same(work.result(20), state())

    def test_its_own_thread_is_told_that_it_would_wait_for_itself(
        self, make: Make
    ) -> None:
        """A hook that calls it gets an error."""
        source = make()

        async def ask() -> object:
            return source.statistics()

        with pytest.raises(LocalProtocolError, match="its own thread"):
            source._facade.call(ask, timeout=1, phase="ask")


class TestPoint5Send:
    """A send offers, and does not wait for anybody."""

    def test_nobody_needs_to_come(self, make: Make) -> None:
        """Neither of some ranks nor of none; again, and again the same step."""
        source = make()
        for ranks in (0, 2, 1):
            send(source, 1, state(), ranks)
        send(source, 2, state())

    def test_the_same_step_again_has_the_new_content(self, pair: Pair) -> None:
        """A step that was not committed may be sent again, and nothing is mixed."""
        source, heir = pair
        send(source, 1, state(1.0))
        send(source, 1, state(2.0))
        assert_same(receive(heir, source.metadata(), 1), state(2.0))

    def test_a_receive_outlives_that_its_step_is_sent_again(self, make: Make) -> None:
        """It starts afresh, and gets one content or the other."""
        source = make(chunk_bytes=64 << 10)
        heir = make(connections=1)
        size = 4 << 20
        send(source, 1, state(1.0, size))
        with beside(receive, heir, source.metadata(), 1) as result:
            until(lambda: source.statistics().bytes_sent)
            send(source, 1, state(2.0, size))
            got = result()
        weight = got["user"]["default"]["model"]["weight"]
        assert weight.unique().numel() == 1


class TestPoint6EarlyAndLate:
    """A receiver may come before the send, and not for ever."""

    @proves("cell torchft.HTTPTransport.send_checkpoint: success")
    def test_an_early_receive_waits(self, pair: Pair) -> None:
        """Nothing is offered when it comes."""
        source, heir = pair
        with beside(receive, heir, source.metadata(), 1) as result:
            until(lambda: waiting(source))
            send(source, 1, state())
            assert_same(result(), state())

    @pytest.mark.parametrize("timeout", [0.0, 0.01, 0.3])
    def test_a_timeout_says_so_in_torchft_s_words(
        self, pair: Pair, timeout: float
    ) -> None:
        """Promptly, and as an Exception."""
        source, heir = pair
        with pytest.raises(TransferTimeoutError) as caught:
            receive(heir, source.metadata(), 1, timeout)
        assert re.match(TIMEOUT_REGEX, str(caught.value))


class TestPoint7Step:
    """No other step's data."""

    def test_a_newer_one_is_refused_at_once(self, pair: Pair) -> None:
        """The error has the step that is there."""
        source, heir = pair
        send(source, 2345, state())
        with pytest.raises(StepNotFoundError) as caught:
            receive(heir, source.metadata(), 1234)
        assert (caught.value.step, caught.value.serving) == (1234, 2345)

    def test_an_older_one_is_waited_out(self, pair: Pair) -> None:
        """The send of this step may still come."""
        source, heir = pair
        send(source, 1, state(1.0))
        with beside(receive, heir, source.metadata(), 2) as result:
            until(lambda: waiting(source))
            send(source, 2, state(2.0))
            assert_same(result(), state(2.0))


class TestPoint8Disallow:
    """It is called in every step, on the thread that trains."""

    @proves("cell torchft.HTTPTransport.send_checkpoint: success")
    def test_what_was_sent_is_a_copy(self, pair: Pair) -> None:
        """A later change of the state dict reaches no receiver."""
        source, heir = pair
        live = state(1.0)
        send(source, 1, live)
        live["user"]["default"]["model"]["weight"].fill_(9.0)
        assert_same(receive(heir, source.metadata(), 1), state(1.0))

    def test_afterwards_requests_wait_for_the_next_send(self, pair: Pair) -> None:
        """A request for the same step waits, too."""
        source, heir = pair
        send(source, 1, state(1.0))
        source.disallow_checkpoint()
        with beside(receive, heir, source.metadata(), 1) as result:
            until(lambda: waiting(source))
            send(source, 1, state(2.0))
            assert_same(result(), state(2.0))

    def test_it_costs_nothing_when_nothing_was_sent(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The call takes no turn of the loop, which may be busy."""
        source = make()
        turns: list[object] = []
        monkeypatch.setattr(SyncFacade, "call", lambda *args, **_: turns.append(args))
        source.disallow_checkpoint()
        assert turns == []

    @proves(
        "cell torchft.HTTPTransport.disallow_checkpoint: success",
        "cell torchft.HTTPTransport.disallow_checkpoint: the other one dies",
    )
    def test_a_stuck_reader_is_not_waited_for(
        self, make: Make, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It has the grace, and is evicted then, while training goes on."""
        patient, source = make(grace=600.0), make(grace=0.3)
        for each in (patient, source):
            send(each, 1, state(1.0, 16 << 20))
        with (
            stuck_reader(patient.metadata(), 1),
            stuck_reader(source.metadata(), 1),
        ):
            for each in (patient, source):
                until(lambda each=each: each.statistics().readers)  # type: ignore[misc]
                each.disallow_checkpoint()
            until(lambda: not source.statistics().readers)
            assert patient.statistics().readers
        assert source.statistics().evicted == 1
        assert "retracting failed" not in caplog.text  # it would after 30 s

    def test_live_memory_is_not_left_with_a_reader(self, make: Make) -> None:
        """With ``zero_copy``, the call waits for the grace, and no longer."""
        source = make(grace=0.3, zero_copy=True)
        send(source, 1, state(1.0, 16 << 20))
        with stuck_reader(source.metadata(), 1):
            until(lambda: source.statistics().readers)
            source.disallow_checkpoint()
            assert not source.statistics().readers

    @proves("cell torchft.HTTPTransport.disallow_checkpoint: error")
    def test_it_never_raises(self, make: Make) -> None:
        """An error would end a healthy replica, so the call logs it."""

        class Broken(aiockpt.HTTPTransport[Any]):
            async def disallow_checkpoint(self) -> None:
                raise OSError("broken")

        source = adapt(Broken(server=aiockpt.Server(host="127.0.0.1")))
        source.send_checkpoint([1], 1, state(), LIMIT)
        source.disallow_checkpoint()
        source.shutdown()
        source.disallow_checkpoint()

    def test_it_undoes_a_send_whichever_began_first(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that comes between a send's first steps leaves it to the next one."""
        source = make(zero_copy=True)
        call = source._facade.call

        def overtaken(*args: Any, phase: str, **options: Any) -> Any:
            if phase == "stage":
                source.disallow_checkpoint()
            return call(*args, phase=phase, **options)

        monkeypatch.setattr(source._facade, "call", overtaken)
        send(source, 1, state())
        source.disallow_checkpoint()
        assert source.statistics().step is None

    @proves(
        "cell torchft.HTTPTransport.disallow_checkpoint: error",
        "cell torchft.HTTPTransport.disallow_checkpoint: timeout",
    )
    def test_one_that_comes_to_nothing_is_made_up_for(
        self, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: Any
    ) -> None:
        """What is offered does not stay so because the loop was busy once."""
        source = make()
        send(source, 1, state())
        call = source._facade.call

        def fail(*_: object, **__: object) -> None:
            raise TransferTimeoutError("retract", 1.0)

        monkeypatch.setattr(source._facade, "call", fail)
        source.disallow_checkpoint()
        assert "retracting failed" in caplog.text
        monkeypatch.setattr(source._facade, "call", call)
        source.disallow_checkpoint()
        assert source.statistics().step is None

    def test_the_copy_is_dropped(self, make: Make) -> None:
        """A replica has its memory for itself between recoveries."""
        source = make()
        size = 32 << 20
        before = resident()
        send(source, 1, state(1.0, size))
        assert resident() - before > 3 * size
        source.disallow_checkpoint()
        until(lambda: resident() - before < 2 * size)


class TestPoint9Result:
    """The receiver gets what was sent, in memory of its own."""

    def test_plain_values_keep_their_types(self, pair: Pair) -> None:
        """The manager's counts are ints, and a scheduler's state is whatever it is."""
        source, heir = pair
        content = state()
        odd = {"seen": {1, 2}, "rng": torch.get_rng_state(), "name": b"x", "n": None}
        content["user"]["scheduler"] = odd
        send(source, 1, content)
        got = receive(heir, source.metadata(), 1)
        assert_same(got, content)
        assert type(got["torchft"]["step"]) is int

    @proves("cell torchft.HTTPTransport.recv_checkpoint: success")
    def test_two_receives_share_no_memory(self, pair: Pair) -> None:
        """A later receive does not change the result of an earlier one."""
        source, heir = pair
        send(source, 1, state(1.0))
        first = receive(heir, source.metadata(), 1)
        send(source, 2, state(2.0))
        assert_same(receive(heir, source.metadata(), 2), state(2.0))
        assert_same(first, state(1.0))

    def test_what_only_a_pickle_can_carry_needs_both_ends_leave(
        self, make: Make
    ) -> None:
        """Nothing is unpickled by default."""
        source, heir = make(allow_pickle=True), make(allow_pickle=True)
        send(source, 1, {"part": Fraction(1, 3)})
        assert receive(heir, source.metadata(), 1) == {"part": Fraction(1, 3)}
        with pytest.raises(AiockptError, match="pickle"):
            receive(make(), source.metadata(), 1)


def test_point_10_the_caller_s_stream_is_waited_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calling thread waits for its stream before the state is looked at."""
    source = make()
    settled: list[object] = []

    class Device(FakeAccelerator):
        def marker(self) -> Callable[[], Event]:
            settled.append((threading.current_thread(), source.statistics().step))
            return super().marker()

    watch(monkeypatch, Device(held=False))
    send(source, 1, state())
    assert settled == [(threading.current_thread(), None)]


class TestPoint11Exceptions:
    """Nothing comes out but an Exception."""

    @pytest.mark.parametrize(
        "failure", [asyncio.CancelledError, SystemExit, GeneratorExit]
    )
    def test_what_is_none_is_made_one(
        self, failure: type[BaseException], make: Make
    ) -> None:
        """The caller gets an AiockptError, and the loop goes on."""

        class Odd(aiockpt.HTTPTransport[Any]):
            async def recv_checkpoint(self, *args: Any, **options: Any) -> Any:
                raise failure

        heir = adapt(Odd(server=aiockpt.Server(host="127.0.0.1")))
        source = make()
        with pytest.raises(AiockptError):
            receive(heir, source.metadata(), 1)
        heir.send_checkpoint([1], 1, state(), LIMIT)
        assert_same(receive(source, heir.metadata(), 1), state())
        heir.shutdown()


class TestPoint12FailedSource:
    """Receivers that wait are told, and do not wait for their deadline."""

    @proves("cell torchft.HTTPTransport.send_checkpoint: error")
    def test_all_that_wait_are_told_at_once(self, make: Make) -> None:
        """Each waiting receiver gets the reason and the path of the leaf."""
        source, heirs = make(), [make(), make()]
        with ThreadPoolExecutor(2) as pool:
            works = [
                pool.submit(receive, heir, source.metadata(), 1, 60) for heir in heirs
            ]
            until(lambda: waiting(source) == 2)
            with pytest.raises(UnsupportedLeafError):
                send(source, 1, {"bad": object()}, ranks=2)
            for work in works:
                with pytest.raises(PeerFailedError, match="bad is a object"):
                    work.result(20)

    def test_one_who_comes_late_is_told_too(self, pair: Pair) -> None:
        """The source's step may be over by then."""
        source, heir = pair
        with pytest.raises(UnsupportedLeafError):
            send(source, 1, {"bad": object()})
        source.disallow_checkpoint()
        with pytest.raises(PeerFailedError, match="bad is a object"):
            receive(heir, source.metadata(), 1, 60)

    def test_who_comes_early_for_the_next_attempt_is_not(self, pair: Pair) -> None:
        """Each receiver is told once; the same step is sent again after a failure."""
        source, heir = pair
        for attempt in (1, 2):
            with pytest.raises(UnsupportedLeafError):
                send(source, 1, {"bad": object()})
            with pytest.raises(PeerFailedError):
                receive(heir, source.metadata(), 1)
            source.disallow_checkpoint()
            with beside(receive, heir, source.metadata(), 1) as result:
                until(lambda: waiting(source))
                send(source, 1, state(attempt))
                assert_same(result(), state(attempt))
            source.disallow_checkpoint()

    @proves("cell torchft.HTTPTransport.send_checkpoint: error")
    def test_what_is_offered_stays(self, pair: Pair) -> None:
        """A step that is there is given, although it was sent again in vain."""
        source, heir = pair
        send(source, 1, state(1.0))
        with pytest.raises(UnsupportedLeafError):
            send(source, 1, {"bad": object()})
        assert_same(receive(heir, source.metadata(), 1), state(1.0))


class TestPoint13Retries:
    """Temporary errors are retried until the deadline, and others are final."""

    def test_a_silent_connection_is_replaced_within_the_deadline(
        self, make: Make
    ) -> None:
        """Although the peer may take its time to answer an early receiver."""
        source, heir = make(), make(5)
        send(source, 1, state())
        with broken(source, [StallAfter(100)], Fault()) as metadata:
            assert_same(receive(heir, metadata, 1, 5), state())

    @proves("cell torchft.HTTPTransport.recv_checkpoint: the other one dies")
    def test_a_dead_source_is_no_reason_to_wait_for_the_deadline(
        self, make: Make
    ) -> None:
        """It refuses connections: the host is there and the process is not."""
        source, heir = make(), make(reconnect_timeout=0.2)
        source.shutdown()
        with pytest.raises(PeerUnreachableError):
            receive(heir, source.metadata(), 1, 600)

    @proves("cell torchft.HTTPTransport.recv_checkpoint: timeout")
    def test_the_deadline_is_one_for_all_attempts(self, make: Make) -> None:
        """The error names the last failure."""
        source, heir = make(), make(reconnect_timeout=0.0)
        send(source, 1, state())
        started = time.monotonic()
        with (
            broken(source, [], Refuse()) as metadata,
            pytest.raises(TransferTimeoutError, match=r"after 1 s .* cannot reach"),
        ):
            receive(heir, metadata, 1, 1)
        assert time.monotonic() - started < 20


class TestPoint14Receivers:
    """Several at once, of which one may be dead."""

    @proves("cell torchft.HTTPTransport.send_checkpoint: the other one dies")
    def test_a_dead_one_holds_up_nobody(self, make: Make) -> None:
        """The others get everything, and the next send begins at once."""
        source, heir = make(grace=600.0), make()
        send(source, 1, state(1.0, 16 << 20), ranks=2)
        with stuck_reader(source.metadata(), 1):
            assert_same(receive(heir, source.metadata(), 1), state(1.0, 16 << 20))
            source.disallow_checkpoint()
            send(source, 2, state(2.0))
            assert_same(receive(heir, source.metadata(), 2), state(2.0))


class TestPoint15Shutdown:
    """A shutdown is final, with and without a grace."""

    @proves("cell torchft.HTTPTransport.shutdown: timeout")
    def test_without_waiting_it_still_ends(self, make: Make) -> None:
        """It gives nobody the grace, and nobody is served any more."""
        source = make(grace=600.0)
        send(source, 1, state(1.0, 16 << 20))
        with stuck_reader(source.metadata(), 1):
            until(lambda: source.statistics().readers)
            source.shutdown(wait=False)
            until(lambda: not reachable(source))
            until(lambda: not source._facade._thread.is_alive())

    @proves("cell torchft.HTTPTransport.shutdown: success")
    def test_waiting_it_ends_threads_and_sockets(self, make: Make) -> None:
        """They have ended when the call returns."""
        source = make()
        send(source, 1, state())
        source.shutdown(wait=True)
        assert not reachable(source)
        assert not source._facade._thread.is_alive()

    @proves("cell torchft.HTTPTransport.shutdown: the other one dies")
    def test_twice_in_any_way(self, make: Make) -> None:
        """Nothing happens then."""
        source = make()
        for wait in (False, True, False):
            source.shutdown(wait=wait)

    def test_afterwards_calls_say_so(self, make: Make) -> None:
        """Later calls say so, and a running receive ends."""
        source, heir = make(), make()
        with beside(receive, heir, source.metadata(), 1, 60) as result:
            until(lambda: waiting(source))
            heir.shutdown(wait=False)
            with pytest.raises(ClosedError):
                result()
        with pytest.raises(ClosedError):
            receive(heir, source.metadata(), 1)

    @proves("cell torchft.HTTPTransport.shutdown: this process dies")
    def test_the_interpreter_ends_without_it(self, run_python: Any) -> None:
        """A program that forgets it neither hangs nor prints a traceback."""
        done = run_python(
            "import torch\n"
            "from aiockpt.torchft import HTTPTransport\n"
            "source, heir = HTTPTransport(10), HTTPTransport(10)\n"
            "source.send_checkpoint([1], 1, {'a': torch.ones(3)}, 10)\n"
            "print(heir.recv_checkpoint(0, source.metadata(), 1, 10)['a'].sum())\n"
        )
        assert done.returncode == 0
        assert done.stdout == "tensor(3.)\n"
        assert not done.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork with threads
class TestPoint16Fork:
    """The workers of a data loader are forked from a trainer with a transport."""

    def test_a_child_does_not_keep_the_port(self, make: Make) -> None:
        """A peer that comes after the parent's death is refused at once."""
        source = make()
        send(source, 1, state())
        with forked(lambda: True):
            source.shutdown()
            assert not reachable(source)

    @proves(
        "cell torchft.HTTPTransport.send_checkpoint: this process dies",
        "cell torchft.HTTPTransport.disallow_checkpoint: this process dies",
        "cell torchft.HTTPTransport.shutdown: this process dies",
    )
    def test_a_child_does_not_keep_connections(self, run_python: Any) -> None:
        """A receiver whose source is killed notices, although a child lives on."""
        done = run_python(KILLED_SOURCE)
        assert done.returncode == 0, done.stderr

    def test_a_child_cannot_use_it(self, make: Make) -> None:
        """It has no thread that would answer; shutting down there ends nothing."""
        source = make()
        send(source, 1, state())

        def use() -> bool:
            source.disallow_checkpoint()
            source.shutdown()
            with pytest.raises(LocalProtocolError, match="forked"):
                send(source, 2, state())
            return True

        with forked(use):
            pass
        assert_same(receive(make(), source.metadata(), 1), state())


def test_point_17_no_default_group_is_needed(pair: Pair) -> None:
    """None is there when the manager makes its transport."""
    assert not torch.distributed.is_initialized()
    source, heir = pair
    send(source, 1, state())
    assert_same(receive(heir, source.metadata(), 1), state())


KILLED_SOURCE = """
import os, signal, socket, sys, time
from urllib.parse import urlsplit
import aiockpt, torch
from aiockpt.torchft import HTTPTransport
ends = os.pipe()
if (source := os.fork()) == 0:
    transport = HTTPTransport(10, server=aiockpt.Server(host="127.0.0.1"))
    transport.send_checkpoint([1], 1, {"a": torch.ones(16 << 20)}, 10)
    os.write(ends[1], transport.metadata().encode())
    while not transport.statistics().readers:
        time.sleep(0.01)
    if os.fork() == 0:
        signal.alarm(20)
        os.close(ends[0]), os.close(ends[1])
        for end in (0, 1, 2):
            os.close(end)
        signal.pause()
    os.kill(os.getpid(), signal.SIGKILL)
told = urlsplit(os.read(ends[0], 1000).decode())
with socket.create_connection((told.hostname, told.port)) as reader:
    head = f"GET {told.path}1/full HTTP/1.1\\r\\nHost: x\\r\\n"
    reader.sendall(f"{head}Authorization: Bearer {told.fragment}\\r\\n\\r\\n".encode())
    reader.recv(1)
    os.waitpid(source, 0)
    reader.settimeout(15)  # a TimeoutError, while the child lives for 20 s
    try:
        while reader.recv(1 << 20):
            pass
    except ConnectionError:
        pass
"""


@contextmanager
def forked(use: Callable[[], object]) -> Iterator[None]:
    """Fork a child that calls ``use`` and lives until the end of the block."""
    ready, done = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        code = 1
        try:
            use()
            os.write(ready[1], b"!")
            os.read(done[0], 1)
            code = 0
        finally:
            os._exit(code)
    try:
        os.read(ready[0], 1)
        yield
    finally:
        os.write(done[1], b"!")
        assert os.waitpid(child, 0)[1] == 0
        for end in (*ready, *done):
            os.close(end)


@contextmanager
def broken(source: Transport, faults: list[Fault], otherwise: Fault) -> Iterator[str]:
    """Put a proxy in front of a source; give the metadata that leads through it."""
    told = urlsplit(source.metadata())
    assert told.hostname is not None
    assert told.port is not None
    proxy = FaultProxy(told.hostname, told.port, faults=faults, otherwise=otherwise)
    portal = SyncFacade("the proxy", at_exit=proxy.aclose)
    try:
        portal.call(proxy.listen, timeout=5, phase="proxy")
        yield told._replace(netloc=f"127.0.0.1:{proxy.port}").geturl()
    finally:
        portal.close(proxy.aclose, wait=5)


def reachable(source: Transport) -> bool:
    """Tell whether somebody accepts connections there."""
    told = urlsplit(source.metadata())
    assert told.port is not None
    try:
        socket.create_connection((told.hostname, told.port), 5).close()
    except OSError:
        return False
    return True


def resident() -> int:
    """Return the bytes of memory that the process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_threads_are_named(make: Make) -> None:
    """A person who looks at a stack dump sees whose thread it is."""
    make()
    assert "aiockpt-HTTPTransport" in {each.name for each in threading.enumerate()}
