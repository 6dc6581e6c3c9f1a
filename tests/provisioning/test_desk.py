"""The desk's half: jobs, versions and states of devices that run, over a remote without ssh."""

from __future__ import annotations

import dataclasses
import io
import os
import platform
import random
import subprocess
import sys
import threading
import zipfile

import pytest
from folder_remote import FolderRemote
from running_devices import end_trials, facts, flashed, packed, stand_ins, state

from edgetrain.errors import ConfigError
from edgetrain.exchange.messages import PROTOCOL
from edgetrain.fleet.ssh import SshAnswer, SshHost, SshTrouble
from edgetrain.provisioning import calling, sets
from edgetrain.provisioning.cards import archive
from edgetrain.provisioning.desk import DeviceDesk, archive_protocol, judged

pytestmark = pytest.mark.real

SET = sets.JobSet(b"name = 'second'\n", {"job": "2", "name": "second"})
NAMES = ("pi-0", "pi-1", "pi-2")
UNITS = {name: f"ExecStart=member {name} @THREADS@\n" for name in NAMES}
PYTHON = ".".join(platform.python_version_tuple()[:2])
MACHINE = platform.machine()
KILLS = int(os.environ.get("KILLS", "4"))


@pytest.fixture(autouse=True)
def _systemctl(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", stand_ins(tmp_path / "stand-ins"))


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archives")
    found = {
        how: packed(folder, how, PROTOCOL, PYTHON, MACHINE)
        for how in ("good", "refused", "waits", "hangs")
    }
    return found | {"older": packed(folder, "good", PROTOCOL - 1, PYTHON, MACHINE)}


class Room:
    """Three devices, and a desk."""

    def __init__(self, folder, remote=None, names=NAMES):
        self.folder = folder
        for name in names:
            flashed(folder / name)
        self.remote = remote or FolderRemote(folder)
        self.said: list[str] = []
        hosts = [SshHost(name, name) for name in names]
        self.desk = DeviceDesk(
            self.remote, hosts, self.said.append, root="", sleep=lambda s: end_trials(folder)
        )

    def unit(self, name):
        return (self.folder / name / "unit").read_text().strip()


@pytest.fixture
def room(tmp_path):
    return Room(tmp_path / "devices")


def test_what_is_sent_along_runs_without_anything_of_ours(tmp_path):
    path = tmp_path / "keeper.pyz"
    path.write_bytes(calling.program())
    with zipfile.ZipFile(io.BytesIO(calling.program())) as packed_program:
        assert sum(info.file_size for info in packed_program.infolist()) < 100_000
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(path), "--root", str(tmp_path), "dance"],
        capture_output=True, text=True, check=False, cwd="/",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, '{"error": "no verb \'dance\'"}\n')


def test_a_job_is_sent_to_all_and_a_dead_one_does_not_hold_up_the_others(room):
    room.remote.troubles["pi-1"] = SshTrouble.UNREACHABLE
    results = room.desk.send(SET, UNITS)
    assert [(r.name, r.ok) for r in results] == [("pi-0", True), ("pi-1", False), ("pi-2", True)]
    assert "unreachable" in results[1].said
    for name in ("pi-0", "pi-2"):
        current = room.folder / name / "etc/edgetrain/current"
        assert (current / "job.toml").read_bytes() == SET.job
        unit = (room.folder / name / "etc/systemd/system/edgetrain-member.service").read_text()
        assert unit.startswith(f"ExecStart=member {name} ")
        assert "restart" in (room.folder / name / "systemctl").read_text()
    del room.remote.troubles["pi-1"]
    before = state(room.folder / "pi-0")
    again = room.desk.send(SET, UNITS)
    assert [r.said for r in again] == ["had it already", "sent", "had it already"]
    assert state(room.folder / "pi-0") == before


