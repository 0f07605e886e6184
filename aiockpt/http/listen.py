"""Where to listen, and which address to tell the receivers.

These are two questions: a server listens on every interface by default, but a
receiver needs one address that it can reach. The first of these answers wins: what
the user says, the network interface that the user (or the collective library's
environment) names, the address that the server is bound to, the address that the
kernel would send from, loopback. The host's *name* is never used. In containers it
often does not resolve, and on hosts with several networks it picks the slow one.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import re
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from aiockpt.errors import ClosedError, LocalProtocolError
from aiockpt.http.options import Server
from aiockpt.http.protocol import url_fault
from aiockpt.http.sockets import begin_classic
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.children import close_in_forks

if sys.platform == "linux":
    import fcntl

logger = logging.getLogger("aiockpt")

PREFIX: Final = "/checkpoint"
"""The path of the checkpoints on a server of our own."""

VARIABLE: Final = re.compile(r"\{[^{}]*\}")
"""A part of a prefix that aiohttp fills in, such as ``{run}``."""

BACKLOG: Final = 512
"""Connections that the kernel may hold for us; a fleet of receivers comes at once."""

# Addresses of documentation networks (RFC 5737, RFC 3849): they are routed like any
# other, and a UDP connect to them sends nothing.
_FAR: Final = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
_WILDCARDS: Final = frozenset({"", "0.0.0.0", "::", "*"})  # noqa: S104 - compared, not bound
_NO_IPV6: Final = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT}
_LOCALHOST: Final = ("127.0.0.1", "::1")

_SIOCGIFADDR: Final = 0x8915  # Linux, <linux/sockios.h>
_IF_INET6: Final = Path("/proc/net/if_inet6")
_INTERFACE_VARIABLES: Final = {  # -> whether a name without "=" is a prefix, as in NCCL
    "AIOCKPT_IFNAME": False,
    "GLOO_SOCKET_IFNAME": False,
    "NCCL_SOCKET_IFNAME": True,
}

Addresses: TypeAlias = Sequence[tuple[socket.AddressFamily, tuple[Any, ...]]]
"""Socket addresses with their families; their ports mean nothing."""


class Endpoint:
    """Where a transport listens, and its URL. It is bound when it is first needed.

    Args:
        options: Where to listen.
        advertise: The host to tell the receivers, or the whole URL.
        tls: Whether it speaks TLS.

    Raises:
        LocalProtocolError: ``advertise`` is neither a host nor a URL.
    """

    def __init__(self, options: Server, *, advertise: str | None, tls: bool) -> None:
        if advertise:
            check_advertised(advertise)
        self.is_mounted = False
        self._options, self._advertise, self._tls = options, advertise, tls
        self._port = options.port
        self._sockets: list[socket.socket] = []
        self._found: Addresses | None = None
        self._closed = False

    def url(self) -> str:
        """Return the base URL, without the token.

        Raises:
            ClosedError: after :meth:`refuse`.
            LocalProtocolError: the transport is mounted and was not told its URL, or
                the interface does not exist, or a name has to be looked up, which
                would block the event loop.
            OSError: the address cannot be bound.
        """
        self.check()
        if self._advertise and "://" in self._advertise:
            return self._advertise.rstrip("/") + "/"
        if self.is_mounted:
            raise LocalProtocolError(
                "mounted in an application, the transport does not know its address: "
                'pass the whole URL, advertise="https://host/prefix/"'
            )
        self.listen()
        host = advertised_address(
            advertise=self._advertise,
            interface=self._options.interface,
            host=self._options.host,
            env=os.environ,
        )
        scheme = "https" if self._tls else "http"
        return f"{scheme}://{url_host(host)}:{self._port}{PREFIX}/"

    def hosts(self) -> frozenset[str]:
        """Return the host name that the receivers were told, if any."""
        told = self._advertise or ""
        name = urlsplit(told).hostname if "://" in told else told
        return frozenset({name} if name else ())

    def check(self) -> None:
        """Raise ``ClosedError`` after :meth:`refuse`."""
        if self._closed:
            raise ClosedError("the transport")

    async def prepare(self, bridge: Bridge) -> None:
        """Prepare to listen: check the interface, and resolve the host in a thread.

        Sockets on which a dead server process accepts no more are closed, so that the
        next :meth:`listen` binds the same address again.

        Raises:
            LocalProtocolError: the interface does not exist or has no address.
            OSError: the host's name is unknown.
        """
        if self._options.interface and not self._advertise:
            _address_of(self._options.interface)
        if not all(map(_accepts, self._sockets)):
            self.close()
        host = self._options.host
        if host is None or self.is_mounted or self._sockets or self._found is not None:
            return
        self._found = addresses_of(host)
        if self._found is None:  # not in the bridge's threads: it may take a minute
            self._found = await bridge.run_apart(_look_up, host, self._port)

    def listen(self) -> list[socket.socket]:
        """Return the sockets, which listen.

        Raises:
            LocalProtocolError: a name has to be looked up, and this is an event loop.
            OSError: the address cannot be bound.
        """
        if not self._sockets:
            host = self._options.host
            if self._found is None and addresses_of(host) is None and _in_loop():
                raise LocalProtocolError(
                    f"host={host!r} is a name, and looking it up could block the "
                    "event loop: await the transport's start() first, or pass an "
                    "address"
                )
            check_public_path(self._advertise, PREFIX)
            self._sockets = open_sockets(host, self._port, self._found)
            self._port = self._sockets[0].getsockname()[1]
        return self._sockets

    def mount(self, prefix: str) -> None:
        """Close the sockets: the application that mounts the transport has its own."""
        check_public_path(self._advertise, prefix)
        self.is_mounted = True
        self.close()

    def refuse(self) -> None:
        """Refuse every use from now on; the sockets stay as they are."""
        self._closed = True

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            each.close()


def _accepts(sock: socket.socket) -> bool:
    with suppress(OSError):  # in a forked child it points nowhere
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return True


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# ---------------------------------------------------------------- listening


def addresses_of(host: str | None) -> Addresses | None:
    """Return the addresses to listen on; None if the name service has to be asked."""
    if host is None or host in _WILDCARDS - {"0.0.0.0"}:  # noqa: S104 - compared
        return ()
    literals = _LOCALHOST if host == "localhost" else (host.strip("[]"),)
    try:
        return [each for one in literals for each in _found(one, literal=True)]
    except socket.gaierror:
        return None


def _look_up(host: str, port: int) -> Addresses:
    """Return the addresses of a name. It may block for long; runs in a thread.

    Raises:
        OSError: there is no such name; the text names it, and the port.
    """
    with _naming(host, port):
        return _found(host, literal=False)


def open_sockets(
    host: str | None, port: int, addresses: Addresses | None = None
) -> list[socket.socket]:
    """Listen on ``host`` and ``port`` (0: any free one) and return the sockets.

    ``None`` and the wildcards mean every interface, IPv6 and IPv4 on one port. A name
    is looked up unless its ``addresses`` are given. A forked child closes its copies,
    so that a peer is refused at once, and does not hang, when the parent is gone.

    Raises:
        ValueError: the port is out of range.
        OSError: the address is taken, unknown or not ours; the text names it.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be between 0 and 65535, got {port}")
    if addresses is None:
        addresses = addresses_of(host)
    if addresses is None and host is not None:
        addresses = _look_up(host, port)
    with _naming(host, port):
        sockets = _listen(addresses, port) if addresses else _listen_everywhere(port)
    close_in_forks(sockets)
    for each in sockets:
        begin_classic(each)
    return sockets


