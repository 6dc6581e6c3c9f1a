"""Bad input of the verbs that look at runs, write a job or a script: one clear line each."""

from __future__ import annotations

import io
import re

import pytest
from made_up_runs import DGA, Clock, job, replace, write_run
from rich.console import Console

from edgetrain.__main__ import main
from edgetrain.runs.folder import (
    FORMAT,
    METRICS,
    metrics_path,
    read_summary,
    write_job,
    write_summary,
)
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.runs.reports.live.frame import Frame
from edgetrain.runs.reports.live.watch import FolderWatch

SHORT = replace(DGA, members=2, steps=20)


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", SHORT)


def refusal(capsys, *words):
    assert main([str(word) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("edgetrain: ")
    return line


@pytest.mark.parametrize("verb", ["watch", "report"])
def test_what_is_no_run_folder_is_named(verb, tmp_path, capsys):
    assert f"{tmp_path} is no run folder" in refusal(capsys, verb, tmp_path)
    file = tmp_path / "metrics.jsonl.txt"
    file.write_text("{}")
    assert str(file) in refusal(capsys, verb, file)
    absent = tmp_path / "absent"
    assert f"{absent} does not exist" in refusal(capsys, verb, absent)


@pytest.mark.parametrize("verb", ["watch", "report"])
def test_a_folder_of_another_format_says_which_is_read(verb, run, capsys):
    write_summary(run, {"format": 99})
    said = refusal(capsys, verb, run)
    assert "format 99; this edgetrain reads up to" in said
    assert "read it with the edgetrain that wrote it" in said


@pytest.mark.parametrize("verb", ["watch", "report"])
@pytest.mark.parametrize("inside", ["a run", "nothing"])
def test_a_folder_of_several_runs_or_of_none_has_a_format_too(inside, verb, run, tmp_path, capsys):
    """As comparisons and sweeps leave it, and as capacity plans and calibrations do."""
    several = tmp_path / "several"
    several.mkdir()
    write_job(several, {})
    write_summary(several, {"name": "several"})
    if inside == "a run":
        run.rename(several / "sync-sgd")
    else:
        assert f"{several} is no run folder" in refusal(capsys, verb, several)
    assert read_summary(several) == {"format": FORMAT, "name": "several"}
    write_summary(several, {"format": FORMAT + 1})
    assert f"format {FORMAT + 1}; this edgetrain reads up to" in refusal(capsys, verb, several)


@pytest.mark.parametrize("verb", ["watch", "report"])
def test_a_summary_half_written_is_named(verb, run, capsys):
    path = run / "summary.json"
    path.write_text(path.read_text()[:40])
    assert f"{path} is not JSON" in refusal(capsys, verb, run)


def test_a_job_half_written_is_named(run, capsys):
    (run / "job.toml").write_text("[fleet]\nmembers =")
    assert "job.toml" in refusal(capsys, "report", run)


def test_runs_of_different_tasks_are_named(run, tmp_path, capsys):
    other = write_run(tmp_path / "other", SHORT)
    (other / "summary.json").unlink()
    write_job(other, job(SHORT) | {"task": "edgetrain.tasks:mnist"})
    said = refusal(capsys, "report", run, other)
    assert "different tasks: edgetrain.tasks:digits, edgetrain.tasks:mnist" in said


TORN = (
    b'{"kind":"step","t":1.0,"mem\n'
    b"not ours\n"
    b"\x00\xff\xfe\n"
    b'{"kind":"step","t":"late","member":"m0"}\n'
    b'{"kind":"step","t":1.0,"member":"m0"}\n'
    b'{"kind":"exchange","t":1.0,"member":"m0","round":"x"}\n'
    b'{"kind":"dance","t":1.0,"member":"m0"}\n'
    b'[1,2]\n{"kind":"step","t":2.0'
)


@pytest.mark.parametrize("verb", ["watch", "report", "runs"])
def test_torn_and_foreign_lines_of_metrics_stop_nobody(verb, run, capsys):
    with metrics_path(run).open("ab") as file:
        file.write(TORN)
    words = ["--runs", str(run.parent)] if verb == "runs" else [str(run)]
    assert main([verb, *words]) == 0
    assert capsys.readouterr().err == ""
    if verb == "report":
        assert "lines of metrics could not be read" in (run / "report.html").read_text()


def test_columns_say_that_members_tell_a_hub_nothing(tmp_path):
    folder = tmp_path / "hub"
    folder.mkdir()
    write_job(folder, job(SHORT) | {"hub": {"status_s": 0.0}})
    with MetricsLog(metrics_path(folder), "hub", Clock(), 0.0) as log:
        for name in ("m0", "m1"):
            log.event("joined", about=name)
    watch, out = FolderWatch(folder), io.StringIO()
    watch.read()
    Console(file=out, width=100, height=20).print(Frame("", (watch.state(),), ()))
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "members do not tell the hub how they are doing: hub.status_s = 0" in said
    assert re.search(r"(?m)^m0 .* - ", said)


def test_a_task_that_is_there_is_not_replaced(tmp_path, capsys):
    task = tmp_path / "mine.py"
    task.write_text("mine")
    said = refusal(capsys, "init", tmp_path / "job.toml", "--task", task)
    assert f"{task} exists" in said or "is there already" in said
    assert task.read_text() == "mine"
    assert not (tmp_path / "job.toml").exists()


def test_an_unknown_shell_is_told_the_known_ones(capsys):
    said = refusal(capsys, "completion", "bsh")
    assert "bsh" in said
    assert "did you mean 'bash'?" in said


@pytest.mark.parametrize("lines", ["no line", "torn lines"])
def test_a_report_of_nothing_is_refused_and_says_why(lines, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    write_job(folder, job(SHORT))
    (folder / METRICS).write_bytes(TORN * (lines == "torn lines"))
    said = refusal(capsys, "report", folder)
    assert f"there is nothing to report of {folder}: " in said
    why = "no line has been written" if lines == "no line" else "none of its 8 lines can be read"
    assert why in said
    assert not (folder / "report.html").exists()


def test_a_report_without_a_job_says_what_is_known(run, capsys):
    (run / "job.toml").unlink()
    (run / "summary.json").unlink()
    assert main(["report", str(run)]) == 0
    assert "None" not in (run / "report.html").read_text()
