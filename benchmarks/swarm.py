"""One sender and many receivers, each in a network namespace with a slow line.

``python -m benchmarks.swarm 2 8 16`` receives a state dict with one receiver first, and
then with so many at once. Each line of its output has, for one number of receivers:

* ``last``, ``median``: how many times as long as the single receiver they took, each
  from its own start;
* ``apart``: the same of those that begin late or have a slower line;
* ``egress``: how many copies left the sender, and ``hub``: the most from one receiver;
* ``cpu``: the receivers' processor time, divided by what it costs to receive and to
  send as many bytes without a swarm;
* ``memory``: MiB that a receiver needed beside the state dict.

``--star`` leaves out the swarm, and ``--rival`` runs libtorrent instead: from one file
to others, with all peers known to all. The rate should leave the processor idle,
because the bytes of all receivers pass through it twice.

Needs Linux, root and iproute2; see `benchmarks.lines`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from aiockpt import HTTPTransport, Swarm
from benchmarks import torrent
from benchmarks.lines import bridged, call, hindrance

_libc = ctypes.CDLL(None, use_errno=True)
_TENSORS: Final = 8
_TIMEOUT: Final = 600.0
_HALF: Final = 0.5  # of one receive, after which some are killed


def main() -> None:
    """Measure, and print a line of JSON per number of receivers."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("receivers", nargs="+", type=int)
    add("--rate", type=float, default=25.0, help="Mbit/s of each line")
    add("--mib", type=int, default=128, help="size of the state dict")
    add("--chunks", type=int, default=512)
    add("--star", action="store_true", help="without a swarm")
    add("--rival", action="store_true", help="libtorrent, with pieces for chunks")
    add("--late", type=float, help="of one receive: one begins later")
    add("--slow", type=float, help="of the rate: one has so much only")
    add("--killed", type=float, default=0.0, help="part that others replace half way")
    add("--cut", action="store_true", help="half way, both halves lose each other")
    given = parser.parse_args()
    if why := hindrance() or (torrent.hindrance() if given.rival else ""):
        sys.exit(why)
    case = _Case(given.mib << 20, given.chunks, given.rate, star=True)
    single = _measure(1, case)
    one = single.seconds[0]
    _write({"receivers": 1, "seconds": round(one, 2), "memory": _mib(single.memory)})
    case.one, case.star, case.rival = one, given.star, given.rival
    case.late, case.slow, case.killed = given.late, given.slow, given.killed
    case.cut = given.cut
    for count in given.receivers:
        _write(_summary(_measure(count, case), single))


