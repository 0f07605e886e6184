"""Where a server listens, and which address it tells its peers."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

import pytest

from aiockpt.errors import LocalProtocolError
from aiockpt.http import listen
from aiockpt.http.listen import (
    advertised_address,
    check_advertised,
    interface_address,
    interfaces_matching,
    open_sockets,
    url_host,
)

pytestmark = [pytest.mark.torch_free, pytest.mark.usefixtures("no_blocking")]


@pytest.fixture
def opened():
    """Open sockets that are closed after the test."""
    every: list[socket.socket] = []

    def open_them(host: str | None, port: int = 0) -> list[socket.socket]:
        every.extend(found := open_sockets(host, port))
        return found

    yield open_them
    for sock in every:
        sock.close()


def port_of(sockets: list[socket.socket]) -> int:
    """Return the port that was chosen."""
    return sockets[0].getsockname()[1]


def reachable(host: str, port: int) -> bool:
    """Whether a peer would get through."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", [None, "", "::", "*"])
def test_everywhere_means_both_families_on_one_port(opened, host):
    """A peer may come by IPv4 or by IPv6."""
    port = port_of(opened(host))
    assert reachable("127.0.0.1", port)
    if socket.has_dualstack_ipv6():
        assert reachable("::1", port)


def test_everywhere_works_without_ipv6(opened, monkeypatch):
    """Hosts where IPv6 is switched off are served by IPv4."""
    create = socket.create_server

    def without_ipv6(address, *, family=socket.AF_INET, **options):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported")
        return create(address, family=family, **options)

    monkeypatch.setattr(socket, "create_server", without_ipv6)
    assert reachable("127.0.0.1", port_of(opened(None)))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_host_is_listened_on(opened, host):
    """An address or a name works; all addresses of a name get the same port."""
    sockets = opened(host)
    assert len({sock.getsockname()[1] for sock in sockets}) == 1
    assert not any(sock.get_inheritable() for sock in sockets)
    assert reachable("127.0.0.1", port_of(sockets))


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_may_stand_in_brackets(opened, host):
    """Brackets are accepted as in a URL, also in ``advertise``."""
    if not socket.has_ipv6:
        pytest.skip("this host has no IPv6")
    assert reachable("::1", port_of(opened(host)))


def test_a_taken_port_is_named(opened):
    """The message says which address, and what is the matter."""
    port = port_of(opened("127.0.0.1"))
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}") as caught:
        open_sockets("127.0.0.1", port)
    assert caught.value.errno == errno.EADDRINUSE


def test_an_address_that_is_not_ours_is_named():
    """The error names the address, or the host that does not exist."""
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:0"):
        open_sockets("192.0.2.1", 0)
    with pytest.raises(OSError, match=r"cannot listen on no-such-host\.invalid:0"):
        open_sockets("no-such-host.invalid", 0)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_is_refused(port):
    """The port is refused before anything is opened."""
    with pytest.raises(ValueError, match="between 0 and 65535"):
        open_sockets(None, port)


@pytest.mark.parametrize(
    ("pattern", "prefix", "chosen"),
    [("eth0", False, ["eth0"]), ("eth", False, []), ("eth", True, ["eth0", "eth1"]),
     ("=eth", True, []), ("=eth1", True, ["eth1"]), ("wlan", True, []), ("", True, []),
     ("ib,eth", True, ["ib0", "eth0", "eth1"]), ("ib0, eth1", False, ["ib0", "eth1"]),
     ("eth0,eth", True, ["eth0", "eth1"]), ("^eth", True, ["ib0", "docker0"]),
     ("^docker,eth", True, ["ib0"]), ("^=eth0", True, ["eth1", "ib0", "docker0"])],
)  # fmt: skip
def test_interface_patterns_have_nccls_syntax(pattern, prefix, chosen):
    """What selects a network for the collectives selects it for checkpoints."""
    present = ["lo", "eth0", "eth1", "ib0", "docker0"]
    assert interfaces_matching(pattern, present, prefix=prefix) == chosen


