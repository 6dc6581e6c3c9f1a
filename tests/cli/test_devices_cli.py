"""`edgetrain devices …`: profiles as text, and the machine itself, of which less is known."""

from __future__ import annotations

import json

import pytest

from edgetrain.__main__ import main
from edgetrain.fleet import cluster, devices
from edgetrain.fleet.devices.energy import joules_source


def test_list_has_a_line_for_each_profile(capsys):
    assert main(["devices", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == devices.names()


def test_show_names_the_source_of_each_figure(capsys):
    assert main(["devices", "show", "raspberry-pi-4b"]) == 0
    said = capsys.readouterr().out
    assert "11.9 Gflop/s     6.4 W  Raspberry Pi 4 Model B" in said
    for key in devices.load("raspberry-pi-4b").source:
        assert f"\n  {key}: " in said


def test_show_host_says_what_is_known_of_this_machine(capsys):
    host = devices.load("host")
    assert main(["devices", "show", "host"]) == 0
    first, *more = capsys.readouterr().out.splitlines()
    assert first.startswith("host ")
    assert f"{host.cores} cores" in first
    assert f"{host.memory_bytes / 1e9:.1f} GB" in first
    assert "- Gflop/s" in first
    assert host.title in first
    assert "  speed: its own; steps are not paced" in more
    source = joules_source("host")
    assert any(line.startswith(f"  joules: {source or 'unknown'}") for line in more)
    assert main(["devices", "show", "host", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["train_gflops"] is None


def test_init_writes_a_cluster_file_that_can_be_read(tmp_path, capsys):
    path = tmp_path / "cluster.toml"
    assert main(["devices", "init", str(path), "--count", "2"]) == 0
    assert "next: " in capsys.readouterr().out
    found = cluster.load(path)
    assert [device.name for device in found.devices] == ["pi-0", "pi-1"]
    for words, said in (
        ([str(path)], "--force overwrites it"),
        ([str(path), "--force", "--count", "0"], "allowed are 1 to 10000"),
        ([str(path), "--force", "--profile", "raspbery-pi-4b"], "did you mean 'raspberry-pi-4b'"),
        ([str(tmp_path / "none" / "cluster.toml")], "cannot write"),
    ):
        assert main(["devices", "init", *words]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["devices", "networks", "keys", "bundle"])
def test_a_missing_verb_is_an_error_that_names_the_verbs(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        main([verb])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"edgetrain {verb}: error: VERB is missing; choose from " in said
    assert {"devices": "list, show", "networks": "list, show, check, apply", "keys": "enroll",
            "bundle": "make"}[verb] in said  # fmt: skip
