"""Devices over a real sshd: how long a look at sixteen takes, how often a large archive crosses the
network when a connection is cut, and a bad update that takes itself back. `make test-fleet`.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time

import pytest
import ssh_fleet
from real_town import STAND_IN, RealTown

from edgetrain.fleet.ssh import SshTrouble, copy, on_each

WHY_NOT = ssh_fleet.missing(make=True)
pytestmark = [
    pytest.mark.skipif(
        bool(ssh_fleet.missing(make=True)), reason=ssh_fleet.missing(make=True) or "-"
    ),
    pytest.mark.fleet,
    pytest.mark.timeout(1800),
]


LARGE = 126_000_000
"""Bytes of a worker archive with torch."""


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


def sent_to(fleet, machine):
    """Bytes that the network has carried to a machine since it was started."""
    words = fleet.space.within("ip", "-s", "-j", "link", "show", f"v{machine.number}")
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return json.loads(found)[0]["stats64"]["tx"]["bytes"]


def test_a_large_archive_is_sent_once_to_each_and_goes_on_after_a_cut(fleet, capsys):
    town = RealTown(fleet, [f"pi-{i}" for i in range(4)])
    up(fleet)
    source = fleet.folder / "large"
    source.write_bytes(os.urandom(LARGE))
    cut = fleet.machines["pi-0"]
    answers = {}

    def give(host):
        answers[host.name] = copy(client, host, source, "/opt/large", root=True)

    with town.client() as client:
        giving = threading.Thread(target=on_each, args=(town.hosts, give, print))
        giving.start()
        while sent_to(fleet, cut) < LARGE // 2:
            time.sleep(0.01)
        before = sent_to(fleet, cut)
        fleet.start(cut)  # by this thread: it ends with the one that starts it
        fleet.wait_until_up(cut)
        giving.join()
        troubles = {name: answer.trouble for name, answer in answers.items() if not answer.ok}
        assert troubles == {"pi-0": SshTrouble.LOST}
        on_each(town.hosts, give, print)
        assert [answer.why for answer in answers.values() if not answer.ok] == []
    for name, machine in fleet.machines.items():
        carried = sent_to(fleet, machine) + (before if name == "pi-0" else 0)
        with capsys.disabled():
            print(f"\n{name}: {carried:,} bytes for {LARGE:,}", end="")
        assert LARGE < carried < 1.05 * LARGE
        assert (machine.root / "opt/large").stat().st_size == LARGE


REFUSED = 'import sys\nif sys.argv[1] == "member":\n    sys.exit(2)\n'
"""Before the program of a worker: its member ends as one that the hub refuses."""


def update(town, name):
    """Exit status and lines of `devices update`."""
    words = town.edgetrain("devices", "update", "cluster.toml", "--worker", f"{name}.tar")
    done = subprocess.run(words, cwd=town.folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def slots(fleet):
    return {str((m.root / "opt/edgetrain/current").readlink()) for m in fleet.machines.values()}


def test_a_bad_update_takes_itself_back_and_a_good_one_is_taken(fleet, capsys):
    town = RealTown(fleet, ["pi-0", "pi-1"])
    up(fleet)
    assert all(result.ok for result in town.provision().values())
    site = town.folder / "site"
    worker = site / "edgetrain/__main__.py"
    worker.write_text(REFUSED + STAND_IN)
    town.pack("refused.tar")
    worker.write_text(STAND_IN)
    (site / "torch.py").write_text("raise ImportError('no such wheel')\n")
    town.pack("broken.tar")
    (site / "torch.py").write_text("# another version\n")
    town.pack("good.tar")
    for name, why in (("refused", "went back: "), ("broken", "does not load on this device")):
        result, said = update(town, name)
        with capsys.disabled():
            print(f"\n{said}", end="")
        assert (result, slots(fleet)) == (1, {"a"})
        assert why in said.splitlines()[0]
        assert "left alone" in said.splitlines()[1]
        _, found = status(town)
        assert {each["state"] for each in found.values()} == {"training"}
    result, said = update(town, "good")
    assert (result, slots(fleet)) == (0, {"b"}), said
    _, found = status(town)
    assert {each["state"] for each in found.values()} == {"training"}
