"""`edgetrain devices remove`, `provision`, `inventory`: what they say, with an ssh of our own."""

from __future__ import annotations

import json
import os

import pytest

from edgetrain.__main__ import main

SSH = """#!/bin/sh
case "$*" in
    "-G -- fleet@10.0.0.1") printf 'port 2222\\nproxyjump me@gate.example:2200\\n'; exit;;
    "-G "*) printf 'port 22\\n'; exit;;
esac
exit 255
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A cluster file of two devices; ssh has a jump host for the first."""
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "CLUSTER", "pi-7"], "no device 'pi-7'"),
        (["remove", "CLUSTER"], "the hub's keys are not on this machine"),
        (["provision", "CLUSTER"], "[hub] is missing"),
        (["bench", "--ask-sudo", "CLUSTER"], "nobody can be asked"),
    ],
)
def test_what_cannot_be_is_one_line(cluster, tmp_path, capsys, words, said):
    given = [cluster if word == "CLUSTER" else word for word in words]
    given[1:1] = ["--keys", tmp_path / "keys"]
    assert devices(*given) == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.strip().splitlines()) == 1


HUB = """
[[device]]
name = "desk"
profile = "raspberry-pi-5"
role = "hub"
"""


@pytest.mark.real
def test_an_inventory_has_each_device_below_its_role_and_its_kind(cluster, tmp_path, capsys):
    cluster.write_text(cluster.read_text().replace('\naddress = "10.0.0.2/24"', "") + HUB)
    (tmp_path / "id").touch()
    assert devices("inventory", cluster) == 0
    group = json.loads(capsys.readouterr().out)["edgetrain"]
    key = {"ansible_ssh_private_key_file": str(tmp_path / "id")}
    assert group["hosts"] == {
        "pi-0": {
            "ansible_host": "10.0.0.1",
            "ansible_port": 2222,
            "ansible_user": "fleet",
            **key,
            "ansible_ssh_common_args": "-o ProxyJump=me@gate.example:2200",
            "edgetrain_profile": "raspberry-pi-4b",
            "edgetrain_index": 0,
        },
        "pi-1": {
            "ansible_host": "pi-1.local",
            "ansible_port": 22,
            "ansible_user": "fleet",
            **key,
            "edgetrain_profile": "raspberry-pi-4b",
            "edgetrain_index": 1,
        },
        "desk": {
            "ansible_host": "desk.local",
            "ansible_port": 22,
            "ansible_user": "fleet",
            **key,
            "edgetrain_profile": "raspberry-pi-5",
        },
    }
    assert group["children"] == {
        "edgetrain_member": {"hosts": {"pi-0": {}, "pi-1": {}}},
        "raspberry_pi_4b": {"hosts": {"pi-0": {}, "pi-1": {}}},
        "edgetrain_hub": {"hosts": {"desk": {}}},
        "raspberry_pi_5": {"hosts": {"desk": {}}},
    }
    assert devices("inventory", cluster, "pi-1") == 0
    (only,) = json.loads(capsys.readouterr().out)["edgetrain"]["hosts"].values()
    assert only["edgetrain_index"] == 1, "its place in the file"
