"""Addresses of hubs, and the network interfaces they use: checked before training starts.

This finds, and names, a hub that listens where no member can reach it, a host name that Debian maps
to 127.0.1.1, a name that cannot be resolved, a port where nothing listens. No message is sent.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import psutil

from edgetrain.errors import ConfigError, EdgetrainError, HubUnreachable, NetworkError, Refused

T = TypeVar("T")

ANY = ("*", "::")
"""The user's spelling of "all interfaces"."""
ANY_IPV4 = "0.0.0.0"  # noqa: S104  # only where a user asks for it
"""The same, without IPv6."""


@dataclass(frozen=True)
class Interface:
    """One address of this machine."""

    name: str
    """Name of its interface, "eth0"."""
    address: str
    up: bool

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.address).is_loopback


def interfaces() -> list[Interface]:
    """This machine's addresses; IPv4 first, loopback last."""
    states = interface_states()
    found = [
        Interface(name, entry.address.split("%")[0], states.get(name, not states))
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
        and not entry.address.startswith("fe80:")
    ]
    return sorted(found, key=lambda i: (i.loopback, ":" in i.address, i.name, i.address))


def interface_states() -> dict[str, bool]:
    """Whether each interface is up, by its name. Empty where the system does not say."""
    try:
        return {name: state.isup for name, state in psutil.net_if_stats().items()}
    except OSError:
        return {}


def _unusable(name: str, up: bool, of: str = "") -> NetworkError:
    """What is wrong with an interface that a hub is to listen on. It may pass."""
    if up:
        return NetworkError(
            f"the interface {name} has no address (yet)", "wait for DHCP, or set one", passing=True
        )
    return NetworkError(
        f"the interface {name}{of} is down",
        f"plug its cable in, join its Wi-Fi, or: ip link set {name} up",
        passing=True,
    )


def resolve(host: str) -> list[str]:
    """The IP addresses of a host name, IPv4 first. Raises NetworkError if there is none."""
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else "not a host name"
        raise NetworkError(
            f"the name '{host}' cannot be resolved: {reason}",
            "check the spelling, or use an IP address",
            passing=True,
        ) from None
    addresses = dict.fromkeys(str(answer[4][0]).split("%")[0] for answer in answers)
    return sorted(addresses, key=lambda address: ":" in address)


def is_local_name(host: str) -> bool:
    """Whether the user wrote "this machine": localhost, or a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_hub_name(host: str) -> list[str]:
    """The hub's addresses. Raises NetworkError if its name leads only back to this machine, as the
    name of a Debian machine does in its own /etc/hosts (127.0.1.1), or to no interface."""
    if host.startswith("fe80:") and "%" not in host:
        raise NetworkError(
            f"'{host}' is a link-local address, which each interface of this machine may lead to",
            f"name the interface, as in tcp://[{host}%eth0]:5555",
        )
    addresses = resolve(host)
    loopback = all(ipaddress.ip_address(address).is_loopback for address in addresses)
    if loopback and not is_local_name(host):
        raise NetworkError(
            f"the name '{host}' leads only to {', '.join(addresses)}, which is this machine itself",
            "usually a line of /etc/hosts; use the hub's IP address, or localhost if you mean it",
        )
    return addresses


def first_route(hubs: Sequence[str], timeout_s: float) -> tuple[str, str]:
    """The first of a hub's addresses that answers, and the interface over which it is reached, as
    `route` says it. Raises the error of the only address, or HubUnreachable with those of all."""
    return first_of(hubs, lambda hub: route(hub, timeout_s))


def first_of(hubs: Sequence[str], attempt: Callable[[str], T]) -> tuple[str, T]:
    """The first of a hub's addresses at which an attempt raises nothing, and what it returns.
    Raises `all_said`; a refusal by a hub that has let this machine's key in counts for all."""
    said: dict[str, EdgetrainError] = {}
    for hub in hubs:
        try:
            return hub, attempt(hub)
        except (NetworkError, Refused) as error:
            if isinstance(error, Refused) and error.code != "key":
                raise
            said[hub] = error
    raise all_said(said)


def all_said(said: Mapping[str, EdgetrainError]) -> EdgetrainError:
    """What to raise where none of a hub's addresses will do, of what each said: that of the only
    one; a Refused with all of it if all refused, otherwise a HubUnreachable."""
    first, *others = said.values()
    if not others:
        return first
    listed = "; ".join(f"{at}: {each.message}" for at, each in said.items())
    message = f"none of the hub's addresses can be used: {listed}"
    hint = next((each.hint for each in said.values() if not each.passing), first.hint)
    if isinstance(first, Refused) and all(isinstance(each, Refused) for each in others):
        return Refused(first.code, message, hint)
    return HubUnreachable(message, hint, passing=any(each.passing for each in said.values()))


LONGEST_PAUSE_S = 5.0
"""Longest pause between two attempts to reach a hub not up yet."""

INTERFACE_S = 8.0
"""Seconds that a hub waits for its interface to come up, and for its name to be resolved."""


