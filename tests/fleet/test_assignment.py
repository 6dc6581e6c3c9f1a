"""Which member has which device and network, and which members share an uplink."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgetrain.errors import ConfigError
from edgetrain.fleet.assignment import devices_of, members_of, networks_of, parse_sites


def test_a_fleet_is_a_list_of_devices():
    assert devices_of("laptop") == ["laptop"]
    assert devices_of(" jetson-nano:2 , host ") == ["jetson-nano", "jetson-nano", "host"]


@pytest.mark.parametrize("text", ["", "laptop:", "laptop:0", "laptop:two", "laptop,,host", ":2"])
def test_a_bad_fleet_is_refused(text):
    with pytest.raises(ConfigError, match="NAME or NAME:COUNT"):
        devices_of(text)


def test_fleets() -> None:
    assert networks_of("wan-200ms") == ["wan-200ms"]
    assert networks_of("wan-200ms", 3) == ["wan-200ms"] * 3
    assert networks_of("wifi:2, 4g-bad:1", 3) == ["wifi", "wifi", "4g-bad"]
    with pytest.raises(ConfigError, match="names 3 members, the fleet has 4"):
        networks_of("wifi:2, 4g-bad:1", 4)
    for bad in ("wifi:0", "wifi:x", "", "wifi:"):
        with pytest.raises(ConfigError, match="is not NAME or NAME:COUNT"):
            networks_of(bad)


def test_sites() -> None:
    first, second = parse_sites("home-fixed: 0-2, 4g-good: 3 5", 6)
    assert first.members == (0, 1, 2)
    assert second.members == (3, 5)
    assert second.uplink.name == "4g-good"
    for bad, says in (
        ("home-fixed: 0-6", "allowed: 0 to 5"),
        ("home-fixed: 0 1, wifi: 1", "already in a site"),
        ("home-fixed", "is not NETWORK: MEMBERS"),
        ("home-fixed: a", "is not a member number"),
    ):
        with pytest.raises(ConfigError, match=says):
            parse_sites(bad, 6)


def test_the_path_of_a_profile_may_hold_the_marks_of_a_mix(tmp_path: Path) -> None:
    folder = tmp_path / "a:2, b.toml: c"
    folder.mkdir()
    (folder / "x:1,y.toml").write_text("[both]\ndelay_ms = 5\n")
    file = str(folder / "x:1,y.toml")
    assert networks_of(file, 3) == [file] * 3
    assert networks_of(f"wifi, {file}:2 ,{file} : 1,none:2") == [
        "wifi",
        *[file] * 3,
        "none",
        "none",
    ]
    first, second = parse_sites(f"{file}: 0-1, wifi: 2", 3)
    assert (first.uplink.rtt_ms, first.members, second.members) == (10, (0, 1), (2,))
    with pytest.raises(ConfigError, match="NAME:COUNT"):
        networks_of(f"{file}:0")
    with pytest.raises(ConfigError, match=r"no network profile '.*x\.toml'"):
        networks_of(str(tmp_path / "x.toml"))


def test_members_of() -> None:
    assert members_of("", 4) == ()
    assert members_of("3 0-1, 1", 4) == (0, 1, 3)
    with pytest.raises(ConfigError, match=r"members 4 are out of range.*allowed: 0 to 3"):
        members_of("4", 4)
