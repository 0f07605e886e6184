"""One sender and many receivers, each in a network namespace with a slow line.

``python -m benchmarks.swarm 2 8 16`` receives a state dict with one receiver first, and
then with so many at once. It prints how many times as long the last receiver took as
the single one, how many copies left the sender, and the most that one receiver sent.
``--star`` leaves out the swarm, and ``--late SHARE`` has one receiver begin later. The
rate should leave the processor idle: the bytes of all receivers pass through it twice.

Needs Linux, root and iproute2; see `benchmarks.lines`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import itertools
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from aiockpt import HTTPTransport, Swarm
from benchmarks.lines import call, hindrance

_letters = itertools.cycle("abcdefgh")
_libc = ctypes.CDLL(None, use_errno=True)
_TENSORS: Final = 8
_TIMEOUT: Final = 600.0
_QUEUE: Final = 50  # milliseconds of bytes that a line holds


def main() -> None:
    """Measure, and print a line of JSON per number of receivers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("receivers", nargs="+", type=int)
    parser.add_argument("--rate", type=float, default=25.0, help="Mbit/s of each line")
    parser.add_argument("--mib", type=int, default=128, help="size of the state dict")
    parser.add_argument("--chunks", type=int, default=512)
    parser.add_argument("--star", action="store_true", help="without a swarm")
    parser.add_argument("--late", type=float, help="of one receive: one begins later")
    parser.add_argument("--slow", type=float, help="of the rate: one has so much only")
    given = parser.parse_args()
    if why := hindrance():
        sys.exit(why)
    single = _measure(1, given, star=True)["seconds"]
    _write({"receivers": 1, "seconds": round(single[0], 2)})
    for count in given.receivers:
        found = _measure(count, given, star=given.star, one=single[0])
        _write(_summary(found, single[0]))


