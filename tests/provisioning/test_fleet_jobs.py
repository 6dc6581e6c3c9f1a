"""Jobs on devices over a real sshd, as their user types them: digits to 97 %, a dead device, a second
job, another address of the hub. `make test-fleet`.
"""

from __future__ import annotations

import json
import os
import subprocess
import time

import pytest
import ssh_fleet
from real_town import RealTown, real_site

from edgetrain.runs.folder import read_summary

NAMES = [f"pi-{i}" for i in range(4)]
JOB = """\
name = "{name}"
[fleet]
members = 4
[train]
steps = {steps}
[strategy]
name = "dga"
every = 5
delay = 5
[hub]
beat_s = 0.5
start_with = 3
start_after_s = 1
"""


@pytest.fixture
def town(monkeypatch, tmp_path_factory):
    """Four machines, set up; pi-3 is switched off again."""
    with ssh_fleet.fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        monkeypatch.setenv("PATH", f"{fleet.folder / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        made = RealTown(fleet, NAMES, real_site, JOB.format(name="first", steps=300))
        for machine in fleet.machines.values():
            fleet.start(machine)
        for machine in fleet.machines.values():
            fleet.wait_until_up(machine)
        yield made


def done(town, *words):
    """What a command of edgetrain prints."""
    found = subprocess.run(
        town.edgetrain(*words), cwd=town.folder, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.skipif(bool(ssh_fleet.missing(make=True)), reason=ssh_fleet.missing(make=True) or "-")
@pytest.mark.fleet
@pytest.mark.timeout(1800)
def test_digits_on_four_devices_one_of_which_comes_later(town, capsys):
    done(town, "devices", "provision", "cluster.toml", "--worker", "worker.tar")
    print(done(town, "run", "job.toml", "--cluster", "cluster.toml"))
