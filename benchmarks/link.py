"""A slow line between two processes of this machine: two ends of a virtual cable.

The receiving end is in a network namespace of its own, and the sending end lets no more
than the rate out (a token bucket). It needs root, and the programs `ip` and `tc`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from benchmarks.measures import BenchmarkError

__all__ = ["Link", "hindrance"]

_ADDRESSES: Final = ("10.213.{0}.1", "10.213.{0}.2")
_PATIENCE: Final = 20.0
_numbers = itertools.count(10 * os.getpid())  # so that one process may have several


def hindrance() -> str:
    """Return why this process cannot have a line; empty if it may."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"a line needs {' and '.join(missing)}, of the package iproute2"
    return "" if os.geteuid() == 0 else "a line needs root, for a network namespace"


class Link:
    """The line, while the ``with`` block lasts.

    Args:
        rate: As ``tc`` writes it: ``1gbit``.

    Attributes:
        address: Where the sender listens.
        inside: What runs a command at the receiving end.
    """

    def __init__(self, rate: str) -> None:
        number = next(_numbers)
        self._rate = rate
        self._near, self._far = f"ckpt{number}a", f"ckpt{number}b"
        self._space = f"aiockpt-{number}"
        self.address, self._there = (each.format(number % 256) for each in _ADDRESSES)
        self.inside: Sequence[str] = ("ip", "netns", "exec", self._space)

    def __repr__(self) -> str:
        return f"<Link {self._rate} {self.address}>"

    def __enter__(self) -> Self:
        try:
            self._lay()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _lay(self) -> None:
        near, far, space = self._near, self._far, self._space
        _run(f"ip netns add {space}")
        _run(f"ip link add {near} type veth peer name {far} netns {space}")
        _run(f"ip addr add {self.address}/30 dev {near}")
        _run(f"ip link set {near} up")
        _run(f"ip -n {space} addr add {self._there}/30 dev {far}")
        _run(f"ip -n {space} link set {far} up")
        bucket = f"tbf rate {self._rate} burst 4m latency 50ms"
        _run(f"tc qdisc add dev {near} root {bucket}")

    def _remove(self) -> None:
        for command in (f"ip link del {self._near}", f"ip netns del {self._space}"):
            _call(command)


def _run(command: str) -> None:
    done = _call(command)
    if done.returncode:
        raise BenchmarkError(f"{command}: {done.stderr.strip()}")


def _call(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command.split(), capture_output=True, text=True, timeout=_PATIENCE, check=False
    )
