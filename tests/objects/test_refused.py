"""What cannot be saved or loaded is refused by a typed error, without any secret."""

from __future__ import annotations

import logging
import subprocess
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt import (
    TransferEvent,
    add_hook,
    make_background_checkpointer,
    make_sync_checkpointer,
)
from aiockpt.errors import AiockptError
from aiockpt.testing import assert_same
from tests.objects.conftest import Place, Proxied
from tests.support.commandline import Commands, aiockpt_command
from tests.support.object_saver import COMMAND
from tests.support.objectstore import (
    GUEST,
    OPEN,
    OWNER,
    Account,
    Reply,
    Request,
    Server,
    Strip,
)

WRONG = Account(OWNER.key, "wrong-secret-9c8e7d6f5a4b")
UNKNOWN = Account("AKAIOCKPTNOBODY0", "wrong-secret-9c8e7d6f5a4b")
SECRETS = [OWNER.key, OWNER.secret, GUEST.key, GUEST.secret, UNKNOWN.key, WRONG.secret]
NOT_THERE = b"""<?xml version="1.0"?>
<Error><Code>NotImplemented</Code><Message>A header you provided implies
functionality that is not implemented.</Message></Error>"""


def state(value: float = 1) -> dict[str, Any]:
    """Return something small."""
    return {"w": torch.full((50_000,), float(value)), "step": value}


def save(path: str, value: Any = None) -> None:
    """Save in the foreground."""
    with make_sync_checkpointer() as made:
        made.save(state() if value is None else value, path, step=1)


class Said:
    """Everything that a program may show."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.caplog, self.events, self.more = caplog, list[TransferEvent](), list[str]()

    def fails(self, call: Callable[[], object], match: str) -> None:
        """Call what raises, and keep all that the error has."""
        with pytest.raises(AiockptError, match=match) as caught:
            call()
        error: BaseException | None = caught.value
        self.more += traceback.format_exception(caught.value)
        self.more += [str(caught.value), repr(caught.value), repr(caught.value.args)]
        while error is not None:
            self.more.append(repr(vars(error)))
            error = error.__cause__

    def text(self) -> str:
        """Return all of it."""
        told = [f"{each} {each!r}" for each in self.events]
        return "\n".join([*self.more, *told, self.caplog.text])


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, allow_error_logs: object) -> Iterator[Said]:
    """Collect everything, and look for secrets at the end."""
    caplog.set_level(logging.DEBUG)
    made = Said(caplog)
    remove = add_hook(made.events.append)
    yield made
    remove()
    assert [each for each in SECRETS if each in made.text()] == []


def refused(place: Place, account: Account, bucket: str = Server.bucket) -> str:
    """Return an address at which the store knows another account."""
    root = f"s3://as-{account.key.lower()}-{account.secret[:5]}-{bucket}"
    store = place.server.store(account, bucket=bucket)
    aiockpt.register_store(root, store)
    return f"{root}/{place.prefix}/run"


ACCOUNTS = pytest.mark.parametrize(
    "account", [WRONG, UNKNOWN], ids=["wrong", "unknown"]
)


class TestPermissions:
    """The store knows who asks, and refuses."""

    @ACCOUNTS
    def test_a_wrong_secret(self, place: Place, said: Said, account: Account) -> None:
        """Each verb says that access is refused, and what to check."""
        save(place("run/step-1"))
        run = refused(place, account)
        said.fails(lambda: aiockpt.load(f"{run}/step-1"), "credentials")
        said.fails(lambda: aiockpt.list_checkpoints(run), "credentials")
        said.fails(lambda: save(f"{run}/step-2"), "credentials")
        with make_background_checkpointer() as made:
            handle = made.save(state(), f"{run}/step-2")
            said.fails(handle.result, "credentials")
        assert [each.step for each in aiockpt.list_checkpoints(place())] == [1]

    def test_a_guest(self, place: Place, said: Said) -> None:
        """Who may read loads, and may not save."""
        save(place("run/step-1"))
        run = refused(place, GUEST)
        assert_same(aiockpt.load(f"{run}/step-1"), state())
        said.fails(lambda: save(f"{run}/step-2"), "credentials")
        assert sorted(aiockpt.list_checkpoints(place())[0].files) == [
            "checkpoint_0.safetensors"
        ]

    @ACCOUNTS
    def test_the_command_line(
        self, place: Place, cli: Commands, account: Account
    ) -> None:
        """One line, without a secret, also of a process that dies of it."""
        shown = cli.error("ls", refused(place, account))
        assert "credentials" in shown
        root, environment = place.child()
        environment |= place.server.environment(account)
        path = f"{root}/{place.prefix}/run/step-1"
        for command in (
            [*COMMAND, "save", path, "1", "0"],
            aiockpt_command("inspect", path),
        ):
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=100,
            )
            assert done.returncode
            shown += done.stdout + done.stderr
        assert [each for each in SECRETS if each in shown] == []

    def test_secrets_in_an_address(self, said: Said) -> None:
        """User info and queries are refused, and not repeated."""
        for text in (
            f"s3://{OWNER.key}:{OWNER.secret}@bucket/run/step-1",
            f"s3://bucket/run/step-1?secret={OWNER.secret}",
            f"s3://bucket/run/step-1#{OWNER.secret}",
        ):
            for call in (aiockpt.load, save, aiockpt.list_checkpoints):
                said.fails(partial(call, text), "address")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Commands:
    """Run commands in this process."""
    return Commands(capsys)


class TestPlaces:
    """There is no such place, or something else is there."""

    def test_no_bucket(self, place: Place, said: Said) -> None:
        """The error says so, not that the checkpoint is missing."""
        run = refused(place, OWNER, "no-such-bucket")
        said.fails(lambda: aiockpt.load(f"{run}/step-1"), "no such bucket")
        said.fails(lambda: save(f"{run}/step-1"), "no such bucket")

    def test_nobody_listens(self, place: Place, said: Said) -> None:
        """The error names the address, within seconds."""
        once = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
        store = place.server.store(port=9, retry_config=once)
        aiockpt.register_store("s3://dead", store)
        said.fails(lambda: aiockpt.load("s3://dead/run/step-1"), "s3://dead/run/step-1")
        said.fails(lambda: save("s3://dead/run/step-1"), "s3://dead/run/step-1")


class TestConditions:
    """A store that has no conditional puts cannot tell two savers apart."""

    def test_they_are_refused(self, place: Place, proxied: Proxied, said: Said) -> None:
        """The error says what to do, and nothing is committed or left."""

        def rule(request: Request) -> Reply | None:
            conditional = {"if-none-match", "if-match"} & request.headers.keys()
            is_put = request.method == "PUT"
            return Reply(501, NOT_THERE) if is_put and conditional else None

        _, there = proxied(rule)
        said.fails(lambda: save(there("run/step-1")), "conditional puts")
        assert aiockpt.list_checkpoints(place()) == []
        assert place.objects() == {}

    def test_they_are_ignored(self, proxied: Proxied, said: Said) -> None:
        """Such a store overwrites what is there. It is found out, and refused."""
        forget = Strip(frozenset({"if-none-match", "if-match"}))
        _, there = proxied(lambda _: forget, bucket=OPEN, skip_signature=True)
        said.fails(lambda: save(there("run/step-1")), "conditional puts")
