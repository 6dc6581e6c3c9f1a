"""`edgetrain devices run`, `remove`, `provision`: what they say, with an ssh that runs here."""

from __future__ import annotations

import json
import os

import pytest

from edgetrain.__main__ import main
from edgetrain.fleet import ssh
from edgetrain.fleet.ssh import SshClient

SSH = """#!/bin/sh
for word in "$@"; do line="$word"; done
case "$*" in *10.0.0.2*)
    echo "ssh: connect to host 10.0.0.2 port 22: Connection refused" >&2
    exit 255;;
esac
exec sh -c "$line"
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A cluster file of two devices; the second is off."""
    program = tmp_path / "bin/ssh"
    program.parent.mkdir()
    program.write_text(SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    devices = "".join(
        f'[[device]]\nname = "pi-{i}"\nprofile = "raspberry-pi-4b"\naddress = "10.0.0.{i + 1}/24"\n'
        for i in range(2)
    )
    path = tmp_path / "cluster.toml"
    path.write_text(f'[ssh]\nuser = "fleet"\nkeys = ["id.pub"]\n{devices}')
    return path


def devices(*words):
    return main(["devices", *map(str, words)])


@pytest.mark.real
def test_each_line_has_its_device_and_one_that_is_off_is_named(cluster, tmp_path, capsys):
    keys = ("--keys", tmp_path / "keys")
    assert devices("run", *keys, cluster, "pi-0", "--", "printf", "a\nb") == 0
    assert capsys.readouterr().out == "pi-0: a\npi-0: b\n"
    assert devices("run", *keys, cluster, "--", "echo", "-n") == 1
    said = capsys.readouterr()
    assert "pi-1: unreachable" in said.err
    assert devices("run", "--json", *keys, cluster, "--", "sh", "-c", "exit 3") == 1
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert (found["pi-0"]["status"], found["pi-1"]["status"]) == (3, -1)


@pytest.mark.real
def test_an_exception_at_one_device_is_its_line_and_status_1(cluster, capsys, monkeypatch):
    run = SshClient.run

    def raising(client, host, words, *rest, **more):
        return run(client, host, words, *rest, **more) if host.name == "pi-0" else 1 / 0

    monkeypatch.setattr(SshClient, "run", raising)
    assert devices("run", cluster, "--", "echo", "here") == 1
    said = capsys.readouterr()
    assert (said.out, said.err.split(" (")[0]) == ("pi-0: here\n", ZERO)
    assert devices("run", "--json", cluster, "--", "true") == 1
    (one, other) = json.loads(capsys.readouterr().out)
    assert (one["status"], other["status"], other["why"].split(" (")[0]) == (0, -1, ZERO[6:])


def test_no_more_are_followed_than_are_worked_on_at_a_time(cluster, capsys, monkeypatch):
    monkeypatch.setattr(ssh, "AT_ONCE", 1)
    assert devices("logs", "--follow", cluster) == 2
    assert "--follow: 2 devices, and at most 1 are followed (name them)" in capsys.readouterr().err


ZERO = "pi-1: ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "CLUSTER", "pi-0"], "which command"),
        (["run", "--timeout", "0", "CLUSTER", "--", "true"], "more than 0 seconds"),
        (["run", "CLUSTER", "pi-7", "--", "true"], "no device 'pi-7'"),
        (["logs", "-n", "-1", "CLUSTER"], "allowed are 0 to 100000"),
        (["remove", "CLUSTER"], "the hub's keys are not on this machine"),
        (["provision", "CLUSTER"], "[hub] is missing"),
        (["reboot", "--ask-sudo", "CLUSTER"], "nobody can be asked"),
    ],
)
def test_what_cannot_be_is_one_line(cluster, tmp_path, capsys, words, said):
    given = [cluster if word == "CLUSTER" else word for word in words]
    given[1:1] = ["--keys", tmp_path / "keys"]
    assert devices(*given) == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.strip().splitlines()) == 1


def test_an_inventory_has_each_device_below_its_kind(cluster, capsys):
    cluster.write_text(cluster.read_text().replace('\naddress = "10.0.0.2/24"', ""))
    assert devices("inventory", cluster) == 0
    group = json.loads(capsys.readouterr().out)["edgetrain"]
    assert group["hosts"]["pi-0"] == {
        "ansible_host": "10.0.0.1",
        "ansible_user": "fleet",
        "edgetrain_index": 0,
        "edgetrain_profile": "raspberry-pi-4b",
    }
    assert group["hosts"]["pi-1"]["ansible_host"] == "pi-1.local"
    assert group["children"] == {"raspberry_pi_4b": {"hosts": {"pi-0": {}, "pi-1": {}}}}
    assert devices("inventory", cluster, "pi-1") == 0
    (only,) = json.loads(capsys.readouterr().out)["edgetrain"]["hosts"].values()
    assert only["edgetrain_index"] == 1, "its place in the file"
