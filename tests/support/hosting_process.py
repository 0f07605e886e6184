"""An application that runs as applications do: ``hosting_process.py PUBLIC TOKEN``."""

from __future__ import annotations

import socket
import sys

from aiohttp import web

import aiockpt.http
from tests.support.transports import MIB, transport, weights

MIB_OFFERED = 64


def main(public: str, token: str) -> None:
    """Serve step 7 at ``/ckpt`` until SIGTERM; say where the application listens."""
    one = MIB_OFFERED * MIB
    sender = transport(advertise=public, token=token, grace=20, chunk_bytes=one)

    async def offer(_: web.Application) -> None:
        await sender.send_checkpoint([], 7, weights(mib=MIB_OFFERED))

    app = web.Application()
    aiockpt.http.setup(app, sender, prefix="/ckpt")
    app.on_startup.append(offer)
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    web.run_app(app, sock=listening, print=None, shutdown_timeout=5)
    print("ended", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
