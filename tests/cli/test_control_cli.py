"""`edgetrain control`: a job that is paused, goes on although its hub is killed, and is ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
from pathlib import Path

import pytest
from command_line import edgetrain, running, write_tiny
from hub_runs import free_port, hub_folder, wait_for_rounds

from edgetrain.__main__ import main
from edgetrain.runs.folder import ORDERS, read_metrics

pytestmark = pytest.mark.real


def rounds_of(folder: Path) -> int:
    return len(list(read_metrics(folder, "round")))


def told(capsys, folder: Path, *words: str) -> dict:
    capsys.readouterr()
    assert main(["control", str(folder), *words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_a_job_is_paused_resumed_and_ended(tmp_path, capsys):
    job = write_tiny(
        tmp_path,
        fleet={"members": 3, "pace_s": 0.002},
        train={"steps": 1_000_000},
        strategy={"name": "dga", "local_steps": 2, "delay": 4},
        hub={"heartbeat_s": 0.1, "fsync": "never"},
    )
    at = f"tcp://localhost:{free_port()}"
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(running("hub", job, "--bind", at, cwd=tmp_path))
        hub.until("members join")
        first, second, third = (
            stack.enter_context(
                running("member", job, "--hub", at, "--index", str(index), cwd=tmp_path)
            )
            for index in range(3)
        )
        folder = hub_folder(tmp_path)
        wait_for_rounds(folder, 3)
        assert stat.S_IMODE((folder / ORDERS).stat().st_mode) == 0o600
        paused = told(capsys, folder, "pause")
        assert (paused["course"], paused["members"]) == ("paused", ["m0", "m1", "m2"])
        hub.process.send_signal(signal.SIGKILL)
        hub.finish()
        assert main(["control", str(folder), "pause"]) == 2
        assert "its hub has ended" in capsys.readouterr().err
        with running("hub", "--resume", str(folder), "--bind", at, cwd=tmp_path) as again:
            again.until("resumed after")
            again.until("back")
            at_round = told(capsys, folder, "pause")["round"]
            assert at_round == paused["round"]
            assert told(capsys, folder, "remove", "m2")["members"] == ["m0", "m1"]
            assert third.finish() == 2
            assert main(["control", str(folder), "remove", "m7"]) == 2
            assert "no member 'm7' is in" in capsys.readouterr().err
            assert told(capsys, folder, "resume")["course"] == ""
            wait_for_rounds(folder, at_round + 3)
            assert told(capsys, folder, "stop")["course"] == "stopped"
            assert [first.finish(), second.finish()] == [0, 0], first.said + second.said
            assert again.finish() == 0, again.said
    assert list(tmp_path.glob("runs/*/model.safetensors")), "the member that evaluates keeps it"
    assert not (folder / ORDERS).exists()
    assert main(["control", str(folder), "resume"]) == 2
    assert "its hub has ended" in capsys.readouterr().err


def test_a_run_on_this_machine_loses_a_member_by_order_and_is_ended(tmp_path, capsys):
    job = write_tiny(
        tmp_path, fleet={"members": 3, "pace_s": 0.002}, train={"steps": 1_000_000},
        strategy={"name": "dga"},
    )  # fmt: skip
    with running("run", job, cwd=tmp_path) as run:
        run.until("step")
        (folder,) = (tmp_path / "runs").iterdir()
        wait_for_rounds(folder, 2)
        told(capsys, folder, "remove", "m1")
        told(capsys, folder, "stop")
        assert run.finish() == 0, run.said
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["members_lost"]) == ("finished", [])
    assert summary["members_removed"] == ["m1"]
    assert "dga: people removed m1" in run.said
    assert (folder / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("missing", "pause"), "missing is no run folder"),
        ((".", "pause"), ". is no run folder: it has no job.toml"),
        (("members", "stop"), "no hub runs in members: it is a member's, or its hub has ended"),
        (("members", "remove"), "say `control RUN remove MEMBER`"),
        (("members", "pause", "m1"), "say `control RUN remove MEMBER`"),
        (("members", "dance"), "invalid choice: 'dance'"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(words, said, tmp_path):
    (tmp_path / "members").mkdir()
    (tmp_path / "members" / "job.toml").touch()
    done = edgetrain("control", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1 or "invalid choice" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_hub_is_not_told(tmp_path, monkeypatch):
    from edgetrain.errors import ConfigError
    from edgetrain.training.orders import Orders, give_order

    orders = Orders(tmp_path)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)  # one of them may be /tmp itself
    monkeypatch.chdir(tmp_path)
    os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match="only its owner may tell its hub"):
            give_order(Path(), ["stop"])
    finally:
        os.seteuid(0)
        orders.close()
