"""Where a receiver may connect, in networks that are not your own.

Metadata comes from another process, so whoever can write it can name any address that
this host reaches. A receiver looks a name up once, checks the result, and connects to
that result. So the name cannot become another address in between.
"""

from __future__ import annotations

import enum
import fnmatch
import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from aiohttp import DefaultResolver
from aiohttp.abc import AbstractResolver, ResolveResult

from aiockpt.errors import AiockptError, LocalProtocolError, PeerUnreachableError

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

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

_HOST_BITS: Final = 64  # of an IPv6 address: one host cannot choose the others
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_THIS_NETWORK: Final = ipaddress.IPv4Network("0.0.0.0/8")
_NUMERIC: Final = re.compile(r"([0-9]+|0x[0-9a-f]*)", re.IGNORECASE)


class Scope(enum.Enum):
    """From where an address leads to the host that has it."""

    EVERYWHERE = "an address for everybody"
    HOST = "a loopback address"  # from the host itself
    LINK = "a link-local address"  # from the same network segment
    NOWHERE = "no address of a host"  # or one that needs the name of an interface

    def may_name(self, other: Scope) -> bool:
        """Return whether a receiver asks a host in ``other`` that a peer here named.

        The peer could otherwise make it ask services of its own host or link.
        """
        is_nowhere = other is Scope.NOWHERE
        return other is Scope.EVERYWHERE or (other is self and not is_nowhere)


def check_peers(peers: Sequence[str] | None) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless this is a list of hosts."""
    if isinstance(peers, str):
        raise TypeError(f"peers must be a list of hosts, got the text {peers!r}")
    for each in peers or ():
        if _network_of(each) is None and _NAME.fullmatch(each) is None:
            raise ValueError(f"peers: {each!r} is no network, address or host name")


def _network_of(text: str) -> Network | None:
    """Return the network, or the network of one address, that a text is."""
    try:
        return ipaddress.ip_network(text.strip("[]"), strict=False)
    except ValueError:
        return None


class Reach:
    """Decides to which hosts and addresses a receiver connects.

    Args:
        peers: The only hosts, as in `Auth`; None: any but those that are dangerous.
        within: The hosts were named by a peer in this scope. None: by the caller.
    """

    def __init__(
        self, peers: Sequence[str] | None = None, *, within: Scope | None = None
    ) -> None:
        self._within = within
        self._is_limited = peers is not None
        self._networks: list[Network] = []
        self._names: list[str] = []
        for each in peers or ():
            if (network := _network_of(each)) is not None:
                self._networks.append(network)
            else:
                self._names.append(each.lower())

    def check_host(self, host: str, *, looked_up_here: bool = True) -> None:
        """Check the host of a URL, as far as no name has to be looked up.

        Args:
            host: The host.
            looked_up_here: A `CheckedResolver` checks the addresses of a name later.
                Otherwise nothing does, and only a name on the list passes.

        Raises:
            LocalProtocolError: no receiver connects there.
            PeerUnreachableError: the same, of a host that a peer named.
        """
        fault = self._fault_of_scope(host, scope_of(host))
        if fault is None and (address := address_of(host)) is not None:
            fault = self.fault_of(host, address, spelled_out=True)
        elif not (fault or looked_up_here or self._has_name(host)) and self._is_limited:
            fault = f"{host} is none of the peers that are allowed"
        if fault is not None:
            raise self.refusal(host, fault)

    def allows(self, host: str) -> bool:
        """Return whether the list has a host that is given by name or by address."""
        address = address_of(host)
        if address is None:
            return self._has_name(host)
        return self.fault_of(host, address) is None

    def fault_of(
        self, host: str, address: Address, *, spelled_out: bool = False
    ) -> str | None:
        """Return why ``address``, which ``host`` leads to, is not for a receiver."""
        if fault := self._fault_of_scope(str(address), _scope_of_address(address)):
            return fault
        if any(address in network for network in self._networks):
            return None
        if self._is_limited and not self._has_name(host):
            return f"{address} is none of the peers that are allowed"
        if address in _SERVICES:
            return f"{address} is where clouds keep a host's credentials"
        if address.is_multicast:
            return f"{address} is a multicast address"
        if address.is_link_local and not spelled_out:
            return f"{address} is link-local, and the metadata does not spell it out"
        return None

    def _fault_of_scope(self, host: str, scope: Scope) -> str | None:
        """Return why a host that a peer named is out of that peer's scope."""
        if self._within is None or self._within.may_name(scope):
            return None
        return f"{host} is {scope.value}, and the source has none of that kind"

    def refusal(self, host: str, fault: str) -> AiockptError:
        """Return the error for a host to which a receiver must not connect."""
        if self._within is not None:
            return PeerUnreachableError(host[:100], fault)
        return LocalProtocolError(
            f"the metadata leads to {host[:100]!r}, and {fault}; a receiver does not "
            "connect there unless Auth(peers=...) has it"
        )

    def _has_name(self, host: str) -> bool:
        name = host.rstrip(".").lower()
        return any(fnmatch.fnmatchcase(name, each) for each in self._names)


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
            LocalProtocolError, PeerUnreachableError: it has some, and none is allowed.
        """
        allowed, faults = list[ResolveResult](), list[str]()
        for each in await self._resolver.resolve(host, port, family):
            address = address_of(each["host"])
            assert address is not None, "a resolver gives addresses"
            if fault := self._reach.fault_of(host, address):
                faults.append(fault)
            else:
                allowed.append(each)
        if faults and not allowed:
            raise self._reach.refusal(host, faults[0])
        return allowed

    async def close(self) -> None:
        """Close the resolver."""
        await self._resolver.close()


def address_of(text: str) -> Address | None:
    """Return the address that a text is; the IPv4 one that an IPv6 one contains."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def scope_of(host: str) -> Scope:
    """Return the scope of the host in a URL: a name, or an address.

    A name may lead to an address of another scope; `Reach` looks at that, too. An IPv6
    address of a link leads nowhere without the interface of whoever connects, and a
    peer cannot name that. A name that ends with a number is one of the short forms of
    an IPv4 address, such as ``127.1`` and ``2130706433``.
    """
    if "%" in host:
        return Scope.NOWHERE
    if (address := address_of(host)) is not None:
        return _scope_of_address(address)
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return Scope.HOST
    is_number = _NUMERIC.fullmatch(name.rpartition(".")[2])
    is_odd = not name or is_number or _NAME.fullmatch(name) is None
    return Scope.NOWHERE if is_odd else Scope.EVERYWHERE