def wait_for_route(
    hubs: Sequence[str],
    timeout_s: float,
    wait_s: float,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[str, str]:
    """As `first_route`, for a hub that may not be up yet: try for `wait_s`, and `pause` (seconds)
    in between. `say` gets a line if it is not up at once. Errors that do not pass are raised at
    once, others after `wait_s`."""
    return _repeat(lambda: first_route(hubs, timeout_s), wait_s, pause, clock, say)


def rotated(hubs: Sequence[str], first: str) -> list[str]:
    """All addresses of a hub, in their order, from the one that answered."""
    at = hubs.index(first)
    return [*hubs[at:], *hubs[:at]]


def _repeat(
    attempt: Callable[[], T],
    wait_s: float,
    pause: Callable[[float], None],
    clock: Callable[[], float],
    say: Callable[[str], None],
) -> T:
    until, pause_s = clock() + wait_s, 0.25
    while True:
        try:
            return attempt()
        except NetworkError as error:
            if not error.passing or clock() + pause_s > until:
                raise
            if pause_s == 0.25:
                say(f"{error.message}; trying for {wait_s:g} s")
        pause(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def route(hub: str, timeout_s: float) -> str:
    """The interface over which this machine reaches the hub, e.g. "wlan0 192.168.1.17". Connects
    once. Raises NetworkError, HubUnreachable."""
    check_hub_name(split_address(hub)[0])
    own = check_reachable(hub, timeout_s)
    names = {interface.address: interface.name for interface in interfaces()}
    return f"{names.get(own, '?')} {own}"


@dataclass(frozen=True)
class Listening:
    """The future listening address of a hub."""

    bind: str
    """For the transport: "tcp://IP:port", with port 0 for any free one."""
    reachable: tuple[Interface, ...]
    """Interfaces over which members can connect; the first is the one to announce."""

    @property
    def local(self) -> bool:
        """Whether only members on this machine can connect."""
        return all(interface.loopback for interface in self.reachable)


def listen_on(host: str, port: int) -> Listening:
    """Where a hub listens for `host`: a name, an address, an interface, or "*".

    Raises NetworkError if the name cannot be resolved, leads to loopback without saying so, or is
    not an address of this machine; ConfigError for a port outside 0-65535.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port {port}: allowed are 0 (any free one) to 65535")
    every = interfaces()
    mine = [interface for interface in every if interface.up]
    if host in ANY:  # libzmq listens for IPv6 and IPv4, or for IPv4 on a machine without IPv6
        return Listening(f"tcp://*:{port}", tuple(mine))
    if host == ANY_IPV4:
        return Listening(f"tcp://{host}:{port}", tuple(i for i in mine if ":" not in i.address))
    chosen = tuple(interface for interface in mine if interface.name == host)
    if not chosen and host in interface_states():
        raise _unusable(host, interface_states()[host])
    if not chosen:
        addresses = check_hub_name(host)
        chosen = tuple(interface for interface in mine if interface.address in addresses)
        # All of 127.0.0.0/8 is this machine, though only 127.0.0.1 is listed.
        loopback = [a for a in addresses if ipaddress.ip_address(a).is_loopback]
        if not chosen and loopback:
            chosen = (Interface("lo", loopback[0], True),)
        down = next((i for i in every if not i.up and i.address in addresses), None)
        if not chosen and down is not None:
            raise _unusable(down.name, up=False, of=f", which has {down.address},")
    if not chosen:
        known = ", ".join(f"{i.name} {i.address}" for i in mine)
        raise NetworkError(
            f"'{host}' is not an address of this machine",
            f"it has {known}; or listen on * (all)",
        )
    address = chosen[0].address
    shown = f"[{address}]" if ":" in address else address
    return Listening(f"tcp://{shown}:{port}", chosen)


def wait_to_listen(
    host: str,
    port: int,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda line: None,
) -> Listening:
    """As `listen_on`, for an interface that may be about to come up: try for INTERFACE_S."""
    return _repeat(lambda: listen_on(host, port), INTERFACE_S, pause, clock, say)


def any_port_of(via: str) -> str:
    """Any free port of the address under which another machine sees this one."""
    own = via.split()[-1]
    return join_address(own, 0)


def join_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "tcp://host:port". Raises NetworkError for anything else."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        raise NetworkError(f"'{address}' is not an address: {error}") from None
    if parts.scheme != "tcp" or not parts.hostname or port is None or parts.path:
        raise NetworkError(
            f"'{address}' is not an address", "write tcp://HOST:PORT, as in tcp://hub.local:5555"
        )
    return parts.hostname, port


def check_reachable(address: str, timeout_s: float) -> str:
    """Connect once without ZeroMQ, which retries silently; returns this machine's own address.
    Raises HubUnreachable, which says what failed."""
    host, port = split_address(address)
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as probe:
            return str(probe.getsockname()[0])
    except socket.gaierror as error:
        raise HubUnreachable(
            f"the hub's name '{host}' cannot be resolved: {error.strerror}",
            "check the spelling, or use the IP address that the hub printed at its start",
        ) from None
    except TimeoutError:
        raise HubUnreachable(
            f"no answer from {address} within {timeout_s:g} s",
            "is the machine on, and does a firewall let the port through?",
        ) from None
    except ConnectionRefusedError:
        raise HubUnreachable(
            f"nothing listens at {address}",
            "start the hub first (edgetrain hub job.toml), and compare the port it prints",
        ) from None
    except OSError as error:
        down = [name for name, up in sorted(interface_states().items()) if not up]
        hint = f"these interfaces are down: {', '.join(down)}" if down else ""
        raise HubUnreachable(
            f"{address} cannot be reached: {error.strerror or error}", hint
        ) from None
