"""Serve two checkpoints from an aiohttp application with routes and middlewares."""

import asyncio
import hmac
import socket

import torch
from aiohttp import ClientSession, web
from aiohttp.typedefs import Handler

import aiockpt
import aiockpt.http

KEY = b"the key of the application"
AVERAGE = web.AppKey("average", aiockpt.HTTPTransport)  # the second transport's


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return web.json_response({"error": error.reason}, status=error.status)


@web.middleware
async def auth(request: web.Request, handler: Handler) -> web.StreamResponse:
    shown = request.headers.get("X-API-Key", "").encode()
    # Peers show what their metadata carries, which the transport checks by itself.
    if not (aiockpt.http.serves(request) or hmac.compare_digest(shown, KEY)):
        raise web.HTTPUnauthorized
    return await handler(request)


async def cors(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Access-Control-Allow-Origin"] = "https://dashboard.example"


async def status(request: web.Request) -> web.Response:
    transport = aiockpt.http.get_transport(request)
    return web.json_response({"step": transport.statistics().step})


def make_app(base: str) -> web.Application:
    # The application listens, so the transports are told their public addresses.
    app = web.Application(middlewares=[errors, auth])
    app.on_response_prepare.append(cors)
    app.router.add_get("/status", status)
    for name, key in ("model", aiockpt.http.APP_KEY), ("average", AVERAGE):
        transport = aiockpt.HTTPTransport(advertise=f"{base}/{name}/")
        aiockpt.http.setup(app, transport, prefix=f"/{name}", app_key=key)
    return app


async def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    runner = web.AppRunner(app := make_app(base))
    await runner.setup()
    await web.SockSite(runner, listener).start()
    async with aiockpt.HTTPTransport() as receiver:
        for step, key in (7, aiockpt.http.APP_KEY), (6, AVERAGE):
            sender = app[key]
            await sender.send_checkpoint(
                step=step, state_dict={"w": torch.ones(step, 1024)}
            )
            received = await receiver.recv_checkpoint(
                metadata=sender.metadata(), step=step
            )
            print(sender.address(), *received["w"].shape)
    headers = {"X-API-Key": KEY.decode()}
    async with ClientSession(base, headers=headers) as client:
        print(await (await client.get("/status")).text())
    await runner.cleanup()  # shuts the transports down, too


if __name__ == "__main__":
    asyncio.run(main())
