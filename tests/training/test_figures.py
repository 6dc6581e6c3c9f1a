"""The figure of a fleet: who takes it, who hears of it, and when it was true."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import children
import numpy as np
import pytest
from command_line import edgetrain, write_tiny
from hypothesis import given
from hypothesis import strategies as st
from patience import patience

from edgetrain import codecs
from edgetrain.exchange.hub.effects import Evaluated, Send
from edgetrain.exchange.hub.evaluators import DONE
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.messages import (
    PROTOCOL,
    Base,
    Contribute,
    Evaluate,
    Figure,
    Join,
    Leave,
    unpack,
)
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.jobs.building import hub_of
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve
from edgetrain.runs.folder import read_job, read_metrics, read_summary
from edgetrain.runs.metrics.lines import figures, told_evaluation
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.runs.reports.comparison import compare
from edgetrain.runs.reports.comparison_table import text
from edgetrain.runs.reports.listing import listed
from edgetrain.runs.reports.live.watch import FolderWatch
from edgetrain.runs.reports.message import message
from edgetrain.runs.reports.page.document import document
from edgetrain.runs.reports.page.story import report_of
from edgetrain.runs.reports.plot.runs import heading_of
from edgetrain.strategies import find
from edgetrain.strategies.merging.rule import Mean
from edgetrain.training.hub import HubRequest, job_to_resume, serve_job
from edgetrain.training.member.train import Place, train
from edgetrain.training.stopping import Stop
from edgetrain.vectors.vector import checksum

# -- a hub of its own ----------------------------------------------------------------------------

WORDS = ["members=2", "steps=30", "local_steps=3", "hub.heartbeat_s=0.05"]


@pytest.fixture
def sent(monkeypatch):
    """The messages of all members, in order."""
    found, send = [], MemberSocket.send

    def noting(self, frames):
        found.append([bytes(frame) for frame in frames])
        return send(self, frames)

    monkeypatch.setattr(MemberSocket, "send", noting)
    return found


def train_fleet(folder: Path, *more: str, any_job: bool = False) -> Path:
    """Serve a hub and train its members, all in threads; the hub's run folder."""
    job, said = load(None, [*WORDS, *more]), []
    runs = folder / "runs"
    request = HubRequest(
        job, "tcp://127.0.0.1:0", insecure=True, any_job=any_job, journal=False, runs=runs
    )

    def serve():
        serve_job(request, Stop(), said.append, said.append)

    def member(index):
        until = time.monotonic() + patience(20)
        while not any("waiting for" in line for line in said):
            assert time.monotonic() < until
            time.sleep(0.01)
        address = next(word for line in said for word in line.split() if word.startswith("tcp://"))

        def log(name, began):
            return MetricsLog(folder / f"{name}.jsonl", name, time.monotonic, began)

        train(resolve(job), Place(index, "host"), address, log)

    children.in_threads(serve, *(functools.partial(member, i) for i in range(2)))
    (found,) = runs.iterdir()
    return found


@pytest.mark.real
def test_a_hub_shows_the_figure_of_its_fleet(tmp_path, sent):
    folder = train_fleet(tmp_path, "strategy=dga", "target=0.1")
    summary = read_summary(folder)
    own = list(read_metrics(folder, "eval"))
    assert not own, "a hub does not evaluate"
    *_, last = (unpack(frames) for frames in sent if frames[0] == Figure.kind)
    assert summary["final"] == {"accuracy": last.value}
    assert (summary["metric"], summary["better"]) == ("accuracy", "higher")
    assert 0.1 < last.value < 1
    assert last.step == 30
    assert summary["final_seconds"] == pytest.approx(last.t_ms / 1000, abs=0.01)
    assert 0 < summary["target_seconds"] <= summary["final_seconds"]
    shown = f"{100 * last.value:.1f} %"
    assert shown in text(compare([summary]))
    watch = FolderWatch(folder)
    watch.read()
    assert watch.state().figure == last.value
    stories = report_of([folder])
    assert shown in document(stories)
    assert stories[0].evaluations[-1]["accuracy"] == last.value


