"""A hub and two members with keys, 100 ms away: three folders, three processes, one clock."""

from __future__ import annotations

import json
import pickle
import re
import sys
from contextlib import ExitStack

import pytest
from command_line import TINY, running, write_tiny

from edgetrain.__main__ import main
from edgetrain.fleet.networks.emulation.start import emulate
from edgetrain.fleet.networks.profile import load
from edgetrain.runs.folder import read_metrics, read_summary
from edgetrain.runs.reports.live.watch import FolderWatch
from edgetrain.runs.reports.page.story import report_of

pytestmark = pytest.mark.real

IN_ITS_NETWORK = """\
import os, pickle, sys
pickle.loads(bytes.fromhex(sys.argv[1])).enter()
os.execv(sys.executable, [sys.executable, "-m", "edgetrain", *sys.argv[2:]])
"""
ROUND_TRIP_S = 0.1
OFF_S = 0.1
"""How far what a member says may lie from what the hub says of the same exchange."""
STEPS, EVERY, DELAY = 60, 5, 10


def told(capsys, *words):
    """What a verb prints."""
    assert main(list(words)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.fixture
def job(tmp_path, capsys):
    """A job of two members; the hub's public key, with two devices on its list."""
    path = write_tiny(
        tmp_path, data={"width": 2000}, fleet={"members": 2, "pace_s": 0.02},
        train={"steps": STEPS},
        strategy={"name": "dga", "local_steps": EVERY, "delay": DELAY, "final_sync": 0},
    )  # fmt: skip
    (tmp_path / "tiny.py").write_text(TINY.replace('"lower", None', '"lower", 1e9'))
    public = {
        name: json.loads(told(capsys, "keys", "init", "--keys", str(tmp_path / name), "--json"))
        for name in ("hub", "pi-0", "pi-1")
    }
    for name in ("pi-0", "pi-1"):
        key = public[name]["public"]
        told(capsys, "keys", "enroll", name, "--key", key, "--keys", str(tmp_path / "hub"))
    return path, public["hub"]["public"]


def trained(job, cwd):
    """The folders of the hub and of its members, each a process in an emulated network (of its
    own where namespaces are allowed)."""
    path, public = job
    with ExitStack() as stack:
        net = stack.enter_context(emulate([load("wan-100ms")] * 2))

        def begin(place, verb, *words):
            inside = sys.executable, "-c", IN_ITS_NETWORK, pickle.dumps(place).hex()
            return stack.enter_context(running(verb, path, *words, cwd=cwd, program=inside))

        hub = begin(net.hub_attachment(), "hub", "--bind", net.hub_address, "--keys", "hub")
        hub.until("members join")
        members = []
        for i in range(2):
            place = net.attachment(i)
            words = ["--index", str(i), "--keys", f"pi-{i}", "--hub-key", public]
            members.append(begin(place, "member", "--hub", place.address, *words))
        assert [member.finish(100) for member in members] == [0, 0], [m.said for m in members]
        assert hub.finish() == 0, hub.said
    return sorted((cwd / "runs").iterdir(), key=lambda folder: folder.name.split("-")[-1])


def exchanges_in(trace):
    """For each thread and round of a trace: when it was handed over, answered and applied."""
    found = {}
    for event in trace:
        if event["ph"] in "bne":
            (number,) = re.findall(r"round (\d+)", event["name"])
            key = event["tid"], int(number)
            found.setdefault(key, {})[event["ph"]] = event["ts"] / 1e6
    return found


def check_task(folders):
    """The task's own target is known where the task is, and in the run that all folders are."""
    hub, member, _ = map(read_summary, folders)
    own = member["metric"], member["better"], member["target"]
    assert own == ("loss", "lower", 1e9)
    assert member["target_seconds"] is not None
    assert hub["target"] is None
    (story,) = report_of(folders)
    assert [story.summary[key] for key in ("metric", "better", "target")] == [*own]
    assert story.summary["target_seconds"] == member["target_seconds"]
    # A member's own folder says how long rounds are.
    assert (member["local_steps"], member["delay"]) == (EVERY, DELAY)
    watch = FolderWatch(folders[1])
    watch.read()
    state = watch.state()
    assert (state.data.local_steps, state.data.delay, state.metric) == (EVERY, DELAY, "loss")


def test_folders_of_three_machines_lie_on_one_clock(job, tmp_path, capsys):
    folders = trained(job, tmp_path)
    check_task(folders)
    names = [str(folder) for folder in folders]
    told(capsys, "report", *names, "-o", str(tmp_path / "r.html"), "--trace", str(tmp_path / "t"))
    trace = json.loads((tmp_path / "t").read_text("utf-8"))["traceEvents"]
    threads = {e["args"]["name"]: e["tid"] for e in trace if e["name"] == "thread_name"}
    assert sorted(threads) == ["hub", "m0 pi-0", "m1 pi-1"], "one run, one line of time"
    assert len({event["pid"] for event in trace}) == 1
    rounds = {record["round"]: record for record in read_metrics(folders[0], "round")}
    found = exchanges_in(trace)
    assert len(found) == 2 * len(rounds) == 2 * STEPS // EVERY
    up, down = [], []
    for (_, number), at in found.items():
        # A reply leaves when all contributions are there, and arrives after it left.
        assert at["b"] < rounds[number]["t"] + OFF_S
        assert at["n"] <= at["e"]
        down.append(at["n"] - rounds[number]["t"])
    for number, record in rounds.items():
        first = min(at["b"] for (_, which), at in found.items() if which == number)
        up.append(record["t"] - record["close_s"] - first)
    # What a busy machine adds is not the clocks': of all exchanges the one that it held up least.
    assert min(up) + min(down) == pytest.approx(ROUND_TRIP_S, rel=0.3)
    assert abs(min(up) - ROUND_TRIP_S / 2) < OFF_S, (up, down)
    assert abs(min(down) - ROUND_TRIP_S / 2) < OFF_S, (up, down)
