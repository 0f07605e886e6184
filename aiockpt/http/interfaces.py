"""Network interfaces: their names, their addresses, and who is named by a pattern.

The standard library lists interfaces but not their addresses; Linux tells IPv4
addresses by an ``ioctl`` and IPv6 addresses in ``/proc``. Elsewhere no address is
found, and the callers say so.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

if sys.platform == "linux":
    import fcntl

__all__ = ["address_of", "first_address", "matching", "named_by", "names"]

_SIOCGIFADDR = 0x8915  # Linux, <linux/sockios.h>
_IF_INET6 = Path("/proc/net/if_inet6")
_VARIABLES = {  # variable -> whether a name without "=" is a prefix, as in NCCL
    "AIOCKPT_IFNAME": False,
    "GLOO_SOCKET_IFNAME": False,
    "NCCL_SOCKET_IFNAME": True,
}


def names() -> list[str]:
    """Return the names of this host's network interfaces."""
    with suppress(OSError):
        return [name for _, name in socket.if_nameindex()]
    return []


def address_of(interface: str) -> str | None:
    """Return an interface's address, IPv4 before IPv6, or None.

    Link-local addresses do not count: a peer would need the name of its own interface
    to use one.
    """
    return _ipv4_of(interface) or _ipv6_of(interface)


def first_address() -> str | None:
    """Return the first address that is not loopback, or None."""
    for name in names():
        address = address_of(name)
        if address is not None and not ipaddress.ip_address(address).is_loopback:
            return address
    return None


def named_by(env: Mapping[str, str]) -> dict[str, list[str]]:
    """Return, for each variable that is set, the interfaces that it names."""
    present = names()
    return {
        variable: matching(env[variable], present, prefix=prefix)
        for variable, prefix in _VARIABLES.items()
        if env.get(variable)
    }


def matching(pattern: str, present: Sequence[str], *, prefix: bool) -> list[str]:
    """Return the names in ``present`` that ``pattern`` selects.

    The syntax is NCCL's: names after commas, a leading ``^`` selects all others, a
    leading ``=`` demands whole names. Without it a name is a prefix if ``prefix``.
    What is selected by name comes in the order of the pattern, what ``^`` leaves in
    the order of the host without loopback.
    """
    negate = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    prefix = prefix and not pattern.startswith("=")
    wanted = [name.strip() for name in pattern.removeprefix("=").split(",")]

    def fits(name: str, want: str) -> bool:
        return bool(want) and (name.startswith(want) if prefix else name == want)

    if negate:
        rest = [name for name in present if not any(fits(name, w) for w in wanted)]
        return [name for name in rest if name != "lo"]
    chosen = [name for want in wanted for name in present if fits(name, want)]
    return list(dict.fromkeys(chosen))


def _ipv4_of(interface: str) -> str | None:
    if sys.platform != "linux" or len(interface.encode()) > 15:
        return None
    request = struct.pack("256s", interface.encode())
    with (
        suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        return socket.inet_ntoa(answer[20:24])
    return None


def _ipv6_of(interface: str) -> str | None:
    with suppress(OSError):
        for line in _IF_INET6.read_text().splitlines():
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if name == interface and not address.is_link_local:
                return str(address)
    return None