def _scope_of_address(address: Address) -> Scope:
    if address.is_loopback:
        return Scope.HOST
    is_ipv4 = address.version == 4
    if address in _SERVICES or address.is_multicast or address.is_unspecified:
        return Scope.NOWHERE
    if is_ipv4 and (address.is_reserved or address in _THIS_NETWORK):
        return Scope.NOWHERE
    if address.is_link_local:
        return Scope.LINK if is_ipv4 else Scope.NOWHERE
    return Scope.EVERYWHERE


def plain_address(text: str) -> str:
    """Return an address without the IPv6 prefix of an IPv4 one."""
    address = address_of(text)
    return text if address is None else str(address)


def network_of(address: str) -> str:
    """Return what limits count as one host: an IPv4 address, or an IPv6 /64 network.

    A host that has one address of such a network has all of them.
    """
    found = address_of(address)
    if found is None:
        return address
    if found.version == 4:
        return str(found)
    return str(ipaddress.IPv6Network((found, _HOST_BITS), strict=False))


def voter_of(address: str) -> tuple[str, str]:
    """Return a kind of address, and what counts as one host among those of this kind.

    A host usually has an address of each kind, and nobody can tell whether addresses of
    two kinds are those of one host. So hosts are counted for each kind by itself. All
    loopback addresses are those of this host, and a host can take any number of
    addresses of a link.
    """
    found = address_of(address)
    if found is None:
        return "name", address
    scope = _scope_of_address(found)
    if scope is not Scope.EVERYWHERE:
        return scope.name, ""
    return f"IPv{found.version} {found.is_global}", network_of(address)


def endpoint(url: str) -> tuple[str, int]:
    """Return the host and the port of a URL, in one spelling."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return plain_address((parts.hostname or "").rstrip(".")), port
