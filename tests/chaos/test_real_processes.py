"""Chaos with real processes, in small: laws that hold, one that breaks, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from command_line import running, write_tiny

from chaos import command, fleet, schedule
from chaos.fleet import Setting
from chaos.schedule import Happening
from edgetrain.jobs import reading

pytestmark = pytest.mark.real

FORGETFUL = (sys.executable, str(Path(__file__).parent / "forgetful_hub.py"))
CHAOS = (sys.executable, "-m", "chaos")
SMALL = ("steps=150", "--seconds", "1.5")


@pytest.fixture(autouse=True)
def _others_find_chaos(monkeypatch):
    """Processes that are started here import the package, too."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


def run(*words, cwd):
    """Run a command to its end."""
    return subprocess.run([*CHAOS, *words], cwd=cwd, capture_output=True, text=True, timeout=240)


@pytest.fixture
def temporary(monkeypatch):
    """Where everything temporary goes, to see what is left of it. Short, for sockets' names."""
    with tempfile.TemporaryDirectory(prefix="et-") as found:
        monkeypatch.setenv("TMPDIR", found)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(found)


def left_in(folder):
    """Torch keeps an empty cache, as it does for everyone."""
    return [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


def stand_ins(*words, program=None):
    job = reading.load(None, [*command.STAND_IN, "steps=220", *words])
    return Setting(fleet.fit(job), **({"program": program} if program else {}))


def test_every_kind_of_happening_breaks_no_law(tmp_path):
    happenings = (
        Happening(0.05, "strangers", 0.5),
        Happening(0.1, "disk", 1.0),
        Happening(1.2, "clock", 1.0),
        Happening(1.3, "cut", 0.01, (0,)),
        Happening(1.4, "corrupt-up", 0.01, (1,)),
        Happening(1.6, "corrupt-down", 0.01, (2,)),
        Happening(1.7, "link", 0.2, (0,)),
        Happening(1.9, "hub", 0.1),
        Happening(2.0, "slow", 0.3, (2,)),
        Happening(2.3, "pause", 0.2, (0,)),
        Happening(2.4, "clock", 4.0, (1,)),
        Happening(2.5, "kill", 0.1, (2,)),
        Happening(3.4, "power", 0.1, (2,)),
        Happening(3.5, "frames", 0.01),
        Happening(3.6, "partition", 0.3, (0, 1)),
        Happening(4.5, "blackout", 0.2, (0, 1, 2)),
        Happening(5.0, "control-pause", 0.3),
        Happening(5.1, "control-remove", 0.1, (1,)),
    )
    # The end that people tell is in tests/cli/test_control_cli.py.
    assert {each.kind for each in happenings} == {*schedule.PROCESS_KINDS} - {"control-stop"}
    seen = []
    outcome = fleet.run(stand_ins(), tmp_path, 0, happenings, 100.0, seen.append)
    assert outcome.broken == ()
    assert outcome.rounds >= 44
    assert seen == list(happenings)
    said = (tmp_path / "hub.log").read_text()
    assert said.count("resumed after") >= 2, "a full disk and a kill"
    assert "cannot be written" in said


def test_a_schedule_with_the_stand_ins_from_the_command_line(tmp_path, temporary):
    words = ["--seed", "1", "--schedules", "1", *SMALL, "--json", "codec=int8"]
    done = run("--processes", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["schedules"], report["happenings"], report["broken"]) == (1, 5, [])
    assert report["rounds"] >= 30
    assert "1 of 1 schedules, 0 broke a law" in done.stderr
    assert left_in(temporary) == []
    assert not (tmp_path / "runs").exists()


def test_members_train_the_task_of_a_job_over_its_network(tmp_path, temporary):
    job = write_tiny(
        tmp_path,
        fleet={"members": 2, "pace_s": 0.01, "network": "rtt-50ms"},
        train={"steps": 150},
        strategy={"name": "fedavg", "local_steps": 5},
        hub={"lost_after_s": 2.0, "heartbeat_s": 0.3},
    )
    words = ["--schedules", "1", "--kinds", "hub,kill,cut", "--seed", "4"]
    done = run(job, "--processes", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("without a fault: 30 rounds in ")
    assert lines[-1].endswith("rounds: every law held")
    assert left_in(temporary) == []


def test_a_law_that_breaks_is_told_and_its_evidence_kept(tmp_path, monkeypatch, capsys, temporary):
    """The hub is killed, and its journal has forgotten: what was answered is lost."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "setting_of", lambda arguments: stand_ins(program=FORGETFUL))
    words = ["--processes", "--seed", "3", "--schedules", "1", "--kinds", "hub", *SMALL]
    assert command.main(words) == 1
    said = capsys.readouterr().out
    verdict = r"1 schedules, [1-5] things went wrong in 5 rounds: 1 broke a law"
    assert re.fullmatch(verdict, said.splitlines()[-1])
    assert "BROKEN: m0 was there all the time, and its rounds [5, 6, 7, 8, 9] are lost" in said
    (again,) = [line.strip() for line in said.splitlines() if "again: " in line]
    found = shlex.split(again.partition(": ")[2])
    assert found == [
        "python", "-m", "chaos", "steps=150", "--processes", "--seed", "3", "--schedules", "1",
        "--happenings", "5", "--kinds", "hub", "--seconds", "1.5",
    ]  # fmt: skip
    (kept,) = (tmp_path / "runs").iterdir()
    assert str(kept.name) in said
    assert {"hub.log", "trial.log", "m0.log", "m0.1.gave", "job.toml"} <= {
        p.name for p in kept.iterdir()
    }
    assert list(kept.glob("runs/*/journal/*.log"))
    assert not (kept / "keys").exists()
    assert left_in(temporary) == []


@pytest.mark.parametrize("how", ["ctrl-c", "kill"])
def test_who_is_interrupted_leaves_nothing_behind(how, tmp_path, temporary):
    words = ["--processes", "--schedules", "4", "--at-once", "2"]
    with running(*words, cwd=tmp_path, program=CHAOS) as started:
        until = time.monotonic() + 60
        while not hubs(started):
            assert time.monotonic() < until
            assert started.process.poll() is None
        if how == "ctrl-c":
            started.press_ctrl_c()
            assert started.finish() == 130
            assert "interrupted after 0 schedules" in started.said
        else:
            os.kill(started.process.pid, signal.SIGKILL)
            started.process.wait()
        assert started.left_behind() == []
    assert left_in(temporary) == []
    assert not (tmp_path / "runs").exists()


def hubs(command):
    return [each for each in command.started() if "chaos.hub" in line_of(each)]


def line_of(process):
    import psutil

    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--at-once", "2"], "add --processes"),
        (["--seconds", "3"], "add --processes"),
        (["--processes", "--seconds", "0"], "allowed is more than 0"),
        (["--processes", "on_disk_full=go on"], "leave it at 'stop'"),
        (["--schedules", "0"], "starts at 1"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(words, says, capsys):
    assert command.main(words) == 2
    assert says in capsys.readouterr().err
