"""Options for networks that are not your own, and where a receiver may connect.

Metadata comes from another process, so whoever can write it can name any address that
this host reaches. A receiver looks a name up once, checks the result, and connects to
that result. So the name cannot become another address in between.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from aiohttp import DefaultResolver
from aiohttp.abc import AbstractResolver, ResolveResult

from aiockpt.errors import LocalProtocolError

__all__ = ["Address", "CheckedResolver", "Network", "Reach", "Security"]

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_SHORTEST_KEY: Final = 16
_NAME: Final = re.compile(r"[A-Za-z0-9._*-]{1,253}")


_SERVICES: Final = frozenset(
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
"""Where clouds hand out the credentials of a host to any process on it."""

_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Options of a transport for networks that are not its own.

    Attributes:
        manifest_key: A key that both ends know, 16 bytes or more. The sender proves
            with it that a manifest is its own. The receiver accepts no other manifest:
            it raises ``ForgedManifestError`` before it fetches any data. The key tells
            one job from another that answers at the same address. Against an attacker
            who can change the data on its way, use TLS too.
        peers: The only hosts that a receive connects to: networks such as
            ``"10.0.0.0/8"``, addresses, and names, in which ``*`` stands for anything.
            None: any host that the metadata names, except addresses of cloud metadata
            services, multicast addresses, and link-local addresses that the metadata
            does not spell out.
    """

    manifest_key: str | bytes | None = field(default=None, repr=False)
    peers: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.key is not None and len(self.key) < _SHORTEST_KEY:
            raise ValueError(f"manifest_key needs {_SHORTEST_KEY} bytes or more")
        if isinstance(self.peers, str):
            raise TypeError(
                f"peers must be a list of hosts, got the text {self.peers!r}"
            )
        for each in self.peers or ():
            if network_of(each) is None and _NAME.fullmatch(each) is None:
                raise ValueError(f"peers: {each!r} is no network, address or host name")

    @property
    def key(self) -> bytes | None:
        """The manifest key as bytes."""
        given = self.manifest_key
        return given.encode() if isinstance(given, str) else given

    def names(self, host: str) -> bool:
        """Whether ``peers`` has the name of a host."""
        patterns = [each for each in self.peers or () if network_of(each) is None]
        name = host.rstrip(".").lower()
        return any(fnmatch.fnmatchcase(name, each.lower()) for each in patterns)

    def holds(self, address: Address) -> bool:
        """Whether ``peers`` has an address, by itself or in a network."""
        networks = map(network_of, self.peers or ())
        return any(each is not None and address in each for each in networks)


def network_of(text: str) -> Network | None:
    """Return the network, or the network of one address, that a text is."""
    try:
        return ipaddress.ip_network(text.strip("[]"), strict=False)
    except ValueError:
        return None


class Reach:
    """Decides to which hosts and addresses a receiver connects."""

    def __init__(self, security: Security) -> None:
        self._security = security

    def check_host(self, host: str) -> None:
        """Check the host of a URL, if it is an address.

        Raises:
            LocalProtocolError: no receiver connects there.
        """
        with suppress(ValueError):
            address = _plain(ipaddress.ip_address(host.partition("%")[0]))
            if fault := self.fault_of(host, address, spelled_out=True):
                raise _refusal(host, fault)

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
            raise _refusal(host, faults[0] or "")
        return allowed

    def _fault_of(self, host: str, text: str) -> str | None:
        address = ipaddress.ip_address(text.partition("%")[0])
        return self._reach.fault_of(host, _plain(address))

    async def close(self) -> None:
        """Close the resolver."""
        await self._resolver.close()


def _plain(address: Address) -> Address:
    """Return the IPv4 address that stands inside of an IPv6 one."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or address
    return address


def _refusal(host: str, fault: str) -> LocalProtocolError:
    """Return the error for a host that a receiver must not connect to."""
    return LocalProtocolError(
        f"the metadata leads to {host[:100]!r}, and {fault}; a receiver does not "
        "connect there unless Security(peers=...) has it"
    )
