"""Sixteen devices over a real sshd: how long a look at all of them takes. `make test-fleet`."""

from __future__ import annotations

import json
import os
import subprocess
import time

import pytest
import ssh_fleet
from real_town import RealTown

WHY_NOT = ssh_fleet.missing(make=True)
pytestmark = [
    pytest.mark.skipif(
        bool(ssh_fleet.missing(make=True)), reason=ssh_fleet.missing(make=True) or "-"
    ),
    pytest.mark.fleet,
    pytest.mark.timeout(1800),
]


@pytest.fixture
def fleet(monkeypatch, tmp_path_factory):
    with ssh_fleet.fleet(tmp_path_factory.mktemp("fleet")) as made:
        monkeypatch.setenv("PATH", f"{made.folder / 'bin'}:{os.environ['PATH']}")
        yield made


def up(fleet, how=""):
    for machine in fleet.machines.values():
        fleet.start(machine, how)
    for machine in fleet.machines.values():
        fleet.wait_until_up(machine)


def bare(town):
    """Seconds of sixteen `ssh HOST true` at once."""
    began = time.monotonic()
    words = [["ssh", *OPTIONS, host.target, "true"] for host in town.hosts]
    running = [subprocess.Popen(each, stderr=subprocess.DEVNULL) for each in words]
    assert [each.wait() for each in running] == [0] * len(words)
    return time.monotonic() - began


OPTIONS = ("-o", "StrictHostKeyChecking=no", "-o", "BatchMode=yes")


def status(town, *words):
    """Seconds of `devices status`, and what it says."""
    began = time.monotonic()
    words = town.edgetrain("devices", "status", "cluster.toml", "--json", *words)
    done = subprocess.run(words, cwd=town.folder, capture_output=True, text=True, check=False)
    return time.monotonic() - began, {each["name"]: each for each in json.loads(done.stdout)}


def test_a_look_at_sixteen_takes_little_longer_than_ssh_to_them(fleet, capsys):
    town = RealTown(fleet, [f"pi-{i}" for i in range(16)])
    up(fleet)
    assert all(result.ok for result in town.provision().values())
    bare(town)
    pairs = [(bare(town), status(town)) for _ in range(5)]
    for _, (_, found) in pairs:
        assert {each["state"] for each in found.values()} == {"training"}
    ssh_s, status_s = min(s for s, _ in pairs), min(s for _, (s, _) in pairs)
    silent = list(fleet.machines)[:4]
    for name in silent:
        fleet.start(fleet.machines[name], "hangs")
        fleet.wait_until_up(fleet.machines[name])
    waited_s, found = status(town, "--timeout", "3")
    assert [name for name, each in found.items() if each["state"] == "unreachable"] == silent
    with capsys.disabled():
        print(
            f"\nsixteen `ssh HOST true` at once {ssh_s:.2f} s, status {status_s:.2f} s "
            f"({status_s / ssh_s:.2f} times); four silent, --timeout 3: {waited_s:.2f} s"
        )
