"""The verbs that look at run folders: runs, watch and report."""

from __future__ import annotations

import json

import pytest
from made_up_runs import DGA, SYNC, replace, write_comparison, write_run

from edgetrain.__main__ import main

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


def test_watch_of_a_run_that_is_over_ends_with_its_table(tmp_path, capsys):
    write_run(tmp_path / "20260131-142501-digits", SHORT)
    assert main(["watch", "--runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "step 20" in out
    assert "per step" in out


def test_report_writes_a_page_and_does_not_replace_a_file(tmp_path, capsys):
    write_run(tmp_path / "20260131-142501-digits", SHORT)
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