@contextmanager
def _naming(host: str | None, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f"{host or '*'}:{port}"
        text = f"cannot listen on {where}: {error.strerror or error}"
        raise OSError(error.errno, text) from error


def _found(host: str, *, literal: bool) -> Addresses:
    flags = socket.AI_NUMERICHOST if literal else 0
    # For a text, Python would load its codec "idna", on the event loop.
    name = host.encode() if literal else host
    found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys((info[0], info[4]) for info in found))


def _listen_everywhere(port: int) -> list[socket.socket]:
    if socket.has_dualstack_ipv6():
        try:
            return [
                socket.create_server(
                    ("", port),
                    family=socket.AF_INET6,
                    backlog=BACKLOG,
                    dualstack_ipv6=True,
                )
            ]
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise
    return [socket.create_server(("", port), backlog=BACKLOG)]


def _listen(addresses: Addresses, port: int) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    for family, address in addresses:
        target = (str(address[0]), port, *address[2:])
        try:
            sock = socket.create_server(target, family=family, backlog=BACKLOG)
        except OSError as error:
            absent = family == socket.AF_INET6 and error.errno in _NO_IPV6
            if absent and len(addresses) > 1:
                continue  # a name such as localhost, on a host without IPv6
            for each in sockets:
                each.close()
            raise
        sockets.append(sock)
        # All addresses of one name share the port that the first one got.
        port = sock.getsockname()[1]
    return sockets


# -------------------------------------------------- the address to advertise


