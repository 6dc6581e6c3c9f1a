"""Interfaces: names that lead nowhere are said before anything waits."""

from __future__ import annotations

import socket
import time

import pytest
from patience import patience

from edgetrain.errors import ConfigError, HubUnreachable, NetworkError
from edgetrain.exchange import addresses
from edgetrain.exchange.addresses import (
    Interface,
    check_hub_name,
    check_reachable,
    interfaces,
    is_local_name,
    listen_on,
    resolve,
    route,
    wait_to_listen,
)
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.exchange.zeromq.member_socket import MemberSocket

LAN = Interface("eth0", "192.168.1.17", True)
WIFI = Interface("wlan0", "10.0.0.5", True)
DOWN = Interface("eth1", "172.16.0.1", False)
SIX = Interface("eth0", "2001:db8::17", True)
LOOP = Interface("lo", "127.0.0.1", True)


@pytest.fixture
def machine(monkeypatch):
    """A machine with these interfaces, and names that mean what is set."""
    monkeypatch.setattr(f"{listen_on.__module__}.interfaces", lambda: [LAN, WIFI, DOWN, SIX, LOOP])
    states = {i.name: i.up for i in (LAN, WIFI, DOWN, LOOP)} | {"eth2": True}
    monkeypatch.setattr(f"{listen_on.__module__}.interface_states", lambda: states)
    names = {"pi": ["127.0.1.1"], "hub.lan": ["192.168.1.17"], "far.lan": ["192.168.1.99"],
             "both": ["127.0.1.1", "192.168.1.17"], "six.lan": ["2001:db8::17", "192.168.1.17"],
             "localhost": ["127.0.0.1"]}  # fmt: skip

    def getaddrinfo(host, port, **kwargs):
        if host in names:
            found = names[host]
        elif host[0].isdigit() or ":" in host:
            found = [host]
        else:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 0))
            for a in found
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_where_the_system_does_not_say_what_is_up_addresses_are_taken_for_up(monkeypatch):
    def refuse():
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(addresses.psutil, "net_if_stats", refuse)
    assert addresses.interface_states() == {}
    assert all(interface.up for interface in addresses.interfaces())


def test_this_machine_has_interfaces_loopback_last():
    found = interfaces()
    assert "127.0.0.1" in {i.address for i in found}
    assert [i.loopback for i in found] == sorted(i.loopback for i in found)
    assert all("%" not in i.address for i in found)


def test_debians_own_name_is_seen_through(machine):
    with pytest.raises(
        NetworkError, match=r"'pi' leads only to 127\.0\.1\.1.*/etc/hosts"
    ) as caught:
        check_hub_name("pi")
    assert "localhost if you mean it" in str(caught.value)
    with pytest.raises(NetworkError, match="leads only to"):
        route("tcp://pi:5555", 1.0)
    with pytest.raises(NetworkError, match="leads only to"):
        listen_on("pi", 5555)


def test_a_link_local_address_needs_its_interface(monkeypatch):
    for ask in (lambda: route("tcp://[fe80::1]:5555", 1.0), lambda: listen_on("fe80::1", 5555)):
        with pytest.raises(NetworkError, match=r"tcp://\[fe80::1%eth0\]:5555") as caught:
            ask()
        assert not caught.value.passing
    monkeypatch.setattr(addresses, "resolve", lambda host: ["fe80::1"])
    assert check_hub_name("fe80::1%eth0") == ["fe80::1"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "hub.lan", "both"])
def test_names_that_lead_somewhere_or_say_this_machine_are_fine(machine, host):
    assert check_hub_name(host)


def test_ipv4_comes_first(machine):
    assert resolve("six.lan") == ["192.168.1.17", "2001:db8::17"]


@pytest.mark.parametrize("host", ["no-such-host", "hub.lna"])
def test_a_name_nobody_knows(machine, host):
    with pytest.raises(NetworkError, match=f"'{host}' cannot be resolved.*spelling"):
        check_hub_name(host)


@pytest.mark.parametrize("host", ["x" * 300, "a..b"])
def test_what_is_no_name_at_all(host):
    with pytest.raises(NetworkError, match="cannot be resolved"):
        resolve(host)


def test_local_names():
    assert is_local_name("localhost")
    assert is_local_name("::1")
    assert not is_local_name("192.168.1.17")
    assert not is_local_name("pi")


@pytest.mark.parametrize("host", ["*", "::"])
def test_listening_on_all(machine, host):
    found = listen_on(host, 5555)
    assert found.bind == "tcp://*:5555"
    assert found.reachable == (LAN, WIFI, SIX, LOOP)
    assert not found.local


