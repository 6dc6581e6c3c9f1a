"""Machines that run become devices: only what differs is made, and a second run changes nothing.

Devices are folders; the same against a real sshd is in `test_fleet_ssh.py`.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
from pathlib import Path

import pytest
from folder_remote import FolderRemote
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import ConfigError
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import Pair, spell
from edgetrain.fleet import cluster as clusters
from edgetrain.fleet.ssh import SshAnswer, SshHost, SshTrouble
from edgetrain.provisioning import provision as module
from edgetrain.provisioning import sets
from edgetrain.provisioning.cards import archive
from edgetrain.provisioning.cards.flashing import Archives, Settings
from edgetrain.provisioning.provision import Provisioner, due, remove, wrong
from edgetrain.provisioning.reaching import hub_keys, members_list

pytestmark = pytest.mark.real

KEYS = {name: bytes([number]) * 32 for number, name in enumerate(("pi-0", "pi-1", "pi-2"), 1)}
USERS_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIG3kTrqjLUdJWLGMV5RZEHZ4HIPYgJXKMHRZUKhNlL0g me"
STAND_IN = """
import pathlib, sys
if sys.argv[1:3] == ["keys", "init"]:
    folder = pathlib.Path(sys.argv[sys.argv.index("--keys") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    name = folder.resolve().parents[2].name
    keys = %r
    (folder / "key").write_text(f"public {keys[name]}\\nsecret {keys[name]}\\n")
"""


class CutRemote(FolderRemote):
    """Loses its connection once, before or after a command is run."""

    at, after = -1, True
    before = staticmethod(lambda host, words: None)

    def run(self, host, words, stdin=b"", **options):
        self.before(host, words)
        self.at -= 1
        if self.at == 0 and not self.after:
            return SshAnswer(-1, trouble=SshTrouble.LOST)
        answer = super().run(host, words, stdin, **options)
        return SshAnswer(-1, trouble=SshTrouble.LOST) if self.at == 0 else answer


def state(folder: Path) -> dict[str, str]:
    """What is in a folder: a digest of each file, where each link leads."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file() and path.name != "commands":
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


class Town:
    """Three machines, a hub's keys, and a cluster file of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.remote = folder, CutRemote(folder / "machines")
        names = list(KEYS)
        for name in names:
            (folder / "machines" / name / "etc").mkdir(parents=True)
            (folder / "machines" / name / "etc/os-release").write_text(
                'ID=debian\nVERSION_ID="12"\n'
            )
            (folder / "machines" / name / "home/fleet").mkdir(parents=True)
            (folder / "machines" / name / "etc/ssh").mkdir()
            for end in ("", ".pub"):
                (folder / "machines" / name / f"etc/ssh/ssh_host_ed25519_key{end}").write_text("k")
            (folder / "machines" / name / "etc/passwd").write_text(
                f"fleet:x:{os.getuid()}:{os.getgid()}::/home/fleet:/bin/bash\n"
            )
        self.ring = Keyring(folder / "keys")
        self.ring.init(lambda: Pair(b"h" * 32, b"s" * 32))
        site = folder / "site/edgetrain"
        site.mkdir(parents=True)
        spelled = {name: spell(key) for name, key in KEYS.items()}
        (site / "__main__.py").write_text(STAND_IN % spelled)
        (site / "__init__.py").write_text("")
        python = ".".join(map(str, os.sys.version_info[:2]))
        machine = os.uname().machine
        self.manifest = archive.Manifest("debian-12", python, machine, {"torch": "2.9.1"})
        archive.pack(folder / "site", self.manifest, folder / "worker.tar")
        (folder / "job.toml").write_text("")
        text = "".join(
            f'[[device]]\nname = "{n}"\nprofile = "raspberry-pi-4b"\naddress = "10.0.0.{i}/24"\n'
            for i, n in enumerate(names, 1)
        )
        (folder / "cluster.toml").write_text(
            '[hub]\naddresses = ["tcp://10.0.0.99:5555"]\n[ssh]\nuser = "fleet"\nkeys = ["k.pub"]\n'
            '[job]\nfile = "job.toml"\n' + text
        )
        self.cluster = clusters.load(folder / "cluster.toml")

    def provision(self, *, check: bool = False, now=time.time) -> dict[str, module.Provisioned]:
        settings = Settings((USERS_KEY,), sets.JobSet(b"steps = 1\n", {"job": "x"}), {}, 0.0)
        archives = Archives(archive.workers(), self.folder / "worker.tar", self.folder)
        work = Provisioner(
            self.cluster, settings, archives, self.ring, self.remote, root=".", now=now
        )
        hosts = [SshHost(d.name, "10.0.0.1", "root") for d in self.cluster.devices]
        found = work.provision(list(zip(self.cluster.devices, hosts, strict=True)), check=check)
        return {result.name: result for result in found}

    def state(self) -> dict[str, str]:
        return state(self.folder / "machines") | state(self.folder / "keys")


@pytest.fixture
def town(tmp_path, monkeypatch):
    program = tmp_path / "bin/systemctl"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\necho "$@" >> commands\n[ "$1" = enable ] || exit 0\n'
        "cd etc/systemd/system && mkdir -p multi-user.target.wants\n"
        'ln -sf "/etc/systemd/system/$2" "multi-user.target.wants/$2"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return Town(tmp_path)


ALL = ("worker", "job", "keys", "hub", "list", "user", "tune", "unit", "start")


def test_it_sets_up_what_is_missing_and_a_second_run_changes_nothing(town):
    before = town.state()
    looked = town.provision(check=True)
    assert {r.changed for r in looked.values()} == {ALL}
    assert town.state() == before, "--check changes nothing"
    assert all(r.ok for r in town.provision().values())
    assert town.ring.members() == {k: n for n, k in KEYS.items()}
    machine = town.folder / "machines/pi-1"
    assert (
        "--hub tcp://10.0.0.99:5555 --index 1"
        in (machine / "etc/systemd/system/edgetrain-member.service").read_text()
    )
    assert (machine / "etc/edgetrain/current/job.toml").read_bytes() == b"steps = 1\n"
    assert (machine / "home/fleet/.ssh/authorized_keys").read_text() == f"{USERS_KEY}\n"
    assert not (machine / "var/lib/edgetrain-setup/stage").exists()
    done, town.remote.commands[:] = town.state(), []
    assert {(r.ok, r.changed) for r in town.provision().values()} == {(True, ())}
    assert town.state() == done
    assert len(town.remote.commands) == 3, "one look at each"


def test_what_a_device_answers_instead_of_facts_is_its_line_alone(town, monkeypatch):
    odd = {"pi-0": b"", "pi-1": b"{}\n", "pi-2": b'{"key": 1, "clock": "noon"}\nno JSON\n'}
    monkeypatch.setattr(town.remote, "run", lambda host, *_, **__: SshAnswer(0, odd[host.name]))
    found = town.provision()
    assert [(name, r.ok) for name, r in found.items()] == [(name, False) for name in KEYS]
    assert [r.why.split(":")[0] for r in found.values()] == [
        "IndexError", "KeyError", "JSONDecodeError"
    ]  # fmt: skip


def test_a_changed_address_is_the_only_thing_that_is_made(town):
    town.provision()
    path = town.folder / "cluster.toml"
    path.write_text(path.read_text().replace("10.0.0.99", "10.0.0.98"))
    town.cluster = clusters.load(path)
    assert {r.changed for r in town.provision().values()} == {("hub", "unit", "start")}
    assert {r.changed for r in town.provision().values()} == {()}


def test_a_device_of_another_hub_is_left_to_it(town):
    town.provision()
    path = town.folder / "machines/pi-1/var/lib/edgetrain-keys/hubs"
    path.write_text("tcp://10.0.0.99:5555 ANOTHERKEY\n")
    before = town.state()
    found = town.provision()
    assert [r.ok for r in found.values()] == [True, False, True]
    assert "it belongs to the hub with the key ANOTHERK…" in found["pi-1"].why
    assert town.state() == before
    assert remove([SshHost("pi-1", "", "root")], town.ring, town.remote, ".")[0].ok
    assert all(r.ok for r in town.provision().values())


def with_hub(town, name="pi-2"):
    """From now on this one of the machines has the hub."""
    path = town.folder / "cluster.toml"
    text = path.read_text().replace('role = "hub"\n', "")
    begin = text.index("[[device]]", text.index(f'name = "{name}"') - 20)
    end = text.index('profile = "', begin)
    text = f'{text[:end]}role = "hub"\n{text[end:]}'
    address = f"tcp://10.0.0.{list(KEYS).index(name) + 1}:"
    path.write_text(re.sub(r"tcp://[0-9.]*:", address, text))
    town.cluster = clusters.load(path)
    return town.folder / "machines" / name


def test_a_hub_on_a_device_keeps_its_key_and_has_the_others(town):
    town.provision()
    hub = with_hub(town)
    found = town.provision()
    assert found["pi-2"].changed == ("list", "unit", "start")
    assert found["pi-0"].changed == ("hub", "unit", "start")
    assert {(r.ok, r.changed) for r in town.provision(check=True).values()} == {(True, ())}
    pins = (town.folder / "machines/pi-0/var/lib/edgetrain-keys/hubs").read_text().splitlines()
    assert pins[0] == f"tcp://10.0.0.3:5555 {spell(KEYS['pi-2'])}"
    members = (hub / "etc/edgetrain/hub/members").read_text()
    assert members == "".join(sorted(f"{spell(KEYS[n])} {n}\n" for n in ("pi-0", "pi-1")))
    assert str((hub / "etc/edgetrain/hub/key").readlink()).endswith("hub.service/key")
    units = hub / "etc/systemd/system"
    assert not (units / "edgetrain-member.service").exists()
    assert "disable --now edgetrain-member.service" in (hub / "commands").read_text()
    town.ring.revoke("pi-1")
    assert town.provision(check=True)["pi-2"].changed == ("list",), "a hub that runs takes it"

    before = with_hub(town, "pi-0")
    assert all(r.ok for r in town.provision().values()), "the hub may move"
    assert {(r.ok, r.changed) for r in town.provision(check=True).values()} == {(True, ())}
    assert not (hub / "etc/edgetrain/hub").exists()
    assert (before / "etc/edgetrain/hub/members").exists()


def test_members_of_a_hub_that_cannot_be_reached_wait_for_it(town):
    with_hub(town)
    town.remote.troubles["pi-2"] = SshTrouble.UNREACHABLE
    found = town.provision()
    assert found["pi-0"].why == "pi-2, which it joins, is not set up, and comes first"
    assert not any(r.ok for r in found.values())
    town.remote.troubles.clear()
    seen = []
    town.remote.before = lambda host, words: (
        words[-1] == "start"
        and seen.append(
            (host.name, (town.folder / "machines/pi-2/etc/edgetrain/hub/members").read_text())
        )
    )
    assert all(r.ok for r in town.provision().values())
    assert {(r.ok, r.changed) for r in town.provision(check=True).values()} == {(True, ())}
    assert all(name in members for name, members in seen[1:]), "on the list before it starts"
    assert seen[0][0] == "pi-2"


def with_gateway(town, joins=("pi-0",)):
    """From now on pi-1 has the gateway of these."""
    path = town.folder / "cluster.toml"
    text = re.sub("role = .*\n|site = .*\n", "", path.read_text())
    for name in ("pi-1", *joins):
        more = 'role = "gateway"\n' if name == "pi-1" else ""
        text = text.replace(f'name = "{name}"\n', f'name = "{name}"\nsite = "barn"\n{more}')
    path.write_text(text)
    town.cluster = clusters.load(path)
    return town.folder / "machines/pi-1"


def test_a_gateway_knows_the_hub_and_its_site_knows_it(town):
    town.provision()
    gate = with_gateway(town)
    found = town.provision()
    assert found["pi-1"].changed == ("list", "unit", "start")
    assert found["pi-0"].changed == ("hub", "unit", "start")
    assert found["pi-2"].changed == ("unit", "start"), "it is the second member now"
    assert {(r.ok, r.changed) for r in town.provision(check=True).values()} == {(True, ())}
    own = spell(town.ring.pair().public)
    pins = (town.folder / "machines/pi-0/var/lib/edgetrain-keys/hubs").read_text().splitlines()
    assert pins == [f"tcp://10.0.0.2:5555 {spell(KEYS['pi-1'])}", f"tcp://10.0.0.99:5555 {own}"]
    assert (gate / "var/lib/edgetrain-keys/hubs").read_text() == f"tcp://10.0.0.99:5555 {own}\n"
    members = gate / "etc/edgetrain/hub/members"
    assert members.read_text() == f"{spell(KEYS['pi-0'])} pi-0\n"
    assert str((gate / "etc/edgetrain/hub/hubs").readlink()).endswith("hub.service/hubs")
    unit = (gate / "etc/systemd/system/edgetrain-hub.service").read_text()
    assert "edgetrain gateway --above tcp://10.0.0.99:5555 --members 1 --name barn " in unit
    assert not (gate / "etc/systemd/system/edgetrain-member.service").exists()

    with_gateway(town, ("pi-0", "pi-2"))
    assert all(r.ok for r in town.provision().values()), "one more moves to the site"
    assert {(r.ok, r.changed) for r in town.provision(check=True).values()} == {(True, ())}
    assert len(members.read_text().splitlines()) == 2
    town.ring.revoke("pi-0")
    assert town.provision(check=True)["pi-1"].changed == ("list",), "a gateway that runs takes it"


def test_a_site_whose_gateway_cannot_be_reached_waits_for_it_alone(town):
    with_gateway(town)
    town.remote.troubles["pi-1"] = SshTrouble.UNREACHABLE
    found = town.provision()
    assert [r.ok for r in found.values()] == [False, False, True]
    assert found["pi-0"].why == "pi-1, which it joins, is not set up, and comes first"
    town.remote.troubles.clear()
    seen = {}
    members = town.folder / "machines/pi-1/etc/edgetrain/hub/members"
    town.remote.before = lambda host, words: (
        words[-1] == "start" and seen.update({host.name: members.read_text()})
    )
    assert all(r.ok for r in town.provision().values())
    assert {(r.ok, r.changed) for r in town.provision(check=True).values()} == {(True, ())}
    assert next(iter(seen)) == "pi-1"
    assert "pi-0" in seen["pi-0"], "on the list before it starts"


PLACES = st.tuples(st.sampled_from(["hub", "member", "member"]), st.sampled_from(["", "a", "b"]))


@given(st.lists(PLACES, min_size=1, max_size=7), st.sets(st.integers(0, 9)))
def test_each_device_is_on_the_list_of_what_it_joins_and_knows_its_key(places, without_key):
    places = [("member", s) if r == "hub" and i else (r, s) for i, (r, s) in enumerate(places)]
    places += [("gateway", s) for s in ("a", "b") if ("member", s) in places]
    names = [f"pi-{i}" for i in range(len(places))]
    table = [
        {"name": n, "profile": "raspberry-pi-4b", "role": r} | ({} if r == "hub" else {"site": s})
        for n, (r, s) in zip(names, places, strict=True)
    ]
    hub = {"addresses": ["tcp://10.0.0.99:5555"]}
    found = clusters.parse({"device": table, "hub": hub}, Path("cluster.toml"))
    with tempfile.TemporaryDirectory() as folder:
        ring = Keyring(Path(folder))
        own = ring.init(lambda: Pair(bytes(32), bytes(32))).public
        keys = {n: bytes([i + 1] * 32) for i, n in enumerate(names) if i not in without_key}
        for name, key in {**keys, "laptop": bytes([99] * 32)}.items():
            ring.allow(key, name)
        lists = {d.name: members_list(found, ring, d).split() for d in found.devices}
        known = {d.name: hub_keys(found, ring, d) for d in found.devices}
    for device in found.devices:
        joined = found.joined_by(device)
        on = [name for name, listed in lists.items() if device.name in listed]
        assert on == ([joined.name] if joined and device.name in keys else [])
        key = keys.get(joined.name) if joined else own
        for address in found.addresses(device) if known[device.name] else ():
            assert f"{address} {spell(key)}\n" in known[device.name]
        above = found.joined_by(joined) if joined else None
        hops = [each.name for each in (joined, above) if each]
        assert bool(known[device.name]) == (device.role != "hub" and set(hops) <= set(keys))
    assert all(("laptop" in lists[d.name]) == (d.role == "hub") for d in found.devices)


def test_one_in_trouble_does_not_hold_up_the_others_and_is_finished_next(town):
    trouble = town.remote.troubles["pi-1"] = SshTrouble.KEY_CHANGED
    found = town.provision()
    assert [r.ok for r in found.values()] == [True, False, True]
    assert trouble.value in found["pi-1"].why
    assert trouble.way_out in found["pi-1"].why
    assert not (town.folder / "machines/pi-1/opt").exists()
    town.remote.troubles.clear()
    assert all(r.ok for r in town.provision().values())


COMMANDS = ("look", "files", "is the worker there", "the worker", "set-up", "start")


def test_cut_off_at_any_command_the_next_run_ends_in_the_same_state(town):
    """Before it runs, or once it has."""
    path = town.folder / "cluster.toml"
    path.write_text(path.read_text().partition('[[device]]\nname = "pi-1"')[0])
    town.cluster = clusters.load(path)
    host, clean = SshHost("pi-0", ""), None
    for command, _ in enumerate(COMMANDS, 1):
        town.remote.at, town.remote.after = command, command % 2 == 0
        cut = town.provision()["pi-0"]
        assert (cut.ok, town.remote.at) == (False, 0), command
        again = town.provision()["pi-0"]
        assert again.ok
        assert again.changed or command == len(COMMANDS)
        clean = clean or town.state()
        assert town.state() == clean, command
        assert list(town.ring.members().values()) == ["pi-0"]
        assert remove([host], town.ring, town.remote, ".")[0].ok
        assert town.ring.members() == {}


def test_remove_leaves_the_files_that_were_there_before(town):
    before = state(town.folder / "machines")
    town.provision()
    hosts = [SshHost(d.name, "", "root") for d in town.cluster.devices]
    town.remote.troubles["pi-2"] = SshTrouble.UNREACHABLE
    found = remove(hosts, town.ring, town.remote, ".")
    assert [r.ok for r in found] == [True, True, False]
    assert "edgetrain keys revoke pi-2" in found[2].why
    assert list(town.ring.members().values()) == ["pi-2"], "the others' keys are off the list"
    town.remote.troubles.clear()
    assert remove(hosts, town.ring, town.remote, ".")[2].ok
    left = state(town.folder / "machines")
    keys = {name for name in left if name.endswith("authorized_keys")}
    assert {n: v for n, v in left.items() if n not in keys} == before, "and the user's way in"


FACTS = {
    "systemctl": True, "read_only": False, "filesystem": "ext4", "clock": 1e9, "slot": True,
    "set": True, "key": "k", "bundles": True, "hubs": "a k\nb k\n", "unit": "threads 4", "cores": 4,
    "enabled": True, "staged": False, "tuned": True, "users_keys": "one\ntwo\n", "list": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        ({"systemctl": False}, "no systemd"),
        ({"read_only": True}, "read-only"),
        ({"filesystem": "tmpfs"}, "a reboot would lose"),
        ({"clock": 1e9 - 69 * 365.25 * 86400}, "off by -25202 days"),
    ],
)
def test_a_machine_that_cannot_be_a_device_is_named_with_the_way_out(fact, said):
    assert said in wrong(FACTS | fact, 1e9)
    assert wrong(FACTS, 1e9) == ""


@pytest.mark.parametrize(
    ("fact", "part"),
    [
        ({"slot": False}, "worker"),
        ({"set": False}, "job"),
        ({"bundles": False}, "keys"),
        ({"hubs": "a k\n"}, "hub"),
        ({"users_keys": "one\n"}, "user"),
        ({"list": "a key of another"}, "list"),
        ({"tuned": False}, "tune"),
        ({"unit": "threads 2"}, "unit"),
        ({"enabled": False}, "start"),
        ({"staged": True}, "start"),
    ],
)
def test_each_difference_is_one_part(fact, part):
    wanted = {"unit": "threads @THREADS@", "hubs": "a k\nb k\n", "list": ""}
    assert due(FACTS, wanted, "k", ["two"]) == ()
    assert due(FACTS, wanted, "other", ["two"]) == ("list", "start")
    assert set(due(FACTS | fact, wanted, "k", ["two"])) == {part, "start"}


def test_another_architecture_and_a_full_disk_are_named(town, monkeypatch):
    arm = archive.Manifest("debian-12", "3.11", "aarch64", {"torch": "2.9.1"})
    archive.pack(town.folder / "site", arm, town.folder / "worker.tar")
    found = town.provision()
    assert all("aarch64" in r.why and not r.ok for r in found.values())
    monkeypatch.setattr(module, "SPARE", 1 << 60)
    archive.pack(town.folder / "site", town.manifest, town.folder / "worker.tar")
    assert all(r.why.startswith("disk full") for r in town.provision().values())
    clock = town.provision(now=lambda: time.time() - 1e8)
    assert all("its clock is off by +1157 days" in r.why for r in clock.values())


def test_a_name_keeps_one_key(tmp_path):
    ring = Keyring(tmp_path)
    ring.init(lambda: Pair(b"h" * 32, b"s" * 32))
    ring.allow(b"a" * 32, "pi-0")
    with pytest.raises(ConfigError):
        ring.allow(b"b" * 32, "pi-0")
    ring.allow(b"b" * 32, "pi-0", replace=True)
    assert ring.members() == {b"b" * 32: "pi-0"}
