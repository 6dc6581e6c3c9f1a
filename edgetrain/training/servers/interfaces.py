"""Network interfaces: which one leads to an address, and whether one is there."""

from __future__ import annotations

import socket
import subprocess

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.exchange.addresses import interfaces


def check_interface(name: str) -> None:
    """ConfigError for an interface that this machine does not have."""
    known = [each for _, each in socket.if_nameindex()]
    if name not in known:
        raise ConfigError(
            f"{socket.gethostname()} has no network interface '{name}'",
            did_you_mean(name, known) or ", ".join(known),
        )


def address_of(interface: str) -> str:
    """The IPv4 address of an interface; "" if it has none. ConfigError if it is not there."""
    check_interface(interface)
    own = (each.address for each in interfaces() if each.name == interface)
    return next((address for address in own if ":" not in address), "")


def address_towards(host: str) -> str:
    """This machine's address on the way to a host. ConfigError for a name that nobody knows."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((host, 9))  # a datagram socket sends nothing for it
        except OSError as error:
            raise ConfigError(
                f"the host '{host}' cannot be reached: {error.strerror or error}",
                "its address or a name that this machine resolves",
            ) from None
        return str(asking.getsockname()[0])


def host_name(host: str) -> str:
    """The name or address that ssh would connect to for `host`, [USER@]HOST or an alias of
    ~/.ssh/config; without an ssh, HOST."""
    plain = host.rpartition("@")[2]
    try:
        done = subprocess.run(["ssh", "-G", "--", host], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return plain
    words = (line.split(None, 1) for line in done.stdout.splitlines())
    return next((each[1] for each in words if each[0] == "hostname" and each[1:]), plain)


def interface_towards(host: str) -> str:
    """The interface on the way to a host; "": none has that address."""
    address = address_towards(host)
    if address.startswith("127."):
        return "lo"
    return next((each.name for each in interfaces() if each.address == address), "")
