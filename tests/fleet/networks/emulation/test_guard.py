"""The rules of the guard, without a kernel that has netem."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from edgetrain.errors import ConfigError, NetworkError
from edgetrain.fleet.networks import Direction, Profile
from edgetrain.fleet.networks.emulation import guard, tc

UP = Direction(delay_ms=100, jitter_ms=10, rate_mbit=20, loss_percent=0.5)


SHAPING = tc.Shaping("eth0", Profile("wan", "", UP, Direction(delay_ms=50)), (5555,))


@pytest.mark.parametrize(
    ("ports", "says"), [([22], "SSH"), ([0], "allowed: 1 to 65535"), ([], "no port to shape")]
)
def test_ports_that_are_not_shaped(ports: list[int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        guard.ports_allowed(ports)


class Kernel:
    """Stands in for running commands: answers `qdisc show`, remembers the rest, fails on demand."""

    def __init__(self, shown: str, failing: str = "") -> None:
        self.shown, self.failing, self.ran = shown, failing, list[str]()

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        line = " ".join(command)
        if "-j" in command:
            return subprocess.CompletedProcess(command, 0, self.shown, "")
        self.ran.append(line)
        bad = bool(self.failing) and self.failing in line
        return subprocess.CompletedProcess(command, int(bad), "", "no such thing" if bad else "")


@pytest.mark.parametrize("kind", ["htb", "netem", "ingress", "clsact"])
def test_a_foreign_qdisc_is_refused(kind: str) -> None:
    kernel = Kernel(f'[{{"kind": "{kind}", "root": {"false" if "s" in kind else "true"}}}]')
    with pytest.raises(NetworkError, match=f"already has the qdisc '{kind}'"):
        guard.refuse_foreign("eth0", kernel)
    guard.refuse_foreign("eth0", Kernel('[{"kind": "fq_codel", "root": true}]'))


def vlan(name: str, below: str, protocol: str = "802.1Q") -> dict[str, Any]:
    info = {"info_kind": "vlan", "info_data": {"protocol": protocol, "id": 5}}
    return {"ifname": name, "link": below, "linkinfo": info}


def on(name: str, below: str, kind: str) -> dict[str, Any]:
    return {"ifname": name, "link": below, "linkinfo": {"info_kind": kind}}


ETH0 = {"ifname": "eth0", "link_type": "ether"}


@pytest.mark.parametrize(
    ("links", "hidden"),
    [
        ([ETH0, vlan("v5", "eth0"), on("m", "eth0", "macvlan"), on("n", "v5", "ipvlan")], ""),
        ([ETH0, on("far", "eth0", "veth"), vlan("a", "eth1"), vlan("b", "a")], ""),
        ([on("x", "eth1", "macsec"), on("w", "v9", "vxlan")], ""),
        ([vlan("v5.6", "v5"), vlan("v5", "eth0")], "v5.6"),
        ([ETH0, vlan("s7", "eth0", "802.1ad")], "s7"),
        ([ETH0, on("x", "eth0", "macsec")], "x"),
        ([ETH0, on("x", "eth0", "vxlan")], "x"),
        ([ETH0, on("lan1", "eth0", "dsa")], "lan1"),
        ([ETH0, vlan("v5", "eth0"), on("x", "v5", "macsec")], "x"),
    ],
)
def test_frames_in_which_ports_are_not_seen_are_refused(
    links: list[dict[str, Any]], hidden: str
) -> None:
    kernel = Kernel(json.dumps(links))
    refused = pytest.raises(NetworkError, match=rf"eth0 carries {hidden} .*--dev {hidden}")
    with refused if hidden else contextlib.nullcontext():
        guard.refuse_hidden("eth0", kernel)


def test_the_reverter_stands_before_anything_changes_and_a_failure_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGETRAIN_STATE", str(tmp_path))
    monkeypatch.setattr(guard, "start_reverter", lambda file: 7 if file.exists() else 0)
    cleared: list[str] = []
    monkeypatch.setattr(guard, "clear", lambda device: cleared.append(device))
    kernel = Kernel("[]", failing="ingress")
    with pytest.raises(NetworkError, match="`tc qdisc add dev eth0 handle ffff: ingress` failed"):
        guard.apply(SHAPING, guard.ShapingLimits(60), kernel)
    assert cleared == ["eth0"]
    with pytest.raises(NetworkError, match="shaped already"):
        guard.apply(SHAPING, guard.ShapingLimits(60), kernel)


def test_apply_renew_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGETRAIN_STATE", str(tmp_path))
    monkeypatch.setattr(guard, "start_reverter", lambda _: 7)
    kernel = Kernel("[]")
    assert guard.apply(SHAPING, guard.ShapingLimits(60), kernel) == 7
    assert len(kernel.ran) == len(SHAPING.commands())
    guard.renew("eth0")
    assert guard.clear("eth0", kernel)
    assert kernel.ran[-3:] == [" ".join(command) for command in SHAPING.undo()]
    assert not guard.clear("eth0", kernel)
    with pytest.raises(NetworkError, match="eth0 is not shaped"):
        guard.renew("eth0")


def test_why_a_shaping_ends() -> None:
    state = {"until": 100.0, "renewed": 50.0, "renew_seconds": 5.0, "owner": 3}
    assert guard.why_over(state, 52, lambda _: True) == ""
    assert guard.why_over(state, 56, lambda _: True) == "it was not renewed"
    assert guard.why_over(state, 101, lambda _: True) == "its time is over"
    assert guard.why_over(state, 52, lambda _: False) == "its owner has ended"
    assert guard.why_over({**state, "renew_seconds": 0, "owner": 0}, 99, lambda _: False) == ""
