"""Messages that a first use meets: each names what is wrong, and what to do."""

from __future__ import annotations

import logging
import os
import re
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme
from aiohttp import web

import aiockpt.http
from aiockpt import HTTPTransport
from aiockpt.errors import (
    AiockptError,
    LocalProtocolError,
    PeerUnreachableError,
    TransferTimeoutError,
    UnsupportedLeafError,
)
from tests.support.commandline import (
    ENVIRONMENT,
    PATIENCE,
    aiockpt_command,
    run_aiockpt,
    serving,
)
from tests.support.saved import load, save
from tests.support.transports import grouped, pair, transport, weights

pytestmark = pytest.mark.timeout(180)


class TestTimeouts:
    """A deadline says what was waited for, from whom, and what is there instead."""

    @pytest.mark.asyncio
    @pytest.mark.parametrize("served", [None, 7])
    async def test_a_step_that_does_not_come(self, served: int | None) -> None:
        """The step, the peer, and what it serves; no name of a function."""
        async with pair() as (sender, receiver):
            if served is not None:
                await sender.send_checkpoint([1], served, weights())
            with pytest.raises(TransferTimeoutError) as caught:
                await receiver.recv_checkpoint(0, sender.metadata(), 8, timeout=2)
            address = sender.address()
        text = str(caught.value)
        assert text.startswith("timed out after 2 s while waiting for step 8 from ")
        assert address in text
        now = "nothing" if served is None else "step 7"
        assert text.endswith(f"being served is {now}")
        assert "fetch_manifest" not in text
        assert caught.value.stop == "fetch_manifest"

    @pytest.mark.asyncio
    @pytest.mark.parametrize(("step", "named"), [(8, "step 8"), (None, "a checkpoint")])
    async def test_a_receive_without_time(self, step: int | None, named: str) -> None:
        """It names what was asked for, though nobody has been asked."""
        async with pair() as (sender, receiver):
            with pytest.raises(TransferTimeoutError) as caught:
                await receiver.recv_checkpoint(0, sender.metadata(), step, timeout=0)
        assert f"while waiting for {named} from http" in str(caught.value)

    @pytest.mark.asyncio
    async def test_staging(self) -> None:
        """A send that has no time names its step, too."""
        async with transport() as sender:
            with pytest.raises(TransferTimeoutError) as caught:
                await sender.send_checkpoint([1], 7, weights(), timeout=0)
        assert str(caught.value) == "timed out after 0 s while staging step 7"


class TestArguments:
    """What was passed wrongly is named by its argument."""

    @pytest.mark.asyncio
    @pytest.mark.parametrize("metadata", [None, 5, ["http://h/", None], b"http://h/"])
    async def test_no_metadata(self, metadata: Any) -> None:
        """As of a variable that was never set."""
        async with transport() as receiver:
            with pytest.raises(TypeError, match=r"^metadata= must be the string that"):
                await receiver.recv_checkpoint(0, metadata, 1)
            with pytest.raises(TypeError, match=r"^metadata= must be the string that"):
                receiver.steps(metadata)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("nested", [False, True])
    async def test_a_module(self, nested: bool) -> None:
        """It has a state dict, and is none."""
        module = torch.nn.Linear(2, 2)
        state: Any = {"model": module} if nested else module
        async with pair() as (sender, receiver):
            with pytest.raises(UnsupportedLeafError) as caught:
                await sender.send_checkpoint([1], 1, state)
            assert str(caught.value).endswith(": pass module.state_dict()")
            await sender.send_checkpoint([1], 1, module.state_dict())
            metadata = sender.metadata()
            with pytest.raises(UnsupportedLeafError) as caught:
                await receiver.recv_checkpoint(0, metadata, 1, into=state)
            assert str(caught.value).endswith(": pass module.state_dict()")

    @pytest.mark.parametrize("nested", [False, True])
    def test_a_module_to_load_into(self, tmp_path: Path, nested: bool) -> None:
        """A load says the same of it as a receive, from each kind of file."""
        model = torch.nn.Linear(2, 2)
        state = {"model": model.state_dict()} if nested else model.state_dict()
        torch.save(state, tmp_path / "model.pt")
        into: Any = {"model": model} if nested else model
        for path in (save(tmp_path / "step-1", state), tmp_path / "model.pt"):
            with pytest.raises(UnsupportedLeafError) as caught:
                load(path, into)
            assert str(caught.value).endswith(": pass module.state_dict()")
            assert caught.value.path == ("model" if nested else "")

    @pytest.mark.asyncio
    async def test_an_optimizer(self) -> None:
        """So has an optimizer."""
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
        async with transport() as sender:
            with pytest.raises(UnsupportedLeafError) as caught:
                await sender.send_checkpoint([1], 1, {"optimizer": optimizer})
        assert str(caught.value).endswith(": pass its state_dict()")


