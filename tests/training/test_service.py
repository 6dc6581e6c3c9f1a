"""What a service manager is told of a member, and when."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import hub, running, write_tiny
from hub_runs import free_port, hub_folder, wait_for_rounds

from edgetrain.fleet import catalog, cluster
from edgetrain.provisioning.cards import flashing
from edgetrain.provisioning.keeper import HUB_MARK, LOOKING
from edgetrain.runs.folder import read_metrics
from edgetrain.training.member.service import AWAY_S, SLOWEST, UNKNOWN_S, Service

UNIT = catalog.folder("devices") / "systemd" / flashing.UNIT


class Manager:
    """A service manager's end of the socket: what it was told, field by field."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self.told: list[tuple[str, str]] = []

    def read(self) -> None:
        """One more message."""
        for line in self._socket.recv(65536).decode().splitlines():
            key, _, value = line.partition("=")
            self.told.append((key, value))

    def drain(self) -> list[tuple[str, str]]:
        """All that was told so far."""
        self._socket.setblocking(False)
        try:
            while True:
                self.read()
        except BlockingIOError:
            self._socket.setblocking(True)
        return self.told

    def until(self, key: str, begin: str) -> None:
        """Read until a field of this name begins like this."""
        while not any(k == key and v.startswith(begin) for k, v in self.told):
            self.read()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path, monkeypatch) -> Iterator[Manager]:
    found = Manager(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(found.path))
    monkeypatch.setenv("WATCHDOG_USEC", "120000000")
    yield found
    found.close()


@pytest.mark.real
def test_ready_comes_after_the_welcome_and_before_training(manager, tmp_path, monkeypatch):
    job = write_tiny(
        tmp_path,
        fleet={"members": 2},
        train={"steps": 6},
        strategy={"name": "fedavg", "local_steps": 2},
    )
    monkeypatch.delenv("NOTIFY_SOCKET")
    with hub(job, cwd=tmp_path) as (_, address):
        words = ("member", job, "--hub", address, "--index")
        monkeypatch.setenv("NOTIFY_SOCKET", str(manager.path))
        with running(*words, "0", cwd=tmp_path) as first:
            manager.until("READY", "1")
            told = (field for field in manager.told if not field[0].startswith("WATCHDOG"))
            before = list(dict.fromkeys(told))  # a busy machine says it again
            assert before[0] == ("STATUS", f"looking for the hub at {address}")
            assert before[1] == ("STATUS", f"joining {address}")
            assert before[2:] == [("READY", "1"), ("STATUS", "welcome; waiting for 2 members")]
            manager.until("STATUS", "welcome; waiting for 1 of 2 members")
            monkeypatch.delenv("NOTIFY_SOCKET")
            with running(*words, "1", cwd=tmp_path) as second:
                assert (first.finish(), second.finish()) == (0, 0), first.said + second.said
    told = manager.drain()
    assert ("STOPPING", "1") in told
    assert told[-1] == ("STATUS", "done")
    assert told.count(("READY", "1")) == 1


@pytest.mark.real
def test_the_status_says_how_far_training_is(manager, tmp_path, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "1000")  # a sign of life at each step
    job = write_tiny(tmp_path, fleet={"members": 1}, train={"steps": 6})
    with (
        hub(job, cwd=tmp_path) as (_, address),
        running("member", job, "--hub", address, "--index", "0", cwd=tmp_path) as member,
    ):
        manager.until("STATUS", "training: 0 of 6 steps")
        manager.until("STATUS", "training: 5 of 6 steps")
        manager.until("STATUS", "done")
        assert member.finish() == 0


