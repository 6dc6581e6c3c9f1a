"""How a hub process ends: who can read what it leaves, and which of two errors is told."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.jobs.reading import load
from edgetrain.runs import folder as run_folders
from edgetrain.runs.metrics.lines import format_line
from edgetrain.training import hub as hub_module
from edgetrain.training.hub import HubRequest, serve_job
from edgetrain.training.stopping import Stop


def request_in(folder):
    return HubRequest(load(None, ["members=1"]), "tcp://127.0.0.1:0", runs=folder)


def full(*args, **kwargs):
    raise ConfigError("cannot write summary.json: No space left on device", "free some space")


@pytest.mark.parametrize("told", ["cannot be written", None])
def test_what_fails_at_the_end_does_not_replace_what_ended_the_hub(tmp_path, monkeypatch, told):
    def serve(*args, **kwargs):
        if told:
            raise EdgetrainError(f"the journal {told}", "go on with `edgetrain hub --resume`")

    monkeypatch.setattr(hub_module, "serve", serve)
    monkeypatch.setattr(run_folders, "write_summary", full)
    said, warned = [], []
    if told:
        with pytest.raises(EdgetrainError, match=r"cannot be written.*--resume"):
            serve_job(request_in(tmp_path), Stop(), said.append, warned.append)
    else:
        assert serve_job(request_in(tmp_path), Stop(), said.append, warned.append) == 0
        assert said[-1] == "done: 0 rounds"
        assert "no member has contributed anything" in warned.pop()
    assert len(warned) == 1
    assert "no summary: cannot write summary.json" in warned[0]


def test_the_run_folder_of_a_hub_is_for_its_owners_eyes(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_module, "serve", lambda *args: None)
    serve_job(request_in(tmp_path / "runs"), Stop(), lambda line: None, lambda line: None)
    (folder,) = (tmp_path / "runs").iterdir()
    found = [folder, *folder.rglob("*")]
    assert {path.name for path in found} >= {"job.toml", "environment.json", "journal", "lock"}
    for path in found:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def resumed(tmp_path, monkeypatch, journal=True):
    monkeypatch.setattr(hub_module, "serve", lambda *args: None)
    run = tmp_path / "run"
    request = replace(request_in(tmp_path / "others"), resume=run, journal=journal)
    return serve_job(request, Stop(), lambda line: None, lambda line: None)


def tree(folder):
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("kind", ["a member's", "lost", "another folder's", "emptied"])
def test_a_folder_without_a_journal_is_not_resumed_and_not_touched(tmp_path, monkeypatch, kind):
    run, journal = tmp_path / "run", True
    run.mkdir()
    run_folders.write_job(run, request_in(tmp_path).job.to_dict())
    lines = [{"kind": "event", "t": 0.0, "member": "m0", "event": "joined"}]
    if kind == "emptied":
        lines.append({"kind": "round", "t": 1.0, "member": "hub", "round": 0})
        (run / "journal").mkdir()
        (run / "journal" / "lock").touch()
    (run / "metrics.jsonl").write_bytes(b"".join(format_line(line) for line in lines))
    if kind == "another folder's":
        journal = tmp_path / "nowhere"
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match="cannot be resumed: ") as raised:
        resumed(tmp_path, monkeypatch, journal)
    assert f"begin anew, in a folder of its own: edgetrain hub {run}/job.toml" in str(raised.value)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(("recorded", "is_told"), [(7, True), (0, False)])
def test_a_journal_that_is_behind_the_run_is_told(tmp_path, monkeypatch, recorded, is_told):
    """Cut to 0 bytes behind its first snapshot it looks like one that has just begun."""
    monkeypatch.setattr(hub_module, "serve", lambda *args: None)
    run, request = tmp_path / "run", request_in(tmp_path)
    (run / "journal").mkdir(parents=True)
    (run / "journal" / "lock").touch()
    run_folders.write_job(run, request.job.to_dict())
    rounds = [
        {"kind": "round", "t": 1.0, "member": "hub", "round": number} for number in range(recorded)
    ]
    (run / "metrics.jsonl").write_bytes(b"".join(map(format_line, rounds)))
    state = SimpleNamespace(agreed="")
    begun = SimpleNamespace(mended=[], state=state, records=list, close=lambda: None)
    monkeypatch.setattr(hub_module, "Journal", lambda *args: begun)
    monkeypatch.setattr(hub_module.Hub, "restore", lambda *args: None)
    said = []
    serve_job(replace(request, resume=run), Stop(), said.append, said.append)
    told = [line for line in said if "ends after 0 rounds, and 7 are recorded" in line]
    assert len(told) == is_told
    assert any(line.startswith("resumed after 0 rounds") for line in said)


def test_a_hub_that_ended_before_training_begins_when_it_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_module, "serve", lambda *args: None)
    serve_job(request_in(tmp_path / "runs"), Stop(), lambda line: None, lambda line: None)
    next((tmp_path / "runs").iterdir()).rename(tmp_path / "run")
    assert resumed(tmp_path, monkeypatch) == 0