def _write(facts: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def _summary(found: dict[str, Any], one: float) -> dict[str, Any]:
    times = sorted(found["seconds"])
    return {
        "receivers": len(times),
        "last": round(times[-1] / one, 3),
        "median": round(times[len(times) // 2] / one, 3),
        "first of them": round(found["seconds"][0] / one, 3),
        "last to begin": round(found["seconds"][-1] / one, 3),
        "egress": round(found["sent"][0], 3),
        "hub": round(max(found["sent"][1:]), 3),
        "cpu seconds": round(found["cpu"], 1),
        "requests of the sender": found["requests"],
    }


def _measure(
    count: int, given: argparse.Namespace, *, star: bool, one: float = 0.0
) -> dict[str, Any]:
    nbytes = given.mib << 20
    with _network(count + 1, given.rate, given.slow) as spaces:
        hosts = [_Host(spaces[0], lambda host: _send(host, nbytes, given.chunks))]
        try:
            metadata = hosts[0].hear()["metadata"]
            for space in spaces[1:]:
                host = _Host(space, lambda host: _receive(host, nbytes, star=star))
                hosts.append(host)
                host.hear()
            for number, host in enumerate(hosts[1:], 1):
                if given.late is not None and number == count > 1:
                    time.sleep(given.late * one)
                host.say({"metadata": metadata})
            received = [host.hear() for host in hosts[1:]]
            if not all(each["right"] for each in received):
                sys.exit("wrong bytes arrived")
            ends = []
            for host in hosts:
                host.say({"end": True})
                ends.append(host.hear())
        finally:
            for host in hosts:
                host.kill()
    return {
        "seconds": [each["seconds"] for each in received],
        "cpu": sum(each["cpu"] for each in received),
        "sent": [each["sent"] / nbytes for each in ends],
        "requests": ends[0]["requests"],
    }


@contextlib.contextmanager
def _network(count: int, rate: float, slow: float | None) -> Iterator[list[str]]:
    """Join so many namespaces by a bridge; the second one may have a slower line."""
    # The kernel takes its time to remove the last ones.
    name = f"sw{os.getpid() % 10_000}{next(_letters)}"
    spaces = [f"{name}-{number}" for number in range(count)]
    try:
        call(f"ip link add {name} type bridge")
        call(f"ip link set {name} up")
        for number, space in enumerate(spaces):
            mbit = rate * (slow if slow is not None and number == 1 else 1)
            line = f"root tbf rate {mbit}mbit burst 64k latency {_QUEUE}ms"
            port = f"{name}v{number}"
            address = f"10.77.{number // 250}.{number % 250 + 1}/16"
            for command in (
                f"ip netns add {space}",
                f"ip link add {port} type veth peer name eth0 netns {space}",
                f"ip link set {port} master {name}",
                f"ip link set {port} up",
                f"ip -n {space} addr add {address} dev eth0",
                f"ip -n {space} link set eth0 up",
                f"ip -n {space} link set lo up",
                f"ip netns exec {space} tc qdisc add dev eth0 {line}",
                f"tc qdisc add dev {port} {line}",
            ):
                done = call(command)
                if done.returncode:
                    sys.exit(f"{command}: {done.stderr.strip()}")
        yield spaces
    finally:
        for space in spaces:
            call(f"ip netns del {space}")
        call(f"ip link del {name}")


class _Host:
    """A forked process in a namespace, which runs a coroutine and talks JSON."""

    def __init__(self, space: str, run: Callable[[_Host], Any]) -> None:
        child_reads, parent_writes = os.pipe()
        parent_reads, child_writes = os.pipe()
        self.pid = os.fork()
        ends = (parent_reads, parent_writes)
        if not self.pid:
            ends = (child_reads, child_writes)
        self._reads = os.fdopen(ends[0])
        self._writes = os.fdopen(ends[1], "w", buffering=1)
        if self.pid:
            os.close(child_reads)
            os.close(child_writes)
            return
        code = 1
        try:
            os.close(parent_reads)
            os.close(parent_writes)
            _enter(space)
            asyncio.run(run(self))
            code = 0
        except BaseException:  # noqa: BLE001 - it must not return into the parent's code
            traceback.print_exc()
        finally:
            os._exit(code)

    def say(self, facts: dict[str, Any]) -> None:
        """Send a message."""
        self._writes.write(json.dumps(facts) + "\n")

    def hear(self) -> dict[str, Any]:
        """Wait for a message."""
        found: dict[str, Any] = json.loads(self._reads.readline())
        return found

    async def heard(self) -> dict[str, Any]:
        """Wait for a message in a coroutine."""
        return await asyncio.get_running_loop().run_in_executor(None, self.hear)

    def kill(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _enter(space: str) -> None:
    # os.setns is new in Python 3.12.
    fd = os.open(f"/var/run/netns/{space}", os.O_RDONLY)
    if _libc.setns(fd, 0):
        raise OSError(ctypes.get_errno(), f"cannot enter the namespace {space}")
    os.close(fd)


def _state(nbytes: int) -> dict[str, torch.Tensor]:
    count = nbytes // 8 // _TENSORS
    return {f"w{n}": torch.arange(count) + n * 1_000_003 for n in range(_TENSORS)}


async def _send(host: _Host, nbytes: int, chunks: int) -> None:
    chunk_bytes = max(nbytes // chunks // 64 * 64, 64 << 10)
    async with HTTPTransport[Any](chunk_bytes=chunk_bytes) as transport:
        await transport.send_checkpoint(step=1, state_dict=_state(nbytes))
        host.say({"metadata": transport.metadata()})
        await host.heard()
        now = transport.statistics()
        host.say({"sent": now.bytes_sent, "requests": now.requests})


async def _receive(host: _Host, nbytes: int, *, star: bool) -> None:
    swarm = None if star else Swarm(linger=_TIMEOUT)
    async with HTTPTransport[Any](_TIMEOUT, swarm=swarm, same_host=False) as transport:
        host.say({})
        metadata = (await host.heard())["metadata"]
        began, used = time.monotonic(), time.process_time()
        got = await transport.recv_checkpoint(metadata=metadata, step=1)
        seconds, cpu = time.monotonic() - began, time.process_time() - used
        right = all(torch.equal(got[name], w) for name, w in _state(nbytes).items())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        host.say({"seconds": seconds, "cpu": cpu, "right": right, "peak": peak})
        await host.heard()
        host.say({"sent": transport.statistics().bytes_sent})


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
