"""Where to listen, and which address to tell the peers.

The two questions are apart: a server listens on every interface by default, yet a
peer needs one address that it can reach. The order of the answers is: what the user
says, the network interface that the user (or the collective library's environment)
names, the address that the server is bound to, the address that the kernel would
send from, loopback. The host's *name* is never used: in containers it often does
not resolve, and on hosts with several networks it picks the slow one.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from aiockpt.errors import LocalProtocolError
from aiockpt.http import interfaces
from aiockpt.http.forks import close_in_forks
from aiockpt.http.protocol import url_fault
from aiockpt.http.sockets import begin_classic

__all__ = [
    "BACKLOG",
    "Addresses",
    "addresses_of",
    "advertised_address",
    "check_advertised",
    "check_public_path",
    "look_up",
    "open_sockets",
    "url_host",
]

BACKLOG = 512
"""Connections that the kernel may hold for us; a fleet of receivers comes at once."""

# Addresses of documentation networks (RFC 5737, RFC 3849): routed like any other,
# and a UDP connect to them sends nothing.
_FAR = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
_WILDCARDS = frozenset({"", "0.0.0.0", "::", "*"})  # noqa: S104 - compared, not bound
_NO_IPV6 = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT}

_LOCALHOST = ("127.0.0.1", "::1")

Addresses: TypeAlias = Sequence[tuple[socket.AddressFamily, tuple[Any, ...]]]
"""Socket addresses with their families; their ports mean nothing."""

_VARIABLE = re.compile(r"\{[^{}]*\}")  # of a prefix, for aiohttp to fill in

logger = logging.getLogger("aiockpt")


def addresses_of(host: str | None) -> Addresses | None:
    """Return the addresses to listen on; None if the name service has to be asked."""
    if host is None or host in _WILDCARDS - {"0.0.0.0"}:  # noqa: S104 - compared
        return ()
    literals = _LOCALHOST if host == "localhost" else (host.strip("[]"),)
    try:
        return [each for one in literals for each in _found(one, literal=True)]
    except socket.gaierror:
        return None


def look_up(host: str, port: int) -> Addresses:
    """Return the addresses of a name. It may block for long; for threads.

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
        addresses = look_up(host, port)
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
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=flags)
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


def advertised_address(
    *,
    advertise: str | None,
    interface: str | None,
    host: str | None,
    env: Mapping[str, str],
) -> str:
    """Return the host text (an IP literal wherever possible) to tell the peers.

    Args:
        advertise: What the user wants told; returned as it is.
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
        or interfaces.first_address()
        or "127.0.0.1"
    )


def url_host(address: str) -> str:
    """Return an address as it stands in a URL: IPv6 literals in brackets."""
    with suppress(ValueError):
        if ipaddress.ip_address(address.partition("%")[0]).version == 6:
            return f"[{address}]"
    return address


def check_advertised(advertise: str) -> None:
    """Raise ``LocalProtocolError`` for what is neither a host nor a URL."""
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
    pattern = "[^/]+".join(map(re.escape, _VARIABLE.split(base)))
    if not re.search(f"{pattern}$", urlsplit(advertise).path.rstrip("/")):
        logger.warning(
            "advertise=%r does not end with the prefix %r of the routes: receivers "
            "get a 404, unless a proxy changes the path",
            advertise,
            base,
        )


def _address_of(interface: str) -> str:
    address = interfaces.address_of(interface)
    if address is None:
        known = ", ".join(interfaces.names()) or "none"
        raise LocalProtocolError(
            f"network interface {interface!r} does not exist or has no address "
            f"(interfaces here: {known}); pass advertise= instead"
        )
    return address


def _address_by_environment(env: Mapping[str, str]) -> str | None:
    for variable, candidates in interfaces.named_by(env).items():
        for name in candidates:
            address = interfaces.address_of(name)
            if address is not None:
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
