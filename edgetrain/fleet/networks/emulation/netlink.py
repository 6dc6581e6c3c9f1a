"""The requests of rtnetlink that emulated hosts need, without the `ip` program.

A Netlink socket acts in the network namespace in which it was opened, even if the process moves to
another one. Layouts are from linux/rtnetlink.h, linux/if_link.h and linux/veth.h.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass

_RTM_NEWLINK, _RTM_NEWADDR, _RTM_NEWROUTE = 16, 20, 24
_REQUEST, _ACK, _EXCLUSIVE, _CREATE = 0x1, 0x4, 0x200, 0x400
_NLMSG_ERROR = 2
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_TXQLEN = 1, 3, 4, 13
_IFLA_LINKINFO, _IFLA_NET_NS_FD, _IFLA_GSO_MAX_SEGS, _IFLA_GSO_MAX_SIZE = 18, 28, 40, 41
_INFO_KIND, _INFO_DATA, _VETH_PEER = 1, 2, 1
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_IFA_F_NOPREFIXROUTE = 0x200
_RTA_DST, _RTA_OIF, _RTA_PREFSRC, _RTA_METRICS = 1, 4, 7, 8
_RTAX_INITCWND, _RTAX_CC_ALGO = 11, 16
_IFF_UP, _IFF_RUNNING, _IFF_NOARP = 0x1, 0x40, 0x80
_SIOCGIFFLAGS = 0x8913
_TABLE_MAIN, _PROTOCOL_STATIC, _SCOPE_LINK, _TYPE_UNICAST = 254, 4, 253, 1


def _attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return struct.pack("HH", length, kind) + value + bytes(-length % 4)


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode() + b"\0")


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack("I", value))


@dataclass(frozen=True, slots=True)
class Wire:
    """The settings of both ends of a veth pair."""

    mac: bytes
    mtu: int
    gso_bytes: int
    gso_segments: int = 0  # 0: the kernel's own limit


class Netlink(socket.socket):
    """One rtnetlink socket. Each request waits for its answer; OSError names what failed."""

    def __init__(self) -> None:
        super().__init__(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self.bind((0, 0))
        self._serial = 0

    def _request(self, kind: int, flags: int, payload: bytes, what: str) -> None:
        self._serial += 1
        size = 16 + len(payload)
        head = struct.pack("IHHII", size, kind, _REQUEST | _ACK | flags, self._serial, 0)
        self.send(head + payload)
        answer = self.recv(65536)
        _, answer_kind, _, _, _, code = struct.unpack_from("IHHIIi", answer)
        if answer_kind == _NLMSG_ERROR and code:
            raise OSError(-code, f"{what}: {os.strerror(-code)}")

    def add_veth(self, name: str, peer: str, peer_namespace: int, wire: Wire) -> None:
        """Add a pair: `name` here, `peer` in the namespace of the descriptor, with the same MAC."""
        common = _number(_IFLA_MTU, wire.mtu) + _number(_IFLA_TXQLEN, 10_000)
        common += _number(_IFLA_GSO_MAX_SIZE, wire.gso_bytes) + _attribute(_IFLA_ADDRESS, wire.mac)
        if wire.gso_segments:
            common += _number(_IFLA_GSO_MAX_SEGS, wire.gso_segments)
        other = struct.pack("BxHiII", 0, 0, 0, 0, 0) + _text(_IFLA_IFNAME, peer) + common
        other += _number(_IFLA_NET_NS_FD, peer_namespace)
        info = _text(_INFO_KIND, "veth")
        info += _attribute(_INFO_DATA, _attribute(_VETH_PEER, other))
        payload = struct.pack("BxHiII", 0, 0, 0, 0, 0) + _text(_IFLA_IFNAME, name) + common
        payload += _attribute(_IFLA_LINKINFO, info)
        self._request(_RTM_NEWLINK, _CREATE | _EXCLUSIVE, payload, f"creating veth {name}")

    def up(self, name: str, index: int, arp: bool = True) -> None:
        flags = _IFF_UP | (0 if arp else _IFF_NOARP)
        payload = struct.pack("BxHiII", 0, 0, index, flags, _IFF_UP | _IFF_NOARP)
        self._request(_RTM_NEWLINK, 0, payload, f"bringing {name} up")

    def is_running(self, name: str) -> bool:
        """Whether the kernel calls an interface running, which may come a second after `up`."""
        asked = struct.pack("16s24x", name.encode())
        (flags,) = struct.unpack_from("H", fcntl.ioctl(self, _SIOCGIFFLAGS, asked), 16)
        return bool(flags & _IFF_RUNNING)

    def add_address(self, index: int, address: str, prefix: int) -> None:
        packed = ipaddress.IPv4Address(address).packed
        payload = struct.pack("BBBBI", socket.AF_INET, prefix, 0, 0, index)
        payload += _attribute(_IFA_LOCAL, packed) + _attribute(_IFA_ADDRESS, packed)
        payload += _number(_IFA_FLAGS, _IFA_F_NOPREFIXROUTE)
        self._request(_RTM_NEWADDR, _CREATE | _EXCLUSIVE, payload, f"adding address {address}")

    def add_route(
        self,
        network: str,
        prefix: int,
        index: int,
        source: str = "",
        congestion: str = "",
        first_window: int = 0,
    ) -> None:
        """Add a route; `congestion` sets the algorithm of all connections that use it, and
        `first_window` the segments that they begin with (0: as the kernel does)."""
        head = (_TABLE_MAIN, _PROTOCOL_STATIC, _SCOPE_LINK, _TYPE_UNICAST)
        payload = struct.pack("BBBBBBBBI", socket.AF_INET, prefix, 0, 0, *head, 0)
        payload += _attribute(_RTA_DST, ipaddress.IPv4Address(network).packed)
        payload += _number(_RTA_OIF, index)
        if source:
            payload += _attribute(_RTA_PREFSRC, ipaddress.IPv4Address(source).packed)
        metrics = _text(_RTAX_CC_ALGO, congestion) if congestion else b""
        metrics += _number(_RTAX_INITCWND, first_window) if first_window else b""
        if metrics:
            payload += _attribute(_RTA_METRICS, metrics)
        self._request(_RTM_NEWROUTE, _CREATE | _EXCLUSIVE, payload, f"route to {network}/{prefix}")