def test_two_jobs_and_another_address_of_the_hub(room):
    room.desk.send(SET, UNITS)
    third = dataclasses.replace(SET, job=b"name = 'third'\n")
    moved = {name: text.replace("member", "member --hub tcp://b:5") for name, text in UNITS.items()}
    pins, another = "tcp://b:5 key\n", "tcp://second:5 of-another-hub\n"
    for name in NAMES:
        hubs = room.folder / name / "var/lib/edgetrain-keys/hubs"
        hubs.write_text(f"tcp://b:5 old\n{another}tcp://a:5 key\n")
    known = dict.fromkeys(NAMES, pins)
    assert all(result.said == "sent" for result in room.desk.send(third, moved, known))
    root = room.folder / "pi-1"
    there = (root / "var/lib/edgetrain-keys/hubs").read_text()
    assert there == f"{pins}{another}tcp://a:5 key\n", "what is known of other hubs stays"
    assert all(r.said == "had it already" for r in room.desk.send(third, moved, known))
    assert not list((root / "opt/edgetrain/incoming").glob("*"))
    assert (root / "etc/edgetrain/current/job.toml").read_bytes() == third.job
    assert "tcp://b:5" in (root / "etc/systemd/system/edgetrain-member.service").read_text()


def test_the_device_with_the_hub_has_the_job_first_and_no_data(room):
    room.desk.hub, hub = "pi-2", room.folder / "pi-2"
    (hub / "etc/systemd/system/edgetrain-hub.service").write_text("x")
    (hub / "etc/edgetrain/hub").mkdir()
    (hub / "unit").write_text("done")
    job = dataclasses.replace(SET, data=sets.pack_data(room.folder / "pi-0/etc"))
    assert "set up for another role" in room.desk.send(job, UNITS)[0].said
    units = {**UNITS, "pi-2": "Description=edgetrain hub"}
    for tries in (1, 2):
        known = dict.fromkeys(("pi-0", "pi-1"), "tcp://b:5 key\n")
        results = room.desk.send(job, units, known, {"pi-2": "key pi-0\n"})
        assert [r.name for r in results] == ["pi-2", "pi-0", "pi-1"]
        assert all(r.ok for r in results), results
        assert (hub / "etc/edgetrain/hub/run").read_text() == f"{tries}\n", "done: it begins anew"
        (hub / "unit").write_text("done")
    assert (hub / "etc/edgetrain/hub/members").read_text() == "key pi-0\n"
    assert not (hub / "etc/edgetrain/current/data").exists()
    assert (room.folder / "pi-0/etc/edgetrain/current/data").exists()
    assert "restart edgetrain-hub.service" in (hub / "systemctl").read_text()
    assert "member" not in (hub / "systemctl").read_text()
    (hub / "opt/edgetrain/a/as").write_text("hangs")
    results = room.desk.send(dataclasses.replace(SET, job=b"name = 'next'\n"), units)
    assert not any(r.ok for r in results)
    assert results[0].said == "its hub does not listen: joining tcp://hub:5555"
    assert results[1].said == "left alone: pi-2, which it joins, has not got the job"


def test_a_gateway_has_the_job_before_its_site_and_may_look_for_the_hub_meanwhile(room):
    """pi-0 joins the gateway on pi-1; pi-2 joins the hub, which is on no device."""
    gate = room.folder / "pi-1"
    room.desk.gateways = {"pi-0": "pi-1"}
    (gate / "etc/systemd/system/edgetrain-hub.service").write_text("x")
    (gate / "opt/edgetrain/a/as").write_text("waits")
    (gate / "unit").write_text("done")
    job = dataclasses.replace(SET, data=sets.pack_data(room.folder / "pi-0/etc"))
    units = {**UNITS, "pi-1": "Description=edgetrain hub of the site barn"}
    known = {name: f"tcp://{name}:5 key\n" for name in NAMES}
    results = room.desk.send(job, units, known, {"pi-1": "key pi-0\n"})
    assert [r.name for r in results] == ["pi-1", "pi-0", "pi-2"]
    assert all(r.ok for r in results), results
    assert (gate / "etc/edgetrain/hub/members").read_text() == "key pi-0\n"
    assert not (gate / "etc/edgetrain/current/data").exists()
    for name in NAMES:
        there = room.folder / name / "var/lib/edgetrain-keys/hubs"
        assert there.read_text().startswith(f"tcp://{name}:5 key\n")
    (gate / "opt/edgetrain/a/as").write_text("hangs")
    results = room.desk.send(dataclasses.replace(SET, job=b"name = 'next'\n"), units)
    assert [r.ok for r in results] == [False, False, True], "only its site waits"
    assert results[0].said == "its hub does not listen: joining tcp://hub:5555"
    assert results[1].said == "left alone: pi-1, which it joins, has not got the job"


