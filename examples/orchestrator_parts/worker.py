"""A worker of the orchestrator: it answers requests while its weights are replaced."""

import asyncio
import sys
from contextlib import suppress

import torch
from aiohttp import web

import aiockpt


class Weights:
    """A model with the weights of one step; who uses or fills it holds its lock."""

    def __init__(self) -> None:
        layers = torch.nn.Linear(64, 256), torch.nn.Linear(256, 1)
        self.model = torch.nn.Sequential(*layers)
        self.step: int | None = None
        self.lock = asyncio.Lock()

    @torch.inference_mode()
    def answer(self, x: list[float]) -> dict[str, object]:
        return {"step": self.step, "y": self.model(torch.tensor(x)).tolist()}


class Worker:
    """Requests use one copy of the weights while the other one is filled."""

    def __init__(self) -> None:
        self.live, self.spare = Weights(), Weights()

    async def predict(self, request: web.Request) -> web.Response:
        x = await request.json()
        live = self.live
        async with live.lock:
            return web.json_response(await asyncio.to_thread(live.answer, x))

    async def follow(self, transport: aiockpt.HTTPTransport, metadata: str) -> None:
        async for step in transport.steps(metadata):
            async with self.spare.lock:  # after the requests from before the last swap
                try:
                    into = self.spare.model.state_dict()
                    await transport.recv_checkpoint(
                        metadata=metadata, step=step, timeout=30, into=into
                    )
                except (
                    aiockpt.TransportError,
                    aiockpt.errors.UnavailableError,
                ) as error:
                    print(f"step {step} was missed: {error}", file=sys.stderr)
                    continue  # the old weights serve until there is a newer step
                self.spare.step = step
            self.live, self.spare = self.spare, self.live


async def main() -> None:
    metadata = (await asyncio.to_thread(sys.stdin.readline)).strip()
    worker, app = Worker(), web.Application()
    app.router.add_post("/predict", worker.predict)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with aiockpt.HTTPTransport() as transport:
        following = asyncio.create_task(worker.follow(transport, metadata))
        print(f"http://127.0.0.1:{site.port}/predict", flush=True)
        ending = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        await asyncio.wait({following, ending}, return_when=asyncio.FIRST_COMPLETED)
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following  # raises why it has ended, if it has
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
