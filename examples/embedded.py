"""Serve checkpoints from an aiohttp application that has routes of its own."""

import asyncio
import socket

import torch
from aiohttp import ClientSession, web

import aiockpt
import aiockpt.http


async def hello(request: web.Request) -> web.Response:
    transport = aiockpt.http.get_transport(request)
    return web.json_response({"served": transport.address()})


def make_app(transport: aiockpt.HTTPTransport) -> web.Application:
    app = web.Application()
    app.router.add_get("/hello", hello)
    aiockpt.http.setup(app, transport, prefix="/checkpoint")
    return app


async def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    # The application listens, so the transport must be told its public address.
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    transport = aiockpt.HTTPTransport(timeout=60, advertise=f"{base}/checkpoint/")
    runner = web.AppRunner(make_app(transport))
    await runner.setup()
    await web.SockSite(runner, listener).start()
    try:
        state = {"weight": torch.randn(1024, 1024)}
        await transport.send_checkpoint([1], step=7, state_dict=state, timeout=60)
        async with ClientSession() as session, session.get(f"{base}/hello") as answer:
            print(await answer.json())
        async with aiockpt.HTTPTransport(timeout=60, host="127.0.0.1") as receiver:
            received = await receiver.recv_checkpoint(
                src_rank=0, metadata=transport.metadata(), step=7, timeout=60
            )
        print("equal:", torch.equal(received["weight"], state["weight"]))
    finally:
        await runner.cleanup()  # shuts the transport down, too


if __name__ == "__main__":
    asyncio.run(main())