@pytest.mark.real
def test_a_member_that_comes_late_counts_the_steps_of_the_job_as_its_hub_does(
    manager, tmp_path, monkeypatch
):
    notify = str(manager.path)
    job = write_tiny(
        tmp_path,
        fleet={"members": 2, "pace_s": 0.02},
        train={"steps": 100_000},
        strategy={"name": "fedavg", "local_steps": 2},
        hub={"heartbeat_s": 0.2, "status_s": 0.1},
    )
    with hub(job, cwd=tmp_path) as (_, address):
        words = ("member", job, "--hub", address, "--index")
        monkeypatch.delenv("NOTIFY_SOCKET")
        with running(*words, "0", cwd=tmp_path), running(*words, "1", cwd=tmp_path) as second:
            wait_for_rounds(hub_folder(tmp_path), 20)
            second.process.send_signal(signal.SIGTERM)
            assert second.finish() == 143
            monkeypatch.setenv("NOTIFY_SOCKET", notify)
            monkeypatch.setenv("WATCHDOG_USEC", "1000")  # a sign of life at each step
            before = len(list(read_metrics(hub_folder(tmp_path))))
            with running(*words, "1", cwd=tmp_path):
                manager.until("STATUS", "training")
                text = next(text for _, text in manager.told if text.startswith("training"))
                first = int(text.split()[1])
                assert first >= 40, "rounds of two steps each were over when it came"
                at_hub: list[int] = []
                while not any(step > first for step in at_hub):
                    manager.read()
                    lines = list(read_metrics(hub_folder(tmp_path)))[before:]
                    of_it = [line for line in lines if line.get("about") == "m1"]
                    at_hub = [line["step"] for line in of_it if line["kind"] == "status"]
        assert at_hub[0] >= first


@pytest.mark.real
def test_a_member_without_a_hub_is_never_ready_and_says_why(manager, tmp_path):
    job = write_tiny(tmp_path)
    words = ("member", job, "--hub", "tcp://localhost:9", "--index", "0")
    with running(*words, cwd=tmp_path) as member:
        assert member.finish() == 75
    told = manager.drain()
    assert "READY" not in dict(told)
    assert told[-1][0] == "STATUS"
    assert "nothing listens at tcp://localhost:9" in told[-1][1]


def service(manager: Manager, now: list[float], **more: str) -> Service:
    environment = {"NOTIFY_SOCKET": str(manager.path), **more}
    return Service(environment, lambda: now[0])


def test_signs_of_life_come_every_few_seconds_however_often_it_is_called(manager):
    now = [0.0]
    found = service(manager, now, WATCHDOG_USEC="20000000")
    found.describe = lambda: "round 41"
    for _ in range(120):
        now[0] += 0.1
        found.alive()
    told = manager.drain()
    assert told == [("STATUS", "round 41"), ("WATCHDOG", "1")] * 2  # a quarter of 20 s


def test_slowness_is_not_death(manager):
    now = [0.0]
    found = service(manager, now, WATCHDOG_USEC="20000000")
    found.ready()
    assert manager.drain()[-1] == ("WATCHDOG_USEC", f"{1e6 * UNKNOWN_S:.0f}")
    for step, seconds in enumerate((30.0, 10.0, 31.0), 1):
        now[0] += seconds
        found.alive(step)
    raised = [value for key, value in manager.drain() if key == "WATCHDOG_USEC"][1:]
    assert raised == [f"{1e6 * SLOWEST * s:.0f}" for s in (30.0, 31.0)]
    quick = service(manager, now, WATCHDOG_USEC="20000000")
    now[0] += 0.01
    quick.alive(1)
    assert manager.drain()[-1] == ("WATCHDOG_USEC", "20000000"), "never less than the unit says"


def test_a_member_whose_hub_is_away_is_not_ready_and_says_what_it_looks_for(manager):
    now, away = [0.0], [0.0]
    found = service(manager, now, WATCHDOG_USEC="20000000")
    found.describe, found.away = lambda: "training: 7 of 9 steps", lambda: away[0]

    def told_after(seconds: float) -> list[tuple[str, str]]:
        manager.told.clear()
        now[0] += seconds
        found.alive()
        return [field for field in manager.drain() if field[0] != "WATCHDOG"]

    away[0] = 100.0
    assert told_after(5) == [("STATUS", "training: 7 of 9 steps")], "it was never ready"
    found.ready()
    away[0] = AWAY_S - 1
    assert told_after(5) == [
        ("READY", "1"),
        ("STATUS", "training: 7 of 9 steps"),
        ("WATCHDOG_USEC", f"{1e6 * UNKNOWN_S:.0f}"),
        ("STATUS", "training: 7 of 9 steps"),
    ]
    away[0] = 12.0
    looking = ("STATUS", "looking for the hub: nothing from it for 12 s")
    assert told_after(5) == [looking, ("RELOADING", "1")]
    assert told_after(5) == [looking]
    away[0] = 0.0
    assert told_after(5) == [("STATUS", "training: 7 of 9 steps"), ("READY", "1")]
    assert told_after(5) == [("STATUS", "training: 7 of 9 steps")]


