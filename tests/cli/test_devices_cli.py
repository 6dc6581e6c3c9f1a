"""`edgetrain devices …`: profiles as text, and the machine itself, of which less is known."""

from __future__ import annotations

import json

import pytest

from edgetrain.__main__ import main
from edgetrain.fleet import devices


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
    source = devices.joules_source("host")
    assert any(line.startswith(f"  joules: {source or 'unknown'}") for line in more)
    assert main(["devices", "show", "host", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["train_gflops"] is None


@pytest.mark.parametrize("verb", ["devices", "networks", "keys", "bundle"])
def test_a_missing_verb_is_an_error_that_names_the_verbs(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        main([verb])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"edgetrain {verb}: error: VERB is missing; choose from " in said
    assert {"devices": "list, show", "networks": "list, show, check, lab", "keys": "enroll",
            "bundle": "make"}[verb] in said  # fmt: skip
