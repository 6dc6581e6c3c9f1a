"""Groups over several servers: agents, ssh, a server that is lost and one that comes back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_line import TINY

from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.fleet import cluster as clusters
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.placement.decision import decide
from edgetrain.jobs.placement.question import check_trust, cluster_of, question_of
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve
from edgetrain.runs.folder import read_metrics, read_summary
from edgetrain.tasks import weights
from edgetrain.training.servers import crew, far, group
from edgetrain.training.servers.snapshots import latest

# Stands still at some steps until a file is there.
WAITING = (
    TINY
    + """

import time
from pathlib import Path


class Waiting(Tiny):
    def __init__(self, marks="", width=4, seed=0):
        super().__init__(width, seed)
        self.marks = Path(marks)

    def batches_from(self, member, members, batch, seed, start):
        for step, each in enumerate(self.batches(member, members, batch, seed)):
            if step < start:
                continue
            for name, at in (("first", 12), ("second", 22)):
                while self.marks.name and step == at and not (self.marks / name).exists():
                    time.sleep(0.01)
            yield each


class Hungry(Tiny):
    def __init__(self, width=4, seed=0, always=False):
        super().__init__(width, seed)
        self.always = always

    def loss(self, model, batch):
        if torch.distributed.is_initialized() and (self.always or len(batch[0]) > 4):
            torch.empty(1 << 58, dtype=torch.uint8)
        return super().loss(model, batch)
"""
)
SSH = """#!/bin/sh
before=; command=
for word in "$@"; do before="$command"; command="$word"; done
if [ "$1" = -G ]; then
    echo "user $USER"
    if [ "$3" = far-away ]; then echo "hostname 127.0.0.2"; else echo "hostname $3"; fi
    exit
fi
echo "$@" >> "$MARKS/ssh.log"
if [ -e "$MARKS/down" ]; then
    echo "ssh: connect to host $before port 22: No route to host" >&2
    exit 255
