"""What a caller passes: what is accepted, and messages that name what is wrong."""

from __future__ import annotations

import logging
import ssl
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trustme
from aiohttp import web

import aiockpt.http
from aiockpt import Auth, HTTPTransport, Receive, latest
from aiockpt.checkpointers import (
    CheckpointProcess,
    DefaultStager,
    RankInfo,
    make_async_checkpointer,
)
from aiockpt.errors import (
    AiockptError,
    LocalProtocolError,
    TransferTimeoutError,
    UnsupportedLeafError,
)
from tests.support.groups import transports as group_transports
from tests.support.proofs import proves
from tests.support.saving import load, names, save, sync_checkpointer
from tests.support.transports import grouped, pair, transport, weights


class TestTimeouts:
    """Seconds or a timedelta; what is too late says what it waited for."""

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("served", "step", "limit", "start", "end"),
        [
            (None, 8, 0.5, "timed out after 0.5 s while waiting for step 8", "nothing"),
            (7, 8, 0.5, "timed out after 0.5 s while waiting for step 8", "step 7"),
            (7, 8, 0, "timed out after 0 s while waiting for step 8", ""),
            (7, None, 0, "timed out after 0 s while waiting for a checkpoint", ""),
        ],
    )
    async def test_a_receive_that_is_late(
        self, served: int | None, step: int | None, limit: float, start: str, end: str
    ) -> None:
        """The message names the step, the peer, and what the peer serves."""
        async with pair() as (sender, receiver):
            if served is not None:
                await sender.send_checkpoint([1], served, weights())
            await sender.start()
            with pytest.raises(TransferTimeoutError) as caught:
                await receiver.recv_checkpoint(0, sender.metadata(), step, limit)
            address = sender.address()
        text = str(caught.value)
        assert text.startswith(f"{start} from {address}")
        assert text.endswith(f"being served is {end}" if end else "")
        assert "fetch_manifest" not in text
        assert caught.value.stop == "fetch_manifest"

    @proves("fault 36")
    @pytest.mark.asyncio
    async def test_a_send_that_is_late(self) -> None:
        """The error of a late send names its step."""
        async with transport() as sender:
            with pytest.raises(TransferTimeoutError) as caught:
                await sender.send_checkpoint([1], 7, weights(), timeout=0)
        assert str(caught.value) == "timed out after 0 s while staging step 7"


STEPS = [
    ("5", TypeError, r"step must be an integer, got '5' \(str\); pass int\(step\)"),
    (5.0, TypeError, r"step must be an integer, got 5.0 \(float\)"),
    (-1, ValueError, r"step must be from 0 to 2\*\*63 - 1, got -1"),
    (1 << 63, ValueError, "step must be from 0"),
]
"""What is no step, and what is said of it before anything is staged."""


class TestSteps:
    """Any integer; hooks and peers get an ``int``."""

    @pytest.mark.asyncio
    async def test_no_transport_takes_another_value(self) -> None:
        """Neither to send, nor to look for it."""
        for transports in (pair, group_transports):
            async with transports() as (sender, receiver):
                for wrong, error, reason in STEPS:
                    step: Any = wrong
                    with pytest.raises(error, match=reason):
                        await sender.send_checkpoint([1], step, weights())
                    with pytest.raises(error, match=reason):
                        await receiver.recv_checkpoint(0, sender.metadata(), step)

    @pytest.mark.asyncio
    async def test_no_checkpointer_takes_another_value(self, tmp_path: Path) -> None:
        """A checkpointer refuses it before anything is staged or written."""
        async with (
            aclosing(CheckpointProcess(RankInfo(0, 1))) as process,
            make_async_checkpointer() as saver,
        ):
            stager, checkpointer = DefaultStager(), sync_checkpointer()
            for wrong, error, reason in STEPS:
                step: Any = wrong
                with pytest.raises(error, match=reason):
                    checkpointer.save(weights(), tmp_path / "a", step=step)
                with pytest.raises(error, match=reason):
                    await saver.save(weights(), tmp_path / "a", step=step)
                with pytest.raises(error, match=reason):
                    await process.write(weights(), tmp_path / "a", step=step)
                with pytest.raises(error, match=reason):
                    await stager.stage(weights(), step=step)
            assert saver.statistics().saves == 0
            await stager.close()
            checkpointer.close()
        assert not names(tmp_path)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7)], ids=repr)
    async def test_checkpointers_take_any_integer(
        self, tmp_path: Path, step: Any
    ) -> None:
        """A name that ends in a number gives the step of a save without one."""
        with sync_checkpointer() as made:
            made.save(weights(), tmp_path / "sync", step=step)
            assert latest(tmp_path).step == 7  # type: ignore[union-attr]
        async with make_async_checkpointer() as saver:
            handle = await saver.save(weights(), tmp_path / "async", step=step)
            assert (handle.step, type(handle.step)) == (7, int)
            assert await handle.written()
            assert (await saver.save(weights(), tmp_path / "b-8", step=None)).step == 8