def test_a_bundle_that_a_device_has_revoked_is_said_for_that_device(room):
    bundled = dataclasses.replace(
        SET, facts={"job": "3", "bundle": "b" * 64}, bundle=("my.bundle", b"code", "b" * 64)
    )
    assert all(result.ok for result in room.desk.send(bundled, UNITS))
    (room.folder / "pi-2/var/lib/edgetrain-keys/bundles").write_text("")
    other = dataclasses.replace(bundled, job=b"name = 'fourth'\n")
    results = room.desk.send(other, UNITS)
    assert [result.ok for result in results] == [True, True, False]
    assert "was revoked on this device" in results[2].said


# -- versions -------------------------------------------------------------------------------------


def test_a_good_version_is_taken_by_one_first_and_then_by_all(room, archives):
    path, digest = archives["good"]
    assert archive_protocol(path) == PROTOCOL
    results = room.desk.update(path)
    assert [(r.ok, r.said) for r in results] == [(True, "updated")] * 3
    for name in NAMES:
        slots = room.folder / name / "opt/edgetrain"
        assert facts(slots / "b.json")["digest"] == digest
        assert str((slots / "current").readlink()) == "b"
        assert not list((slots / "incoming").glob("*"))
    carried = len(room.remote.commands)
    assert [r.said for r in room.desk.update(path)] == ["updated"] * 3
    assert not any("_PUT" in " ".join(w) or "cat >>" in " ".join(w)
                   for _, w in room.remote.commands[carried:])  # fmt: skip


@pytest.mark.parametrize("how", ["refused", "hangs"])
def test_a_bad_version_goes_back_on_the_first_and_no_other_gets_it(room, archives, how):
    before = {name: state(room.folder / name) for name in NAMES[1:]}
    results = room.desk.update(archives[how][0])
    assert [result.ok for result in results] == [False] * 3
    assert results[0].said.startswith("went back: ")
    assert results[1].said == "left alone: another did not take the update"
    assert {name: state(room.folder / name) for name in NAMES[1:]} == before
    assert room.unit("pi-0") == "good"
    assert str((room.folder / "pi-0/opt/edgetrain/current").readlink()) == "a"


def test_devices_in_no_job_stay_on_trial_until_a_hub_answers(tmp_path, archives):
    room = Room(tmp_path / "devices")
    for name in NAMES:
        (room.folder / name / "unit").write_text("waits")

    def watch_once(_):
        """The trial has begun, and its member looks for the hub."""
        for name in NAMES:
            trial = room.folder / name / "opt/edgetrain/trial.json"
            if trial.exists():
                text = trial.read_text().replace("switching", "trying")
                trial.write_text(text)

    room.desk = DeviceDesk(room.remote, room.desk.hosts, root="", sleep=watch_once)
    results = room.desk.update(archives["waits"][0])
    assert [result.said for result in results] == ["on trial until a hub answers"] * 3


