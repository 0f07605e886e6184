"""What a transport trusts beyond its token: one frozen record."""

from __future__ import annotations

import fnmatch
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["Address", "Network", "Security"]

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_SHORTEST_KEY = 16
_NAME = re.compile(r"[A-Za-z0-9._*-]{1,253}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Options of a transport for networks that are not its own.

    Attributes:
        manifest_key: A key of both ends, 16 bytes or more. The sender proves with
            it that a manifest is its own, and the receiver takes no other one:
            ``ForgedManifestError`` comes before any of the data. It tells one job
            from another that answers at the same address; against somebody who can
            change what travels it needs TLS beside it.
        peers: The only hosts that a receive connects to: networks such as
            ``"10.0.0.0/8"``, addresses, and names, in which ``*`` stands for anything.
            None: whatever the metadata names, but for addresses of cloud metadata
            services, multicast, and link-local ones that the metadata does not
            spell out.
    """

    manifest_key: str | bytes | None = field(default=None, repr=False)
    peers: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.key is not None and len(self.key) < _SHORTEST_KEY:
            raise ValueError(f"manifest_key needs {_SHORTEST_KEY} bytes or more")
        if isinstance(self.peers, str):
            raise TypeError("peers must be a list of hosts, got a text")
        for each in self.peers or ():
            if network_of(each) is None and _NAME.fullmatch(each) is None:
                raise ValueError(f"peers: {each!r} is no network, address or name")

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
