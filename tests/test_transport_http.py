"""HTTPTransport: what it has beyond the conformance suite."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
import trustme

from aiockpt import (
    AuthenticationError,
    Limits,
    StepNotFoundError,
    TransferEvent,
    TransportError,
)
from aiockpt.errors import (
    CheckpointChangedError,
    LimitExceededError,
    LocalProtocolError,
    RemoteProtocolError,
    UnsupportedLeafError,
)
from aiockpt.events import add_hook
from aiockpt.testing import assert_same
from tests.support.proofs import proves
from tests.support.serving import Peer, settle
from tests.support.transports import (
    MIB,
    Transport,
    in_the_middle,
    pair,
    port_of,
    proxied,
    receive,
    through,
    transport,
    weights,
)

pytestmark = pytest.mark.asyncio

VARIABLES = (
    "AIOCKPT_TOKEN",
    "AIOCKPT_TOKEN_PATH",
    "AIOCKPT_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the machine decides a test."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


class TestCredentials:
    """Who may read."""

    @proves("threat S1")
    async def test_the_metadata_holds_the_token(self) -> None:
        """Whoever was handed it may read, and nobody else."""
        async with pair() as (sender, receiver):
            await sender.send_checkpoint([], 1, weights())
            assert "#" in sender.metadata()
            assert_same(await receive(sender, receiver), weights())
            with pytest.raises(AuthenticationError, match="metadata"):
                await receiver.recv_checkpoint(0, sender.address(), 1)

    async def test_every_transport_has_another_token(self) -> None:
        """One leaked log does not open all."""
        async with pair() as (one, two):
            secret = one.metadata().partition("#")[2]
            assert len(secret) >= 32
            assert secret != two.metadata().partition("#")[2]

    async def test_a_shared_token_is_not_in_the_metadata(self) -> None:
        """Both ends were given it."""
        async with pair(token="open-sesame") as (sender, receiver):
            await sender.send_checkpoint([], 1, weights())
            assert sender.metadata() == sender.address()
            assert_same(await receive(sender, receiver), weights())
            async with transport(token="sesame-open") as stranger:
                with pytest.raises(AuthenticationError):
                    await receive(sender, stranger)
            async with transport() as stranger:
                with pytest.raises(AuthenticationError):
                    await receive(sender, stranger)

    async def test_the_token_may_come_from_the_environment(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As a variable."""
        monkeypatch.setenv("AIOCKPT_TOKEN", "from-env")
        async with pair() as (sender, receiver):
            await sender.send_checkpoint([], 1, weights())
            assert sender.metadata() == sender.address()
            await receive(sender, receiver)
            async with transport(token="another") as stranger:
                with pytest.raises(AuthenticationError):
                    await receive(sender, stranger)

    async def test_the_token_may_come_from_a_file(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """As a mounted secret, with a line end."""
        (tmp_path / "token").write_text("from-file\n")
        monkeypatch.setenv("AIOCKPT_TOKEN_PATH", str(tmp_path / "token"))
        async with transport() as sender, transport(token="from-file") as receiver:
            await sender.send_checkpoint([], 1, weights())
            await receive(sender, receiver)

    async def test_a_token_file_that_is_missing_is_no_open_door(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """There is no falling back."""
        monkeypatch.setenv("AIOCKPT_TOKEN_PATH", "/nowhere/token")
        with pytest.raises(OSError, match="/nowhere/token"):
            transport()

    @pytest.mark.parametrize("token", ["", "two words", "naïve", "line\nend"])
    async def test_a_token_that_no_header_can_carry_is_refused(
        self, token: str
    ) -> None:
        """When it is given, not when it is needed."""
        with pytest.raises(ValueError, match="token"):
            transport(token=token)

    async def test_insecure_must_be_said_and_is_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """And contradicts a token."""
        with caplog.at_level(logging.WARNING):
            async with pair(insecure=True) as (sender, receiver):
                await sender.send_checkpoint([], 1, weights())
                assert sender.metadata() == sender.address()
                await receive(sender, receiver)
        assert "everybody who reaches the port may read" in caplog.text
        with pytest.raises(ValueError, match="contradict"):
            transport(insecure=True, token="x")

    @pytest.mark.parametrize("token", [None, "open-sesame"])
    async def test_nothing_shows_the_token(
        self, token: str | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        """No repr, no event, no log line and no error."""
        events: list[TransferEvent] = []
        remove = add_hook(events.append)
        caplog.set_level(logging.DEBUG)
        async with pair(token=token) as (sender, receiver):
            secret = token or sender.metadata().partition("#")[2]
            await sender.send_checkpoint([], 1, weights())
            await receive(sender, receiver)
            with pytest.raises(StepNotFoundError) as caught:
                await receive(sender, receiver, step=0)
            shown = [repr(sender), repr(vars(sender)), sender.address()]
            shown += [repr(caught.value), str(caught.value), *map(str, events)]
        remove()
        assert events
        assert secret not in "\n".join([*shown, caplog.text])


class TestTLS:
    """Encrypted, and verified in either direction."""

    def contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext, trustme.CA]:
        authority = trustme.CA()
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(server)
        client = ssl.create_default_context()
        authority.configure_trust(client)
        return server, client, authority

    async def test_a_trusted_server_is_read(self) -> None:
        """Its metadata says https."""
        server, client, _ = self.contexts()
        async with (
            transport(ssl_context=server) as sender,
            transport(client_ssl_context=client) as receiver,
        ):
            await sender.send_checkpoint([], 1, weights())
            assert sender.metadata().startswith("https://127.0.0.1:")
            assert_same(await receive(sender, receiver), weights())

    @proves("threat S3")
    async def test_an_untrusted_server_is_refused(self) -> None:
        """Before the token is shown to it."""
        server, _, _ = self.contexts()
        async with (
            transport(ssl_context=server) as sender,
            transport(reconnect_timeout=0) as receiver,
        ):
            await sender.send_checkpoint([], 1, weights())
            with pytest.raises(RemoteProtocolError, match="certificate"):
                await receive(sender, receiver)

    async def test_a_server_may_ask_for_certificates(self) -> None:
        """Mutual TLS."""
        server, client, authority = self.contexts()
        server.verify_mode = ssl.CERT_REQUIRED
        authority.configure_trust(server)
        async with transport(ssl_context=server) as sender:
            await sender.send_checkpoint([], 1, weights())
            options: dict[str, Any] = {"reconnect_timeout": 0}
            async with transport(client_ssl_context=client, **options) as receiver:
                with pytest.raises(TransportError):
                    await receive(sender, receiver)
            authority.issue_cert("receiver@example.org").configure_cert(client)
            async with transport(client_ssl_context=client, **options) as receiver:
                assert_same(await receive(sender, receiver), weights())


class TestAddress:
    """What peers are told."""

    async def test_the_bound_address_is_told(self) -> None:
        """With the port that was found."""
        async with transport() as sender:
            assert sender.address().startswith("http://127.0.0.1:")
            assert sender.address().endswith("/checkpoint/")

    async def test_an_interface_can_be_named(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By argument, or as training frameworks have it."""
        async with transport(host=None, interface="lo") as sender:
            assert sender.address().startswith("http://127.0.0.1:")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        async with transport(host=None) as sender:
            assert sender.address().startswith("http://127.0.0.1:")

    async def test_an_interface_that_is_not_there_is_an_error(self) -> None:
        """Not another address that may work or not."""
        async with transport(host=None, interface="nope0") as sender:
            with pytest.raises(LocalProtocolError, match="nope0"):
                sender.metadata()

    async def test_a_name_can_be_advertised(self) -> None:
        """For peers behind another network; an insecure server answers to it."""
        async with transport(advertise="trainer.example", insecure=True) as sender:
            port = port_of(sender)
            assert sender.address() == f"http://trainer.example:{port}/checkpoint/"
            async with Peer(port, token=None) as peer:
                answer = await peer.ask("/healthz", Host="trainer.example")
                assert answer.status != 421

    async def test_a_whole_url_can_be_advertised(self) -> None:
        """A reverse proxy serves it."""
        async with transport(advertise="https://proxy.example/a/b") as sender:
            assert sender.address() == "https://proxy.example/a/b/"

    async def test_a_port_that_is_taken_is_named(self) -> None:
        """By the error, when it is bound."""
        async with transport() as first:
            port = port_of(first)
            second = transport(port=port)
            with pytest.raises(OSError, match=str(port)):
                await second.start()
            await second.shutdown()

    @pytest.mark.parametrize("metadata", ["", "nonsense", "ftp://x/", "http://"])
    async def test_metadata_of_another_kind_is_the_caller_s_mistake(
        self, metadata: str
    ) -> None:
        """Torchft hands over whatever a peer said."""
        async with transport() as receiver:
            with pytest.raises(LocalProtocolError, match="metadata"):
                await receiver.recv_checkpoint(0, metadata, 1)


class TestStart:
    """The server's beginning."""

    async def test_one_that_never_started_has_nothing_to_shut_down(self) -> None:
        """Nor one that only told its address."""
        await transport().shutdown()
        sender = transport()
        sender.metadata()
        await sender.shutdown()


class TestSession:
    """A ClientSession of the caller's."""

    async def test_it_is_used_and_left_open(self) -> None:
        """Its owner closes it."""
        asked: list[str] = []

        async def note(_: object, __: object, params: Any) -> None:
            asked.append(str(params.url.path))

        tracing = aiohttp.TraceConfig()
        tracing.on_request_start.append(note)
        async with aiohttp.ClientSession(trace_configs=[tracing]) as session:
            async with transport() as sender, transport(session=session) as receiver:
                await sender.send_checkpoint([], 1, weights())
                assert_same(await receive(sender, receiver), weights())
            assert "/checkpoint/1/metadata" in asked
            assert not session.closed


class TestLimits:
    """What a receive accepts."""

    @pytest.mark.parametrize("limit", [0, 100, MIB - 1])
    async def test_a_checkpoint_that_is_too_large_is_refused(self, limit: int) -> None:
        """Before memory is taken; the error has both numbers."""
        async with transport() as sender:
            await sender.send_checkpoint([], 1, weights())
            async with transport(limits=Limits(max_bytes=limit)) as receiver:
                with pytest.raises(LimitExceededError) as caught:
                    await receive(sender, receiver)
                assert (caught.value.limit, caught.value.actual) == (limit, MIB)

    async def test_one_that_fits_is_not(self) -> None:
        """The bound is inclusive."""
        async with transport() as sender:
            await sender.send_checkpoint([], 1, weights())
            async with transport(limits=Limits(max_bytes=MIB)) as receiver:
                await receive(sender, receiver)

    async def test_memory_is_a_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A receive that the host cannot hold would take it down."""
        monkeypatch.setattr("aiockpt.runtime.system.available_memory", lambda _: MIB)
        async with pair() as (sender, receiver):
            await sender.send_checkpoint([], 1, weights())
            with pytest.raises(LimitExceededError, match="size"):
                await receive(sender, receiver)
            template = weights(0.0)
            await receive(sender, receiver, into=template, direct=True)
            assert_same(template, weights())


class TestZeroCopy:
    """Live memory is served under a lock."""

    async def test_nothing_is_copied(self) -> None:
        """What changes before the receive is noticed by its digest, at the latest."""
        live = weights()
        async with pair(zero_copy=True) as (sender, receiver):
            await sender.send_checkpoint([], 1, live)
            assert_same(await receive(sender, receiver), weights())
            await sender.disallow_checkpoint()
            live["w0"].zero_()
            await sender.send_checkpoint([], 2, live)
            assert_same(await receive(sender, receiver, step=2), weights(0.0))

    @proves("invariant 5")
    async def test_readers_are_evicted_before_disallow_returns(self) -> None:
        """A peer that hangs neither holds training up nor sees the next step."""
        live = weights(mib=16)
        async with transport(zero_copy=True, grace=0.2, insecure=True) as sender:
            await sender.send_checkpoint([], 1, live)
            port = port_of(sender)
            async with Peer(port, token=None, receive_buffer=4096) as peer:
                await peer.request("/checkpoint/1/full")
                await peer.head()
                started = time.monotonic()
                await sender.disallow_checkpoint()
                assert 0.1 < time.monotonic() - started < 2
                live["w0"].fill_(7)
                rest = await peer.read_all()
            assert len(rest) < 16 * MIB
            assert torch.tensor(7.0).numpy().tobytes() * 2 not in rest

    async def test_a_new_send_evicts_readers_of_the_old_memory(self) -> None:
        """The caller may have changed it in between."""
        async with transport(zero_copy=True, grace=0.1, insecure=True) as sender:
            await sender.send_checkpoint([], 1, weights(mib=16))
            port = port_of(sender)
            async with Peer(port, token=None, receive_buffer=4096) as peer:
                await peer.request("/checkpoint/1/full")
                await peer.head()
                await sender.send_checkpoint([], 2, weights(mib=1))
                assert len(await peer.read_all()) < 16 * MIB


class TestAllow:
    """Offering what was sent under another step."""

    @proves("cell HTTPTransport.allow_checkpoint: success")
    async def test_it_is_offered_under_the_new_step(self) -> None:
        """Without staging it again."""
        async with pair() as (sender, receiver):
            await sender.send_checkpoint([], 1, weights())
            await sender.allow_checkpoint(2)
            assert_same(await receive(sender, receiver, step=2), weights())
            with pytest.raises(StepNotFoundError):
                await receive(sender, receiver, step=1)
            await sender.allow_checkpoint(2)
            await sender.allow_checkpoint(5)
            assert_same(await receive(sender, receiver, step=5), weights())

    async def test_there_must_be_something_to_offer(self) -> None:
        """Neither before the first send nor after disallow."""
        async with transport() as sender:
            with pytest.raises(StepNotFoundError):
                await sender.allow_checkpoint(1)
            await sender.send_checkpoint([], 1, weights())
            await sender.disallow_checkpoint()
            with pytest.raises(StepNotFoundError):
                await sender.allow_checkpoint(1)


class TestStatistics:
    """What there is to see."""

    async def test_it_counts_what_is_served(self) -> None:
        """From the first request to after the end."""
        async with pair() as (sender, receiver):
            assert sender.statistics().step is None
            await sender.send_checkpoint([], 7, weights())
            await receive(sender, receiver, 7)
            await settle(lambda: not sender.statistics().readers)
            with pytest.raises(AuthenticationError):
                await receiver.recv_checkpoint(0, sender.address(), 7)
            now = sender.statistics()
            assert now.step == 7
            assert now.bytes_sent > MIB
            assert now.requests >= 3
            assert (now.refused, now.gone, now.evicted) == (1, 0, 0)
            assert now.threads == (2, 0, 0, 0)
            assert receiver.statistics().requests == 0
        assert sender.statistics().requests == now.requests
        assert sender.statistics().step is None

    async def test_it_shows_who_reads_and_who_waits(self) -> None:
        """A reader of an old step is one, too, until it is evicted."""
        async with transport(insecure=True) as sender:
            await sender.send_checkpoint([], 1, weights(mib=64))
            slow = Peer(port_of(sender), receive_buffer=4096, token=None)
            async with slow, Peer(port_of(sender), token=None) as early:
                await slow.request("/checkpoint/1/full")
                await early.request("/checkpoint/3/full", Prefer="wait=30")
                await settle(lambda: sender.statistics().readers == 1)
                await settle(lambda: sender.statistics().waiting == 1)
                assert sender.statistics().superseded == 0
                await sender.send_checkpoint([], 2, weights())
                now = sender.statistics()
                assert (now.step, now.readers, now.superseded) == (2, 1, 1)
                assert now.oldest_reader > 0
                await sender.shutdown(wait=False)
                assert sender.statistics().evicted == 1
                assert sender.statistics().readers == 0


class TestPickle:
    """Leaves that nothing else can carry."""

    async def test_both_ends_must_say_so(self) -> None:
        """A receiver that does not runs nothing."""
        odd = {"x": frozenset, "w": torch.ones(2)}
        async with transport() as careful, transport(allow_pickle=True) as bold:
            with pytest.raises(UnsupportedLeafError):
                await careful.send_checkpoint([], 1, odd)
            await bold.send_checkpoint([], 1, odd)
            with pytest.raises(RemoteProtocolError, match="allow_pickle=True"):
                await receive(bold, careful)
            assert_same(await receive(bold, bold), odd)
            template = {"x": None, "w": torch.zeros(2)}
            got = await receive(bold, bold, into=template)
            assert got["x"] is frozenset
            odd_template = {"x": len, "w": torch.zeros(2)}
            assert (await receive(bold, bold, into=odd_template))["x"] is frozenset


@asynccontextmanager
async def ending(*transports: Transport) -> AsyncIterator[None]:
    """Shut transports down at the end, also of a test that fails."""
    try:
        yield
    finally:
        for each in transports:
            await each.shutdown(wait=False)


class TestPeerThatGoes:
    """A sender dies in the middle of a transfer."""

    def slow(self, receiver: Transport, url: str) -> Callable[..., Any]:
        return lambda progress: receiver.recv_checkpoint(0, url, 1, progress=progress)

    async def test_it_is_an_error_at_once(self) -> None:
        """If that is what the caller wants."""
        async with (
            transport() as sender,
            transport(reconnect_timeout=0, connections=1) as receiver,
            proxied(sender) as proxy,
        ):
            await sender.send_checkpoint([], 1, weights(mib=32))

            async def kill() -> None:
                proxy.refuse()
                await proxy.cut_all()

            url = through(proxy, sender)
            task, _ = await in_the_middle(self.slow(receiver, url), kill)
            started = time.monotonic()
            with pytest.raises(TransportError):
                await task
            assert time.monotonic() - started < 5

    async def test_it_may_come_back(self) -> None:
        """With the same state; what had arrived is not fetched again."""
        sender = transport(token="secret")
        state = weights(mib=128)
        port = port_of(sender)
        url = sender.address()
        again = transport(token="secret", port=port)
        async with (
            transport(token="secret", connections=1) as receiver,
            ending(sender, again),
        ):
            await sender.send_checkpoint([], 1, state)

            async def restart() -> None:
                await sender.shutdown(wait=False)
                await again.send_checkpoint([], 1, state)

            task, halfway = await in_the_middle(self.slow(receiver, url), restart)
            assert_same(await task, state)
            done = [progress.bytes_done for progress in halfway.seen]
            assert done == sorted(done)
            assert done[-1] == 128 * MIB

    async def test_it_may_come_back_with_something_else(self) -> None:
        """Then the receive fails: two checkpoints are never mixed."""
        sender = transport(token="secret")
        port = port_of(sender)
        url = sender.address()
        again = transport(token="secret", port=port)
        async with (
            transport(token="secret", connections=1) as receiver,
            ending(sender, again),
        ):
            await sender.send_checkpoint([], 1, weights(1.0, mib=128))

            async def restart() -> None:
                await sender.shutdown(wait=False)
                await again.send_checkpoint([], 1, weights(2.0, mib=128))

            task, _ = await in_the_middle(self.slow(receiver, url), restart)
            with pytest.raises(CheckpointChangedError):
                await task

    async def test_direct_says_what_it_left(self) -> None:
        """The template is half new, and the caller must know."""
        sender = transport()
        template = weights(0.0, mib=128)
        async with transport(reconnect_timeout=0, connections=1) as receiver:
            await sender.send_checkpoint([], 1, weights(mib=128))
            task, _ = await in_the_middle(
                lambda progress: receive(
                    sender, receiver, into=template, direct=True, progress=progress
                ),
                lambda: sender.shutdown(wait=False),
            )
            with pytest.raises(TransportError) as caught:
                await task
            assert caught.value.__notes__ == ["the template was modified"]
            with pytest.raises(TransportError) as caught:
                await receiver.recv_checkpoint(
                    0, "http://127.0.0.1:1/", 1, into=template, direct=True
                )
            assert caught.value.__notes__ == ["the template was not modified"]


class TestEvents:
    """What hooks get to know."""

    async def test_every_stop_is_told(self) -> None:
        """With step, size and time."""
        events: list[TransferEvent] = []
        remove = add_hook(events.append)
        async with pair() as (sender, receiver):
            await sender.send_checkpoint([], 4, weights())
            await receive(sender, receiver, step=4)
            await settle(lambda: any(each.stop == "serve" for each in events))
            await sender.disallow_checkpoint()
        remove()
        told = {each.stop: each for each in events if each.stop != "serve"}
        assert list(told) == ["publish", "recv", "retract"]
        assert {each.step for each in events} == {4}
        assert told["recv"].nbytes == told["publish"].nbytes == MIB
        assert told["publish"].seconds > 0

    async def test_the_repr_says_what_is_offered(self) -> None:
        """For logs and debuggers."""
        async with transport() as sender:
            assert repr(sender) == "<HTTPTransport step=None readers=0>"
            await sender.send_checkpoint([], 3, weights())
            assert repr(sender) == "<HTTPTransport step=3 readers=0>"