@pytest.mark.real
def test_only_the_member_that_evaluates_speaks_of_it(tmp_path, sent):
    train_fleet(tmp_path, "strategy=fedavg")
    figures = [unpack(frames) for frames in sent if frames[0] == Figure.kind]
    assert 2 <= len(figures) <= 3, "with the first status and with the last"
    assert {line["about"] for line in read_metrics(next((tmp_path / "runs").iterdir()), "figure")} \
        == {"m0"}  # fmt: skip


@pytest.mark.real
@pytest.mark.parametrize(
    "words",
    [
        ("privacy=member", "privacy.noise=0.01", "privacy.clip=10", "strategy=local-sgd"),
        ("strategy=fedavg", "secure=true"),
    ],
    ids=["privacy", "masks"],
)
def test_no_figure_leaves_a_member_with_privacy_or_masks(tmp_path, sent, words):
    if "secure=true" in words:
        pytest.importorskip("cryptography", reason="masks need edgetrain[private]")
        words = (*words, "strategy.threshold=2")
    folder = train_fleet(tmp_path, *words)
    told = [unpack(frames) for frames in sent if frames[0] == Figure.kind]
    assert told, "that it evaluates is no secret"
    assert set(told) == {Figure()}
    assert read_summary(folder)["final"] == {}
    assert not list(read_metrics(folder, "figure"))


@pytest.mark.real
def test_a_hub_of_any_job_claims_no_task_and_no_network(tmp_path):
    folder = train_fleet(tmp_path, "strategy=dga", "delay=auto", "steps=24", any_job=True)
    assert "task" not in (job := read_job(folder))
    assert job["fleet"] == {"members": 2}
    summary = read_summary(folder)
    assert (summary["task"], summary["network"], summary["device"]) == (None, None, None)
    assert 0 < summary["final"]["accuracy"] < 1
    page = document(report_of([folder]))
    about = page.partition('<p class="about">')[2].partition("<")[0]
    assert about.startswith("2 members, 24 steps; began ")
    assert heading_of(summary) == "2 members"
    (entry,) = listed(folder)
    assert (entry.task, entry.network) == ("-", "-")
    watch = FolderWatch(folder)
    watch.read()
    assert watch.state().steps is None
    # what is left out does not change what --resume goes on with
    resumed, begun = job_to_resume(folder, []), load(None, [*WORDS, "steps=24", "delay=auto"])
    assert resumed.strategy == begun.strategy
    assert hub_of(resolve(resumed), any_job=True).terms == \
        hub_of(resolve(begun), any_job=True).terms  # fmt: skip


@given(st.text(), st.one_of(st.floats(), st.none()), st.one_of(st.floats(), st.text()))
def test_a_figure_replaces_none_of_a_lines_own_keys(metric, value, at):
    told = told_evaluation(
        {"kind": "figure", "t": 5.0, "member": "hub", "about": "m1", "metric": metric,
         "value": value, "at": at, "step": 3}
    )  # fmt: skip
    if value is None:
        assert told is None
    else:
        assert (told["kind"], told["member"]) == ("eval", "m1")
        assert isinstance(told["t"], float)
        assert set(figures(told)) <= {metric}


# -- who evaluates -------------------------------------------------------------------------------

ZEROS = np.zeros(3, np.float32)


def hub_of_three():
    hub = Hub(
        Terms(find("dga"), 1), Policy(3, status_s=5.0), Mean(), codecs.Dense(), codecs.Dense()
    )  # fmt: skip
    for name in "abc":
        join = Join(PROTOCOL, "", "model", 3, name, 1.0, checksum(ZEROS), ord(name))
        hub.handle(name.encode(), join, 0.0)
    hub.handle(b"a", Base(0, 1, ZEROS.tobytes()), 0.0)
    assert hub.started
    return hub


def asked(effects):
    return [e.to for e in effects if isinstance(e, Send) and isinstance(e.message, Evaluate)]


