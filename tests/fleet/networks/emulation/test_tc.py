"""Profiles as `tc` commands."""

from __future__ import annotations

import pytest

from edgetrain.errors import NetworkError
from edgetrain.fleet.networks import Burst, Direction, Profile
from edgetrain.fleet.networks.emulation import tc

UP = Direction(delay_ms=100, jitter_ms=10, rate_mbit=20, loss_percent=0.5)


SHAPING = tc.Shaping("eth0", Profile("wan", "", UP, Direction(delay_ms=50)), (5555,))


def test_the_commands_of_a_shaping() -> None:
    assert [" ".join(command) for command in SHAPING.commands()] == [
        "tc qdisc add dev eth0 root handle 1: prio bands 4 priomap 1 2 2 2 1 2 0 0 1 1 1 1 1 1 1 1",
        "tc qdisc add dev eth0 parent 1:4 handle 40: netem limit 380 delay 100ms 10ms 0% "
        "distribution normal loss random 0.5% rate 20000kbit",
        "tc filter add dev eth0 parent 1: protocol ip prio 1 u32 "
        "match ip protocol 6 0xff match ip sport 5555 0xffff flowid 1:4",
        "tc filter add dev eth0 parent 1: protocol ip prio 1 u32 "
        "match ip protocol 6 0xff match ip dport 5555 0xffff flowid 1:4",
        "ip link add name ifba733a3 type ifb",
        "ip link set dev ifba733a3 up",
        "tc qdisc replace dev ifba733a3 root netem limit 100000 delay 50ms",
        "tc qdisc add dev eth0 handle ffff: ingress",
        "tc filter add dev eth0 parent ffff: protocol ip prio 1 u32 match ip protocol 6 0xff "
        "match ip sport 5555 0xffff flowid 1:1 action mirred egress redirect dev ifba733a3",
        "tc filter add dev eth0 parent ffff: protocol ip prio 1 u32 match ip protocol 6 0xff "
        "match ip dport 5555 0xffff flowid 1:1 action mirred egress redirect dev ifba733a3",
    ]
    assert [" ".join(command) for command in SHAPING.undo()] == [
        "tc qdisc del dev eth0 root",
        "tc qdisc del dev eth0 ingress",
        "ip link del dev ifba733a3",
    ]


def test_no_interface_name_is_too_long() -> None:
    assert len(tc.Shaping("enx00e04c680123", Profile("x"), (1,)).helper) <= 15


def test_bursts_and_the_rest() -> None:
    way = Direction(
        burst=Burst(1, 20, 90, 0.5), duplicate_percent=1, corrupt_percent=2, reorder_percent=3
    )
    assert " ".join(tc.netem(way)) == (
        "netem limit 100000 loss gemodel 1% 20% 90% 0.5% duplicate 1% corrupt 2% reorder 3%"
    )


def test_traces_are_refused() -> None:
    with pytest.raises(NetworkError, match="plays no traces"):
        tc.netem(Direction(rate_trace="/some/file"))