def test_listening_on_all_without_ipv6(machine):
    found = listen_on("0.0.0.0", 5555)
    assert found.bind == "tcp://0.0.0.0:5555"
    assert found.reachable == (LAN, WIFI, LOOP)


SIX_WORKS = any(interface.address == "::1" for interface in interfaces())


@pytest.mark.real
@pytest.mark.parametrize(
    ("host", "addresses"),
    [("*", ["127.0.0.1", "[::1]"]), ("::", ["127.0.0.1", "[::1]"]), ("0.0.0.0", ["127.0.0.1"])],
)
def test_a_hub_on_all_interfaces_hears_members_over_each_address(host, addresses):
    """On a machine without IPv6, over those of IPv4."""
    hub = HubSocket(listen_on(host, 0).bind)
    heard = []
    for address in addresses if SIX_WORKS else addresses[:1]:
        member = MemberSocket(f"tcp://{address}:{hub.port}")
        member.send([address.encode()])
        until = time.monotonic() + patience(10)
        while [address.encode()] not in heard and time.monotonic() < until:
            heard += [frames for _, frames in hub.poll(0.05)]
        assert heard[-1] == [address.encode()]
        assert check_reachable(f"tcp://{address}:{hub.port}", 1.0)
        member.close()
    hub.close()


@pytest.mark.parametrize(
    ("host", "bind", "first"),
    [
        ("wlan0", "tcp://10.0.0.5:7", WIFI),
        ("eth0", "tcp://192.168.1.17:7", LAN),
        ("hub.lan", "tcp://192.168.1.17:7", LAN),
        ("10.0.0.5", "tcp://10.0.0.5:7", WIFI),
        ("2001:db8::17", "tcp://[2001:db8::17]:7", SIX),
        ("both", "tcp://192.168.1.17:7", LAN),
    ],
)
def test_listening_on_an_interface_a_name_an_address(machine, host, bind, first):
    found = listen_on(host, 7)
    assert (found.bind, found.reachable[0], found.local) == (bind, first, False)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "lo"])
def test_listening_on_this_machine_only(machine, host):
    found = listen_on(host, 0)
    assert found.local
    assert found.bind.startswith("tcp://127.0.")


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("eth1", "the interface eth1 is down"),
        ("172.16.0.1", "the interface eth1, which has 172.16.0.1, is down"),
        ("eth2", "the interface eth2 has no address"),
    ],
)
def test_an_interface_that_is_down_is_said_to_be_down(machine, host, said):
    with pytest.raises(NetworkError, match=said) as caught:
        listen_on(host, 5555)
    assert caught.value.passing


@pytest.mark.parametrize("host", ["eth1", "172.16.0.1"])
def test_a_hub_waits_some_seconds_for_an_interface_that_is_down(machine, monkeypatch, host):
    now, said = [0.0], []

    def pause(seconds):
        now[0] += seconds
        if now[0] > comes_up_s:
            up = Interface("eth1", "172.16.0.1", True)
            monkeypatch.setattr(addresses, "interfaces", lambda: [LAN, up, LOOP])

    comes_up_s = 3.0
    found = wait_to_listen(host, 7, pause, lambda: now[0], said.append)
    assert found.bind == "tcp://172.16.0.1:7"
    (line,) = said
    assert "is down; trying for 8 s" in line
    monkeypatch.setattr(addresses, "interfaces", lambda: [LAN, DOWN, LOOP])
    now[0], comes_up_s = 0.0, 1000.0
    with pytest.raises(NetworkError, match="is down"):
        wait_to_listen(host, 7, pause, lambda: now[0])
    assert 3.0 < now[0] <= addresses.INTERFACE_S


@pytest.mark.parametrize("host", ["far.lan", "8.8.8.8"])
def test_an_address_that_is_not_ours_lists_those_that_are(machine, host):
    with pytest.raises(NetworkError, match=r"not an address of this machine.*eth0 192\.168\.1\.17"):
        listen_on(host, 5555)


@pytest.mark.parametrize("port", [-1, 65536])
def test_ports_out_of_range(port):
    with pytest.raises(ConfigError, match=f"port {port}: allowed are 0 .* to 65535"):
        listen_on("*", port)


def test_the_way_to_the_hub_is_named():
    hub = HubSocket("tcp://127.0.0.1:0")
    via = route(hub.address, 5.0)
    hub.close()
    assert via.endswith(" 127.0.0.1")
    with pytest.raises(HubUnreachable, match="nothing listens"):
        route(hub.address, 5.0)