class TestAdvertise:
    """A wrong public address is found by who tells it."""

    @pytest.mark.parametrize(
        "advertise", ["host:80", "host.example/weights/", "https//host/x", "[::1]:80"]
    )
    def test_no_scheme(self, advertise: str) -> None:
        """Neither a host nor a URL; a URL begins with its scheme."""
        with pytest.raises(LocalProtocolError) as caught:
            HTTPTransport[Any](advertise=advertise)
        assert f"advertise={advertise!r}" in str(caught.value)
        assert "begins with http:// or https://" in str(caught.value)

    def test_another_scheme(self) -> None:
        """Only two are served."""
        with pytest.raises(LocalProtocolError, match="advertise='ftp://h/x/'"):
            HTTPTransport[Any](advertise="ftp://h/x/")

    @pytest.mark.parametrize(
        ("advertise", "fault"),
        [
            ("my host", "blanks"),
            ("http://my host/checkpoint/", "blanks"),
            ("https://host/checkpoint/?run=7", "a query"),
            ("https://user:word@host/checkpoint/", "user information"),
            ("https://host/checkpoint/#part", "a '#'"),
            ("http:///checkpoint/", "no host"),
        ],
    )
    def test_no_address(self, advertise: str, fault: str) -> None:
        """What would make bad metadata is refused before anything is staged."""
        with pytest.raises(LocalProtocolError) as caught:
            HTTPTransport[Any](advertise=advertise)
        assert f"advertise={advertise!r}" in str(caught.value)
        assert fault in str(caught.value)

    @pytest.mark.parametrize("advertise", ["host", "10.0.0.5", "::1", "[::1]"])
    def test_a_host(self, advertise: str) -> None:
        """It is enough where the transport has its own port."""
        HTTPTransport[Any](advertise=advertise)

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("advertise", "prefix", "warned"),
        [
            ("https://host/other/", "/weights", True),
            ("https://host/", "/weights", True),
            ("https://host/weights", "/weights", False),
            ("https://host/run-7/weights/", "/weights", False),
            ("https://host/run-7/weights/", "/{run}/weights", False),
            ("https://host/any/", "/", False),
        ],
    )
    async def test_another_path_than_the_prefix(
        self,
        advertise: str,
        prefix: str,
        warned: bool,
        caplog: Any,
    ) -> None:
        """Receivers would get a 404, unless a proxy changes the path."""
        mounted = HTTPTransport[Any](advertise=advertise)
        with caplog.at_level(logging.WARNING, "aiockpt"):
            aiockpt.http.setup(web.Application(), mounted, prefix)
        text = caplog.text
        assert (f"advertise={advertise!r}" in text) == warned
        assert (repr(prefix) in text) == warned
        await mounted.shutdown()

    @pytest.mark.asyncio
    async def test_a_port_of_its_own(self, caplog: Any) -> None:
        """There the prefix is always the same."""
        options: Any = {
            "host": "127.0.0.1",
            "advertise": "http://gate.example/weights/",
        }
        with caplog.at_level(logging.WARNING, "aiockpt"):
            async with HTTPTransport[Any](**grouped(**options)):
                pass
        assert "'/checkpoint'" in caplog.text


class TestSchemes:
    """The two ends must agree on TLS."""

    @pytest.mark.asyncio
    async def test_https_to_a_plain_port(self) -> None:
        """It says that the port speaks no TLS."""
        async with pair(reconnect_timeout=0) as (sender, receiver):
            metadata = sender.metadata().replace("http:", "https:")
            with pytest.raises(PeerUnreachableError, match=r"no TLS there.* http://"):
                await receiver.recv_checkpoint(0, metadata, 1, timeout=20)

    @pytest.mark.asyncio
    async def test_http_to_a_tls_port(self) -> None:
        """It says that the port may want TLS."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
        async with (
            transport(ssl_context=context) as sender,
            transport(reconnect_timeout=0) as receiver,
        ):
            metadata = sender.metadata().replace("https:", "http:")
            with pytest.raises(AiockptError, match=r"TLS.* https://"):
                await receiver.recv_checkpoint(0, metadata, 1, timeout=20)


class TestCommandLine:
    """The same in a shell."""

    @pytest.mark.parametrize("command", ["inspect", "verify"])
    @pytest.mark.parametrize("legacy", [False, True])
    def test_a_file_of_torch(self, tmp_path: Path, command: str, legacy: bool) -> None:
        """It has neither header nor digests; ``convert`` makes a file that has them."""
        model = tmp_path / "model.pt"
        torch.save(weights(), model, _use_new_zipfile_serialization=not legacy)
        done = run_aiockpt(command, model)
        assert done.returncode == 1
        assert f"{model}: it is a file of torch.save" in done.stderr
        assert "aiockpt convert" in done.stderr

    def test_the_progress_line_has_words(self, tmp_path: Path) -> None:
        """And no names of functions."""
        torch.save({"w": torch.randn(1 << 20)}, tmp_path / "m.pt")
        ours, theirs = os.openpty()
        with serving(tmp_path / "m.pt") as running:
            fetch = subprocess.Popen(
                aiockpt_command("fetch", running.metadata, "-o", tmp_path / "f"),
                env=ENVIRONMENT,
                stderr=theirs,
            )
            os.close(theirs)
            shown = b""
            while data := _read(ours):
                shown += data
            assert fetch.wait(PATIENCE) == 0
        os.close(ours)
        assert b"fetching" in shown or b"writing" in shown
        assert not re.search(rb"fetch_|allocate|plan", shown)

    def test_a_deadline(self, tmp_path: Path) -> None:
        """It names what was asked for."""
        torch.save(weights(), tmp_path / "m.pt")
        with serving(tmp_path / "m.pt", "--step", 7) as running:
            options = ("--step", 8, "--wait", 60, "--timeout", 3, "-o", tmp_path / "f")
            done = run_aiockpt("fetch", running.metadata, *options)
        assert done.returncode == 1
        assert "timed out after 3 s while waiting for step 8 from http" in done.stderr
        assert "being served is step 7" in done.stderr


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except OSError:  # Linux says so when the program has ended
        return b""
