"""Emulated hosts: each is a network namespace with a veth pair into the emulator's namespace.

Runs inside an emulator's process, which has one thread. Does not need root: a process that may not
make network namespaces first makes a user namespace. The hosts live as long as the descriptors of
this process, so they need no cleaning up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from edgetrain.errors import NetworkError
from edgetrain.fleet.networks.congestion import available
from edgetrain.fleet.networks.emulation import linux
from edgetrain.fleet.networks.emulation.netlink import Netlink, Wire

NETWORK, PREFIX = "10.77.0.0", 16
MTU = 1500
#: The largest super-packet of a host: it fits one slot of the emulator's receive ring.
GSO_BYTES = 32_000
#: All hosts have the same MAC, without ARP: a frame can go to any host unchanged.
MAC = bytes.fromhex("020000000001")
INTERFACE = "eth0"
_RUNNING_S, _PAUSE_S = 5.0, 0.01
_SETTINGS = Path("/proc/sys/net/ipv4")


@dataclass(frozen=True, slots=True)
class Host:
    number: int
    address: str
    namespace: int  # descriptor
    inode: int
    port: str  # name of its veth in the emulator's namespace


@dataclass(frozen=True, slots=True)
class HostTcp:
    """The TCP of one host. Zero means "as the kernel has it"."""

    restarts: bool = True
    """Whether it starts slowly after a pause."""
    first_window: int = 0
    """Segments that it begins with."""
    receive_kb: float = 0.0
    """Its first receive buffer."""

    @classmethod
    def of(cls, sent: Sequence[Mapping[str, Any]], received: Sequence[Mapping[str, Any]]) -> Self:
        """Of a host that sends and receives over these directions: the least that they say."""
        return cls(
            any(way["slow_start_after_idle"] for way in sent),
            min((way["first_window"] for way in sent), default=0),
            min((way["receive_kb"] for way in received), default=0.0),
        )

    def apply(self) -> None:
        """Set this namespace. Raises NetworkError if it may not be set."""
        if not self.restarts:
            _set("tcp_slow_start_after_idle", "0", "slow_start_after_idle = false")
        if self.receive_kb:
            least, _, most = (_SETTINGS / "tcp_rmem").read_text("ascii").split()
            _set("tcp_rmem", f"{least} {self.receive_kb * 1000:.0f} {most}", "receive_kb")


_WIRE = Wire(MAC, MTU, GSO_BYTES)


def address_of(number: int) -> str:
    return f"10.77.{(number + 1) >> 8}.{(number + 1) & 255}"


def become_able() -> str:
    """Get the right to make network namespaces; return a phrase that says how."""
    try:
        linux.unshare(linux.CLONE_NEWNET)
    except PermissionError:
        pass
    else:
        return "as root"
    uid, gid = os.geteuid(), os.getegid()
    try:
        linux.unshare(linux.CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny", "ascii")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1", "ascii")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1", "ascii")
        linux.unshare(linux.CLONE_NEWNET)
    except OSError as error:
        raise NetworkError(f"no network namespaces here: {error.strerror}", _why_not()) from None
    return "in a user namespace, without root"


def _why_not() -> str:
    """Return the setting that forbids user namespaces, if it is known."""
    settings = {
        "/proc/sys/kernel/unprivileged_userns_clone": "0",
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1",
        "/proc/sys/user/max_user_namespaces": "0",
    }
    for name, forbids in settings.items():
        with contextlib.suppress(OSError):
            if Path(name).read_text("ascii").strip() == forbids:
                return f"{name} is {forbids}: ask the administrator, or use backend 'stream'"
    return "a container may forbid unshare: use backend 'stream', or allow user namespaces"


def build_for(config: Mapping[str, Any], wire: Wire = _WIRE) -> list[Host]:
    """Make the lead's host, each member's and those of other hubs, as `build`. A member's TCP is as
    its link says, a hub's as all links of members do."""
    ups, downs = ([link[way] for link in config["links"]] for way in ("up", "down"))
    members = [HostTcp.of([up], [down]) for up, down in zip(ups, downs, strict=True)]
    hubs = [HostTcp.of(downs, ups)] * len(config["hubs"])
    each = [hubs[0], *members, *hubs[1:]]
    return build(len(each), str(config["congestion"]), wire, each)


def build(
    count: int, congestion: str, wire: Wire = _WIRE, each: Sequence[HostTcp] = ()
) -> list[Host]:
    """Make `count` hosts; stay in the emulator's namespace. Call `become_able` before. `each`: the
    TCP of each; (): as the kernel has it."""
    each = each or [HostTcp()] * count
    hosts: list[Host] = []
    links: list[Netlink] = []
    for number in range(count):
        linux.unshare(linux.CLONE_NEWNET)
        descriptor = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        inode = os.fstat(descriptor).st_ino
        hosts.append(Host(number, address_of(number), descriptor, inode, f"h{number}"))
        links.append(Netlink())
        with contextlib.suppress(OSError):  # no metrics of earlier connections: runs are alike
            (_SETTINGS / "tcp_no_metrics_save").write_text("1", "ascii")
        each[number].apply()
    linux.unshare(linux.CLONE_NEWNET)
    core = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    own = Netlink()
    own.up("lo", 1)
    for host in hosts:
        own.add_veth(host.port, INTERFACE, host.namespace, wire)
        own.up(host.port, socket.if_nametoindex(host.port), arp=False)
    own.close()
    for host, link in zip(hosts, links, strict=True):
        linux.setns(host.namespace, linux.CLONE_NEWNET)
        first_window = each[host.number].first_window
        index = socket.if_nametoindex(INTERFACE)
        link.up("lo", 1)
        link.up(INTERFACE, index, arp=False)
        link.add_address(index, host.address, PREFIX)
        try:
            link.add_route(NETWORK, PREFIX, index, host.address, congestion, first_window)
        except OSError as error:
            raise NetworkError(
                f"congestion control '{congestion}' cannot be pinned: {error}",
                f"this kernel has: {' '.join(available())}",
            ) from None
    linux.setns(core, linux.CLONE_NEWNET)
    os.close(core)
    wait_until_running(links)
    for link in links:
        link.close()
    return hosts


def wait_until_running(
    links: Sequence[Netlink],
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Return when the kernel calls the interface of each host running.

    It looks at links that came up once a second. Until then they carry packets, but programs that
    ask for the state of the interface, such as a hub, see it down.
    """
    until = clock() + _RUNNING_S
    while not all(link.is_running(INTERFACE) for link in links):
        if clock() > until:
            raise NetworkError(f"the emulated links do not run after {_RUNNING_S:g} s")
        pause(_PAUSE_S)


def _set(name: str, value: str, key: str) -> None:
    """Set TCP in this namespace, as a key of the profile says."""
    try:
        (_SETTINGS / name).write_text(value, "ascii")
    except OSError as error:
        raise NetworkError(
            f"{key} cannot be emulated here: {error.strerror}",
            "leave it out of the network profile, or use backend 'stream'",
        ) from None


def hosts_to_json(hosts: list[Host]) -> list[dict[str, Any]]:
    """Return what the parent needs to enter the hosts: addresses, descriptors, inodes."""
    return [{"address": h.address, "fd": h.namespace, "inode": h.inode} for h in hosts]


def end_inhabitants(hosts: list[Host]) -> None:
    """Kill all processes that are still in one of these hosts.

    For an emulator whose parent was killed, and for processes that a lab's commands left behind:
    they are about to lose their network, and no other process would end them.
    """
    spaces = {host.inode for host in hosts}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if (entry / "ns/net").stat().st_ino in spaces:
                os.kill(int(entry.name), signal.SIGKILL)
