"""Profiles as `tc` commands. Pure: returns argument lists, runs nothing.

The kernel's netem draws jitter per packet, unlike the smooth jitter of `stream` and `packet`: order
is kept only if a rate is set. What its words cannot say is refused: traces, correlated jitter, and
figures that it would round away.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgetrain.errors import NetworkError
from edgetrain.fleet.networks.profile import Direction, Profile

_FRAME = 1514
_UNLIMITED_PACKETS = 100_000
#: Mean and deviation of the kernel's draws for `delay 0 1`: its uniform draws lie within ±1, its
#: tables (iproute2's *.dist, which end at 4) have these.
_DRAWS = {"normal": (0.0, 1.0), "uniform": (0.0, 1 / math.sqrt(3)), "pareto": (-0.0335, 0.8197)}
_MOST_JITTER_MS = 2147  # signed 32-bit nanoseconds, and the kernel clamps without a word
_LEAST_RATE_MBIT = 0.0003  # whole bytes a second: below, rounding is more than 3 %
#: Frames that hold TCP: their `protocol`, and flower's words for a VLAN tag.
_FRAMES = (
    ("ip", ()),
    ("ipv6", ()),
    ("802.1Q", ("vlan_ethtype", "ip")),
    ("802.1Q", ("vlan_ethtype", "ipv6")),
)
#: Traffic of the job uses the fourth band, which the default priority map never uses.
_BANDS = ("bands", "4", "priomap", *"1222120011111111")


def netem(way: Direction) -> list[str]:
    """Return the arguments of one netem qdisc for one direction.

    netem's `limit` counts packets that wait for the rate and packets in flight, so it is the sum.
    Raises NetworkError for what netem would not do as the profile says.
    """
    mean, deviation = _DRAWS[way.distribution]
    jitter_ms = way.jitter_ms / deviation
    for holds, what in (
        (way.rate_trace or way.delay_trace, "plays no traces"),
        (way.jitter_ms and way.jitter_correlation, "does not correlate jitter"),
        (jitter_ms > _MOST_JITTER_MS, f"has no jitter of {way.jitter_ms:g} ms"),
        (0 < way.rate_mbit < _LEAST_RATE_MBIT, f"has no rate of {way.rate_mbit:g} Mbit/s"),
    ):
        if holds:
            raise NetworkError(f"the kernel's netem {what}", "use backend packet")
    words = ["netem", "limit", str(_limit(way))]
    if way.delay_ms or way.jitter_ms:
        words += ["delay", f"{way.delay_ms - mean * jitter_ms:g}ms"]
    if way.jitter_ms:
        words += [f"{jitter_ms:g}ms"]
        if way.distribution != "uniform":
            words += ["distribution", way.distribution]
    if way.burst:
        b = way.burst
        words += ["loss", "gemodel", *(f"{p:g}%" for p in (b.enter_percent, b.leave_percent))]
        words += [f"{b.lost_in_bad_percent:g}%", f"{b.lost_in_good_percent:g}%"]
    elif way.loss_percent:
        words += ["loss", "random", f"{way.loss_percent:g}%"]
    for key, percent in (
        ("duplicate", way.duplicate_percent),
        ("corrupt", way.corrupt_percent),
        ("reorder", way.reorder_percent),
    ):
        words += [key, f"{percent:g}%"] if percent else []
    if way.rate_mbit:
        words += ["rate", f"{way.rate_mbit * 1e6:.0f}bit"]
    return words


def _limit(way: Direction) -> int:
    if not way.rate_mbit:
        return _UNLIMITED_PACKETS
    under_way = way.rate_mbit * 1e6 / 8 * (way.delay_ms + 3 * way.jitter_ms) / 1000
    return math.ceil((way.queue_bytes + under_way) / _FRAME)


def whole(device: str, way: Direction) -> list[list[str]]:
    """Return commands that shape all traffic leaving an interface, for emulated hosts."""
    return [["tc", "qdisc", "replace", "dev", device, "root", *netem(way)]]


@dataclass(frozen=True, slots=True)
class Shaping:
    """A profile on a real interface, for TCP connections of these ports only."""

    device: str
    profile: Profile
    ports: tuple[int, ...]

    @property
    def helper(self) -> str:
        """The name of the ifb device for incoming traffic; at most 15 bytes, one per device."""
        return f"ifb{_mark(self.device)}"

    def commands(self) -> list[list[str]]:
        """Return the commands of `apply`, in order. Other traffic keeps the default bands."""
        up, down = self.profile.up, self.profile.down
        made = _banded(self.device, up, self.ports)
        if not down.is_plain:
            made += [
                ["ip", "link", "add", "name", self.helper, "type", "ifb"],
                ["ip", "link", "set", "dev", self.helper, "up"],
                ["tc", "qdisc", "replace", "dev", self.helper, "root", *netem(down)],
                ["tc", "qdisc", "add", "dev", self.device, "handle", "ffff:", "ingress"],
            ]
            redirect = ["action", "mirred", "egress", "redirect", "dev", self.helper]
            made += [
                [*words, *redirect] for words in _filters(self.device, "ffff:", "1:1", self.ports)
            ]
        return made

    def undo(self) -> list[list[str]]:
        """Return the commands that restore the interface. Some fail if `commands` was cut short."""
        return [
            ["tc", "qdisc", "del", "dev", self.device, "root"],
            ["tc", "qdisc", "del", "dev", self.device, "ingress"],
            ["ip", "link", "del", "dev", self.helper],
        ]


def _mark(device: str) -> str:
    """Return six hexadecimal digits derived from an interface's name."""
    number = 0
    for byte in device.encode():
        number = (number * 131 + byte) & 0xFFFFFF
    return f"{number:06x}"


def _banded(device: str, way: Direction, ports: Sequence[int]) -> list[list[str]]:
    if way.is_plain:
        return []
    made = [
        ["tc", "qdisc", "add", "dev", device, "root", "handle", "1:", "prio", *_BANDS],
        ["tc", "qdisc", "add", "dev", device, "parent", "1:4", "handle", "40:", *netem(way)],
    ]
    return made + _filters(device, "1:", "1:4", ports)


def _filters(device: str, parent: str, band: str, ports: Sequence[int]) -> list[list[str]]:
    """Return filters that move TCP from and to each port, of both families, to a band.

    A priority has one protocol, so each protocol has a priority.
    """
    made = []
    for port, (protocol, tag), end in itertools.product(ports, _FRAMES, ("src_port", "dst_port")):
        place = ["tc", "filter", "add", "dev", device, "parent", parent, "protocol", protocol]
        priority = str(1 + ("ip", "ipv6", "802.1Q").index(protocol))
        tcp = ["flower", *tag, "ip_proto", "tcp", end, str(port), "classid", band]
        made.append([*place, "prio", priority, *tcp])
    return made
