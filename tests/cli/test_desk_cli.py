"""`edgetrain devices send | update | status` and `edgetrain run --cluster`, as their user types
them, over a remote without ssh."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest
from command_line import write_tiny
from folder_remote import FolderRemote
from hub_runs import free_port, keys
from running_devices import end_trials, facts, flashed, packed, stand_ins, state

from edgetrain.__main__ import main
from edgetrain.cli import desk as cli_desk
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import spell
from edgetrain.exchange.messages import PROTOCOL
from edgetrain.fleet import ssh
from edgetrain.fleet.ssh import SshTrouble
from edgetrain.provisioning import desk as desks
from edgetrain.provisioning.keeper import MESSAGES
from edgetrain.runs.folder import read_metrics, read_summary

pytestmark = pytest.mark.real

NAMES = ("pi-0", "pi-1", "pi-2")
PYTHON = ".".join(platform.python_version_tuple()[:2])


class Local(FolderRemote):
    """Devices in folders, in place of ssh."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    """Three devices in folders, a cluster file and a job; in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", stand_ins(tmp_path / "stand-ins"))
    port = free_port()
    devices = "".join(f'[[device]]\nname = "{n}"\nprofile = "raspberry-pi-4b"\n' for n in NAMES)
    Path("cluster.toml").write_text(
        f'[hub]\naddresses = ["tcp://192.168.1.5:{port}"]\n'
        f'[ssh]\nuser = "fleet"\nkeys = ["id.pub"]\n{devices}'
    )
    write_tiny(
        tmp_path,
        fleet={"members": 3, "pace_s": 0.01},
        train={"steps": 30},
        strategy={"name": "dga", "local_steps": 2, "delay": 2, "final_sync": 0.0},
        hub={"heartbeat_s": 0.2, "fsync": "never", "min_members": 2, "start_after_s": 0.3},
    )
    for name in NAMES:
        flashed(tmp_path / "devices" / name)
    remote = Local(tmp_path / "devices")
    monkeypatch.setattr(ssh, "SshClient", lambda *words, **more: remote)
    before = desks.DeviceDesk.__init__

    def here(self, *words, **more):
        before(self, *words, **more, root="", sleep=lambda s: end_trials(remote.folder))

    monkeypatch.setattr(desks.DeviceDesk, "__init__", here)
    remote.port = port
    return remote


def said(capsys):
    return capsys.readouterr().out


def test_send_says_who_has_the_job_and_who_failed(fleet, capsys):
    fleet.troubles["pi-1"] = SshTrouble.UNREACHABLE
    assert main(["devices", "send", "job.toml", "cluster.toml"]) == 1
    text = said(capsys)
    assert "pi-0             ok       sent" in text
    assert "pi-1             FAILED   unreachable" in text
    assert "1 of 3 failed: the same command goes on with them" in text
    job = (fleet.folder / "pi-2/etc/edgetrain/current/job.toml").read_text()
    assert job == Path("job.toml").read_text()
    assert main(["devices", "send", "job.toml", "cluster.toml", "pi-0", "pi-2", "--json"]) == 0
    found = json.loads(said(capsys))
    assert [each["said"] for each in found] == ["had it already"] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["send", "none.toml", "cluster.toml"], "none.toml"),
        (["send", "job.toml", "nobody.toml"], "no cluster file 'nobody.toml'"),
        (["send", "job.toml", "cluster.toml", "pi-9"], "no device 'pi-9'"),
        (["send", "data.toml", "cluster.toml"], "devices would lack it"),
        (["send", "job.toml", "hubless.toml"], "hubless.toml has no hub"),
        (["send", "job.toml", "four.toml"], "has 4 devices, and the job's fleet.members is 3"),
        (["send", "job.toml", "twice.toml"], "two devices are called pi-0"),
        (["status", "cluster.toml", "--timeout", "0"], "--timeout 0: allowed are 0.1 to 3600"),
        (["update", "cluster.toml", "--at-once", "0"], "--at-once 0: allowed are 1 to 1000"),
        (["update", "cluster.toml", "--worker", "job.toml"], "job.toml is not a worker archive"),
    ],
)
def test_a_slip_is_one_line_and_no_device_is_asked(fleet, capsys, words, message):
    text = Path("cluster.toml").read_text()
    Path("hubless.toml").write_text(text.partition("[ssh]")[1] + text.partition("[ssh]")[2])
    more = '[[device]]\nname = "{}"\nprofile = "raspberry-pi-4b"\n'
    Path("four.toml").write_text(text + more.format("pi-3"))
    Path("twice.toml").write_text(text + more.format("pi-0"))
    Path("data.toml").write_text(Path("job.toml").read_text() + '\n[data]\nfolder = "nowhere"\n')
    assert main(["devices", *words]) == 2
    err = capsys.readouterr().err.strip()
    assert message in err
    assert "\n" not in err
    assert fleet.commands == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--json"], "--cluster and --json do not go together"),
        (["steps=3"], "devices and hub read one job file"),
    ],
)
def test_what_a_run_on_devices_does_not_go_with(fleet, capsys, words, message):
    assert main(["run", "job.toml", *words, "--cluster", "cluster.toml"]) == 2
    assert message in capsys.readouterr().err
    assert main(["run", "job.toml", "--keys", "hub"]) == 2
    assert "--keys without --cluster" in capsys.readouterr().err
    assert fleet.commands == []


