"""The examples, run as a reader would: with the real hub and real processes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from command_line import hub, running

from edgetrain.runs import folder as runs

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.real
def test_your_own_loop(tmp_path):
    program = (sys.executable, str(EXAMPLES / "your_own_loop.py"))
    with hub("members=2", "--any-job", cwd=tmp_path) as (serving, address):
        with (
            running("0", address, program=program, cwd=tmp_path) as first,
            running("1", address, program=program, cwd=tmp_path) as second,
        ):
            assert (first.finish(120), second.finish(120)) == (0, 0), first.said + second.said
        assert serving.finish() == 0
    accuracies = [
        re.findall(r"accuracy on unseen digits: (0\.\d+)", m.said) for m in (first, second)
    ]
    assert accuracies[0] == accuracies[1], "both end with the fleet's model"
    assert float(accuracies[0][0]) > 0.85


@pytest.mark.real
def test_a_loop_that_is_killed_keeps_going(tmp_path):
    program = (sys.executable, str(EXAMPLES / "keeps_going.py"))
    with hub("members=1", "--any-job", "gone_s=30", "delay=5", cwd=tmp_path) as (serving, address):
        with running("kept", address, program=program, cwd=tmp_path) as first:
            assert first.until("begins with").split()[-1] == "0"
            first.process.kill()
            first.finish()
        with running("kept", address, program=program, cwd=tmp_path) as second:
            begun = int(second.until("begins with").split()[-1])
            assert second.finish(120) == 0, second.said
            assert float(second.said.split()[-1]) > 0.85
        assert serving.finish() == 0
    rounds = list(runs.read_metrics(next((tmp_path / "runs").iterdir()), "round"))
    every = 5  # of dga, the default; an automatic delay would let rounds of such short steps grow
    assert begun % every == 0
    assert sum(len(r["members"]) for r in rounds) >= 1000 // every - 1
    assert not list((tmp_path / "kept").glob("*.checkpoint"))


def test_the_added_lines_are_marked():
    lines = (EXAMPLES / "your_own_loop.py").read_text().splitlines()
    marked = [line.split("#")[0].strip() for line in lines if "  # edgetrain" in line]
    assert marked == [
        "member = edgetrain.join(hub, model, optimizer)",
        "member.close()",
    ]
