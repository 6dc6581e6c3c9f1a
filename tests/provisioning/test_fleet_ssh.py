"""Devices over a real sshd: sixteen roots, ten of them in trouble; all are finished the next time.

`make test-fleet`. By default four roots, if the root file system is kept (see `ssh_fleet`).
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
import ssh_fleet
from real_town import RealTown
from remote_laws import LAWS

from edgetrain.fleet.ssh import SshTrouble
from edgetrain.provisioning.provision import remove

SLOW_CLOCK = """\
#!/bin/sh
[ "$3" = -c ] || exec /usr/bin/python3 "$@"
code="import time
time.time = lambda now=time.time: now() - 69 * 365.25 * 86400
$4"
shift 4
exec /usr/bin/python3 -I -S -c "$code" "$@"
"""
CUTTING_CAT = """\
#!/bin/sh
[ -e /var/log/was-cut ] && exec /usr/bin/cat
touch /var/log/was-cut
head -c 1000000
for each in $(pgrep -f "^sshd: fleet"); do kill -9 $each; done
"""
TROUBLES = (
    "hangs",
    "closed",
    "key",
    "host-key",
    "full",
    "other",
    "sudo",
    "read-only",
    "clock",
    "cut",
)


@pytest.fixture
def reached(monkeypatch, tmp_path_factory):
    """A fleet, and its ssh first on PATH."""
    with ssh_fleet.fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        monkeypatch.setenv("PATH", f"{fleet.folder / 'bin'}:{os.environ['PATH']}")
        yield fleet


FOUR = pytest.mark.skipif(
    bool(ssh_fleet.missing(make=False)), reason=ssh_fleet.missing(make=False) or "-"
)
SIXTEEN = pytest.mark.skipif(
    bool(ssh_fleet.missing(make=True)), reason=ssh_fleet.missing(make=True) or "-"
)


@FOUR
@pytest.mark.real
def test_four_real_devices_are_set_up_once_and_removed(reached, tmp_path):
    town = RealTown(reached, [f"pi-{i}" for i in range(4)])
    machines = reached.machines.values()
    for machine in machines:
        reached.start(machine)
    for machine in machines:
        reached.wait_until_up(machine)
    with town.client() as client:
        for law in LAWS:
            law(client, town.hosts[0], tmp_path)
        answer = client.run(town.hosts[0], ["id", "-u"], root=True)
        assert (answer.text.strip(), answer.why) == ("0", "")
    reached.machines["pi-0"].in_root("rm", "-rf", f"/home/{ssh_fleet.USER}/a folder")
    before = town.state()
    assert all(r.ok and len(r.changed) == 8 for r in town.provision(check=True).values())
    assert town.state() == before, "--check changes nothing"
    first = town.provision()
    assert all(r.ok for r in first.values()), first
    done = town.state()
    assert {r.changed for r in town.provision().values()} == {()}
    assert town.state() == done, "a second run changes no byte"
    assert sorted(town.ring.members().values()) == sorted(reached.machines)
    with town.client() as client:
        assert all(r.ok for r in remove(town.hosts, town.ring, client))
    left = town.state()
    assert left == before
    assert town.ring.members() == {}


def put_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def prepare(town: RealTown, name: str) -> str:
    """Put a machine into trouble; returns how it is to be started."""
    machine = town.fleet.machines[name]
    if name == "key":
        (machine.root / f"home/{ssh_fleet.USER}/.ssh/authorized_keys").rename(
            machine.root / "root/kept"
        )
    elif name == "host-key":
        key = machine.root / "etc/ssh/ssh_host_ed25519_key"
        for path in (key, key.with_suffix(".pub")):
            path.rename(machine.root / "root" / path.name)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    elif name == "sudo":
        (machine.root / "etc/sudoers.d/fleet").write_text(f"{ssh_fleet.USER} ALL=(ALL) ALL\n")
        machine.in_root("chpasswd", given=f"{ssh_fleet.USER}:secret word\n")
    elif name == "clock":
        put_program(machine.root / "usr/local/bin/python3", SLOW_CLOCK)
    elif name == "cut":
        put_program(machine.root / "usr/local/bin/cat", CUTTING_CAT)
    return name


def mend(town: RealTown, name: str) -> None:
    """Take a machine out of its trouble."""
    machine = town.fleet.machines[name]
    if name == "key":
        (machine.root / "root/kept").rename(
            machine.root / f"home/{ssh_fleet.USER}/.ssh/authorized_keys"
        )
    elif name == "host-key":
        for path in (machine.root / "root").glob("ssh_host*"):
            path.replace(machine.root / "etc/ssh" / path.name)
    elif name == "clock":
        (machine.root / "usr/local/bin/python3").unlink()


SAID = {
    "hangs": SshTrouble.TIMEOUT.value,
    "closed": SshTrouble.UNREACHABLE.value,
    "key": SshTrouble.REFUSED.value,
    "host-key": SshTrouble.KEY_CHANGED.value,
    "full": "disk full",
    "other": "i686",
    "sudo": SshTrouble.SUDO.value,
    "read-only": "read-only",
    "clock": "its clock is off by -25202 days",
    "cut": SshTrouble.LOST.value,
}


@SIXTEEN
@pytest.mark.fleet
@pytest.mark.timeout(1800)
def test_sixteen_of_which_ten_are_in_trouble(reached, capsys):
    good = [f"pi-{i}" for i in range(6)]
    town = RealTown(reached, [*good, *TROUBLES])
    for name, machine in reached.machines.items():
        reached.start(machine, prepare(town, name))
    for name, machine in reached.machines.items():
        if name != "closed":
            reached.wait_until_up(machine)
    began = time.monotonic()
    found = town.provision()
    spent = time.monotonic() - began
    for name, result in found.items():
        with capsys.disabled():
            print(f"\n{name:10} {'ok' if result.ok else result.why}", end="")
        assert result.ok == (name in good), result
        assert SAID.get(name, "") in result.why
    for name, machine in reached.machines.items():
        mend(town, name)
        if name in ("hangs", "closed", "full", "other", "read-only", "host-key"):
            reached.start(machine)
    for machine in reached.machines.values():
        reached.wait_until_up(machine)
    again = town.provision(password="secret word")
    assert {n: r.why for n, r in again.items() if not r.ok} == {}
    assert all(again[name].changed == () for name in good)
    done = town.state()
    assert {r.changed for r in town.provision(password="secret word").values()} == {()}
    assert town.state() == done
    assert sorted(town.ring.members().values()) == sorted(reached.machines)
    with capsys.disabled():
        print(f"\n16 machines, 10 in trouble: {spent:.1f} s")