def test_a_sign_of_life_does_not_wipe_out_what_it_waits_for(manager):
    now = [0.0]
    found = service(manager, now, WATCHDOG_USEC="20000000")
    found.status("looking for the hub at tcp://10.0.0.1:5555")
    now[0] += 60
    found.alive()
    assert manager.drain()[-1] == ("WATCHDOG", "1")
    assert manager.told.count(("STATUS", "looking for the hub at tcp://10.0.0.1:5555")) == 2


def test_waiting_is_not_a_step(manager):
    now = [0.0]
    found = service(manager, now, WATCHDOG_USEC="20000000")
    now[0] += 500
    found.alive()
    assert "WATCHDOG_USEC" not in dict(manager.drain())


def test_without_a_service_manager_nothing_is_told_and_a_dead_one_is_no_error(tmp_path):
    Service({}).ready()
    Service({"NOTIFY_SOCKET": str(tmp_path / "none")}).stopping("x")
    Service({"NOTIFY_SOCKET": "@edgetrain-nobody-listens"}).alive()


def test_a_field_is_one_line(manager):
    service(manager, [0.0]).status("two\nREADY=1")
    assert manager.drain() == [("STATUS", "two READY=1")]


@pytest.mark.real
def test_a_hub_is_ready_once_it_listens_and_tells_why_it_ends(manager, tmp_path):
    job = write_tiny(tmp_path, fleet={"members": 2})
    with hub(job, cwd=tmp_path) as (_, address):
        manager.until("READY", "1")
        statuses = [value for key, value in manager.told if key == "STATUS"]
        assert statuses[-1].startswith("waiting for 2 members; run folder: ")
        with running("hub", job, "--bind", address, cwd=tmp_path) as other:
            assert other.finish() == 2
        manager.until("STATUS", f"port {address.rpartition(':')[2]}")
        assert ("STOPPING", "1") in manager.told


@pytest.mark.real
def test_a_gateway_looks_for_the_hub_above_and_is_ready_once_it_listens(
    manager, tmp_path, monkeypatch
):
    job = write_tiny(tmp_path, fleet={"members": 2, "gateways": True})
    top = f"tcp://127.0.0.1:{free_port()}"
    words = ("gateway", job, "--above", top, "--members", "2", "--bind", "tcp://127.0.0.1:0")
    with running(*words, cwd=tmp_path) as early:
        assert early.finish() == 75
    manager.drain()
    statuses = [value for key, value in manager.told if key == "STATUS"]
    assert len(statuses) == 2
    assert all(status.startswith(f"{LOOKING} above") for status in statuses), statuses
    assert ("STOPPING", "1") in manager.told
    monkeypatch.delenv("NOTIFY_SOCKET")
    with running("hub", job, "--bind", top, cwd=tmp_path) as hub:
        hub.until("members join")
        monkeypatch.setenv("NOTIFY_SOCKET", str(manager.path))
        with running(*words, cwd=tmp_path):
            manager.until("READY", "1")
    statuses = [value for key, value in manager.told if key == "STATUS"]
    assert statuses[-1].startswith("waiting for 2 members; run folder: ")


# -- the unit -------------------------------------------------------------------------------------


def text_of(role="member", **system) -> str:
    """The unit of the fourth device of a cluster, whose file has this [system]."""
    hub = {"addresses": ["tcp://192.168.1.5:5555"]}
    named = [{"name": f"pi-{i}", "profile": "raspberry-pi-4b", "max_celsius": 70} for i in range(4)]
    if role != "member":
        named[3] = {"name": "pi-3", "profile": "raspberry-pi-4b", "role": role}
    if role == "gateway":
        named[3]["site"] = named[0]["site"] = named[1]["site"] = "barn"
    table = {"hub": hub, "device": named, "system": system}
    found = cluster.parse(table, Path("cluster.toml"))
    return flashing.unit(found, found.devices[3])


def filled(tmp_path: Path, role="member") -> Path:
    """The unit as it is on a device, with a program that is there."""
    text = text_of(role).replace("@THREADS@", "4")
    path = tmp_path / f"edgetrain-{role}.service"
    path.write_text(text)
    return path