def test_status_says_who_needs_a_person(fleet, capsys, monkeypatch):
    monkeypatch.setattr(desks, "HOT_CELSIUS", 1000.0)
    monkeypatch.setattr(desks, "FULL_BYTES", 0)
    assert main(["devices", "status", "cluster.toml"]) == 0
    assert said(capsys).count("training: 3 of 9 steps") == 3
    (fleet.folder / "pi-2/unit").write_text("refused")
    assert main(["devices", "status", "cluster.toml", "--json"]) == 1
    found = {each["name"]: each for each in json.loads(said(capsys))}
    assert found["pi-2"]["state"] == "refused"
    assert [each["needs_a_person"] for each in found.values()] == [False, False, True]


def test_update_tells_of_another_protocol_and_updates(fleet, capsys, tmp_path):
    for how, protocol in (("good", PROTOCOL), ("refused", PROTOCOL)):
        packed(tmp_path, how, protocol, PYTHON, platform.machine())
    words = ["devices", "update", "cluster.toml", "--worker"]
    assert main([*words, f"good-{PROTOCOL}.tar"]) == 0
    assert said(capsys).count("ok       updated") == 3
    assert main([*words, f"refused-{PROTOCOL}.tar", "--at-once", "1"]) == 1
    text = said(capsys)
    assert "pi-0             FAILED   went back: the hub refused: protocol" in text
    assert text.count("left alone") == 2
    assert facts(fleet.folder / "pi-1/opt/edgetrain/b.json")["ready"]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["send", "job.toml", "cluster.toml"], 1, "it belongs to the hub with the key OTHER"),
        (["update", "cluster.toml", "--worker", "good.tar"], 1, "slot b is in use: another update"),
        (["update", "cluster.toml", "--worker", "old.tar"], 2, "pi-0 is in a job, and the update"),
    ],
)
def test_what_a_device_does_not_bear_is_one_line_and_changes_nothing(
    fleet, capsys, tmp_path, words, status, message
):
    keys(tmp_path, "hub")
    for name, protocol in (("good", PROTOCOL), ("old", PROTOCOL - 1)):
        path, _ = packed(tmp_path, "good", protocol, PYTHON, platform.machine())
        path.rename(f"{name}.tar")
    root = fleet.folder / "pi-0"
    (root / "var/lib/edgetrain-keys/hubs").write_text("tcp://other:5555 OTHERKEY\n")
    (root / "opt/edgetrain/a/edgetrain/exchange").mkdir(parents=True)
    (root / f"opt/edgetrain/a/{MESSAGES}").write_text(f"PROTOCOL = {PROTOCOL}\n")
    if "good.tar" in words:
        (root / "opt/edgetrain/b.json").write_text('{"digest": "another"}')
        trial = {"old": "a", "new": "b", "phase": "trying"}
        (root / "opt/edgetrain/trial.json").write_text(json.dumps(trial))
    before = state(root)
    assert main(["devices", *words, "--keys", "hub"]) == status
    told = capsys.readouterr()
    assert any(message in line for line in (told.out + told.err).splitlines())
    assert state(root) == before


MEMBERS = """#!/bin/sh
name=$(basename "$PWD")
case "$*" in
*restart*edgetrain-member*)
    PYTHONPATH={folder} {python} -m edgetrain member etc/edgetrain/current/job.toml \\
        --hub tcp://127.0.0.1:{port} --index "${{name#pi-}}" --keys {folder}/"$name"-keys \\
        --hub-key {public} --wait --runs run/edgetrain > said 2>&1 < /dev/null &
    echo $! > pid ;;
show*) kill -0 "$(cat pid)" && echo ActiveState=active || echo ActiveState=inactive ;;
esac
"""


