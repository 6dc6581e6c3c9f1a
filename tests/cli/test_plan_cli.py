"""`edgetrain plan` as its users call it."""

from __future__ import annotations

import json

from edgetrain.__main__ import main

PI = ["task=edgetrain.tasks:char_lm", "device=raspberry-pi-4b"]
BIG = [*PI, "data.width=2048", "data.heads=16", "data.layers=6"]


def plan(capsys, *words):
    status = main(["plan", *words])
    return status, capsys.readouterr()


def test_a_job_that_fits_says_so(capsys):
    status, told = plan(capsys, *PI)
    assert status == 0
    assert "runs      on its devices" in told.out
    assert "raspberry-pi-4b" in told.out


def test_a_job_that_fits_nowhere_ends_with_1(capsys):
    status, told = plan(capsys, *BIG)
    assert status == 1
    assert "runs      nowhere" in told.out
    assert "raspberry-pi-4b has 3.4 GB" in told.out


def test_the_whole_plan_as_json(capsys, tmp_path):
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('[[server]]\nname = "a"\nhost = "a"\nprofile = "gpu-server"\n')
    status, told = plan(
        capsys, *BIG, "fallback=when-needed", f"servers.cluster={cluster}", "--json"
    )
    found = json.loads(told.out)
    assert status == 0
    assert found["chosen"] == found["placements"][0]["placement"]
    assert found["model"]["parameters"] > 3e8
    assert {len(each["layers"]) for each in found["placements"]} == {
        *(len(each["bytes"]) for each in found["placements"])
    }
    assert found["placements"] == sorted(found["placements"], key=lambda each: each["seconds"])


def test_one_placement_is_judged(capsys):
    status, told = plan(capsys, "members=2", "--placement", "pipeline=2 microbatches=4", "--json")
    best = json.loads(told.out)["placements"][0]
    assert status == 0
    assert best["ranks"] == 2
    assert len(best["layers"]) == 2


def test_a_placement_that_cannot_be_is_one_line(capsys):
    status, told = plan(capsys, "--placement", "pipelin=2")
    assert status == 2
    assert told.err == "edgetrain: placement: 'pipelin=2' (did you mean 'pipeline'?)\n"
