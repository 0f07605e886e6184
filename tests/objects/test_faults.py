"""Connections break, and the store is busy: obstore tries again, and it is known when.

`FaultProxy` breaks connections, and `RequestProxy` answers in the store's place.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt import make_sync_checkpointer
from aiockpt.errors import AiockptError, IntegrityError, StorageError
from aiockpt.storage import bucket, interface
from aiockpt.testing import (
    CutAfter,
    Fault,
    FaultProxy,
    FlipBit,
    Refuse,
    StallAfter,
    assert_same,
)
from tests.objects.conftest import Place, Proxied
from tests.support.commandline import beside
from tests.support.object_saver import COMMAND
from tests.support.objectstore import Cut, Reply, Request

MIB = 1 << 20
BUSY = b"<Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>"
SHORT = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=3),
    "backoff": {
        "init_backoff": timedelta(milliseconds=20),
        "max_backoff": timedelta(milliseconds=100),
        "base": 2,
    },
}
"""How often obstore tries again where it would take minutes."""


def state(value: float = 1, mib: int = 1) -> dict[str, Any]:
    """Return a state of several parts if it has many MiB."""
    return {"w": torch.full((mib * MIB // 4,), float(value)), "step": value}


def save(path: str, value: Any) -> None:
    """Save in the foreground."""
    with make_sync_checkpointer() as made:
        made.save(value, path, step=1)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_store(place: Place, proxied: Proxied, status: int) -> None:
    """Each request is refused twice, and a save and a load succeed."""
    seen = Counter[str]()

    def rule(request: Request) -> Reply | None:
        seen[what := f"{request.method} {request.target}"] += 1
        return Reply(status, BUSY) if seen[what] <= 2 else None

    _, there = proxied(rule)
    save(there("run/step-1"), state(mib=40))
    assert_same(aiockpt.load(there("run/step-1")), state(mib=40))
    assert place.uploads() == []
    assert len(place.objects()) == 2


@pytest.mark.parametrize("status", [429, 503])
def test_a_store_that_stays_busy(place: Place, proxied: Proxied, status: int) -> None:
    """A save and a load end with a typed error, as soon as the store's options say."""
    save(place("run/step-1"), state())
    _, there = proxied(lambda _: Reply(status, BUSY), retry_config=SHORT)
    with pytest.raises(StorageError, match="run/step-1"):
        aiockpt.load(there("run/step-1"))
    with pytest.raises(StorageError, match="run/step-2"):
        save(there("run/step-2"), state())
    assert [each.step for each in aiockpt.list_checkpoints(place())] == [1]