def test_an_older_protocol_is_told_before_and_refused_while_a_job_runs(room, archives):
    path, _ = archives["older"]
    manifest, older = archive.check(path), archive_protocol(path)
    for name in NAMES:
        messages = room.folder / name / "opt/edgetrain/a/edgetrain/exchange/messages.py"
        messages.parent.mkdir(parents=True)
        messages.write_text(f"PROTOCOL = {PROTOCOL}\n")
    states = room.desk.states("0.1.0")
    with pytest.raises(ConfigError, match=r"pi-0 is in a job, and the update speaks protocol"):
        room.desk.check_update(states, manifest, older, stops=False)
    room.desk.check_update(states, manifest, older, stops=True)
    assert room.said == [
        f"the protocol changes from {PROTOCOL} to {older}: members need a hub of that version",
        f"the hub of this machine speaks protocol {PROTOCOL}, not {older}",
    ]
    other = dataclasses.replace(manifest, python="3.99")
    with pytest.raises(ConfigError, match=r"the worker is for Python 3\.99 on"):
        room.desk.check_update(states, other, PROTOCOL, stops=False)


class Odd:
    """A remote that reaches no device, and raises for one."""

    def run(self, host, words, *rest, **more):
        if host.name == "pi-1":
            raise KeyError("unit")
        return SshAnswer(-1, trouble=SshTrouble.UNREACHABLE)


@pytest.mark.parametrize("command", ["states", "send", "stop", "fetch", "update"])
def test_an_exception_at_one_device_is_its_line_and_the_others_have_theirs(command, tmp_path):
    names = ("pi-1", "pi-0", "pi-2")
    desk = DeviceDesk(Odd(), [SshHost(name, name) for name in names], root="")
    words = {"states": ["1"], "send": [SET, UNITS], "stop": [], "fetch": [tmp_path, "member"]}
    (tmp_path / "file").touch()
    found = getattr(desk, command)(*words.get(command, [tmp_path / "file"]))
    lines = [f"{each.name}: {getattr(each, 'said', '') or each.why}" for each in found]
    other = "left alone: another" if command == "update" else "unreachable"
    for line, begin in zip(
        lines, ("1: KeyError: 'unit'", f"0: {other}", f"2: {other}"), strict=True
    ):
        assert line.startswith(f"pi-{begin}")
    assert not any(getattr(each, "ok", False) for each in found)


# -- states ---------------------------------------------------------------------------------------


def test_states(room):
    (room.folder / "pi-1/unit").write_text("refused")
    room.remote.troubles["pi-2"] = SshTrouble.KEY_CHANGED
    found = room.desk.states("0.1.0")
    assert [(s.name, s.state) for s in found] == [
        ("pi-0", "training"), ("pi-1", "refused"), ("pi-2", "unreachable"),
    ]  # fmt: skip
    assert found[1].why == "the hub refused: protocol"
    assert "host key changed" in found[2].why
    assert [s.needs_a_person for s in found] == [False, True, True]
    assert next(s.marks for s in room.desk.states("9.9.9")) == ("other version",)