def test_another_member_is_asked_when_the_one_that_evaluates_is_gone():
    hub = hub_of_three()
    assert asked(hub.tick(1.0)) == []
    (said,) = hub.handle(b"b", Figure("loss", 2.0, True, 0, 1), 1.0)
    assert said == Evaluated("b", Figure("loss", 2.0, True, 0, 1))
    assert asked(hub.handle(b"c", Leave("it was asked to stop"), 1.2)) == []
    assert asked(hub.handle(b"b", Leave("TaskError: no"), 1.4)) == [b"a"]
    assert asked(hub.tick(5.0)) == [b"a"], "what was sent may have been lost"
    hub.handle(b"a", Figure(), 5.1)
    assert asked(hub.tick(10.0)) == []


def test_at_the_end_nobody_is_asked():
    hub = hub_of_three()
    hub.handle(b"a", Figure(), 1.0)
    assert asked(hub.handle(b"a", Leave(DONE), 2.0)) == []
    assert asked(hub.tick(10.0)) == []


def test_a_member_that_goes_on_behind_the_last_round_of_the_others_is_asked():
    """Its base is the fleet's last, and no longer that of the one that has evaluated and left."""
    hub = hub_of_three()
    hub.handle(b"a", Figure(), 1.0)
    for round in range(3):
        for name in "abc" if round < 2 else "bc":
            known = checksum(ZEROS)  # nothing but zeros is added
            given = Contribute(round, 0, 1, 1.0, hub.round, known, 0, ZEROS.tobytes())
            hub.handle(name.encode(), given, 1.0)
        if round == 1:
            assert asked(hub.handle(b"a", Leave(DONE), 2.0)) == []
    assert asked(hub.tick(10.0)) == [b"b"]
    hub.handle(b"b", Figure(), 11.0)
    assert asked(hub.tick(20.0)) == []


# -- a member that evaluates fails ---------------------------------------------------------------

FAILS = """
from tiny import Tiny as Plain


class Tiny(Plain):
    def batches(self, member, members, batch, seed):
        for count, found in enumerate(super().batches(member, members, batch, seed)):
            if member == 0 and count == 20:
                raise OSError("the disk is gone")
            yield found
"""


@pytest.mark.real
def test_when_the_member_that_evaluates_fails_another_goes_on(tmp_path):
    write_tiny(tmp_path)
    (tmp_path / "fails.py").write_text(FAILS)
    (tmp_path / "job.toml").write_text('task = "fails:Tiny"\n')
    words = ["members=3", "steps=120", "pace_s=0.02", "evaluate_every=5", "strategy=fedavg"]
    done = edgetrain("run", "job.toml", *words, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    summary = read_summary(folder)
    assert summary["status"] == "incomplete"
    evaluations = list(read_metrics(folder, "eval"))
    assert {line["member"] for line in evaluations[:2]} == {"m0"}
    *others, last = [line for line in evaluations if line["member"] != "m0"]
    assert len({line["member"] for line in others}) == 1
    assert last["step"] == 120
    assert len(others) > 10
    assert summary["final_seconds"] == last["t"] > 0.9 * summary["seconds"]
    (error,) = (e for e in read_metrics(folder, "event") if e["event"] == "error")
    assert error["about"] == "m0"
    assert error["t"] < others[1]["t"], "dated when it failed, not when the run was over"
    assert (folder / "model.safetensors").exists()


def summary_with(**more):
    return {
        "name": "run", "strategy": "dga", "metric": "loss", "better": "lower", "target": None,
        "status": "incomplete", "final": {"loss": 0.552}, "target_seconds": None,
        "target_steps": None, "steps": 60, "seconds": 3.8, "compute_s": 0.1, "wait_s": 0.0,
        "overhead_s": 0.0, "sent_bytes": 0, "received_bytes": 0, "joules": None,
        "joules_source": None, "members_lost": [], "emulation": None, **more,
    }  # fmt: skip


def test_a_figure_is_said_with_its_own_time():
    told = message(compare([summary_with(final_seconds=1.4)]))
    assert told.startswith("dga: loss 0.552 after 1.4 s of 3.8 s (")
    assert "after 3.8 s (" in message(compare([summary_with(final_seconds=3.79)]))
    assert "after 3.8 s (" in message(compare([summary_with()])), "an older folder"
