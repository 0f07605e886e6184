"""Slow lines between processes of this machine, in network namespaces.

`shaped` is a virtual cable with a token bucket (``tc tbf``), and `bridged` are several
that meet in a bridge. `distant` is a TUN link, which delays and may lose packets. All
need Linux, root and iproute2.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from benchmarks.measures import BenchmarkError

_PATIENCE = 20.0
_QUEUE_MS = 50  # of bytes that a line of a bridge holds
_BUCKET = f"burst 256k latency {_QUEUE_MS}ms"
_MTU = 1500  # as between clouds
_letters = itertools.cycle("abcdefgh")
_numbers = itertools.count(10 * os.getpid())  # so that one process may have several


@dataclass(frozen=True, slots=True)
class Line:
    """Two ends of a line.

    Attributes:
        address: Where the sender listens.
        near: Gives a context in which the sender's process is started.
        far: Gives one for the receiver's process.
        inside: A command that runs the receiver's process, if that is needed.
    """

    address: str
    near: Callable[[], AbstractContextManager[None]] = nullcontext
    far: Callable[[], AbstractContextManager[None]] = nullcontext
    inside: tuple[str, ...] = ()


def hindrance() -> str:
    """Return why this process cannot have a line; empty if it may."""
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"a line needs {' and '.join(missing)}, of the package iproute2"
    return "" if os.geteuid() == 0 else "a line needs root, for a network namespace"


@contextmanager
def shaped(rate: str) -> Iterator[Line]:
    """Give a line of a rate as ``tc`` writes it: ``10gbit``.

    Raises:
        BenchmarkError: the system does not let us.
    """
    if why := hindrance():
        raise BenchmarkError(why)
    number = next(_numbers)
    near, far, space = f"ckpt{number}a", f"ckpt{number}b", f"aiockpt-{number}"
    here, there = (f"10.213.{number % 256}.{end}" for end in (1, 2))
    try:
        for command in (
            f"ip netns add {space}",
            f"ip link add {near} type veth peer name {far} netns {space}",
            f"ip addr add {here}/30 dev {near}",
            f"ip link set {near} up",
            f"ip -n {space} addr add {there}/30 dev {far}",
            f"ip -n {space} link set {far} up",
            f"tc qdisc add dev {near} root tbf rate {rate} burst 4m latency 50ms",
        ):
            done = call(command)
            if done.returncode:
                raise BenchmarkError(f"{command}: {done.stderr.strip()}")
        yield Line(here, inside=("ip", "netns", "exec", space))
    finally:
        for command in (f"ip link del {near}", f"ip netns del {space}"):
            call(command)


@contextmanager
def bridged(rates: Sequence[float]) -> Iterator[list[Line]]:
    """Give lines that meet in a bridge, each of so many Mbit/s both ways.

    A process of each line runs ``inside`` of a namespace of its own.

    Raises:
        BenchmarkError: the system does not let us.
    """
    if why := hindrance():
        raise BenchmarkError(why)
    # The kernel takes its time to remove the last ones.
    name = f"sw{os.getpid() % 10_000}{next(_letters)}"
    spaces = [
        (f"{name}-{number}", f"10.77.{number // 250}.{number % 250 + 1}")
        for number in range(len(rates))
    ]
    try:
        call(f"ip link add {name} type bridge")
        call(f"ip link set {name} up")
        for number, (space, address) in enumerate(spaces):
            mbit = rates[number]
            line = f"root handle 1: tbf rate {mbit}mbit burst 64k latency {_QUEUE_MS}ms"
            port = f"{name}v{number}"
            for command in (
                f"ip netns add {space}",
                f"ip link add {port} type veth peer name eth0 netns {space}",
                f"ip link set {port} master {name}",
                f"ip link set {port} up",
                f"ip -n {space} addr add {address}/16 dev eth0",
                f"ip -n {space} link set eth0 up",
                f"ip -n {space} link set lo up",
                f"ip netns exec {space} tc qdisc add dev eth0 {line}",
                f"tc qdisc add dev {port} {line}",
            ):
                done = call(command)
                if done.returncode:
                    raise BenchmarkError(f"{command}: {done.stderr.strip()}")
        yield [
            Line(address, inside=("ip", "netns", "exec", space))
            for space, address in spaces
        ]
    finally:
        for space, _ in spaces:
            call(f"ip netns del {space}")
        call(f"ip link del {name}")


def call(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of words without quotes; return how it ended."""
    return subprocess.run(
        command.split(), capture_output=True, text=True, timeout=_PATIENCE, check=False
    )


@contextmanager
def distant(delay: float, *, loss: float = 0.0, rate: str = "") -> Iterator[Line]:
    """Give a line with a delay in seconds, one way, and a share of lost packets.

    With a rate, as ``tc`` writes it, the line has that rate both ways.

    Raises:
        BenchmarkError: the system does not let us.
    """
    from tests.support.network import Link
    from tests.support.shortages import FaultUnavailableError

    ready, over = threading.Event(), asyncio.Event()
    found: list[Link | Exception] = []

    async def carry() -> None:
        try:
            how: dict[str, Any] = {"offload": True, "mtu": _MTU} if rate else {}
            async with Link(delay=delay, loss=loss, **how) as link:
                found.append(link)
                ready.set()
                await over.wait()
        except FaultUnavailableError as error:
            found.append(error)
        ready.set()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(carry(),))
    thread.start()
    try:
        ready.wait()
        (link,) = found
        if isinstance(link, Exception):
            raise BenchmarkError(str(link))
        for end in (link.near, link.far) if rate else ():
            with end.entered():
                command = f"tc qdisc add dev tun0 root tbf rate {rate} {_BUCKET}"
                if (done := call(command)).returncode:
                    raise BenchmarkError(f"{command}: {done.stderr.strip()}")
        yield Line(link.near_address, link.near.entered, link.far.entered)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()