@pytest.mark.real
def test_a_unit_sets_tcp_where_the_cluster_file_says_so(tmp_path):
    """The commands themselves, with another `ip` and another folder of settings."""
    text = text_of(first_window=30, receive_kb=1000)
    lines = [line for line in text.splitlines() if line.startswith("ExecStartPre=+-")]
    assert text.index(lines[-1]) < text.index("\nExecStart=")
    (tmp_path / "tcp_rmem").write_text("4096 131072 6291456\n")
    (tmp_path / "ip").write_text(
        "#!/bin/sh\n[ $2 = route ] && echo default via 10.0.0.1 dev eth0 metric 5\n"
        f"[ $2 = change ] && echo $@ >>{tmp_path}/said\nexit 0\n"
    )
    (tmp_path / "ip").chmod(0o755)
    for line in lines:
        command = line.split("'")[1].replace("$$", "$")
        command = command.replace("/proc/sys/net/ipv4", str(tmp_path))
        path = f"{tmp_path}:{os.environ['PATH']}"
        subprocess.run(["/bin/sh", "-c", command], check=True, env={"PATH": path})
    assert (tmp_path / "tcp_rmem").read_text() == "4096 1000000 6291456\n"
    said = (tmp_path / "said").read_text()
    assert said == "route change default via 10.0.0.1 dev eth0 metric 5 initcwnd 30\n"


def test_the_unit_has_every_word_filled_in(tmp_path):
    text = filled(tmp_path).read_text()
    assert "@" not in text.replace("@system-service", "")
    assert "--hub tcp://192.168.1.5:5555 --index 3 --max-celsius 70 " in text
    assert "train.threads=4\n" in text


GATEWAY = "gateway --above tcp://192.168.1.5:5555 --members 2 --name barn"


@pytest.mark.real
@pytest.mark.parametrize(("role", "command"), [("hub", "hub"), ("gateway", GATEWAY)])
def test_a_hubs_unit_goes_on_with_the_run_that_has_begun(tmp_path, role, command):
    """Its commands themselves, with a stand-in for Python that says its words."""
    text = filled(tmp_path, role).read_text().replace("\\\n", " ").replace("$$", "$")
    assert ("\nLoadCredential=hubs:" in text) == (role == "gateway")
    assert HUB_MARK in text
    assert "@" not in text.replace("$@", "").replace("@system-service", "")
    (tmp_path / "python3").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python3").chmod(0o755)

    def said(number: str = "") -> list[str]:
        (tmp_path / "run").write_text(number) if number else None
        for key in ("ExecStartPre=", "ExecStart="):
            command = text.partition(f"\n{key}")[2].partition("\n")[0].partition("'")[2][:-1]
            command = command.replace("/etc/edgetrain/hub/run", str(tmp_path / "run"))
            words = ["/bin/sh", "-c", command.replace("/usr/bin/python3", "./python3")]
            done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.split()

    first = said()
    job = f"-m edgetrain {command} /etc/edgetrain/current/job.toml --bind tcp://*:5555 --keys"
    assert first[:-3] == job.split()
    assert first[-3:] == ["/etc/edgetrain/hub", "--runs", "runs/0"]
    for name in ("1-hub", "2-hub"):
        (tmp_path / "runs/0" / name).mkdir(parents=True)
    assert " ".join(said()).startswith(f"-m edgetrain {command} --resume runs/0/2-hub --bind")
    assert " ".join(said("1")).startswith(job.partition(" --bind")[0])
    assert not (tmp_path / "runs/0").exists()


@pytest.mark.real
@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="package systemd is missing")
@pytest.mark.parametrize("role", cluster.ROLES)
def test_systemd_accepts_the_unit_and_finds_it_little_exposed(tmp_path, role):
    path = filled(tmp_path, role)
    words = ["systemd-analyze", "--no-pager", "--man=no", "verify", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    newer = ("RestartSteps", "RestartMaxDelaySec")  # systemd 254
    wrong = [
        line
        for line in done.stderr.splitlines()
        if path.name in line and not any(word in line for word in newer)
    ]
    assert not wrong
    words = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=40"]
    done = subprocess.run([*words, str(path)], capture_output=True, text=True, check=False)
    if "unrecognized option" in done.stderr or "Failed to" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout.splitlines()[-1]
