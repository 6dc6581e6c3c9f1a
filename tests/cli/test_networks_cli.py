"""`edgetrain networks …`: what each verb prints and refuses."""

from __future__ import annotations

import json

import pytest

from edgetrain.cli import networks as commands
from edgetrain.cli.parser import parser
from edgetrain.errors import ConfigError
from edgetrain.fleet.networks import names
from edgetrain.fleet.networks.emulation import probe

PACKETS, WHY_NOT = probe.packets_possible()


def run(*words: str) -> int:
    arguments = parser("networks").parse_args(["networks", *words])
    status: int = arguments.run(arguments)
    return status


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    said = capsys.readouterr().out
    assert all(name in said for name in names())
    assert run("list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert {entry["name"] for entry in listed} == set(names())


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "4g-bad") == 0
    said = capsys.readouterr().out
    assert "delay 85 ms ± 20 ms" in said
    assert "source of rate_mbit" in said
    assert run("show", "rtt-120ms", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rtt_ms"] == 120
    with pytest.raises(ConfigError, match="did you mean"):
        run("show", "4g-bade")


@pytest.mark.real
@pytest.mark.skipif(not PACKETS, reason=f"no emulated hosts: {WHY_NOT}")
def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "rtt-20ms", "--json", "--seconds", "1") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["backend"] == "packet"
    (finding,) = answer["findings"]
    assert abs(finding["measured"] - 20) < 1
    assert finding["good"]


def test_apply_can_be_printed_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("apply", "wan-200ms", "--dev", "eth0", "--port", "5555", "--dry-run") == 0
    said = capsys.readouterr().out
    assert "netem limit 1652 delay 100ms rate 100000000bit" in said
    assert said.index("qdisc add") < said.index("# to restore it") < said.index("qdisc del")
    with pytest.raises(ConfigError, match="SSH"):
        run("apply", "wan-200ms", "--dev", "eth0", "--port", "22")
    with pytest.raises(ConfigError, match="1s to 24h"):
        run("apply", "wan-200ms", "--dev", "eth0", "--port", "5555", "--for", "soon")


def test_clear_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("clear", "--dev", "no-such-device") == 0
    assert "edgetrain has not shaped no-such-device" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("2h", 7200)])
def test_times(text: str, seconds: float) -> None:
    assert commands.parse_time(text) == seconds
