"""What the options of an `HTTPTransport` do: credentials, TLS, addresses, limits."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from aiockpt import AuthenticationError, Limits
from aiockpt.errors import (
    LimitExceededError,
    LocalProtocolError,
    RemoteProtocolError,
    StepNotFoundError,
    TransferTimeoutError,
    UnsupportedLeafError,
)
from aiockpt.testing import StallAfter, assert_same
from tests.support.proofs import proves
from tests.support.servers import Peer, certified
from tests.support.transports import (
    MIB,
    pair,
    port_of,
    proxied,
    receive,
    through,
    transport,
    weights,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("plain_environment")]


class TestCredentials:
    """The options say who may read."""

    @proves("threat S1")
    async def test_the_metadata_holds_the_token(self):
        """A receiver that was handed it may read; every transport has another one."""
        async with pair(state=weights()) as (sender, receiver):
            _, _, secret = sender.metadata().partition("#")
            assert len(secret) >= 32
            assert secret != receiver.metadata().partition("#")[2]
            assert_same(await receive(sender, receiver), weights())
            with pytest.raises(AuthenticationError, match="metadata"):
                await receiver.recv_checkpoint(0, sender.address(), 1)

    @pytest.mark.parametrize("how", ["argument", "variable", "file"])
    async def test_a_shared_token_is_not_in_the_metadata(
        self, how, monkeypatch, tmp_path
    ):
        """Both ends were given it, or find it in the environment."""
        (tmp_path / "token").write_text("sesame\n")  # a secret that is mounted
        if how == "variable":
            monkeypatch.setenv("AIOCKPT_TOKEN", "sesame")
        elif how == "file":
            monkeypatch.setenv("AIOCKPT_TOKEN_PATH", str(tmp_path / "token"))
        given = {"token": "sesame"} if how == "argument" else {}
        async with transport(**given) as sender:
            await sender.send_checkpoint([], 1, weights())
            assert sender.metadata() == sender.address()
            async with transport(token="sesame") as receiver:
                assert_same(await receive(sender, receiver), weights())
            monkeypatch.undo()
            for wrong in ({"token": "another"}, {}):
                async with transport(**wrong) as stranger:
                    with pytest.raises(AuthenticationError):
                        await receive(sender, stranger)

    async def test_a_bad_token_is_no_open_door(self, monkeypatch, tmp_path):
        """It is refused when it is given, not when it is needed."""
        for token in ("", "two words", "naïve", "line\nend"):
            with pytest.raises(ValueError, match="token"):
                transport(token=token)
        monkeypatch.setenv("AIOCKPT_TOKEN_PATH", "/nowhere/token")
        with pytest.raises(OSError, match="/nowhere/token"):
            transport()
        (tmp_path / "token").write_text("one\ntwo\n")
        monkeypatch.setenv("AIOCKPT_TOKEN_PATH", str(tmp_path / "token"))
        with pytest.raises(ValueError, match=f"the token in the file {tmp_path}"):
            transport()
        monkeypatch.setenv("AIOCKPT_TOKEN", "")
        with pytest.raises(ValueError, match="the token in AIOCKPT_TOKEN must"):
            transport()

    async def test_a_short_token_is_logged(self, caplog):
        """A warning is logged, and does not repeat the token."""
        with caplog.at_level(logging.WARNING):
            async with transport(token="g" * 16), transport():
                assert not caplog.records
            async with transport(token="sesame-of-x"):
                pass
        (record,) = caplog.records
        assert "the token has 11 characters" in record.getMessage()
        assert "sesame" not in caplog.text

    async def test_a_forgotten_async_with_is_named(self):
        """The warning names it, beside the sockets and sessions that stay open."""
        left = transport()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del left  # it was never used
            gc.collect()
            assert not caught
            left = transport()
            await left.start()
            left.__del__()
            await left.shutdown(wait=False)
            left.__del__()
        (warning,) = caught
        assert warning.category is ResourceWarning
        assert "async with aiockpt.HTTPTransport" in str(warning.message)

    async def test_insecure_must_be_said_and_is_logged(self, caplog):
        """The log has a warning."""
        with caplog.at_level(logging.WARNING):
            async with pair(state=weights(), insecure=True) as (sender, receiver):
                assert sender.metadata() == sender.address()
                await receive(sender, receiver)
        assert "everybody who reaches the port may read" in caplog.text


@proves("threat S3")
@pytest.mark.every_loop
async def test_an_untrusted_server_is_refused():
    """The receiver refuses it before it shows the token."""
    server, client = certified()
    async with (
        transport(ssl_context=server) as sender,
        transport(client_ssl_context=client) as receiver,
        transport(reconnect_timeout=0) as stranger,
    ):
        await sender.send_checkpoint([], 1, weights())
        assert sender.metadata().startswith("https://127.0.0.1:")
        assert_same(await receive(sender, receiver), weights())
        with pytest.raises(RemoteProtocolError, match="certificate"):
            await receive(sender, stranger)


class TestAddress:
    """The options say which address peers are told."""

    async def test_the_bound_address_is_told(self, monkeypatch):
        """An interface works, too, by argument or as frameworks name it."""
        for options in ({}, {"host": None, "interface": "lo"}, {"host": None}):
            async with transport(**options) as sender:
                port = port_of(sender)
                assert sender.address() == f"http://127.0.0.1:{port}/checkpoint/"
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        sender = transport(host=None, interface="nope0")
        with pytest.raises(LocalProtocolError, match="nope0"):
            sender.metadata()
        with pytest.raises(LocalProtocolError, match="nope0"):
            await sender.start()
        await sender.shutdown()

    async def test_another_address_can_be_advertised(self):
        """A name, to which an insecure server answers, or the URL of a proxy."""
        async with transport(advertise="trainer.example", insecure=True) as sender:
            port = port_of(sender)
            assert sender.address() == f"http://trainer.example:{port}/checkpoint/"
            async with Peer(port, token=None) as peer:
                answer = await peer.ask("/healthz", Host="trainer.example")
                assert answer.status != 421
        async with transport(advertise="https://proxy.example/a/b") as sender:
            assert sender.address() == "https://proxy.example/a/b/"


async def test_a_session_of_the_callers_is_used_and_left_open():
    """Its settings may be odd, and the caller closes it."""
    asked: list[str] = []

    async def note(_: object, __: object, params: Any) -> None:
        asked.append(str(params.url.path))

    tracing = aiohttp.TraceConfig()
    tracing.on_request_start.append(note)
    odd: Any = {"raise_for_status": True, "read_bufsize": 64}
    async with aiohttp.ClientSession(trace_configs=[tracing], **odd) as session:
        async with transport() as sender, transport(session=session) as receiver:
            await sender.send_checkpoint([], 1, weights())
            assert_same(await receive(sender, receiver), weights())
            with pytest.raises(StepNotFoundError):
                await receive(sender, receiver, 0)
        assert "/checkpoint/1/metadata" in asked
        assert not session.closed


async def test_a_checkpoint_that_is_too_large_is_refused():
    """The error has both numbers, and comes before memory is taken."""
    async with transport() as sender:
        await sender.send_checkpoint([], 1, weights())
        for limit in (0, MIB - 1, MIB):
            async with transport(limits=Limits(max_bytes=limit)) as receiver:
                if limit == MIB:
                    await receive(sender, receiver)
                    continue
                with pytest.raises(LimitExceededError) as caught:
                    await receive(sender, receiver)
                assert (caught.value.limit, caught.value.actual) == (limit, MIB)


async def test_both_ends_must_allow_a_pickle():
    """A receiver that does not runs nothing."""
    odd = {"x": frozenset, "w": torch.ones(2)}
    async with transport() as careful, transport(allow_pickle=True) as bold:
        with pytest.raises(UnsupportedLeafError):
            await careful.send_checkpoint([], 1, odd)
        await bold.send_checkpoint([], 1, odd)
        with pytest.raises(RemoteProtocolError, match="allow_pickle=True"):
            await receive(bold, careful)
        assert_same(await receive(bold, bold), odd)
        for x in (None, len):
            template = {"x": x, "w": torch.zeros(2)}
            assert (await receive(bold, bold, into=template))["x"] is frozenset


class TestStep:
    """Any integer type is taken."""

    @pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7), 7], ids=repr)
    async def test_transports_take_any_integer(self, step: Any):
        """It is what the peer's is equal to."""
        async with pair() as (sender, receiver):
            await sender.send_checkpoint([1], step, weights())
            got = await receiver.recv_checkpoint(0, sender.metadata(), step)
            assert_same(got, weights())
            with pytest.raises(TypeError, match="step must be an integer"):
                await sender.allow_checkpoint("8")  # type: ignore[arg-type]
            await sender.allow_checkpoint(np.int64(8))  # type: ignore[arg-type]
            assert_same(await receive(sender, receiver, 8), weights())