def test_run_trains_on_devices_without_the_one_that_is_dead(fleet, capsys, tmp_path, monkeypatch):
    """The whole way: job sent, members restarted, hub here; one device is never there."""
    for name in NAMES:
        keys(tmp_path, f"{name}-keys")
    keys(tmp_path, "hub", *(f"{name}-keys" for name in NAMES))
    public = spell(Keyring(tmp_path / "hub").pair().public)
    (tmp_path / "stand-ins/systemctl").write_text(
        MEMBERS.format(folder=tmp_path, python=sys.executable, port=fleet.port, public=public)
    )
    fleet.troubles["pi-1"] = SshTrouble.UNREACHABLE
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = ["run", "job.toml", "--cluster", "cluster.toml", "--keys", "hub"]
    status = main(words)
    text = said(capsys)
    assert status == 0, text
    assert "pi-1             FAILED   unreachable" in text
    (folder,) = Path("runs").glob("*-hub")
    summary = read_summary(folder)
    assert summary["status"] == "finished"
    (started,) = [r for r in read_metrics(folder, "event") if r["event"] == "started"]
    assert started["reason"] == "2 of 3 members"
    assert sorted(path.name for path in folder.glob("members/*")) == ["pi-0", "pi-2"]
    own = read_summary(folder / "members/pi-0")
    assert (own["status"], own["steps"]) == ("finished", 30)


HUB = """
*restart*edgetrain-hub*)
    mkdir -p var/lib/edgetrain/runs/1
    PYTHONPATH={folder} {python} -m edgetrain hub etc/edgetrain/current/job.toml \\
        --bind tcp://127.0.0.1:{port} --keys {folder}/hub --runs var/lib/edgetrain/runs/1 \\
        > said 2>&1 < /dev/null &
    echo $! > pid
    until grep "waiting for" said; do sleep 0.1; done ;;
"""


def test_a_hub_on_a_device_is_shown_and_its_run_folder_comes_home(
    fleet, capsys, tmp_path, monkeypatch
):
    cluster = Path("cluster.toml")
    device = '[[device]]\nname = "hub-pi"\nprofile = "raspberry-pi-4b"\nrole = "hub"\n'
    cluster.write_text(cluster.read_text() + device)
    root = flashed(fleet.folder / "hub-pi")
    (root / "etc/systemd/system/edgetrain-hub.service").write_text("")
    (root / "pid").write_text("")
    for name in NAMES:
        keys(tmp_path, f"{name}-keys")
    keys(tmp_path, "hub", *(f"{name}-keys" for name in NAMES))
    words = ["run", "job.toml", "--cluster", "cluster.toml", "--keys", "desk"]
    keys(tmp_path, "desk")
    assert main(words) == 2
    assert "the key of hub-pi, which has the hub, is not on the list" in capsys.readouterr().err
    hub = Keyring(tmp_path / "hub").pair().public
    Keyring(tmp_path / "desk").allow(hub, "hub-pi")
    filled = {"folder": tmp_path, "python": sys.executable, "port": fleet.port}
    head, members = MEMBERS.format(public=spell(hub), **filled).split('case "$*" in')
    program = tmp_path / "stand-ins/systemctl"
    program.write_text(head + 'case "$*" in' + HUB.format(**filled) + members)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    status = main(words)
    text = said(capsys)
    assert status == 0, text
    assert text.splitlines()[0].startswith("hub-pi           ok       sent"), text
    (folder,) = Path("runs").glob("*")
    assert "hub on hub-pi; run folder: runs/" in text
    assert read_summary(folder)["status"] == "finished"
    assert len(list(read_metrics(folder, "round"))) == len(
        list(read_metrics(next((root / "var/lib/edgetrain/runs/1").glob("*")), "round"))
    )
    assert sorted(path.name for path in folder.glob("members/*")) == list(NAMES)
    assert not list(folder.glob("journal*")), "the journal stays there"
    pins = (fleet.folder / "pi-0/var/lib/edgetrain-keys/hubs").read_text()
    assert spell(hub) in pins


@pytest.mark.parametrize("stays", [True, False])
def test_ctrl_c_asks_whether_it_trains_on(fleet, capsys, tmp_path, monkeypatch, stays):
    keys(tmp_path, "hub")
    hubs = []

    def interrupted(hub, folder, members):
        hubs.append(hub)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_desk, "follow", interrupted)
    monkeypatch.setattr(cli_desk, "leaves", lambda: stays)
    words = ["run", "job.toml", "--cluster", "cluster.toml", "--keys", "hub"]
    status = main(words)
    (hub,) = hubs
    try:
        assert hub.is_running == stays
        assert status == (0 if stays else 130)
        assert ("it trains on: `edgetrain watch runs/" in said(capsys)) == stays
        stopped = [(fleet.folder / name / "unit").read_text() == "stopped\n" for name in NAMES]
        assert stopped == [not stays] * 3
    finally:
        hub.stop()