FACTS = {
    "slot": "a", "version": {"edgetrain": "1"}, "protocol": PROTOCOL, "set": {}, "trial": None,
    "outcome": {}, "enrolled": True, "disk_free_bytes": 10**10, "clock": 1000.0, "celsius": 50.0,
    "throttled": False, "under_voltage": False, "is_hub": False,
    "unit": {"active": "active", "result": "success", "status": 0, "text": "training: 1 of 2"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("other", "state", "marks", "person"),
    [
        ({}, "training", (), False),
        ({"is_hub": True}, "serving", (), False),
        ({"celsius": 81.0, "throttled": True}, "training", ("hot", "throttled"), False),
        ({"under_voltage": True}, "training", ("under-voltage",), True),
        ({"disk_free_bytes": 10**6}, "training", ("disk nearly full",), True),
        ({"clock": 1000.0 - 69 * 365 * 86400}, "training", ("clock wrong",), True),
        ({"protocol": PROTOCOL - 1}, "training", ("other version",), True),
        ({"version": {"edgetrain": "2"}}, "training", ("other version",), True),
        ({"enrolled": False}, "not enrolled", (), True),
        ({"trial": {"old": "a"}}, "on trial", (), False),
        ({"unit": {**FACTS["unit"], "active": "activating"}}, "waiting", (), False),
        ({"unit": {**FACTS["unit"], "active": "reloading"}}, "waiting", (), False),
        ({"unit": {**FACTS["unit"], "active": "inactive", "text": "done"}}, "done", (), False),
        ({"unit": {**FACTS["unit"], "active": "inactive", "text": ""}}, "off", (), False),
        (
            {"outcome": {"ended": "stuck"}, "unit": {**FACTS["unit"], "active": "failed"}},
            "stuck", (), True,
        ),
    ],
)  # fmt: skip
def test_a_state_follows_from_what_a_device_says(other, state, marks, person):
    found = judged("pi", {**FACTS, **other}, 1030.0, "1")
    assert (found.state, found.marks, found.needs_a_person) == (state, marks, person)


def test_each_device_is_asked_once_and_for_the_time_limit(room):
    asked = []

    class Limited(FolderRemote):
        def run(self, host, words, stdin=b"", *, seconds=60.0, root=False, heard=None):
            asked.append((host.name, seconds, root))
            return super().run(host, words, stdin, root=root)

    remote = Limited(room.folder)
    remote.troubles["pi-1"] = SshTrouble.TIMEOUT
    found = DeviceDesk(remote, room.desk.hosts, root="").states("0.1.0", seconds=3.5)
    assert [s.state for s in found] == ["training", "unreachable", "training"]
    assert "timeout" in found[1].why
    assert sorted(asked) == [(name, 3.5, False) for name in NAMES], "no root is needed to look"


# -- kills ----------------------------------------------------------------------------------------


_COUNTING = threading.Lock()


class DeskKilled(BaseException):
    """SIGKILL, where it waits for an answer."""


class Mortal(FolderRemote):
    """A remote whose desk is killed at its n-th command: before it, or before its answer; or the
    connection is cut in the middle of what that command is given."""

    fuse, how = -1, "before"

    def run(self, host, words, stdin=b"", *, seconds=60.0, root=False, heard=None):
        with _COUNTING:
            self.fuse -= 1
            is_last = self.fuse == 0
        if is_last and self.how == "before":
            raise DeskKilled
        if is_last and self.how == "cut":
            self.cuts[host.name] = random.Random(seconds).randint(0, 3000)
        answer = super().run(host, words, stdin, seconds=seconds, root=root, heard=heard)
        if is_last:
            raise DeskKilled
        return answer


def killed(tmp_path, act, draws):
    """`act(room)` killed at random, then run again: as one that was not killed."""
    whole = Room(tmp_path / "whole", Mortal(tmp_path / "whole"), NAMES[:2])
    act(whole)
    commands = len(whole.remote.commands)
    wanted = [state(whole.folder / name) for name in NAMES[:2]]
    for number in range(draws):
        rng = random.Random(number)
        folder = tmp_path / f"killed-{number}"
        room = Room(folder, Mortal(folder), NAMES[:2])
        room.remote.fuse = rng.randint(1, commands)
        room.remote.how = rng.choice(["before", "after", "cut"])
        with pytest.raises(DeskKilled):
            act(room)
        room.remote.fuse = -1
        room.remote.cuts.clear()  # of a command that was given nothing
        end_trials(folder)  # the devices go on by themselves
        act(room)
        assert [state(folder / name) for name in NAMES[:2]] == wanted, number


def test_a_send_that_is_killed_is_finished_by_the_next(tmp_path):
    killed(tmp_path, lambda room: room.desk.send(SET, UNITS), KILLS)


def test_an_update_that_is_killed_is_finished_by_the_next(tmp_path, archives):
    killed(tmp_path, lambda room: room.desk.update(archives["good"][0]), KILLS)
