"""The configurations of nginx that the documentation shows, as they stand there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

import aiockpt.http
from aiockpt import AuthenticationError, StepNotFoundError
from aiockpt.testing import assert_same
from tests.support.ports import free_port
from tests.support.servers import (
    cached,
    documented,
    nginx,
    running,
    settle,
)
from tests.support.transports import MIB, receive, transport, weights

pytestmark = pytest.mark.asyncio


async def test_an_app_behind_it_is_reached_by_its_public_path(tmp_path: Path) -> None:
    """Early receives wait, errors arrive, nothing secret is in its log."""
    port = free_port()
    sender = transport(advertise=f"http://127.0.0.1:{port}/run-7/weights/")
    app = web.Application()
    aiockpt.http.setup(app, sender, prefix="/checkpoint")
    async with running(app) as host, transport() as receiver:
        shown = documented("orchestrator.md")
        location = shown.replace("http://10.0.0.5:8080", host.url)
        http = f"server {{ listen 127.0.0.1:{port}; {location} }}"
        async with nginx(tmp_path, http, port) as log:
            early = asyncio.create_task(receive(sender, receiver, 7))
            await settle(lambda: sender.statistics().waiting)
            await sender.send_checkpoint([], 7, weights(mib=8))
            assert_same(await early, weights(mib=8))
            with pytest.raises(StepNotFoundError) as caught:
                await receive(sender, receiver, 6)
            assert caught.value.serving == 7
            with pytest.raises(AuthenticationError):
                await receiver.recv_checkpoint(0, sender.address(), 7)
            token = sender.metadata().partition("#")[2]
            assert token not in log.read_text()


async def test_a_cache_makes_several_receivers_cost_one_read(tmp_path: Path) -> None:
    """Every one gets the right bytes, and none without a credential gets any."""
    size = 48 * MIB
    async with transport(chunk_bytes=MIB) as sender, transport() as receiver:
        await sender.send_checkpoint([], 7, weights(7.0, mib=48))
        async with cached(tmp_path, sender.address()) as port:
            url = f"http://127.0.0.1:{port}/checkpoint/"
            metadata = f"{url}#{sender.metadata().partition('#')[2]}"
            found = await asyncio.gather(
                *(receiver.recv_checkpoint(0, metadata, 7) for _ in range(3))
            )
            found.append(await receiver.recv_checkpoint(0, metadata, 7))
            for each in found:
                assert_same(each, weights(7.0, mib=48))
            assert size < sender.statistics().bytes_sent < 1.5 * size
            with pytest.raises(AuthenticationError):
                await receiver.recv_checkpoint(0, url, 7)
            await sender.send_checkpoint([], 8, weights(8.0))
            assert_same(await receiver.recv_checkpoint(0, metadata, 8), weights(8.0))
