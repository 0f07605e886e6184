"""One object store for the session, and a place in it for each test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt.storage import interface
from tests.support.commandline import beside
from tests.support.objectstore import (
    OWNER,
    Account,
    RequestProxy,
    Rule,
    Server,
    new_prefix,
)

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each test keep its connections: obstore's pool holds them for a while."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.allow_leaks("fds"))
            item.add_marker(pytest.mark.timeout(300))


@dataclass(frozen=True)
class Place:
    """A place in the bucket, directly or through a proxy.

    Attributes:
        server: The server.
        prefix: The part of the keys that no other test has.
        root: The scheme and the bucket of its addresses.
        port: Where the server, or the proxy, is asked.
    """

    server: Server
    prefix: str
    root: str
    port: int

    def __call__(self, name: str = "run") -> str:
        """Return an address."""
        return f"{self.root}/{self.prefix}/{name}"

    def objects(self, name: str = "run") -> dict[str, int]:
        """Return the sizes of all objects in a directory, by their keys there."""
        return self.server.objects(f"{self.prefix}/{name}")

    def uploads(self) -> list[str]:
        """Return the keys of the open uploads that were begun here."""
        keys = self.server.uploads().values()
        return [key for key in keys if key.strip("/").startswith(self.prefix)]

    def child(self, port: int = 0) -> tuple[str, dict[str, str]]:
        """Return the root and the environment with which a child finds the place."""
        found = self.server.environment(port=port or self.port)
        return f"s3://{self.server.bucket}", {**os.environ, **found}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run an object store."""
    with Server.running(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture
def place(server: Server, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a place of this test; what it registers is forgotten."""
    monkeypatch.setattr(interface, "_stores", {})
    root = f"s3://{server.bucket}"
    aiockpt.register_store(root, server.store())
    return Place(server, new_prefix(), root, server.port)


Proxied = Callable[..., tuple[RequestProxy, Place]]


@pytest.fixture
def proxied(server: Server, place: Place) -> Iterator[Proxied]:
    """Return a function that makes a proxy, and the same place behind it."""
    with ExitStack() as stack:

        def make(
            rule: Rule = lambda _: None, account: Account = OWNER, **options: Any
        ) -> tuple[RequestProxy, Place]:
            proxy = RequestProxy(server.port)
            proxy.rule = rule
            stack.enter_context(beside(proxy))
            root = f"s3://proxy-{proxy.port}"
            store = server.store(account, port=proxy.port, **options)
            aiockpt.register_store(root, store)
            return proxy, Place(server, place.prefix, root, proxy.port)

        yield make