class TestOptions:
    """Options that cannot work are refused when the transport is made."""

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("chunk_bytes", 0), ("chunk_bytes", 65_537), ("connections", 0),
            ("readers", 0), ("stall_timeout", 0), ("stall_timeout", float("nan")),
            ("reconnect_timeout", -1), ("grace", -0.5), ("timeout", -1), ("nice", -1),
            ("nice", 20), ("token", ""), ("token", "two words"),
        ],
    )  # fmt: skip
    def test_an_impossible_one_is_named(self, option: str, value: Any) -> None:
        """The error names an impossible deadline when it is passed."""
        with pytest.raises(ValueError, match=option):
            transport(**{option: value})

    def test_limits_of_another_type(self) -> None:
        """They are refused at once, and not by the first receive."""
        wrong: Any
        for wrong in (None, 5, {}):
            with pytest.raises(TypeError, match="limits must be of type Limits"):
                HTTPTransport(receive=Receive(limits=wrong))

    def test_a_token_and_no_token(self) -> None:
        """Nobody gets an open server by mistake."""
        with pytest.raises(ValueError, match="insecure"):
            HTTPTransport(auth=Auth(token="secret", insecure=True))


class TestStates:
    """An object that has a state dict is none, and the message says so."""

    @pytest.mark.asyncio
    @pytest.mark.parametrize("nested", [False, True])
    async def test_a_module(self, nested: bool) -> None:
        """The error names `module.state_dict()` at both ends of a transfer."""
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
        """A load says the same of it, from each kind of file."""
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
        """The error names `state_dict()` for an optimizer, too."""
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
        async with transport() as sender:
            with pytest.raises(UnsupportedLeafError) as caught:
                await sender.send_checkpoint([1], 1, {"optimizer": optimizer})
        assert str(caught.value).endswith(": pass its state_dict()")


class TestAddresses:
    """Metadata, and the public address that it contains."""

    @pytest.mark.asyncio
    @pytest.mark.parametrize("metadata", [None, 5, ["http://h/", None], b"http://h/"])
    async def test_what_is_no_metadata(self, metadata: Any) -> None:
        """The metadata may come from a variable that was never set."""
        async with transport() as receiver:
            with pytest.raises(TypeError, match=r"^metadata= must be the string that"):
                await receiver.recv_checkpoint(0, metadata, 1)
            with pytest.raises(TypeError, match=r"^metadata= must be the string that"):
                receiver.steps(metadata)

    @pytest.mark.parametrize(
        ("advertise", "fault"),
        [
            ("host:80", "begins with http:// or https://"),
            ("host.example/weights/", "begins with http:// or https://"),
            ("https//host/x", "begins with http:// or https://"),
            ("[::1]:80", "begins with http:// or https://"), ("ftp://h/x/", "http"),
            ("my host", "blanks"), ("http://my host/checkpoint/", "blanks"),
            ("https://host/checkpoint/?run=7", "a query"),
            ("https://user:word@host/checkpoint/", "user information"),
            ("https://host/checkpoint/#part", "a '#'"),
            ("http:///checkpoint/", "no host"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_advertised(self, advertise: str, fault: str) -> None:
        """Bad metadata is refused before anything is staged."""
        with pytest.raises(LocalProtocolError) as caught:
            HTTPTransport[Any](advertise=advertise)
        assert f"advertise={advertise!r}" in str(caught.value)
        assert fault in str(caught.value)

    def test_a_host_alone(self) -> None:
        """It is enough where the transport has its own port."""
        for advertise in ("host", "10.0.0.5", "::1", "[::1]"):
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
        self, advertise: str, prefix: str, warned: bool, caplog: Any
    ) -> None:
        """Receivers would get a 404, unless a proxy changes the path."""
        mounted = HTTPTransport[Any](advertise=advertise)
        with caplog.at_level(logging.WARNING, "aiockpt"):
            aiockpt.http.setup(web.Application(), mounted, prefix)
        assert (f"advertise={advertise!r}" in caplog.text) == warned
        assert (repr(prefix) in caplog.text) == warned
        await mounted.shutdown()

    @pytest.mark.asyncio
    async def test_another_path_with_a_port_of_its_own(self, caplog: Any) -> None:
        """There the prefix is always the same."""
        where = {"host": "127.0.0.1", "advertise": "http://gate.example/weights/"}
        with caplog.at_level(logging.WARNING, "aiockpt"):
            async with HTTPTransport[Any](**grouped(**where)):
                pass
        assert "'/checkpoint'" in caplog.text

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("port", "asked", "reason"),
        [
            ("http", "https", r"no TLS there.* http://"),
            ("https", "http", "TLS.* https://"),
        ],
    )
    async def test_ends_that_disagree_on_tls(
        self, port: str, asked: str, reason: str
    ) -> None:
        """The message says what the port may want."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
        options = {"ssl_context": context} if port == "https" else {}
        async with (
            transport(**options) as sender,
            transport(reconnect_timeout=0) as receiver,
        ):
            await sender.start()
            metadata = sender.metadata().replace(f"{port}:", f"{asked}:")
            with pytest.raises(AiockptError, match=reason):
                await receiver.recv_checkpoint(0, metadata, 1, timeout=20)