fi
echo $$ > "$MARKS/pid"
exec sh -c "$command"
"""
FAR = "127.0.0.2"

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("own_imports")]


@pytest.fixture
def marks(tmp_path, monkeypatch):
    """A folder for marks, and an `ssh` on PATH that runs here."""
    found = tmp_path / "marks"
    found.mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("MARKS", str(found))
    monkeypatch.setattr(crew, "RETRY_S", 0.1)
    return found


def servers(folder, host=FAR, trusted="true", **keys):
    (folder / "waiting.py").write_text(WAITING)
    python = keys.pop("python", sys.executable)
    rest = "".join(f'{key} = "{value}"\n' for key, value in keys.items())
    (folder / "cluster.toml").write_text(
        f'trusted = {trusted}\n[[server]]\nname = "a"\nhost = "local"\naccelerators = 1\n'
        f'[[server]]\nname = "b"\nhost = "{host}"\npython = "{python}"\naccelerators = 1\n{rest}'
    )


def run(folder, name, words=(), watch=lambda: None, task="Waiting"):
    job = load(None, [f"task=waiting:{task}", "members=2", "steps=40", "evaluate_every=40",
                      "servers.snapshot_every=5", "servers.cluster=cluster.toml",
                      "servers.placement=data=2", "optimizer=adamw", *words])  # fmt: skip
    question, cluster = question_of(resolve(job), folder), cluster_of(job, folder)
    found = decide(question).found[0]
    if cluster is not None:
        check_trust(found, cluster, question.servers)
    out = folder / name
    out.mkdir()
    group.run(plan(job, folder), found, out, watch, 0.05, question=question, cluster=cluster)
    return out


def model_of(folder, job_folder):
    task = task_of(load(None, ["task=waiting:Waiting"]), job_folder)
    model = task.model()
    weights.load(model, folder / weights.FILE)
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def test_a_lost_server_is_done_without_and_taken_back(tmp_path, marks, monkeypatch):
    servers(tmp_path)
    out = tmp_path / "lost"

    def watch():
        found = latest(out)
        if found and found[0] == 10 and not (marks / "first").exists():
            (marks / "down").touch()
            os.kill(int((marks / "pid").read_text()), signal.SIGKILL)
            (marks / "first").touch()
        if found and found[0] == 20:
            (marks / "down").unlink(missing_ok=True)

    look = crew.Crew.look_for_lost

    def looked(self):
        look(self)
        if any(side.is_ready for side in self.returning.values()):
            (marks / "second").touch()

    monkeypatch.setattr(crew.Crew, "look_for_lost", looked)
    run(tmp_path, "lost", [f"data.marks={marks}"], watch)
    assert read_summary(out)["attempts"] == 3
    assert read_summary(out)["status"] == "finished"
    told = {r["event"]: r for r in read_metrics(out, "event") if r["event"] in ("gone", "back")}
    assert told["gone"]["about"] == told["back"]["about"] == "b"
    assert "server 'b' was lost" in told["gone"]["reason"]
    assert re.search(r"again, from step \d+, with data=1$", told["gone"]["reason"])
    assert told["back"]["reason"].endswith("with data=2")
    whole = run(tmp_path, "whole", ["servers.cluster="])  # without agents, which import torch
    assert read_summary(whole)["attempts"] == 1
    np.testing.assert_allclose(model_of(out, tmp_path), model_of(whole, tmp_path), atol=1e-5)
    line = (marks / "ssh.log").read_text().splitlines()[0]
    for option in ("BatchMode=yes", "StrictHostKeyChecking=yes", "ServerAliveInterval=5"):
        assert option in line
    assert line.endswith(f"-- {FAR} exec {sys.executable} -m edgetrain.training.servers.agent")


def test_a_job_that_does_not_fit_the_rest_ends_with_what_to_do(tmp_path, marks):
    servers(tmp_path)
    out = tmp_path / "run"

    def watch():
        if latest(out) and not (marks / "down").exists():
            (marks / "down").touch()
            os.kill(int((marks / "pid").read_text()), signal.SIGKILL)
            monkey.setattr(group, "place_again", lambda *given: None)

    with pytest.MonkeyPatch.context() as monkey, pytest.raises(EdgetrainError) as caught:
        run(tmp_path, "run", [f"data.marks={marks}"], watch)
    assert "server 'b' was lost" in str(caught.value)
    assert "does not fit the servers that are left" in str(caught.value)
    assert f"--resume {out}" in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"host": "nowhere.invalid"}, "the host 'nowhere.invalid' cannot be reached"),
        ({"python": "/no/python"}, "server 'b' cannot be reached at 127.0.0.2"),
        ({"interface": "eth77"}, "no network interface 'eth77'"),
        ({"trusted": "false"}, "without encryption or authentication"),
    ],
)
def test_what_cannot_be_started_is_one_line(tmp_path, marks, keys, said):
    servers(tmp_path, **keys)
    with pytest.raises(EdgetrainError) as caught:
        run(tmp_path, "run")
    assert said in str(caught.value)


def test_an_alias_of_ssh_is_a_host(marks):
    entries = [clusters.ServerEntry("a", "local"), clusters.ServerEntry("b", "far-away")]
    here = crew.Crew(SimpleNamespace(servers=entries))
    assert here.address([0, 1]).startswith("127.")


def test_an_unreachable_server_is_said_in_sshs_words(tmp_path, marks):
    servers(tmp_path)
    (marks / "down").touch()
    with pytest.raises(ConfigError, match=r"server 'b' .*No route to host") as caught:
        run(tmp_path, "run")
    assert "BatchMode" in str(caught.value)


def test_other_versions_are_refused(tmp_path, marks, monkeypatch):
    servers(tmp_path)
    theirs = far.versions()
    for name in ("edgetrain", "torch"):
        mine = theirs | {name: "0.0.1+local"}
        monkeypatch.setattr(far, "versions", lambda mine=mine: mine)
        said = rf"server 'b' has {name} .*this machine 0.0.1"
        assert re.search(said, far.disagreement(clusters.ServerEntry("b", FAR), theirs))
    with pytest.raises(ConfigError, match=r"server '.' has torch .*this machine 0.0.1"):
        run(tmp_path, "run")


def test_builds_of_one_version_are_the_same(monkeypatch):
    entry = clusters.ServerEntry("b", FAR)
    theirs = far.versions() | {"torch": far.versions()["torch"].split("+")[0] + "+cu130"}
    assert far.disagreement(entry, theirs) == ""


@pytest.mark.parametrize(("always", "attempts"), [("false", 2), ("true", 2)])
def test_no_memory_at_the_start_takes_the_next_placement_once(tmp_path, always, attempts):
    (tmp_path / "waiting.py").write_text(WAITING)
    words = ["task=waiting:Hungry", "members=2", "batch=4", "steps=6", f"data.always={always}"]
    told = decide(
        question_of(resolve(load(None, [*words, "servers.placement=data=1"])), tmp_path)
    ).found[0]
    job = load(None, [*words, "fallback=when-needed"])
    question, out = question_of(resolve(job), tmp_path), tmp_path / "run"
    out.mkdir()
    ends = pytest.raises(EdgetrainError, match=r"rank r0 .*: out of memory, .* asked for at once")
    with ends if always == "true" else contextlib.nullcontext():
        group.run(plan(job, tmp_path), told, out, question=question)
    assert read_summary(out)["attempts"] == attempts
    reasons = [r["reason"] for r in read_metrics(out, "event") if r["event"] == "error"]
    assert "r0 has no memory for data=1; again, from the beginning, with " in reasons[0]


def test_an_agent_ends_with_its_input():
    command = far.argv_of(clusters.ServerEntry("a", "local"))
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with agent:
        assert json.loads(agent.stdout.readline())["ready"].keys() > {"edgetrain", "torch"}
        agent.stdin.write('{"stop": 7}\n')
        agent.stdin.flush()
        assert json.loads(agent.stdout.readline()) == {"stopped": 7}
        agent.stdin.close()
        assert agent.wait(30) == 0


def test_an_attempt_is_the_same_after_json():
    from edgetrain.training.servers.attempt import Attempt

    job = load(None, ["task=waiting:Waiting", "members=3"])
    attempt = Attempt(1, job, None, Path("/runs/x"), "data=3", 3, socket.gethostname(), 5, 1.5)
    assert Attempt.of(json.loads(json.dumps(attempt.plain()))) == attempt
