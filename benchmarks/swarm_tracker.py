"""``python -m benchmarks.swarm_tracker``: what a thousand members cost the tracker.

A sender in a process of its own offers a state dict. Members join it over HTTP, all at
once, from twenty loopback addresses. Each announces itself as often as a receive does:
soon after it joins, then after twice as long each time, up to three times per lease.
They report more chunks each time, and know a dozen others. The output is a line of
JSON: the announcements per second, and the part of a core that the sender's process
takes, in the first 15 seconds with the joins, and in whole heartbeats later.

Only announcements are sent. The cost of chunks is that of ``benchmarks.swarm``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import time
from typing import Any

import aiohttp
import torch

from aiockpt import HTTPTransport, Server, Swarm
from aiockpt.swarm.policy import FIRST, HEARTBEATS_PER_LEASE
from benchmarks.measures import BenchmarkError
from benchmarks.workers import Worker

_CHUNKS = 512
_CHUNK = 64 << 10
_ADDRESSES = 20
_PER_ADDRESS = 64  # members that the tracker admits
_LEARNS = 24  # members that a member knows at most
_BEGINNING = 15.0  # seconds


class Source:
    """The sender, inside its process."""

    def __init__(self, training: object) -> None:
        self._transport = HTTPTransport(server=Server(host="127.0.0.1"), swarm=Swarm())

    async def offer(self) -> str:
        """Publish a state dict; return the metadata."""
        state = {"w": torch.arange(_CHUNKS * _CHUNK, dtype=torch.uint8)}
        await self._transport.send_checkpoint([], 1, state)
        return self._transport.metadata()

    async def spent(self) -> float:
        """Return the processor seconds of this process."""
        return time.process_time()

    async def release(self) -> None:
        """Stop."""
        await self._transport.shutdown()


class _Member:
    """One that announces itself, and downloads nothing."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, number: int, headers: Any
    ) -> None:
        self._session, self._url = session, url
        self._headers = headers | {
            "Aiockpt-Lease": f"{secrets.token_hex(16)}; ttl=600",
            "Aiockpt-Swarm": "join",
        }
        self._said = {"url": f"http://127.0.0.1:{10_000 + number}/checkpoint/"}
        self._have = 0
        self._known: list[str] = []
        self.lease = 0.0

    async def announce(self) -> None:
        """Announce itself once, and learn whom the tracker names."""
        self._have = min(self._have + 8, _CHUNKS - 1)
        said = {**self._said, "have": self._have, "known": self._known}
        async with self._session.post(
            self._url, json=said, headers=self._headers
        ) as answer:
            found = await answer.json()
            assert answer.status == 200, found
        self._known += [each["id"] for each in found.get("members", ())]
        self._known = self._known[-_LEARNS:]
        self.lease = found["lease"]

    async def keep(self, counts: list[int]) -> None:
        """Join, and announce itself as a receive does, until cancelled."""
        part = FIRST
        while True:
            await self.announce()
            counts[0] += 1
            await asyncio.sleep(part * self.lease / HEARTBEATS_PER_LEASE)
            part = min(2 * part, 1.0)


async def _cost(source: Worker, counts: list[int], seconds: float) -> dict[str, float]:
    """Return what the announcements of the next seconds cost the sender."""
    counts[0], began, before = 0, time.monotonic(), source.call("spent")
    await asyncio.sleep(seconds)
    spent, took = source.call("spent") - before, time.monotonic() - began
    return {
        "announcements_per_second": round(counts[0] / took, 1),
        "part_of_a_core": round(spent / took, 4),
    }


async def _measure(count: int, seconds: float) -> dict[str, Any]:
    with Worker("benchmarks.swarm_tracker:Source") as source:
        metadata = source.call("offer")
        base, _, token = metadata.partition("#")
        path = f"{base.rstrip('/')}/1"
        headers = {"Authorization": f"Bearer {token}"}
        sessions = [
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(local_addr=(f"127.0.0.{each + 1}", 0))
            )
            for each in range(_ADDRESSES)
        ]
        try:
            async with sessions[0].head(f"{path}/full", headers=headers) as answer:
                headers["If-Match"] = answer.headers["ETag"]
            members = [
                _Member(sessions[n % _ADDRESSES], f"{path}/members", n, headers)
                for n in range(count)
            ]
            counts = [0]
            tasks = [asyncio.create_task(each.keep(counts)) for each in members]
            first = await _cost(source, counts, _BEGINNING)
            beat = max(each.lease for each in members) / HEARTBEATS_PER_LEASE
            await asyncio.sleep(beat)
            # Those that joined together announce themselves together.
            later = await _cost(source, counts, max(round(seconds / beat), 1) * beat)
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(ended, asyncio.CancelledError):
                    raise BenchmarkError(f"a member gave up: {ended!r}")
        finally:
            for session in sessions:
                await session.close()
    return {"members": count, "first_15_s": first, "later": later}


def main() -> None:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("members", nargs="?", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30.0)
    chosen = parser.parse_args()
    if chosen.members > _ADDRESSES * _PER_ADDRESS:
        parser.error(f"at most {_ADDRESSES * _PER_ADDRESS} members have room")
    found = asyncio.run(_measure(chosen.members, chosen.seconds))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
