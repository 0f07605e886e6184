"""Serve a checkpoint behind a reverse proxy that speaks TLS and adds a path."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator

import torch
import trustme  # certificates for a moment, in place of yours
from aiohttp import ClientSession, web

import aiockpt
import aiockpt.http

CLIENT = web.AppKey("client", ClientSession)
HOP_BY_HOP = {"Connection", "Host", "Transfer-Encoding"}


def forwarding(inside: str) -> web.Application:
    """Stand in for nginx: /ml/... outside is /... inside, streamed both ways."""

    async def session(app: web.Application) -> AsyncIterator[None]:
        async with ClientSession(inside, auto_decompress=False) as client:
            app[CLIENT] = client
            yield

    async def forward(request: web.Request) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k not in HOP_BY_HOP}
        path = request.path_qs.removeprefix("/ml")
        client = request.app[CLIENT]
        async with client.request(request.method, path, headers=headers) as answer:
            response = web.StreamResponse(status=answer.status, headers=answer.headers)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
        return response

    app = web.Application()
    app.cleanup_ctx.append(session)
    app.router.add_get("/ml/{path:.*}", forward)
    return app


async def serve(
    app: web.Application, listener: socket.socket, tls: ssl.SSLContext | None = None
) -> web.AppRunner:
    runner = web.AppRunner(app)
    await runner.setup()
    await web.SockSite(runner, listener, ssl_context=tls).start()
    return runner


async def main() -> None:
    authority = trustme.CA()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    inside, outside = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    inner, outer = (each.getsockname()[1] for each in (inside, outside))

    # The application cannot know where the world finds it, so the transport is told.
    url = f"https://127.0.0.1:{outer}/ml/checkpoint/"
    sender = aiockpt.HTTPTransport(advertise=url)
    aiockpt.http.setup(app := web.Application(), sender, prefix="/checkpoint")
    runners = [
        await serve(app, inside),
        await serve(forwarding(f"http://127.0.0.1:{inner}"), outside, tls),
    ]
    auth = aiockpt.Auth(client_ssl_context=trusting)
    async with aiockpt.HTTPTransport(auth=auth) as receiver:
        await sender.send_checkpoint(step=7, state_dict={"w": torch.ones(1 << 20)})
        state = await receiver.recv_checkpoint(metadata=sender.metadata(), step=7)
        print(sender.address(), *state["w"].shape)
    for runner in reversed(runners):
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