def advertised_address(
    *,
    advertise: str | None,
    interface: str | None,
    host: str | None,
    env: Mapping[str, str],
) -> str:
    """Return the host text (an IP literal wherever possible) to tell the peers.

    Args:
        advertise: The host that the user wants to advertise; returned as it is.
        interface: A network interface whose address to tell.
        host: What the server is bound to.
        env: The environment, for ``AIOCKPT_IFNAME``, ``GLOO_SOCKET_IFNAME`` and
            ``NCCL_SOCKET_IFNAME`` in this order.

    Raises:
        LocalProtocolError: ``interface`` does not exist or has no address.
    """
    if advertise:
        return advertise.strip("[]")
    if interface:
        return _address_of(interface)
    if host is not None and host not in _WILDCARDS:
        return "127.0.0.1" if host == "localhost" else host.strip("[]")
    only_ipv4 = host == "0.0.0.0"  # noqa: S104 - compared, not bound
    return (
        _address_by_environment(env)
        or _address_of_default_route(only_ipv4=only_ipv4)
        or _first_address()
        or "127.0.0.1"
    )


def url_host(address: str) -> str:
    """Return an address as it stands in a URL: IPv6 literals in brackets."""
    with suppress(ValueError):
        if ipaddress.ip_address(address.partition("%")[0]).version == 6:
            return f"[{address}]"
    return address


def check_advertised(advertise: str) -> None:
    """Raise ``LocalProtocolError`` unless this is a host or a whole URL."""
    scheme, mark, _ = advertise.partition("://")
    host = url_host(advertise.strip("[]"))
    if mark and scheme in ("http", "https"):
        url = advertise
    elif "/" in host or (":" in host and not host.startswith("[")):
        raise LocalProtocolError(
            f"advertise={advertise!r} is neither a host name or an IP address, nor a "
            "whole URL, which begins with http:// or https://"
        )
    else:
        url = f"http://{host}/"
    if fault := "it contains a '#'" if "#" in url else url_fault(url):
        raise LocalProtocolError(
            f"advertise={advertise!r} is no address for receivers: {fault}"
        )


def check_public_path(advertise: str | None, prefix: str) -> None:
    """Warn of a public URL whose path does not end with the prefix of the routes.

    A proxy may change the path, so it is no error.
    """
    base = prefix.rstrip("/")
    if not advertise or "://" not in advertise or not base:
        return
    pattern = "[^/]+".join(map(re.escape, VARIABLE.split(base)))
    if not re.search(f"{pattern}$", urlsplit(advertise).path.rstrip("/")):
        logger.warning(
            "advertise=%r does not end with the prefix %r of the routes: receivers "
            "get a 404, unless a proxy changes the path",
            advertise,
            base,
        )


def _address_of(interface: str) -> str:
    address = interface_address(interface)
    if address is None:
        known = ", ".join(interface_names()) or "none"
        raise LocalProtocolError(
            f"network interface {interface!r} does not exist or has no address "
            f"(interfaces here: {known}); pass advertise= instead"
        )
    return address


def _address_by_environment(env: Mapping[str, str]) -> str | None:
    present = interface_names()
    for variable, prefix in _INTERFACE_VARIABLES.items():
        if not env.get(variable):
            continue
        for name in interfaces_matching(env[variable], present, prefix=prefix):
            if (address := interface_address(name)) is not None:
                return address
        logger.warning(
            "%s=%s names no network interface with an address; ignored",
            variable,
            env[variable],
        )
    return None


def _address_of_default_route(*, only_ipv4: bool) -> str | None:
    for family, far in _FAR[: 1 if only_ipv4 else 2]:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            address = str(probe.getsockname()[0])
            if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
                return address
    return None


# ------------------------------------------------------- network interfaces
#
# The standard library lists interfaces but not their addresses. Linux tells IPv4
# addresses by an ioctl and IPv6 addresses in /proc. Elsewhere no address is found.


def interface_names() -> list[str]:
    """Return the names of this host's network interfaces."""
    with suppress(OSError):
        return [name for _, name in socket.if_nameindex()]
    return []


def interface_address(interface: str) -> str | None:
    """Return an interface's address, IPv4 before IPv6, or None.

    Link-local addresses do not count: a peer would need the name of its own interface
    to use one.
    """
    return _ipv4_of(interface) or _ipv6_of(interface)


def _first_address() -> str | None:
    """Return the first address that is not loopback, or None."""
    for name in interface_names():
        address = interface_address(name)
        if address is not None and not ipaddress.ip_address(address).is_loopback:
            return address
    return None


def interfaces_matching(
    pattern: str, present: Sequence[str], *, prefix: bool
) -> list[str]:
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