def _write(facts: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


@dataclass
class _Case:
    """What is measured; ``one`` is how many seconds one receive takes."""

    nbytes: int
    chunks: int
    rate: float
    star: bool = False
    rival: bool = False
    late: float | None = None
    slow: float | None = None
    killed: float = 0.0
    cut: bool = False
    one: float = 0.0

    @property
    def chunk_bytes(self) -> int:
        """Return how large a chunk is."""
        return max(self.nbytes // self.chunks // 64 * 64, 64 << 10)


@dataclass
class _Found:
    """What was measured: a figure per receiver that lived, and those of the sender.

    Bytes are given as parts of the state dict. ``egress`` is what the sender had sent
    when all receivers but those apart had everything.
    """

    seconds: list[float]
    apart: list[float]
    sent: list[float]
    egress: float
    cpu: float
    cpu_of_sender: float
    memory: int
    requests: int


def _summary(found: _Found, single: _Found) -> dict[str, Any]:
    one, times = single.seconds[0], sorted(found.seconds)
    copies = len(times) + len(found.apart)
    cpu = copies * single.cpu + sum(found.sent) * single.cpu_of_sender
    return {
        "receivers": copies,
        "last": round(times[-1] / one, 3),
        "median": round(times[len(times) // 2] / one, 3),
        "apart": [round(each / one, 3) for each in found.apart],
        "egress": round(found.egress, 3),
        "hub": round(max(found.sent), 3),
        "cpu": round(found.cpu / cpu, 3),
        "cpu seconds": round(found.cpu, 1),
        "memory": _mib(found.memory),
        "requests of the sender": found.requests,
    }


def _mib(nbytes: int) -> float:
    return round(nbytes / (1 << 20), 1)


def _measure(count: int, case: _Case) -> _Found:
    joining = round(count * case.killed)
    send, receive = _send, _receive
    if case.rival:
        send, receive = torrent.send, torrent.receive
    rates = [case.rate] * (count + joining + 1)
    rates[1] *= 1 if case.slow is None else case.slow
    with bridged(rates) as lines:
        spaces = [(line.inside[-1], line.address) for line in lines]
        hosts = [Host(space) for space in spaces]
        try:
            hosts[0].run(lambda host: send(host, case.nbytes, case.chunk_bytes))
            metadata = hosts[0].hear()["metadata"]
            for host in hosts[1:]:
                host.run(lambda host: receive(host, case.nbytes, star=case.star))
                host.hear()
            said = {"metadata": metadata, "hosts": [host.address for host in hosts]}
            starts = [0.0] * count + [_HALF * case.one] * joining
            if case.late is not None and count > 1:
                starts[-1] = case.late * case.one
            began = time.monotonic()
            for start, host in zip(starts, hosts[1:], strict=True):
                if (left := began + start - time.monotonic()) > 0:
                    time.sleep(left)
                    for victim in hosts[1 : joining + 1]:
                        victim.kill()
                host.say(said)
            if case.cut:
                time.sleep(max(began + _HALF * case.one - time.monotonic(), 0.0))
                half = len(hosts) // 2 + 1
                _separate(spaces[1:half], spaces[half:])
            return _results(hosts[0], hosts[joining + 1 :], case)
        finally:
            for host in hosts:
                host.kill()


def _results(sender: Host, receivers: list[Host], case: _Case) -> _Found:
    """Wait until all have received, and end them."""
    apart, plain = [], list(receivers)
    if case.slow is not None:
        apart.append(plain.pop(0))
    if case.late is not None and len(plain) > 1:
        apart.append(plain.pop())
    received = [host.hear() for host in plain]
    sender.say({"end": False})
    then = sender.hear()
    others = [host.hear() for host in apart]
    if not all(each["right"] for each in received + others):
        sys.exit("wrong bytes arrived")
    for host in receivers:
        host.say({"end": True})
    ends = [host.hear() for host in receivers]
    sender.say({"end": True})
    of_sender = sender.hear()
    return _Found(
        seconds=[each["seconds"] for each in received],
        apart=[each["seconds"] for each in others],
        sent=[each["sent"] / case.nbytes for each in ends],
        egress=then["sent"] / case.nbytes,
        cpu=sum(each["cpu"] for each in received + others + ends),
        cpu_of_sender=of_sender["cpu"],
        memory=max(each["memory"] for each in received + others + ends),
        requests=then["requests"],
    )


def _separate(one: list[tuple[str, str]], other: list[tuple[str, str]]) -> None:
    """Lose all packets from one side to the other, without a word to anybody."""
    for space, _ in one:
        for _, address in other:
            call(f"ip -n {space} route add blackhole {address}/32")


class Host:
    """A forked process in a namespace, which runs a coroutine and talks JSON."""

    def __init__(self, space: tuple[str, str]) -> None:
        self._space, self.address = space
        self.pid = 0

    def run(self, run: Callable[[Host], Any]) -> None:
        """Start the process."""
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
            _enter(self._space)
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
        """End the process. Idempotent."""
        if not self.pid:
            return
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pid = 0


def _enter(space: str) -> None:
    # os.setns is new in Python 3.12.
    fd = os.open(f"/var/run/netns/{space}", os.O_RDONLY)
    if _libc.setns(fd, 0):
        raise OSError(ctypes.get_errno(), f"cannot enter the namespace {space}")
    os.close(fd)


def _tensors(nbytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    count = nbytes // 8 // _TENSORS
    return ((f"w{n}", torch.arange(count) + n * 1_000_003) for n in range(_TENSORS))


class _Costs:
    """The processor time and the memory of this process, from now on."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        self._memory, self._began = _status("VmRSS"), time.process_time()

    def so_far(self) -> dict[str, Any]:
        """Return the processor seconds and the peak of the bytes."""
        peak = _status("VmHWM") - self._memory
        return {"cpu": time.process_time() - self._began, "memory": peak}


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise LookupError(name)


async def _send(host: Host, nbytes: int, chunk_bytes: int) -> None:
    async with HTTPTransport[Any](chunk_bytes=chunk_bytes) as transport:
        await transport.send_checkpoint(step=1, state_dict=dict(_tensors(nbytes)))
        costs = _Costs()
        host.say({"metadata": transport.metadata()})
        ends = False
        while not ends:
            ends = (await host.heard())["end"]
            now = transport.statistics()
            found = {"sent": now.bytes_sent, "requests": now.requests}
            host.say(found | costs.so_far())


async def _receive(host: Host, nbytes: int, *, star: bool) -> None:
    swarm = None if star else Swarm(linger=_TIMEOUT)
    async with HTTPTransport[Any](_TIMEOUT, swarm=swarm, same_host=False) as transport:
        host.say({})
        metadata = (await host.heard())["metadata"]
        costs, began = _Costs(), time.monotonic()
        got = await transport.recv_checkpoint(metadata=metadata, step=1)
        found = {"seconds": time.monotonic() - began} | costs.so_far()
        found["memory"] -= nbytes
        right = all(torch.equal(got[name], w) for name, w in _tensors(nbytes))
        costs = _Costs()
        host.say(found | {"right": right})
        await host.heard()
        host.say({"sent": transport.statistics().bytes_sent} | costs.so_far())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
