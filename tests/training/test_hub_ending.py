"""How a hub process ends: who can read what it leaves, and which of two errors is told."""

from __future__ import annotations

import pytest

from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.jobs.reading import load
from edgetrain.runs import folder as run_folders
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