class TestBusyHost:
    """A sender that yields to others says so, and a receive that is late repeats it."""

    @pytest.mark.parametrize(
        ("niceness", "load", "named"),
        [(10, 1e9, True), (0, 1e9, False), (10, 0, False)],
    )
    async def test_a_late_receive_names_the_niceness(
        self, niceness, load, named, monkeypatch
    ):
        """The error names it only if the host is busy and the sender is nice."""
        monkeypatch.setattr(os, "getpriority", lambda *_: niceness)
        monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
        stalls = StallAfter(200 << 10)  # behind the manifest
        async with (
            pair() as (sender, receiver),
            proxied(sender, otherwise=stalls) as proxy,
        ):
            await sender.send_checkpoint([1], 1, weights())
            with pytest.raises(TransferTimeoutError) as caught:
                await receiver.recv_checkpoint(0, through(proxy, sender), 1, 2.0)
        notes = "".join(getattr(caught.value, "__notes__", ()))
        assert ("nice=0" in notes and "niceness 10" in notes) is named

    async def test_a_host_without_proc_serves_as_any_other(self, monkeypatch):
        """The load of such a host is unknown, and the server works."""

        def unknown() -> None:
            raise OSError("load averages are unobtainable")

        monkeypatch.setattr(os, "getloadavg", unknown)
        async with pair(state=weights()) as (sender, receiver):
            assert_same(await receive(sender, receiver), weights())
