"""What `edgetrain doctor` finds: a way out with everything that is missing, and nothing changed."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from types import SimpleNamespace

import pytest

from edgetrain.__main__ import main
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.zeromq.curve import new_pair
from edgetrain.extras import install_command
from edgetrain.training import readiness
from edgetrain.training.readiness import PURPOSES, checks


@pytest.fixture(autouse=True)
def torch_answers(monkeypatch):
    """torch is tried for real in one test only: it takes seconds."""
    answer = SimpleNamespace(returncode=0, stdout="2.13.0\n", stderr="")
    monkeypatch.setattr(readiness.subprocess, "run", lambda *args, **kept: answer)
    monkeypatch.setattr(
        "edgetrain.fleet.networks.emulation.probe.packets_possible", lambda: (True, "as root")
    )
    return answer


@pytest.mark.parametrize("purpose", ["", *PURPOSES])
def test_every_check_says_what_and_why_and_what_is_missing_has_a_way_out(tmp_path, purpose):
    found = list(checks(tmp_path, tmp_path / "keys", purpose))
    assert found
    for check in found:
        assert check.said
        assert check.verdict in ("yes", "limited", "no")
        assert bool(check.way_out) == (check.verdict != "yes")
        assert not purpose or purpose in check.purposes
    assert list(tmp_path.iterdir()) == []


def verdict(tmp_path, name, purpose):
    return next(c for c in checks(tmp_path, tmp_path / "keys", purpose) if c.name == name)


def test_a_torch_for_another_cpu_is_named(tmp_path, torch_answers):
    torch_answers.returncode = -signal.SIGILL
    check = verdict(tmp_path, "torch", "member")
    assert (check.verdict, "instructions" in check.said) == ("no", True)
    torch_answers.returncode, torch_answers.stderr = 1, "…\nImportError: libgomp"
    assert "libgomp" in verdict(tmp_path, "torch", "member").said


def test_a_torch_for_a_gpu_that_is_not_there_is_said(tmp_path, torch_answers):
    torch_answers.stdout = "2.13.0+cu130 idle\n"
    check = verdict(tmp_path, "torch", "member")
    assert (check.verdict, "CUDA" in check.said, "CPU" in check.way_out) == ("limited", True, True)


def test_keys_that_others_can_read_are_no(tmp_path):
    assert verdict(tmp_path, "keys", "hub").verdict == "limited"
    Keyring(tmp_path / "keys").init(new_pair)
    assert verdict(tmp_path, "keys", "hub").verdict == "yes"
    (tmp_path / "keys" / "key").chmod(0o644)
    check = verdict(tmp_path, "keys", "hub")
    assert (check.verdict, "chmod 600" in check.way_out) == ("no", True)


def test_a_port_in_use_is_said(tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        monkeypatch.setattr(readiness, "PORT", taken.getsockname()[1])
        assert verdict(tmp_path, "port", "hub").verdict == "limited"


def test_a_clock_of_1970_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(readiness.time, "time", lambda: 60.0)
    assert "1970" in verdict(tmp_path, "clock", "member").said


def test_little_memory_and_disk_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr("edgetrain.runs.environment.free_memory", lambda: 1 << 20)
    assert verdict(tmp_path, "memory, member", "member").verdict == "no"
    usage = SimpleNamespace(free=1 << 20)
    monkeypatch.setattr(readiness.shutil, "disk_usage", lambda path: usage)
    assert verdict(tmp_path, "disk", "report").verdict == "limited"


def test_the_exit_status_says_whether_what_is_asked_for_is_there(tmp_path, monkeypatch, capsys):
    words = ["doctor", "--runs", str(tmp_path), "--keys", str(tmp_path / "keys"), "--json"]
    found = readiness.find_spec
    monkeypatch.setattr(
        readiness, "find_spec", lambda name: None if name == "greenlet" else found(name)
    )
    assert main([*words, "--for", "simulate"]) == 1
    said = json.loads(capsys.readouterr().out)
    missing = next(check for check in said["checks"] if check["verdict"] == "no")
    assert missing["way_out"] == install_command("lab")
    assert main([*words, "--for", "hub"]) == 0


@pytest.mark.real
def test_torch_is_tried_for_real(tmp_path, monkeypatch):
    monkeypatch.undo()
    assert verdict(tmp_path, "torch", "member").said.endswith("runs on this CPU")
    assert subprocess.run is readiness.subprocess.run