@pytest.fixture
def network(monkeypatch):
    """A host with two networks and a default route through one of them."""
    addresses = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "192.168.7.5"}
    monkeypatch.setattr(listen, "interface_names", lambda: [*addresses, "down0"])
    monkeypatch.setattr(listen, "interface_address", addresses.get)
    monkeypatch.setattr(
        "aiockpt.http.listen._address_of_default_route", lambda **_: "10.0.0.5"
    )


def advertised(**given: Any) -> str:
    """Return the address that is advertised when only this is given."""
    nothing: dict[str, Any] = {"advertise": None, "interface": None, "host": None}
    return advertised_address(**(nothing | {"env": {}} | given))


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("given", "address"),
    [
        ({"advertise": "head.example", "interface": "ib0"}, "head.example"),
        ({"advertise": "[::5]"}, "::5"),
        ({"interface": "ib0", "host": "10.0.0.5"}, "192.168.7.5"),
        ({"host": "192.168.7.5", "env": {"AIOCKPT_IFNAME": "eth0"}}, "192.168.7.5"),
        ({"host": "localhost"}, "127.0.0.1"),
        (
            {"env": {"AIOCKPT_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth0"}},
            "192.168.7.5",
        ),
        ({"env": {"GLOO_SOCKET_IFNAME": "ib0"}}, "192.168.7.5"),
        ({"env": {"NCCL_SOCKET_IFNAME": "ib"}}, "192.168.7.5"),
        ({"env": {"NCCL_SOCKET_IFNAME": "^lo,eth"}}, "192.168.7.5"),
        ({"host": "0.0.0.0", "env": {"NCCL_SOCKET_IFNAME": "=ib0"}}, "192.168.7.5"),
        ({"env": {}}, "10.0.0.5"),
        ({"host": "::"}, "10.0.0.5"),
    ],
)
def test_the_advertised_address_is_the_most_explicit_one(given, address):
    """The order is: the option, the interface, the binding, the route."""
    assert advertised(**given) == address


@pytest.mark.usefixtures("network")
def test_an_interface_that_does_not_exist_is_an_error():
    """The user asked for it, so nothing else is chosen; the message lists what is."""
    with pytest.raises(LocalProtocolError, match=r"'ib7'.*lo, eth0, ib0") as caught:
        advertised(interface="ib7")
    assert "advertise=" in str(caught.value)


@pytest.mark.parametrize("text", ["ftp://host", "host:80", "host/path", "1.2.3.4:5"])
def test_an_advertised_address_is_a_host_or_a_whole_url(text):
    """Nothing in between; the message says so."""
    with pytest.raises(LocalProtocolError, match="host name or an IP address"):
        check_advertised(text)


@pytest.mark.usefixtures("network")
def test_an_environment_that_names_nothing_is_ignored_with_a_warning(caplog):
    """The variable was meant for the collectives; a wrong guess must not be fatal."""
    env = {"GLOO_SOCKET_IFNAME": "ib7,down0"}
    assert advertised(env=env) == "10.0.0.5"
    assert "GLOO_SOCKET_IFNAME=ib7,down0" in caplog.text


def test_this_host_has_an_address(opened):
    """Without options, the host finds an address that reaches the server."""
    port = port_of(opened(None))
    assert reachable(advertised(), port)


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="Linux only")
def test_loopback_has_its_address():
    """The addresses of the interfaces are really read."""
    assert interface_address("lo") == "127.0.0.1"
    assert interface_address("no-such-interface-with-a-long-name") is None


@pytest.mark.parametrize(
    ("address", "text"),
    [("::1", "[::1]"), ("fe80::1%eth0", "[fe80::1%eth0]"), ("10.0.0.1", "10.0.0.1"),
     ("host.example", "host.example")],
)  # fmt: skip
def test_ipv6_stands_in_brackets_in_a_url(address, text):
    """Without brackets, its colons would look like that of the port."""
    assert url_host(address) == text
