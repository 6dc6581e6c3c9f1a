"""Profiles as `tc` commands."""

from __future__ import annotations

from typing import Any

import pytest

from edgetrain.errors import NetworkError
from edgetrain.fleet.networks import Burst, Direction, Profile
from edgetrain.fleet.networks.emulation import tc

UP = Direction(delay_ms=100, jitter_ms=10, rate_mbit=20, loss_percent=0.5)


SHAPING = tc.Shaping("eth0", Profile("wan", "", UP, Direction(delay_ms=50)), (5555,))


FILTERS = [
    f"protocol {protocol} flower{tag} ip_proto tcp {end} 5555 classid"
    for protocol, tag in (
        ("ip prio 1", ""),
        ("ipv6 prio 2", ""),
        ("802.1Q prio 3", " vlan_ethtype ip"),
        ("802.1Q prio 3", " vlan_ethtype ipv6"),
    )
    for end in ("src_port", "dst_port")
]


def test_the_commands_of_a_shaping() -> None:
    assert [" ".join(command) for command in SHAPING.commands()] == [
        "tc qdisc add dev eth0 root handle 1: prio bands 4 priomap 1 2 2 2 1 2 0 0 1 1 1 1 1 1 1 1",
        "tc qdisc add dev eth0 parent 1:4 handle 40: netem limit 380 delay 100ms 10ms "
        "distribution normal loss random 0.5% rate 20000000bit",
        *(f"tc filter add dev eth0 parent 1: {words} 1:4" for words in FILTERS),
        "ip link add name ifba733a3 type ifb",
        "ip link set dev ifba733a3 up",
        "tc qdisc replace dev ifba733a3 root netem limit 100000 delay 50ms",
        "tc qdisc add dev eth0 handle ffff: ingress",
        *(
            f"tc filter add dev eth0 parent ffff: {words} 1:1 "
            "action mirred egress redirect dev ifba733a3"
            for words in FILTERS
        ),
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


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ({"jitter_ms": 20, "distribution": "normal"}, "delay 100ms 20ms distribution normal"),
        ({"jitter_ms": 20, "distribution": "uniform"}, "delay 100ms 34.641ms"),
        ({"jitter_ms": 20, "distribution": "pareto"}, "100.817ms 24.3992ms distribution pareto"),
        ({"rate_mbit": 0.0003}, "rate 300bit"),
        ({"rate_mbit": 0.0123}, "rate 12300bit"),
        ({"rate_mbit": 100_000}, "rate 100000000000bit"),
    ],
)
def test_words_mean_what_the_profile_means(way: dict[str, Any], words: str) -> None:
    """As guests/words.py measures them in a kernel: deviations, and rates to the bit."""
    assert " ".join(tc.netem(Direction(delay_ms=100, **way))).endswith(words)


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ({"rate_trace": "/some/file"}, "plays no traces"),
        ({"delay_ms": 100, "jitter_ms": 9, "jitter_correlation": 0.3}, "does not correlate"),
        ({"delay_ms": 9000, "jitter_ms": 2200}, "no jitter of 2200 ms"),
        ({"delay_ms": 9000, "jitter_ms": 1300, "distribution": "uniform"}, "jitter of 1300 ms"),
        ({"rate_mbit": 1e-5}, "no rate of 1e-05 Mbit/s"),
    ],
)
def test_what_the_kernel_would_not_do_is_refused(way: dict[str, Any], says: str) -> None:
    with pytest.raises(NetworkError, match=f"{says}.*use backend packet"):
        tc.netem(Direction(**way))
