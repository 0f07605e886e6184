"""``aiockpt bench``: measure this machine, or the line to another host, in a minute.

On this machine, another process sends a state dict over loopback. A raw socket with the
same congestion control and ``memcpy`` take turns with it. With ``--url``, another
host's ``aiockpt serve`` sends, and a plain GET takes turns. The first round warms
everything up and does not count, if there is another one. Either ends in three lines.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import math
import os
import socket
import sys
import time
from asyncio.subprocess import PIPE
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import torch

from aiockpt.cli.doctor import describe_machine
from aiockpt.errors import AiockptError, PeerUnreachableError, WorkerError
from aiockpt.events import Progress
from aiockpt.http.auth import find_credentials
from aiockpt.http.options import Server
from aiockpt.http.protocol import Address, format_metadata
from aiockpt.http.sockets import begin_classic
from aiockpt.http_transport import HTTPTransport
from aiockpt.memory.arena import Arena
from aiockpt.runtime.bridge import Bridge

_MIB = 1 << 20
_ROUNDS_S = 20.0  # in which rounds begin; the first one is always made
_IDLE_S = 0.5  # for which an idle loop is measured
_TICK_S = 0.005  # between the ticks that show how late a loop is
_SENDS = 3  # the last one has memory that earlier ones used
_PIECE_BYTES = 4 << 20
_TIMEOUT_S = 600.0
_FIND_S = 5.0  # in which another host must answer
_MAX_ANSWER_BYTES = 1 << 26

_MIN_OF_RAW_IN_PLACE, _MIN_OF_RAW_FRESH, _MIN_OF_MEMCPY = 0.75, 0.9, 0.85
_MAX_LAG_MS = 5.0
_FASTER_THAN_GET, _SLOWER_THAN_GET = 1.3, 0.8  # parts of a plain GET's speed


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print the conclusion."""
    machine = describe_machine()
    if arguments.url is None:
        nbytes = max(arguments.size // _MIB, 1) * _MIB
        found = asyncio.run(_measure_machine(nbytes, arguments.repeat))
        lines = _conclude_machine(found, machine)
    else:
        found = asyncio.run(_measure_line(arguments.url, arguments.repeat))
        lines = _conclude_line(found, arguments.url)
    if arguments.json:
        facts = {"nbytes": found.nbytes, "seconds": found.seconds, "lags": found.lags}
        print(json.dumps({"machine": machine, **facts, "conclusion": lines}))
    else:
        print("\n".join(lines))
    return 0


_Candidates: TypeAlias = dict[str, Callable[[], Awaitable[object]]]
_Late: TypeAlias = Callable[[], Awaitable[list[float]]]


@dataclass(slots=True)
class _Samples:
    """What was measured: seconds by candidate, and how late the loop's ticks were."""

    nbytes: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    lags: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def speed(self, name: str) -> float:
        """Return the median in GB/s (10^9 bytes)."""
        return self.nbytes / median(self.seconds[name]) / 1e9

    def lag(self, name: str) -> float:
        """Return the 99th percentile of how late the ticks were, in milliseconds."""
        lags = sorted(self.lags[name])
        return 1e3 * lags[math.ceil(0.99 * len(lags)) - 1] if lags else 0.0

    async def take_turns(
        self, repeat: int, candidates: _Candidates, late: _Late
    ) -> None:
        """Time the candidates in rounds, so that a busy moment hits all of them."""
        until = time.monotonic() + _ROUNDS_S
        for turn in range(repeat + 1):
            if turn > 1 and time.monotonic() >= until:
                return
            if turn == 1:
                self.seconds.clear()
                self.lags.clear()
            for name, act in candidates.items():
                await late()  # what came before is no part of it
                started = time.perf_counter()
                await act()
                self.seconds[name].append(time.perf_counter() - started)
                self.lags[name] += await late()


@asynccontextmanager
async def _ticking() -> AsyncIterator[_Late]:
    """Want the loop every 5 ms; give what tells how late that was since last asked."""
    lags: list[float] = []

    async def tick() -> None:
        while True:
            due = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            lags.append(time.monotonic() - due)

    async def late() -> list[float]:
        await asyncio.sleep(0)
        found = lags[:]
        lags.clear()
        return found

    task = asyncio.create_task(tick())
    try:
        yield late
    finally:
        task.cancel()


async def _receive(
    transport: HTTPTransport[Any],
    metadata: str,
    step: int,
    into: object = None,
    progress: Callable[[Progress], None] | None = None,
) -> object:
    options: dict[str, Any] = {"into": into, "direct": into is not None}
    return await transport.recv_checkpoint(
        metadata=metadata, step=step, progress=progress, **options
    )


# ----------------------------------------------------------------------- this machine


async def _measure_machine(nbytes: int, repeat: int) -> _Samples:
    found = _Samples(nbytes)
    touched = memoryview(bytearray(b"\1") * nbytes)
    bridge = Bridge(threads=1, name="bench")
    transport: HTTPTransport[Any] = HTTPTransport(_TIMEOUT_S)
    try:
        async with _sending(nbytes) as (offer, late):
            receive = partial(_receive, transport, offer["metadata"], _SENDS)

            def raw(memory: Callable[[], memoryview]) -> Callable[[], Awaitable[None]]:
                return lambda: bridge.run(_receive_raw, offer["port"], memory())

            template = await receive()  # connections and threads are no part of it
            candidates: _Candidates = {
                "idle": lambda: asyncio.sleep(_IDLE_S),
                "raw socket, in place": raw(lambda: touched),
                "receive in place": lambda: receive(template),
                "raw socket, fresh": raw(lambda: Arena(nbytes).buffer),
                "receive, fresh": receive,
            }
            await found.take_turns(repeat, candidates, late)
            found.seconds |= {name: offer[name] for name in ("stage", "memcpy")}
    finally:
        await transport.shutdown()
        bridge.close()
    return found


@asynccontextmanager
async def _sending(nbytes: int) -> AsyncIterator[tuple[dict[str, Any], _Late]]:
    """Run `_send` in another process, which ends with the block.

    Give what it offers, and what asks how late its loop was.

    Raises:
        WorkerError: the process has failed or ended when it is asked.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, str(nbytes)),
        stdin=PIPE,
        stdout=PIPE,
        limit=_MAX_ANSWER_BYTES,
        start_new_session=True,  # the terminal's Ctrl-C is for this process alone
    )
    assert process.stdin is not None
    assert process.stdout is not None
    questions, answers = process.stdin, process.stdout

    async def ask() -> Any:
        with suppress(ConnectionError):
            questions.write(b"\n")
            await questions.drain()
        if line := await answers.readline():
            answer = json.loads(line)
            if isinstance(answer, dict) and "error" in answer:
                raise WorkerError(answer["error"], exitcode=await process.wait())
            return answer
        code = await process.wait()
        raise WorkerError("the sending process has ended", exitcode=code)

    try:
        yield await ask(), ask
    except BaseException:
        with suppress(ProcessLookupError):
            process.kill()  # it has nothing that could get lost
        raise
    finally:
        questions.close()
        await process.wait()


def _conclude_machine(found: _Samples, machine: dict[str, str]) -> list[str]:
    in_place, fresh = found.speed("receive in place"), found.speed("receive, fresh")
    raw = found.speed("raw socket, in place"), found.speed("raw socket, fresh")
    staged, copied = (1e3 * median(found.seconds[name]) for name in ("stage", "memcpy"))
    lag, idle = found.lag("receive in place"), found.lag("idle")
    targets = {
        "receive in place": in_place >= _MIN_OF_RAW_IN_PLACE * raw[0],
        "receive into new memory": fresh >= _MIN_OF_RAW_FRESH * raw[1],
        "staging": copied >= _MIN_OF_MEMCPY * staged,
        "the sender's loop": lag <= max(_MAX_LAG_MS, idle),
    }
    missed = [what for what, is_met in targets.items() if not is_met]
    cores, load = int(machine["cores"]), float(machine["load average"].split()[0])
    if load > cores:
        advice = (
            f"the machine was busy (load average {load:.1f} on {cores} cores), so the "
            "figures are too low; run it again when it is idle."
        )
    elif missed:
        advice = (
            f"{len(missed)} of 4 targets are missed ({', '.join(missed)}); "
            "`aiockpt doctor` says what limits this machine."
        )
    else:
        advice = "all 4 targets are reached; `aiockpt bench --url` measures a line."
    receive = (
        f"Receive: {in_place:.1f} GB/s in place and {fresh:.1f} GB/s into new memory, "
        f"on loopback; a raw socket reaches {raw[0]:.1f} and {raw[1]:.1f}."
    )
    send = (
        f"Send: {found.nbytes / 1e6:.0f} MB are copied in {staged:.0f} ms, digests "
        f"included; memcpy takes {copied:.0f} ms. While they are fetched, the sender's "
        f"loop is late by {lag:.1f} ms (p99; {idle:.1f} ms idle)."
    )
    return [receive, send, f"Conclusion: {advice}"]


def _receive_raw(port: int, memory: memoryview) -> None:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        while memory.nbytes:
            count = sock.recv_into(memory[:_PIECE_BYTES])
            if not count:
                raise ConnectionResetError("the sending process closed the connection")
            memory = memory[count:]


async def _send(nbytes: int) -> None:
    """Send so many bytes, in every way, until the parent is done or gone."""
    state = {f"layers.{i}": torch.ones(_MIB // 4) for i in range(nbytes // _MIB)}
    memory, other = (memoryview(bytearray(b"\1") * nbytes) for _ in range(2))
    bridge = Bridge(threads=1, name="bench")
    listener = socket.create_server(("127.0.0.1", 0))
    begin_classic(listener)  # as those that serve a receive on the same host
    sending = asyncio.create_task(bridge.run(_send_raw, listener, memory))
    here = Server(host="127.0.0.1")
    serving = HTTPTransport[object](_TIMEOUT_S, server=here)
    async with serving as transport, _ticking() as late:
        for step in range(1, _SENDS + 1):
            for tensor in state.values():
                tensor.fill_(step)
            started = time.perf_counter()
            other[:] = memory
            copied = time.perf_counter()
            await transport.send_checkpoint(step=step, state_dict=state)
            staged = time.perf_counter()

        offer = {
            "metadata": transport.metadata(),
            "port": listener.getsockname()[1],
            "stage": [staged - copied],
            "memcpy": [copied - started],
        }
        questions = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(questions), sys.stdin
        )
        async for _ in questions:
            print(json.dumps(offer or await late()), flush=True)
            offer = {}
    listener.shutdown(socket.SHUT_RDWR)  # which ends the thread's accept
    await sending
    listener.close()
    await bridge.aclose(timeout=_FIND_S)


def _send_raw(listener: socket.socket, memory: memoryview) -> None:
    """Send all of ``memory`` to everyone who connects, one after the other."""
    with suppress(OSError):  # that is how it ends
        while True:
            peer, _ = listener.accept()
            with peer, suppress(ConnectionError):
                peer.sendall(memory)


# --------------------------------------------------------------------- another host


async def _measure_line(peer: Address, repeat: int) -> _Samples:
    source, bridge = peer.origin, Bridge(threads=1, name="bench")
    known = find_credentials(None, insecure=False, env=os.environ)
    metadata = format_metadata(source.base_url, source.token)
    transport: HTTPTransport[Any] = HTTPTransport(_TIMEOUT_S)
    seen: list[Progress] = []
    try:
        step = peer.step
        if step is None:
            step = await anext(transport.steps(metadata, reconnect_timeout=_FIND_S))

        receive = partial(_receive, transport, metadata, step, progress=seen.append)
        template = await receive()
        found = _Samples(seen[-1].bytes_total)
        url, token = f"{source.base_url}{step}/full", source.token or known.to_send
        candidates: _Candidates = {
            "idle": lambda: asyncio.sleep(_IDLE_S),
            "plain GET": lambda: bridge.run(_get, url, token, found.nbytes),
            "receive, fresh": receive,
            "receive in place": lambda: receive(template),
        }
        async with _ticking() as late:
            await found.take_turns(repeat, candidates, late)
    finally:
        await transport.shutdown()
        await bridge.aclose(timeout=_FIND_S)
    return found


def _get(url: str, token: str | None, nbytes: int) -> None:
    """Read the same bytes by one plain GET, and forget them unverified.

    It follows no redirect: the token is for this peer only.
    """
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    peer = kind(parts.netloc)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    memory, got = bytearray(_PIECE_BYTES), 0
    try:
        peer.request("GET", parts.path, headers=headers)
        answer = peer.getresponse()
        while count := answer.readinto(memory):
            got += count
    except (OSError, http.client.HTTPException) as error:
        raise PeerUnreachableError(url, f"a plain GET failed: {error}") from error
    finally:
        peer.close()
    if answer.status != http.HTTPStatus.OK or got < nbytes:
        detail = f"a plain GET brought {got} of {nbytes} bytes, status {answer.status}"
        raise PeerUnreachableError(url, detail)


def _conclude_line(found: _Samples, peer: Address) -> list[str]:
    in_place, fresh = found.speed("receive in place"), found.speed("receive, fresh")
    plain = found.speed("plain GET")
    lag, idle = found.lag("receive in place"), found.lag("idle")
    if in_place > _FASTER_THAN_GET * plain:
        advice = "one connection does not fill the line; those of a receive do better."
    elif in_place >= _SLOWER_THAN_GET * plain:
        advice = "the line, or the sender, is the limit, and not this receiver."
    else:
        advice = (
            "a receive is slower than a plain GET; run `aiockpt doctor` on both hosts."
        )
    receive = (
        f"Receive: {in_place:.2f} GB/s in place and {fresh:.2f} GB/s into new memory, "
        f"{found.nbytes / 1e6:.0f} MB from {peer.origin.base_url}; a plain GET, "
        f"unverified, reaches {plain:.2f}."
    )
    loop = f"Loop: late by {lag:.1f} ms while it receives (p99; {idle:.1f} ms idle)."
    return [receive, loop, f"Conclusion: {advice}"]


if __name__ == "__main__":
    try:
        asyncio.run(_send(int(sys.argv[1])))
    except AiockptError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(1)
