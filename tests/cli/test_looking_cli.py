"""The verbs that look at run folders: runs, watch and report."""

from __future__ import annotations

import json
import os
import re

import pytest
from made_up_runs import DGA, SYNC, job, replace, write_comparison, write_run

from edgetrain.__main__ import main
from edgetrain.runs.folder import (
    newest,
    newest_whole,
    read_summary,
    write_environment,
    write_job,
    write_summary,
)

SHORT = replace(DGA, members=2, steps=20)


def test_runs_lists_every_run_the_newest_last(tmp_path, capsys):
    write_run(tmp_path / "20260131-142501-digits", SHORT)
    write_run(tmp_path / "20260131-142502-digits", SHORT, upto=2)
    write_comparison(tmp_path / "20260201-080000-digits", SYNC, SHORT)
    (tmp_path / "not a run").mkdir()
    assert main(["runs", "--json", "--runs", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["strategy"], row["status"]) for row in found] == [
        ("dga", found[0]["status"]),
        ("dga", "no summary"),
        ("sync-sgd", found[2]["status"]),
        ("dga", found[3]["status"]),
    ]
    assert found[0]["began"] == "2026-01-31 14:25:01"
    assert main(["runs", "--runs", str(tmp_path), "--last", "1"]) == 0
    assert "142501" not in capsys.readouterr().out


def test_runs_of_a_damaged_folder_says_damaged(tmp_path, capsys):
    folder = write_run(tmp_path / "20260131-142501-digits", SHORT)
    (folder / "summary.json").write_text("[")
    assert main(["runs", "--runs", str(tmp_path)]) == 0
    assert "damaged" in capsys.readouterr().out


@pytest.mark.parametrize("bad", ["members", "format", "job", "fifo", "folder of runs"])
def test_a_bad_folder_is_one_row_that_says_why_and_hides_no_other(bad, tmp_path, capsys):
    write_run(tmp_path / "20260131-142500-good", SHORT)
    folder = write_run(tmp_path / "20260131-142501-bad\x1b[31m", SHORT)
    if bad == "members":
        write_summary(folder, read_summary(folder) | {"members": "eight"})
    elif bad == "format":
        write_summary(folder, {"format": 99})
    elif bad == "job":
        (folder / "job.toml").write_text("fleet = 3")
    elif bad == "fifo":
        (folder / "summary.json").unlink()
        os.mkfifo(folder / "summary.json")
    else:
        write_run(folder / "inside", SHORT)
        (folder / "metrics.jsonl").unlink()
        (folder / "summary.json").write_text('{"format":2,"runs":' + "[" * 9999)
    assert main(["runs", "--runs", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    (good,) = [line for line in said.splitlines() if "-good" in line]
    (row,) = [line for line in said.splitlines() if "-bad" in line]
    assert "damaged" not in good
    assert "damaged" in row
    why = {
        "members": "members = 'eight' is not a whole number",
        "format": "is a run folder of format 99",
        "job": "fleet = a int is not a table",
        "fifo": "is not a regular file",
        "folder of runs": "is not JSON: it is nested too deep",
    }[bad]
    assert why in row
    assert "\x1b" not in said
    assert main(["runs", "--json", "--runs", str(tmp_path)]) == 0
    assert why in json.loads(capsys.readouterr().out)[1]["why"]


def test_watch_takes_the_hubs_folder_and_not_that_of_a_member_beside_it(tmp_path, capsys):
    hub = tmp_path / "20260131-142501-hub"
    member = tmp_path / "20260131-142509-digits-m0"
    for folder, writers in ((hub, ["hub"]), (member, ["m0"])):
        metrics = write_run(folder, SHORT) / "metrics.jsonl"
        lines = metrics.read_bytes().splitlines(keepends=True)
        metrics.write_bytes(b"".join(x for x in lines if json.loads(x)["member"] in writers))
    write_environment(member)
    for path, at in ((member / "environment.json", 100), (hub / "metrics.jsonl", 200)):
        os.utime(path, (at, at))
    assert newest(tmp_path) == member
    assert newest_whole(tmp_path) == hub
    for path in hub.iterdir():  # of another day: the hub of this member is on another machine
        os.utime(path, (50, 50))
    assert newest_whole(tmp_path) == member


def test_watch_of_a_run_that_is_over_says_its_table(tmp_path, capsys):
    write_run(tmp_path / "20260131-142501-digits", SHORT)
    assert main(["watch", "--runs", str(tmp_path)]) == 0
    assert "per step" in capsys.readouterr().out


def test_watch_waits_for_a_run_to_begin_and_follows_one_after_the_other(
    tmp_path, capsys, monkeypatch
):
    """As a comparison leaves them: a job first, then a run, its summary, the next run."""
    folder = tmp_path / "20260131-142501-compare-digits"
    folder.mkdir()
    write_job(folder, job(SHORT))
    deeds = iter(
        [
            lambda: write_run(folder / "sync-sgd", replace(SHORT, strategy="sync-sgd"), upto=2),
            lambda: write_run(folder / "sync-sgd", replace(SHORT, strategy="sync-sgd")),
            lambda: write_run(folder / "dga", SHORT, upto=2),
            lambda: write_run(folder / "dga", SHORT),
            lambda: write_summary(folder, {"runs": ["sync-sgd", "dga"]}),
        ]
    )
    monkeypatch.setattr("edgetrain.cli.watch.time.sleep", lambda seconds: next(deeds)())
    assert main(["watch", str(folder)]) == 0
    said = capsys.readouterr()
    assert "nothing has begun yet" in said.err
    assert said.out.index("sync-sgd: step 2") < said.out.index("dga: step 2")
    assert re.search(r"sync-sgd .*\ndga .*", said.out), "the closing table"


def test_watch_says_once_that_nothing_comes_any_more(tmp_path, capsys, monkeypatch):
    folder = write_run(tmp_path / "20260131-142501-digits", SHORT, upto=2)
    os.utime(folder / "metrics.jsonl", (0, 0))
    looks = iter(range(3))

    def sleep(seconds):
        if next(looks, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr("edgetrain.cli.watch.time.sleep", sleep)
    assert main(["watch", str(folder)]) == 0
    assert capsys.readouterr().err.count("nothing new for 60 s") == 1


def test_report_writes_a_page_and_does_not_replace_a_file(tmp_path, capsys):
    write_run(tmp_path / "20260131-142501-digits", SHORT)
    plan = tmp_path / "20260131-150000-capacity"  # newer, and no run
    plan.mkdir()
    write_job(plan, job(SHORT))
    page = tmp_path / "page.html"
    assert main(["report", "--runs", str(tmp_path), "-o", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    before = page.stat().st_mtime_ns
    assert main(["report", "--runs", str(tmp_path), "-o", str(page)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert page.stat().st_mtime_ns == before
    assert main(["report", "--runs", str(tmp_path), "-o", str(page), "--force"]) == 0
    assert main(["report", "--runs", str(tmp_path)]) == 0
    assert (tmp_path / "20260131-142501-digits" / "report.html").exists()


@pytest.mark.parametrize("verb", ["watch", "report"])
def test_no_run_is_one_clear_line(tmp_path, capsys, verb):
    assert main([verb, "--runs", str(tmp_path)]) == 2
    assert "no run in" in capsys.readouterr().err
    assert main([verb, str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_page_that_cannot_be_written_is_one_clear_line(tmp_path, capsys):
    run = write_run(tmp_path / "20260131-142501-digits", SHORT)
    assert main(["report", str(run), "-o", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot write" in capsys.readouterr().err