def test_a_store_that_is_busy_for_seconds(
    place: Place, proxied: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store of the environment is asked for longer than obstore's ten tries take."""
    until = time.monotonic() + 15
    proxy, _ = proxied(lambda _: Reply(503, BUSY) if time.monotonic() < until else None)
    for name, value in place.server.environment(port=proxy.port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(interface, "_stores", {})
    bucket._store_at.cache_clear()
    path = f"s3://{place.server.bucket}/{place.prefix}/run/step-1"
    try:
        save(path, state(1))
        assert_same(aiockpt.load(path), state(1))
    finally:
        bucket._store_at.cache_clear()
    assert time.monotonic() > until


class TestBroken:
    """Connections end, stall, or carry a wrong bit."""

    @pytest.mark.parametrize(
        "fault",
        [
            Refuse(),
            CutAfter(0, reset=True),
            CutAfter(100),
            CutAfter(3 * MIB),
            CutAfter(5 * MIB, reset=True),
        ],
        ids=repr,
    )
    def test_a_load_goes_on(self, place: Place, fault: Fault) -> None:
        """The first four connections break, and the load comes to its end."""
        save(place("run/step-1"), state(mib=40))
        proxy = FaultProxy("127.0.0.1", place.server.port, faults=[fault] * 4)
        with beside(proxy):
            root = f"s3://fault-{proxy.port}"
            aiockpt.register_store(root, place.server.store(port=proxy.port))
            path = f"{root}/{place.prefix}/run/step-1"
            assert_same(aiockpt.load(path), state(mib=40))

    def test_a_wrong_bit(self, place: Place) -> None:
        """Its chunk is found wrong, and nothing wrong is returned."""
        save(place("run/step-1"), state(mib=40))
        proxy = FaultProxy("127.0.0.1", place.server.port, otherwise=FlipBit(3 * MIB))
        with beside(proxy):
            root = f"s3://fault-{proxy.port}"
            aiockpt.register_store(root, place.server.store(port=proxy.port))
            try:
                found = aiockpt.load(f"{root}/{place.prefix}/run/step-1")
            except IntegrityError:
                return
            assert_same(found, state(mib=40))  # no connection had so many bytes

    def test_a_silent_store(self, place: Place) -> None:
        """A load ends by the timeout of the store's options."""
        save(place("run/step-1"), state(mib=4))
        proxy = FaultProxy("127.0.0.1", place.server.port, otherwise=StallAfter(MIB))
        with beside(proxy):
            root = f"s3://fault-{proxy.port}"
            store = place.server.store(
                port=proxy.port, retry_config=SHORT, client={"timeout": "1s"}
            )
            aiockpt.register_store(root, store)
            with pytest.raises(AiockptError):
                aiockpt.load(f"{root}/{place.prefix}/run/step-1")

    @pytest.mark.parametrize("when", ["begins", "half"])
    def test_a_save_goes_on(self, place: Place, proxied: Proxied, when: Any) -> None:
        """Each request breaks once, before the store has it, and is sent again."""
        seen = set[str]()

        def rule(request: Request) -> Cut | None:
            # A store keeps a second upload if the answer to the first one is lost.
            begins_upload = request.method == "POST" and "uploads" in request.target
            if request.target in seen or (begins_upload and when == "half"):
                return None
            seen.add(request.target)
            return Cut(when)

        _, there = proxied(rule)
        save(there("run/step-1"), state(mib=40))
        assert_same(aiockpt.load(place("run/step-1")), state(mib=40))
        assert place.uploads() == []


class TestLostAnswers:
    """The store has done what was asked, and the saver does not know it."""

    @pytest.mark.parametrize("setting", ["endpoint", "aws_endpoint_url_s3"])
    def test_of_the_start_of_an_upload(
        self, place: Place, proxied: Proxied, setting: str
    ) -> None:
        """Another one is begun. The saver aborts the first one in the end."""
        lost = list[int]()

        def rule(request: Request) -> Cut | None:
            if request.method == "POST" and "uploads" in request.target and not lost:
                lost.append(request.number)
                return Cut("answered")
            return None

        proxy, there = proxied(rule)
        if setting != "endpoint":
            options: dict[str, Any] = {setting: f"http://127.0.0.1:{proxy.port}"}
            store = place.server.store(port=9, **options)
            aiockpt.register_store(there.root, store)
        save(there("run/step-1"), state(mib=40))
        assert lost
        assert place.uploads() == []
        assert_same(aiockpt.load(place("run/step-1")), state(mib=40))

    @pytest.mark.parametrize("replaces", [False, True], ids=["new", "replaced"])
    def test_of_the_commit(
        self, place: Place, proxied: Proxied, replaces: bool
    ) -> None:
        """The saver asks the marker, and finds that it has committed."""
        if replaces:
            save(place("run/step-1"), state(0))
        lost = list[int]()

        def rule(request: Request) -> Cut | None:
            if request.puts("/commit.json") and not lost:
                lost.append(request.number)
                return Cut("answered")
            return None

        _, there = proxied(rule)
        save(there("run/step-1"), state(1))
        assert lost
        assert_same(aiockpt.load(place("run/step-1")), state(1))

    def test_and_nothing_more(self, place: Place, proxied: Proxied) -> None:
        """If it cannot ask, either, the error says that it may be committed."""
        lost = list[int]()

        def rule(request: Request) -> Cut | None:
            if request.puts("/commit.json"):
                lost.append(request.number)
            return Cut("answered") if lost else None

        _, there = proxied(rule, retry_config=SHORT)
        with pytest.raises(StorageError, match="not known whether") as caught:
            save(there("run/step-1"), state(1))
        assert caught.value.may_be_committed
        assert_same(aiockpt.load(place("run/step-1")), state(1))


def gone_while(place: Place, name: str) -> Callable[[Request], None]:
    """Return a rule that deletes a checkpoint's files when the first one is read."""
    store, done = place.server.store(), list[str]()

    def rule(request: Request) -> None:
        if "range" in request.headers and not done:
            keys = [key for key in place.objects() if key.startswith(f"{name}/")]
            done.extend(f"{place.prefix}/run/{key}" for key in keys)
            store.delete(done)

    return rule


def test_a_checkpoint_that_is_being_deleted(place: Place, proxied: Proxied) -> None:
    """A load that has begun says so, and returns nothing."""
    save(place("run/step-1"), state(mib=40))
    _, there = proxied(gone_while(place, "step-1"))
    with pytest.raises(StorageError, match=r"replaced or removed|no marker"):
        aiockpt.load(there("run/step-1"))


@pytest.mark.parametrize("verb", ["load", "list", "save"])
def test_an_interrupt_while_the_store_is_silent(place: Place, verb: str) -> None:
    """It ends the wait, and the process."""
    path = place("run/step-1")
    save(path, state(mib=12))
    silent = StallAfter(3 * MIB if verb == "load" else 0)
    proxy = FaultProxy("127.0.0.1", place.server.port, otherwise=silent)
    with beside(proxy):
        root, environment = place.child(proxy.port)
        path = f"{root}/{place.prefix}/run/step-1"
        with subprocess.Popen(
            [*COMMAND, "interrupted", verb, path],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "begins\n"
            time.sleep(2)
            process.send_signal(signal.SIGINT)
            waited, _ = process.communicate(timeout=60)
    assert float(waited) < 20  # obstore would wait for 30 seconds
