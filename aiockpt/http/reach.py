"""Where a receiver connects to: what it was told, and not what that may lead to.

Metadata comes from another process, so whoever can write it can name any address that
this host reaches. A name is looked up once, and what was looked up is what is checked
and connected to, so it cannot become another address in between.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

from aiohttp import DefaultResolver
from aiohttp.abc import AbstractResolver, ResolveResult

from aiockpt.errors import LocalProtocolError
from aiockpt.http.security import Address, Security

__all__ = ["CheckedResolver", "Reach"]

_SERVICES = frozenset(
    map(
        ipaddress.ip_address,
        (
            "169.254.169.254",  # most clouds
            "169.254.170.2",  # credentials of containers
            "169.254.170.23",
            "169.254.0.23",
            "168.63.129.16",
            "100.100.100.200",
            "192.0.0.192",
            "fd00:ec2::254",
            "fd00:ec2::23",
            "fd20:ce::254",
        ),
    )
)
"""Where clouds hand the credentials of a host to whoever asks from it."""

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class Reach:
    """Decides about hosts and addresses."""

    def __init__(self, security: Security) -> None:
        self._security = security

    def check_host(self, host: str) -> None:
        """Check what stands in a URL, where it is an address.

        Raises:
            LocalProtocolError: no receiver connects there.
        """
        with suppress(ValueError):
            address = _plain(ipaddress.ip_address(host.partition("%")[0]))
            if fault := self.fault_of(host, address, spelled_out=True):
                raise refusal(host, fault)

    def fault_of(
        self, host: str, address: Address, *, spelled_out: bool = False
    ) -> str | None:
        """Return why ``address``, which ``host`` leads to, is not for a receiver."""
        security = self._security
        if security.holds(address):
            return None
        if security.peers is not None and not security.names(host):
            return f"{address} is none of the peers that are allowed"
        if address in _SERVICES:
            return f"{address} is where clouds keep a host's credentials"
        if address.is_multicast:
            return f"{address} is a multicast address"
        if address.is_link_local and not spelled_out:
            return f"{address} is link-local, and the metadata does not spell it out"
        return None


class CheckedResolver(AbstractResolver):
    """Looks names up, and gives only addresses that a receiver may connect to."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._resolver = DefaultResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a name.

        Raises:
            LocalProtocolError: it has some, and none is allowed.
        """
        found = await self._resolver.resolve(host, port, family)
        faults = [self._fault_of(host, each["host"]) for each in found]
        allowed = [
            each for each, fault in zip(found, faults, strict=True) if fault is None
        ]
        if found and not allowed:
            raise refusal(host, faults[0] or "")
        return allowed

    def _fault_of(self, host: str, text: str) -> str | None:
        address = ipaddress.ip_address(text.partition("%")[0])
        return self._reach.fault_of(host, _plain(address))

    async def close(self) -> None:
        """Close what looks up."""
        await self._resolver.close()


def _plain(address: Address) -> Address:
    """Return the IPv4 address that stands inside of an IPv6 one."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or address
    return address


def refusal(host: str, fault: str) -> LocalProtocolError:
    """Return the error that says so."""
    return LocalProtocolError(
        f"the metadata leads to {host[:100]!r}, and {fault}; a receiver does not "
        "connect there unless Security(peers=...) has it"
    )
